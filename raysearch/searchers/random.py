"""Independent sampling: the baseline that learns nothing."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Outcome, Searcher


@final
class RandomSearcher(Searcher):
    """Every action equally likely at every call, with replacement."""

    name: ClassVar[str] = "random"

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A uniform action."""
        return self.space.sample(self.rng)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Learns nothing."""

    def get_state(self) -> SavedState:
        """The generator."""
        return {"rng": self.rng.bit_generator.state}

    def set_state(self, state: SavedState) -> None:
        """Puts the generator back."""
        self.rng.bit_generator.state = state["rng"]
