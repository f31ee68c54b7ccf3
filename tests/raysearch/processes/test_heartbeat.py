"""Signs of life in files, and who counts as dead without them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from raysearch.processes import heartbeat
from raysearch.processes.heartbeat import Hearts, Pulse, beating


def test_who_beats_is_not_silent_and_who_has_ended_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    (file := tmp_path / "run.json").touch()
    pulse = Pulse(file)
    with beating(file):
        while not pulse.beats:
            _ = pulse.silent_s
    before = pulse.silent_s
    time.sleep(0.05)
    assert pulse.silent_s >= before + 0.05 or before == 0


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_a_clock_that_is_set_is_no_silence(tmp_path: Path, jump_s: int) -> None:
    (file := tmp_path / "run.json").touch()
    pulse = Pulse(file)
    time.sleep(0.05)
    then = time.time() + jump_s
    os.utime(file, (then, then))
    assert pulse.silent_s < 0.05


def test_a_run_that_falls_silent_is_ended_once_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.2)
    killed: list[str] = []
    hearts = Hearts()
    for name in ("silent", "starting", "alive", "done"):
        (tmp_path / name).touch()
        hearts.watch(name, tmp_path / name, lambda name=name: killed.append(name))
    hearts.leave("done")
    os.utime(tmp_path / "silent", (1, 1))
    for tick in range(10):
        os.utime(tmp_path / "alive", (tick, tick))
        hearts.look()
        time.sleep(0.05)
    assert killed == ["silent"]
    assert capsys.readouterr().err == "note: silent gave no sign of life for 0.2 s and is restarted\n"


def test_a_run_that_never_beat_has_twice_as_long_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(heartbeat, "LONGEST_START_S", 0.1)
    hearts = Hearts()
    for _ in range(3):  # whose third start has no more than the second: the longest
        ended: list[bool] = []
        hearts.watch("slow", tmp_path / "none", lambda ended=ended: ended.append(True))
        while not ended:
            hearts.look()
            time.sleep(0.01)
    limits = [line.split("for ")[1] for line in capsys.readouterr().err.splitlines()]
    assert limits == ["0.05 s and is restarted", "0.1 s and is restarted", "0.1 s and is restarted"]
