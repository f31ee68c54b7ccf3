"""The coordinates that the copying policy chooses in: those of a strategy, but the batch relative to tp and ep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TP, EP, BATCH = 0, 1, 3
"""Places of the degrees in an action."""


class Coordinates:
    """Writes the batch as its table steps above tp and ep, counted from the smallest such difference.

    Tables of degrees mostly double from step to step, and what decides whether a batch is too large for memory and
    latency is the batch per GPU. A policy that keeps this coordinate and doubles a degree so doubles the batch: it
    moves along the limits instead of into them. Every action can be written so, but not everything so written is an
    action: its batch may lie off the table (see `inside`).

    Args:
        sizes: Values of each coordinate of an action, [A].

    Attributes:
        sizes: Values of each coordinate here, [A].

    Example:
        >>> coordinates = Coordinates([4, 3, 2, 8, 3])
        >>> coordinates.sizes
        (4, 3, 2, 13, 3)
        >>> coordinates.encode(np.array([[1, 2, 0, 5, 2], [2, 2, 0, 6, 2]]))
        array([[1, 2, 0, 7, 2],
               [2, 2, 0, 7, 2]])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._largest_shift = sizes[TP] - 1 + sizes[EP] - 1
        self._batches = sizes[BATCH]
        self.sizes = (*sizes[:BATCH], sizes[BATCH] + self._largest_shift, *sizes[BATCH + 1 :])

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Actions `[..., A]` in these coordinates, a new array."""
        return self._shifted(actions, self._largest_shift, -1)

    def decode(self, chosen: np.ndarray) -> np.ndarray:
        """The actions `[..., A]` that were encoded, a new array."""
        return self._shifted(chosen, -self._largest_shift, 1)

    def inside(self, chosen: np.ndarray) -> np.ndarray:
        """Which of `[..., A]` are actions, `[...]`."""
        batch = self.decode(chosen)[..., BATCH]
        return (batch >= 0) & (batch < self._batches)

    @staticmethod
    def _shifted(actions: np.ndarray, constant: int, sign: int) -> np.ndarray:
        moved = np.array(actions, np.int64)
        moved[..., BATCH] += constant + sign * (moved[..., TP] + moved[..., EP])
        return moved
