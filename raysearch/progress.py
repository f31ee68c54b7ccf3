"""Live progress on stderr: bars on a terminal, a line now and then elsewhere. Stdout stays free for results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from raysearch.records import RunSpec

console = Console(stderr=True, markup=False, emoji=False, highlight=False)
"""Where progress and messages go. Names and paths stand in them as they are: brackets and colons mean nothing."""

FIRST_LINE_S = 1.0
"""Seconds until work says how far it is when stderr is no terminal."""
LINE_EVERY_S = 15.0
"""Seconds between two such lines."""


def _now_and_then() -> Callable[[str], None]:
    """Prints what it is given if stderr is no terminal and a line is due."""
    due_s = time.monotonic() + FIRST_LINE_S

    def say(text: str) -> None:
        nonlocal due_s
        now = time.monotonic()
        if not console.is_terminal and now >= due_s:
            due_s = now + LINE_EVERY_S
            console.print(text, soft_wrap=True)

    return say


def _text(template: str) -> TextColumn:
    return TextColumn(template, markup=False)


def _bars(*extra: TextColumn) -> Progress:
    return Progress(
        _text("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def stepping(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that reports (done, total)."""
    say = _now_and_then()
    with _bars() as progress:
        task = progress.add_task(description, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            say(f"{description}: {done:,} of {total:,} steps")

        yield show


@contextmanager
def telling(description: str) -> Iterator[Callable[[str], None]]:
    """A spinner for work in a few named steps; a line now and then when stderr is no terminal."""
    if not console.is_terminal:
        say = _now_and_then()
        yield lambda step: say(f"{description}: {step}")
        return
    with console.status(description) as status:
        yield lambda step: status.update(f"{description}: {step}")


@contextmanager
def searching(run_id: str, budget: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar for one run; give it the run's metrics."""
    say = _now_and_then()
    with _bars(_text("{task.fields[best]}")) as progress:
        task = progress.add_task(run_id, total=budget, best="")

        def show(metrics: Mapping[str, Any]) -> None:
            progress.update(task, completed=metrics["calls"], best=_best(metrics))
            say(f"{run_id}: {metrics['calls']:,} of {budget:,} calls, {_best(metrics)}")

        yield show


def _best(metrics: Mapping[str, Any]) -> str:
    fraction = metrics.get("fraction_of_optimum")
    share = f" = {fraction:.3f} f*" if fraction is not None else ""
    return f"best {metrics['best']:,.2f} tok/s/GPU{share}"


class StudyDisplay(Protocol):
    """What a running study tells of its runs, by run id."""

    def started(self, run_id: str) -> None:
        """A run begins, or goes on after a failure."""

    def reported(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """A run has made further calls."""

    def finished(self, run_id: str) -> None:
        """A run is done."""

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""


class StudyBars(StudyDisplay):
    """A bar for the whole study, one for each run under way, and the best so far of each workload."""

    def __init__(self, name: str, specs: Mapping[str, RunSpec], finished: set[str]) -> None:
        """Prepares the display.

        Args:
            name: Of the study.
            specs: All runs, by run id.
            finished: Those that were done before.
        """
        self._specs = specs
        self._calls = {run_id: spec.budget if run_id in finished else 0 for run_id, spec in specs.items()}
        self._ended = set(finished)
        self._tasks: dict[str, TaskID] = {}
        self._best: dict[str, tuple[float, str, str]] = {}
        self._overall = _bars(_text("{task.fields[runs]}"))
        self._runs = _bars(_text("{task.fields[best]}"))
        self._whole = self._overall.add_task(f"study {name}", total=sum(s.budget for s in specs.values()), runs="")
        self._live = Live(console=console, get_renderable=self._render, transient=True, refresh_per_second=4)
        self._say = _now_and_then()
        self._refresh()

    def __enter__(self) -> StudyBars:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if console.is_terminal:
            self._live.stop()

    def started(self, run_id: str) -> None:
        """A run begins, or goes on after a failure."""
        if run_id not in self._tasks and run_id not in self._ended:
            self._tasks[run_id] = self._runs.add_task(run_id, total=self._specs[run_id].budget, best="")

    def reported(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """A run has made further calls."""
        self._calls[run_id] = metrics["calls"]
        self.started(run_id)
        if run_id in self._tasks:
            self._runs.update(self._tasks[run_id], completed=metrics["calls"], best=_best(metrics))
        workload = self._specs[run_id].workload
        if metrics["best"] > self._best.get(workload, (0.0, "", ""))[0]:
            self._best[workload] = (metrics["best"], run_id, _best(metrics))
        self._refresh()
        done, total = sum(self._calls.values()), sum(spec.budget for spec in self._specs.values())
        self._say(f"{done:,} of {total:,} calls")

    def finished(self, run_id: str) -> None:
        """A run is done."""
        self._end(run_id, "done")

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""
        self._end(run_id, "FAILED")

    def _end(self, run_id: str, how: str) -> None:
        calls = self._calls[run_id]
        self._calls[run_id] = self._specs[run_id].budget  # a run may end before its budget is spent
        self._ended.add(run_id)
        task = self._tasks.pop(run_id, None)
        if task is not None:
            self._runs.remove_task(task)
        self._refresh()
        if not console.is_terminal:
            console.print(f"{len(self._ended)}/{len(self._specs)} {run_id}: {how} after {calls} calls", soft_wrap=True)

    def _refresh(self) -> None:
        runs = f"{len(self._ended)}/{len(self._specs)} runs"
        self._overall.update(self._whole, completed=sum(self._calls.values()), runs=runs)

    def _render(self) -> Group:
        lines = [Text(f"{run_id}: {text}", style="dim") for _, run_id, text in self._best.values()]
        return Group(self._overall, self._runs, *lines)
