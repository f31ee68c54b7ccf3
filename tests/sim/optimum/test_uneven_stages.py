"""Pipelines with the best layers per stage, and choices of their own: against every split by brute force."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.config.catalog import CatalogError
from sim.config.question import Question
from sim.engines.vllm import VLLM
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, engine_space, joint_space, space_of
from sim.optimum.uneven_stages import balanced_layers, best_stages
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.attention_expert_meshes import sides_of_strategy
from sim.step.pipeline import layers_of_stages, stage_between
from sim.step.stage import (
    base_of,
    meeting_s,
    room,
    stage_bytes,
    stage_s,
    step_sum,
    vocabulary_seconds,
)
from sim.strategy import Strategy
from sim.workload import Workload

DEEPSEEK = Question(model="deepseek_v3", phase="decode", isl=4000, osl=500, engine="none", gpus=64)


def few_layers(asked: Question, order: tuple[int, ...], **limits: float) -> Workload:
    """The model with so few layers, of groups in this order, and a large embedding and LM head."""
    workload = asked.load()
    counts = [order.count(group) for group in range(len(workload.model.groups))]
    groups = tuple(
        dataclasses.replace(group, count=count) for group, count in zip(workload.model.groups, counts, strict=True)
    )
    model = dataclasses.replace(workload.model, groups=groups, order=order, vocab=400_000)
    hardware = dataclasses.replace(workload.hardware, hbm_bytes=limits.get("hbm_bytes", workload.hardware.hbm_bytes))
    return dataclasses.replace(workload, model=model, hardware=hardware, tpot_slo_s=limits.get("tpot_slo_s", 1.0))


def splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, layers)))


FREE = ("qkv_proj", "o_proj", "ffn2", "dense.o_proj", "experts.qkv_proj", "experts.ffn2")


def small(workload: Workload) -> Space:
    whole = joint_space(workload)
    choices = {name: table if name in FREE else table[1:2] for name, table in whole.choices.items()}
    return dataclasses.replace(whole, tp=(2, 4), ep=(1, 2), pp=(1, 3), batch=(8, 160), choices=choices)


@pytest.fixture(scope="module", params=["shared", "own"])
def workload(request: pytest.FixtureRequest) -> Workload:
    workload = few_layers(DEEPSEEK, (0, 1, 1, 1, 1), hbm_bytes=22e9)
    return dataclasses.replace(workload, groups=request.param)


def test_the_best_split_is_that_of_brute_force(workload: Workload) -> None:
    """Every strategy with every split; memory keeps some out."""
    space, best, refused = small(workload), 0.0, 0
    for pp in space.pp:
        strategies = [
            Strategy(tp, ep, pp, batch, dims)
            for tp, ep, batch in itertools.product(space.tp, space.ep, space.batch)
            for dims in itertools.product(*space.choices.values())
        ]
        for counts in splits(5, pp):
            found = evaluate_many(dataclasses.replace(workload, stage_layers=counts), strategies)
            refused += int((found.memory_bytes > workload.hbm_limit_bytes).sum())
            best = max(best, float((found.tokens_per_s_per_gpu * found.feasible).max()))
    ours, equal = best_stages(space), find_best(space).evaluation
    assert refused
    assert ours is not None
    assert equal is not None
    assert ours.tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)
    assert ours.tokens_per_s_per_gpu >= equal.tokens_per_s_per_gpu * (1 - 1e-12)
    own = ours.evaluated(workload)
    assert own.feasible
    assert own.tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


def stage_seconds(workload: Workload, strategy: Strategy, start: int, end: int) -> float:
    """Of one stage, priced as `evaluate` adds it up; infinite without room."""
    stack = sides_of_strategy(workload, batching(workload, strategy.batch, strategy.ep).loads[-1], strategy)
    step, dims, layers = step_sum(workload), strategy.dims, workload.model.layers
    priced = [group.priced(sides, dims) for group, sides in zip(step.groups, stack, strict=True)]
    layers_s = [group.layer.time_s(*each) for group, each in zip(step.groups, priced, strict=True)]
    stage = stage_between(workload, start, end, first=start == 0, last=end == layers)
    met = {pair: meeting_s(stack, pair, tuple(dims[at] for at in step.meetings[pair])) for pair, _ in stage.meetings}
    ends = vocabulary_seconds(stack[step.end], strategy.pp, dims[step.leaves])
    weights, kv = (
        [sum(getattr(cost, kind) for cost in each.costs) for each in priced] for kind in ("weight_bytes", "kv_bytes")
    )
    peak = max(cost.activation_bytes for each in priced for cost in each.costs)
    kinds = stage_bytes(workload, stage, strategy.pp, weights, kv, peak, base_of(stack))
    needed, allowed = room(workload, sum(kinds), kinds[1])
    if needed > allowed or any(cost.broken for each in priced for cost in each.costs):
        return np.inf
    return stage_s(stage, layers_s, met, ends)


def test_stages_with_choices_of_their_own_are_those_of_brute_force() -> None:
    """The memory of the last stage is full of the LM head, so that it takes other choices than the others."""
    workload = few_layers(DEEPSEEK, (0, 1, 1, 1, 1, 1), hbm_bytes=10.2e9)
    space = dataclasses.replace(small(workload), tp=(4,), ep=(2,), pp=(3,), batch=(96,))
    every = [Strategy(4, 2, 3, 96, dims) for dims in itertools.product(*space.choices.values())]
    seconds = {
        (start, end): [stage_seconds(workload, strategy, start, end) for strategy in every]
        for start in range(6)
        for end in range(start + 1, 7)
        if (start, end)
        in {(s, e) for cut in splits(6, 3) for s, e in itertools.pairwise(itertools.accumulate(cut, initial=0))}
    }
    least = {part: min(each) for part, each in seconds.items()}  # the stream lies alike under all of these choices
    best_s = min(
        max(least[part] for part in itertools.pairwise(itertools.accumulate(cut, initial=0))) for cut in splits(6, 3)
    )
    shared, own = best_stages(space), best_stages(space, own_choices=True)
    assert own is not None
    assert own.tpot_s == pytest.approx(3 * best_s, rel=1e-12)
    assert shared is None or shared.tokens_per_s_per_gpu <= own.tokens_per_s_per_gpu
    ends = list(itertools.accumulate(own.layers, initial=0))
    for dims, part in zip(own.dims, itertools.pairwise(ends), strict=True):
        assert stage_seconds(workload, Strategy(4, 2, 3, 96, dims), *part) <= best_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("engine", "phase", "tpot_s"),
    [
        ("sglang", "serve", 0.05),
        pytest.param("vllm", "serve", 1.0, marks=pytest.mark.slow),
        pytest.param("trtllm", "decode", 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_best_split_of_an_engines_plans_is_that_of_brute_force(engine: str, phase: str, tpot_s: float) -> None:
    """Steps with prompts and without, limits kept with a confidence, and memory; every split of every strategy."""
    asked = dataclasses.replace(DEEPSEEK, engine=engine, phase=phase, gpus=16, confidence=0.9, ttft_ms=2000.0)
    workload = few_layers(asked, (0, 1, 1, 1), hbm_bytes=25e9, tpot_slo_s=tpot_s)
    space = dataclasses.replace(space_of(workload), tp=(1, 4), ep=(1, 4), pp=(3,), batch=(160,))
    best, refused = 0.0, 0
    runs = [
        Strategy(tp, ep, pp, batch, part.only_dims, cp, dp)
        for part in space.parts()
        for tp, cp, dp, ep in part.meshes()
        for pp, batch in itertools.product(part.stages((tp, cp, dp, ep)), part.batch)
    ]
    for counts in splits(4, 3):
        found = evaluate_many(dataclasses.replace(workload, stage_layers=counts), runs)
        refused += int((~found.feasible).sum())
        best = max(best, float((found.tokens_per_s_per_gpu * found.feasible).max()))
    ours, equal = best_stages(space), find_best(space).evaluation
    assert refused
    assert ours is not None
    assert ours.tokens_per_s_per_gpu == best
    assert equal is None or ours.tokens_per_s_per_gpu >= equal.tokens_per_s_per_gpu
    assert ours.evaluated(workload).tokens_per_s_per_gpu == best


def test_an_engine_that_shares_layers_out_by_itself_is_named() -> None:
    workload = dataclasses.replace(DEEPSEEK, engine="vllm", phase="serve").load()
    alone = dataclasses.replace(engine_space(workload, VLLM), engine=dataclasses.replace(VLLM, cuts_stages=False))
    with pytest.raises(ValueError, match="vLLM has no option for the layers of each stage"):
        best_stages(alone)
    with pytest.raises(ValueError, match="vLLM shards all stages alike"):
        best_stages(engine_space(workload, VLLM), own_choices=True)
    with pytest.raises(ValueError, match="phase 'traffic' is judged by replays: take 'serve'"):
        best_stages(engine_space(dataclasses.replace(DEEPSEEK, engine="vllm", phase="traffic").load(), VLLM))


def test_one_stage_and_equal_layers_are_as_before() -> None:
    workload = few_layers(DEEPSEEK, (1,) * 4)
    space = dataclasses.replace(small(workload), pp=(1,))
    found, before = best_stages(space), find_best(space).evaluation
    assert found is not None
    assert before is not None
    assert (found.layers, found.strategy.dims) == ((4,), before.strategy.dims)
    assert found.evaluated(workload).tokens_per_s_per_gpu == before.tokens_per_s_per_gpu


def test_layers_that_are_given_are_those_of_pipelines_of_as_many_stages() -> None:
    workload = dataclasses.replace(DEEPSEEK, stage_layers="13,16,16,16").load()
    assert layers_of_stages(workload, 4) == (13, 16, 16, 16)
    assert layers_of_stages(workload, 2) == (31, 30)
    strategy = Strategy(1, 8, 4, 256, (2,) * 12)
    assert balanced_layers(DEEPSEEK.load(), strategy) == (17, 15, 15, 14)
    even, given = evaluate(DEEPSEEK.load(), strategy), evaluate(workload, strategy)
    best = evaluate(dataclasses.replace(workload, stage_layers=(17, 15, 15, 14)), strategy)
    assert best.tpot_s < even.tpot_s <= given.tpot_s
    with pytest.raises(CatalogError, match=r"61 together, got 13,16,16 \(45\)"):
        dataclasses.replace(DEEPSEEK, stage_layers="13,16,16").load()
    with pytest.raises(ValueError, match="phase 'serve' has steps with prompts and without: take phase 'decode'"):
        best_stages(joint_space(dataclasses.replace(DEEPSEEK, phase="serve").load()))
