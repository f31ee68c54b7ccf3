"""The exact optimum in every phase, under engines and limits, over every batch: against brute force."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest

from sim.config.described import Description, described_workload
from sim.evaluation import Evaluation
from sim.optimum.best import find_best
from sim.optimum.spaces import Space, extended_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

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
BATCHES = (1, 3, 8, 9, 17, 40, 41, 120, 333, 700)
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
    said = {"isl": 2000, "osl": 150, "engine": engine, "max_gpus": 8, **PHASES[phase], **LIMITS[limits]}
    description = Description("mixtral_8x7b", **said)  # type: ignore[arg-type]
    workload = described_workload(description, {"space": "extended"})  # more than what an engine can be told
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
def evaluations(phase: str, engine: str | None) -> list[Evaluation]:
    """Every strategy of the space without SLOs, evaluated one by one."""
    space = small(phase, engine, "none")
    return [
        evaluate(space.workload, Strategy(tp, ep, pp, batch, dims, dp=dp))
        for tp, ep, pp, batch in itertools.product(space.tp, space.ep, space.pp, space.batch)
        for dp in space.dp or (ep,)
        for dims in itertools.product(*space.choices.values())
    ]


def within(workload: Workload, evaluation: Evaluation) -> bool:
    in_time = evaluation.tpot_s <= workload.tpot_slo_s and evaluation.ttft_s <= workload.ttft_slo_s
    return evaluation.feasible and in_time


@pytest.mark.slow
@pytest.mark.parametrize("engine", [None, "trtllm", "vllm"])
@pytest.mark.parametrize("phase", list(PHASES))
def test_the_best_of_every_phase_is_that_of_brute_force(phase: str, engine: str | None) -> None:
    for limits in LIMITS:
        space = small(phase, engine, limits)
        inside = [e for e in evaluations(phase, engine) if within(space.workload, e)]
        best = max((e.tokens_per_s_per_gpu for e in inside), default=0.0)
        found = find_best(space)
        assert found.swept_tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12), limits
        assert (found.evaluation is None) == (not inside)
        if found.evaluation is not None:
            assert found.evaluation.feasible
            assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("wait", [0, 20, 400])
def test_prompts_that_wait_for_each_other_leave_the_best_that_of_brute_force(wait: int) -> None:
    """Up to 8 attention groups with fewer requests and with more; a larger batch may have the earlier first token."""
    said = Description("mixtral_8x7b", phase="serve", isl=2000, osl=150, max_gpus=8)
    workload = described_workload(said, {"space": "extended", "prompt_wait_steps": wait})
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
    every = [evaluate(workload, Strategy(1, ep, 1, batch, dims, dp=dp)) for ep, dp, batch, dims in meshes]
    feasible = [each for each in every if each.feasible]
    for share in (0.02, 0.1, 0.4, 1.0):
        at = int(share * len(feasible)) - 1
        for name, slo in (("tpot_s", "tpot_slo_s"), ("ttft_s", "ttft_slo_s")):
            limited = dataclasses.replace(workload, **{slo: sorted(getattr(each, name) for each in feasible)[at]})
            best = max(e.tokens_per_s_per_gpu for e in feasible if within(limited, e))
            found = find_best(dataclasses.replace(space, workload=limited))
            assert found.swept_tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


def test_the_limits_of_these_cases_bind() -> None:
    kinds = {v.kind for phase in PHASES for e in evaluations(phase, "vllm") for v in e.violations}
    assert {"hbm", "sequences"} & kinds
    for phase in ("serve", "prefill"):
        late = [e for e in evaluations(phase, "vllm") if e.ttft_s > 0.13]
        assert 0 < len(late) < len(evaluations(phase, "vllm"))


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
