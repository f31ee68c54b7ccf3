"""Live progress on stderr: bars on a terminal, a line now and then elsewhere. Stdout stays free for results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NotRequired, TypedDict

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from raysearch.base.console import InertConsole

console = InertConsole(stderr=True)
"""Where progress and messages go."""

FIRST_LINE_S = 1.0
"""Seconds until work says how far it is when stderr is no terminal."""
LINE_EVERY_S = 15.0
"""Seconds between two such lines."""


def now_and_then() -> Callable[[Callable[[], str]], None]:
    """Prints what it is given makes, if stderr is no terminal and a line is due."""
    due_s = time.monotonic() + FIRST_LINE_S

    def say(text: Callable[[], str]) -> None:
        nonlocal due_s
        now = time.monotonic()
        if not console.is_terminal and now >= due_s:
            due_s = now + LINE_EVERY_S
            console.print(text(), soft_wrap=True)

    return say


def text_column(template: str) -> TextColumn:
    """A column of text that takes brackets as they are."""
    return TextColumn(template, markup=False)


def bars(*extra: TextColumn, remaining: bool = True) -> Progress:
    """Bars with the columns given, the time gone by and, unless it is shown elsewhere, that still to go."""
    return Progress(
        text_column("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if remaining else []),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def stepping(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that reports (done, total)."""
    say = now_and_then()
    with bars() as progress:
        task = progress.add_task(description, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            say(lambda: f"{description}: {done:,} of {total:,} steps")

        yield show


@contextmanager
def following(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for work in parts that each report (what, done, total)."""
    say = now_and_then()
    with bars(text_column("{task.fields[what]}"), remaining=False) as progress:
        task = progress.add_task(description, total=None, what="")

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, what=what)
            say(lambda: f"{description}: {what}, {done:,} of {total:,}")

        yield show


@contextmanager
def telling(description: str) -> Iterator[Callable[[str], None]]:
    """A spinner for work in a few named steps; a line now and then when stderr is no terminal."""
    if not console.is_terminal:
        say = now_and_then()
        yield lambda step: say(lambda: f"{description}: {step}")
        return
    with console.status(Text(description)) as status:
        yield lambda step: status.update(Text(f"{description}: {step}"))


class RunMetrics(TypedDict):
    """How far a run is; a searcher's own figures may stand beside these.

    Attributes:
        calls: That it has made.
        best: Tokens/s/GPU; 0 while nothing is feasible.
        wall_s: Seconds that it took; None where its rows alone are known.
        fraction_of_optimum: The best as a share of the optimum; None where that is not known.
        unique_calls, feasible_calls: Of different strategies, and of feasible ones.
        chunk, chunk_best, chunk_done: For searchers that run in chunks: which, its best, whether it is done.
    """

    calls: int
    best: float
    wall_s: float | None
    fraction_of_optimum: NotRequired[float | None]
    unique_calls: NotRequired[int]
    feasible_calls: NotRequired[int]
    chunk: NotRequired[float]
    chunk_best: NotRequired[float]
    chunk_done: NotRequired[float]


@contextmanager
def searching(run_id: str, budget: int) -> Iterator[Callable[[RunMetrics], None]]:
    """A bar for one run; give it the run's metrics."""
    say = now_and_then()
    with bars(text_column("{task.fields[best]}")) as progress:
        task = progress.add_task(run_id, total=budget, best="")

        def show(metrics: RunMetrics) -> None:
            progress.update(task, completed=metrics["calls"], best=best_text(metrics))
            say(lambda: f"{run_id}: {metrics['calls']:,} of {budget:,} calls, {best_text(metrics)}")

        yield show


def best_text(metrics: RunMetrics) -> str:
    """A run's best so far, for people."""
    fraction = metrics.get("fraction_of_optimum")
    share = f" = {fraction:.3f} f*" if fraction is not None else ""
    return f"best {metrics['best']:,.2f} tok/s/GPU{share}"
