"""Predicted against measured, one picture per family. Matplotlib is imported when the first is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raysearch.base.errors import InputError
from raysearch.fidelity.validation.error_figures import Comparison, figures

_INCHES, _DOTS_PER_INCH = 4.2, 100
_AXES = (0.19, 0.11, 0.79, 0.82)
"""Left, bottom, width, height in the picture: a layout that is solved for draws each picture three times."""
_MOST_POINTS = 4000
"""Dots of a picture; more only make it larger."""


def plot_comparison(comparison: Comparison, folder: Path) -> Path:
    """Draws a family's predictions over its measurements, both on log axes, and the bare roofline's behind them.

    Returns:
        The PNG file in `folder`, which is made if need be.

    Raises:
        InputError: The file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = np.flatnonzero(np.isfinite(comparison.predicted) & (comparison.predicted > 0) & (comparison.measured > 0))
    if len(known) > _MOST_POINTS:
        known = np.random.default_rng(0).choice(known, _MOST_POINTS, replace=False)
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(_INCHES, _INCHES))
        FigureCanvasAgg(figure)
        axes = figure.add_axes(_AXES, xscale="log", yscale="log")
        axes.plot(comparison.measured[known], comparison.roofline[known], ",", color="0.75", label="bare roofline")
        for name, rows in _by_group(comparison, known).items():
            axes.plot(comparison.measured[rows], comparison.predicted[rows], ".", ms=2, label=name)
        low, high = comparison.measured[known].min(), comparison.measured[known].max()
        axes.plot([low, high], [low, high], color="black", lw=0.8)
        axes.set_ylim(low / 3, high * 3)
        error = figures(comparison.measured, comparison.predicted, comparison.roofline)
        axes.set_title(f"{comparison.name}: {error['rows']:,} rows, mean error {error['mape']:.1%}", fontsize=9)
        axes.set_xlabel(f"measured, {comparison.unit}")
        axes.set_ylabel(f"predicted, {comparison.unit}")
        axes.legend(fontsize=6, markerscale=3, loc="upper left", frameon=False)
        path = folder / f"{comparison.name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})
        except OSError as error_:
            raise InputError(f"cannot write {path}: {error_}") from error_
    return path


def _by_group(comparison: Comparison, known: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of each value of the first group column, at most eight of them."""
    column = comparison.frame[comparison.groups[0]].astype(str).to_numpy()
    names = sorted(set(column[known]))[:8]
    return {name: known[column[known] == name] for name in names}
