"""All calls of a search: what the policy copies from, the critic learns from and nobody calls again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raysearch.searcher import Outcome

NOTHING = 1e-30
"""Tokens/s/GPU that stand for none at all, so that every call has a logarithm."""


def merit(outcome: Outcome, penalty: float) -> float:
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
    """The calls made so far.

    Args:
        capacity: Most calls.
        sizes: Values of each coordinate, [A].
        elites: T, the most elites.

    Attributes:
        calls: Calls so far.
        best: Numbers of the elite calls, best first; the earlier one first among equals. None is older than the
            last `forget_elites`.
    """

    def __init__(self, capacity: int, sizes: Sequence[int], elites: int) -> None:
        self.calls = 0
        self.best: list[int] = []
        self._forgotten = 0  # calls that can no longer be elites
        self._elites = elites
        self._actions = np.zeros((capacity, len(sizes)), np.int16)
        self._merits = np.zeros(capacity)
        self._size = math.prod(sizes)
        self._radix = np.array([math.prod(sizes[place + 1 :]) for place in range(len(sizes))], np.int64)
        self._sizes = tuple(sizes)
        self._seen: set[int] = set()

    @property
    def actions(self) -> np.ndarray:
        """Every call's action, int16 `[calls, A]`."""
        return self._actions[: self.calls]

    @property
    def elites(self) -> np.ndarray:
        """Actions of the elites, best first, int16 `[at most T, A]`."""
        return self._actions[self.best]

    @property
    def merits(self) -> np.ndarray:
        """Every call's merit `[calls]`."""
        return self._merits[: self.calls]

    def add(self, action: np.ndarray, merit: float) -> None:
        """Notes a call of `action` `[A]`."""
        call = self.calls
        self.calls += 1
        self._actions[call], self._merits[call] = action, merit
        new = self.is_new(action)
        self._seen.add(self._rank(action))
        if new and call >= self._forgotten:
            self.best = sorted([*self.best, call], key=lambda each: (-self._merits[each], each))[: self._elites]

    @property
    def stagnant_calls(self) -> int:
        """Calls since the best elite's; 0 while there is none."""
        return self.calls - 1 - self.best[0] if self.best else 0

    def forget_elites(self, pending: int = 0) -> None:
        """Leaves it to later calls to be elites; all calls so far stay known.

        Args:
            pending: Calls under way, which the elites that are forgotten led to: they will be none either.
        """
        self.best, self._forgotten = [], self.calls + pending

    def is_new(self, action: np.ndarray) -> bool:
        """Whether no call was made of `action` `[A]`."""
        return self._rank(action) not in self._seen

    def draw_new(self, rng: np.random.Generator) -> np.ndarray:
        """An action `[A]`, every one that was not called equally likely; any, once all were."""
        left = self._size - len(self._seen)
        if not left:
            return rng.integers(self._sizes)
        # The k-th rank that is not seen is k plus the number of seen ranks before it.
        rank = int(rng.integers(left))
        unseen_before = np.sort(np.fromiter(self._seen, np.int64)) - np.arange(len(self._seen))
        rank += int(np.searchsorted(unseen_before, rank, "right"))
        return np.array(np.unravel_index(rank, self._sizes), np.int64)

    def _rank(self, action: np.ndarray) -> int:
        return int(action @ self._radix)

    def get_state(self) -> dict[str, Any]:
        """Copy of all calls; the rest follows from them."""
        return {"actions": self.actions.copy(), "merits": self.merits.copy(), "forgotten": self._forgotten}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back to a snapshot."""
        self.calls, self.best, self._seen, self._forgotten = 0, [], set(), state["forgotten"]
        for action, value in zip(state["actions"].astype(np.int64), state["merits"].tolist(), strict=True):
            self.add(action, value)
