"""Limits of what this process computes itself."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from raysearch.base.errors import InputError
from raysearch.processes.deadline import NoAnswer, Patience, within
from tests.conftest import CHECKOUT


def stubborn() -> None:
    while True:
        with contextlib.suppress(Exception):  # what it raises itself, and not what ends it
            time.sleep(1e6)


def busy() -> None:
    while True:
        pass


@pytest.mark.parametrize("work", [stubborn, busy])
def test_what_takes_too_long_is_interrupted_with_what_it_was_on(work) -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s on a strategy"):
        within(0.1, work, lambda: "a strategy")


def test_what_is_done_in_time_is_returned_and_the_clock_stands_still_after() -> None:
    before = signal.getsignal(signal.SIGALRM)
    assert within(10.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 / 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_somebody_elses_alarm_goes_on() -> None:
    timer, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    heard = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: heard.set())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        within(10.0, lambda: time.sleep(0.05))
        while not heard.is_set():
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's


def test_limits_that_lie_in_each_other_hold_both() -> None:
    with pytest.raises(NoAnswer, match=r"within 0\.1 s"):
        within(0.1, lambda: within(1e6, stubborn))
    with pytest.raises(NoAnswer, match=r"within 0\.1 s"):
        within(10.0, lambda: within(0.1, stubborn))


def test_wall_clocks_are_asked_for_dates_alone() -> None:
    asking = {
        str(path.relative_to(CHECKOUT))
        for folder in ("sim", "envs", "raysearch")
        for path in (CHECKOUT / folder).rglob("*.py")
        if "time.time()" in path.read_text() or "datetime.now" in path.read_text()
    }
    dates = {"raysearch/base/file_io.py", "raysearch/studies/journal.py", "raysearch/cli/commands/calibrate.py"}
    dates |= {"raysearch/cli/commands/forecasting.py"}
    assert asking == dates | {"raysearch/cli/commands/status.py"}  # which tells since when


@pytest.mark.parametrize("given", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"retries": -1}])
def test_impossible_patience_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(InputError, match="got"):
        Patience(**given)  # pyright: ignore[reportArgumentType]
