"""A choice that somebody declares outside `sim`, end to end: proved, priced, searched, and solved exactly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sim.layers.choices import declare_choice, withdraw_choice
from sim.layers.ops import FusedOp
from sim.ops.layers import MOE_LAYER
from sim.ops.rank import Rank
from sim.ops.work import Work, op_work
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import DECLARED, Space, extended_space, joint_space
from sim.sharding.placement import REPLICATE, Array, Shard, chunk
from sim.sharding.rules import Rule
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

COMBINE = MOE_LAYER.op("combine")
NAME = "reduce-scatter after the weighted sum"


def add_own_rows(results: Sequence[Array], ranks: Sequence[Sequence[Array]]) -> list[Array]:
    shares = [np.einsum("etd,te->td", result, gates) for result, (_, _, gates) in zip(results, ranks, strict=True)]
    rows = [chunk(share, len(ranks), 0)[rank] for rank, share in enumerate(shares)]
    return [mine + residual for mine, (_, residual, _) in zip(rows, ranks, strict=True)]


def of_whole_results(ranks: Sequence[Sequence[Array]]) -> list[Array]:
    """Every rank sums all tokens' results by weight, and adds the residual stream to its own tokens."""
    return add_own_rows([results for results, _, _ in ranks], ranks)


def of_parts(ranks: Sequence[Sequence[Array]]) -> list[Array]:
    """The same of parts: the weighted sums, of one row per token and no more per expert, are reduce-scattered."""
    return add_own_rows([sum(results for results, _, _ in ranks)] * len(ranks), ranks)


@pytest.fixture
def late() -> Iterator[int]:
    def work(rank: Rank, op: FusedOp) -> Work:
        return op_work(rank, op, 2)  # what all of the tokens take; [assumed] the add on fewer rows spares nothing

    right = Rule((REPLICATE, Shard(0), REPLICATE), Shard(0), run=of_whole_results)
    yield declare_choice(COMBINE, MOE_LAYER, NAME, right, sums_late=of_parts, work=work)
    withdraw_choice(COMBINE, NAME)


@pytest.fixture
def workload(toy_moe: Workload) -> Workload:
    return dataclasses.replace(toy_moe, tpot_slo_s=1e9, hardware=dataclasses.replace(toy_moe.hardware, hbm_bytes=1e12))


def some(workload: Workload, combine: tuple[int, ...]) -> Space:
    """Few choices, of which the one at combine is at issue."""
    table = {
        name: (choice,) for name, choice in zip(MOE_LAYER.op_by_name, (0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0), strict=True)
    }
    table |= {"combine": combine, "ffn2": (0, 1), "dispatch": (0, 2), "attn_norm": (0, 2), "attn_residual": (0, 2)}
    space = extended_space(workload, [DECLARED])
    return dataclasses.replace(space, tp=(2, 4), ep=(1, 2), pp=(1,), batch=(8, 16), choices=table)


def test_the_optimum_over_a_declared_choice_is_that_of_brute_force(workload: Workload, late: int) -> None:
    space = some(workload, (0, 1, 2, late))
    every = [
        evaluate(workload, Strategy(tp, ep, 1, batch, dims))
        for tp, ep, batch in itertools.product(space.tp, space.ep, space.batch)
        for dims in itertools.product(*space.choices.values())
    ]
    best = find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == pytest.approx(
        max(each.tokens_per_s_per_gpu for each in every if each.feasible), rel=1e-12
    )


def test_parts_that_are_summed_late_are_reduce_scattered_once_per_token(workload: Workload, late: int) -> None:
    dims = [0, 1, 1, 0, 0, 0, 2, 0, 1, 1, 0, late]
    explained = evaluate(workload, Strategy(2, 1, 1, 8, tuple(dims))).ops[-1]
    assert explained.placements_in["expert_out"] == "P(sum)"
    assert explained.placement_out == "S(0)"
    assert [(each.kind, each.tensor) for each in explained.collectives] == [("reduce_scatter", "residual_in")]


def test_a_price_of_ones_own_decides(workload: Workload) -> None:
    def free(rank: Rank, op: FusedOp) -> Work:
        return op_work(rank, op, 2)._replace(kernels=())

    norm = MOE_LAYER.op("attn_norm")
    number = declare_choice(norm, MOE_LAYER, "free", "R -> R", work=free)
    try:
        space = dataclasses.replace(
            some(workload, (0, 2)), choices=some(workload, (0, 2)).choices | {"attn_norm": (2, number)}
        )
        best = find_best(space).evaluation
        assert best is not None
        assert best.strategy.dims[0] == number
    finally:
        withdraw_choice(norm, "free")


def test_the_extended_space_has_it_and_the_joint_one_has_not(toy_moe: Workload, late: int) -> None:
    assert late in extended_space(toy_moe).choices["combine"]
    assert late not in joint_space(toy_moe).choices["combine"]
    sampled = {extended_space(toy_moe).sample(np.random.default_rng(seed)).dims[-1] for seed in range(40)}
    assert late in sampled
