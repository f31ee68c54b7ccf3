"""All calls of a search: what the policy copies from, the critic learns from and nobody calls again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from raysearch.ppo.features import ORDERED
from raysearch.searcher import Outcome

INFEASIBLE = -100.0
"""Merit at a limit just missed; a feasible strategy is worth more: log(tokens/s/GPU) > -100."""


def merit(outcome: Outcome) -> float:
    """Puts all strategies in one order: feasible ones by throughput, then the others by how far they miss limits."""
    if outcome.feasible and outcome.raw > 0:
        return math.log(outcome.raw)
    return INFEASIBLE - outcome.excess


@final
class CallMemory:
    """The calls made so far.

    Elites are the best calls with different degrees, infeasible ones among them while there are few feasible: what
    differs in choices alone would be near copies of one strategy.

    Args:
        capacity: Most calls.
        sizes: Values of each coordinate, [A].
        elites: T, the most elites.
        apart: Two elites differ in one of the first `apart` coordinates.

    Attributes:
        calls: Calls so far.
        elites: Numbers of the elite calls, best first; the earlier one first among equals.
    """

    def __init__(self, capacity: int, sizes: Sequence[int], elites: int, *, apart: int = ORDERED) -> None:
        self.calls = 0
        self.elites: list[int] = []
        self._capacity, self._apart = elites, apart
        self._actions = np.zeros((capacity, len(sizes)), np.int16)
        self._merits = np.zeros(capacity)
        self._largest = np.maximum(np.array(sizes) - 1, 1).astype(np.float32)
        self._size = math.prod(sizes)
        self._radix = np.array([math.prod(sizes[place + 1 :]) for place in range(len(sizes))], np.int64)
        self._sizes = tuple(sizes)
        self._seen: set[int] = set()

    @property
    def actions(self) -> np.ndarray:
        """Every call's action, int16 `[calls, A]`."""
        return self._actions[: self.calls]

    @property
    def merits(self) -> np.ndarray:
        """Every call's merit `[calls]`."""
        return self._merits[: self.calls]

    def add(self, action: np.ndarray, merit: float) -> None:
        """Notes a call of `action` `[A]`."""
        call = self.calls
        self.calls += 1
        self._actions[call], self._merits[call] = action, merit
        self._seen.add(self._rank(action))
        rivals = [other for other in self.elites if self._alike(self._actions[other], action)]
        if all(merit > self._merits[other] for other in rivals):
            kept = [other for other in self.elites if other not in rivals]
            self.elites = sorted([*kept, call], key=lambda each: (-self._merits[each], each))[: self._capacity]

    def _alike(self, one: np.ndarray, other: np.ndarray) -> bool:
        return bool((one[: self._apart] == other[: self._apart]).all())

    def observe(self) -> np.ndarray:
        """Elites as an environment shows them, float32 `[T, A]`: index over the largest of its table, padding -1."""
        rows = np.full((self._capacity, len(self._largest)), -1.0, np.float32)
        rows[: len(self.elites)] = self._actions[self.elites] / self._largest
        return rows

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
        return {"actions": self.actions.copy(), "merits": self.merits.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back to a snapshot."""
        self.calls, self.elites, self._seen = 0, [], set()
        for action, value in zip(state["actions"].astype(np.int64), state["merits"].tolist(), strict=True):
            self.add(action, value)
