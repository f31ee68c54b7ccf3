"""How long anything may take that is not ours: one call of a black box, wherever it runs, and its process's start.

The setting is `Patience.timeout_s`: `timeout_s` of commands and studies, `sample_timeout_s` of RLlib.
Clocks here are monotonic: setting the host's clock changes nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

from envs.strategy_env import brief
from raysearch.base.errors import InputError
from raysearch.base.limits import LONGEST_TIMEOUT_S, MOST_CPUS, MOST_RETRIES

START_TIMEOUT_S = 120.0
"""[assumed] Longest start of a process for calls: for a free CPU, an interpreter, and the import of the black box."""
_AGAIN_S = 1.0
"""[assumed] Code that catches what ends it is interrupted again after it."""


@dataclass(frozen=True)
class Patience:
    """With a simulator that hangs or fails, and what each of its workers takes.

    Attributes:
        timeout_s: Longest call.
        retries: How often a failing call is tried again before the run stops.
        cpus_per_worker, gpus_per_worker: That Ray reserves for a worker; shares of one will do.
    """

    timeout_s: float = 600.0  # [assumed] a compile-and-run of a real engine fits
    retries: int = 1  # [assumed] once helps against a lost process; a strategy that always fails stops the run
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise InputError(f"timeout_s must be above 0 s and at most {LONGEST_TIMEOUT_S:g} s, got {self.timeout_s:g}")
        if not 0 <= self.retries <= MOST_RETRIES:
            raise InputError(f"retries must be 0 to {MOST_RETRIES}, got {brief(str(self.retries))}")
        for name, value in (("cpus_per_worker", self.cpus_per_worker), ("gpus_per_worker", self.gpus_per_worker)):
            if not (0 <= value < 1 or (float(value).is_integer() and value <= MOST_CPUS)):
                raise InputError(f"{name} must be a share of one, or a whole number to {MOST_CPUS:,}, got {value:g}")


class NoAnswer(RuntimeError):
    """A call took too long, or its process died over it."""


@final
class Deadline:
    """A moment some seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._at_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self._at_s


class _Expired(BaseException):
    """Ends a call from within. No `except Exception` of a black box takes it for an error of its own."""


@final
class _Alarm:
    """Hears SIGALRM, and ends what is done until then."""

    over = False

    def __call__(self, *_: Any) -> None:
        if not self.over:
            raise _Expired


WorkResult = TypeVar("WorkResult")


def within(seconds: float, work: Callable[[], WorkResult], what: Callable[[], str] = str) -> WorkResult:
    """What `work` returns, unless that takes too long: then it is interrupted.

    Python code, sleeps and waits are interrupted, not machine code that never returns to Python: code that may do that
    belongs into a process of its own. Only in a main thread, where signals are heard; elsewhere there is no limit.

    Args:
        seconds: That it may take.
        work: What is done in this process.
        what: Gives words for what it is done on, which end the message.

    Raises:
        NoAnswer: It took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    before, due_s = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    if isinstance(before, _Alarm) and due_s < seconds:  # we are within a limit that comes first
        return work()
    signal.signal(signal.SIGALRM, alarm := _Alarm())
    began_s = time.monotonic()
    due_s, every_s = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        try:
            return work()
        finally:
            alarm.over = True
    except _Expired:
        on = what()
        raise NoAnswer(f"no answer within {seconds:g} s{on and f' on {on}'}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if due_s:  # somebody else's alarm continues
            signal.setitimer(signal.ITIMER_REAL, max(due_s - (time.monotonic() - began_s), 1e-6), every_s)
