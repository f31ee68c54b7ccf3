"""Redistribution on meshes: routes are right when executed, cheapest, and obey the triangle inequality."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sim.sharding.layout import Layout, assemble, local_shape, parse_layout, split
from sim.sharding.placement import PARTIAL, REPLICATE, PlacementError, Shard, parse_placement
from sim.sharding.redistribute import RedistributionError, collective_between, sent_share
from sim.sharding.routes import cheapest_route, execute

CUTS = ["R", "S(0)", "S(1)", "SS(0,2)", "SS(1,3)", "SS(0,3)", "RS(0,1:2)", "RS(1,1:0)", "IS(1,2)"]
PARTS = ["P(sum)", "P(avg)", "P(max)", "NP(2)", "LSE"]
SHAPES = st.sampled_from([(12, 12), (7, 5), (24, 8), (16, 16), (5, 12), (1, 1), (0, 5)])


def layouts(texts: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(texts), min_size=3, max_size=3)


def fits(layout: Layout, degrees: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    try:
        local_shape(shape, layout, degrees)
    except PlacementError:
        return False
    return True


@st.composite
def cuts_for(draw: st.DrawFn, degree: int) -> str:
    dim, units = draw(st.integers(0, 1)), draw(st.lists(st.integers(0, 2), min_size=degree - 1, max_size=degree - 1))
    ragged = f"RS({dim},{':'.join(map(str, [*units, 1]))})"
    striped, sections = f"SS({dim},{draw(st.integers(2, 4))})", f"IS({dim},{draw(st.integers(2, 3))})"
    return draw(st.sampled_from(["R", f"S({dim})", f"S({dim})", striped, sections, ragged]))


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, str, tuple[int, ...], tuple[int, int]]:
    """Source, target, degrees and shape: any mixture on meshes of one to three axes."""
    degrees = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=2) | st.lists(st.integers(2, 3), min_size=3, max_size=3)
    )
    source = [draw(cuts_for(n) | st.sampled_from(PARTS)) for n in degrees]
    target = [draw(cuts_for(n)) for n in degrees]
    shape = draw(st.tuples(st.sampled_from([1, 5, 8, 12, 24, 32]), st.sampled_from([3, 6, 7, 12, 16])))
    return f"[{', '.join(source)}]", f"[{', '.join(target)}]", tuple(degrees), shape


@settings(deadline=None, max_examples=15)
@given(problem=problems(), seed=st.integers(0, 9))
@example(("[R, IS(1,2)]", "[IS(1,2), S(1)]", (3, 2), (12, 12)), 0)
@example(("[SS(1,3), IS(1,2), SS(0,2)]", "[SS(0,2), SS(0,2), R]", (2, 2, 2), (16, 16)), 0)
@example(("[P(sum), SS(1,3)]", "[SS(1,3), SS(0,3)]", (4, 2), (16, 16)), 0)
# A softmax's parts need their last column, whether they were cut before or after.
@example(("[LSE, S(1)]", "[R, S(1)]", (2, 3), (4, 6)), 0)
@example(("[S(1), LSE]", "[S(0), R]", (2, 3), (4, 6)), 0)
@example(("[LSE]", "[S(1)]", (3,), (4, 6)), 0)
@example(("[LSE, LSE]", "[R, R]", (2, 3), (4, 6)), 0)
# The whole dim is even, the piece that the outer axis leaves is not.
@example(("[SS(0,3), R, S(0)]", "[SS(0,3), S(0), R]", (2, 2, 4), (32, 1)), 0)
@example(("[RS(0,2:1), R, R]", "[RS(0,2:1), S(0), S(0)]", (2, 2, 3), (12, 1)), 0)
@example(("[RS(0,1:2), SS(0,2), S(0)]", "[RS(0,1:2), R, S(0)]", (2, 2, 2), (12, 1)), 0)
def test_a_route_moves_the_right_numbers(problem: tuple[str, str, tuple[int, ...], tuple[int, int]], seed: int) -> None:
    *texts, degrees, shape = problem
    source, target = map(parse_layout, texts)
    tensor, rng = np.abs(np.random.default_rng(seed).standard_normal(shape)), np.random.default_rng(seed)
    assume(fits(source, degrees, shape) and fits(target, degrees, shape))
    norms = "NP(2)" in texts[0]  # they split no negative parts
    assume(not (norms and "LSE" in texts[0]))
    pieces, wanted = split(tensor, source, degrees, None if norms else rng), split(tensor, target, degrees)
    routes = [
        cheapest_route(source, target, degrees, shape, 2),
        cheapest_route(source, target, degrees, shape, 2, fused=True),
        cheapest_route(source, target, degrees, shape, 2, fused=True, stripes=False),
    ]
    for route in routes:
        got = execute(route, pieces, degrees)
        for ranks, piece in wanted.items():
            assert got[ranks].shape == piece.shape
            np.testing.assert_allclose(got[ranks], piece, atol=1e-7)
    assert routes[1].bytes_per_device <= routes[0].bytes_per_device + 1e-6


@settings(deadline=None, max_examples=25)
@given(degrees=st.sampled_from([(2,), (2, 3), (2, 2), (4, 2)]), shape=SHAPES, texts=st.tuples(*[layouts(CUTS)] * 3))
@example((2,), (1, 1), (["S(0)"] * 3, ["SS(0,2)"] * 3, ["S(1)"] * 3))
def test_a_detour_is_never_cheaper(
    degrees: tuple[int, ...], shape: tuple[int, int], texts: tuple[list[str], ...]
) -> None:
    a, b, c = (tuple(map(parse_placement, text[: len(degrees)])) for text in texts)
    assume(all(fits(layout, degrees, shape) for layout in (a, b, c)))
    direct, first, second = (
        cheapest_route(source, target, degrees, shape, 1).bytes_per_device
        for source, target in ((a, c), (a, b), (b, c))
    )
    assert direct <= first + second + 1e-6


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(["R", "S(0)", "S(1)", "P(sum)", "P(max)"], ["R", "S(0)", "S(1)"]))
)
def test_on_one_axis_the_route_is_the_one_collective_of_the_table(source: str, target: str, degree: int) -> None:
    stored, wanted = parse_placement(source), parse_placement(target)
    route = cheapest_route((stored,), (wanted,), (degree,), (16, 32), 2)
    collective = collective_between(stored, wanted)
    assert [step.collective for step in route.steps] == ([] if stored == wanted else [collective])
    whole_bytes = 16 * 32 * 2
    assert route.bytes_per_device == pytest.approx(sent_share(collective, degree) * whole_bytes if collective else 0)


def test_a_sum_over_two_axes_is_scattered_before_it_crosses_the_second() -> None:
    route = cheapest_route((PARTIAL, PARTIAL), (REPLICATE, REPLICATE), (4, 8), (64, 64), 2)
    assert [(step.collective, step.axis) for step in route.steps] == [
        ("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1),
    ]  # fmt: skip
    greedy = 2 * (3 / 4 + 7 / 8) * 64 * 64 * 2  # one all-reduce after the other
    assert route.bytes_per_device < 0.6 * greedy


def test_price_chooses_the_axis() -> None:
    def scaled(*scale: float) -> list[int]:
        parts, whole = (PARTIAL, PARTIAL), (REPLICATE, REPLICATE)
        route = cheapest_route(
            parts, whole, (4, 4), (64, 64), 2, price=lambda step: scale[step.axis] * step.bytes_per_device
        )
        return [step.axis for step in route.steps]

    assert scaled(9, 1) == [1, 0, 1]  # the slow axis carries the scattered rest
    assert scaled(1, 9) == [0, 1, 0]


def test_weights_gathered_over_an_outer_axis_leave_stripes_without_moving_the_inner_one() -> None:
    route = cheapest_route(parse_layout("S(0), S(0)"), parse_layout("R, SS(0,2)"), (2, 4), (16, 4), 1)
    assert [(step.collective, step.axis) for step in route.steps] == [("all_gather", 0)]
    right_order = cheapest_route(parse_layout("SS(0,4), S(0)"), parse_layout("R, S(0)"), (2, 4), (16, 4), 1)
    assert [(step.collective, step.axis) for step in right_order.steps] == [("all_gather", 0)]


def test_bytes_along_one_dim_count_only_what_changes_hands() -> None:
    route = cheapest_route(parse_layout("RS(0,1:1:1:1)"), parse_layout("RS(0,1:1:2:0)"), (4,), (16, 1), 1)
    assert route.bytes_per_device == 4  # the last rank gives its four rows to its neighbour


def test_uneven_shards_send_what_changes_hands() -> None:
    # One row, one column: the first rank has all of it, cut either way.
    assert cheapest_route((Shard(0),), (Shard(1),), (2,), (1, 1), 2).bytes_per_device == 0
    # 3 x 4 over two ranks: the first of rows 2 + 1 gives 2 x 2, the second 1 x 2.
    assert cheapest_route((Shard(0),), (Shard(1),), (2,), (3, 4), 1).bytes_per_device == 4


@pytest.mark.parametrize("degrees", [(1,), (1, 1), (1, 1, 1)])
def test_axes_of_one_rank_send_nothing(degrees: tuple[int, ...]) -> None:
    for source, target in itertools.product(
        ("R", "S(0)", "S(1)", "P(sum)", "SS(0,2)"), ("R", "S(0)", "S(1)", "SS(1,3)")
    ):
        layouts = ((parse_placement(text),) * len(degrees) for text in (source, target))
        assert cheapest_route(*layouts, degrees, (6, 4), 2).bytes_per_device == 0


def test_parts_stay_parts_and_are_never_made() -> None:
    kept = cheapest_route((PARTIAL, Shard(0)), (PARTIAL, REPLICATE), (2, 2), (8, 8), 1)
    pieces = split(np.ones((8, 8)), (PARTIAL, Shard(0)), (2, 2), np.random.default_rng(0))
    np.testing.assert_allclose(assemble(execute(kept, pieces, (2, 2)), (PARTIAL, REPLICATE), (2, 2)), 1)
    with pytest.raises(RedistributionError, match=r"cannot turn \[R\] into \[P\(sum\)\]: parts only come out of an op"):
        cheapest_route((REPLICATE,), (PARTIAL,), (2,), (4,), 1)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlacementError, match="units do not fill"):
        cheapest_route(parse_layout("RS(0,1:2)"), parse_layout("R"), (2,), (4,), 1)
    with pytest.raises(PlacementError, match="a mesh of 2 axes"):
        cheapest_route((REPLICATE,), (REPLICATE,), (2, 2), (4,), 1)


def test_a_route_costs_nothing_where_ranks_cut_their_own_piece() -> None:
    route = cheapest_route((REPLICATE, REPLICATE), (Shard(0), Shard(1)), (2, 4), (8, 8), 1)
    assert math.isclose(route.bytes_per_device, 0)
    assert [step.collective for step in route.steps] == [None, None]


@pytest.mark.parametrize(
    ("source", "target", "collective", "sent"),
    [
        ("S(0), S(0)", "R, R", "all_gather", 31 / 32),
        ("P(sum), P(sum)", "R, R", "all_reduce", 2 * 31 / 32),
        ("P(sum), P(sum)", "S(1), S(1)", "reduce_scatter", 31 / 32),
        ("S(0), S(0)", "S(1), S(1)", "all_to_all", 31 / 32**2),
    ],
)
def test_one_collective_may_run_over_neighbouring_axes(source: str, target: str, collective: str, sent: float) -> None:
    whole_bytes = 64 * 128 * 2
    # Priced per step, so that one is cheaper than two.
    route = cheapest_route(
        parse_layout(source),
        parse_layout(target),
        (4, 8),
        (64, 128),
        2,
        lambda step: 1e6 * bool(step.collective),
        fused=True,
    )
    assert [(step.collective, step.axis, step.span) for step in route.steps] == [(collective, 0, 2)]
    assert route.bytes_per_device == pytest.approx(sent * whole_bytes)


def test_a_softmax_is_joined_whole_before_its_columns_are_shared_out() -> None:
    route = cheapest_route(parse_layout("LSE"), (Shard(1),), (4,), (8, 8), 1)
    assert [step.collective for step in route.steps] == ["reduce_scatter", "all_to_all"]  # over rows, then columns
    with pytest.raises(PlacementError, match="needs a last column, of logarithms"):
        cheapest_route(parse_layout("S(0), LSE"), parse_layout("R, R"), (3, 2), (2,), 1)
