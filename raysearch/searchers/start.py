"""Any searcher, begun with given strategies: they are evaluated first, and it learns from their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Environment, Outcome, Searcher
from sim.json_object import JsonObject


@final
class StartedSearcher(Searcher):
    """Calls given actions, then continues as another searcher that knows of them.

    Args:
        inner: Who continues.
        start: Actions `[A]` to call first.
    """

    name: ClassVar[str] = "started"

    def __init__(self, inner: Searcher, start: Sequence[Action]) -> None:
        super().__init__(inner.space, seed=inner.seed, budget=inner.budget, options=inner.options)
        self._inner = inner
        self._start = list(start)
        self._asked = self._answers = 0

    def step(self, environment: Environment, calls: int) -> None:
        """Begins what was given and takes in one of it; then it is the other's turn."""
        while environment.may_begin and self._asked < len(self._start):
            environment.begin(self._start[self._asked].copy())
            self._asked += 1
        if self._answers == len(self._start):
            self._inner.step(environment, calls)
        else:
            self.tell(*environment.take())

    def ask(self, observation: NDArray[np.float32]) -> Action | None:
        """The next that was given, or what the other proposes."""
        if self._asked == len(self._start):
            return self._inner.ask(observation)
        self._asked += 1
        return self._start[self._asked - 1].copy()

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Tells the other, who learns of given ones as of calls that somebody else made."""
        if self._answers == len(self._start):
            self._inner.tell(action, outcome)
        else:
            self._answers += 1
            self._inner.begin_with(action, outcome)

    def get_state(self) -> SavedState:
        """How many were proposed and answered, and the other's state."""
        return {"asked": self._asked, "told": self._answers, "inner": self._inner.get_state()}

    def set_state(self, state: SavedState) -> None:
        """Continues from there."""
        self._asked, self._answers = int(state["asked"]), int(state["told"])
        self._inner.set_state(state["inner"])

    @property
    def environment(self) -> JsonObject:
        """The other's."""
        return self._inner.environment

    @property
    def chunk(self) -> int:
        """The other's."""
        return self._inner.chunk

    def chunk_figures(self) -> dict[str, float]:
        """The other's."""
        return self._inner.chunk_figures()

    def metrics(self) -> dict[str, float]:
        """The other's."""
        return self._inner.metrics()

    def close(self) -> None:
        """Closes the other."""
        self._inner.close()
