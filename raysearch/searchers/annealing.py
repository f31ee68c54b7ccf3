"""Simulated annealing as the paper runs it."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.space import Action
from raysearch.searcher import NoOptions, Outcome, Searcher


class AnnealingOptions(NoOptions):
    """Settings of `annealing`.

    Attributes:
        initial_temperature: Temperature of the first call, tokens/s/GPU.
    """

    initial_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@final
class AnnealingSearcher(Searcher):
    """Moves to a neighbour if it is better, or with probability exp(-loss / temperature).

    The loss is in raw tokens/s/GPU, as is the temperature: nothing is scaled to the workload, so one
    temperature is hot on a slow workload and cold on a fast one. An infeasible strategy is worth 0 tokens/s/GPU:
    among infeasible ones the walk is free, and a hot walk falls back to them from feasible ones that earn
    little against the temperature. The temperature after k of B calls is T0 (1 + cos(pi k / B)) / 2.

    The paper does not name its neighbours; here they differ in one coordinate, as in `random_walk`. [assumed]

    Source: "Learning to Shard", appendix A (cosine annealing, initial temperature 100); acceptance: Metropolis
    et al., "Equation of State Calculations by Fast Computing Machines", 1953.
    """

    name: ClassVar[str] = "annealing"
    Options: ClassVar[type[BaseModel]] = AnnealingOptions

    _position: Action | None = None
    _raw = 0.0
    _told = 0

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A neighbour of the position; a uniform action at the start."""
        if self._position is None:
            return self.space.sample(self.rng)
        return self.space.neighbour(self._position, self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action or stays."""
        if self._position is None or self._accepts(outcome.raw - self._raw):
            self._position, self._raw = action.copy(), outcome.raw
        self._told += 1

    @property
    def temperature(self) -> float:
        """Temperature of the next call, tokens/s/GPU; 0.0 once the budget is spent."""
        progress = min(self._told / self.budget, 1.0)
        return self.options.initial_temperature * (1 + math.cos(math.pi * progress)) / 2

    def _accepts(self, gain: float) -> bool:
        if gain >= 0:
            return True
        # The floor is for budgets so long that the cosine rounds to -1.
        return bool(self.rng.random() < math.exp(gain / max(self.temperature, sys.float_info.min)))

    def metrics(self) -> dict[str, float]:
        """Temperature and worth of the position, tokens/s/GPU."""
        return {"temperature": self.temperature, "current": self._raw}

    def get_state(self) -> dict[str, Any]:
        """The generator, the position and how far the cooling is."""
        return {
            "rng": self.rng.bit_generator.state,
            "position": self._position,
            "raw": self._raw,
            "told": self._told,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts the walk back."""
        self.rng.bit_generator.state = state["rng"]
        self._position, self._raw, self._told = state["position"], state["raw"], state["told"]
