"""Markov chain Monte Carlo over strategies, as FlexFlow searches."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.merit import worth


class MCMCOptions(NoOptions):
    """Settings of `mcmc`.

    Attributes:
        beta: How strongly the chain prefers fast strategies: p(S) ~ cost(S) ** -beta.
        gap: Nats of cost by which an infeasible strategy exceeds the best so far, before its excess is counted.
        patience: Calls without a better strategy after which the chain goes back to the best; 0: never.
    """

    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    gap: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    patience: Annotated[int, Field(ge=0)]


class _Place(NamedTuple):
    """A strategy and what it gave; never changed."""

    action: Action
    raw: float
    excess: float


@final
class MCMCSearcher(Searcher):
    """Metropolis-Hastings: one random op (or degree) gets a random choice, and the change is taken with a probability.

    That is min(1, (cost / proposed cost) ** beta), the cost being the time per token and GPU. FlexFlow takes
    exp(beta * (cost - proposed cost)) in milliseconds, so its beta belongs to one workload; with the ratio one beta
    serves all. The proposal is symmetric. An infeasible strategy costs more than the best so far, the more the further
    it is off (FlexFlow, too, charges the bytes beyond a device's memory as time).

    Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", 2019, section 6.2 (proposals and
    acceptance). Going back to the best after a while is its published code's.
    """

    name: ClassVar[str] = "mcmc"
    Options: ClassVar[type[BaseModel]] = MCMCOptions

    _position: _Place | None = None
    _best: _Place | None = None
    _stale = 0

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A neighbour of the position; a uniform action at the start."""
        if self._position is None:
            return self.space.sample(self.rng)
        return self.space.neighbour(self._position.action, self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action, stays, or goes back to the best."""
        proposed = _Place(action.copy(), outcome.raw, outcome.excess)
        if self._position is None or self._accepts(proposed, self._position, outcome.best):
            self._position = proposed
        self._stale += 1
        if self._best is None or (proposed.raw, -proposed.excess) > (self._best.raw, -self._best.excess):
            self._best, self._stale = proposed, 0
        elif self._stale == self.options.patience > 0:
            self._position, self._stale = self._best, 0

    def _accepts(self, proposed: _Place, position: _Place, best: float) -> bool:
        against = {"best": best, "gap": self.options.gap}
        gain = worth(proposed.raw, proposed.excess, **against) - worth(position.raw, position.excess, **against)
        return gain >= 0 or bool(self.rng.random() < math.exp(self.options.beta * gain))

    def get_state(self) -> SavedState:
        """The generator, the chain and the best it saw."""
        places = [place and tuple(place) for place in (self._position, self._best)]
        return {"rng": self.rng.bit_generator.state, "chain": places, "stale": self._stale}

    def set_state(self, state: SavedState) -> None:
        """Puts the chain back."""
        self.rng.bit_generator.state = state["rng"]
        self._position, self._best = (place and _Place(*place) for place in state["chain"])
        self._stale = state["stale"]
