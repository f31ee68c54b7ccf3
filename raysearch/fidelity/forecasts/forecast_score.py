"""How a forecast came out, once runs are published: error, coverage, rank, and what our picks would have cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from raysearch.base.errors import InputError
from raysearch.fidelity.forecasts.published_results import Key, PublishedResult, key_of
from raysearch.fidelity.validation.error_figures import rank_correlation
from sim.json_object import JsonObject

SLOS_MS = (15.0, 20.0, 30.0, 50.0)
"""Longest times per token under which the best of a workload is picked. [assumed]"""


class _Pair(NamedTuple):
    """A prediction and what was measured of it: (predicted, least, most), and measured."""

    prediction: JsonObject
    workload: tuple[Any, ...]
    tpot_ms: Sequence[float]
    rate: Sequence[float]
    measured: PublishedResult


class ForecastErrors(TypedDict):
    """Mean and median error, bias, share inside the interval and its median width."""

    rows: int
    mape: float
    median_ape: float
    bias: float
    inside: float
    width: float


class Regret(TypedDict):
    """Picks, those that missed their limit, and what the others lost on average to the best measured."""

    picks: int
    missed_the_limit: int
    mean: float | None


class WorkloadScore(TypedDict):
    """Of one workload."""

    workload: list[Any]
    measured: int
    time_per_token: ForecastErrors | None


class ForecastsCompared(TypedDict):
    """Our time per token, and another simulator's, of the deployments that it has a figure of."""

    ours: ForecastErrors
    theirs: ForecastErrors


class ForecastScore(TypedDict):
    """See `score_of`."""

    made_by: str
    date: str
    predictions: int
    measured: int
    time_per_token: ForecastErrors | None
    tokens_per_s_per_gpu: ForecastErrors | None
    rank: float | None
    regret: Regret
    by_workload: list[WorkloadScore]
    beside: ForecastsCompared | None


def score_of(
    forecast: JsonObject,
    results: Sequence[PublishedResult],
    other: Callable[[JsonObject], float | None] | None = None,
) -> ForecastScore:
    """Figures of the predictions that were measured since.

    Args:
        forecast: As it was written.
        results: What was measured.
        other: Another simulator's milliseconds per token of a prediction's deployment, None where it has none.

    Raises:
        InputError: None of them was.
    """
    known: Mapping[Key, PublishedResult] = {each.key: each for each in results}
    pairs = [
        _Pair(
            prediction,
            tuple(prediction[name] for name in ("model", "machine", "precision", "isl", "osl")),
            prediction["tpot_ms"],
            prediction["tokens_per_s_per_gpu"],
            known[key_of(prediction)],
        )
        for prediction in forecast["predictions"]
        if key_of(prediction) in known
    ]
    if not pairs:
        raise InputError("none of the forecast's deployments is among these results")
    groups: dict[tuple[Any, ...], list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.workload].append(pair)
    return {
        "made_by": forecast["made_by"],
        "date": forecast["date"],
        "predictions": len(forecast["predictions"]),
        "measured": len(pairs),
        "time_per_token": _figures([(pair.tpot_ms, pair.measured.tpot_s * 1e3) for pair in pairs]),
        "tokens_per_s_per_gpu": _figures(
            [(pair.rate, pair.measured.tokens_per_s_per_gpu) for pair in pairs if pair.measured.tokens_per_s_per_gpu]
        ),
        "rank": _rank(groups.values()),
        "regret": _regret(groups.values()),
        "by_workload": [
            {
                "workload": list(workload),
                "measured": len(each),
                "time_per_token": _figures([(pair.tpot_ms, pair.measured.tpot_s * 1e3) for pair in each]),
            }
            for workload, each in sorted(groups.items())
        ],
        "beside": _beside(pairs, other) if other else None,
    }


def _beside(pairs: Sequence[_Pair], other: Callable[[JsonObject], float | None]) -> ForecastsCompared | None:
    """Errors on the same runs; another's figures have no interval: theirs is as wide as a point."""
    known = [(pair, found) for pair in pairs if (found := other(pair.prediction)) is not None]
    ours = _figures([(pair.tpot_ms, pair.measured.tpot_s * 1e3) for pair, _ in known])
    theirs = _figures([((found, found, found), pair.measured.tpot_s * 1e3) for pair, found in known])
    return {"ours": ours, "theirs": theirs} if ours and theirs else None


def _figures(pairs: Sequence[tuple[Sequence[float], float]]) -> ForecastErrors | None:
    """Mean and median error, bias, share inside the interval and its median width."""
    if not pairs:
        return None
    predicted, low, high = np.array([each for each, _ in pairs]).T
    measured = np.array([each for _, each in pairs])
    error = predicted / measured - 1
    return {
        "rows": len(pairs),
        "mape": round(float(np.abs(error).mean()), 4),
        "median_ape": round(float(np.median(np.abs(error))), 4),
        "bias": round(float(error.mean()), 4),
        "inside": round(float(np.mean((low <= measured) & (measured <= high))), 4),
        "width": round(float(np.median(high / low)), 3),
    }


def _rank(groups: Iterable[list[_Pair]]) -> float | None:
    """Mean rank correlation of the throughputs of a workload's points."""
    found: list[float] = []
    for group in groups:
        known = [(pair.rate[0], rate) for pair in group if (rate := pair.measured.tokens_per_s_per_gpu)]
        correlation = rank_correlation(*np.array(known).T) if known else None
        found += [] if correlation is None else [correlation]
    return round(float(np.mean(found)), 4) if found else None


def _regret(groups: Iterable[list[_Pair]]) -> Regret:
    """What the best predicted point of each workload and limit lost to the best measured, and how often it missed."""
    lost: list[float] = []
    missed = 0
    for group in groups:
        known = [pair for pair in group if pair.measured.tokens_per_s_per_gpu]
        for limit_ms in SLOS_MS:
            allowed = [pair for pair in known if pair.measured.tpot_s * 1e3 <= limit_ms]
            picked = max(
                (pair for pair in known if pair.tpot_ms[0] <= limit_ms), key=lambda pair: pair.rate[0], default=None
            )
            if not allowed or picked is None:
                continue
            if picked.measured.tpot_s * 1e3 > limit_ms:
                missed += 1
                continue
            best = max(pair.measured.tokens_per_s_per_gpu or 0.0 for pair in allowed)
            lost.append(1 - (picked.measured.tokens_per_s_per_gpu or 0.0) / best)
    mean = round(float(np.mean(lost)), 4) if lost else None
    return {"picks": len(lost) + missed, "missed_the_limit": missed, "mean": mean}
