"""All that a question may choose, in random combinations: optimum, proof, many at once and explanation agree.

Each case draws a model, machine, phase, engine and space, and some of what else may be set; then a few strategies of
that space. A combination that means nothing is refused in one line that says why. `RAYSEARCH_FUZZ` says how many are
drawn, `RAYSEARCH_FUZZ_FROM` the first of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sim.batched import Evaluations, evaluate_many
from sim.config.files import CatalogError
from sim.config.question import Question
from sim.engines.engine_registry import SHIPPED
from sim.evaluation import Evaluation
from sim.optimum.certificate import certify
from sim.optimum.checker import check
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, space_of
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.attention_expert_meshes import sides_of_strategy
from sim.step.pipeline import pipeline
from sim.step.stage import meeting_s, step_sum
from sim.strategy import Strategy
from sim.workload import OWN_SPACES, TWO_DIMENSIONAL, Workload
from tests.questions import question_about

CASES, FIRST = int(os.environ.get("RAYSEARCH_FUZZ", "4")), int(os.environ.get("RAYSEARCH_FUZZ_FROM", "0"))
MODELS = (
    "mixtral_8x7b",
    "deepseek_v3",
    "qwen3_235b_a22b",
    "llama_4_scout",
    "gpt_oss_120b",
    "qwen3_5_397b_a17b",
    "llama_3_1_70b",
    "qwen3_32b",
)
MACHINES = ("h100_sxm", "h100_sxm", "b200_sxm", "gb200_nvl72", "mi300x", "l40s", "a100_80_sxm", "tpu_v5p")
SETTINGS: dict[str, tuple[object, ...]] = {
    "two_batch_overlap": (True,),
    "tp_inner": (2, 4, 8, 16),
    "overlap_parts": (2, 5, 8),
    "all_reduce": ("trtllm", "vllm", "sglang", "nccl", "fastest", "ring", "tree", "nvls", "one_shot", "two_shot"),
    "fp8_gather": (True,),
    "merge_collectives": (True,),
    "deepep_mode": ("low_latency", "normal"),
    "routing": ("balanced", "skewed"),
    "expert_exchange": ("all_to_all", "all_gather"),
    "redundant_experts": (8,),
    "groups": ("own",),
    "margin": (0.05,),
    "confidence": (0.8,),
    "kv_cache": ("fp8",),
    "chunk_tokens": (512,),
    "prompt_wait_steps": (8,),
}
REASONS = (
    r"no engine|no plan of an engine|has no option|does not run on|is of SGLang or vLLM|works with expert_exchange",
    r"a gather in parts is no one call|sub-axes of tp are of the space|does not delay prompts|has no experts",
    r"runs on .* alone, not on|does not compute in|keeps its KV cache in|is of phase .serve.",
)
"""Parts of what a refusal says; each is a rule that docs state."""
BEYOND_ENGINES, OF_ENGINES = {"overlap_parts", "fp8_gather", "merge_collectives"}, {"two_batch_overlap"}
OF_SERVING = {"chunk_tokens", "prompt_wait_steps"}
MOST_CHOICES = 8
"""Combinations of choices of a space."""


def drawn_question(rng: random.Random) -> Question:
    """Any of a few models and machines, with some of the settings or many."""
    engine = rng.choice(["none", "none", *SHIPPED])
    spaces = [*OWN_SPACES, *((engine,) if engine != "none" else SHIPPED)]
    space, phase = rng.choice([None, *spaces]), rng.choice(["decode", "serve", "prefill"])
    density = rng.choice([0.1, 0.3, 0.5])
    more: dict[str, Any] = {name: rng.choice(values) for name, values in SETTINGS.items() if rng.random() < density}
    if rng.random() < 0.9:  # most of the time leaves out what this space or phase does not have
        own = space in OWN_SPACES or (space is None and engine == "none")
        lacks = {*(OF_ENGINES if own else BEYOND_ENGINES), *(() if phase == "serve" else OF_SERVING)}
        lacks |= {"tp_inner"} if space != TWO_DIMENSIONAL else set()
        lacks |= {"merge_collectives"} if "overlap_parts" in more else set()
        more = {name: value for name, value in more.items() if name not in lacks}
    if rng.random() < 0.15 and phase != "prefill":
        more |= {"draft_tokens": 2, "acceptance": "0.7", "draft": "ngram"}
    asked = question_about(
        rng.choice(MODELS),
        rng.choice(MACHINES if engine == "none" else MACHINES[:4]),
        phase,
        isl=rng.choice([100, 1000, 8000]),
        osl=rng.choice([1, 200]),
        engine=engine,
        gpus=rng.choice([16, 64]),
        space=space,
        tpot_ms=rng.choice([None, None, 20.0, 60.0]),
    )
    return dataclasses.replace(asked, **more)


def drawn_space(rng: random.Random, workload: Workload) -> Space | None:
    """One or two degrees of each kind, few choices and batches; None where no mesh is left."""
    space = space_of(workload)
    meshes = [each for each in space.meshes() if math.prod(each[:3]) <= workload.max_gpus]
    if not meshes:
        return None
    some = rng.sample(meshes, min(2, len(meshes)))
    tp, cp, dp, ep = (tuple(sorted(set(each))) for each in zip(*some, strict=True))
    choices: dict[str, tuple[int, ...]] = dict(space.choices)
    vocabulary = dict(space.vocabulary)
    if space.engine is None:
        combinations = 1
        for table in (vocabulary, choices):
            for name in rng.sample(list(table), len(table)):
                many = min(rng.choice([1, 1, 2, 3]), MOST_CHOICES // combinations, len(table[name]))
                table[name] = tuple(sorted(rng.sample(table[name], many)))
                combinations *= many
    return dataclasses.replace(
        space,
        tp=tp,
        cp=cp,
        dp=dp if space.dp else (),
        ep=ep,
        pp=tuple(sorted(rng.sample(space.pp, min(2, len(space.pp))))),
        batch=tuple(sorted({1 << rng.randrange(11), *(rng.randrange(1, 1 << rng.randrange(1, 11)) for _ in range(2))})),
        choices=choices,
        vocabulary=vocabulary,
    )


def every(space: Space) -> list[Strategy]:
    """All strategies of a small space."""
    return [
        Strategy(tp, ep, pp, batch, dims, cp, dp, ends)
        for part in space.parts()
        for tp, cp, dp, ep in part.meshes()
        for pp, batch in itertools.product(part.stages((tp, cp, dp, ep)), part.batch)
        for dims in itertools.product(*part.choices.values())
        for ends in itertools.product(*part.vocabulary.values())
    ]


def cases() -> Iterator[tuple[int, Question, Space | str]]:
    """The number of each case, what is asked, and a small space, or why it is refused."""
    for seed in range(FIRST, FIRST + CASES):
        rng = random.Random(f"combinations/{seed}")
        asked = drawn_question(rng)
        try:
            workload = asked.load()
        except CatalogError as error:
            yield seed, asked, str(error)
            continue
        layers = workload.model.layers
        if rng.random() < 0.2:
            first = rng.randrange(1, layers)
            try:
                workload = dataclasses.replace(asked, stage_layers=f"{first},{layers - first}").load()
            except CatalogError as error:
                yield seed, asked, str(error)
                continue
        space = drawn_space(rng, workload)
        if space is not None:
            yield seed, asked, space


def disagreements(space: Space) -> Iterator[str]:
    """What of a space does not agree."""
    workload, strategies = space.workload, every(space)
    many, best = _figures(workload, strategies), find_best(space).evaluation
    wanted = float((many[:, 0] * many[:, 3]).max(initial=0.0))
    found = best.tokens_per_s_per_gpu if best else 0.0
    if found != pytest.approx(wanted, rel=1e-12):
        yield f"the optimum is {found}, the best of {len(strategies)} is {wanted}"
    if not space.vocabulary:
        check(space, certify(space, best))
    for at in range(0, len(strategies), max(1, len(strategies) // 3)):
        one = evaluate(workload, strategies[at])
        if _row(one) != tuple(many[at]):
            yield f"{strategies[at]}: {_row(one)} alone, {tuple(many[at])} among many"
        yield from _unexplained(workload, one)


def _figures(workload: Workload, strategies: list[Strategy]) -> Any:
    if any(each.vocabulary for each in strategies):
        return np.array([_row(evaluate(workload, each)) for each in strategies])
    many: Evaluations = evaluate_many(workload, strategies)
    rows = (many.tokens_per_s_per_gpu, many.tpot_s, many.ttft_s, many.feasible, many.memory_bytes)
    return np.array(rows, dtype=float).T


def _row(one: Evaluation) -> tuple[float, ...]:
    return one.tokens_per_s_per_gpu, one.tpot_s, one.ttft_s, float(one.feasible), one.memory_bytes.total


def _unexplained(workload: Workload, one: Evaluation) -> Iterator[str]:
    """Whether the ops add up to their layer, layers to the stage, and hidden communication to no less than it takes."""
    stage, strategy = one.stage, one.strategy
    names = list(dict.fromkeys(op.group for op in one.ops))
    for name, layer_s in zip(names, stage.group_layer_s, strict=True):
        ops_s = math.fsum(op.time_s for op in one.group_ops(name))
        if ops_s != pytest.approx(layer_s, rel=1e-9):
            yield f"{strategy}: ops of {name} take {ops_s}, the layer {layer_s}"
        for op in one.group_ops(name):
            sent_s = math.fsum(each.time_s for each in op.collectives)
            if sent_s != pytest.approx(op.communication_time_s, rel=1e-9, abs=1e-15):
                yield f"{strategy}: collectives of {op.name} take {sent_s}, its communication {op.communication_time_s}"
    load = batching(workload, one.running or strategy.batch, strategy.attention_dp).through(strategy.pp).loads[0]
    stack, step = sides_of_strategy(workload, load, strategy), step_sum(workload)
    sums = []
    for each in pipeline(workload, strategy.pp):
        layers_s = [count * group_s for count, group_s in zip(each.layers, stage.group_layer_s, strict=True)]
        met_s = [
            often * meeting_s(stack, pair, tuple(strategy.dims[place] for place in step.meetings[pair]))
            for pair, often in each.meetings
        ]
        ends_s = each.first * stage.embedding_s + each.last * (stage.head_s + stage.draft_s) + stage.send_recv_s
        sums.append(math.fsum((*layers_s, *met_s, ends_s)))
    if max(sums) != pytest.approx(stage.total_s, rel=1e-9):
        yield f"{strategy}: the stage takes {stage.total_s}, its parts {max(sums)}"
    if workload.overlap_parts > 1:
        plain = evaluate(dataclasses.replace(workload, overlap_parts=1), strategy)
        for name, layer_s in zip(names, stage.group_layer_s, strict=True):
            work_s = math.fsum(op.kernel_time_s for op in plain.group_ops(name))
            sent_s = math.fsum(op.communication_time_s for op in plain.group_ops(name))
            if layer_s < max(work_s, sent_s) * (1 - 1e-9) or layer_s > (work_s + sent_s) * (1 + 1e-9):
                yield f"{strategy}: a layer takes {layer_s} in parts, {work_s} of work and {sent_s} of communication"


def test_whatever_is_combined_agrees_or_is_refused_in_one_line_for_a_reason() -> None:
    wrong, refused, solved = list[str](), 0, 0
    for seed, asked, found in cases():
        if isinstance(found, str):
            refused += 1
            if "\n" in found or not any(re.search(reason, found) for reason in REASONS):
                wrong.append(f"{seed}: {found}")
            continue
        solved += 1
        try:
            wrong += [f"{seed}: {text}; {dict(asked.given())}" for text in disagreements(found)]
        except Exception as error:
            wrong.append(f"{seed}: {type(error).__name__}: {error}; {dict(asked.given())}")
    assert not wrong, "\n".join(wrong)
    assert refused
    assert solved
