"""Where an exported strategy comes from: a recommendation, the results of a search or a study, or printed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raysearch.described import imported_from, workload_of_options
from raysearch.errors import InputError
from raysearch.export.deployment import Deployment
from raysearch.export.models import repository
from raysearch.export.pools import POOLS_FILE, pool_deployments
from raysearch.files import as_strategy, unsealed
from raysearch.records import RunSpec
from raysearch.results import read_runs, read_spec
from sim.validate import check_strategy
from sim.workload import Workload

RECOMMENDATION_FILE = "recommendation.json"
TUNED_FILE = "tuned.json"
"""What `tune-live` found: the options of its workload, and the best."""


def read_deployments(
    source: Path, workload: Workload | None, alternative: int, served_model: str | None
) -> dict[str, Deployment]:
    """What a folder or a file holds, by the name of its pool; "" of a single one.

    Args:
        source: A folder of `recommend`, `pools`, `tune-live`, `search` or `study`,
            or a file with a "strategy" of `--json`.
        workload: What is served, where the source does not say; a printed strategy does not.
        alternative: 0 for the best of a recommendation, then its alternatives in order; of `pools` a point.
        served_model: In place of the model's own repository.

    Raises:
        InputError: There is no such strategy.
    """
    files = [source / name for name in (RECOMMENDATION_FILE, POOLS_FILE, TUNED_FILE) if (source / name).is_file()]
    if source.is_dir() and not files:
        return {"": _of_results(source, served_model)}
    path = files[0] if files else source
    try:
        read = json.loads(path.read_bytes())
        if not isinstance(read, dict):
            raise ValueError(f"expected a JSON object, got {type(read).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read a strategy from {path}: {error}") from error
    told = unsealed(path, read)
    if "points" in told:
        return pool_deployments(path, told, alternative, served_model)
    if "options" in told:
        options = dict(told["options"])
        workload = workload or workload_of_options(options, options.pop("batch_grid", None))
        told = _alternative(path, told, alternative)
    if workload is None:
        raise InputError(f"{path} says no workload: name it with --workload, or describe it with --model")
    if not told.get("strategy"):
        raise InputError(f"{path} has no strategy: nothing was feasible")
    try:
        strategy = as_strategy(told["strategy"])
    except (TypeError, KeyError) as error:
        raise InputError(f"{path} has no strategy as `raysearch` prints it: {error}") from error
    check_strategy(workload, strategy)
    served_model = served_model or repository(workload, imported_from())
    return {"": Deployment(workload, strategy, served_model, int(told.get("replicas", 1)))}


def _alternative(path: Path, told: dict[str, Any], number: int) -> dict[str, Any]:
    if told.get("best") is None:
        raise InputError(f"{path} has no strategy: nothing was feasible")
    choices = [told.get("best"), *told.get("alternatives", [])]
    if number >= len(choices):
        raise InputError(f"{path} has no alternative {number}: it has the best (0) and {len(choices) - 1} more")
    return choices[number]


def _of_results(folder: Path, served_model: str | None) -> Deployment:
    """The best strategy of the best run; of a study with several workloads none can be said to be."""
    from raysearch.report import best_runs, explain

    runs = best_runs(read_runs(folder))
    if len(runs) != 1:
        workloads = ", ".join(run["workload"] for run in runs) or "none"
        raise InputError(f"{folder} has the best of {len(runs)} workloads ({workloads}): name a run's own folder")
    explained = explain(folder, runs[0])
    if explained is None:
        raise InputError(f"the best strategy of {folder} cannot be explained: its workload has changed or is not ours")
    workload, evaluation = explained
    model = RunSpec(**read_spec(folder, runs[0]["run_id"])).described.get("model")
    return Deployment(workload, evaluation.strategy, served_model or repository(workload, model))
