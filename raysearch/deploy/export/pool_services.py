"""The pools that an answer of `pools` runs, as deployments: one, or one for prompts and one for answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from raysearch.base.errors import InputError
from raysearch.base.file_io import as_strategy
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.models import weights_of
from raysearch.deploy.export.render import Variable
from raysearch.deploy.export.sglang import STAGING
from raysearch.deploy.export.stored import StoredOption, StoredPair, StoredReplicas, question_of
from raysearch.runs.records import Record
from sim.config.code import Origin
from sim.config.fields import Count
from sim.config.mistakes import first_error_text
from sim.config.question import load_question
from sim.engines.engine_registry import engine_names, engine_rules
from sim.json_object import JsonObject
from sim.layers.mixers import GroupedAttention
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.strategy import Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

_log = logging.getLogger(__name__)
POOLS_FILE = "pools.json"


class _OnePool(Record):
    pool: StoredOption
    replicas: StoredReplicas
    chunk_tokens: Count | None


class _Ways(Record):
    aggregated: _OnePool | None = None
    disaggregated: StoredPair | None = None


class _Kind(Record):
    prompt_tokens: Count
    output_tokens: Count
    share: Annotated[float, Field(ge=1e-9, le=1e9)]


class _Point(Record):
    kinds: list[_Kind]
    ways: _Ways
    winner: str | None
    longest_request: Count | None = None


class _Answers(Record):
    """What is read again of pools.json."""

    points: list[_Point]
    question: JsonObject | None = None
    afd: JsonObject | None = None


def pool_deployments(
    path: Path | str, record: JsonObject, number: int, served_model: str | None
) -> dict[str, Deployment]:
    """The pools of the way that wins, by name; one pool has the name "".

    Args:
        path: Where it was read, for errors.
        record: What pools.json holds.
        number: Which of its points, from 0.
        served_model: In place of the model's own repository.

    Raises:
        InputError: It is no pools.json, there is no such point, nothing is feasible in it, or no engine has
            options for what wins.
    """
    try:
        answers = _Answers.model_validate(record)
    except ValidationError as error:
        raise InputError(f"{path} is not as `pools` writes it: {first_error_text(error, _Answers)}") from error
    if not 0 <= number < len(answers.points):
        raise InputError(f"{path} has no point {number}: it has {len(answers.points)}, from 0")
    if answers.question is None:
        raise InputError(f"{path} does not state its question: run `pools` of this version again")
    point = answers.points[number]
    if point.winner is None:
        raise InputError(f"point {number} of {path} has no strategy: nothing was feasible")
    if point.winner == "resharded":
        raise InputError(
            f"point {number} of {path}: a pool that re-shards between prefill and decode wins, and no engine can move "
            "weights and caches to another layout while it runs: take a point with another winner (--alternative N), "
            "or use `recommend` for one pool"
        )
    if answers.afd and answers.afd.get("apart"):
        _log.warning(
            "note: %s is exported with experts beside attention: no release of an engine serves them on GPUs of their "
            "own (AFD); vLLM has that in an experimental plugin alone",
            path,
        )
    way = getattr(point.ways, point.winner, None)
    if way is None:
        raise InputError(f"point {number} of {path} says that {point.winner!r} wins, but has no strategy for it")
    try:
        traffic = Traffic.of(TrafficKind(**dict(kind)) for kind in point.kinds)
    except ValueError as error:
        raise InputError(f"point {number} of {path}: {error}") from error
    question = question_of(path, record)
    workload = load_question(question, Origin.RECORD)
    served_model = weights_of(workload, question.model, served_model)
    longest = point.longest_request or max(kind.prompt_tokens + kind.output_tokens for kind in traffic.kinds)
    if isinstance(way, StoredPair):
        found = pair_deployments(workload, way, served_model, traffic)
    else:
        served = replace(workload_of(traffic, workload, "serve"), chunk_tokens=way.chunk_tokens)
        found = {"": Deployment(served, _strategy(served, way.pool), served_model, way.replicas)}
    return {name: replace(each, longest_request=longest) for name, each in found.items()}


def pair_deployments(
    workload: Workload, pair: StoredPair, served_model: str | Variable, traffic: Traffic | None = None
) -> dict[str, Deployment]:
    """Pools of their own for prompts and answers, by name.

    Args:
        workload: Model, machine and engine.
        pair: Both pools.
        served_model: Weights.
        traffic: What is sent; the workload's own equal requests if not given.
    """
    kind = TrafficKind(workload.prompt_tokens, workload.output_tokens)
    found: dict[str, Deployment] = {}
    for phase, pool in (("prefill", pair.prefill), ("decode", pair.decode)):
        served = workload_of(traffic or Traffic.of([kind]), workload, phase)
        strategy = _strategy(served, pool)
        longest = Deployment(workload, strategy, served_model).longest  # of whole requests, in either pool
        found[phase] = Deployment(served, strategy, served_model, pool.replicas, longest_request=longest)
    return found


def with_transfer(pools: Mapping[str, Deployment], to: str, engine: str) -> dict[str, Deployment]:
    """The same pools with what their engine needs to send caches: of unequal cuts of heads, from several stages.

    Args:
        pools: By name.
        to: The target. Dynamo sends caches by NIXL, which has no such buffer for pipelines.
        engine: That runs them.
    """
    staged = engine == "sglang" and _unequal_cuts(pools) is not None
    if staged and to == "dynamo" and pools["prefill"].strategy.pp > 1:
        staged = False
    stages = pools["prefill"].strategy.pp if set(pools) == {"prefill", "decode"} else 1
    return {name: replace(each, staged=staged, sender_stages=stages) for name, each in pools.items()}


def transfer_violations(pools: Mapping[str, Deployment], engine: str) -> list[str]:
    """Why an engine does not connect two pools; none if it does, or runs no pools."""
    if set(pools) != {"prefill", "decode"} or engine not in engine_names():
        return []
    return engine_rules(engine).pair_refusals(pools["prefill"].strategy, pools["decode"].strategy)


def transfer_notes(pools: Mapping[str, Deployment], engine: str) -> list[str]:
    """What an engine needs of pools whose tensor parallelism differs, if keys and values are cut by it.

    Source: docs/operations/disaggregation of llm-d, of vLLM 0.25 and 0.26: with NIXL a decode pool crashes that has
    less tensor parallelism than its prefill pool, where heads of keys and values are repeated; its guide for SGLang.
    """
    cuts = _unequal_cuts(pools)
    if cuts is None:
        return []
    prefill, decode, fewest = cuts
    if engine == "sglang" and not pools["prefill"].staged:
        how = f"NIXL has no {STAGING} for pipelines, so that transfers are slow"
        return [f"prefill has tp {prefill}, decode tp {decode}: {how}"]
    if engine == "vllm" and prefill > decode and prefill > fewest:
        why = "which crashed the decode pool of vLLM 0.25 and 0.26 where heads are repeated"
        return [
            f"prefill has tp {prefill}, decode tp {decode}, {why}: give decode as much, or take another alternative"
        ]
    return []


def _unequal_cuts(pools: Mapping[str, Deployment]) -> tuple[int, int, int] | None:
    """Over how many GPUs two pools cut heads, and the fewest heads of keys and values; None if all alike."""
    if set(pools) != {"prefill", "decode"}:
        return None
    prefill, decode = (pools[name].strategy.tp * pools[name].strategy.cp for name in ("prefill", "decode"))
    mixers = [group.attention for group in pools["decode"].workload.model.groups]
    heads = [each.kv_heads for each in mixers if isinstance(each, GroupedAttention)]
    return (prefill, decode, min(heads)) if prefill != decode and heads else None


def _strategy(served: Workload, pool: StoredOption) -> Strategy:
    strategy = as_strategy(pool.strategy.model_dump())
    check_strategy(served, strategy)
    return strategy
