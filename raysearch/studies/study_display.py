"""What a running study reports of its runs, and the live display of it on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.text import Text

from raysearch.base.progress import RunMetrics, bars, best_text, console, now_and_then, text_column
from raysearch.runs.records import RunSpec
from raysearch.studies.forecast import RunProgress, duration_text, remaining_s


class StudyDisplay(Protocol):
    """What a running study reports of its runs, by run id."""

    def started(self, run_id: str) -> None:
        """A run begins, or continues after a failure."""

    def reported(self, run_id: str, metrics: RunMetrics) -> None:
        """A run has made further calls."""

    def finished(self, run_id: str) -> None:
        """A run is done."""

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""


class Displays(StudyDisplay):
    """Passes the same to several displays."""

    def __init__(self, *displays: StudyDisplay) -> None:
        self._displays = displays

    def started(self, run_id: str) -> None:
        """A run begins, or continues after a failure."""
        for display in self._displays:
            display.started(run_id)

    def reported(self, run_id: str, metrics: RunMetrics) -> None:
        """A run has made further calls."""
        for display in self._displays:
            display.reported(run_id, metrics)

    def finished(self, run_id: str) -> None:
        """A run is done."""
        for display in self._displays:
            display.finished(run_id)

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""
        for display in self._displays:
            display.failed(run_id)


class StudyBars(StudyDisplay):
    """A bar for the whole study, the best so far of each workload, and a bar for each run under way."""

    def __init__(self, name: str, specs: Mapping[str, RunSpec], finished: Mapping[str, RunMetrics]) -> None:
        """Prepares the display.

        Args:
            name: Of the study.
            specs: All runs, by run id.
            finished: Summaries of those that were done before.
        """
        self._specs = specs
        self._metrics: dict[str, RunMetrics] = {}
        self._ended: set[str] = set()
        self._tasks: dict[str, TaskID] = {}
        self._best: dict[str, tuple[float, str, str]] = {}
        self._overall = bars(text_column("{task.fields[runs]}"), text_column("{task.fields[left]}"), remaining=False)
        self._runs = bars(text_column("{task.fields[best]}"))
        total = sum(spec.budget for spec in specs.values())
        self._whole = self._overall.add_task(f"study {name}", total=total, runs="", left="")
        self._live = Live(console=console, get_renderable=self._render, transient=True, refresh_per_second=4)
        self._say = now_and_then()
        for run_id, summary in finished.items():
            self._note(run_id, summary)
            self._ended.add(run_id)

    def __enter__(self) -> StudyBars:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if console.is_terminal:
            self._live.stop()

    def started(self, run_id: str) -> None:
        """A run begins, or continues after a failure."""
        if run_id not in self._tasks and run_id not in self._ended:
            self._tasks[run_id] = self._runs.add_task(run_id, total=self._specs[run_id].budget, best="")

    def reported(self, run_id: str, metrics: RunMetrics) -> None:
        """A run has made further calls."""
        self._note(run_id, metrics)
        self.started(run_id)
        if run_id in self._tasks:
            self._runs.update(self._tasks[run_id], completed=metrics["calls"], best=best_text(metrics))
        self._say(self._line)

    def finished(self, run_id: str) -> None:
        """A run is done."""
        self._end(run_id, "done")

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""
        self._end(run_id, "FAILED")

    def _note(self, run_id: str, metrics: RunMetrics) -> None:
        self._metrics[run_id] = metrics
        workload = self._specs[run_id].workload
        if metrics["best"] > self._best.get(workload, (0.0, "", ""))[0]:
            self._best[workload] = (metrics["best"], run_id, best_text(metrics))

    def _end(self, run_id: str, how: str) -> None:
        self._ended.add(run_id)
        task = self._tasks.pop(run_id, None)
        if task is not None:
            self._runs.remove_task(task)
        if not console.is_terminal:
            calls = self._calls(run_id)
            console.print(f"{len(self._ended)}/{len(self._specs)} {run_id}: {how} after {calls} calls", soft_wrap=True)

    def _calls(self, run_id: str) -> int:
        return self._metrics[run_id]["calls"] if run_id in self._metrics else 0

    def _made(self, run_id: str) -> int:
        """Calls made, and of an ended run all of its budget: it may end before that is spent."""
        return self._specs[run_id].budget if run_id in self._ended else self._calls(run_id)

    def _line(self) -> str:
        done, total = sum(map(self._made, self._specs)), sum(spec.budget for spec in self._specs.values())
        left = self._left()
        return f"{done:,} of {total:,} calls" + (f", {left}" if left else "")

    def _left(self) -> str:
        seconds = remaining_s(map(self._work, self._specs), parallel=len(self._tasks))
        return "" if seconds is None else f"about {duration_text(seconds)} left"

    def _work(self, run_id: str) -> RunProgress:
        spec, metrics = self._specs[run_id], self._metrics.get(run_id)
        left = spec.budget - self._made(run_id)
        return RunProgress(spec.searcher, self._calls(run_id), left, metrics["wall_s"] if metrics else None)

    def _render(self) -> Group:
        runs = f"{len(self._ended)}/{len(self._specs)} runs"
        self._overall.update(self._whole, completed=sum(map(self._made, self._specs)), runs=runs, left=self._left())
        # rich calls from a thread of its own, hence the copy. The bars of the runs come last: many of them are cut
        # off at the lower edge of the terminal.
        best = list(self._best.values())
        return Group(self._overall, *(Text(f"{run_id}: {text}", style="dim") for _, run_id, text in best), self._runs)
