"""All calls of a search: what the policy copies from, the critic learns from and nobody calls again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome

NOTHING = 1e-30
"""Tokens/s/GPU that stand for none at all, so that every call has a logarithm."""


def penalised_merit(outcome: Outcome, penalty: float) -> float:
    """What a call is worth to the search: log(tokens/s/GPU), less what an infeasible strategy misses its limits by.

    The best strategies lie at a limit. A fast one just past it may be one choice away from being feasible, and is
    worth more than a slow one that is feasible already; one far past it is worth nothing.

    Args:
        outcome: Of the call.
        penalty: Weight of `Outcome.excess`; above 1, so that no throughput is gained by missing a limit further
            in the same proportion.
    """
    return math.log(max(outcome.simulated, outcome.raw, NOTHING)) - penalty * outcome.excess


class CallMemory:
    """The calls that are known, each by its number. The order in which it heard of them makes no difference.

    Args:
        capacity: Calls that there is room for at first.
        sizes: Values of each coordinate, [A].
        elites: T, the most elites.

    Attributes:
        calls: Calls that are known.
        best: Numbers of the elite calls, best first; the earlier one first among equals, and the first of those of one
            strategy. None is older than the last `forget_elites`.
    """

    def __init__(self, capacity: int, sizes: Sequence[int], elites: int) -> None:
        self.calls = 0
        self.best: list[int] = []
        self._forgotten = 0  # calls before this number can no longer be elites
        self._elites = elites
        self._actions = np.zeros((capacity, len(sizes)), np.int16)
        self._merits = np.zeros(capacity)
        self._known = np.zeros(capacity, np.bool_)
        self._size = math.prod(sizes)
        self._radix = np.array([math.prod(sizes[place + 1 :]) for place in range(len(sizes))], np.int64)
        self._sizes = tuple(sizes)
        self._first: dict[int, int] = {}  # number of the first call of each strategy

    @property
    def actions(self) -> np.ndarray:
        """The known calls' actions, int16 `[calls, A]`, by number."""
        return self._actions[self._known]

    @property
    def elites(self) -> np.ndarray:
        """Actions of the elites, best first, int16 `[at most T, A]`."""
        return self._actions[self.best]

    @property
    def merits(self) -> np.ndarray:
        """The known calls' merits `[calls]`, by number."""
        return self._merits[self._known]

    @property
    def settled(self) -> int:
        """Number of the first call that is not known."""
        return int(np.append(self._known, False).argmin())

    def add(self, number: int, action: np.ndarray, merit: float) -> None:
        """Notes that call `number` was of `action` `[A]`."""
        if number >= len(self._known):
            self._grow(2 * number + 1)
        self.calls += 1
        self._known[number], self._actions[number], self._merits[number] = True, action, merit
        rank = self.rank(action)
        before = self._first.get(rank)
        if before is not None and before < number:
            return
        self._first[rank] = number
        self._rank_elites([*(each for each in self.best if each != before), number])

    def _grow(self, capacity: int) -> None:
        more = capacity - len(self._known)
        self._known = np.pad(self._known, (0, more))
        self._merits = np.pad(self._merits, (0, more))
        self._actions = np.pad(self._actions, ((0, more), (0, 0)))

    def _rank_elites(self, numbers: Sequence[int]) -> None:
        young = (number for number in numbers if number >= self._forgotten)
        self.best = sorted(young, key=lambda each: (-self._merits[each], each))[: self._elites]

    @property
    def stagnant_calls(self) -> int:
        """Calls since the best elite's; 0 while there is none."""
        return max(0, self.calls - 1 - self.best[0]) if self.best else 0

    def forget_elites(self, before: int) -> None:
        """Leaves it to calls from number `before` on to be elites; all calls stay known."""
        self._forgotten = before
        self._rank_elites(self.best)

    def is_new(self, action: np.ndarray) -> bool:
        """Whether no call was made of `action` `[A]`."""
        return self.rank(action) not in self._first

    @property
    def unknown(self) -> int:
        """Strategies that were not called."""
        return self._size - len(self._first)

    def draw_new(self, rng: np.random.Generator) -> np.ndarray:
        """An action `[A]`, every one that was not called equally likely; any, once all were."""
        if not (left := self.unknown):
            return rng.integers(self._sizes)
        # The k-th rank that is not seen is k plus the number of seen ranks before it.
        rank = int(rng.integers(left))
        unseen_before = np.sort(np.fromiter(self._first, np.int64)) - np.arange(len(self._first))
        rank += int(np.searchsorted(unseen_before, rank, "right"))
        return np.array(np.unravel_index(rank, self._sizes), np.int64)

    def rank(self, action: np.ndarray) -> int:
        """Place of `action` `[A]` among all."""
        return int(action @ self._radix)

    def get_state(self) -> SavedState:
        """Copy of all calls; the rest follows from them."""
        return {
            "numbers": np.flatnonzero(self._known),
            "actions": self.actions,
            "merits": self.merits,
            "forgotten": self._forgotten,
        }

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot of all calls."""
        self.calls, self.best, self._first = 0, [], {}
        self._known[:] = False
        self._forgotten = state["forgotten"]
        calls = state["numbers"].tolist(), state["actions"].astype(np.int64), state["merits"].tolist()
        for number, action, value in zip(*calls, strict=True):
            self.add(number, action, value)
