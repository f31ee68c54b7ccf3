"""Coordinate ascent with random restarts."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Outcome, Searcher


@dataclass(slots=True)
class _Climb:
    """One ascent from one random start.

    Attributes:
        position: Where it stands, [A].
        order: Coordinates in the order of a sweep, [A].
        raw: Tokens/s/GPU of the position; -inf until the start is evaluated.
        opened: Coordinates opened since the last strict improvement, the one that brought it included.
        cursor: Coordinates opened in all.
        untried: Values of the open coordinate still to call, last first.
    """

    position: Action
    order: NDArray[np.int64]
    raw: float = -math.inf
    opened: int = 0
    cursor: int = 0
    untried: list[int] = field(default_factory=list)

    @property
    def coordinate(self) -> int:
        return int(self.order[(self.cursor - 1) % len(self.order)])


@final
class CoordinateSearcher(Searcher):
    """Tries every value of one coordinate after the other and keeps the best.

    From a uniform start it sweeps the coordinates again and again, in an order drawn per start, calling every
    other value of each. It moves to whatever is at least as good: strictly better values, and equal ones, so that
    it drifts over plateaus instead of standing still. Once a whole sweep brought nothing strictly better the
    position is a local optimum, and it restarts.

    An infeasible strategy is worth 0 tokens/s/GPU, and how far it is from feasible is not known here. So from an
    infeasible start the plateau rule is the only guide: the position drifts through one sweep, and the
    climb begins at the first feasible strategy it meets; if it meets none, the start is given up.
    """

    name: ClassVar[str] = "coordinate"
    _climb: _Climb | None = None
    _starts = 0

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The next untried value of the open coordinate, or a new start."""
        if self._climb is None or not self._open_next(self._climb):
            return self._start()
        action = self._climb.position.copy()
        action[self._climb.coordinate] = self._climb.untried.pop()
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Moves to the action if it is at least as good."""
        climb = self._climb
        if climb is None or outcome.raw < climb.raw:
            return
        if outcome.raw > climb.raw:
            climb.opened = min(climb.cursor, 1)  # 0 at the start, which no coordinate brought
        climb.position, climb.raw = action.copy(), outcome.raw

    def begin_with(self, action: Action, outcome: Outcome) -> None:
        """Climbs from the best that was given."""
        if self._climb is None or outcome.raw > self._climb.raw:
            self._climb = self._from(action.copy())
            self.tell(action, outcome)

    def _start(self) -> Action:
        self._climb = self._from(self.space.sample(self.rng))
        return self._climb.position.copy()

    def _from(self, position: Action) -> _Climb:
        self._starts += 1
        return _Climb(position, self.rng.permutation(len(self.space.sizes)))

    def _open_next(self, climb: _Climb) -> bool:
        """Sees to it that there are untried values; False if the position is a local optimum."""
        while not climb.untried:
            if climb.opened == len(climb.order):
                return False
            climb.opened += 1
            climb.cursor += 1
            own = climb.position[climb.coordinate]
            climb.untried = self.space.moves(climb.coordinate, int(own))
            self.rng.shuffle(climb.untried)  # in table order a plateau would drift to the largest values
        return True

    def metrics(self) -> dict[str, float]:
        """How many starts were made."""
        return {"starts": float(self._starts)}

    def get_state(self) -> SavedState:
        """The generator and the climb."""
        return {
            "rng": self.rng.bit_generator.state,
            "climb": None if self._climb is None else asdict(self._climb),
            "starts": self._starts,
        }

    def set_state(self, state: SavedState) -> None:
        """Puts the climb back."""
        self.rng.bit_generator.state = state["rng"]
        self._climb = None if state["climb"] is None else _Climb(**copy.deepcopy(state["climb"]))
        self._starts = state["starts"]
