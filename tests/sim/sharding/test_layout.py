"""Several placements on one mesh: applied left to right, undone right to left; both notations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sharding.layout import (
    assemble,
    format_layout,
    format_named,
    local_bytes,
    local_shape,
    parse_layout,
    parse_named,
    split,
)
from sim.sharding.placement import PARTIAL, REPLICATE, PlacementError, Shard, parse_placement

POOL = ["R", "S(0)", "S(1)", "P(sum)", "P(avg)", "P(max)", "SS(0,2)", "SS(1,3)", "NP(2)", "NP(inf)"]


@settings(deadline=None)
@given(
    texts=st.lists(st.sampled_from(POOL), min_size=1, max_size=3),
    degrees=st.tuples(*[st.integers(1, 4)] * 3),
    shape=st.tuples(st.integers(1, 13), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_assemble_undoes_split_on_several_axes(
    texts: list[str], degrees: tuple[int, ...], shape: tuple[int, int], seed: int
) -> None:
    layout, rng = tuple(map(parse_placement, texts)), np.random.default_rng(seed)
    tensor = np.abs(rng.standard_normal(shape))
    # Norms split only what is not negative; parts of a sum are of both signs, so norms come first or alone.
    adversarial = rng if not any(text.startswith("NP") for text in texts) else None
    pieces = split(tensor, layout, degrees[: len(layout)], adversarial)
    np.testing.assert_allclose(assemble(pieces, layout, degrees[: len(layout)]), tensor, atol=1e-9)
    largest = max(piece.size for piece in pieces.values())
    assert np.prod(local_shape(shape, layout, degrees[: len(layout)])) == largest
    assert local_bytes(shape, layout, degrees[: len(layout)], 4) == 4 * largest


def test_two_axes_on_one_dim_cut_in_their_order() -> None:
    pieces = split(np.arange(8), (Shard(0), Shard(0)), (2, 4))
    assert [pieces[x, y].item() for x in range(2) for y in range(4)] == list(range(8))
    striped = split(np.arange(8), parse_layout("SS(0,4), S(0)"), (2, 4))  # the second axis is the outer one
    assert [striped[x, y].item() for y in range(4) for x in range(2)] == list(range(8))


def test_layouts_parse_and_print() -> None:
    for text in ("[R]", "[S(0), P(sum)]", "[SS(0,2), RS(1,1:0:2), NP(2)]"):
        assert format_layout(parse_layout(text)) == text
    assert parse_layout("S(0), R") == (Shard(0), REPLICATE)


def test_a_bracket_that_is_never_closed_is_refused() -> None:
    for text in ("[R", "R]"):
        with pytest.raises(PlacementError, match="expected a placement such as"):
            parse_layout(text)
    with pytest.raises(PlacementError, match=r"names axis '{'"):
        parse_named("A[I_{X]", "XY")


def test_the_largest_piece_may_come_of_a_smaller_one() -> None:
    # Chunks of 4 and 3: stripes of the 4 are 2, 2 and none, of the 3 one each, and one rank has all of those.
    layout = parse_layout("S(0), SS(0,3)")
    assert sorted({piece.size for piece in split(np.arange(7), layout, (2, 4)).values()}) == [0, 2, 3]
    assert local_shape((7,), layout, (2, 4)) == (3,)


@pytest.mark.parametrize("text", ["S(1)", "S(-1)", "SS(1,2)", "RS(1,1:1)"])
def test_the_shape_of_a_dim_that_a_tensor_has_not_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match=r"dims count from 0"):
        local_shape((4,), parse_layout(text), (2,))


def test_a_layout_needs_one_placement_per_axis() -> None:
    with pytest.raises(PlacementError, match=r"a mesh of 2 axes takes as many placements, got \[R\]"):
        split(np.zeros(3), (REPLICATE,), (2, 2))


@pytest.mark.parametrize(
    ("text", "axes", "layout"),
    [
        ("A[I, J]", ("X", "Y"), "R, R"),
        ("A[I_X, J]", ("X", "Y"), "S(0), R"),
        ("A[I_X, J_Y]", ("X", "Y"), "S(0), S(1)"),
        ("A[I_XY, J]", ("X", "Y"), "S(0), S(0)"),
        ("A[I, J] {U_Y}", ("X", "Y"), "R, P(sum)"),
        ("qkv[t, q_tp]", ("ep", "tp"), "R, S(1)"),
        ("W[d_{ep,tp}, f]", ("ep", "tp"), "S(0), S(0)"),
    ],
)
def test_the_named_view_parses_and_prints(text: str, axes: tuple[str, ...], layout: str) -> None:
    name, dims, parsed = parse_named(text, axes)
    assert parsed == parse_layout(layout)
    assert format_named(name, dims, parsed, axes) == text


@pytest.mark.parametrize(
    ("text", "shape", "first_row"),
    [
        ("A[I, J]", (4, 4), [0, 1, 2, 3]),
        ("A[I_X, J]", (2, 4), [8, 9, 10, 11]),
        ("A[I, J_Y]", (4, 2), [2, 3]),
        ("A[I_X, J_Y]", (2, 2), [10, 11]),
        ("A[I_XY, J]", (1, 4), [12, 13, 14, 15]),
    ],
)
def test_a_matrix_of_four_by_four_lies_on_two_by_two_devices_as_the_textbook_draws_it(
    text: str, shape: tuple[int, ...], first_row: list[int]
) -> None:
    """What the last device, (1, 1), has of the elements 0 to 15, row by row."""
    _, _, layout = parse_named(text, ("X", "Y"))
    piece = split(np.arange(16).reshape(4, 4), layout, (2, 2))[1, 1]
    assert piece.shape == shape == local_shape((4, 4), layout, (2, 2))
    assert piece[0].tolist() == first_row


def test_what_is_replicated_is_stored_as_often_as_the_axes_that_nobody_uses_have_devices() -> None:
    """Of "How to Scale Your Model", part 3, the first pop quiz, int8[128, 2048] on 2 x 8 x 2, and question 1."""
    axes, degrees = ("X", "Y", "Z"), (2, 8, 2)
    _, _, layout = parse_named("A[I_XY, J]", axes)
    assert local_shape((128, 2048), layout, degrees) == (8, 2048)
    assert local_bytes((128, 2048), layout, degrees, 1) == 16 * 1024
    assert 32 * local_bytes((128, 2048), layout, degrees, 1) == 512 * 1024
    _, _, layout = parse_named("A[I_X, J, K]", axes)
    assert 4 * 8 * 2 * local_bytes((64, 3, 5), layout, (4, 8, 2), 1) == 16 * (64 * 3 * 5)


def test_braces_around_several_axes_may_be_written_or_not() -> None:
    assert parse_named("A[I_{XY}, J]", "XY") == parse_named("A[I_XY, J]", "XY")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I_X, J_X]", "uses axis 'X' twice: an axis shards one dim, or none"),
        ("A[I_YX, J]", "against the order of the mesh .* StridedShard"),
        ("A[I_Z, J]", "names axis 'Z'; the mesh has X, Y"),
        ("A(I)", "expected a tensor such as"),
        ("A[I, ]", "expected a dim such as"),
    ],
)
def test_the_named_view_refuses_what_makes_no_layout(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        parse_named(text, ("X", "Y"))


@pytest.mark.parametrize("text", ["SS(0,2)", "IS(0,2)", "RS(0,1:2)", "P(max)", "NP(2)"])
def test_the_named_view_refuses_what_it_cannot_say(text: str) -> None:
    with pytest.raises(PlacementError, match=r"cannot say .* over X: it knows R, S\(dim\) and P\(sum\)"):
        format_named("A", ("I", "J"), (parse_placement(text), REPLICATE), ("X", "Y"))


def test_parts_over_all_axes_are_named_together() -> None:
    assert format_named("C", "IJ", (PARTIAL, PARTIAL), "XY") == "C[I, J] {U_XY}"
