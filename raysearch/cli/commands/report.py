"""`raysearch report`: what a folder of results says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.base.errors import RunFailed
from raysearch.cli.commands.options import JsonOption, ResultsArgument, print_json
from sim.layers.heuristics import MEGATRON_NOTE

if TYPE_CHECKING:
    from raysearch.reports.study_report import StudyReport


def report_results(
    directory: ResultsArgument,
    as_json: JsonOption = False,
) -> None:
    """Report a study or a search: scores, statistics over seeds, the best strategy of each workload explained.

    Works on unfinished and running studies too. Writes curve.png and, for several searchers, comparison.png into the
    folder. Definitions of the figures: docs/concepts/statistics.md.

    \b
    Examples:
      raysearch report results/smoke
      raysearch report results/smoke --json
    """
    from raysearch.reports.study_report import best_figures, read_report
    from raysearch.studies.published_figures import beside_published, read_published

    if not as_json:
        print_report(directory)
        return
    report, published = read_report(directory), read_published(directory)
    print_json(
        {
            "folder": str(directory),
            "complete": report.complete,
            "runs": report.runs,
            "damaged": report.damaged,
            "scores": report.scores,
            "best": best_figures(directory, report.runs),
            "statistics": report.statistics,
            "published": beside_published(published, report.runs) if published else None,
            "curve": None,
            "comparison": None,
            **_draw(directory, report),
        }
    )
    _tell_damage(report)


def print_report(directory: Path) -> None:
    """Prints scores, statistics, the best strategies and where everything lies."""
    from raysearch.base.rich_tables import explanation, printer, scores_table
    from raysearch.reports.statistics_tables import statistics_tables
    from raysearch.reports.study_report import RATIO_BASE, NotExplained, best_runs, explain_best, read_report
    from raysearch.studies.published_figures import beside_published, published_table, read_published

    console = printer()
    # All is read before anything is printed: what is damaged is one message and nothing else.
    report, published = read_report(directory), read_published(directory)
    pictures = _draw(directory, report)
    best = best_runs(report.runs)
    for workload in dict.fromkeys(run["workload"] for run in report.runs):
        if workload not in {run["workload"] for run in best}:
            console.print(f"No feasible strategy of {workload} was found.\n")
    for run in best:
        console.print(f"Best of {run['workload']}: found by {run['searcher']}, seed {run['seed']}", style="bold")
        try:
            console.print(*explanation(*explain_best(directory, run)), sep="\n")
        except NotExplained as why:
            console.print(f"{run['best']:.2f} tokens/s/GPU with {run['strategy']}")
            console.print(f"Not explained: {why}.")
        console.print()
    if report.statistics:
        console.print(*statistics_tables(report.statistics), "", sep="\n")
    console.print(scores_table(report.scores))
    console.print(f"f* is the exact optimum, RW is {RATIO_BASE}; in brackets f*/RW, which no ratio can exceed.")
    if any(run["searcher"] == "megatron" for run in report.runs):
        console.print(MEGATRON_NOTE)
    if any((row["fraction_of_optimum"] or 0.0) > 1 + 1e-9 for row in report.scores):
        console.print("Where f/f* exceeds 1, a heuristic's sharding lies outside the space that the others search.")
    if published:
        console.print("", published_table(published, beside_published(published, report.runs)), sep="\n")
    for run in report.runs:
        for told in run.get("answers_differ") or ():
            console.print(f"The simulator of {run['run_id']} is not pure. {told}")
    finished = sum(run["complete"] for run in report.runs)
    console.print(f"{finished} of {report.planned} runs finished. Results: {directory}")
    for what, name in (("Anytime curves", "curve"), ("Comparison", "comparison")):
        if name in pictures:
            console.print(f"{what}: {pictures[name]}")
    _tell_damage(report)


def _tell_damage(report: StudyReport) -> None:
    """Fails if runs were left out, so that nobody takes the rest for the whole."""
    if report.damaged:
        raise RunFailed(
            f"{len(report.damaged)} of {report.planned} runs cannot be trusted and are left out: "
            f"{'; '.join(report.damaged.values())}; the study's --resume makes them again"
        )


def _draw(directory: Path, report: StudyReport) -> dict[str, str]:
    """Paths of the pictures by name; none, with a note, where nothing may be written."""
    from raysearch.reports.figures import write_figures

    if report.statistics is None:
        return {}
    try:
        return {name: str(path) for name, path in write_figures(directory, report.statistics).items()}
    except OSError as error:
        print(f"note: no pictures: {error}", file=sys.stderr)
        return {}
