"""Tables of log time: exact at vertices, monotone and continuous everywhere, asymptotic outside."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_calibration
from sim.prices.tables import Table, interpolate, made_monotone, vertices

FITTED = load_calibration("h100_sxm")
TABLES = sorted(name for name, record in FITTED.series.items() if "grid" in record)
SMALL = Table([[0.0, 1.0, 3.0], [0.0, 2.0]], [0.0, 1.0, 1.0, 2.0, 4.0, 6.0], (1.0, 0.5))


def test_a_table_passes_through_its_vertices_and_runs_straight_between_them() -> None:
    assert SMALL(0.0, 0.0) == 0.0
    assert SMALL(1.0, 2.0) == 2.0
    assert SMALL(2.0, 1.0) == pytest.approx((1 + 2 + 4 + 6) / 4)


def test_below_its_grid_a_table_is_flat_and_above_it_grows_by_its_slope() -> None:
    assert SMALL(-7.0, -9.0) == SMALL(0.0, 0.0)
    assert SMALL(5.0, 2.0) == SMALL(3.0, 2.0) + 2.0
    assert SMALL(3.0, 6.0) == SMALL(3.0, 2.0) + 2.0


def test_one_lookup_equals_interpolation_of_many() -> None:
    rng = np.random.default_rng(0)
    axes = [np.array([0.0, 1.0, 3.0]), np.array([2.0]), np.array([0.0, 0.5, 2.0, 5.0])]
    values = rng.normal(size=12)
    points = rng.uniform([0, 2, 0], [3, 2, 5], size=(50, 3))
    table = Table([axis.tolist() for axis in axes], values.tolist(), (0, 0, 0))
    assert [table(*point) for point in points] == pytest.approx(interpolate(points, axes, values).tolist())
    assert interpolate(vertices(axes), axes, values) == pytest.approx(values)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=12, max_size=12), st.sampled_from([(0,), (1,), (0, 1), (0, 1, 2)]))
def test_made_monotone_does_not_fall_and_leaves_what_does_not(values: Sequence[float], axes: tuple[int, ...]) -> None:
    found = made_monotone(np.array(values), (2, 2, 3), axes).reshape(2, 2, 3)
    for axis in axes:
        assert (np.diff(found, axis=axis) >= -1e-12).all()
    assert made_monotone(found.ravel(), (2, 2, 3), axes) == pytest.approx(found.ravel())


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from(TABLES),
    st.lists(st.floats(-0.5, 1.5), min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from([1e-9, 1e-3, 0.3, 3.0, 20.0]),
)
def test_every_fitted_table_is_finite_monotone_and_continuous(
    name: str, shares: list[float], axis: int, more: float
) -> None:
    table, grid = FITTED.table(name), FITTED.data["grids"][FITTED.series[name]["grid"]]
    # From half a grid's width below the grid to half above it; kernels are the same thing in between and beyond.
    point = [a[0] + s * (a[-1] - a[0]) for a, s in zip(table.axes, shares, strict=False)]
    found = table(*point)
    assert math.isfinite(found)
    assert table(*(x + 1e-9 for x in point)) == pytest.approx(found, abs=1e-6)
    if axis in grid["monotone"]:
        larger = [x + more if i == axis else x for i, x in enumerate(point)]
        assert table(*larger) >= found - 1e-12
    if axis < len(table.axes):
        far = [100.0 if i == axis else x for i, x in enumerate(point)]
        farther = [101.0 if i == axis else x for i, x in enumerate(point)]
        assert table(*farther) - table(*far) == pytest.approx(grid["slopes"][axis], abs=1e-9)
