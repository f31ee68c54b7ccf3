"""Fitted log-time tables: monotone, continuous, flat below their grid and asymptotic above it.

A table is exp(g) times a base of physical terms, with g on a coarse lattice. The product is made non-decreasing at
the vertices of a finer grid once, when the table is built; between vertices it runs straight in log time over log
size, so it is monotone and continuous everywhere. A lookup is pure Python where a search makes them one at a time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats, Lanes


class Table:
    """Log time over log sizes: multilinear inside the grid, flat below it, straight above.

    Attributes:
        axes: Ascending log sizes per axis.
        slopes: Slope of log time above each axis: 1 where time grows with the size, 0 where it does not.
        values: Log time at the vertices, last axis fastest.
    """

    def __init__(self, axes: Sequence[Sequence[float]], values: Sequence[float], slopes: Sequence[float]) -> None:
        self.axes = [list(map(float, axis)) for axis in axes]
        self.slopes = list(map(float, slopes))
        self.values = list(map(float, values))
        lengths = [len(axis) for axis in self.axes]
        strides = [int(np.prod(lengths[index + 1 :])) for index in range(len(lengths))]
        self._rows = list(zip(self.axes, self.slopes, strides, strict=True))
        known = [np.array(axis) for axis in self.axes]
        self._arrays = known, [np.append(np.diff(axis), np.inf) for axis in known]  # nothing is a share beyond
        self._values = np.array(self.values)

    def __call__(self, *point: Any) -> Any:
        """Log time at a point of log sizes, or in each lane."""
        if any(isinstance(x, Lanes) for x in point):
            return self._in_lanes(np.broadcast_arrays(*point))
        above, base = 0.0, 0
        between: list[tuple[int, float]] = []
        for (axis, slope, stride), x in zip(self._rows, point, strict=True):
            if x >= axis[-1]:
                above += slope * (x - axis[-1])
                base += stride * (len(axis) - 1)
            elif x > axis[0]:
                left = bisect_right(axis, x) - 1
                base += stride * left
                share = (x - axis[left]) / (axis[left + 1] - axis[left])
                if share:
                    between.append((stride, share))
        values = self.values
        corners = [base]
        for stride, _ in between:
            corners += [corner + stride for corner in corners]
        heights = [values[corner] for corner in corners]
        for _, share in reversed(between):
            half = len(heights) // 2
            heights = [heights[i] + share * (heights[half + i] - heights[i]) for i in range(half)]
        return heights[0] + above

    def _in_lanes(self, point: Sequence[Floats]) -> Lanes:
        above, base = np.zeros(len(point[0])), np.zeros(len(point[0]), np.int64)
        shares: list[tuple[int, Floats]] = []
        for (axis, slope, stride), known, widths, x in zip(self._rows, *self._arrays, point, strict=True):
            left = np.maximum(known.searchsorted(x, side="right") - 1, 0)
            from_left = np.maximum(x - known.take(left), 0.0)
            shares.append((stride, from_left / widths.take(left)))
            if slope:
                above = above + np.where(left == len(axis) - 1, slope * from_left, 0.0)
            base = base + stride * left
        values, corners = self._values, [base]
        for stride, _ in shares:
            corners += [corner + stride for corner in corners]
        heights = [values.take(corner, mode="clip") for corner in corners]  # beyond the grid is no share
        for _, share in reversed(shares):
            half = len(heights) // 2
            heights = [heights[i] + share * (heights[half + i] - heights[i]) for i in range(half)]
        return (heights[0] + above).view(Lanes)


def vertices(axes: Sequence[Floats]) -> Floats:
    """[vertices, axes] of a grid, last axis fastest."""
    return np.array(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T


def corner_weights(points: Floats, axes: Sequence[Floats]) -> list[tuple[NDArray[np.int64], Floats]]:
    """Multilinear interpolation as (vertex index [points], weight [points]) per corner; points are clamped."""
    places: list[tuple[NDArray[np.int64], Floats]] = []
    for column, axis in enumerate(axes):
        x = np.clip(points[:, column], axis[0], axis[-1])
        if len(axis) == 1:
            places.append((np.zeros(len(x), dtype=np.int64), np.zeros(len(x))))
            continue
        left = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        places.append((left, (x - axis[left]) / (axis[left + 1] - axis[left])))
    corners: list[tuple[NDArray[np.int64], Floats]] = []
    for steps in itertools.product((0, 1), repeat=len(axes)):
        if any(step and len(axis) == 1 for step, axis in zip(steps, axes, strict=True)):
            continue
        index, weight = np.zeros(len(points), dtype=np.int64), np.ones(len(points))
        for step, axis, (left, share) in zip(steps, axes, places, strict=True):
            index = index * len(axis) + left + step
            weight = weight * (share if step else 1 - share)
        corners.append((index, weight))
    return corners


def interpolate(points: Floats, axes: Sequence[Floats], values: Floats) -> Floats:
    """[points] multilinear interpolation of vertex values; points are clamped to the grid."""
    return np.sum([weight * values[index] for index, weight in corner_weights(points, axes)], axis=0)


def made_monotone(values: Floats, shape: Sequence[int], axes: Sequence[int]) -> Floats:
    """Vertex values, non-decreasing along some axes: the mean of the least majorant and the greatest minorant."""
    high = low = values.reshape(shape)
    for axis in axes:
        high = np.maximum.accumulate(high, axis=axis)
        low = np.flip(np.minimum.accumulate(np.flip(low, axis), axis=axis), axis)
    return (0.5 * (high + low)).ravel()
