"""`raysearch report`: what a folder of results says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raysearch.commands.options import JsonOption, print_json


def report_results(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study or of a search.")],
    as_json: JsonOption = False,
) -> None:
    """Report a study or a search: scores, the best strategy of each workload explained, anytime curves.

    Works on unfinished and running studies too. Writes curve.png into the folder.

    \b
    Examples:
      raysearch report results/smoke
      raysearch report results/smoke --json
    """
    from raysearch.report import best_figures, score
    from raysearch.results import planned_runs, read_runs

    if not as_json:
        print_report(directory)
        return
    runs = read_runs(directory)
    complete = len(runs) == planned_runs(directory) and all(run["complete"] for run in runs)
    print_json(
        {
            "folder": str(directory),
            "complete": complete,
            "runs": runs,
            "scores": score(runs),
            "best": best_figures(directory, runs),
            "curve": _draw_curve(directory),
        }
    )


def print_report(directory: Path) -> None:
    """Prints scores, the best strategies and where everything lies."""
    from raysearch.report import RATIO_BASE, best_runs, explain, score
    from raysearch.results import planned_runs, read_runs
    from raysearch.tables import explanation, printer, scores_table

    console = printer()
    # All is read before anything is printed: what is damaged is one message and nothing else.
    runs, planned, curve = read_runs(directory), planned_runs(directory), _draw_curve(directory)
    best = best_runs(runs)
    for workload in dict.fromkeys(run["workload"] for run in runs):
        if workload not in {run["workload"] for run in best}:
            console.print(f"No feasible strategy of {workload} was found.\n")
    for run in best:
        explained = explain(directory, run)
        console.print(f"Best of {run['workload']}: found by {run['searcher']}, seed {run['seed']}", style="bold")
        if explained is None:
            console.print(f"{run['strategy']} (its workload is gone or has changed, so it cannot be explained)")
        else:
            console.print(*explanation(*explained), sep="\n")
        console.print()
    console.print(scores_table(score(runs)))
    console.print(f"f* is the exact optimum, RW is {RATIO_BASE}; in brackets f*/RW, which no ratio can exceed.")
    finished = sum(run["complete"] for run in runs)
    console.print(f"{finished} of {planned} runs finished. Results: {directory}")
    if curve:
        console.print(f"Anytime curves: {curve}")


def _draw_curve(directory: Path) -> str | None:
    """The path of the picture; None, with a note, where nothing may be written."""
    from raysearch.report import write_curve

    try:
        return str(write_curve(directory))
    except OSError as error:
        print(f"note: no anytime curves: {error}", file=sys.stderr)
        return None
