"""Strategies that do the same are one: on groups of one GPU no choice changes anything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sim.canonical import canonical, dims_matter
from sim.config.catalog import load_workload
from sim.optimum.spaces import Space, extended_space, joint_space, paper_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables, Workload


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
def test_the_canonical_strategy_does_the_same(name: str) -> None:
    workload, rng = load_workload(name), np.random.default_rng(0)
    # By one mesh, and by two of the same shape: dp = ep, spelled out.
    for spelled in (False, True):
        for _ in range(30):
            drawn = replace(extended_space(workload).sample(rng), tp=1, cp=1)
            strategy = replace(drawn, dp=drawn.ep if spelled else None)
            assert not dims_matter(strategy)
            same, asked = evaluate(workload, canonical(strategy)), evaluate(workload, strategy)
            assert same.tokens_per_s_per_gpu == pytest.approx(asked.tokens_per_s_per_gpu, rel=1e-12)
            assert same.memory_bytes.total == pytest.approx(asked.memory_bytes.total, rel=1e-12)
            assert [each.kind for each in same.violations] == [each.kind for each in asked.violations]


def test_where_a_side_has_several_gpus_the_strategy_is_itself() -> None:
    dims = (0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0)
    for strategy in (
        Strategy(2, 1, 1, 8, dims),
        Strategy(1, 4, 1, 8, dims, cp=2, dp=2),
        Strategy(1, 4, 1, 8, dims, cp=1, dp=8),  # two GPUs share an expert
    ):
        assert canonical(strategy) is strategy


@pytest.mark.parametrize("make", [paper_space, joint_space, extended_space])
def test_the_distinct_size_counts_each_strategy_once(toy_dense: Workload, make) -> None:
    degrees = DegreeTables((1, 2), (1, 2), (1, 2), (4,))
    space: Space = make(replace(toy_dense, degrees=degrees))
    few = {name: table[-2:] if name in ("qkv_proj", "ffn1") else table[-1:] for name, table in space.choices.items()}
    space = replace(space, choices=few, cp=space.cp[:2], dp=space.dp[:3])
    everything = {
        canonical(Strategy(tp, ep, pp, batch, dims, cp, dp or ep))
        for tp, cp, dp, ep, pp, batch in itertools.product(
            space.tp, space.cp, space.dp or (0,), space.ep, space.pp, space.batch
        )
        for dims in itertools.product(*few.values())
    }
    assert len(everything) == space.distinct_size < space.size
