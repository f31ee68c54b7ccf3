"""A study's status for people; `raysearch status --json` gives the same to programs."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from raysearch.base.rich_tables import plain_table
from raysearch.studies.forecast import duration_text
from raysearch.studies.study_status import RunStatus, StudyStatus

_ORDER = ("running", "failed", "damaged", "interrupted", "waiting", "finished")
_STYLES = {
    "running": "cyan",
    "failed": "red",
    "damaged": "red",
    "interrupted": "yellow",
    "waiting": "dim",
    "finished": "green",
}


def status_text(directory: Path, status: StudyStatus, now_s: float) -> list[RenderableType]:
    """One line about the whole, the best so far of each workload, and a line per run, those under way first."""
    runs = sorted(status.runs, key=lambda run: _ORDER.index(run.state))  # stable: else in the study's order
    return [
        _whole(directory, status, now_s),
        *map(_best, status.best()),
        plain_table(
            None,
            ("run", "state", "calls", "of", "best\ntok/s/GPU", "f/f*", "last change"),
            [_row(run, now_s) for run in runs],
            left=2,
        ),
        *(Text(run.damage, style="red") for run in runs if run.damage),
    ]


def _whole(directory: Path, status: StudyStatus, now_s: float) -> Text:
    finished, planned = sum(run.state == "finished" for run in status.runs), len(status.runs)
    calls = f"{sum(run.calls for run in status.runs):,} of {sum(run.budget for run in status.runs):,} calls"
    parts = [f"{finished} of {planned} runs finished", calls]
    if status.remaining_s is not None:
        parts.append(f"about {duration_text(status.remaining_s)} left")
    if status.changed_s is not None:
        parts.append(f"last change {_ago(status.changed_s, now_s)}")
    return Text.assemble(f"{directory}: ", (status.state, _STYLES[status.state]), ", ", ", ".join(parts))


def _best(run: RunStatus) -> Text:
    share = "" if run.fraction_of_optimum is None else f" = {run.fraction_of_optimum:.3f} f*"
    return Text(f"best of {run.workload}: {run.best:,.2f} tok/s/GPU{share}, {run.run_id}")


def _row(run: RunStatus, now_s: float) -> tuple[str, ...]:
    return (
        run.run_id,
        run.state,
        f"{run.calls:,}",
        f"{run.budget:,}",
        f"{run.best:,.2f}" if run.best else "-",
        "-" if run.fraction_of_optimum is None else f"{run.fraction_of_optimum:.3f}",
        "-" if run.changed_s is None else _ago(run.changed_s, now_s),
    )


def _ago(then_s: float, now_s: float) -> str:
    return f"{duration_text(max(now_s - then_s, 0.0))} ago"
