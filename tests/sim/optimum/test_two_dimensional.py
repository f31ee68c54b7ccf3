"""Ops that shard two dims over sub-axes of tp = a x b: rules executed, prices by hand, the optimum by brute force."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.layers.choices import grid_rule, has_grid, rule
from sim.ops.dims import dims_of
from sim.ops.layers import DENSE_LAYER, MOE_LAYER
from sim.optimum.exact_search import find_best
from sim.optimum.landscape import can_be_added_up
from sim.optimum.spaces import Space, joint_space, two_dimensional_space
from sim.sharding.grid import GridShard, grid_of, lifted, sub_degrees
from sim.sharding.placement import PARTIAL, REPLICATE, PlacementError, Shard
from sim.sharding.rule_check import counter_example
from sim.sharding.rules import einsum_operation, label_rule
from sim.simulate import evaluate
from sim.step.layer import group_sums
from sim.strategy import GRID, Strategy, grid_choices
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import Workload

OPS = {op.name: op for layer in (DENSE_LAYER, MOE_LAYER) for op in layer.ops}


@pytest.mark.parametrize(("degree", "ranks"), [(2, 2), (3, 2), (4, 2), (6, 2), (8, 2), (8, 4), (6, 4), (16, 4), (2, 8)])
def test_pieces_on_two_sub_axes_are_those_of_one_after_the_other(degree: int, ranks: int) -> None:
    whole, (outer, inner) = np.arange(5.0 * 7 * 9).reshape(5, 7, 9), sub_degrees(degree, ranks)
    for one, other in itertools.permutations([Shard(0), Shard(1), Shard(2), REPLICATE, PARTIAL], 2):
        placement = grid_of(one, other, ranks)
        pieces = placement.split(whole, degree, np.random.default_rng(0))
        np.testing.assert_allclose(placement.assemble(pieces), whole)
        shapes = [piece.shape for each in one.split(whole, outer) for piece in other.split(each, inner)]
        assert [piece.shape for piece in pieces] == shapes
        assert lifted(placement) == (one, other)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPS)
def test_the_rule_of_two_letters_is_right(name: str, ranks: int) -> None:
    """Executed on 2 to 11 ranks, wherever nothing communicates inside; the checker refuses one sub-axis too many."""
    op = OPS[name]
    if not has_grid(op):
        return
    for letters in itertools.permutations(op.labels):
        outer, inner = letters
        found = grid_rule(op.operation, outer, inner, ranks)
        assert len(found.inputs) == len(op.operation.operands)
        if not any(label_rule(op.operation, letter).run for letter in letters):
            assert counter_example(op.operation, found) is None
    product = einsum_operation("td,df->tf")
    wrong = dataclasses.replace(grid_rule(product, "t", "d"), output=GridShard(0, 1))
    assert counter_example(product, wrong) is not None
    with pytest.raises(PlacementError, match="expected two dims"):
        GridShard(1, 1)


def plain(workload: Workload, **degrees: int) -> Space:
    whole = two_dimensional_space(workload)
    return dataclasses.replace(whole, **{name: (value,) for name, value in degrees.items()})


def test_one_dim_over_both_sub_axes_costs_what_it_costs_on_one_axis(toy_moe: Workload) -> None:
    """Without a choice of two dims every figure is that of the joint space, to the bit; so is the bound."""
    space = joint_space(toy_moe)
    rng = np.random.default_rng(0)
    inside = two_dimensional_space(toy_moe).workload
    for _ in range(20):
        strategy = space.sample(rng)
        one, other = evaluate(toy_moe, strategy), evaluate(inside, strategy)
        assert (one.tpot_s, one.memory_bytes, one.feasible) == (other.tpot_s, other.memory_bytes, other.feasible)


def test_two_ranks_have_one_sub_axis(toy_moe: Workload) -> None:
    """tp = 2 is 1 x 2: the dim of the outer sub-axis stays whole, and an op costs what the inner dim's choice does."""
    workload = two_dimensional_space(toy_moe).workload
    names = [dim.name for dim in dims_of(workload)]
    base = [2] * len(names)
    for at, name in enumerate(names):
        if not has_grid(OPS[name]):
            continue
        for grid, inner in zip(grid_choices(2), (1, 0), strict=True):
            found = []
            for choice in (grid, inner):
                dims = tuple(choice if place == at else each for place, each in enumerate(base))
                own = evaluate(workload, Strategy(2, 2, 1, 16, dims))
                found.append(next(op for op in own.ops if op.name == name))
            two, one = found
            assert (two.kernel_time_s, two.work_flops) == (one.kernel_time_s, one.work_flops)
            assert two.communication_time_s == pytest.approx(one.communication_time_s, rel=0.2, abs=1e-7)


def test_a_product_of_two_dims_has_a_quarter_of_the_work_and_sums_over_its_own_sub_axis(toy_dense: Workload) -> None:
    """By hand, tp = 4 = 2 x 2: hidden over the outer, ffn hidden over the inner one; the parts are reduced."""
    workload = two_dimensional_space(toy_dense).workload
    names = [dim.name for dim in dims_of(workload)]
    dims = tuple(GRID[0] if name in ("ffn1", "activation") else 2 for name in names)
    ops = {op.name: op for op in evaluate(workload, Strategy(4, 1, 1, 64, dims)).ops}
    whole = {op.name: op for op in evaluate(workload, Strategy(1, 1, 1, 64, (2,) * len(names))).ops}
    assert ops["ffn1"].work_flops == whole["ffn1"].work_flops / 4
    assert (ops["ffn1"].placements_in, ops["ffn1"].placement_out) == ({"ffn_in": "G(1,-1,2)"}, "G(-2,1,2)")
    (scatter,) = ops["activation"].collectives
    group = workload.model.groups[0].feed_forward
    assert group is not None
    width = group.in_width // 2 * 64 * 2  # bytes on each sub-axis' group
    assert (scatter.kind, scatter.degree, scatter.bytes_per_device) == ("reduce_scatter", 2, width / 2)
    assert ops["activation"].label == "tokens x ffn hidden"


def test_eight_by_eight_ranks_split_a_product_into_64_parts(toy_dense: Workload) -> None:
    """By hand, tp = 64 = 8 x 8, by either order of the dims, and 16 x 4: a 64th of the work, sums over one sub-axis."""
    for tp_inner, degrees in ((8, (8, 8)), (4, (16, 4))):
        workload = two_dimensional_space(dataclasses.replace(toy_dense, tp_inner=tp_inner, max_gpus=64)).workload
        names = [dim.name for dim in dims_of(workload)]
        for choice, summed in zip(grid_choices(tp_inner), degrees, strict=True):  # hidden, over which it is contracted
            dims = tuple(choice if name in ("ffn1", "activation") else 2 for name in names)
            ops = {op.name: op for op in evaluate(workload, Strategy(64, 1, 1, 64, dims)).ops}
            whole = {op.name: op for op in evaluate(workload, Strategy(1, 1, 1, 64, (2,) * len(names))).ops}
            assert ops["ffn1"].work_flops == pytest.approx(whole["ffn1"].work_flops / 64, rel=0.2)  # whole columns
            assert {each.degree for each in ops["activation"].collectives} <= {summed, degrees[0] * degrees[1]}


@pytest.mark.parametrize("tp_inner", [2, 4])
def test_the_optimum_is_that_of_brute_force(toy_moe: Workload, tp_inner: int) -> None:
    roomy = dataclasses.replace(toy_moe.hardware, hbm_bytes=1e12)
    free_of_limits = dataclasses.replace(toy_moe, hardware=roomy, tpot_slo_s=1e9, tp_inner=tp_inner, max_gpus=16)
    whole = two_dimensional_space(free_of_limits)
    free = ("qkv_proj", "attention", "o_proj", "ffn1", "activation", "combine")
    choices = {name: table[-3:] if name in free else table[:1] for name, table in whole.choices.items()}
    degrees = (2, 4) if tp_inner == 2 else (4, 8)
    space = dataclasses.replace(whole, tp=degrees, ep=(1, 2), pp=(1,), batch=(3, 16), choices=choices)
    every = [
        Strategy(tp, ep, 1, batch, dims)
        for tp, ep, batch in itertools.product(space.tp, space.ep, space.batch)
        for dims in itertools.product(*choices.values())
    ]
    many, best = evaluate_many(space.workload, every), find_best(space)
    assert best.evaluation is not None
    rates = many.tokens_per_s_per_gpu * many.feasible
    assert best.evaluation.tokens_per_s_per_gpu == rates.max()
    assert best.swept_tokens_per_s_per_gpu == pytest.approx(rates.max(), rel=1e-9)
    for strategy in every[:: len(every) // 20]:
        one = evaluate(space.workload, strategy)
        at = every.index(strategy)
        assert (one.tpot_s, one.feasible) == (many.tpot_s[at], many.feasible[at])


def test_two_dims_are_choices_of_their_own_space_alone(toy_moe: Workload) -> None:
    strategy = Strategy(4, 1, 1, 16, (GRID[0],) * 12)
    check_strategy(two_dimensional_space(toy_moe).workload, strategy)
    with pytest.raises(StrategyError, match="must be 0"):
        check_strategy(two_dimensional_space(dataclasses.replace(toy_moe, tp_inner=4)).workload, strategy)
    with pytest.raises(StrategyError, match="must be 0"):
        check_strategy(toy_moe, strategy)
    assert can_be_added_up(joint_space(toy_moe))
    assert not can_be_added_up(two_dimensional_space(toy_moe))  # 5 ** 12 combinations
    assert all(GRID[0] not in table for table in joint_space(toy_moe).choices.values())
    (summed,) = group_sums(toy_moe)
    assert rule(summed.layer.layer.op("ffn2"), summed.layer.layer, GRID[1]).output == GridShard(2, -2, 2)
