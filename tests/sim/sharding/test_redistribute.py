"""Redistributions: the table of collectives, what it moves, and that it moves the right numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sharding.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from sim.sharding.redistribute import RedistributionError, collective_between, collectives_for, sent_share

Pieces = list[np.ndarray]


def chunks(tensor: np.ndarray, degree: int, dim: int) -> Pieces:
    """`Shard(dim)`: rank i holds the i-th chunk of ceil(size / degree)."""
    step = math.ceil(tensor.shape[dim] / degree)
    return [np.take(tensor, range(i * step, min((i + 1) * step, tensor.shape[dim])), dim) for i in range(degree)]


def place(tensor: np.ndarray, placement: Placement, degree: int, rng: np.random.Generator) -> Pieces:
    """What every rank holds of a tensor; parts are large, random and of both signs."""
    match placement:
        case Replicate():
            return [tensor] * degree
        case Shard(dim):
            return chunks(tensor, degree, dim)
        case Partial():
            parts = [100.0 * rng.standard_normal(tensor.shape) for _ in range(degree - 1)]
            return [*parts, tensor - sum(parts)]


def all_gather(pieces: Pieces, source: Placement, target: Placement) -> Pieces:
    assert isinstance(source, Shard)
    return [np.concatenate(pieces, source.dim)] * len(pieces)


def all_reduce(pieces: Pieces, source: Placement, target: Placement) -> Pieces:
    return [np.sum(pieces, axis=0)] * len(pieces)


def reduce_scatter(pieces: Pieces, source: Placement, target: Placement) -> Pieces:
    assert isinstance(target, Shard)
    scattered = [chunks(piece, len(pieces), target.dim) for piece in pieces]
    return [np.sum([mine[rank] for mine in scattered], axis=0) for rank in range(len(pieces))]


def all_to_all(pieces: Pieces, source: Placement, target: Placement) -> Pieces:
    assert isinstance(source, Shard)
    assert isinstance(target, Shard)
    outgoing = [chunks(piece, len(pieces), target.dim) for piece in pieces]
    return [np.concatenate([theirs[rank] for theirs in outgoing], source.dim) for rank in range(len(pieces))]


def local_slice(pieces: Pieces, source: Placement, target: Placement) -> Pieces:
    if source == target:
        return pieces
    assert isinstance(target, Shard)
    return [chunks(piece, len(pieces), target.dim)[rank] for rank, piece in enumerate(pieces)]


COLLECTIVES: dict[str | None, Callable[[Pieces, Placement, Placement], Pieces]] = {
    None: local_slice,
    "all_gather": all_gather,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
SOURCES: list[Placement] = [REPLICATE, Shard(0), Shard(1), Shard(2), PARTIAL]
TARGETS = SOURCES[:-1]
SIZES = st.tuples(*[st.integers(1, 9)] * 3)


@settings(derandomize=True, deadline=None)
@given(
    source=st.sampled_from(SOURCES),
    target=st.sampled_from(TARGETS),
    degree=st.integers(2, 5),
    shape=SIZES,
    seed=st.integers(0, 9),
)
def test_the_named_collective_really_turns_the_source_into_the_target(
    source: Placement, target: Placement, degree: int, shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensor = rng.standard_normal(shape)
    kept = place(tensor, source, degree, rng)
    got = COLLECTIVES[collective_between(source, target)](kept, source, target)
    for piece, wanted in zip(got, place(tensor, target, degree, rng), strict=True):
        np.testing.assert_allclose(piece, wanted, atol=1e-10)


@settings(derandomize=True, deadline=None)
@given(degree=st.integers(2, 6), shape=SIZES, dim=st.integers(0, 2), seed=st.integers(0, 9))
def test_reduce_scatter_then_all_gather_is_all_reduce(degree: int, shape: tuple[int, ...], dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = place(rng.standard_normal(shape), PARTIAL, degree, rng)
    in_two_steps = all_gather(reduce_scatter(parts, PARTIAL, Shard(dim)), Shard(dim), REPLICATE)
    for piece, wanted in zip(in_two_steps, all_reduce(parts, PARTIAL, REPLICATE), strict=True):
        np.testing.assert_allclose(piece, wanted, atol=1e-10)
    assert sent_share("reduce_scatter", degree) + sent_share("all_gather", degree) == pytest.approx(
        sent_share("all_reduce", degree)
    )


@settings(derandomize=True, deadline=None)
@given(degree=st.integers(2, 6), shape=SIZES, dim=st.integers(0, 2), seed=st.integers(0, 9))
def test_scatter_then_gather_is_identity(degree: int, shape: tuple[int, ...], dim: int, seed: int) -> None:
    tensor = np.random.default_rng(seed).standard_normal(shape)
    for piece in all_gather(chunks(tensor, degree, dim), Shard(dim), REPLICATE):
        np.testing.assert_array_equal(piece, tensor)


@pytest.mark.parametrize(
    ("source", "target", "collective"),
    [
        (REPLICATE, REPLICATE, None),
        (REPLICATE, Shard(0), None),
        (Shard(1), Shard(1), None),
        (Shard(0), REPLICATE, "all_gather"),
        (PARTIAL, Shard(0), "reduce_scatter"),
        (PARTIAL, REPLICATE, "all_reduce"),
        (Shard(0), Shard(1), "all_to_all"),
    ],
)
def test_every_row_of_the_table_has_its_collective(
    source: Placement, target: Placement, collective: str | None
) -> None:
    assert collective_between(source, target) == collective


@pytest.mark.parametrize("source", [REPLICATE, Shard(0), Partial("max")])
def test_nothing_is_split_into_parts_on_purpose(source: Placement) -> None:
    with pytest.raises(RedistributionError, match=r"into P\(sum\)"):
        collective_between(source, PARTIAL)


@pytest.mark.parametrize("degree", [2, 3, 4, 7, 128])
def test_bytes_sent_per_device_follow_by_counting_what_leaves_each_rank(degree: int) -> None:
    # V = degree * degree blocks of one byte. A ring gather passes degree - 1 chunks of V / degree on.
    chunk = 1 / degree
    assert sent_share("all_gather", degree) == pytest.approx((degree - 1) * chunk)
    assert sent_share("reduce_scatter", degree) == pytest.approx((degree - 1) * chunk)
    assert sent_share("all_reduce", degree) == pytest.approx(2 * (degree - 1) * chunk)
    # Pairwise exchange: of its own chunk each rank keeps one of `degree` blocks.
    assert sent_share("all_to_all", degree) == pytest.approx(chunk * (degree - 1) * chunk)


def test_a_placement_that_two_consumers_share_is_moved_once() -> None:
    assert collectives_for(Shard(0), (REPLICATE, REPLICATE)) == ("all_gather", None)
    assert collectives_for(PARTIAL, (REPLICATE, REPLICATE)) == ("all_reduce", None)
    assert collectives_for(Shard(0), (Shard(1), Shard(1), Shard(1))) == ("all_to_all", None, None)


def test_a_whole_tensor_that_one_consumer_fetched_is_sliced_by_the_others() -> None:
    assert collectives_for(Shard(0), (REPLICATE, Shard(1))) == ("all_gather", None)
    assert collectives_for(Shard(0), (Shard(1), REPLICATE)) == (None, "all_gather")
    assert collectives_for(PARTIAL, (Shard(0), REPLICATE)) == (None, "all_reduce")


def test_different_placements_are_each_paid_for() -> None:
    assert collectives_for(PARTIAL, (Shard(0), Shard(1))) == ("reduce_scatter", "reduce_scatter")
    assert collectives_for(Shard(2), (Shard(0), Shard(1))) == ("all_to_all", "all_to_all")


def test_consumers_that_take_the_tensor_as_it_lies_pay_nothing() -> None:
    assert collectives_for(Shard(0), (Shard(0), REPLICATE)) == (None, "all_gather")
    assert collectives_for(REPLICATE, (Shard(0), Shard(1), REPLICATE)) == (None, None, None)
