"""What a search asks of env runners that are other processes, and how long it bears with those that are lost."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import ray
from ray.exceptions import GetTimeoutError, RayError

from raysearch.processes.deadline import Deadline
from raysearch.searchers.ppo.env_runner import EliteEnvRunner, OutOfDate, Round

_log = logging.getLogger(__name__)
RETRY_S = 0.5
"""[assumed] Between two attempts to reach a lost env runner; a process takes seconds to start."""

LEAST_SLACK_S = 10.0
"""[assumed] A runner's own limit, which says more, comes first even on a busy machine."""
_RESETS = 1
"""Environments begin anew once within what is asked for, which may take as long as a call."""


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


def answer(runner: EliteEnvRunner, request: Round | ray.ObjectRef) -> Any:
    """Runs on an env runner: what it sampled, None if it needs more, or a `RunnerError`."""
    try:
        round_: Any = request if isinstance(request, Round) else ray.get(request)
        return attempt(lambda: runner.sample_round(round_))
    except OutOfDate:
        return None


def handles(group: Any) -> dict[int, Any]:
    """The remote env runners of RLlib's group by their number; a handle outlives its runner's restarts."""
    return dict(group.foreach_env_runner(_handle, local_env_runner=False))


def _handle(runner: EliteEnvRunner) -> tuple[int, Any]:
    return runner.worker_index, ray.get_runtime_context().current_actor


class Asked(NamedTuple):
    """What an env runner was asked for.

    Attributes:
        runner: Its number.
        answer: Ray's promise.
        limit_s: Seconds that it was given.
        deadline: When they are over.
    """

    runner: int
    answer: Any
    limit_s: float
    deadline: Deadline


@final
class Runners:
    """Env runners that are other processes: each has some time to answer, and some to come back where it is lost.

    Calls may be made once more, not twice. A runner ends a call that takes too long by itself, and says which it was;
    one that cannot even do that is late by `give_up_s` when it is ended from here.

    Args:
        handles: By their number.
        timeout_s: Longest call.
        give_up_s: Longest wait for a lost one; 0: nobody restarts them.
    """

    def __init__(self, handles: Mapping[int, Any], *, timeout_s: float, give_up_s: float) -> None:
        self._handles, self._timeout_s, self._give_up_s = dict(handles), timeout_s, give_up_s
        self._lost_since: dict[int, float] = {}
        self._raised_in: set[tuple[int, int]] = set()

    def ask(self, runner: int, work: Callable[[EliteEnvRunner], Any], calls: int) -> Asked:
        """Has a runner do something that takes at most so many calls, with those that it was asked for before."""
        limit_s = (calls + _RESETS) * self._timeout_s + max(self._give_up_s, LEAST_SLACK_S)
        return Asked(runner, self._handles[runner].apply.remote(work), limit_s, Deadline(limit_s))

    def take(self, asked: Asked, first_call: int) -> Any:
        """What came of it; None if that has to be asked for anew, with all that a new runner needs.

        Args:
            asked: For calls of the search.
            first_call: The first of them.

        Raises:
            RuntimeError: See `bear`.
        """
        late = False
        try:
            made: Any = ray.get(asked.answer, timeout=asked.deadline.left_s)
        except GetTimeoutError:
            made, late = RunnerError(f"no answer within {asked.limit_s:g} s", ""), True
        except RayError as error:
            made = error
        if made is None or isinstance(made, Exception):
            try:
                self.bear(asked.runner, first_call, made)
            except RuntimeError:
                if late:  # it would not hear either that it is to stop, which RLlib waits for
                    ray.kill(self._handles[asked.runner])
                raise
            return None
        self._lost_since.pop(asked.runner, None)
        return made

    def bear(self, runner: int, first_call: int, error: Exception | None) -> None:
        """Waits a little for a runner that was lost in its calls from `first_call` on.

        One that raised, or did not answer in time, is begun anew: whatever it was in the middle of is out of order.

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
            ray.kill(self._handles[runner], no_restart=False)
        elif now - lost_since > self._give_up_s:
            raise RuntimeError(f"env runner {runner} did not come back within {self._give_up_s:g} s") from error
        elif now == lost_since:
            _log.warning("note: env runner %s was lost; its calls are made again once it is back", runner)
        time.sleep(RETRY_S)
