"""What first tokens of measured runs take beside the steps that a replay has, of all machines in one fit.

Every time of `sim.replay.first_token_times.FirstTokenTimes` is a sum of effects on its logarithm, each with a normal
prior around 0, as the engines' other times are (`pooled_fit`). A run of ten requests a client has a tenth of the first
requests' own time in its mean, all of it in its 99th percentile, and none in its median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raysearch.fidelity.calibration.pooled_fit import Bools, Cell, Effect
from raysearch.fidelity.calibration.robust_fit import damped_descent, huber_loss, huber_weights
from sim.arrays import Floats
from sim.replay.first_token_times import FirstTokenTimes
from sim.replay.requests import Integers

TAIL_FIGURES: Mapping[str, float] = {"mean": 0.1, "p50": 0.0, "p99": 1.0}
"""Figures that runs state -> how much of the first requests' own time is in them."""
_SYSTEM, _ENGINE = ("system",), ("engine", "system")
FIRST_TOKEN_EFFECTS: Mapping[str, tuple[Effect, ...]] = {
    # [assumed] widths: first tokens of one configuration repeat within 5 % (median), those of engines differ twofold.
    "factor": (
        Effect(_SYSTEM, 0.05),
        Effect(("engine",), 0.05),
        Effect(_ENGINE, 0.1),
        Effect(("engine", "system", "weights"), 0.1),
        Effect(("family", "model"), 0.1),
    ),
    "request_s": (
        Effect((), 0.5, np.log(0.05)),
        Effect(("family",), 0.5),
        Effect(_SYSTEM, 0.3),
        Effect(("engine",), 0.4),
        Effect(_ENGINE, 0.4),
        Effect(("family", "model"), 0.4),
    ),
    "steps": (Effect((), 0.5), Effect(("family",), 0.5)),
    "burst_s": (
        Effect((), 1.0, np.log(0.4)),
        Effect(("family",), 0.7),
        Effect(_SYSTEM, 0.5),
        Effect(("engine",), 0.7),
        Effect(_ENGINE, 0.7),
        Effect(("family", "model"), 0.7),
    ),
}
_SPREAD = 0.2
"""Spread of log errors. [assumed]"""


@dataclass(frozen=True, slots=True)
class MeasuredFirstTokens:
    """First tokens of measured runs beside replayed ones.

    Attributes:
        cells: [runs] what their times depend on.
        token_s: [runs] replayed time per output token.
        replayed_s, measured_s: [runs, figures] by `TAIL_FIGURES`; NaN where a run does not state one.
        weights: [runs] repeats of one configuration count as the root of their number.
    """

    cells: Sequence[Cell]
    token_s: Floats
    replayed_s: Floats
    measured_s: Floats
    weights: Floats

    def __getitem__(self, rows: Bools) -> MeasuredFirstTokens:
        cells = [cell for cell, kept in zip(self.cells, rows, strict=True) if kept]
        return MeasuredFirstTokens(
            cells, self.token_s[rows], self.replayed_s[rows], self.measured_s[rows], self.weights[rows]
        )


class PooledFirstTokens:
    """The fitted effects."""

    def __init__(self, measured: MeasuredFirstTokens) -> None:
        cells, of_run = _distinct_cells(measured.cells)
        self._places: dict[str, dict[_Key, int]] = {}
        priors: dict[str, Floats] = {}
        for name, effects in FIRST_TOKEN_EFFECTS.items():
            widths = {key: effect for cell in cells for key, effect in zip(_keys(name, cell), effects, strict=True)}
            self._places[name] = {key: place for place, key in enumerate(widths)}
            priors[name] = np.array([(effect.mean, effect.width) for effect in widths.values()]).reshape(-1, 2)
        self._effects = self._fitted(measured, cells, of_run, priors)

    def times(self, cell: Cell) -> FirstTokenTimes:
        """The times of a cell; where its own effects were not seen, those of its parents."""
        return FirstTokenTimes(**{name: float(value[0]) for name, value in self._parts([cell]).items()})

    def predicted_s(self, measured: MeasuredFirstTokens) -> Floats:
        """[runs, figures] what would be measured."""
        cells, of_run = _distinct_cells(measured.cells)
        return _predicted_s(measured, {name: value[of_run] for name, value in self._parts(cells).items()})

    def _parts(self, cells: Sequence[Cell]) -> dict[str, Floats]:
        return {name: np.exp(self._matrix(name, cells) @ self._effects[name]) for name in FIRST_TOKEN_EFFECTS}

    def _matrix(self, name: str, cells: Sequence[Cell]) -> Floats:
        """[cells, effects] which effects make up a time's logarithm."""
        places = self._places[name]
        found = np.zeros((len(cells), len(places)))
        for row, cell in enumerate(cells):
            for key in _keys(name, cell):
                if key in places:
                    found[row, places[key]] = 1.0
        return found

    def _fitted(
        self, measured: MeasuredFirstTokens, cells: Sequence[Cell], of_run: Integers, priors: Mapping[str, Floats]
    ) -> dict[str, Floats]:
        """Effects on each time, the most likely ones by Huber's loss and the priors.

        Runs of a cell share its effects, so the normal equations are added up by cells.
        """
        designs = {name: self._matrix(name, cells) for name in FIRST_TOKEN_EFFECTS}
        known, shares = np.isfinite(measured.measured_s), np.array(list(TAIL_FIGURES.values()))
        weights = np.where(known, measured.weights[:, None], 0.0)
        mean, width = np.concatenate([priors[name] for name in FIRST_TOKEN_EFFECTS]).T
        ends = np.cumsum([len(priors[name]) for name in FIRST_TOKEN_EFFECTS])
        parts_of = dict(zip(FIRST_TOKEN_EFFECTS, np.split(np.arange(len(mean)), ends[:-1]), strict=True))

        def look(effects: Floats) -> tuple[float, Floats, dict[str, Floats]]:
            parts = {name: np.exp(designs[name] @ effects[parts_of[name]])[of_run] for name in FIRST_TOKEN_EFFECTS}
            predicted_s = _predicted_s(measured, parts)
            off = np.where(known, np.log(predicted_s / np.where(known, measured.measured_s, 1.0)) / _SPREAD, 0.0)
            loss = (weights * huber_loss(off)).sum()
            slopes = {
                "factor": parts["factor"][:, None] * measured.replayed_s / predicted_s / _SPREAD,
                "request_s": parts["request_s"][:, None] / predicted_s / _SPREAD,
                "steps": (parts["steps"] * measured.token_s)[:, None] / predicted_s / _SPREAD,
                "burst_s": parts["burst_s"][:, None] * shares / predicted_s / _SPREAD,
            }
            return float(loss + (((effects - mean) / width) ** 2).sum() / 2), off, slopes

        def by_cell(values: Floats) -> Floats:
            return np.asarray(np.bincount(of_run, values.sum(axis=1), len(cells)), dtype=float)

        def equations(effects: Floats, off: Floats, slopes: dict[str, Floats]) -> tuple[Floats, Floats]:
            kept = weights * huber_weights(off)
            normal, downhill = np.diag(width**-2), -(effects - mean) / width**2
            for one, design in designs.items():
                downhill[parts_of[one]] -= design.T @ by_cell(kept * slopes[one] * off)
                for other, beside in designs.items():
                    both = by_cell(kept * slopes[one] * slopes[other])
                    normal[np.ix_(parts_of[one], parts_of[other])] += design.T @ (both[:, None] * beside)
            return normal, downhill

        effects = damped_descent(look, equations, mean)
        return {name: effects[parts_of[name]] for name in FIRST_TOKEN_EFFECTS}


_Key = tuple[tuple[str, ...], tuple[str, ...]]


def _distinct_cells(cells: Sequence[Cell]) -> tuple[list[Cell], Integers]:
    """(each cell once, [runs] which one it is)."""
    places = {cell: place for place, cell in enumerate(dict.fromkeys(cells))}
    return list(places), np.array([places[cell] for cell in cells], dtype=np.int64)


def _keys(name: str, cell: Cell) -> list[_Key]:
    """One per effect on a time."""
    return [(effect.by, tuple(getattr(cell, part) for part in effect.by)) for effect in FIRST_TOKEN_EFFECTS[name]]


def _predicted_s(measured: MeasuredFirstTokens, parts: Mapping[str, Floats]) -> Floats:
    always_s = parts["request_s"] + parts["steps"] * measured.token_s
    shares = np.array(list(TAIL_FIGURES.values()))
    return parts["factor"][:, None] * measured.replayed_s + always_s[:, None] + parts["burst_s"][:, None] * shares
