"""Strategies that do the same are one: on groups of one GPU no choice changes anything."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

from sim.canonical import canonical
from sim.evaluation import Evaluation
from sim.ops.layers import op_names
from sim.optimum.spaces import Space, extended_space, joint_space, paper_space
from sim.simulate import evaluate
from sim.strategy import NONE, TOKENS, Strategy
from sim.workload import DegreeTables, Workload
from tests.questions import question_about
from tests.sim.drawn import drawn_strategy, drawn_workload

CASES = int(os.environ.get("RAYSEARCH_FUZZ", "150"))


def figures(evaluation: Evaluation) -> tuple[object, ...]:
    """All that two evaluations are compared by."""
    return (
        evaluation.tokens_per_s_per_gpu,
        evaluation.tpot_s,
        evaluation.ttft_s,
        evaluation.memory_bytes,
        evaluation.stage,
        evaluation.prompt_stage,
        evaluation.running,
        evaluation.violations,
    )


def test_the_canonical_strategy_has_the_same_figures_to_the_bit() -> None:
    rng, phases, compared = np.random.default_rng(0), set[str](), 0
    while compared < CASES:
        workload = drawn_workload(rng)
        for _ in range(25):
            drawn = replace(drawn_strategy(workload, rng, fits=False), tp=1, cp=1)
            # By one mesh, by two of the same shape, and by two where a GPU has whole experts.
            ep = drawn.ep if rng.random() < 0.5 else drawn.attention_dp
            strategy = replace(drawn, ep=ep, dp=ep if rng.random() < 0.5 else drawn.dp)
            if canonical(strategy) != strategy:
                assert figures(evaluate(workload, strategy)) == figures(evaluate(workload, canonical(strategy))), (
                    workload,
                    strategy,
                )
                compared += 1
                phases.add(workload.phase)
    assert phases == {"decode", "serve", "prefill"}


def test_a_share_of_a_prompt_on_one_gpu_is_not_rounded_up_by_a_choice_that_shards_tokens() -> None:
    # Copies for experts are no whole number: a choice to share them out among one GPU computed one more, or refused.
    workload = question_about("llama_4_scout", isl=4096, osl=1000, engine="trtllm").load()
    dims = tuple(TOKENS if name == "ffn1" else NONE for name in op_names(workload.model))
    few = Strategy(1, 32, 2, 25, dims)
    assert figures(evaluate(workload, few)) == figures(evaluate(workload, canonical(few)))


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
