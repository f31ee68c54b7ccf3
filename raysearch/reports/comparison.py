"""A study's statistics: every figure of the report's tables and pictures, as plain values.

Scores are f/f*, best so far over the exact optimum (see `raysearch.reports.learning_curves` for where none is known).
All searchers
are compared on the same workloads and seeds.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, TypedDict

import numpy as np

from raysearch.reports.learning_curves import AnytimeCurves
from raysearch.reports.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Estimate,
    at_least,
    estimate,
    first_call,
    improvement,
    interquartile_mean,
    mean,
    median,
)
from sim.arrays import Floats

CHECKPOINTS = (10, 100, 250, 500, 1000, 2000, 4000)
"""Calls after which scores are shown, as far as the budget goes; the budget is always one of them."""
TARGETS = (0.95, 0.99)
"""Fractions of the optimum that runs are asked for when they reached them."""
_THRESHOLDS = np.round(np.arange(0.5, 1.0001, 0.01), 2)
"""Of the performance profile."""
_POINTS, _CURVE_RESAMPLES = 80, 500
"""[assumed] Of a curve: as fine as a picture shows, for curves take most of a report's time."""


class Bootstrapped(TypedDict):
    """A figure, or one per point, and its interval: None with a single seed per workload."""

    value: Any
    low: Any
    high: Any


class ByCalls(Bootstrapped):
    """Figures after so many calls."""

    calls: list[int]


class ByTime(Bootstrapped):
    """Figures after so many seconds of a run."""

    wall_s: list[float]


class Profile(Bootstrapped):
    """Shares of runs that reach each threshold."""

    threshold: list[float]


class Worst(TypedDict):
    """The worst run's scores after so many calls."""

    calls: list[int]
    value: list[float]


class Target(TypedDict):
    """How many runs reached a score, and after how many calls and seconds the median run did; None is never."""

    target: float
    reached: int
    runs: int
    calls: Bootstrapped
    wall_s: float | None


class SearcherFigures(TypedDict):
    """One searcher's statistics."""

    scores: ByCalls
    means: ByCalls
    worst: Worst
    targets: list[Target]
    profile: Profile
    feasible_share: Bootstrapped
    unique_share: Bootstrapped
    curve: ByCalls
    curve_by_workload: dict[str, ByCalls]
    curve_by_time: ByTime | None


class ComparedPair(TypedDict):
    """Two searchers, the better one first."""

    first: str
    second: str
    probability: Bootstrapped
    difference: Bootstrapped


class StudyStatistics(TypedDict):
    """All figures of a study's tables and pictures: see `compare`."""

    budget: int
    workloads: list[str]
    seeds: list[int]
    exact: bool
    left_out: int
    confidence: float
    resamples: int
    searchers: dict[str, SearcherFigures]
    pairs: list[ComparedPair]


def compare(curves: AnytimeCurves) -> StudyStatistics:
    """The statistics of a study; intervals are None with a single seed per workload.

    `searchers` come in the order of their interquartile mean at the budget, best first. `pairs` holds each two of
    them once, the better one first: the probability that a run of `first` beats one of `second`, and the mean
    difference of their scores over paired runs (same workload, same seed), both at the budget.

    Args:
        curves: With at least one block.
    """
    budget = next(iter(curves.best.values())).shape[1]
    scores = {searcher: best[:, -1] for searcher, best in curves.best.items()}
    ranked = sorted(scores, key=lambda name: (-float(interquartile_mean(scores[name])), name))
    return {
        "budget": budget,
        "workloads": list(curves.workloads),
        "seeds": [len(stratum) for stratum in curves.strata(scores[ranked[0]])],
        "exact": curves.exact,
        "left_out": curves.left_out,
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "searchers": {searcher: _searcher(curves, searcher, budget) for searcher in ranked},
        "pairs": [_pair(curves, first, second, scores) for first, second in combinations(ranked, 2)],
    }


def _searcher(curves: AnytimeCurves, searcher: str, budget: int) -> SearcherFigures:
    best, runs = curves.best[searcher], curves.runs[searcher]
    calls = np.array([*(calls for calls in CHECKPOINTS if calls < budget), budget])
    calls_of = {name: np.array([run[name] for run in runs]) for name in ("calls", "feasible_calls", "unique_calls")}
    made = np.maximum(calls_of["calls"], 1)
    return {
        "scores": {"calls": calls.tolist(), **_figures(curves, best[:, calls - 1], interquartile_mean)},
        "means": {"calls": calls.tolist(), **_figures(curves, best[:, calls - 1], mean)},
        "worst": {"calls": calls.tolist(), "value": best[:, calls - 1].min(0).tolist()},
        "targets": [_target(curves, searcher, target, budget) for target in TARGETS],
        "profile": {
            "threshold": _THRESHOLDS.tolist(),
            **_figures(curves, at_least(best[:, -1], _THRESHOLDS), mean, resamples=_CURVE_RESAMPLES),
        },
        "feasible_share": _figures(curves, calls_of["feasible_calls"] / made, mean),
        "unique_share": _figures(curves, calls_of["unique_calls"] / made, mean),
        "curve": _curve(curves, best, budget),
        "curve_by_workload": {name: _curve(curves, best, budget, name) for name in curves.workloads},
        "curve_by_time": _curve_by_time(curves, searcher),
    }


def _target(curves: AnytimeCurves, searcher: str, target: float, budget: int) -> Target:
    calls = first_call(curves.best[searcher], target)
    half = _figures(curves, calls, median)
    value, low, high = (end if end and end <= budget else None for end in (half["value"], half["low"], half["high"]))
    seconds = float(median(curves.seconds_until(searcher, calls))) if curves.timed(searcher) else np.inf
    return {
        "target": target,
        "reached": int((calls <= budget).sum()),
        "runs": len(calls),
        "calls": {"value": value, "low": low, "high": high},
        "wall_s": seconds if np.isfinite(seconds) else None,
    }


def _curve(curves: AnytimeCurves, best: Floats, budget: int, workload: str | None = None) -> ByCalls:
    calls = np.unique(np.geomspace(1, budget, _POINTS).round().astype(int))
    figures = _figures(curves, best[:, calls - 1], interquartile_mean, workload, _CURVE_RESAMPLES)
    return {"calls": calls.tolist(), **figures}


def _curve_by_time(curves: AnytimeCurves, searcher: str) -> ByTime | None:
    """Score after so many seconds of a run; a run that has ended keeps its last score."""
    if not curves.timed(searcher):
        return None
    longest_s = max(1e-9, *(run["wall_s"] or 0.0 for run in curves.runs[searcher]))  # of a clock that stood still
    seconds = np.geomspace(longest_s / 1000, longest_s, _POINTS)
    best = curves.best_at(searcher, seconds)
    return {"wall_s": seconds.tolist(), **_figures(curves, best, interquartile_mean, resamples=_CURVE_RESAMPLES)}


def _pair(curves: AnytimeCurves, first: str, second: str, scores: dict[str, Floats]) -> ComparedPair:
    x, y = curves.strata(scores[first]), curves.strata(scores[second])
    return {
        "first": first,
        "second": second,
        "probability": _plain(improvement(x, y, rng=_rng())),
        "difference": _figures(curves, scores[first] - scores[second], mean),
    }


def _figures(
    curves: AnytimeCurves, values: Floats, statistic: Any, workload: str | None = None, resamples: int = RESAMPLES
) -> Bootstrapped:
    return _plain(estimate(curves.strata(values, workload), statistic, rng=_rng(), resamples=resamples))


def _plain(figure: Estimate) -> Bootstrapped:
    low, high = (None if end is None else end.tolist() for end in (figure.low, figure.high))
    return {"value": figure.value.tolist(), "low": low, "high": high}


def _rng() -> np.random.Generator:
    """The same draws for every figure, so that a report says the same each time and whoever else is in it."""
    return np.random.default_rng(0)
