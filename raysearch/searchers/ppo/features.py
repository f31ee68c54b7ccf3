"""What the networks read of a strategy: which values it takes, and that those of degrees have an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def value_features(sizes: Sequence[int], ordered: Sequence[int]) -> np.ndarray:
    """Row per value of every coordinate, float32 `[sum(sizes), F]`; a strategy's features are the sum of its rows.

    A cell per value, and for the ordered coordinates also one per value up to it ("thermometer"), so that neighbours
    are alike.

    Args:
        sizes: Values of each coordinate, `[A]`.
        ordered: Places of those whose values have an order.

    Example:
        >>> value_features([2, 3], ordered=[0])[:2].astype(int)
        array([[1, 0, 0, 0, 0, 1, 0],
               [0, 1, 0, 0, 0, 1, 1]])
    """
    total, places = sum(sizes), ordered_values(sizes, ordered)
    thermometer = np.zeros((total, len(places)), np.float32)
    thermometer[places] = _blocks([np.tri(sizes[place], dtype=np.float32) for place in ordered]).sum(0)
    return np.concatenate([np.eye(total, dtype=np.float32), thermometer], 1)


def value_starts(sizes: Sequence[int]) -> np.ndarray:
    """Where the values of each coordinate begin among all, int64 `[A]`."""
    return np.cumsum([0, *sizes[:-1]])


def ordered_values(sizes: Sequence[int], ordered: Sequence[int]) -> np.ndarray:
    """Where the n values of the ordered coordinates stand among all, int64 `[n]`."""
    starts = value_starts(sizes)
    return np.array([starts[place] + index for place in ordered for index in range(sizes[place])], np.int64)


def step_distances(sizes: Sequence[int], ordered: Sequence[int]) -> np.ndarray:
    """Table steps between two values of one ordered coordinate, float32 `[K, n, n]` for the n values of all K.

    Matrix k speaks of the k-th of them alone and is 0 everywhere else.
    """
    steps = [np.arange(sizes[place], dtype=np.float32) for place in ordered]
    return _blocks([np.abs(each[:, None] - each) for each in steps])


def _blocks(squares: Sequence[np.ndarray]) -> np.ndarray:
    """Each square matrix in its own place on the diagonal of a matrix for all, `[K, n, n]`."""
    blocks = np.zeros((len(squares), *[sum(map(len, squares))] * 2), np.float32)
    start = 0
    for block, square in zip(blocks, squares, strict=True):
        block[start : start + len(square), start : start + len(square)] = square
        start += len(square)
    return blocks
