"""What a run asks its evaluations of, and the simplest of that kind."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from envs.strategy_env import Evaluate
from raysearch.processes.deadline import Patience, within
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload


class Simulator(Protocol):
    """A black box that can be given ahead what it will be asked."""

    def begin(self, strategy: Strategy) -> None:
        """Begins to evaluate a strategy, if it can."""

    def take(self, strategy: Strategy | None = None) -> Strategy:
        """Takes a call that was begun: of this strategy, or whichever is answered first; `__call__` answers it."""
        ...

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """The evaluation of a strategy."""
        ...

    def asked_twice(self, workload: Workload) -> list[str]:
        """Asks again about a few strategies, if that could tell anything; returns what it now says otherwise."""
        ...

    def close(self) -> None:
        """Lets go of what it holds."""


class InProcess:
    """A black box called where the searcher runs.

    Args:
        evaluate: The black box.
        timeout_s: Longest call, as far as `within` can end it.
    """

    def __init__(self, evaluate: Evaluate, timeout_s: float = Patience.timeout_s) -> None:
        self._evaluate, self._timeout_s = evaluate, timeout_s
        self._begun: deque[Strategy] = deque()

    def begin(self, strategy: Strategy) -> None:
        """Notes it: there is nobody else to do it."""
        self._begun.append(strategy)

    def take(self, strategy: Strategy | None = None) -> Strategy:
        """The first that was begun, or the given one."""
        taken = strategy or self._begun[0]
        self._begun.remove(taken)
        return taken

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """The evaluation of a strategy. Raises: NoAnswer: It takes too long."""
        return within(self._timeout_s, lambda: self._evaluate(workload, strategy))

    def asked_twice(self, workload: Workload) -> list[str]:
        """Nothing: no cache hides what it says."""
        return []

    def close(self) -> None:
        """Nothing: there are no resources."""
