"""What the networks read of a strategy: which values it takes, and that the degrees' values have an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ORDERED = 4
"""The first coordinates are degrees (tp, ep, pp, batch), whose table indices have an order; the others are choices."""


def value_features(sizes: Sequence[int]) -> np.ndarray:
    """Row per value of every coordinate, float32 `[sum(sizes), F]`; a strategy's features are the sum of its rows.

    A cell per value, and for the degrees also one per value up to it ("thermometer"), so that neighbours are alike.

    Example:
        >>> value_features([2, 1, 1, 1, 2])[:2].astype(int)
        array([[1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
               [0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]])
    """
    total, ordered = sum(sizes), sum(sizes[:ORDERED])
    thermometer = np.zeros((total, ordered), np.float32)
    for start, size in zip(value_starts(sizes)[:ORDERED], sizes, strict=False):
        thermometer[start : start + size, start : start + size] = np.tri(size, dtype=np.float32)
    return np.concatenate([np.eye(total, dtype=np.float32), thermometer], 1)


def value_starts(sizes: Sequence[int]) -> np.ndarray:
    """Where the values of each coordinate begin among all, int64 `[A]`."""
    return np.cumsum([0, *sizes[:-1]])


def degree_distances(sizes: Sequence[int]) -> np.ndarray:
    """Table steps between two values of one degree, float32 `[ORDERED, n, n]` for the n values of all degrees.

    Matrix k speaks of degree k alone and is 0 everywhere else.
    """
    degrees = sizes[:ORDERED]
    distances = np.zeros((len(degrees), sum(degrees), sum(degrees)), np.float32)
    for table, start, size in zip(distances, value_starts(degrees), degrees, strict=True):
        steps = np.arange(size)
        table[start : start + size, start : start + size] = np.abs(steps[:, None] - steps)
    return distances
