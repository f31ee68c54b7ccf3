"""Markov chain Monte Carlo over strategies, as FlexFlow searches."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.space import Action
from raysearch.merit import merit
from raysearch.searcher import NoOptions, Outcome, Searcher


class MCMCOptions(NoOptions):
    """Settings of `mcmc`.

    Attributes:
        beta: How strongly the chain prefers fast strategies: p(S) ~ cost(S) ** -beta.
        patience: Calls without a better strategy after which the chain goes back to the best; 0: never.
    """

    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    patience: Annotated[int, Field(ge=0)]


@final
class MCMCSearcher(Searcher):
    """Metropolis-Hastings: one random op (or degree) gets a random choice, and the change is taken with a probability.

    That is min(1, (cost / proposed cost) ** beta), the cost being the time per token and GPU. FlexFlow takes
    exp(beta * (cost - proposed cost)) in milliseconds, so its beta belongs to one workload; with the ratio one beta
    serves all. The proposal is symmetric. An infeasible strategy costs more than any feasible one, the more the
    further it is off (FlexFlow, too, charges the bytes beyond a device's memory as time).

    Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", 2019, section 6.2 (proposals and
    acceptance). Going back to the best after a while is its published code's.
    """

    name: ClassVar[str] = "mcmc"
    Options: ClassVar[type[BaseModel]] = MCMCOptions

    _position: Action | None = None
    _merit = -math.inf
    _best: Action | None = None
    _best_merit = -math.inf
    _stale = 0

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A neighbour of the position; a uniform action at the start."""
        if self._position is None:
            return self.space.sample(self.rng)
        return self.space.neighbour(self._position, self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action, stays, or goes back to the best."""
        proposed = merit(outcome)  # -log(cost)
        if self._position is None or self._accepts(proposed - self._merit):
            self._position, self._merit = action.copy(), proposed
        self._stale += 1
        if proposed > self._best_merit:
            self._best, self._best_merit, self._stale = action.copy(), proposed, 0
        elif self._stale == self.options.patience > 0:
            self._position, self._merit, self._stale = self._best, self._best_merit, 0

    def _accepts(self, gain: float) -> bool:
        return gain >= 0 or bool(self.rng.random() < math.exp(self.options.beta * gain))

    def get_state(self) -> dict[str, Any]:
        """The generator, the chain and the best it saw."""
        return {
            "rng": self.rng.bit_generator.state,
            "chain": (self._position, self._merit, self._best, self._best_merit, self._stale),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts the chain back."""
        self.rng.bit_generator.state = state["rng"]
        self._position, self._merit, self._best, self._best_merit, self._stale = state["chain"]
