"""What a folder of results says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.answers.result import Result
from raysearch.reports.study_report import (
    RATIO_BASE,
    NotExplained,
    StudyReport,
    best_figures,
    best_runs,
    explain_best,
    read_report,
)
from raysearch.studies.published_figures import (
    PublishedFigures,
    beside_published,
    published_table,
    read_published,
)
from sim.json_object import JsonObject
from sim.ops.heuristics import MEGATRON_NOTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_PICTURES = (("Anytime curves", "curve"), ("Comparison", "comparison"))


@dataclass(frozen=True, repr=False)
class ReportResult(Result):
    """A study or a search: scores, statistics over seeds, the best strategies.

    Attributes:
        folder: Where it lies.
        report: All that was read.
        published: Figures of others beside which it stands, if its file names any.
        pictures: Paths of those that were written, by name.
    """

    folder: Path
    report: StudyReport
    published: PublishedFigures | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | Path) -> ReportResult:
        """Reads and judges a folder; see `raysearch.api.report`."""
        return cls(Path(folder), read_report(Path(folder)), read_published(Path(folder)))

    @property
    def feasible(self) -> bool:
        """Whether any run has found a strategy within the limits."""
        return bool(best_runs(self.report.runs))

    @property
    def complete(self) -> bool:
        """Whether every run is there and finished."""
        return self.report.complete

    @property
    def damaged(self) -> dict[str, str]:
        """What is wrong with runs that are left out, by run id."""
        return self.report.damaged

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch report --json` prints it."""
        runs = self.report.runs
        return {
            "folder": str(self.folder),
            "complete": self.complete,
            "runs": runs,
            "damaged": self.damaged,
            "scores": self.report.scores,
            "best": best_figures(self.folder, runs),
            "statistics": self.report.statistics,
            "published": beside_published(self.published, runs) if self.published else None,
            "curve": None,
            "comparison": None,
            **self.pictures,
        }

    def to_rows(self) -> list[JsonObject]:
        """A row per workload and searcher: its scores over seeds."""
        return [{**row} for row in self.report.scores]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch report` prints."""
        from rich.text import Text

        from raysearch.base.rich_tables import explanation, scores_table
        from raysearch.reports.statistics_tables import statistics_tables

        report, best = self.report, best_runs(self.report.runs)
        for workload in dict.fromkeys(run["workload"] for run in report.runs):
            if workload not in {run["workload"] for run in best}:
                yield f"No feasible strategy of {workload} was found.\n"
        for run in best:
            found = Text(f"Best of {run['workload']}: found by {run['searcher']}, seed {run['seed']}", style="bold")
            try:
                heading, *rest = explanation(*explain_best(self.folder, run))
                yield from (heading, found, *rest)
            except NotExplained as why:
                yield found
                yield f"{run['best']:.2f} tokens/s/GPU with {run['strategy']}"
                yield f"Not explained: {why}."
            yield ""
        if report.statistics:
            yield from statistics_tables(report.statistics)
            yield ""
        yield scores_table(report.scores)
        yield f"f* is the exact optimum, RW is {RATIO_BASE}; in brackets f*/RW, which no ratio can exceed."
        if any(run["searcher"] == "megatron" for run in report.runs):
            yield MEGATRON_NOTE
        if any((row["fraction_of_optimum"] or 0.0) > 1 + 1e-9 for row in report.scores):
            yield "Where f/f* exceeds 1, a heuristic's sharding is outside the space that the others search."
        if self.published:
            yield ""
            yield published_table(self.published, beside_published(self.published, report.runs))
        for run in report.runs:
            if noise := run.get("noise"):
                yield f"Answers of {run['run_id']} scatter by {noise:.0%}: its best is by what all of them tell."
            for difference in run.get("answers_differ") or ():
                yield f"The simulator of {run['run_id']} is not pure. {difference}"
        finished = sum(run["complete"] for run in report.runs)
        yield f"{finished} of {report.planned} runs finished. Results: {self.folder}"
        yield from (f"{what}: {self.pictures[name]}" for what, name in _PICTURES if name in self.pictures)

    def figure(self) -> Figure:
        """The anytime curves. Raises: ValueError: No workload and seed has been finished by every searcher."""
        from raysearch.reports.figures import curves_by_calls

        if self.report.statistics is None:
            raise ValueError(f"{self.folder} has no workload and seed that every searcher has finished")
        return curves_by_calls(self.report.statistics)
