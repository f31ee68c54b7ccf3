"""What a search asks of env runners that are other processes, and how long it bears with those that are lost."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import ray

from raysearch.ppo.env_runner import EliteEnvRunner, OutOfDate, Round

_log = logging.getLogger(__name__)
RETRY_S = 0.5
"""[assumed] Between two attempts to reach a lost env runner; a process takes seconds to start."""


class RunnerError(RuntimeError):
    """What was raised in an env runner: in a line, and its traceback. Texts, as it may not be picklable itself."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason, traceback)
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return self.traceback


def attempt(work: Callable[[], Any]) -> Any:
    """Runs on an env runner: what `work` returns, or what it raised as a `RunnerError`.

    RLlib would end the process and keep the reason to itself.
    """
    try:
        return work()
    except OutOfDate:
        raise
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:  # RLlib raises a bare RuntimeError from what an environment raises
            root = root.__cause__
        return RunnerError(f"{type(root).__name__}: {root}", traceback.format_exc())


def answer(runner: EliteEnvRunner, request: Round | ray.ObjectRef) -> tuple[int, Any]:
    """Runs on an env runner: what it sampled, None if it has to be told more, or a `RunnerError`."""
    try:
        round_: Any = request if isinstance(request, Round) else ray.get(request)
        return runner.worker_index, attempt(lambda: runner.sample_round(round_))
    except OutOfDate:
        return runner.worker_index, None


@contextmanager
def losses_told_once() -> Iterator[None]:
    """Leaves it to `Losses` to tell of lost runners: RLlib would, at every attempt to reach one, in several lines."""
    told = logging.getLogger("ray.rllib.utils.actor_manager")
    level = told.level
    told.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        told.setLevel(level)


def handles(group: Any) -> dict[int, Any]:
    """The remote env runners of RLlib's group by their number; a handle outlives its runner's restarts."""
    return dict(group.foreach_env_runner(_handle, local_env_runner=False))


def _handle(runner: EliteEnvRunner) -> tuple[int, Any]:
    return runner.worker_index, ray.get_runtime_context().current_actor


@final
class Losses:
    """Bears with lost env runners: each has some time to come back, and calls may be made once more, not twice.

    Args:
        runners: Handles of all, by their number.
        give_up_s: Longest wait for one; 0: nobody restarts them.
    """

    def __init__(self, runners: dict[int, Any], give_up_s: float) -> None:
        self._runners, self._give_up_s = runners, give_up_s
        self._lost_since: dict[int, float] = {}
        self._raised_in: set[tuple[int, int]] = set()

    def bear(self, runner: int, first_call: int, error: Exception | None) -> None:
        """Waits a little for a runner that was lost in its calls from `first_call` on.

        One that raised is begun anew, as RLlib would: whatever it was in the middle of is out of order.

        Raises:
            RuntimeError: It was lost for too long, or raises in the same calls once more.
        """
        lost_since = self._lost_since.setdefault(runner, now := time.monotonic())
        if isinstance(error, RunnerError):
            if (runner, first_call) in self._raised_in or not self._give_up_s:
                raise RuntimeError(
                    f"env runner {runner} failed in the calls from {first_call} on: {error.reason}"
                ) from error
            self._raised_in.add((runner, first_call))
            _log.warning("note: env runner %s failed and is begun anew: %s", runner, error.reason)
            ray.kill(self._runners[runner], no_restart=False)
        elif now - lost_since > self._give_up_s:
            raise RuntimeError(f"env runner {runner} did not come back within {self._give_up_s:g} s") from error
        elif now == lost_since:
            _log.warning("note: env runner %s was lost; its calls are made again once it is back", runner)
        time.sleep(RETRY_S)

    def is_back(self, runner: int) -> None:
        """Hears that a runner has answered."""
        self._lost_since.pop(runner, None)
