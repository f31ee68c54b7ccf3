"""Placements: split and assemble undo each other, texts parse and print, shapes are those of the pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.sharding import kinds  # noqa: F401
from sim.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    chunk_bounds,
    parse_placement,
    placement_types,
    register_placement,
)

EVERY = [
    "R", "S(0)", "S(1)", "P(sum)", "P(avg)", "P(max)", "P(min)",
    "SS(0,2)", "SS(1,3)", "IS(0,3)", "RS(0,1:0:2)", "RS(1,0:0:1)", "NP(1)", "NP(2)", "NP(inf)",
    "NP(2.7182818284)",
]  # fmt: skip


@given(
    text=st.sampled_from(EVERY),
    rows=st.integers(0, 4).map(lambda count: 3 * count),
    columns=st.integers(1, 7),
    seed=st.integers(0, 99),
    adversarial=st.booleans(),
)
def test_assemble_undoes_split(text: str, rows: int, columns: int, seed: int, adversarial: bool) -> None:
    placement, rng = parse_placement(text), np.random.default_rng(seed)
    tensor = placement.admissible(rng.standard_normal((rows, columns)))
    pieces = placement.split(tensor, 3, rng if adversarial else None)
    assert len(pieces) == 3
    np.testing.assert_allclose(placement.assemble(pieces), tensor, atol=1e-9)
    assert placement.local_shape((rows, columns), 3) == max((p.shape for p in pieces), key=math.prod)
    assert placement.local_shapes((rows, columns), 3) == tuple(dict.fromkeys(piece.shape for piece in pieces))
    assert placement.local_bytes((rows, columns), 3, 2) == 2 * max(piece.size for piece in pieces)


@pytest.mark.parametrize("text", ["S(0)", "SS(0,2)"])
def test_shapes_of_shards_are_those_of_their_pieces_in_all_sizes(text: str) -> None:
    placement = parse_placement(text)
    for size, degree in itertools.product(range(25), range(1, 10)):
        shapes = dict.fromkeys(piece.shape for piece in placement.split(np.zeros((size, 2)), degree))
        assert placement.local_shapes((size, 2), degree) == tuple(shapes)


@pytest.mark.parametrize("text", EVERY)
def test_every_text_form_parses_and_prints(text: str) -> None:
    assert str(parse_placement(text)) == text
    assert parse_placement(f" {text} ") == parse_placement(text)


def test_the_plain_ones_have_the_short_forms() -> None:
    assert [parse_placement(text) for text in ("R", "S(1)", "P(sum)", "P", "P(max)")] == [
        REPLICATE, Shard(1), PARTIAL, PARTIAL, Partial("max"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Q(1)", "unknown placement 'Q'"),
        ("SSS(0,2)", "did you mean 'SS'"),
        ("S(", "expected a placement such as"),
        ("S(a)", "cannot read 'S\\(a\\)' as Shard"),
        ("S", "cannot read 'S' as Shard"),
        ("P(mul)", "unknown reduction 'mul'; expected one of sum, avg, max, min"),
        ("RS(0,0:0)", "one that is positive"),
        ("SS(0,0)", "at least 1 stripe"),
        ("IS(0,0)", "at least 1 section"),
        ("NP(0)", "order above 0"),
    ],
)
def test_a_text_that_is_no_placement_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        parse_placement(text)


@pytest.mark.slow  # imports PyTorch
@pytest.mark.parametrize(("size", "degree"), [(0, 3), (1, 3), (4, 3), (7, 3), (9, 4), (12, 4), (3, 8)])
def test_chunks_are_those_of_torch(size: int, degree: int) -> None:
    torch = pytest.importorskip("torch")
    theirs = [len(chunk) for chunk in torch.arange(size).chunk(degree)] if size else []
    ours = [end - begin for begin, end in chunk_bounds(size, degree)]
    assert ours == theirs + [0] * (degree - len(theirs))


@pytest.mark.slow  # imports PyTorch
@pytest.mark.parametrize(("size", "stripes", "degree"), [(12, 2, 3), (14, 2, 3), (7, 3, 2), (5, 2, 4)])
def test_stripes_are_those_of_dtensor(size: int, stripes: int, degree: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor.placement_types import _StridedShard

    theirs, _ = _StridedShard(0, split_factor=stripes)._split_tensor(torch.arange(size), degree, with_padding=False)
    ours = parse_placement(f"SS(0,{stripes})").split(np.arange(size), degree)
    assert [piece.tolist() for piece in ours] == [piece.tolist() for piece in theirs]


def test_interleaved_sections_are_stripes_where_they_are_even_and_refused_elsewhere() -> None:
    tensor = np.arange(12)
    interleaved, striped = (parse_placement(text).split(tensor, 4) for text in ("IS(0,2)", "SS(0,2)"))
    assert [piece.tolist() for piece in interleaved] == [piece.tolist() for piece in striped]
    with pytest.raises(PlacementError, match="2 equal sections do not fill a dim of 13"):
        parse_placement("IS(0,2)").split(np.arange(13), 4)


def test_ragged_units_give_each_rank_its_share_and_must_fit() -> None:
    ragged = parse_placement("RS(0,1:0:2)")
    assert [piece.tolist() for piece in ragged.split(np.arange(6), 3)] == [[0, 1], [], [2, 3, 4, 5]]
    with pytest.raises(PlacementError, match="3 units do not fill"):
        ragged.split(np.arange(7), 3)
    with pytest.raises(PlacementError, match="is for 3 ranks, the axis has 4"):
        ragged.split(np.arange(6), 4)


def test_a_dim_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlacementError, match="has no dim 2"):
        Shard(2).split(np.zeros((3, 3)), 2)


def test_pieces_of_no_tensor_are_refused() -> None:
    for text, shapes in {"S(0)": [(2, 3), (2, 4)], "P(sum)": [(2,), (3,)], "SS(0,2)": [(1,), (4,)]}.items():
        with pytest.raises(PlacementError, match="of shapes"):
            parse_placement(text).assemble([np.zeros(shape) for shape in shapes])


def test_norms_are_never_negative() -> None:
    with pytest.raises(PlacementError, match="never negative"):
        parse_placement("NP(2)").split(-np.ones(3), 3)


def test_parts_of_a_sum_have_both_signs_and_are_larger_than_their_sum() -> None:
    parts = PARTIAL.split(np.ones((20, 20)), 4, np.random.default_rng(0))
    assert all((part < 0).any() and (part > 0).any() for part in parts)
    assert np.mean(np.abs(parts)) > 3


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_maximum_has_random_owners_and_offsets_tiny_and_huge(op: str) -> None:
    parts = np.array(Partial(op).split(np.zeros((50, 50)), 4, np.random.default_rng(0)))
    assert all((part == 0).any() for part in parts)
    offsets = np.abs(parts[parts != 0])
    assert offsets.min() < 0.01
    assert offsets.max() > 10


@pytest.mark.parametrize("text", EVERY)
def test_equal_whole_tensors_assemble_to_themselves_only_where_the_placement_says_so(text: str) -> None:
    placement, tensor = parse_placement(text), np.full((3, 3), 2.0)
    if placement.holds != "shard":
        assembled = placement.assemble([tensor] * 3)
        assert np.allclose(assembled, tensor) == placement.reads_replicated


def test_a_code_that_is_taken_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Other(Placement):
        code = "S"

    with pytest.raises(ValueError, match="code 'S' is Shard's"):
        register_placement(Other)
    assert Shard in placement_types()


def test_a_cut_moves_to_another_dim_and_others_do_not() -> None:
    assert str(parse_placement("SS(0,2)").on(3)) == "SS(3,2)"
    with pytest.raises(PlacementError, match="shards no single dim"):
        Replicate().on(1)


@pytest.mark.parametrize("text", ["S(0)", "SS(0,2)", "SS(0,3)", "SS(0,8)"])
@pytest.mark.parametrize("degree", [1, 2, 4, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 12, 17, 24, 40])
def test_the_formula_of_owners_says_what_split_does(text: str, degree: int, size: int) -> None:
    placement = parse_placement(text)
    owner = placement.owners(size, degree)
    for rank, piece in enumerate(placement.split(np.arange(size), degree)):
        np.testing.assert_array_equal(np.flatnonzero(owner == rank), piece)
