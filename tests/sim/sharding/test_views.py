"""Views of sharded tensors: every answer executed, and every shard that needs no communication found."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sharding.kinds import LogSumExp, NormPartial, RaggedShard, StridedShard
from sim.sharding.layout import assemble, split
from sim.sharding.placement import PARTIAL, REPLICATE, Partial, Placement, PlacementError, Shard
from sim.sharding.rule_check import check_operation
from sim.sharding.rules import einsum_operation
from sim.sharding.views import View, flattened, layout_after, placed_after, refuted, reshape_pieces, transposed


@st.composite
def views(draw: st.DrawFn) -> View:
    """Two ways to group the same prime factors, with dims of one element."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=6))

    def grouped() -> tuple[int, ...]:
        cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=3)))
        return tuple(math.prod(factors[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(factors))))

    return View(grouped(), grouped())


def shards(shape: tuple[int, ...]) -> list[Placement]:
    """Plain and striped ones of every dim."""
    stripes = [count for count in range(2, math.prod(shape) + 1) if math.prod(shape) % count == 0]
    return [
        *map(Shard, range(len(shape))),
        *(StridedShard(dim, count) for dim in range(len(shape)) for count in stripes if shape[dim] % count == 0),
    ]


@settings(max_examples=60, deadline=None)
@given(views(), st.sampled_from([2, 3, 4]))
def test_a_view_is_right_wherever_it_needs_no_communication_and_found_wherever_shards_are_even(
    view: View, degree: int
) -> None:
    """Brute force: if any shard of the new shape is what the ranks have, one is found, and it is such a one."""
    for before in shards(view.source):
        found = placed_after(view, before, degree)
        if found is not None:
            assert refuted(view, before, found, degree) is None
            continue
        stripes = before.stripes if isinstance(before, StridedShard) else 1
        if view.source[before.dims[0]] % (stripes * degree) == 0:
            even = [each for each in shards(view.target) if _even(view.target, each, degree)]
            assert all(refuted(view, before, after, degree) is not None for after in even)


def _even(shape: tuple[int, ...], placement: Placement, degree: int) -> bool:
    stripes = placement.stripes if isinstance(placement, StridedShard) else 1
    return shape[placement.dims[0]] % (stripes * degree) == 0


@settings(max_examples=60, deadline=None)
@given(views(), st.sampled_from([2, 3, 4]))
def test_a_view_back_lies_as_before(view: View, degree: int) -> None:
    """Where what lies so may also be written otherwise, as stripes of one element, pieces are the same."""
    for before in shards(view.source):
        after = placed_after(view, before, degree)
        if after is not None:
            again = placed_after(view.back, after, degree)
            assert again is not None
            assert refuted(View(view.source, view.source), before, again, degree) is None


def test_batch_and_sequence_become_rows_as_stripes() -> None:
    """The third text's example: a product whose rows are batch and sequence, the sequence sharded."""
    view = flattened((4, 6, 10), 0, 1)
    x, w = np.random.default_rng(0).standard_normal((4, 6, 10)), np.random.default_rng(1).standard_normal((10, 7))
    after = placed_after(view, Shard(1), 2)
    assert after == StridedShard(0, 4)
    rows = reshape_pieces(view, Shard(1).split(x, 2), after)
    products = [piece @ w for piece in rows]
    again = placed_after(View((24, 7), (4, 6, 7)), after, 2)
    assert again == Shard(1)
    whole = again.assemble(reshape_pieces(View((24, 7), (4, 6, 7)), products, again))
    np.testing.assert_allclose(whole, x @ w)


def test_what_is_joined_element_by_element_passes_and_what_is_not_must_be_gathered() -> None:
    view = View((4, 6), (24,))
    for placement in (REPLICATE, PARTIAL, Partial("max")):
        assert placed_after(view, placement, 3) == placement
    for placement in (NormPartial(2), LogSumExp(), RaggedShard(0, (1, 0, 2))):
        assert placed_after(view, placement, 3) is None
    assert placed_after(view, Shard(0), 3) is None  # chunks of two, two and no rows
    assert placed_after(View((5, 4, 6), (5, 24)), Shard(0), 3) == Shard(0)  # an uneven dim that stays
    assert placed_after(View((2, 6), (12,)), Shard(0), 4) is None  # more ranks than rows


@settings(max_examples=30, deadline=None)
@given(views(), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.data())
def test_views_on_several_axes_are_right(view: View, degrees: tuple[int, int], data: st.DataObject) -> None:
    layout = tuple(data.draw(st.sampled_from([REPLICATE, *map(Shard, range(len(view.source)))])) for _ in degrees)
    after = layout_after(view, layout, degrees)
    if after is None:
        return
    whole = np.arange(math.prod(view.source), dtype=float).reshape(view.source)
    wanted = split(whole.reshape(view.target), after, degrees)
    for ranks, piece in split(whole, layout, degrees).items():
        np.testing.assert_array_equal(piece.reshape(wanted[ranks].shape), wanted[ranks])
    np.testing.assert_array_equal(assemble(wanted, after, degrees), whole.reshape(view.target))


def test_a_transpose_takes_shards_along_as_the_einsum_does() -> None:
    order, operation = (2, 0, 1), einsum_operation("abc->cab")
    assert check_operation("transpose", operation, [Shard(0), REPLICATE, PARTIAL]).proved
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((5, 7, 9))
    for placement in (*map(Shard, range(3)), StridedShard(1, 2), REPLICATE, PARTIAL):
        after = transposed(placement, order)
        assert after is not None
        pieces = [piece.transpose(order) for piece in placement.split(whole, 3, rng)]
        np.testing.assert_allclose(after.assemble(pieces), whole.transpose(order))
    assert transposed(NormPartial(2), order) is None


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: View((4, 6), (23,)), "as many elements"),
        (lambda: View((0, 6), (0,)), "as many elements"),
        (lambda: placed_after(View((4,), (4,)), Shard(1), 2), "shards a dim that a tensor of 1 dims has not"),
        (lambda: transposed(Shard(0), (0, 0)), "expected each dim once"),
    ],
)
def test_what_is_no_view_is_refused(refused, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        refused()
