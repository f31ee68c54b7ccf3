"""The asks and tells of a searcher, in order: enough to rebuild one whose library keeps no plain state.

A library's optimiser decides from its seed, its settings and its outcomes, so repeating its asks and tells on a new one
rebuilds it. That takes the library's own time for those calls, and no evaluation.
"""

from __future__ import annotations

from typing import final

import numpy as np

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Outcome, Searcher

_NO_ELITES = np.zeros((0, 0), np.float32)
_Answer = tuple[float, bool, float, float]
"""Raw, whether feasible, excess, simulated."""


@final
class History:
    """The asks and tells of one searcher so far.

    Args:
        coordinates: A, of an action.
    """

    def __init__(self, coordinates: int) -> None:
        self._coordinates = coordinates
        self._actions: list[tuple[int, ...]] = []
        self._outcomes: list[_Answer | None] = []  # None: a proposal

    def add_proposal(self, action: Action) -> None:
        """Records an action that was proposed."""
        self._add(action, None)

    def add_outcome(self, action: Action, outcome: Outcome) -> None:
        """Records the outcome of an action; of it what is about this call alone."""
        self._add(action, (outcome.raw, outcome.feasible, outcome.excess, outcome.simulated))

    def _add(self, action: Action, outcome: _Answer | None) -> None:
        self._actions.append(tuple(action.tolist()))
        self._outcomes.append(outcome)

    def get_state(self) -> SavedState:
        """Arrays of n events: actions `[n, A]`, whether an outcome `[n]`, outcomes `[n, 4]`."""
        nothing = (0.0, False, 0.0, 0.0)
        return {
            "actions": np.array(self._actions, np.int32).reshape(-1, self._coordinates),
            "told": np.array([outcome is not None for outcome in self._outcomes], bool),
            "outcomes": np.array([outcome or nothing for outcome in self._outcomes], np.float64).reshape(-1, 4),
        }


def rebuilt(searcher: Searcher, state: SavedState) -> Searcher:
    """A new searcher with the same arguments, after the asks and tells of a `History`; it is shown no elites.

    Raises:
        ValueError: It proposes something else, so its library is another version.
    """
    fresh = type(searcher)(searcher.space, seed=searcher.seed, budget=searcher.budget, options=searcher.options)
    events = zip(state["actions"].astype(np.int64), state["told"].tolist(), state["outcomes"].tolist(), strict=True)
    for action, answered, (raw, feasible, excess, simulated) in events:
        if answered:
            fresh.tell(action, Outcome(raw, bool(feasible), 0.0, 0.0, _NO_ELITES, excess, simulated))
        elif (proposed := fresh.ask(_NO_ELITES)) is None or not np.array_equal(proposed, action):
            raise ValueError(f"expected {searcher.name} to propose {action.tolist()} once more, got {proposed}")
    return fresh
