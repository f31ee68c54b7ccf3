"""Claims: one process at a time has a results folder, whatever became of the last one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raysearch as rs
from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.processes import claim, heartbeat
from raysearch.processes.claim import CLAIM_FILE, LAPSE_S, check_folder, claimed, in_use
from tests.conftest import command_environment
from tests.processes import wait_until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "WITNESSED_S", 0.2)


def of_another_host(folder: Path, silent_s: float) -> Path:
    """Leaves the claim of a process on another host, last touched so many seconds ago."""
    folder.mkdir(exist_ok=True)
    path = folder / CLAIM_FILE
    path.write_text(json.dumps({"host": "far", "process": 7, "machine": "another", "claim": "1"}))
    then = time.time() - silent_s
    os.utime(path, (then, then))
    return path


def test_a_claim_leaves_no_trace(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "b"):
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [CLAIM_FILE]
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path / "a"):
        (tmp_path / "a" / "result").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["result"]


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    with claimed(tmp_path):
        with pytest.raises(InputError, match="in use by another search or study"), claimed(tmp_path):
            pass
        assert (tmp_path / CLAIM_FILE).exists()
    with claimed(tmp_path):
        pass


def test_a_folder_claimed_on_another_host_is_refused_until_the_claim_lapses(tmp_path: Path) -> None:
    path = of_another_host(tmp_path, silent_s=LAPSE_S / 2)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"in use by .* \(process 7 on far, heard of 3\d s ago;"), claimed(tmp_path):
        pass
    assert [(kept.name, kept.read_bytes()) for kept in tmp_path.iterdir()] == [(path.name, before)]
    of_another_host(tmp_path, silent_s=LAPSE_S + 1)
    with claimed(tmp_path):
        assert json.loads(path.read_bytes())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_from_the_future_is_nobody_s_unless_it_is_seen_to_beat(tmp_path: Path) -> None:
    of_another_host(tmp_path, silent_s=-86_400.0)
    assert not in_use(tmp_path)
    with claimed(tmp_path):
        pass


def test_a_claim_is_touched_while_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    with claimed(tmp_path):
        path = tmp_path / CLAIM_FILE
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime != 0)


def test_a_claim_that_seems_old_because_the_clock_was_set_is_not_taken_over(tmp_path: Path) -> None:
    path = of_another_host(tmp_path, silent_s=0.0)
    ended = threading.Event()

    def live_on_a_host_whose_clock_is_a_day_behind() -> None:
        then = time.time() - 86_400
        while not ended.wait(0.02):
            then += 0.02
            os.utime(path, (then, then))

    holder = threading.Thread(target=live_on_a_host_whose_clock_is_a_day_behind)
    holder.start()
    try:
        while in_use(tmp_path):
            time.sleep(0.01)
        with pytest.raises(InputError, match="in use by"), claimed(tmp_path):
            pass
    finally:
        ended.set()
        holder.join()


HOLD = """
import sys, time
from pathlib import Path
from raysearch.processes import claim
from raysearch.base.errors import InputError
claim.WITNESSED_S = 1.0
if "without-locks" in sys.argv:
    def no_locks(handle, operation):
        raise OSError(37, "No locks available")
    claim.fcntl.flock = no_locks
try:
    with claim.claimed(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except InputError as error:
    print(error)
"""


def hold(folder: Path, seconds: float, *options: str) -> subprocess.Popen[str]:
    """A process that claims a folder, says "held" or why not, and keeps it for so long."""
    arguments = [sys.executable, "-c", HOLD, str(folder), str(seconds), *options]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=command_environment())


@pytest.mark.slow
def test_the_claim_of_a_killed_process_does_not_count_on_its_host(tmp_path: Path) -> None:
    with hold(tmp_path, 60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="in use"), claimed(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / CLAIM_FILE).exists()
    with claimed(tmp_path):  # at once, and as an empty folder
        pass


def test_a_folder_that_nests_too_deep_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it nests too deep"), claimed(tmp_path / "/".join("d" * 1900)):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(20)
def test_what_is_no_file_is_no_claim_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CLAIM_FILE)
    for look in (in_use, lambda folder: claimed(folder).__enter__()):
        with pytest.raises(InputError, match="is not a file"):
            look(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1]", b"1e999", b""])
def test_a_claim_that_cannot_be_read_is_one_of_a_dead_process_once_it_lapsed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CLAIM_FILE).write_bytes(content)
    assert in_use(tmp_path)
    os.utime(tmp_path / CLAIM_FILE, (0, 0))
    assert not in_use(tmp_path)
    with claimed(tmp_path):
        assert in_use(tmp_path)


@pytest.mark.slow
def test_without_locks_the_claim_alone_keeps_others_out(tmp_path: Path) -> None:
    with hold(tmp_path, 60, "without-locks") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with hold(tmp_path, 0, "without-locks") as other:
            assert f"process {process.pid} on " in other.communicate()[0]
        process.kill()


@pytest.mark.slow
def test_of_many_who_take_over_a_lapsed_claim_one_succeeds(tmp_path: Path) -> None:
    of_another_host(tmp_path, silent_s=LAPSE_S + 1)
    crowd = [hold(tmp_path, 600, "without-locks") for _ in range(6)]
    first_lines = {process.pid: process.stdout.readline() for process in crowd if process.stdout}
    assert sorted(text == "held\n" for text in first_lines.values()) == [False] * 5 + [True], first_lines
    assert all(text == "held\n" or "in use" in text for text in first_lines.values())
    assert json.loads((tmp_path / CLAIM_FILE).read_bytes())["process"] in [
        p for p in first_lines if first_lines[p] == "held\n"
    ]
    for process in crowd:
        process.kill()
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [CLAIM_FILE]


def test_a_folder_that_vanished_under_the_lock_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def lock_after_the_owner_left(handle: int, operation: int) -> None:
        (tmp_path / "run").rmdir()
        (tmp_path / "run").mkdir()  # a third process begins anew there
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_owner_left)
    with pytest.raises(InputError, match="in use by another"), claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize("name", ["run.json", "study.json", "tune_live.json", "pools.json", "placement.json"])
def test_an_answer_is_not_written_beside_other_results(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"contains other results .{name}"):
        check_folder(tmp_path, "recommendation.json")
    with pytest.raises(InputError, match="contains other results"):
        rs.replay(rs.question(**SERVED), tp=1, batch=4, requests_per_s=1, requests=10, seeds=1).write(tmp_path)
    with pytest.raises(InputError, match="contains other results"):
        rs.export(rs.evaluate(rs.question(**SERVED), tp=1, batch=4)).write(tmp_path)
    asked = ("--model", "llama_3_1_8b", "--isl", "100", "--osl", "10", "--tp", "1", "--batch", "4")
    with pytest.raises(InputError, match="contains other results"):
        CliRunner().invoke(app, ["export", *asked, "--out", str(tmp_path)], catch_exceptions=False)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    check_folder(tmp_path, name)  # an earlier answer of the same command is replaced


SERVED = {"model": "llama_3_1_8b", "isl": 100, "osl": 10}
