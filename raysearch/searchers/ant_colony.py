"""Ant colony optimisation."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.merit import merit


class AntColonyOptions(NoOptions):
    """Settings of `ant_colony`.

    Attributes:
        ants: Calls of an iteration, after which the pheromone changes.
        evaporation: Share of the pheromone that an iteration loses.
        least_share: Least probability of a value, as a share of the uniform one's; also how far pheromone may fall.
        elite_share: Share of the iterations in which the best ant so far deposits, instead of the iteration's best.
        patience: Iterations without a better strategy after which all pheromone is as at the start; 0: never.
    """

    ants: Annotated[int, Field(ge=1)]
    evaporation: Annotated[float, Field(gt=0, le=1)]
    least_share: Annotated[float, Field(ge=0, lt=1)]
    elite_share: Annotated[float, Field(ge=0, le=1)]
    patience: Annotated[int, Field(ge=0)]


@final
class AntColonySearcher(Searcher):
    """Max-min ant system: an ant draws every coordinate by the pheromone on its values.

    After each iteration a share of all pheromone evaporates, and one ant lays as much on the values it took, so that
    each coordinate's pheromone is a distribution; no value's falls below a least share, and all are uniform again
    once the colony has brought nothing better for a while. Ants are compared by merit only, so infeasible ones are
    graded by their excess. There is no heuristic besides the pheromone: the simulator is a black box.

    Source: Stuetzle and Hoos, "MAX-MIN Ant System", 2000, in the hyper-cube framework of Blum and Dorigo, 2004. Own
    code: the maintained libraries that have ant colonies walk graphs or know real numbers only, and none has an
    ask/tell interface.
    """

    name: ClassVar[str] = "ant_colony"
    Options: ClassVar[type[BaseModel]] = AntColonyOptions

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: AntColonyOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        self._pheromone = self._uniform()
        self._ants: list[tuple[float, tuple[int, ...]]] = []  # answered in this iteration
        self._best: tuple[float, tuple[int, ...]] = (-math.inf, ())  # since the pheromone was last uniform
        self._stale = 0

    def _uniform(self) -> list[NDArray[np.float64]]:
        return [np.full(size, 1.0 / size) for size in self.space.factored.actions.sizes]

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The way of one ant."""
        draws = self.rng.random(len(self._pheromone))
        chosen = [
            min(int(np.searchsorted(np.cumsum(trail), draw, side="right")), len(trail) - 1)
            for trail, draw in zip(self._pheromone, draws, strict=True)
        ]
        return self.space.factored.decode(np.array(chosen, dtype=np.int64))

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Notes the ant; the last of an iteration changes the pheromone."""
        self._ants.append((merit(outcome), tuple(self.space.factored.encode(action).tolist())))
        if len(self._ants) == self.options.ants:
            self._iterate()

    def _iterate(self) -> None:
        first = max(self._ants)
        self._ants = []
        self._stale = 0 if first > self._best else self._stale + 1
        self._best = max(self._best, first)
        if self._stale == self.options.patience > 0:
            self._pheromone, self._stale, self._best = self._uniform(), 0, (-math.inf, ())
            return
        depositor = self._best if self.rng.random() < self.options.elite_share else first
        for trail, value in zip(self._pheromone, depositor[1], strict=True):
            trail *= 1 - self.options.evaporation
            trail[value] += self.options.evaporation
            np.maximum(trail, self.options.least_share / len(trail), out=trail)
            trail /= trail.sum()

    def metrics(self) -> dict[str, float]:
        """How sure the colony is: mean over the coordinates of the likeliest value's probability."""
        return {"confidence": float(np.mean([trail.max() for trail in self._pheromone]))}

    def get_state(self) -> SavedState:
        """The generator, the pheromone and the ants of the unfinished iteration."""
        return {
            "rng": self.rng.bit_generator.state,
            "pheromone": [trail.copy() for trail in self._pheromone],
            "ants": list(self._ants),
            "best": (self._best, self._stale),
        }

    def set_state(self, state: SavedState) -> None:
        """Puts the colony back."""
        self.rng.bit_generator.state = state["rng"]
        self._pheromone = [trail.copy() for trail in state["pheromone"]]
        self._ants = list(state["ants"])
        self._best, self._stale = state["best"]
