"""What a study found: scores per workload and searcher, the best strategy of each workload, statistics, pictures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, as_strategy
from raysearch.base.rich_tables import ScoreRow
from raysearch.reports.comparison import StudyStatistics, compare
from raysearch.reports.learning_curves import best_so_far, read_curves
from raysearch.runs.records import RunRow, RunSpec
from raysearch.studies.results import planned_runs, read_spec, survey
from sim.arrays import Floats
from sim.config.code import Origin
from sim.config.files import CatalogError
from sim.evaluation import Evaluation
from sim.replay.goodput import evaluate_in_phase
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import Workload

RATIO_BASE = "random_walk"
"""The searcher that ratios are taken to: the neighbour walk, which changes one choice at a time."""


class BestFigures(TypedDict):
    """The best run of a workload: see `best_figures`."""

    workload: str
    run_id: str
    tokens_per_s_per_gpu: float
    expected_error: float | None
    extrapolated: list[str] | None


@dataclass(frozen=True)
class StudyReport:
    """All that a results folder says.

    Attributes:
        runs: As `raysearch.studies.results.read_study_runs` gives them.
        planned: How many there are to be.
        scores: As `score` gives them.
        statistics: As `raysearch.reports.comparison.compare` gives them; None while no workload and seed has been
            finished by every searcher.
        damaged: What is wrong with runs that are left out, by run id.
    """

    runs: list[RunRow]
    planned: int
    scores: list[ScoreRow]
    statistics: StudyStatistics | None
    damaged: dict[str, str]

    @property
    def complete(self) -> bool:
        """Whether every run is there and finished."""
        return len(self.runs) == self.planned and all(run["complete"] for run in self.runs)


def read_report(directory: Path) -> StudyReport:
    """Reads and judges a results folder: finished, broken off or still running.

    Raises:
        InputError: The folder holds no results, or none that can be trusted.
    """
    found = survey(directory)
    damaged = dict(found.damaged)
    best: dict[str, Floats] = {}
    for run in found.runs:
        try:
            best[run["run_id"]] = best_so_far(directory, run)
        except Damaged as damage:
            damaged[run["run_id"]] = damage.what
    runs = [run for run in found.runs if run["run_id"] in best]
    if not runs:
        raise Damaged(next(iter(damaged.values())))
    curves = read_curves(directory, runs, best)
    statistics = compare(curves) if curves.blocks else None
    return StudyReport(runs, planned_runs(directory), score(runs), statistics, damaged)


def score(runs: Sequence[RunRow]) -> list[ScoreRow]:
    """One row per workload and searcher, the best searcher of each workload first.

    Means are over the runs (seeds); `*_sd` is the sample deviation, None of a single run. `ratio` is mean best over
    mean best of `RATIO_BASE`; no searcher's can exceed `ratio_bound` = f* over the same mean. Both are None without
    that searcher or if it found nothing.

    Args:
        runs: As `raysearch.studies.results.read_study_runs` gives them.
    """
    groups: dict[tuple[str, str], list[RunRow]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["searcher"]), []).append(run)
    rows = [_score_group(group, groups.get((workload, RATIO_BASE))) for (workload, _), group in groups.items()]
    order = list(dict.fromkeys(run["workload"] for run in runs))
    return sorted(rows, key=lambda row: (order.index(row["workload"]), -row["best"]))


def _score_group(runs: Sequence[RunRow], walks: Sequence[RunRow] | None) -> ScoreRow:
    best = statistics.mean(run["best"] for run in runs)
    optimum = runs[0]["optimum"]
    walk = statistics.mean(run["best"] for run in walks) if walks else 0.0
    calls = sum(run["calls"] for run in runs)
    taken_s = [run["wall_s"] for run in runs if run["complete"] and run["wall_s"] is not None]
    return {
        "workload": runs[0]["workload"],
        "searcher": runs[0]["searcher"],
        "runs": len(runs),
        "complete": all(run["complete"] for run in runs),
        "best": best,
        "best_sd": _deviation([run["best"] for run in runs]),
        "fraction_of_optimum": best / optimum if optimum else None,
        "fraction_of_optimum_sd": _deviation([run["best"] / optimum for run in runs]) if optimum else None,
        "ratio": best / walk if walk else None,
        "ratio_bound": optimum / walk if walk and optimum else None,
        "feasible_share": sum(run["feasible_calls"] for run in runs) / calls if calls else 0.0,
        "unique_share": sum(run["unique_calls"] for run in runs) / calls if calls else 0.0,
        "calls": statistics.mean(run["calls"] for run in runs),
        "wall_s": statistics.mean(taken_s) if len(taken_s) == len(runs) else None,
    }


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def best_runs(runs: Sequence[RunRow]) -> list[RunRow]:
    """The best run of each workload that found anything feasible; of equal ones the first."""
    best: dict[str, RunRow] = {}
    for run in runs:
        if run["strategy"] and (run["workload"] not in best or run["best"] > best[run["workload"]]["best"]):
            best[run["workload"]] = run
    return list(best.values())


class NotExplained(InputError):
    """The best strategy of a run cannot be evaluated again; the message says why."""


def explain_best(directory: Path, run: RunRow, workload: Workload | None = None) -> tuple[Workload, Evaluation]:
    """The best strategy of a run, evaluated again.

    Args:
        directory: The results folder.
        run: As `raysearch.studies.results.read_study_runs` gives it.
        workload: The run's, where a user has named it; by default what the record says, which imports no code.

    Raises:
        NotExplained: It is another simulator's, whose figures are not ours to explain, or its workload can no longer be
            loaded, needs code, or has changed.
    """
    spec = RunSpec.of_record(read_spec(directory, run["run_id"]))
    if spec.simulator is not None:
        raise NotExplained("another simulator's figure")
    try:
        workload = workload or spec.load(Origin.RECORD)
        if workload.config_hash != run["config_hash"]:
            raise NotExplained(f"its workload has changed, or is another one than {workload.name}")
        strategy = as_strategy(run["strategy"] or {})
        check_strategy(workload, strategy)
    except (CatalogError, StrategyError, InputError) as error:
        raise NotExplained(str(error)) from error
    return workload, evaluate_in_phase(workload, strategy)


def best_figures(directory: Path, runs: Sequence[RunRow]) -> list[BestFigures]:
    """Of the best run of each workload: its figure, the error to expect of it, and what rests on extrapolation."""
    figures: list[BestFigures] = []
    for run in best_runs(runs):
        evaluation = None
        with suppress(NotExplained):
            _, evaluation = explain_best(directory, run)
        figures.append(
            {
                "workload": run["workload"],
                "run_id": run["run_id"],
                "tokens_per_s_per_gpu": run["best"],
                "expected_error": evaluation.expected_error if evaluation else None,
                "extrapolated": list(evaluation.extrapolated) if evaluation else None,
            }
        )
    return figures
