"""Simulated annealing: as the paper runs it, and tuned."""

from __future__ import annotations

import abc
import math
import sys
from typing import Annotated, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.merit import worth


class _Annealing(Searcher):
    """Moves to a neighbour if it is worth more, or with probability exp(-loss / temperature).

    Source: Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953; Kirkpatrick et al.,
    "Optimization by Simulated Annealing", 1983.
    """

    _position: Action | None = None
    _raw = 0.0
    _excess = 0.0
    _answers = 0

    @property
    @abc.abstractmethod
    def temperature(self) -> float:
        """Temperature of the next call, in the unit of `_gain`."""

    @abc.abstractmethod
    def _gain(self, outcome: Outcome) -> float:
        """How much more the call is worth than the position."""

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A neighbour of the position; a uniform action at the start."""
        if self._position is None:
            return self.space.sample(self.rng)
        return self.space.neighbour(self._position, self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action or stays."""
        if self._position is None or self._accepts(self._gain(outcome)):
            self._position, self._raw, self._excess = action.copy(), outcome.raw, outcome.excess
        self._answers += 1

    def _accepts(self, gain: float) -> bool:
        if gain >= 0:
            return True
        # The floor is for budgets so long that the cosine rounds to -1.
        return bool(self.rng.random() < math.exp(gain / max(self.temperature, sys.float_info.min)))

    def metrics(self) -> dict[str, float]:
        """Temperature, and tokens/s/GPU of the position."""
        return {"temperature": self.temperature, "current": self._raw}

    def get_state(self) -> SavedState:
        """The generator, the position and how far the cooling is."""
        return {
            "rng": self.rng.bit_generator.state,
            "position": self._position,
            "raw": self._raw,
            "excess": self._excess,
            "told": self._answers,
        }

    def set_state(self, state: SavedState) -> None:
        """Puts the walk back."""
        self.rng.bit_generator.state = state["rng"]
        self._position, self._raw, self._excess = state["position"], state["raw"], state["excess"]
        self._answers = state["told"]


def _cooled(temperature: float, share: float) -> float:
    """What a half cosine leaves of a temperature after a share of the time; 0 in the end."""
    return temperature * (1 + math.cos(math.pi * share)) / 2


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
        progress = min(self._answers / self.budget, 1.0)
        return _cooled(self.options.initial_temperature, progress)

    def _gain(self, outcome: Outcome) -> float:
        return outcome.raw - self._raw


class TunedAnnealingOptions(NoOptions):
    """Settings of `annealing_tuned`.

    Attributes:
        initial_temperature: Temperature at the start of a chain, nats of throughput.
        final_temperature: Temperature at its end, reached on a half cosine, nats.
        chains: Equal parts of the budget; each is cooled from the initial temperature, and all but the first begin
            at the best strategy so far.
        gap: How far below the best so far an infeasible strategy lies before its excess is counted, nats.
    """

    initial_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    final_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    chains: Annotated[int, Field(ge=1)]
    gap: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@final
class TunedAnnealingSearcher(_Annealing):
    """Annealing at its best: gains in nats, infeasible calls graded, one or several coolings.

    A loss of 1 % of throughput is the same on every workload. From an infeasible strategy the excess leads the walk
    to feasible ones; how far below these it lies is an option, so that a warm walk can cross infeasible ground.
    """

    name: ClassVar[str] = "annealing_tuned"
    Options: ClassVar[type[BaseModel]] = TunedAnnealingOptions

    _best: tuple[Action | None, float, float] = (None, 0.0, math.inf)  # action, raw, excess

    @property
    def temperature(self) -> float:
        """Temperature of the next call, nats."""
        options: TunedAnnealingOptions = self.options
        share = self._answers % self._chain_calls / self._chain_calls
        return options.final_temperature + _cooled(options.initial_temperature - options.final_temperature, share)

    @property
    def _chain_calls(self) -> int:
        return math.ceil(self.budget / self.options.chains)

    def _gain(self, outcome: Outcome) -> float:
        against = {"best": outcome.best, "gap": self.options.gap}
        return worth(outcome.raw, outcome.excess, **against) - worth(self._raw, self._excess, **against)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action or stays; at the end of a chain goes back to the best."""
        super().tell(action, outcome)
        _, raw, excess = self._best
        if (outcome.raw, -outcome.excess) > (raw, -excess):
            self._best = (action.copy(), outcome.raw, outcome.excess)
        if self._answers % self._chain_calls == 0:
            self._position, self._raw, self._excess = self._best

    def get_state(self) -> SavedState:
        """The walk and the best it saw."""
        return super().get_state() | {"best": self._best}

    def set_state(self, state: SavedState) -> None:
        """Puts the walk back."""
        super().set_state(state)
        self._best = state["best"]
