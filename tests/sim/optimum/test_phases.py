"""The exact optimum in every phase, under engines and limits, over every batch: against brute force."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest

from sim.batched import Evaluations, evaluate_many
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

PHASES = {
    "decode": {"phase": "decode"},
    "serve": {"phase": "serve"},
    "chunked": {"phase": "serve", "chunk_tokens": 512},
    "prefill": {"phase": "prefill"},
}
LIMITS = {
    "none": {},
    "tpot": {"tpot_ms": 18.0},
    "ttft": {"ttft_ms": 130.0},
    "both": {"tpot_ms": 25.0, "ttft_ms": 250.0},
}
BATCHES = (1, 8, 9, 41, 120, 700)
CHOICES = {
    "attn_norm": (0, 2),
    "qkv_proj": (1,),
    "attention": (0, 1),
    "o_proj": (0,),
    "attn_residual": (0, 2),
    "ffn_norm": (2,),
    "router": (2,),
    "dispatch": (2,),
    "ffn1": (1,),
    "activation": (1,),
    "ffn2": (0, 1),
    "combine": (0, 2),
}


def small(phase: str, engine: str | None, limits: str) -> Space:
    """Mixtral on up to 8 GPUs, a few choices per op: memory, the engine's limits and both SLOs bind somewhere."""
    stated = {"isl": 2000, "osl": 150, "engine": engine or "none", "gpus": 8, **PHASES[phase], **LIMITS[limits]}
    description = question_about("mixtral_8x7b", **stated)  # type: ignore[arg-type]
    workload = dataclasses.replace(description, space="extended").load()  # more than what an engine can be told
    dp = (1, 2) if engine else ()
    return dataclasses.replace(
        extended_space(workload, ["degrees"] if dp else []),
        tp=(1, 4),
        ep=(1, 2),
        dp=dp,
        pp=(1, 2),
        batch=BATCHES,
        choices=CHOICES,
    )


@cache
def evaluations(phase: str, engine: str | None) -> Evaluations:
    """Every strategy of the space without SLOs."""
    space = small(phase, engine, "none")
    strategies = [
        Strategy(tp, ep, pp, batch, dims, dp=dp)
        for tp, ep, pp, batch in itertools.product(space.tp, space.ep, space.pp, space.batch)
        for dp in space.dp or (ep,)
        for dims in itertools.product(*space.choices.values())
    ]
    return evaluate_many(space.workload, strategies)


def within(workload: Workload, every: Evaluations) -> np.ndarray:
    """Whether each is feasible under the SLOs of the workload, bool `[n]`."""
    return every.feasible & (every.tpot_s <= workload.tpot_slo_s) & (every.ttft_s <= workload.ttft_slo_s)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [None, "trtllm", "vllm"])
@pytest.mark.parametrize("phase", list(PHASES))
def test_the_best_of_every_phase_is_that_of_brute_force(phase: str, engine: str | None) -> None:
    for limits in LIMITS:
        space = small(phase, engine, limits)
        every = evaluations(phase, engine)
        inside = within(space.workload, every)
        best = every.tokens_per_s_per_gpu[inside].max(initial=0.0)
        found = find_best(space)
        assert found.swept_tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12), limits
        assert (found.evaluation is None) == (not inside.any())
        if found.evaluation is not None:
            assert found.evaluation.feasible
            assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0, 20, 400])
def test_prompts_that_wait_for_each_other_leave_the_best_that_of_brute_force(wait: int) -> None:
    """Up to 8 attention groups with fewer requests and with more; a larger batch may have the earlier first token."""
    question = question_about("mixtral_8x7b", phase="serve", isl=2000, osl=150, gpus=8)
    workload = dataclasses.replace(question, space="extended", prompt_wait_steps=wait).load()
    few = {name: found[:1] for name, found in CHOICES.items()} | {"attn_norm": (2,), "attn_residual": (2,)}
    space = dataclasses.replace(
        extended_space(workload, ["degrees"]),
        tp=(1,),
        ep=(1, 8),
        dp=(4, 8),
        pp=(1,),
        batch=tuple(range(1, 34)),
        choices=few,
    )
    meshes = itertools.product(space.ep, space.dp, space.batch, itertools.product(*space.choices.values()))
    every = evaluate_many(workload, [Strategy(1, ep, 1, batch, dims, dp=dp) for ep, dp, batch, dims in meshes])
    feasible = every.feasible.sum()
    for share in (0.02, 0.4):
        at = int(share * feasible) - 1
        for name, slo in (("tpot_s", "tpot_slo_s"), ("ttft_s", "ttft_slo_s")):
            limited = dataclasses.replace(workload, **{slo: float(np.sort(getattr(every, name)[every.feasible])[at])})
            best = every.tokens_per_s_per_gpu[within(limited, every)].max()
            found = find_best(dataclasses.replace(space, workload=limited))
            assert found.swept_tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


@pytest.mark.slow  # beside the cases
def test_the_limits_of_these_cases_bind() -> None:
    kinds = {v.kind for phase in PHASES for e in evaluations(phase, "vllm")[::50] for v in e.violations}
    assert {"hbm", "sequences"} & kinds
    for phase in ("serve", "prefill"):
        late = evaluations(phase, "vllm").ttft_s > 0.13
        assert 0 < late.sum() < len(late)


@pytest.mark.parametrize("phase", ["decode", "serve"])
def test_every_batch_is_at_least_as_good_as_any_list_of_them(phase: str) -> None:
    space = small(phase, "vllm", "tpot")
    every = find_best(dataclasses.replace(space, batch=tuple(range(1, 701))))
    assert every.swept_tokens_per_s_per_gpu >= find_best(space).swept_tokens_per_s_per_gpu * (1 - 1e-12)
    assert every.evaluation is not None
    strategy = every.evaluation.strategy
    neighbours = [dataclasses.replace(strategy, batch=strategy.batch + step) for step in (-1, 1)]
    for neighbour in neighbours:
        other = evaluate(space.workload, neighbour)
        assert not other.feasible or other.tokens_per_s_per_gpu <= every.swept_tokens_per_s_per_gpu * (1 + 1e-12)
