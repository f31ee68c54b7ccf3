"""90 % intervals of the time per output token, from serving runs that the engine's fit had not seen.

Quantiles of log(measured / predicted) are linear in the share of the time that prompts take, and are themselves judged
on groups of runs held out from them. Shapes are many: models with experts get a width of their own. Models are few:
neither that nor which side the next one errs to is known from them, so the wider side applies to both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from raysearch.fidelity.calibration.deployments import ServingRun
from raysearch.fidelity.calibration.engines import FOLDS, Steps, held_out_times, shapes_of
from sim.arrays import Floats
from sim.json_object import JsonObject
from sim.prices.engine import BARE, EngineTimes
from sim.prices.hardware import Widths
from sim.prices.priced import EXACT
from sim.prices.trust import on_top

WANTED = 0.9
"""Share of rows that an interval is to hold."""
_LEAST = 0.85
"""Share that it is to hold of those with few, some and many prompts; `WANTED` where groups are few."""
_LEVELS = (0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)
"""Quantiles to either side that are tried. Of few groups the extremes are not seen, so the least will not always do."""
_SHARES = (0.0, 0.05, 0.15, 0.4, 1.0)
"""Bounds of the shares of prompts by which coverage is reported."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """How far measured runs lie from predictions.

    Attributes:
        log: [runs] log(measured / predicted).
        prompt_share: [runs] share of the predicted time that prompts take.
        moe: [runs] whether the model has experts.
        kernels: [runs, 2] factors between which a run's kernels put its time, over those that are usual.
        groups: [runs] what is held out together.
        few: Whether the groups are models, not shapes.
    """

    log: Floats
    prompt_share: Floats
    moe: NDArray[np.bool_]
    kernels: Floats
    groups: Sequence[Hashable]
    few: bool

    def __getitem__(self, rows: NDArray[np.bool_]) -> Residuals:
        groups = [group for group, kept in zip(self.groups, rows, strict=True) if kept]
        return Residuals(self.log[rows], self.prompt_share[rows], self.moe[rows], self.kernels[rows], groups, self.few)

    @property
    def features(self) -> Floats:
        """[runs, 3] what a width is linear in."""
        return np.column_stack([np.ones(len(self.log)), self.prompt_share, (self.moe & (not self.few)).astype(float)])


def residuals_of(
    runs: Sequence[ServingRun],
    steps: Steps,
    measured_s: Floats,
    times: Sequence[EngineTimes],
    groups: Sequence[Hashable],
    *,
    few: bool,
) -> Residuals:
    """What is left of measured runs under given engines.

    Args:
        runs: Deployments.
        steps: Their steps.
        measured_s: [runs] seconds per output token.
        times: [runs] engines that have not seen the run.
        groups: [runs] what those were held out with.
        few: See `Residuals`.
    """
    log = np.log(measured_s / steps.tpot_of_each_s(times))
    moe = np.array([run.model.is_moe for run in runs], dtype=bool)
    return Residuals(log, steps.prompt_share_of_each(times), moe, steps.kernels / usual_kernels(steps), groups, few)


def usual_kernels(steps: Steps) -> Floats:
    """[2] factors that nine of ten runs' kernels stay within."""
    low, high = steps.kernels.T
    return np.array([np.quantile(low, 1 - WANTED), np.quantile(high, WANTED)]).round(4)


def serving_intervals(
    runs: Sequence[ServingRun], steps: Steps, measured_s: Floats, by_shape: Sequence[EngineTimes]
) -> JsonObject:
    """The key "interval" of the serving parameters: widths, and their coverage of rows held out from them.

    Args:
        runs: Deployments.
        steps: Their steps.
        measured_s: [runs] seconds per output token.
        by_shape: [runs] engines that have not seen the run's shape.
    """
    kinds = held_out_residuals(runs, steps, measured_s, by_shape)
    record: JsonObject = {}
    for name, residuals in kinds.items():
        widths = fit_widths(residuals)
        record[name] = {"low": list(widths.low), "high": list(widths.high), "held_out": held_out_coverage(residuals)}
    return record | {"kernels": usual_kernels(steps).tolist()}


def held_out_residuals(
    runs: Sequence[ServingRun], steps: Steps, measured_s: Floats, by_shape: Sequence[EngineTimes]
) -> dict[str, Residuals]:
    """Of models that were measured, by folds of shapes; of models that were not; and of these on the bare machine."""
    shapes, models = shapes_of(runs), [run.model.name for run in runs]
    known = sorted(set(shapes))
    dealt = dict(zip(known, np.random.default_rng(1).permutation(len(known)) % FOLDS, strict=True))
    folds = [int(dealt[shape]) for shape in shapes]
    by_model = held_out_times(runs, steps, measured_s, models, folds=len(set(models)))
    return {
        "measured": residuals_of(runs, steps, measured_s, by_shape, folds, few=False),
        "unmeasured": residuals_of(runs, steps, measured_s, by_model, models, few=True),
        "bare": residuals_of(runs, steps, measured_s, [BARE] * len(runs), models, few=True),
    }


def fit_widths(residuals: Residuals) -> Widths:
    """The least widths that hold `WANTED` of the runs, and not much less at any share of prompts, when held out."""
    least = WANTED if residuals.few else _LEAST
    for level in _LEVELS:
        covered = inside(residuals, held_out_widths(residuals, level))
        if covered.mean() >= WANTED and min(covered[rows].mean() for rows in _by_share(residuals).values()) >= least:
            break
    return _at_level(residuals, level)


def held_out_widths(residuals: Residuals, level: float | None = None) -> list[Widths]:
    """[runs] the widths of each, from the runs of other groups alone, at a level or at that of `fit_widths`."""
    labels = np.array([str(group) for group in residuals.groups])
    found: dict[str, Widths] = {}
    for label in sorted(set(labels)):
        others = residuals[labels != label]
        found[label] = fit_widths(others) if level is None else _at_level(others, level)
    return [found[label] for label in labels]


def _at_level(residuals: Residuals, level: float) -> Widths:
    features = residuals.features
    low, high = (_quantile(features, sign * residuals.log, level) for sign in (-1.0, 1.0))
    if residuals.few:
        low = high = (max(low[0], high[0]), max(low[1], high[1]), max(low[2], high[2]))
    return Widths(low, high)


def _quantile(features: Floats, values: Floats, level: float) -> tuple[float, float, float]:
    """Coefficients >= 0 of the linear function that a share `level` of the values lies below.

    Source: Koenker and Bassett, "Regression Quantiles" (1978): the least sum of tilted absolute residuals.
    """
    from scipy.optimize import linprog

    # The dual program, which has a variable per row and but three constraints, whose prices are the coefficients.
    solve = cast("Any", linprog)  # of whose result a type checker works out the type for ten seconds
    found = solve(-values, A_ub=features.T, b_ub=np.zeros(features.shape[1]), bounds=(level - 1, level))
    always, prompts, experts = (round(max(0.0, -float(price)), 4) for price in found.ineqlin.marginals)
    return always, prompts, experts


def inside(residuals: Residuals, widths: Sequence[Widths]) -> NDArray[np.bool_]:
    """[runs] whether the measured value lies in the interval of these widths and of the run's kernels."""
    shares, moe = residuals.prompt_share.tolist(), residuals.moe.tolist()
    rows = zip(widths, shares, moe, residuals.kernels.tolist(), strict=True)
    factors = [on_top(width.at(share, moe=m), (low, high), EXACT) for width, share, m, (low, high) in rows]
    low, high = np.log(np.array(factors)).T
    return (low <= residuals.log) & (residuals.log <= high)


class Coverage(TypedDict):
    """Shares of rows inside their interval; None of no rows."""

    rows: int
    all: float | None
    dense: float | None
    moe: float | None
    by_share_of_prompts: dict[str, float | None]


class FittedInterval(TypedDict):
    """Widths of an interval, and how many rows held out from them are inside."""

    low: list[float]
    high: list[float]
    held_out: Coverage


def held_out_coverage(residuals: Residuals) -> Coverage:
    """The coverage of each run by widths that have not seen its group."""
    return coverage(residuals, inside(residuals, held_out_widths(residuals)))


def coverage(residuals: Residuals, covered: NDArray[np.bool_]) -> Coverage:
    """Shares of rows inside: of all, without and with experts, and by the share of prompts."""
    moe = residuals.moe
    return {
        "rows": len(covered),
        "all": _share(covered),
        "dense": _share(covered[~moe]),
        "moe": _share(covered[moe]),
        "by_share_of_prompts": {name: _share(covered[rows]) for name, rows in _by_share(residuals).items()},
    }


def _by_share(residuals: Residuals) -> dict[str, NDArray[np.bool_]]:
    """[runs] which have a share of prompts within some bounds."""
    bins = np.clip(np.searchsorted(_SHARES, residuals.prompt_share, side="right") - 1, 0, len(_SHARES) - 2)
    return {f"{_SHARES[n]:g}-{_SHARES[n + 1]:g}": bins == n for n in np.unique(bins).tolist()}


def _share(covered: NDArray[np.bool_]) -> float | None:
    return round(float(covered.mean()), 4) if len(covered) else None
