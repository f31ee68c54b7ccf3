"""Studies on Ray that are interrupted, killed, robbed of a host or of disk space, and resumed: nothing is lost."""

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
from typing import TYPE_CHECKING, Any

import pytest

from envs.rows import read_rows
from raysearch.records import RunSpec
from raysearch.results import read_runs
from raysearch.run import SearchRun
from tests.conftest import command_environment, raysearch_command
from tests.processes import descendants

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

Start = Callable[..., "subprocess.Popen[str]"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEARCHERS = ["ppo_paper", "annealing"]
BUDGET = 1500


@pytest.fixture(scope="module")
def undisturbed(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of the runs made one by one, in this process."""
    return {
        searcher: alone(tiny_workload, searcher, BUDGET, tmp_path_factory.mktemp("alone")) for searcher in SEARCHERS
    }


def alone(workload: Path, searcher: str, budget: int, folder: Path) -> str:
    run = SearchRun(RunSpec(str(workload), searcher, seed=0, budget=budget), folder / searcher)
    run.advance(budget)
    return run.finish()["digest"]


def write_study(folder: Path, workload: Path, **changes: Any) -> Path:
    keys = {"name": "test", "workloads": [str(workload)], "seeds": [0], "searchers": SEARCHERS, "budget": BUDGET}
    path = folder / "study.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {**keys, **changes}.items()))
    return path


def digests(out: Path) -> dict[str, str]:
    """Of the runs of a finished study, whose rows are counted too: each call once."""
    runs = read_runs(out)
    for run in runs:
        assert run["complete"]
        assert list(read_rows(out / "runs" / run["run_id"])["call"]) == list(range(1, run["budget"] + 1))
    return {run["searcher"]: run["digest"] for run in runs}


def test_a_study_survives_every_signal_a_move_and_a_killed_run(
    tiny_workload: Path, tmp_path: Path, start: Start, undisturbed: dict[str, str]
) -> None:
    study, out = write_study(tmp_path, tiny_workload, report_every=50), tmp_path / "out"
    command = ("study", study, "--out", out, "--cpus", "1", "--json")

    interrupted = start(*command)
    wait_for_rows(interrupted, out, 150)
    os.killpg(interrupted.pid, signal.SIGINT)  # as a terminal does: to Ray's processes too
    _, said = interrupted.communicate(timeout=150)
    assert interrupted.returncode == 130, said
    assert f"raysearch study {study} --out {out} --cpus 1 --resume" in said
    kept = rows_of(out)
    assert kept >= 150

    terminated = start(*command, "--resume")
    wait_for_rows(terminated, out, kept + 150)
    terminated.terminate()
    _, said = terminated.communicate(timeout=150)
    assert terminated.returncode == 143, said
    kept = rows_of(out)

    killed = start(*command, "--resume")
    wait_for_rows(killed, out, kept + 150)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    moved = tmp_path / "moved"
    out.rename(moved)
    mended = start("study", study, "--out", moved, "--cpus", "1", "--json", "--resume")
    kill_a_run(mended, moved)
    printed, said = mended.communicate(timeout=300)
    assert mended.returncode == 0, said
    assert {run["searcher"]: run["digest"] for run in json.loads(printed)["runs"]} == undisturbed
    assert digests(moved) == undisturbed


def test_a_run_moves_from_a_host_that_dies_and_goes_on_without_a_driver_that_was_killed(
    cluster: Cluster, tiny_workload: Path, tmp_path: Path, start: Start, undisturbed: dict[str, str]
) -> None:
    study, out = write_study(tmp_path, tiny_workload, report_every=50), tmp_path / "out"
    command = ("study", study, "--out", out, "--address", cluster.address, "--json")
    host = cluster.add_node(**HOST)

    killed = start(*command)
    wait_for_rows(killed, out, 150)
    (raylet,) = host.all_processes["raylet"]
    raylet.process.kill()
    kept = rows_of(out)
    cluster.add_node(**HOST)
    wait_for_rows(killed, out, kept + 150)

    killed.kill()  # the run, on a host of its own, lives on for a second or two, beside the one that is resumed
    resumed = start(*command, "--resume")
    printed, said = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said
    assert {run["searcher"]: run["digest"] for run in json.loads(printed)["runs"]} == undisturbed
    assert digests(out) == undisturbed


HOST = {"num_cpus": 1, "object_store_memory": 100 * 1024**2}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs: whatever runs is on the hosts that are added."""
    from ray.cluster_utils import Cluster

    head = {**HOST, "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k tmpfs {disk}
set +e
{study}
echo code $? >&2
mount -o remount,size=100m {disk}
{study} --resume
echo code $? >&2
cp -r {disk}/out {kept}
"""


def test_a_full_disk_stops_a_study_with_one_message_until_there_is_room_again(
    tiny_workload: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    (tmp_path / "disk").mkdir()
    study = write_study(tmp_path, tiny_workload, searchers=["annealing"])
    command = shlex.join(raysearch_command("study", study, "--out", tmp_path / "disk/out", "--cpus", "1"))
    script = FULL_DISK.format(disk=tmp_path / "disk", study=command, kept=tmp_path / "kept")
    done = subprocess.run(mounting(script), capture_output=True, text=True, env=command_environment(), timeout=600)
    full, *_ = re.split(r"code \d\n", done.stderr)
    assert re.findall(r"code (\d)\n", done.stderr) == ["1", "0"], done.stderr
    (error,) = re.findall("^error: .*$", full, re.MULTILINE)
    assert "No space left on device" in error
    assert "--resume" in error
    assert "Traceback" not in full
    assert digests(tmp_path / "kept") == {"annealing": undisturbed["annealing"]}


def mounting(script: str) -> list[str]:
    """The command that runs a script with mounts of its own; skips the test where that is not allowed."""
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, "mount -t tmpfs none /mnt"], check=False).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    return [*own, script]


def rows_of(out: Path) -> int:
    """Rows on disk so far, in all runs."""
    rows = [path.read_bytes().count(b"\n") for path in out.glob("runs/*/rows.jsonl")]
    return sum(rows) + sum(len(read_rows(path.parent)) for path in out.glob("runs/*/rows.parquet"))


def wait_for_rows(process: subprocess.Popen[str], out: Path, rows: int) -> None:
    deadline = time.monotonic() + 150
    while rows_of(out) < rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{rows_of(out)} of {rows} rows after 150 s"
        time.sleep(0.02)


def kill_a_run(process: subprocess.Popen[str], out: Path) -> None:
    """Kills the process that makes the calls of the run under way: it holds the rows, in a call or between two."""
    wait_for_rows(process, out, rows_of(out) + 150)
    deadline = time.monotonic() + 150
    while not (pids := [pid for pid in descendants(process.pid) if holds_rows(pid, out)]):  # one run, then the next
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no process holds the rows of a run"
        time.sleep(0.02)
    os.kill(pids[0], signal.SIGKILL)


def holds_rows(pid: int, out: Path) -> bool:
    """Whether a process has the rows of a run open."""
    try:
        held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it has ended, or closed a file meanwhile
        return False
    return any(text.startswith(f"{out}/") and text.endswith("rows.jsonl") for text in held)
