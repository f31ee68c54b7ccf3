"""What a searcher was asked and told, in order: enough to rebuild one whose library keeps no plain state.

A library's optimiser decides from its seed, its settings and what it was told, so one that is asked and told the same
again is the same. It takes the library's own time for those calls, and nothing of what the calls cost.
"""

from __future__ import annotations

from typing import final

import numpy as np

from envs.saved_state import SavedState
from envs.space import Action
from raysearch.searchers.interface import Outcome, Searcher

_NO_ELITES = np.zeros((0, 0), np.float32)
_Told = tuple[float, bool, float, float]
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
        self._outcomes: list[_Told | None] = []  # None: it was asked for

    def asked(self, action: Action) -> None:
        """Notes an action that was proposed."""
        self._note(action, None)

    def told(self, action: Action, outcome: Outcome) -> None:
        """Notes what came of an action; of the outcome what is about this call alone."""
        self._note(action, (outcome.raw, outcome.feasible, outcome.excess, outcome.simulated))

    def _note(self, action: Action, outcome: _Told | None) -> None:
        self._actions.append(tuple(action.tolist()))
        self._outcomes.append(outcome)

    def get_state(self) -> SavedState:
        """Arrays of n events: actions `[n, A]`, whether told `[n]`, outcomes `[n, 4]`."""
        nothing = (0.0, False, 0.0, 0.0)
        return {
            "actions": np.array(self._actions, np.int32).reshape(-1, self._coordinates),
            "told": np.array([outcome is not None for outcome in self._outcomes], bool),
            "outcomes": np.array([outcome or nothing for outcome in self._outcomes], np.float64).reshape(-1, 4),
        }


def rebuilt(searcher: Searcher, state: SavedState) -> Searcher:
    """A new searcher with the same arguments, asked and told what a `History` noted; the elites it is shown are none.

    Raises:
        ValueError: It proposes something else, so its library is another version.
    """
    fresh = type(searcher)(searcher.space, seed=searcher.seed, budget=searcher.budget, options=searcher.options)
    events = zip(state["actions"].astype(np.int64), state["told"].tolist(), state["outcomes"].tolist(), strict=True)
    for action, told, (raw, feasible, excess, simulated) in events:
        if told:
            fresh.tell(action, Outcome(raw, bool(feasible), 0.0, 0.0, _NO_ELITES, excess, simulated))
        elif (proposed := fresh.ask(_NO_ELITES)) is None or not np.array_equal(proposed, action):
            raise ValueError(f"expected {searcher.name} to propose {action.tolist()} once more, got {proposed}")
    return fresh
