"""Where an exported strategy comes from: a recommendation, the results of a search or a study, or printed JSON."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from raysearch.base.errors import InputError
from raysearch.base.file_io import as_strategy, read_record
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.models import weights_of
from raysearch.deploy.export.pool_services import POOLS_FILE, pair_deployments, pool_deployments
from raysearch.deploy.export.render import Variable
from raysearch.deploy.export.stored import Exportable, StoredPair, question_of
from raysearch.runs.records import Record, RunSpec
from raysearch.studies.results import read_spec, read_study_runs
from sim.config.code import Origin
from sim.config.question import QUESTION_FIELDS, Question, load_question, option_of
from sim.json_object import JsonObject
from sim.replay.replica_sets import in_chunks, of_pool
from sim.serving.phases import DECODE, PREFILL, phase_of
from sim.strategy import ONE_REPLICA, Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

RECOMMENDATION_FILE = "recommendation.json"
PLACEMENT_FILE = "placement.json"
TUNED_FILE = "tuned.json"
"""What `tune-live` found: the options of its workload, and the best."""


def verified_answers(folder: Path) -> list[str]:
    """Names of the answers of `recommend`, `pools`, `place` and `tune-live` in a folder, each as it was written.

    Raises:
        InputError: What says which one is not.
    """
    schemas = dict.fromkeys((RECOMMENDATION_FILE, POOLS_FILE, TUNED_FILE), Exportable) | {PLACEMENT_FILE: Record}
    found = {name: schema for name, schema in schemas.items() if os.path.lexists(folder / name)}
    for name, schema in found.items():
        read_record(folder / name, schema)
    return list(found)


def read_deployments(
    source: Path, question: Question | None, alternative: int, served_model: str | None
) -> dict[str, Deployment]:
    """What a folder or a file holds, by the name of its pool; "" of a single one.

    Args:
        source: A folder of `recommend`, `pools`, `tune-live`, `search` or `study`,
            or a file with a "strategy" of `--json`.
        question: What is served, where the source does not say; a printed strategy does not, and one whose ops have
            declared choices names code that only a user has run.
        alternative: 0 for the best of a recommendation, then its alternatives in order; of `pools` a point.
        served_model: In place of the model's own repository.

    Raises:
        InputError, StrategyError, CatalogError: There is no such strategy, or its workload cannot be had.
    """
    file = _answer_of(source)
    if file is None:
        found = _of_results(source, question, served_model)
    else:
        found = _of_file(file, question, alternative, served_model)
    for each in found.values():
        check_strategy(each.workload, each.strategy)
    return found


def stated_question(source: Path) -> Question | None:
    """The question that a folder's answer or a file states; None where it states none, or runs of a search do."""
    file = _answer_of(source)
    record = read_record(file, Exportable, sealed=False) if file else {}
    return question_of(source, record) if record.get("question") is not None else None


def _answer_of(source: Path) -> Path | None:
    """The file with the answer of a folder, or the source that is a file; None of a folder with runs of a search."""
    files = (source / name for name in (RECOMMENDATION_FILE, POOLS_FILE, TUNED_FILE))
    return next((file for file in files if os.path.lexists(file)), None if os.path.isdir(source) else source)


def _of_file(
    path: Path, question: Question | None, alternative: int, served_model: str | None
) -> dict[str, Deployment]:
    try:
        record = read_record(path, Exportable, sealed=False)
    except OSError as error:
        raise InputError(f"cannot read a strategy from {path}: {error.strerror or error}") from error
    origin = Origin.RECORD if question is None else Origin.USER
    return stated_deployments(path, record, question, alternative, served_model, origin)


def stated_deployments(
    where: Path | str,
    record: JsonObject,
    question: Question | None,
    alternative: int,
    served_model: str | None,
    origin: Origin,
) -> dict[str, Deployment]:
    """What an answer in JSON says to run, of the place where it stands; see `read_deployments`.

    Code that its workload names is run if the origin is a user.
    """
    if record.get("points") is not None:
        return pool_deployments(where, record, alternative, served_model)
    longest = record.get("longest_request")
    if longest is not None:
        record = {**record, "longest_request": None}
        of_usual = stated_deployments(where, record, question, alternative, served_model, origin)
        return {name: replace(each, longest_request=longest) for name, each in of_usual.items()}
    if record.get("question") is not None:
        _check_named(where, question)
        question = question or question_of(where, record)
        if "best" in record and not isinstance(record["best"], int | float):
            record = _alternative(where, record, alternative)
    if question is None:
        raise InputError(f"{where} names no workload: name one with --workload, or describe it with --model")
    apart = record.get("prefill") and record.get("decode")
    if not record.get("strategy") and not apart:
        raise InputError(f"{where} has no strategy: nothing was feasible")
    workload = load_question(question, origin)
    served_model = weights_of(workload, question.model, served_model)
    if apart:
        return pair_deployments(workload, StoredPair.model_validate(record), served_model)
    if phase_of(workload).mixes and "chunk_tokens" in record:
        workload = replace(workload, chunk_tokens=record["chunk_tokens"])
    found = served_deployments(workload, as_strategy(record["strategy"]), served_model, record.get("replicas"))
    named = "outside_space" in record  # in what `evaluate` prints: somebody named its strategy
    return {pool: replace(each, named=named) for pool, each in found.items()}


def _check_named(where: Path | str, question: Question | None) -> None:
    """Makes sure that a question beside an answer that has its own is a whole one. Raises: InputError."""
    if question is not None and question.model is None and question.workload is None:
        stated = ", ".join(option_of(name) for name in QUESTION_FIELDS if getattr(question, name) is not None)
        raise InputError(f"{where} states the question: leave out {stated}, or state all of it with --model")


def served_deployments(
    workload: Workload, strategy: Strategy, served_model: str | Variable, replicas: int | None = None
) -> dict[str, Deployment]:
    """A strategy as its replicas were replayed: one pool by the name "", or two.

    Args:
        workload: What is served.
        strategy: With how its replicas serve together.
        served_model: Weights.
        replicas: In place of the strategy's own.
    """
    served, alone = strategy.served, replace(strategy, served=ONE_REPLICA)
    if served.prefill is None:
        workload = in_chunks(workload, served.chunk_tokens)
        return {"": Deployment(workload, alone, served_model, replicas or served.replicas)}
    longest = Deployment(workload, alone, served_model).longest  # of whole requests, in either pool
    pools = {PREFILL.name: (served.prefill, served.prefills), DECODE.name: (alone, served.replicas)}
    return {
        phase: Deployment(of_pool(workload, phase), each, served_model, copies, longest_request=longest)
        for phase, (each, copies) in pools.items()
    }


def _alternative(path: Path | str, record: JsonObject, number: int) -> JsonObject:
    if record.get("best") is None:
        raise InputError(f"{path} has no strategy: nothing was feasible")
    choices = [record["best"], *record.get("alternatives", [])]
    if not 0 <= number < len(choices):
        raise InputError(f"{path} has no alternative {number}: it has the best (0) and {len(choices) - 1} more")
    return choices[number]


def _of_results(folder: Path, question: Question | None, served_model: str | None) -> dict[str, Deployment]:
    """The best strategy of the best run; of a study with several workloads there is none."""
    from raysearch.reports.study_report import NotExplained, best_runs, explain_best

    _check_named(folder, question)
    runs = best_runs(read_study_runs(folder))
    if len(runs) != 1:
        workloads = ", ".join(run["workload"] for run in runs) or "none"
        raise InputError(f"{folder} has the best of {len(runs)} workloads ({workloads}): name a run's own folder")
    try:
        workload, evaluation = explain_best(folder, runs[0], load_question(question) if question else None)
    except NotExplained as error:
        raise InputError(f"the best strategy of {folder} cannot be exported: {error}") from error
    model = RunSpec.of_record(read_spec(folder, runs[0]["run_id"])).question.get("model")
    return served_deployments(workload, evaluation.strategy, weights_of(workload, model, served_model))
