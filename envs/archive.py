"""The elite history: the best distinct feasible actions of a search."""

from __future__ import annotations

import bisect
import enum
from typing import Any, NamedTuple, final


class AddStatus(enum.Enum):
    """What became of a candidate."""

    ADDED = "added"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class Elite(NamedTuple):
    """One entry.

    Attributes:
        raw: Tokens/s/GPU.
        action: Table indices, [A].
    """

    raw: float
    action: tuple[int, ...]


def _order(elite: Elite) -> tuple[float, tuple[int, ...]]:
    return -elite.raw, elite.action


@final
class EliteArchive:
    """Keeps the best `capacity` distinct actions it is shown.

    The order (-raw, action) is total, so the content does not depend on the order of arrival: archives of
    several workers merge to the same elites whatever their timing.

    Example:
        >>> archive = EliteArchive(2)
        >>> [archive.add(raw, action).value for raw, action in [(1.0, (0, 2)), (2.0, (1, 2)), (0.5, (0, 0))]]
        ['added', 'added', 'rejected']
        >>> archive.best
        Elite(raw=2.0, action=(1, 2))

    Args:
        capacity: Most entries, T >= 1.

    Raises:
        ValueError: The capacity is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected an archive capacity of at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: list[Elite] = []

    @property
    def entries(self) -> tuple[Elite, ...]:
        """The elites, best first."""
        return tuple(self._entries)

    @property
    def best(self) -> Elite | None:
        """The first elite, None while there is none."""
        return self._entries[0] if self._entries else None

    def add(self, raw: float, action: tuple[int, ...]) -> AddStatus:
        """Takes a feasible action in if it is new and beats the worst elite, or if there is room."""
        if any(elite.action == action for elite in self._entries):
            return AddStatus.DUPLICATE
        candidate = Elite(raw, action)
        bisect.insort(self._entries, candidate, key=_order)
        if len(self._entries) > self.capacity and self._entries.pop() is candidate:
            return AddStatus.REJECTED
        return AddStatus.ADDED

    def clear(self) -> None:
        """Forgets every elite."""
        self._entries.clear()

    def get_state(self) -> list[Any]:
        """JSON-able snapshot: [raw, action] per elite, best first."""
        return [[elite.raw, list(elite.action)] for elite in self._entries]

    def set_state(self, state: list[Any]) -> None:
        """Goes back to a snapshot."""
        self._entries = [Elite(raw, tuple(action)) for raw, action in state]
