"""What the simulator prices, run on numpy shards: the result is the unsharded layer's, the bytes are `explain`'s."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from sim.config.catalog import load_hardware
from sim.evaluation import OpBreakdown
from sim.layers.model import uniform_model
from sim.ops.dims import choices_of
from sim.ops.heuristics import megatron_sp_dims
from sim.optimum.spaces import extended_space, joint_space, paper_space
from sim.serving.phases import batching
from sim.sharding.operations import HEAD, QUERIES
from sim.simulate import evaluate
from sim.step.attention_expert_meshes import sides_of_strategy
from sim.strategy import Strategy
from sim.workload import DegreeTables, Precisions, Workload
from tests.sim.execution import Cluster, Numbers, unsharded

CASES = int(os.environ.get("RAYSEARCH_FUZZ", "30"))
TOKENS, CONTEXT, HIDDEN, FFN, KV_HEADS, EXPERTS, WIDEST = 64, 16, 32, 16, 16, 16, 16
"""Every size is a multiple of every degree, so that no GPU has more than others."""


def workload(experts: int) -> Workload:
    """A small layer of which every token visits every expert, so that no copy is sent for nothing."""
    model = uniform_model("small", 1, HIDDEN, FFN, KV_HEADS * QUERIES, KV_HEADS, HEAD, 128, experts, experts)
    return Workload(
        name="small",
        model=model,
        hardware=load_hardware("h100_sxm"),
        phase="decode",
        context_tokens=CONTEXT,
        tpot_slo_s=1.0,
        max_gpus=WIDEST,
        precisions=Precisions("bf16", "bf16", "bf16", "fp8"),
        load_imbalance=1.0,
        degrees=DegreeTables((1, 2, 4, 8), (1, 2, 4, 8, 16) if experts > 1 else (1,), (1,), (TOKENS,)),
        config_hash="small",
    )


DENSE, MOE = workload(1), workload(EXPERTS)


def numbers(rng: np.random.Generator, experts: int) -> Numbers:
    stack = (experts,) if experts > 1 else ()
    shapes = {
        "qkv_proj": (HIDDEN, KV_HEADS * (QUERIES + 2) * HEAD),
        "o_proj": (KV_HEADS * QUERIES * HEAD, HIDDEN),
        "router": (HIDDEN, experts),
        "ffn1": (*stack, HIDDEN, 2 * FFN),
        "ffn2": (*stack, FFN, HIDDEN),
    }
    return Numbers(
        {name: rng.standard_normal(shape) / shape[-2] ** 0.5 for name, shape in shapes.items()},
        rng.standard_normal((TOKENS, KV_HEADS, CONTEXT, 2 * HEAD)),
        rng.standard_normal((TOKENS, HIDDEN)),
    )


def drawn(small: Workload, rng: np.random.Generator) -> Strategy:
    """Of any space, on as many GPUs as there are, both meshes on the same."""
    space = (paper_space, joint_space, extended_space, extended_space)[rng.integers(4)](small)
    while True:
        found = space.sample(rng)
        if found.stage_gpus <= WIDEST and {each.kind for each in evaluate(small, found).violations} <= {"hbm", "tpot"}:
            return found


def run(small: Workload, strategy: Strategy, given: Numbers, explained: Mapping[str, OpBreakdown]) -> Cluster:
    """The layer on the strategy's GPUs, its result held against the unsharded one."""
    (load,) = batching(small, strategy.batch, strategy.attention_dp).loads
    (sides,) = sides_of_strategy(small, load, strategy)
    (choices,) = choices_of(small, strategy.dims)
    cluster = Cluster(sides, strategy.stage_gpus, choices, explained)
    pieces, placement = cluster.run(given)
    groups = sides.leaves.ep
    for index, rows in enumerate(np.split(unsharded(given, small.model.is_moe), groups)):
        degree = sides.leaves.tp
        group = pieces[index * degree : (index + 1) * degree]
        if placement.holds == "part":
            group, wanted = [placement.assemble(group)], [rows]
        else:
            wanted = placement.split(rows, degree)
        for got, want in zip(group, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    return cluster


def explained_ops(small: Workload, strategy: Strategy) -> dict[str, OpBreakdown]:
    return {op.name: op for op in evaluate(small, strategy).ops}


def test_random_strategies_give_the_unsharded_result_by_the_collectives_that_are_charged() -> None:
    rng = np.random.default_rng(0)
    for case in range(CASES):
        small, experts = (DENSE, 1) if case % 4 == 0 else (MOE, EXPERTS)
        strategy = drawn(small, rng)
        explained = explained_ops(small, strategy)
        sent = run(small, strategy, numbers(rng, experts), explained).sent
        for name, op in explained.items():
            charged = sorted((each.kind, each.degree, each.bytes_per_device) for each in op.collectives)
            ran = sorted(sent[name])
            assert [each[:2] for each in ran] == [each[:2] for each in charged], (strategy, name)
            np.testing.assert_allclose(
                [each[2] for each in ran], [each[2] for each in charged], rtol=1e-12, err_msg=f"{strategy} {name}"
            )


def test_a_plan_that_forgets_a_collective_does_not_run() -> None:
    strategy = Strategy(4, 2, 1, TOKENS, megatron_sp_dims(MOE.model))
    rng, explained = np.random.default_rng(0), explained_ops(MOE, strategy)
    given = numbers(rng, EXPERTS)
    run(MOE, strategy, given, explained)
    for name in ("qkv_proj", "attn_residual", "ffn1", "combine"):
        forgetful = {**explained, name: replace(explained[name], collectives=())}
        with pytest.raises(AssertionError, match="nothing is charged"):
            run(MOE, strategy, given, forgetful)
