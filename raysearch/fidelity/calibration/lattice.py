"""Fits the correction of a monotone table: penalised, robust least squares in log time.

The correction g lives on coarse lattices; the table it corrects must be non-decreasing at the vertices of its own,
finer grid. Source for the constrained step: alternating direction method of multipliers (Boyd et al., 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
from scipy.optimize import nnls
from scipy.sparse.linalg import splu

from sim.arrays import Floats
from sim.json_object import JsonObject
from sim.prices.tables import corner_weights, vertices

sp: Any = scipy.sparse  # its stubs do not know that most of its functions return sparse matrices

_LEAST_GAP = 0.5
"""Spacing, in log size, that the penalty sees between close vertices, where a library switches tiles."""
_RIDGE = 1e-3
_STEP = 0.3
"""ADMM's penalty."""


@dataclass(frozen=True)
class Robust:
    """How a fit treats outliers: Huber-like weights min(1, (cut * scale / residual)) ** power, some times over."""

    rounds: int = 4
    cut: float = 2.5
    power: float = 1.0

    def weights(self, residuals: Floats) -> Floats:
        """[rows] weights, 1 for what lies within `cut` robust deviations."""
        size = np.abs(residuals)
        scale = max(1.48 * float(np.median(size)), 1e-3)
        return np.minimum(1, self.cut * scale / np.maximum(size, 1e-12)) ** self.power


DEFAULT = Robust()


def fit_terms(phi: Floats, time: Floats, robust: Robust = DEFAULT, beside: Floats | float = 0.0) -> Floats:
    """[terms] non-negative coefficients with beside + phi @ c close to `time` in relative error."""
    relative = phi / time[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1
    weight, left = np.ones(len(time)), 1 - beside / time
    coefficients = np.zeros(phi.shape[1])
    for _ in range(robust.rounds):
        solution, _ = nnls(relative / scale * weight[:, None], np.maximum(left, 0) * weight, maxiter=50 * phi.shape[1])
        coefficients = solution / scale
        weight = np.sqrt(robust.weights(relative @ coefficients - left))
    return coefficients


@dataclass(frozen=True)
class LatticePart:
    """One coarse lattice of a correction.

    Attributes:
        axes: Sizes at its vertices, per axis.
        bend, tilt: Penalty on second and first differences of g, per axis.
        combine: [axes, table axes] how its log coordinates follow from the table's; None for the same.
    """

    axes: Sequence[Sequence[float]]
    bend: Sequence[float]
    tilt: Sequence[float]
    combine: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True)
class Lattice:
    """A table's grid and the lattices of its correction.

    Attributes:
        axes: Sizes at the vertices of the table, per axis.
        parts: Coarse lattices whose values add up to g.
        monotone: Axes along which time must not fall.
        slopes: Slope of log time above each axis.
        iterations: Of the constrained fit.
    """

    axes: Sequence[Sequence[float]]
    parts: Sequence[LatticePart]
    monotone: tuple[int, ...]
    slopes: tuple[float, ...]
    iterations: int = 60

    @cached_property
    def log_axes(self) -> list[Floats]:
        """Log sizes per axis."""
        return [np.log(np.array(axis, dtype=float)) for axis in self.axes]

    @cached_property
    def points(self) -> Floats:
        """[vertices, axes] log sizes of the table."""
        return vertices(self.log_axes)

    def record(self) -> JsonObject:
        """The grid as it stands in a file of coefficients."""
        parts = [{"axes": [list(a) for a in p.axes], "combine": self._combine(p).tolist()} for p in self.parts]
        axes = [list(axis) for axis in self.axes]
        return {"axes": axes, "monotone": list(self.monotone), "slopes": list(self.slopes), "parts": parts}

    def rows(self, points: Floats) -> Any:
        """[points, vertices] interpolation on the table."""
        return _weights(points, self.log_axes)

    def above(self, points: Floats) -> Floats:
        """[points] how far log time rises from the edge of the table to rows above it, as the table will price them."""
        return np.maximum(points - [axis[-1] for axis in self.log_axes], 0) @ np.array(self.slopes, dtype=float)

    def correction(
        self,
        points: Floats,
        residuals: Floats,
        base: Floats | None = None,
        *,
        robust: Robust = DEFAULT,
        stiffness: float = 1.0,
    ) -> Floats:
        """[coarse vertices] g that fits residuals of log time.

        Args:
            points: [rows, axes] log sizes.
            residuals: [rows] log time less the base's.
            base: [vertices] log time that g corrects; given, base + g does not fall along the monotone axes.
            robust: Treatment of outliers.
            stiffness: Factor on the penalties.
        """
        design = (self.rows(points) @ self.spread).tocsr()
        penalty = stiffness * self._penalty
        weight = np.ones(len(residuals))
        g = np.zeros(design.shape[1])
        for _ in range(robust.rounds):
            normal = (design.T @ sp.diags(weight) @ design + penalty).tocsc()
            g = _factors(normal).solve(design.T @ (weight * residuals))
            weight = robust.weights(residuals - design @ g)
        return g if base is None else self._constrained(design, residuals, weight, penalty, base, g)

    def _constrained(
        self, design: Any, residuals: Floats, weight: Floats, penalty: Any, base: Floats, g: Floats
    ) -> Floats:
        step, bound = self._rises, -(self._differences @ base)
        if (step @ g - bound).min() >= -1e-9:
            return g
        normal = design.T @ sp.diags(weight) @ design + penalty
        factors = _factors((normal + _STEP * step.T @ step).tocsc())
        target = design.T @ (weight * residuals)
        slack, dual = np.maximum(step @ g, bound), np.zeros(len(bound))
        for _ in range(self.iterations):
            g = factors.solve(target + _STEP * step.T @ (slack - dual))
            rise = step @ g
            slack = np.maximum(rise + dual, bound)
            dual += rise - slack
        return g

    def _combine(self, part: LatticePart) -> Floats:
        return np.eye(len(self.axes)) if part.combine is None else np.array(part.combine, dtype=float)

    @cached_property
    def spread(self) -> Any:
        """[vertices, coarse vertices] g at the table's vertices."""
        blocks = [
            _weights(self.points @ self._combine(p).T, [np.log(np.array(a, dtype=float)) for a in p.axes])
            for p in self.parts
        ]
        return sp.hstack(blocks).tocsr()

    @cached_property
    def _penalty(self) -> Any:
        blocks = [_difference_penalty([np.log(np.array(a, dtype=float)) for a in p.axes], p) for p in self.parts]
        return (sp.block_diag([b.T @ b for b in blocks]) + _RIDGE * sp.eye(self.spread.shape[1])).tocsc()

    @cached_property
    def _differences(self) -> Any:
        shape = [len(axis) for axis in self.axes]
        blocks = []
        for axis in self.monotone:
            if shape[axis] > 1:
                rise = sp.diags([-1.0, 1.0], [0, 1], shape=(shape[axis] - 1, shape[axis]))
                blocks.append(_along(rise, shape, axis))
        return sp.vstack(blocks).tocsr()

    @cached_property
    def _rises(self) -> Any:
        return (self._differences @ self.spread).tocsc()


def _factors(normal: Any) -> Any:
    """Of a symmetric, positive definite matrix: two thirds of the time that one without symmetry takes."""
    return splu(normal, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})


def _weights(points: Floats, axes: Sequence[Floats]) -> Any:
    corners = corner_weights(points, axes)
    rows = np.arange(len(points))
    entries = [(weight[weight > 0], rows[weight > 0], index[weight > 0]) for index, weight in corners]
    values, row, column = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return sp.csr_matrix((values, (row, column)), shape=(len(points), int(np.prod([len(a) for a in axes]))))


def _along(matrix: Any, shape: Sequence[int], axis: int) -> Any:
    before, after = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    return sp.kron(sp.kron(sp.eye(before), matrix), sp.eye(after))


def _difference_penalty(axes: Sequence[Floats], part: LatticePart) -> Any:
    """Rows of sqrt(penalty) * differences per axis, aware of uneven spacing."""
    shape, blocks = [len(axis) for axis in axes], []
    for i, axis in enumerate(axes):
        gaps = np.maximum(np.diff(axis), _LEAST_GAP)
        n = len(axis)
        if n >= 2 and part.tilt[i] > 0:
            slope = sp.diags([-1 / np.sqrt(gaps), 1 / np.sqrt(gaps)], [0, 1], shape=(n - 1, n))
            blocks.append(np.sqrt(part.tilt[i]) * _along(slope, shape, i))
        if n >= 3 and part.bend[i] > 0:
            left, right = gaps[:-1], gaps[1:]
            middle = (left + right) / 2
            root = np.sqrt(middle)
            diagonals = [root / (left * middle), -root * (1 / left + 1 / right) / middle, root / (right * middle)]
            bend = sp.diags(diagonals, [0, 1, 2], shape=(n - 2, n))
            blocks.append(np.sqrt(part.bend[i]) * _along(bend, shape, i))
    return sp.vstack(blocks).tocsr()
