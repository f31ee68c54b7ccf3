"""The report's pictures, drawn from its statistics. Matplotlib is imported when the first is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysearch.base.file_io import png_of, write_bytes
from raysearch.reports.comparison import ByCalls, ByTime, StudyStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_FILE = "curve.png"
COMPARISON_FILE = "comparison.png"

_PANEL = (5.2, 4.2)
"""Inches, width and height."""
_MOST_COLUMNS = 4

Draw = Callable[[Any], None]
Lines = Mapping[str, ByCalls] | Mapping[str, ByTime]


def write_figures(directory: Path, statistics: StudyStatistics) -> dict[str, Path]:
    """Draws curve.png and, of several searchers, comparison.png; bands and bars are 95 % bootstrap intervals.

    curve.png: scores against calls and against wall time over all workloads, and against calls on each of several.
    comparison.png: scores at the budget, performance profiles, probabilities of improvement.

    Returns:
        Paths of what was written, by name without suffix.

    Raises:
        OSError: A picture cannot be written.
    """
    pictures = {CURVE_FILE: curves_by_calls(statistics)}
    if len(statistics["searchers"]) > 1:
        pictures[COMPARISON_FILE] = _panels(_comparison(statistics))
    for name, figure in pictures.items():
        write_bytes(directory / name, png_of(figure, dpi=110))
    return {Path(name).stem: directory / name for name in pictures}


def curves_by_calls(statistics: StudyStatistics) -> Figure:
    """The anytime curves: see `write_figures`."""
    return _panels(_curves(statistics))


def _panels(draws: Sequence[Draw]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(len(draws), _MOST_COLUMNS)
    rows = math.ceil(len(draws) / columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for draw, panel in zip(draws, axes, strict=False):
        draw(panel)
    for empty in axes[len(draws) :]:
        empty.remove()
    return figure


def _curves(statistics: StudyStatistics) -> list[Draw]:
    searchers, score = statistics["searchers"], _score(statistics)
    workloads, colors = statistics["workloads"], _colors(statistics)

    def against(x: str, label: str, lines: Lines, title: str) -> Draw:
        def draw(panel: Any) -> None:
            for name, line in lines.items():
                panel.plot(line[x], line["value"], label=name, color=colors[name])
                if line["low"] is not None:
                    panel.fill_between(line[x], line["low"], line["high"], color=colors[name], alpha=0.2, lw=0)
            panel.set(title=title, xlabel=label, ylabel=score, xscale="log")
            panel.legend(fontsize=8)

        return draw

    title = workloads[0] if len(workloads) == 1 else f"{len(workloads)} workloads"
    timed = {name: figures["curve_by_time"] for name, figures in searchers.items() if figures["curve_by_time"]}
    panels = [against("calls", "calls", {name: figures["curve"] for name, figures in searchers.items()}, title)]
    if timed:
        panels.append(against("wall_s", "seconds of a run", timed, title))
    for workload in workloads if len(workloads) > 1 else ():
        lines = {name: figures["curve_by_workload"][workload] for name, figures in searchers.items()}
        panels.append(against("calls", "calls", lines, workload))
    return panels


def _comparison(statistics: StudyStatistics) -> list[Draw]:
    searchers, budget, colors = statistics["searchers"], statistics["budget"], _colors(statistics)
    score = _score(statistics)
    names = list(searchers)

    def bars(panel: Any) -> None:
        for place, (name, figures) in enumerate(searchers.items()):
            value, low, high = (figures["scores"][key] and figures["scores"][key][-1] for key in _ENDS)
            spread = None if low is None else [[max(value - low, 0.0)], [max(high - value, 0.0)]]
            panel.errorbar(value, place, xerr=spread, fmt="o", capsize=4, color=colors[name])
        panel.set(title=f"after {budget:,} calls", xlabel=score, yticks=range(len(names)), yticklabels=names)
        panel.invert_yaxis()

    def profile(panel: Any) -> None:
        for name, figures in searchers.items():
            shares = figures["profile"]
            panel.plot(shares["threshold"], shares["value"], color=colors[name], label=name)
            if shares["low"] is not None:
                panel.fill_between(
                    shares["threshold"], shares["low"], shares["high"], color=colors[name], alpha=0.2, lw=0
                )
        panel.set(title=f"after {budget:,} calls", xlabel=f"{score} at least", ylabel="share of runs")
        panel.legend(fontsize=8)

    def matrix(panel: Any) -> None:
        won = np.full((len(names), len(names)), 0.5)
        for pair in statistics["pairs"]:
            row, column = names.index(pair["first"]), names.index(pair["second"])
            won[row, column], won[column, row] = pair["probability"]["value"], 1 - pair["probability"]["value"]
        panel.imshow(won, cmap="RdBu", vmin=0.0, vmax=1.0)
        for (row, column), share in np.ndenumerate(won):
            text = "" if row == column else f"{share:.2f}"
            panel.text(column, row, text, ha="center", va="center", fontsize=8, color=_ink(float(share)))
        panel.set(title="a run of the row beats one of the column", xticks=range(len(names)), yticks=range(len(names)))
        panel.set_xticklabels(names, rotation=45, ha="right")
        panel.set_yticklabels(names)

    return [bars, profile, matrix]


_ENDS = ("value", "low", "high")


def _ink(share: float) -> str:
    return "white" if abs(share - 0.5) > 0.3 else "black"


def _score(statistics: StudyStatistics) -> str:
    """What scores are, on an axis."""
    return "best / exact optimum" if statistics["exact"] else "best / best found"


def _colors(statistics: StudyStatistics) -> dict[str, tuple[float, ...]]:
    """A color for each searcher that does not depend on who wins."""
    import matplotlib as mpl

    names = sorted(statistics["searchers"])
    palette = mpl.colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(place % palette.N) for place, name in enumerate(names)}
