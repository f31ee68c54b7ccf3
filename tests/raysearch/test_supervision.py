"""Commands that are told to stop, at any moment and twice; a Ray that dies; and who may talk to a Ray of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raysearch.results import read_runs, verify
from tests.conftest import command_environment
from tests.processes import descendants

Start = Callable[..., "subprocess.Popen[str]"]

CHILD = """
import os, signal, subprocess, sys, time
from raysearch import cli, supervision
def run():
    {}
cli._run = run
sys.argv = ["raysearch", "study"]
cli.main()
"""
SAY = "print('ready', *sys.argv[1:], flush=True)"
ORPHAN = "global orphan; orphan = subprocess.Popen(['sleep', '600'], start_new_session=True)"
DEAF = "[signal.signal(s, signal.SIG_IGN) for s in (2, 15, 1)]; signal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15, 1))"
TOLD = "supervision.can_go_on_with(['study', 'mine', '--resume'])"


def start_child(*statements: str) -> subprocess.Popen[str]:
    script = CHILD.format("\n    ".join(statements))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], text=True, env=command_environment(), **pipes)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_hears_nothing_is_ended_with_all_it_has_started_and_one_message(signum: int) -> None:
    process = start_child(DEAF, TOLD, ORPHAN, SAY, "time.sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready study\n"
    started = list(descendants(process.pid))
    assert len(started) == 2
    process.send_signal(signum)
    process.send_signal(signum)
    _, said = process.communicate(timeout=60)
    name = signal.Signals(signum).name
    rest = "every call so far is kept. Go on with: raysearch study mine --resume"
    assert said == f"interrupted by {name}; {rest}\n"
    assert process.returncode == 128 + signum
    assert alive(started) == []


def test_a_command_that_dies_leaves_nothing_behind_and_says_how_to_go_on() -> None:
    process = start_child(TOLD, ORPHAN, SAY, "os.kill(os.getpid(), signal.SIGKILL)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("error: the command was ended by SIGKILL; every call so far is kept. Go on with: raysearch ")


def test_a_command_whose_ray_has_died_is_gone_on_with_and_given_up_at_last() -> None:
    process = start_child(SAY, TOLD, "supervision.start_anew()")
    printed, said = process.communicate(timeout=60)
    assert printed.splitlines() == ["ready study", *["ready study mine --resume"] * 3]
    assert said.startswith("error: Ray died again and again")
    assert process.returncode == 1


def test_a_killed_watcher_takes_the_command_with_it() -> None:
    process = start_child(SAY, "time.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = descendants(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while alive([child]) and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def study(tiny_workload: Path, tmp_path: Path) -> Path:
    keys = {"name": "s", "workloads": [str(tiny_workload)], "seeds": [0], "searchers": ["annealing"], "budget": 30_000}
    path = tmp_path / "study.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


def wait_for(process: subprocess.Popen[str], done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def daemons(process: subprocess.Popen[str], name: str) -> list[int]:
    return [pid for pid, title in descendants(process.pid).items() if f"/{name}\0" in title]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_is_stopped_at_any_moment_and_goes_on_when_its_ray_dies(
    study: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "out"
    command = ("study", study, "--out", out, "--cpus", "1", "--json")
    moments: list[Callable[[subprocess.Popen[str]], object]] = [
        lambda process: descendants(process.pid),
        lambda process: daemons(process, "gcs_server"),
        lambda process: daemons(process, "raylet"),
        lambda process: (out / "study.json").exists(),
    ]
    for moment in moments:
        process = start(*command, *(["--resume"] if (out / "study.json").exists() else []))
        wait_for(process, lambda process=process, moment=moment: moment(process))
        started = list(descendants(process.pid))
        process.terminate()
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 143, said
        assert said.count("interrupted") == 1, said
        assert "Traceback" not in said
        assert alive(started) == []
    process = start(*command, "--resume")
    wait_for(process, lambda: list(out.glob("runs/*/rows.jsonl")) and daemons(process, "raylet"))
    os.kill(daemons(process, "raylet")[0], signal.SIGKILL)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "note: Ray has died" in said
    assert verify(out).damaged == {}
    assert [run["calls"] for run in read_runs(out)] == [30_000]


STRANGER = """
import os, sys
import ray
try:
    ray.init(sys.argv[1], logging_level="ERROR")
except ConnectionError as error:
    print("refused")
else:
    print("let in")
"""


@pytest.mark.slow
def test_a_ray_of_ours_lets_nobody_in_without_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from raysearch.connection import connected

    before = tokens()
    with connected(cpus=1):
        address = ray.get_runtime_context().gcs_address
        assert address.startswith("127.0.0.1:")
        assert ray.get(ray.remote(lambda: 7).remote()) == 7
        for mode in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
            own = {name: value for name, value in command_environment().items() if "RAY_AUTH" not in name}
            asked = [sys.executable, "-c", STRANGER, address]
            done = subprocess.run(asked, env={**own, **mode, "HOME": str(tmp_path)}, capture_output=True, text=True)
            assert done.stdout == "refused\n", done.stderr
    assert tokens() == before


def tokens() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
