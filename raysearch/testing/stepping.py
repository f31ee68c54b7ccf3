"""An environment that a searcher steps outside of any run: one call at a time, neither charged nor recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from envs.space import Action
from envs.strategy_env import StrategyEnv
from raysearch.searchers.interface import Outcome, Searcher


def as_it_is(outcome: Outcome) -> Outcome:
    """All of it."""
    return outcome


@final
class Stepped:
    """See `raysearch.searchers.interface.Environment`.

    >>> from raysearch.searchers.registry import make_searcher
    >>> from sim.config.catalog import load_workload
    >>> stepped = Stepped(StrategyEnv(load_workload("gpt_moe_1_2t_16k")))
    >>> searcher = make_searcher("random", stepped.env.space, seed=0, budget=2)
    >>> stepped.advance(searcher), stepped.advance(searcher)
    (True, True)

    Args:
        env: What the calls go to.
        answered: The outcome of a call as the searcher gets it.

    Attributes:
        outcome: Of the last call; None before the first.
        action: Of the last call.
    """

    def __init__(self, env: StrategyEnv, answered: Callable[[Outcome], Outcome] = as_it_is) -> None:
        self.env, self._answered = env, answered
        self.exhausted = False
        self.observation: NDArray[np.float32] = env.reset()[0]
        self._begun: Action | None = None
        self.action: Action | None = None
        self.outcome: Outcome | None = None

    @property
    def under_way(self) -> int:
        """1 if a call was begun."""
        return int(self._begun is not None)

    @property
    def may_begin(self) -> bool:
        """Whether none was."""
        return self._begun is None and not self.exhausted

    def begin(self, action: Action) -> None:
        """Notes what is to be called."""
        self._begun = action

    def take(self) -> tuple[Action, Outcome]:
        """Calls it."""
        assert self._begun is not None
        self.action, self._begun = self._begun, None
        self.observation, reward, _, _, info = self.env.step(self.action)
        self.outcome = Outcome.of(self.observation, float(reward), info)
        return self.action, self._answered(self.outcome)

    def advance(self, searcher: Searcher) -> bool:
        """Lets a searcher make one call; whether it did."""
        before, self.outcome = self.outcome, None
        searcher.step(self, 1)
        made = self.outcome is not None
        self.outcome = self.outcome or before
        return made
