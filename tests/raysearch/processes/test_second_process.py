"""Work in a second process, and in this one where that cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raysearch.processes import second_process as module
from raysearch.processes.second_process import begun_beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
FORKED = """
import os, signal, sys
from raysearch.processes import second_process as module
module.os.sched_getaffinity = lambda _: {0, 1}
known = {"so far": 1}
first = module.begun_beside(lambda: (os.getpid(), known["so far"]), parallel=True)
known["so far"] = 2
pid, value = first()
assert pid != os.getpid() and value == 1 and first() == (pid, 1)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_fork_knows_what_was_known_when_it_began_and_changes_nothing_here() -> None:
    found = run(FORKED)
    assert (found.returncode, found.stderr) == (0, "")


def test_what_a_killed_process_was_to_work_out_is_worked_out_here() -> None:
    work = "here = os.getpid()\nkilled = lambda: os.getpid() == here or os.kill(os.getpid(), signal.SIGKILL)\n"
    found = run(f"{FORKED}{work}assert module.begun_beside(killed, parallel=True)() is True\n")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_process_that_hears_a_stop_ends_in_silence(name: str) -> None:
    """The command's own way to end, which it has from its parent, is not its own."""
    code = f"""
import multiprocessing, time
def stop(*_):
    raise SystemExit("never")
signal.signal(signal.{name}, stop)
begun, here = os.pipe()
module.begun_beside(lambda: os.write(here, b".") and time.sleep(60), parallel=True)
(child,) = multiprocessing.active_children()
os.read(begun, 1)
os.kill(child.pid, signal.{name})
child.join()
assert child.exitcode == -signal.{name}, child.exitcode
"""
    done = run(FORKED + code)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    found = run(FORKED + "module.begun_beside(lambda: 1 // 0, parallel=True)()\n")
    assert found.returncode == 1
    assert found.stderr.count("Traceback") == 1
    assert "ZeroDivisionError" in found.stderr


def test_no_process_is_made_where_none_is_allowed_or_a_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    later = begun_beside(lambda: done.append(1) or 6 * 7, parallel=False)
    assert not done
    assert (later(), later(), done) == (42, 42, [1])
    monkeypatch.setattr(module.threading, "active_count", lambda: 2)
    monkeypatch.setattr(module, "get_context", lambda _: pytest.fail("a fork"))
    assert begun_beside(lambda: 42, parallel=True)() == 42
