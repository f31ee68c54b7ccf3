"""An answer as JSON, and the files of a folder: recommendation.json, pareto.csv, pareto.png, each option's command."""

from __future__ import annotations

import csv
import io
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from raysearch.base.file_io import png_of, record_bytes, strategy_dict, write_together
from raysearch.base.priced_heading import priced_dict
from raysearch.deploy.contexts import context_warnings
from raysearch.deploy.export.deployment import COMMAND_FILE
from raysearch.deploy.export.source import RECOMMENDATION_FILE
from raysearch.deploy.export.trtllm import CONFIG_FILE
from raysearch.deploy.recommend.fleet import cost, gpus_at_low_end, stay_of
from raysearch.deploy.recommend.load_search import LoadProof
from raysearch.deploy.recommend.pair_load import PairLoad
from raysearch.deploy.recommend.pool_pairs import Disaggregated
from raysearch.deploy.recommend.recommendation import Beside, Option, Recommendation
from raysearch.deploy.recommend.same_chip import where_measured
from raysearch.deploy.replay.replay_report import replay_dict
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.layouts import layout_of
from sim.nearness import near_limits
from sim.serving.phases import phase_of
from sim.strategy import Strategy
from sim.workload import Workload

RECOMMENDATION_FORM = 2
"""Of recommendation.json; counts up when a reader of the old one would stumble."""


def recommendation_dict(answer: Recommendation) -> JsonObject:
    """An answer in JSON; without a feasible strategy `best` is null and `nearest_miss` says why."""
    demand, workload = answer.demand, answer.demand.workload
    options = [
        pair_dict(each) if isinstance(each, Disaggregated) else _option_dict(answer, each) for each in answer.ranked
    ]
    return {
        "form": RECOMMENDATION_FORM,
        "question": demand.question.record() if demand.question else {},
        **priced_dict(demand.asked),
        "warnings": context_warnings(demand.question, demand.asked),
        **({} if demand.trace is None else {"longest_request": demand.trace.longest}),
        "model": workload.model.name,
        "config_hash": workload.config_hash,
        "feasible": bool(answer.ranked),
        "at_even_odds": option_figures(workload, answer.even) if answer.even else None,
        "winner": answer.winner,
        "load_proof": _proof_dict(answer.proof) if answer.proof else None,
        "disaggregated": pair_dict(answer.pair) if answer.pair else None,
        "best": options[0] if options else None,
        "alternatives": options[1:],
        **_where_measured_dict(answer),
        "beside": {name: _beside_dict(workload, each) for name, each in answer.beside.items()},
        "sensitivity": [
            {
                "change": each.change,
                "gain": each.gain,
                "feasible": each.evaluation is not None and not each.broken,
                "gpus": each.gpus,
                "tokens_per_s_per_gpu": each.evaluation.tokens_per_s_per_gpu if each.evaluation else None,
                "strategy": strategy_dict(each.evaluation.strategy) if each.evaluation else None,
            }
            for each in answer.variations
        ],
        "pareto": pareto_rows(answer),
        "nearest_miss": _miss_dict(answer),
    }


def option_figures(workload: Workload, evaluation: Evaluation) -> JsonObject:
    """Figures of a strategy with their 90 % intervals."""
    tpot_s, ttft_s = evaluation.tpot_s, evaluation.ttft_s
    content: JsonObject = {
        "strategy": strategy_dict(evaluation.strategy),
        "layout": layout_of(evaluation.strategy),
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "tpot_s": tpot_s if tpot_s else None,
        "tokens_per_s_per_user": 1 / tpot_s if tpot_s else None,
        "ttft_s": ttft_s if phase_of(workload).prefills else None,
        "intervals": _intervals(evaluation),
        "interval_because": evaluation.interval_because,
        "expected_error": evaluation.expected_error,
        "extrapolated": list(evaluation.extrapolated),
        "memory_bytes": {**asdict(evaluation.memory_bytes), "total": evaluation.memory_bytes.total},
        "gpus_per_replica": evaluation.gpus,
        "near_limits": [asdict(limit) for limit in near_limits(workload, evaluation)],
    }
    return content


def pair_dict(pair: Disaggregated) -> JsonObject:
    """Figures of two pools."""
    matched = pair.matched
    return {
        "form": "disaggregated",
        "tokens_per_s_per_gpu": pair.tokens_per_s_per_gpu,
        "tokens_per_s": pair.tokens_per_s,
        "tokens_per_s_interval": list(pair.tokens_per_s_interval),
        "requests_per_s": matched.requests_per_s,
        "gpus": matched.gpus,
        "left_over": pair.gpus_at_hand - matched.gpus,
        "tpot_s": matched.tpot_s,
        "tpot_interval_s": list(matched.decode.evaluation.tpot_interval_s),
        "ttft_s": matched.ttft_s,
        "transfer_s": matched.transfer_s,
        "transfer_over": "the node's links" if matched.same_node else "the network",
        **{
            phase: {
                "replicas": count,
                "requests_per_s_of_each": replica.requests_per_s,
                "sharers": replica.sharers,
                **option_figures(pair.workloads[phase], replica.evaluation),
            }
            for phase, (replica, count) in pair.pools.items()
        },
        **({"load": _pair_load_dict(pair.load)} if pair.load else {}),
        **({"requests_at_once": pair.at_once} if pair.at_once else {}),
    }


def _pair_load_dict(load: PairLoad) -> JsonObject:
    return {"gpus": load.matched.gpus, "in_steady_state": load.in_steady_state, "replay": replay_dict(load.report)}


def _intervals(evaluation: Evaluation) -> dict[str, list[float]]:
    """Low and high of each figure that a phase has: rates err as the time does that they are made of."""
    tpot_s, ttft_s, per_gpu = evaluation.tpot_s, evaluation.ttft_s, evaluation.tokens_per_s_per_gpu
    content: dict[str, list[float]] = {}
    if tpot_s:
        low_s, high_s = evaluation.tpot_interval_s
        content |= {"tpot_s": [low_s, high_s], "tokens_per_s_per_user": [1 / high_s, 1 / low_s]}
        content["tokens_per_s_per_gpu"] = [per_gpu * tpot_s / high_s, per_gpu * tpot_s / low_s]
    if ttft_s:
        low_s, high_s = evaluation.ttft_interval_s
        content["ttft_s"] = [low_s, high_s]
        content.setdefault("tokens_per_s_per_gpu", [per_gpu * ttft_s / high_s, per_gpu * ttft_s / low_s])
    return content


def _option_dict(answer: Recommendation, option: Option) -> JsonObject:
    paid = cost(answer.demand, option.fleet)
    content: JsonObject = {}
    if paid:
        content |= {"price_per_hour": paid[0], "price_per_million_tokens": paid[1]}
    own = option_figures(answer.demand.workload, option.evaluation)
    low = own["intervals"].get("tokens_per_s_per_gpu")
    if low and (gpus := gpus_at_low_end(answer.demand, option.evaluation, low[0])):
        content["gpus_at_low_end"] = gpus
    if stay := stay_of(answer.demand, option.evaluation, option.fleet):
        content |= asdict(stay)
    return {
        "form": "aggregated",
        "chunk_tokens": answer.demand.workload.chunk_tokens,
        **own,
        **asdict(option.fleet),
        **content,
        "binding_limit": option.limit,
        "reason": option.reason,
        **({"load": _load_dict(option)} if answer.demand.under_traffic else {}),
    }


def _proof_dict(proof: LoadProof) -> JsonObject:
    chunks = [{"chunk_tokens": tokens, "gpus": gpus} for tokens, gpus in proof.chunks.items()]
    return {**asdict(proof), "chunks": chunks}


def _load_dict(option: Option) -> JsonObject | None:
    """Replicas under a load; of the best with its replay. None where they take more GPUs than others, or than are."""
    load = option.load
    if load is None:
        return None
    counts = {name: getattr(load, name) for name in ("replicas", "at_even_odds", "in_steady_state")}
    return {**counts, "replay": replay_dict(load.report) if load.report else None}


def _beside_dict(workload: Workload, each: Beside | None) -> JsonObject | None:
    return {**option_figures(workload, each.evaluation), "engine_reaches": each.reached} if each else None


def _where_measured_dict(answer: Recommendation) -> JsonObject:
    """The best replicas on a machine of the same chip that has runs of the model, where it says something else."""
    if not answer.options:
        return {}
    found = where_measured(answer.demand, answer.options[0].evaluation)
    figures = found and option_figures(answer.demand.workload, found.evaluation)
    return {"where_measured": {"hardware": found.machine, **figures}} if found and figures else {}


def _miss_dict(answer: Recommendation) -> JsonObject | None:
    if answer.miss is None:
        return None
    evaluation = answer.miss.evaluation
    return {
        **option_figures(answer.demand.workload, evaluation),
        "violations": [asdict(violation) for violation in evaluation.violations],
        "gpus_needed": answer.miss.gpus_needed,
        "would_fit": list(answer.miss.would_fit),
    }


_PARETO = (
    "tokens_per_s_per_user",
    "tokens_per_s_per_gpu",
    "tpot_s",
    "ttft_s",
    "gpus",
    "tp",
    "cp",
    "dp",
    "ep",
    "pp",
    "batch",
)


def pareto_rows(answer: Recommendation) -> list[JsonObject]:
    """The front, a row per strategy, the most throughput first."""
    rows: list[JsonObject] = []
    for point in answer.front:
        found, strategy = point.evaluation, point.evaluation.strategy
        degrees = (strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep, strategy.pp, strategy.batch)
        values = (point.tokens_per_s_per_user, found.tokens_per_s_per_gpu, found.tpot_s, found.ttft_s, found.gpus)
        rows.append(dict(zip(_PARETO, (*values, *degrees), strict=True)))
    return rows


def write_recommendation(answer: Recommendation, folder: Path) -> JsonObject:
    """Writes the files of an answer, all or none; what recommendation.json holds.

    What an answer that was written there before has beside them goes: commands of another demand would start it.
    """
    content = recommendation_dict(answer)
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(_PARETO)
    writer.writerows(row.values() for row in pareto_rows(answer))
    files = {RECOMMENDATION_FILE: record_bytes(content), "pareto.csv": table.getvalue().encode(), **_commands(answer)}
    if answer.front:
        from raysearch.deploy.recommend.front_plot import front_figure

        files["pareto.png"] = png_of(front_figure(answer))
    folders = _option_folders(folder)
    former = {own / name for own in folders for name in _COMMAND_FILES}
    if (folder / RECOMMENDATION_FILE).is_file():
        former.add(folder / "pareto.png")
    write_together(folder, files)
    for path in former - {folder / name for name in files}:
        if not path.is_dir():
            path.unlink(missing_ok=True)
    for own in folders:
        with suppress(OSError):  # in use again, or somebody else's files lie there
            own.rmdir()
    return content


_NOT_EXPORTED = "not_exported.txt"
_COMMAND_FILES = (COMMAND_FILE, CONFIG_FILE, _NOT_EXPORTED)
_OF_OPTIONS = re.compile(r"best|alternative\d+")


def _option_folders(folder: Path) -> list[Path]:
    """Those in which an answer that was written before has its commands, those of pools before the option's own."""
    if not (folder / RECOMMENDATION_FILE).is_file():
        return []
    options = [each for each in folder.iterdir() if _OF_OPTIONS.fullmatch(each.name)]
    found = [own / pool for own in options if not own.is_symlink() for pool in ("prefill", "decode", "")]
    return [each for each in found if each.is_dir() and not each.is_symlink()]


_TARGETS = {"megatron_core": "megatron"}


def _commands(answer: Recommendation) -> dict[str, bytes]:
    """How to start each option, where its engine has an exporter: files by path."""
    from raysearch.deploy.export.deployment import Deployment
    from raysearch.deploy.export.formats import exporter, exporter_names
    from raysearch.deploy.export.models import repository
    from raysearch.deploy.export.pool_services import with_transfer

    workload = answer.demand.workload
    weights = repository(workload, answer.demand.question.model if answer.demand.question else None)
    target = _TARGETS.get(workload.space, workload.space)
    if target not in exporter_names():
        return {}
    found: dict[str, bytes] = {}
    for number, option in enumerate(answer.ranked):
        own = "best" if number == 0 else f"alternative{number}"
        parts = _deployed(workload, option)
        pools = {
            pool: Deployment(each, strategy, weights, replicas, longest_request=longest if pool else 0)
            for pool, each, strategy, replicas in parts
            for longest in [Deployment(workload, strategy, weights).longest]  # of whole requests, in either pool
        }
        for pool, deployment in with_transfer(pools, target, target).items():
            try:
                files = exporter(target)(deployment).all_files
            except ValueError as error:
                files = {_NOT_EXPORTED: f"{target} cannot run it: {error}\n"}
            where = f"{own}/{pool}/" if pool else f"{own}/"
            found |= {f"{where}{name}": text.encode() for name, text in files.items()}
    return found


def _deployed(workload: Workload, option: Option | Disaggregated) -> list[tuple[str, Workload, Strategy, int]]:
    """(pool, what it serves, strategy, replicas) of each; a single pool has the name ""."""
    if isinstance(option, Option):
        return [("", workload, option.evaluation.strategy, option.fleet.replicas)]
    return [
        (phase, option.workloads[phase], replica.evaluation.strategy, count)
        for phase, (replica, count) in option.pools.items()
    ]
