"""A study's statistics as tables for people; see `raysearch.reports.comparison` for the figures."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text

from raysearch.base.rich_tables import plain_table
from raysearch.reports.comparison import ByCalls, ComparedPair, SearcherFigures, StudyStatistics

FEW_SEEDS = 5
"""[assumed] With fewer, bootstrap intervals are clearly too narrow: docs/concepts/statistics.md has figures."""


def statistics_tables(statistics: StudyStatistics) -> list[RenderableType]:
    """Scores at several budgets with their intervals, then how soon targets were reached and who beats whom."""
    return [*_scores(statistics), *_targets(statistics), *_notes(statistics)]


def _scores(statistics: StudyStatistics) -> list[RenderableType]:
    seeds, workloads = statistics["seeds"], len(statistics["workloads"])
    score = "f/f*" if statistics["exact"] else "best / best found"
    interval = ", 95 % interval" if min(seeds) > 1 else ""
    runs = f"{_count(workloads, 'workload')} x {_count(max(seeds), 'seed')}"
    calls = next(iter(statistics["searchers"].values()))["scores"]["calls"]
    return [
        Text(f"{score} after so many calls: interquartile mean{interval} ({runs})", style="bold"),
        plain_table(
            None,
            ("searcher", *(f"{made:,}" for made in calls)),
            [(name, *_with_intervals(figures["scores"])) for name, figures in statistics["searchers"].items()],
        ),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _with_intervals(scores: ByCalls) -> list[str]:
    ends = [scores[end] or [None] * len(scores["value"]) for end in ("low", "high")]
    # Beside each other they would not fit into most terminals.
    return [_figure(*figure, digits=3).replace(" ", "\n", 1) for figure in zip(scores["value"], *ends, strict=True)]


def _figure(value: float, low: float | None, high: float | None, *, digits: int) -> str:
    """0.957 .951-.960: a figure and its interval, in as few characters as a table of them takes."""
    text = f"{value:.{digits}f}"
    if low is None or high is None:
        return text
    return f"{text} {_short(low, digits)}{'-' if low >= 0 else ' to '}{_short(high, digits)}"


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def _targets(statistics: StudyStatistics) -> list[RenderableType]:
    searchers = statistics["searchers"]
    leader = next(iter(searchers))
    against = {pair["second"]: pair for pair in statistics["pairs"] if pair["first"] == leader}
    targets = [target["target"] for target in searchers[leader]["targets"]]
    unit = " f*" if statistics["exact"] else ""
    columns = [column for target in targets for column in (f"calls to {target:.2f}{unit}\n(runs there)", "s")]
    versus = (f"P({leader}\nis better)", f"behind\n{leader}") if against else ()
    title = "When half of the runs had reached a score"
    title += f"; each against the first at {statistics['budget']:,} calls" if against else ""
    rows = [(name, *_reached(figures), *_behind(against, name)) for name, figures in searchers.items()]
    return [Text(title, style="bold"), plain_table(None, ("searcher", *columns, *versus), rows)]


def _reached(figures: SearcherFigures) -> list[str]:
    cells: list[str] = []
    for target in figures["targets"]:
        calls, wall_s = target["calls"]["value"], target["wall_s"]
        when = "never" if calls is None else f"{calls:,.0f}"
        cells += [f"{when} ({target['reached']}/{target['runs']})", "-" if wall_s is None else f"{wall_s:,.1f}"]
    return cells


def _behind(against: Mapping[str, ComparedPair], name: str) -> tuple[str, ...]:
    if name not in against:
        return ("", "") if against else ()
    pair = against[name]
    return (_figure(**pair["probability"], digits=2), _figure(**pair["difference"], digits=3))


def _notes(statistics: StudyStatistics) -> list[str]:
    seeds, left_out = min(statistics["seeds"]), statistics["left_out"]
    notes: list[str] = []
    if seeds == 1:
        notes.append("No intervals: a single seed says nothing about other seeds.")
    elif seeds < FEW_SEEDS:
        notes.append(f"With {seeds} seeds the intervals are too narrow; {FEW_SEEDS} and more are better.")
    if left_out:
        notes.append(f"Left out of the statistics: {_count(left_out, 'run')} unfinished or without a partner.")
    return notes
