"""The exact optimum where it is hardest: contiguous batches, and SLOs that let a batch in and keep a smaller one out.

Time does not always grow with the batch: tokens that divide evenly take other routes, and all-to-all rounds up. Each
case draws a small space, adds every strategy of it up, and sets the SLO to the latency of one of its batches, of
those that are faster than a smaller one as far as there are any. `RAYSEARCH_FUZZ` says how many cases are drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sim.batched import Evaluations, evaluate_many
from sim.config.files import CatalogError
from sim.engines.engine_registry import BARE_MACHINE, SHIPPED
from sim.optimum.certificate import certify
from sim.optimum.checker import check
from sim.optimum.exact_search import Known, find_best
from sim.optimum.spaces import Space, extended_space
from sim.serving.confidence import ROUNDING
from sim.serving.phases import batching
from sim.step.attention_expert_meshes import sides_of
from sim.step.stage import price_step
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

CASES = int(os.environ.get("RAYSEARCH_FUZZ", "16"))
MODELS = (
    "mixtral_8x7b",
    "minimax_m2_5",
    "qwen3_235b_a22b",
    "deepseek_v3",
    "llama_4_scout",
    "gpt_oss_120b",
    "qwen3_5_397b_a17b",
    "llama_3_1_70b",
)
ENGINES = (None, None, *SHIPPED)
PHASES = ("decode", "serve", "chunked", "prefill")
WAYS_TO_COMMUNICATE = {"all_reduce": "fastest", "fp8_gather": True, "merge_collectives": True, "overlap_parts": 4}
MOST_CHOICES = 8
"""Combinations of choices of a space."""
MOST_SLOS = 16
"""Cases of a space."""


def drawn_workload(rng: random.Random) -> Workload:
    """A model, phase and engine, without SLOs; half of the time with more memory than anything needs."""
    phase = rng.choice(PHASES)
    asked = question_about(
        rng.choice(MODELS),
        phase="serve" if phase == "chunked" else phase,
        isl=rng.choice([100, 1000, 4000]),
        osl=rng.choice([50, 1000]),
        engine=rng.choice(ENGINES) or BARE_MACHINE,
        gpus=256,
        chunk_tokens=rng.choice([512, 2048]) if phase == "chunked" else None,
        tpot_ms=0,
        ttft_ms=0,
    )
    more: dict[str, Any] = {"space": "extended"}
    if rng.random() < 0.4:
        more["redundant_experts"] = rng.choice([1, 8, 16, 32])
    if rng.random() < 0.3:
        more["expert_exchange"] = rng.choice(["all_to_all", "all_gather"])
    if rng.random() < 0.3:
        more["groups"] = "own"
    if rng.random() < 0.3 and phase in ("serve", "chunked"):
        more["prompt_wait_steps"] = rng.choice([5, 60])
    if rng.random() < 0.2 and phase != "prefill":
        more |= {"draft_tokens": 2, "acceptance": "0.7"}
    more |= {name: value for name, value in WAYS_TO_COMMUNICATE.items() if rng.random() < 0.2}
    if "overlap_parts" in more:
        more.pop("merge_collectives", None)
    workload = dataclasses.replace(asked, **more).load()
    if rng.random() < 0.5:
        workload = dataclasses.replace(workload, hardware=dataclasses.replace(workload.hardware, hbm_bytes=1e15))
    return workload


def drawn_space(rng: random.Random, workload: Workload) -> Space:
    """One or two degrees of each kind, one or two choices of some ops, and batches that follow each other."""
    extensions = [each for each in ("context", "degrees", "tokens", "gathered") if rng.random() < 0.6]
    space = extended_space(workload, extensions)
    tp, cp, dp, ep = rng.choice([each for each in space.layouts() if math.prod(each[:3]) <= 256])
    combinations, choices = 1, dict[str, tuple[int, ...]]()
    for name in rng.sample(list(space.choices), len(space.choices)):
        many = min(rng.choice([1, 2, 3]), MOST_CHOICES // combinations, len(space.choices[name]))
        choices[name] = tuple(sorted(rng.sample(space.choices[name], many)))
        combinations *= many
    lowest = rng.choice([1, rng.randrange(1, 64), rng.randrange(1, 1200)])
    stages = rng.choice(space.pp)
    if rng.random() < 0.2:
        workload = dataclasses.replace(workload, stage_layers=drawn_split(rng, workload.model.layers, stages))
    return dataclasses.replace(
        space,
        workload=workload,
        tp=(tp,),
        cp=(cp,),
        dp=(dp,) if space.dp else (),
        ep=tuple(sorted({ep, rng.choice(space.ep)})),
        pp=tuple(sorted({1, stages})),
        batch=tuple(range(lowest, lowest + rng.choice([16, 32]))),
        choices={name: choices[name] for name in space.choices},
    )


def drawn_split(rng: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, one at least."""
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return tuple(end - start for start, end in itertools.pairwise((0, *cuts, layers)))


def everything(space: Space) -> Evaluations:
    return evaluate_many(
        space.workload,
        [
            Strategy(tp, ep, pp, batch, dims, cp, dp)
            for (tp, cp, dp, ep), pp, batch in itertools.product(space.meshes(), space.pp, space.batch)
            for dims in itertools.product(*space.choices.values())
        ],
    )


def deciding(batches: np.ndarray, latency_s: np.ndarray, rng: random.Random) -> list[float]:
    """Latencies of some batches: of those that are faster than a smaller one, and of as many others."""
    least_s = [float(latency_s[batches == batch].min()) for batch in sorted(set(batches.tolist()))]
    faster = [time_s for at, time_s in enumerate(least_s) if at and time_s < max(least_s[:at])]
    return [time_s for each in (faster, least_s) for time_s in rng.sample(each, min(len(each), MOST_SLOS // 2))]


def cases(seed: int) -> Iterator[tuple[Space, float]]:
    """Spaces under an SLO, and what the best of each reaches; 0.0 where nothing is feasible."""
    for draw in itertools.count():
        rng = random.Random(f"{seed}/{draw}")
        space = drawn(rng)
        if space is None:
            continue
        workload, every = space.workload, everything(space)
        kept = every.feasible
        if not kept.any():
            continue
        batches = np.array([each.batch for each in every.strategies])[kept]
        named = "tpot_slo_s" if workload.phase != "prefill" and rng.random() < 0.8 else "ttft_slo_s"
        latency_s = (every.tpot_s if named == "tpot_slo_s" else every.ttft_s)[kept]
        if not latency_s.max() > 0:
            continue
        for slo_s in deciding(batches, latency_s, rng):
            within = latency_s <= slo_s * (1 + ROUNDING)
            wanted = float(every.tokens_per_s_per_gpu[kept][within].max(initial=0.0))
            yield dataclasses.replace(space, workload=dataclasses.replace(workload, **{named: slo_s})), wanted


def drawn(rng: random.Random) -> Space | None:
    """A small space with meshes; None where the draw is refused."""
    try:
        space = drawn_space(rng, drawn_workload(rng))
    except CatalogError:
        return None
    return space if next(space.meshes(), None) else None


def steps_s(
    space: Space, mesh: tuple[int, int, int, int], pp: int, dims: tuple[int, ...], *, or_more: bool
) -> list[list[float]]:
    """Seconds of the slowest stage, per batch and kind of step; with `or_more`, of this batch and every larger one."""
    workload = space.workload
    loads = [batching(workload, batch, mesh[2]).loads for batch in space.batch]
    stacks = [[sides_of(workload, load._replace(or_more=or_more), *mesh) for load in each] for each in loads]
    return [[price_step(stack, pp, dims).stage.total_s for stack in each] for each in stacks]


def test_no_larger_step_takes_less_than_one_of_so_many_sequences_or_more() -> None:
    wrong: list[str] = []
    for seed in (*range(CASES // 4), 253):  # the last: widening an all-reduce falls with tokens
        rng = random.Random(f"steps/{seed}")
        space = drawn(rng)
        if space is None:
            continue
        mesh, pp = rng.choice(list(space.meshes())), rng.choice(space.pp)
        dims = tuple(rng.choice(table) for table in space.choices.values())
        bounds, steps = (steps_s(space, mesh, pp, dims, or_more=or_more) for or_more in (True, False))
        for at, bound in enumerate(bounds):
            for later, step in enumerate(steps[at:], at):
                if any(low > high * (1 + 1e-10) for low, high in zip(bound, step, strict=True)):
                    wrong.append(f"seed {seed}: batch {space.batch[at]} at least {bound}, {space.batch[later]} {step}")
    assert not wrong, "\n".join(wrong[:5])


def test_no_batch_is_missed_where_a_larger_one_is_faster() -> None:
    before: Space | None = None
    known: Known = {}
    wrong: list[str] = []
    for space, wanted in itertools.islice(cases(seed=0), CASES):
        if before is None or before.choices is not space.choices:
            known = {}
        before = space
        found = find_best(space, known=known)
        if found.swept_tokens_per_s_per_gpu != pytest.approx(wanted, rel=1e-12):
            workload = space.workload
            limits = f"{workload.name}, {workload.tpot_slo_s} s, {workload.ttft_slo_s} s"
            wrong.append(f"{limits}, {space.batch[0]}...: {found.swept_tokens_per_s_per_gpu} instead of {wanted}")
    assert not wrong, "\n".join(wrong)


def test_the_best_that_keeps_its_limits_with_a_confidence_is_that_of_brute_force() -> None:
    """The fastest that keep a limit as predicted do not surely; the fastest of those that do is found and proven."""
    passed_by = 0
    for space, _ in itertools.islice(cases(seed=2), 4, CASES, 24):
        sure = dataclasses.replace(space.workload, confidence=0.6)
        few = dataclasses.replace(space, workload=sure, batch=space.batch[:8])
        every, all_sure = everything(dataclasses.replace(few, workload=space.workload)), everything(few)
        wanted, as_predicted = (each.tokens_per_s_per_gpu[each.feasible].max(initial=0.0) for each in (all_sure, every))
        best = find_best(few).evaluation
        assert (best.tokens_per_s_per_gpu if best else 0.0) == pytest.approx(wanted, rel=1e-12), sure.name
        check(few, certify(few, best))
        passed_by += 0 < wanted < as_predicted
    assert passed_by


def test_that_no_strategy_keeps_its_limits_with_a_confidence_is_proven() -> None:
    space, _ = next(cases(seed=2))
    sure = dataclasses.replace(space, workload=dataclasses.replace(space.workload, confidence=0.8))
    few = dataclasses.replace(sure, batch=space.batch[:2])
    assert everything(dataclasses.replace(few, workload=space.workload)).feasible.any()
    assert find_best(few).evaluation is None
    check(few, certify(few, None))


def test_a_batch_whose_tokens_divide_evenly_is_found_beyond_slower_ones() -> None:
    """Mixtral 8x7B on two meshes: 29.84 ms let some batches in and keep smaller ones out."""
    stated = {"phase": "serve", "isl": 1000, "osl": 1000, "tpot_ms": 29.84, "weights": "fp8", "kv_cache": "fp8"}
    asked = question_about("mixtral_8x7b", gpus=256, space="extended", **stated)
    space = extended_space(asked.load())
    dims = dict(zip(space.choices, ((choice,) for choice in (0, 5, 2, 2, 1, 1, 0, 0, 2, 2, 3, 1)), strict=True))
    mesh = {"tp": (2,), "cp": (1,), "dp": (16,), "ep": (8,), "pp": (1,)}
    space = dataclasses.replace(space, **mesh, batch=tuple(range(799, 839)), choices=dims)
    every = everything(space)
    feasible = [each.batch for each, allowed in zip(every.strategies, every.feasible, strict=True) if allowed]
    assert feasible != list(range(799, 799 + len(feasible)))
    best = find_best(space).evaluation
    assert best is not None
    assert best.strategy.batch == max(feasible)
