"""`raysearch report`: what a folder of results says."""

from __future__ import annotations

import sys
from dataclasses import replace

from raysearch.answers.reported import ReportResult
from raysearch.base.errors import RunFailed
from raysearch.cli.commands.options import JsonOption, ResultsArgument, show_result


def report_results(path: ResultsArgument, as_json: JsonOption = False) -> None:
    """Report a study or a search: scores, statistics over seeds, the best strategy of each workload explained.

    Works on unfinished and running studies too. Writes curve.png and, for several searchers, comparison.png into the
    folder. docs/concepts/statistics.md defines the figures.

    \b
    Examples:
      raysearch report results/smoke
      raysearch report results/smoke --json
    """
    show_report(ReportResult.of(path), as_json=as_json)


def show_report(found: ReportResult, *, as_json: bool = False) -> None:
    """Draws and prints; fails if runs were left out, so that nobody takes the rest for the whole."""
    show_result(replace(found, pictures=_draw(found)), as_json=as_json)
    if found.damaged:
        raise RunFailed(
            f"{len(found.damaged)} of {found.report.planned} runs cannot be trusted and are left out: "
            f"{'; '.join(found.damaged.values())}; the study's --resume runs them again"
        )


def _draw(found: ReportResult) -> dict[str, str]:
    """Paths of the pictures by name; none, with a note, where nothing may be written."""
    from raysearch.reports.figures import write_figures

    if found.report.statistics is None:
        return {}
    try:
        return {name: str(path) for name, path in write_figures(found.folder, found.report.statistics).items()}
    except OSError as error:
        print(f"note: no pictures: {error}", file=sys.stderr)
        return {}
