"""Figures of merit over many runs, with their uncertainty: pure functions on arrays.

A figure rests on strata: one array per workload, [seeds, ...], each row one run. Its 95 % interval is the percentile
interval of a stratified bootstrap: seeds are drawn again, with replacement, within every workload, and the workloads
stay as they are. It says how far other seeds could have led, not other workloads.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021, sections
4.1 to 4.3 and appendix A. With two or three seeds per workload such intervals come out too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.arrays import Floats

Strata = Sequence[Floats]
Statistic = Callable[..., Any]
"""Takes arrays and the keyword `axis`; returns one array without that axis."""

CONFIDENCE = 0.95
RESAMPLES = 2000
"""[assumed] With more, the ends of an interval move by a few per cent of its width."""
_BATCH = 100
"""Resamples in memory at once: few enough to stay in the processor's cache, which halves the time."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval.

    Attributes:
        value: The figure, [...].
        low: Lower end, [...]; None where a workload has a single seed, which says nothing about other seeds.
        high: Upper end, likewise.
    """

    value: Floats
    low: Floats | None
    high: Floats | None


def estimate(strata: Strata, statistic: Statistic, *, rng: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
    """A figure over all runs, with its stratified bootstrap interval.

    Args:
        strata: Per workload the runs' values, [seeds, ...].
        statistic: Of the strata, called as `statistic(*strata, axis=...)`.
        rng: Draws the resamples.
        resamples: How many.

    Example:
        >>> seeds = [np.array([0.8, 0.9, 1.0]), np.array([0.5, 0.7, 0.6])]
        >>> round(float(estimate(seeds, mean, rng=np.random.default_rng(0)).value), 6)
        0.75
    """
    value = np.asarray(statistic(*strata, axis=0), dtype=np.float64)
    if min(len(stratum) for stratum in strata) < 2:
        return Estimate(value, None, None)
    from scipy.stats import bootstrap  # takes a second to load

    interval = bootstrap(
        strata,
        statistic,
        n_resamples=resamples,
        batch=_BATCH,
        vectorized=True,
        axis=0,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=rng,
    ).confidence_interval
    return Estimate(value, np.asarray(interval.low), np.asarray(interval.high))


def interquartile_mean(*strata: Floats, axis: int = 0) -> Any:
    """Mean of the middle half of all runs: a quarter of them, rounded down, is cut off at either end.

    Less moved by single runs than the mean, less noisy than the median. Source: Agarwal et al. 2021, section 4.3.
    The same, to the bit, as `scipy.stats.trim_mean`, which takes a second to load.
    """
    runs = np.concatenate(strata, axis=axis)
    count = runs.shape[axis]
    kept = np.arange(count // 4, count - count // 4)
    return np.partition(runs, (kept[0], kept[-1]), axis).take(kept, axis).mean(axis=axis)


def mean(*strata: Floats, axis: int = 0) -> Any:
    """Mean over all runs."""
    return np.concatenate(strata, axis=axis).mean(axis=axis)


def median(*strata: Floats, axis: int = 0) -> Any:
    """The smallest value that at least half of all runs do not exceed: always one that a run had."""
    return np.quantile(np.concatenate(strata, axis=axis), 0.5, axis=axis, method="inverted_cdf")


def improvement(first: Strata, second: Strata, *, rng: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
    """P(X > Y): how likely a run of X beats a run of Y on the same workload, drawn at random.

    Mean over workloads of the share of pairs (x, y) in which x > y, ties counting half; that share is the
    Mann-Whitney U statistic of the two samples over the number of pairs. 0.5 says that neither is ahead.

    Args:
        first: X's values per workload, [seeds].
        second: Y's, likewise.
        rng: Draws the resamples.
        resamples: How many.

    Source: Agarwal et al. 2021, section 4.3; Mann and Whitney 1947.
    """
    workloads = len(first)

    def mean_share(*strata: Floats, axis: int = -1) -> Any:
        pairs = zip(strata[:workloads], strata[workloads:], strict=True)
        return np.mean([_share_won(x, y, axis) for x, y in pairs], axis=0)

    return estimate([*first, *second], mean_share, rng=rng, resamples=resamples)


def _share_won(x: Floats, y: Floats, axis: int) -> Any:
    x, y = np.moveaxis(x, axis, -1), np.moveaxis(y, axis, -1)
    return 0.5 + np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) / 2


def at_least(values: Floats, thresholds: Floats) -> Floats:
    """1.0 where a run reaches a threshold, else 0.0: [runs] and [thresholds] give [runs, thresholds].

    Its `mean` is the performance profile: the share of runs with a score of at least each threshold.
    Source: Dolan and More 2002; Agarwal et al. 2021, section 4.2.
    """
    return (values[:, None] >= thresholds).astype(np.float64)


def first_call(curves: Floats, score: float) -> Floats:
    """The call, counted from 1, by which each run first had a score; one more than there are calls if it never did.

    Args:
        curves: Best score so far after each call, [runs, calls], never falling.
        score: To be reached.
    """
    return 1.0 + (curves < score).sum(axis=1)
