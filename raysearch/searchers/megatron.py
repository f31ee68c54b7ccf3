"""The heuristic baseline: Megatron-LM's sharding, all degrees."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import Outcome, Searcher
from sim.layers.model import Model
from sim.ops.heuristics import megatron_dims, megatron_sp_dims


class _DegreeSweep(Searcher):
    """Calls every combination of degrees and batch once, with the dims of a heuristic; then it has nothing to propose.

    The order is that of an odometer over the tables, tp slowest, then ep, pp and batch: a budget below
    `sweep_calls` leaves out the largest tp degrees first, those that span many nodes. Neither the seed nor
    any outcome changes anything.

    Raises:
        InputError: The space has more than degrees and batch: `raysearch.simulators.opening.searched_space` has it.
    """

    _proposed = 0

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        if not space.degrees_only:
            raise InputError(f"{self.name} has dims of its own: expected a space of degrees alone, got {space.names}")

    @classmethod
    @abc.abstractmethod
    def own_dims(cls, model: Model) -> tuple[int, ...]:
        """The heuristic's choice per fused op."""

    @classmethod
    def sweep_calls(cls, space: StrategySpace) -> int:
        """Number of combinations of degrees and batch."""
        return space.size

    def ask(self, observation: NDArray[np.float32]) -> Action | None:
        """The next combination."""
        if self._proposed == self.sweep_calls(self.space):
            return None
        indices = np.unravel_index(self._proposed, self.space.sizes)
        self._proposed += 1
        return np.array(indices, dtype=np.int64)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Learns nothing."""

    def get_state(self) -> SavedState:
        """How many were proposed."""
        return {"proposed": self._proposed}

    def set_state(self, state: SavedState) -> None:
        """Continues after those proposed."""
        self._proposed = state["proposed"]


@final
class MegatronSearcher(_DegreeSweep):
    """Megatron-LM: attention and feed-forward split over heads and columns, two all-reduces per layer.

    Source: Shoeybi et al., "Megatron-LM", 2019; "Learning to Shard", section 4, searches its degrees likewise.
    """

    name: ClassVar[str] = "megatron"

    @classmethod
    def own_dims(cls, model: Model) -> tuple[int, ...]:
        """{none,1,1,0,none,none,none,none,1,1,0,none} for a mixture of experts."""
        return megatron_dims(model)


@final
class MegatronSPSearcher(_DegreeSweep):
    """Megatron-LM with sequence parallelism: tokens split between the GEMMs.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """

    name: ClassVar[str] = "megatron_sp"

    @classmethod
    def own_dims(cls, model: Model) -> tuple[int, ...]:
        """{0,1,1,0,0,0,0,0,1,1,0,0} for a mixture of experts."""
        return megatron_sp_dims(model)
