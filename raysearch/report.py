"""What a study found: scores per workload and searcher, the best strategy of each workload, and anytime curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.files import write_atomically
from raysearch.files import as_strategy
from raysearch.records import RunSpec
from raysearch.results import read_runs, read_spec, run_folders, run_rows
from sim.catalog import load_workload
from sim.config_files import CatalogError
from sim.simulate import evaluate
from sim.types import Evaluation, Workload

if TYPE_CHECKING:
    import pandas as pd

Run = dict[str, Any]

RATIO_BASE = "random_walk"
"""The searcher that ratios are taken to: the neighbour walk, which changes one choice at a time."""
CURVE_FILE = "curve.png"


def score(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per workload and searcher, the best searcher of each workload first.

    Means are over the runs (seeds); `*_sd` is the sample deviation, None of a single run. `ratio` is mean best over
    mean best of `RATIO_BASE`; no searcher's can exceed `ratio_bound` = f* over the same mean. Both are None without
    that searcher or if it found nothing.

    Args:
        runs: As `raysearch.results.read_runs` gives them.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["searcher"]), []).append(run)
    rows = [_score_group(group, groups.get((workload, RATIO_BASE))) for (workload, _), group in groups.items()]
    order = list(dict.fromkeys(run["workload"] for run in runs))
    return sorted(rows, key=lambda row: (order.index(row["workload"]), -row["best"]))


def _score_group(runs: Sequence[Run], walks: Sequence[Run] | None) -> dict[str, Any]:
    best = statistics.mean(run["best"] for run in runs)
    optimum = runs[0]["optimum"]
    walk = statistics.mean(run["best"] for run in walks) if walks else 0.0
    calls = sum(run["calls"] for run in runs)
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
        "wall_s": statistics.mean(run["wall_s"] for run in runs) if all(run["complete"] for run in runs) else None,
    }


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def best_runs(runs: Sequence[Run]) -> list[Run]:
    """The best run of each workload that found anything feasible; of equal ones the first."""
    best: dict[str, Run] = {}
    for run in runs:
        if run["strategy"] and (run["workload"] not in best or run["best"] > best[run["workload"]]["best"]):
            best[run["workload"]] = run
    return list(best.values())


def explain(directory: Path, run: Run) -> tuple[Workload, Evaluation] | None:
    """The best strategy of a run, evaluated again; None if its workload can no longer be loaded or has changed."""
    spec = RunSpec(**read_spec(directory, run["run_id"]))
    try:
        workload = load_workload(spec.workload, spec.hardware)
    except CatalogError:
        return None
    if workload.config_hash != run["config_hash"]:
        return None
    return workload, evaluate(workload, as_strategy(run["strategy"]))


def best_figures(directory: Path, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of the best run of each workload: its figure, the error to expect of it, and what rests on extrapolation."""
    figures: list[dict[str, Any]] = []
    for run in best_runs(runs):
        explained = explain(directory, run)
        evaluation = explained[1] if explained else None
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


def write_curve(directory: Path) -> Path:
    """Draws best so far against calls, one panel per workload, and returns the PNG's path.

    Lines are means over the runs of a searcher, bands go from the worst to the best of them; a searcher that ends
    before its budget keeps its last value.

    Raises:
        InputError: The folder holds no results, or damaged ones.
        OSError: The picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = read_runs(directory)
    rows = {run["run_id"]: run_rows(folder) for run, folder in zip(runs, run_folders(directory), strict=True)}
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    figure = Figure(figsize=(6.4 * len(workloads), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        _draw(panel, [run for run in runs if run["workload"] == workload], rows)
    path = directory / CURVE_FILE
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    return path


def _draw(panel: Any, runs: Sequence[Run], rows: dict[str, pd.DataFrame]) -> None:
    import numpy as np

    optimum = runs[0]["optimum"]
    length = max(len(rows[run["run_id"]]) for run in runs)
    calls = np.arange(1, length + 1)
    for searcher in dict.fromkeys(run["searcher"] for run in runs):
        curves = [rows[run["run_id"]]["best_so_far"].to_numpy() for run in runs if run["searcher"] == searcher]
        held = [np.pad(curve, (0, length - len(curve)), mode="edge") for curve in curves if len(curve)]
        if held:
            values = np.stack(held) / (optimum or 1.0)  # [runs, calls]
            (line,) = panel.plot(calls, values.mean(axis=0), label=searcher, drawstyle="steps-post")
            panel.fill_between(calls, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15, lw=0)
    panel.set(
        title=runs[0]["workload"],
        xlabel="calls",
        ylabel="best so far / exact optimum" if optimum else "best so far [tokens/s/GPU]",
        xscale="log",
    )
    if panel.lines:
        panel.legend()
