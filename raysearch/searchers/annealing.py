"""Simulated annealing: as the paper runs it, and tuned."""

from __future__ import annotations

import abc
import math
import sys
from typing import Annotated, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.space import Action
from raysearch.merit import merit
from raysearch.searcher import NoOptions, Outcome, Searcher


class _Annealing(Searcher):
    """Moves to a neighbour if it is worth more, or with probability exp(-loss / temperature).

    Source: Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953; Kirkpatrick et al.,
    "Optimization by Simulated Annealing", 1983.
    """

    _position: Action | None = None
    _worth = 0.0
    _told = 0

    @property
    @abc.abstractmethod
    def temperature(self) -> float:
        """Temperature of the next call, in the unit of `_worth_of`."""

    @abc.abstractmethod
    def _worth_of(self, outcome: Outcome) -> float:
        """What a call is worth."""

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A neighbour of the position; a uniform action at the start."""
        if self._position is None:
            return self.space.sample(self.rng)
        return self.space.neighbour(self._position, self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action or stays."""
        worth = self._worth_of(outcome)
        if self._position is None or self._accepts(worth - self._worth):
            self._position, self._worth = action.copy(), worth
        self._told += 1

    def _accepts(self, gain: float) -> bool:
        if gain >= 0:
            return True
        # The floor is for budgets so long that the cosine rounds to -1.
        return bool(self.rng.random() < math.exp(gain / max(self.temperature, sys.float_info.min)))

    def metrics(self) -> dict[str, float]:
        """Temperature and worth of the position."""
        return {"temperature": self.temperature, "current": self._worth}

    def get_state(self) -> dict[str, Any]:
        """The generator, the position and how far the cooling is."""
        return {
            "rng": self.rng.bit_generator.state,
            "position": self._position,
            "worth": self._worth,
            "told": self._told,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts the walk back."""
        self.rng.bit_generator.state = state["rng"]
        self._position, self._worth, self._told = state["position"], state["worth"], state["told"]


class AnnealingOptions(NoOptions):
    """Settings of `annealing`.

    Attributes:
        initial_temperature: Temperature of the first call, tokens/s/GPU.
    """

    initial_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@final
class AnnealingSearcher(_Annealing):
    """Annealing as the paper runs it: worth and temperature in raw tokens/s/GPU.

    Nothing is scaled to the workload, so one temperature is hot on a slow workload and cold on a fast one. An
    infeasible strategy is worth 0 tokens/s/GPU: among infeasible ones the walk is free, and a hot walk falls back to
    them from feasible ones that earn little against the temperature. The temperature after k of B calls is
    T0 (1 + cos(pi k / B)) / 2.

    The paper does not name its neighbours; here they differ in one coordinate, as in `random_walk`. [assumed]

    Source: "Learning to Shard", appendix A (cosine annealing, initial temperature 100).
    """

    name: ClassVar[str] = "annealing"
    Options: ClassVar[type[BaseModel]] = AnnealingOptions

    @property
    def temperature(self) -> float:
        """Temperature of the next call, tokens/s/GPU; 0.0 once the budget is spent."""
        progress = min(self._told / self.budget, 1.0)
        return self.options.initial_temperature * (1 + math.cos(math.pi * progress)) / 2

    def _worth_of(self, outcome: Outcome) -> float:
        return outcome.raw


class TunedAnnealingOptions(NoOptions):
    """Settings of `annealing_tuned`.

    Attributes:
        initial_temperature: Temperature of the first call, nats of throughput.
        final_temperature: Temperature when the budget is spent, nats.
        chains: Equal parts of the budget; each is cooled from the initial temperature, and all but the first begin
            at the best strategy so far.
    """

    initial_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    final_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    chains: Annotated[int, Field(ge=1)]


@final
class TunedAnnealingSearcher(_Annealing):
    """Annealing at its best: worth in nats, infeasible calls graded, cooled geometrically.

    A loss of 1 % of throughput is the same on every workload, and from an infeasible strategy the walk is led to
    the feasible ones; see `raysearch.merit`.
    """

    name: ClassVar[str] = "annealing_tuned"
    Options: ClassVar[type[BaseModel]] = TunedAnnealingOptions

    _best: Action | None = None
    _best_worth = -math.inf

    @property
    def temperature(self) -> float:
        """Temperature of the next call, nats."""
        options: TunedAnnealingOptions = self.options
        share = self._told % self._chain_calls / self._chain_calls
        return options.initial_temperature * (options.final_temperature / options.initial_temperature) ** share

    @property
    def _chain_calls(self) -> int:
        return math.ceil(self.budget / self.options.chains)

    def _worth_of(self, outcome: Outcome) -> float:
        return merit(outcome)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action or stays; at the end of a chain goes back to the best."""
        super().tell(action, outcome)
        if self._worth > self._best_worth:
            self._best, self._best_worth = self._position, self._worth
        if self._told % self._chain_calls == 0:
            self._position, self._worth = self._best, self._best_worth

    def get_state(self) -> dict[str, Any]:
        """The walk and the best it saw."""
        return super().get_state() | {"best": self._best, "best_worth": self._best_worth}

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts the walk back."""
        super().set_state(state)
        self._best, self._best_worth = state["best"], state["best_worth"]
