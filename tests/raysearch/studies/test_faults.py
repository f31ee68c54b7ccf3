"""Studies on Ray that are stopped, killed, robbed of a host or of disk space, and resumed: nothing is lost.

Their black box answers about as many strategies as a test lets pass and then waits, so that whatever happens comes in
the middle of a known call however busy the machine is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.studies.study_status import read_status
from tests.conftest import command_environment, raysearch_command
from tests.processes import LONGEST_S, descendants, started_by, wait_until
from tests.raysearch.gated import (
    digests,
    holds_rows,
    process_of,
    rows_of,
    undisturbed,
    wait_for_rows,
    write_study,
)
from tests.raysearch.gated import let_pass as let_pass

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

Start = Callable[..., "subprocess.Popen[str]"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_study_survives_a_hangup_a_move_and_deaths_of_its_host_its_driver_its_cluster_a_run_and_its_ray(
    tiny_workload: Path, tmp_path: Path, start: Start, let_pass: Callable[[int], None], cluster: Cluster
) -> None:
    study, out = write_study(tmp_path, tiny_workload), tmp_path / "out"
    alone = ("study", study, "--set", "cpus=2", "--json", "--out")
    on_cluster = ("study", study, "--set", f"address={cluster.address}", "--json", "--resume", "--out")

    let_pass(10)
    hung_up = start(*alone, out)
    wait_for_rows(hung_up, out, 10)
    assert read_status(out).state == "running"
    wait_for_title(hung_up, "tiny-annealing-s0")
    started = descendants(hung_up.pid)
    assert not [title for pid, title in started.items() if "/torch/" in Path(f"/proc/{pid}/maps").read_text()]
    os.killpg(hung_up.pid, signal.SIGHUP)  # as a terminal that is closed does: to Ray's processes too
    assert_stopped(hung_up, signal.SIGHUP, f"raysearch study {study} --out {out} ")
    status = read_status(out)
    assert [run.state for run in status.runs] == ["interrupted", "waiting"]
    assert status.runs[0].calls == rows_of(out) >= 10

    moved = tmp_path / "moved"
    out.rename(moved)
    host = cluster.add_node(**HOST)
    killed = start(*on_cluster, moved)
    let_pass(25)
    wait_for_rows(killed, moved, 25)
    host.all_processes["raylet"][0].process.kill()
    cluster.add_node(**HOST)
    let_pass(40)
    wait_for_rows(killed, moved, 40)

    killed.kill()  # the run, on a host of its own, lives on for a second or two, beside the one that is resumed
    resumed = start(*on_cluster, moved)
    let_pass(70)
    wait_for_rows(resumed, moved, 70)
    cluster.head_node.all_processes["gcs_server"][0].process.kill()
    _, stderr = resumed.communicate(timeout=LONGEST_S)
    assert resumed.returncode == 2, stderr
    assert "note: the Ray cluster has died" in stderr
    assert "no Ray cluster answers" in stderr
    assert f"every call so far is kept. Go on with: raysearch study {study} --out {moved} " in stderr

    last = start(*alone, moved, "--resume")
    let_pass(80)
    wait_for_rows(last, moved, 80)
    # Runs of the cluster may live on for a while and make these calls.
    wait_until(lambda: any(holds_rows(pid, moved) for pid in descendants(last.pid)))
    (run,) = (pid for pid in descendants(last.pid) if holds_rows(pid, moved))
    os.kill(run, signal.SIGKILL)
    let_pass(90)
    wait_for_rows(last, moved, 90)
    kill_until_another_runs(last, "raylet")
    let_pass(1000)
    printed, stderr = last.communicate(timeout=2 * LONGEST_S)
    assert last.returncode == 0, stderr
    assert stderr.count("note: Ray has died") == 1
    straight = undisturbed(tiny_workload, tmp_path / "alone")
    assert {run["searcher"]: run["digest"] for run in json.loads(printed)["runs"]} == straight
    assert digests(moved) == straight


HOST = {"num_cpus": 2, "object_store_memory": 100 * 1024**2}


@pytest.fixture
def cluster(  # the environment of `let_pass` is inherited by the hosts
    let_pass: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """A head without CPUs: whatever runs is on the hosts that are added."""
    from ray.cluster_utils import Cluster

    from raysearch.processes.connection import CLUSTERS_VARIABLE
    from raysearch.processes.ray_internals import without_what_nobody_asks

    monkeypatch.setenv(CLUSTERS_VARIABLE, "0")  # for drivers: the hosts are all at 127.0.0.1
    head = {**HOST, "num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with without_what_nobody_asks():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k tmpfs {disk}
set +e
{study}
echo code $? >&2
cp -r {disk}/out {kept}
"""


def test_a_full_disk_stops_a_study_with_one_message_and_what_is_there_is_whole(
    tiny_workload: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    study = write_study(tmp_path, tiny_workload, searchers=["annealing"], budget=1500)
    study.write_text(re.sub("simulator = .*\n", "", study.read_text()))
    command = shlex.join(raysearch_command("study", study, "--out", tmp_path / "disk/out", "--set", "cpus=1"))
    script = FULL_DISK.format(disk=tmp_path / "disk", study=command, kept=tmp_path / "kept")
    done = subprocess.run(mounting(script), capture_output=True, text=True, env=command_environment(), timeout=600)
    assert re.findall(r"code (\d)\n", done.stderr) == ["1"], done.stderr
    (error,) = re.findall("^error: .*$", done.stderr, re.MULTILINE)
    assert "No space left on device" in error
    assert "--resume" in error
    assert "Traceback" not in done.stderr
    spec = RunSpec(str(tiny_workload), "annealing", seed=0, budget=1500)
    ends = []
    for folder, resume in ((tmp_path / "kept/runs/tiny-annealing-s0", True), (tmp_path / "straight", False)):
        run = SearchRun(spec, folder, resume=resume)
        run.advance(1500)
        ends.append(run.finish()["digest"])
    assert ends[0] == ends[1]


def mounting(script: str) -> list[str]:
    """The command that runs a script with mounts of its own; skips the test where that is not allowed."""
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, "mount -t tmpfs none /mnt"], check=False).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    return [*own, script]


def assert_stopped(process: subprocess.Popen[str], signum: signal.Signals, going_on: str) -> None:
    """Makes sure that a command that was told to stop says so once, and how to go on, and leaves nothing behind."""
    started = started_by(process.pid)
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 128 + signum, stderr
    assert stderr.count("every call so far is kept. Go on with: ") == 1, stderr
    assert going_on in stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert all(each.ended for each in started)


def wait_for_title(process: subprocess.Popen[str], text: str) -> None:
    """Waits until something that a command has started has a title that holds the text."""
    deadline = time.monotonic() + LONGEST_S
    while not any(text in title for title in descendants(process.pid).values()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {text} in {descendants(process.pid)} after {LONGEST_S} s"
        time.sleep(0.05)


def kill_until_another_runs(process: subprocess.Popen[str], name: str) -> None:
    """Kills a process of a Ray, and returns when the command has started another Ray."""
    os.kill(killed := process_of(process, name), signal.SIGKILL)
    deadline = time.monotonic() + LONGEST_S
    while not any(f"/{name}\0" in title for pid, title in descendants(process.pid).items() if pid != killed):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no other {name} after {LONGEST_S} s"
        time.sleep(0.05)
