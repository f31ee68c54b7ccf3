"""The random walk proper: from neighbour to neighbour, whatever they are worth."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Outcome, Searcher


@final
class RandomWalkSearcher(Searcher):
    """Starts at a uniform action, then moves to a uniform neighbour at every call and never turns back.

    Calls are correlated: the walk needs many calls to leave a region, so it sees less of the space than
    independent samples do. Papers mean either by "random walk"; this is the literal one.
    """

    name: ClassVar[str] = "random_walk"
    _position: Action | None = None

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The next step of the walk."""
        if self._position is None:
            self._position = self.space.sample(self.rng)
        else:
            self._position = self.space.neighbour(self._position, self.rng)
        return self._position.copy()

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Learns nothing: the walk moved when it was asked."""

    def get_state(self) -> SavedState:
        """The generator and the position."""
        return {"rng": self.rng.bit_generator.state, "position": self._position}

    def set_state(self, state: SavedState) -> None:
        """Puts the walk back."""
        self.rng.bit_generator.state = state["rng"]
        self._position = state["position"]
