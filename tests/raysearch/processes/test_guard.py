"""A guard ends all that is below it: with its program, when told to, and when whoever started it has gone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from raysearch.processes.guard import end_guarded, guarded
from tests.processes import ended

AWAY = "env -i setsid sh -c 'echo $$ >> {0}; exec sleep 600' & while ! test -s {0}; do sleep 0.01; done; "


def started(pids: Path, script: str) -> subprocess.Popen[bytes]:
    return guarded(["/bin/sh", "-c", AWAY.format(pids) + script], subprocess.DEVNULL, subprocess.DEVNULL)


def gone(pids: Path) -> bool:
    return bool(pids.read_text().split()) and all(ended(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_it_has_its_programs_exit_code_and_leaves_nothing(tmp_path: Path, script: str, code: int) -> None:
    assert started(tmp_path / "pids", script).wait(60) == code
    assert gone(tmp_path / "pids")


def test_it_ends_all_when_asked_to(tmp_path: Path) -> None:
    guard = started(tmp_path / "pids", f"echo $$ >> {tmp_path}/pids; touch {tmp_path}/ready; wait")
    wait_until_exists(tmp_path / "ready")
    end_guarded(guard)
    assert gone(tmp_path / "pids")


def test_it_ends_all_when_whoever_started_it_was_killed(tmp_path: Path) -> None:
    script = AWAY.format(tmp_path / "pids") + f"touch {tmp_path}/ready; wait"
    starting = (
        "import os, pathlib, signal, subprocess, time; from raysearch.processes.guard import guarded\n"
        f"guard = guarded(['/bin/sh', '-c', {script!r}], subprocess.DEVNULL, subprocess.DEVNULL)\n"
        f"while not pathlib.Path({str(tmp_path / 'ready')!r}).exists(): time.sleep(0.01)\n"
        "print(guard.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    found = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True, check=False)
    while not ended(int(found.stdout)):
        time.sleep(0.01)
    assert gone(tmp_path / "pids")


def wait_until_exists(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
