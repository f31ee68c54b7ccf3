"""Answers in JSON and as rows of a table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raysearch.base.file_io import degrees_text, png_of, record_bytes, write_together
from raysearch.base.priced_heading import priced_dict
from raysearch.deploy.export.pool_services import POOLS_FILE
from raysearch.deploy.pools.pool_comparison import WAYS, PoolComparison, Way
from raysearch.deploy.recommend.pool_pairs import disaggregated, pools_text
from raysearch.deploy.recommend.recommendation_files import option_figures, pair_dict
from raysearch.deploy.replay.replay_report import replay_dict
from sim.config.question import Question
from sim.json_object import JsonObject
from sim.pools.best_pools import OnePool
from sim.pools.candidates import Replica
from sim.pools.resharding import Resharded
from sim.pools.traffic import workload_of
from sim.workload import Workload

POOLS_FORM = 3
"""Of pools.json; counts up when a reader of the old one would stumble."""


def pool_comparison_dict(answer: PoolComparison) -> JsonObject:
    """An answer in JSON; a way that is not feasible is null."""
    case = answer.case
    return {
        "kinds": [asdict(kind) for kind in case.traffic.kinds],
        "limits": {name: None if value == math.inf else value for name, value in asdict(case.limits).items()},
        "kv_hidden": case.hidden,
        "ways": {name: None if way is None else _way_dict(answer, name, way) for name, way in answer.ways.items()},
        "replays": {name: replay_dict(report) for name, report in answer.replays.items()},
        "winner": answer.winner,
        **({} if case.trace is None else {"longest_request": case.trace.longest}),
    }


def answers_dict(found: Sequence[PoolComparison], question: Question) -> JsonObject:
    """Several answers on one workload in JSON, with the question that it answers."""
    workload = found[0].case.workload
    return {
        "form": POOLS_FORM,
        "question": question.record(),
        "model": workload.model.name,
        **priced_dict(workload),
        "points": [pool_comparison_dict(each) for each in found],
    }


def _way_dict(answer: PoolComparison, name: str, way: Way) -> JsonObject:
    case = answer.case
    content: JsonObject = {
        "requests_per_s": way.requests_per_s,
        "goodput_per_gpu": answer.goodput_per_gpu(name),
        "gpus": way.gpus,
        "left_over": case.limits.gpus - way.gpus,
        "tpot_s": way.tpot_s,
        "ttft_s": way.ttft_s,
    }
    if isinstance(way, OnePool):
        own = {"replicas": way.replicas, "chunk_tokens": way.workload.chunk_tokens}
        return {**content, **own, "pool": option_figures(way.workload, way.evaluation)}
    if isinstance(way, Resharded):
        cycle = {name: getattr(way, name) for name in ("waves", "cycle_requests", "cycle_s", "switch_s", "replicas")}
        pools = {
            phase: _pool_dict(answer, phase, replica, way.replicas)
            for phase, replica in (("prefill", way.prefill), ("decode", way.decode))
        }
        return {**content, **cycle, **pools}
    pair = disaggregated(case.workload, way, case.limits.gpus, case.traffic)
    return {**content, **pair_dict(pair)}


def _pool_dict(answer: PoolComparison, phase: Any, replica: Replica, count: int) -> JsonObject:
    workload = workload_of(answer.case.traffic, answer.case.workload, phase)
    rates = {"replicas": count, "requests_per_s_of_each": replica.requests_per_s, "sharers": replica.sharers}
    return {**rates, **option_figures(workload, replica.evaluation)}


COLUMNS = (
    "prompt_tokens",
    "output_tokens",
    "gpus",
    "tpot_ms",
    "ttft_ms",
    "load_requests_per_s",
    *(f"{way}_{what}" for way in WAYS for what in ("requests_per_s", "gpus", "goodput_per_gpu")),
    "winner",
)


def rows(found: Sequence[PoolComparison]) -> list[tuple[Any, ...]]:
    """A row per answer, under `COLUMNS`; empty cells where a way is not feasible."""
    table: list[tuple[Any, ...]] = []
    for answer in found:
        traffic, limits = answer.case.traffic, answer.case.limits
        row: list[Any] = [traffic.prompt_tokens, traffic.output_tokens, limits.gpus]
        row += [None if each == math.inf else each * 1e3 for each in (limits.tpot_s, limits.ttft_s)]
        row.append(limits.requests_per_s)
        for name in WAYS:
            way = answer.ways.get(name)
            row += [None] * 3 if way is None else [way.requests_per_s, way.gpus, answer.goodput_per_gpu(name)]
        table.append((*row, answer.winner))
    return table


def write_answers(found: Sequence[PoolComparison], content: JsonObject, folder: Path) -> None:
    """Writes pools.json with the given content, pools.csv and, of several answers, pools.png."""
    table = io.StringIO()
    csv.writer(table).writerows([COLUMNS, *rows(found)])
    files = {POOLS_FILE: record_bytes(content), "pools.csv": table.getvalue().encode()}
    if len(found) > 1:
        from raysearch.deploy.pools.pools_plot import pools_figure

        files["pools.png"] = png_of(pools_figure(found))
    write_together(folder, files)


def what_runs(workload: Workload, way: Way) -> str:
    """A way's pools in words."""
    if isinstance(way, OnePool):
        chunk = way.workload.chunk_tokens
        how = "whole prompts" if chunk is None else f"chunks of {chunk:,}"
        return f"{way.replicas} x ({degrees_text(way.evaluation.strategy)}), {how}"
    if isinstance(way, Resharded):
        prefill, decode = (degrees_text(each.evaluation.strategy) for each in (way.prefill, way.decode))
        return f"{way.replicas} x (prompts: {prefill}; answers: {decode})"
    return pools_text(way)
