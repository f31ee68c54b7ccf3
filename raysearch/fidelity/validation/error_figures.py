"""Figures of error: predicted against measured, for a family and each of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.intervals import Coverage
from raysearch.fidelity.calibration.serving_fit import rows_by
from sim.arrays import Floats

LEAST_RANKED = 4
"""Rows below which a rank correlation says nothing."""


class ErrorFigures(TypedDict):
    """See `figures`; None where there is no row."""

    rows: int
    unpredicted: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    rank_correlation: float | None
    roofline_mape: float | None
    roofline_median_ape: float | None


class RankFigures(TypedDict):
    """See `within_groups`."""

    groups: int
    mean: float | None
    row_weighted: float | None
    min: float | None


class WorkloadRanks(RankFigures):
    """Rank correlations of all rows, and of those that state their batch."""

    rows_that_state_their_batch: RankFigures


class DegreeErrors(TypedDict):
    """Of MoE layers with some degrees of expert parallelism."""

    degree: str
    rows: int
    bias: float
    coverage: float


class PublishedGain(TypedDict):
    """Gain in tokens/s/GPU from one GPU to two."""

    model: str
    framework: str
    isl: int
    osl: int
    measured_gain: float
    predicted_gain: float


class PredictedRun(TypedDict):
    """A disaggregated run."""

    id: str
    tpot_ms: float
    ttft_ms: float


class DisaggregatedErrors(ErrorFigures):
    """Of disaggregated runs: of the time per token, and in `ttft` of that to the first."""

    skipped: dict[str, list[str]]
    reread: dict[str, list[str]]
    each: list[PredictedRun]
    ttft: ErrorFigures
    by_engine: dict[str, ErrorFigures]


class MoreFigures(TypedDict, total=False):
    """Of some families alone."""

    by_expert_parallel_degree: list[DegreeErrors]
    phases: dict[str, ErrorFigures]
    capacity_cliff: list[PublishedGain]
    rank_correlation_within_workload: dict[str, WorkloadRanks]
    rows_that_state_their_batch: ErrorFigures
    every_row_taken_literally: ErrorFigures
    interval: dict[str, Coverage]
    ttft: ErrorFigures
    disagg: DisaggregatedErrors
    picture: str


class PartErrors(ErrorFigures):
    """With the share of rows inside their 90 % interval."""

    coverage: float | None


class GroupErrors(PartErrors):
    """Of the rows of one group."""

    name: str
    keys: dict[str, str]


class FamilyErrors(PartErrors, MoreFigures):
    """See `error_report`."""

    unit: str
    note: str
    skipped: Mapping[str, Sequence[str]]
    reread: Mapping[str, Sequence[str]]
    groups: list[GroupErrors]


class ServingErrors(PartErrors):
    """Of serving runs: what `MoreFigures` has of them."""

    rank_correlation_within_workload: dict[str, WorkloadRanks]
    rows_that_state_their_batch: ErrorFigures
    interval: dict[str, Coverage]
    ttft: ErrorFigures
    disagg: DisaggregatedErrors


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predictions of one family.

    Attributes:
        name: Key of the family in the report.
        frame: [rows] the group columns, and whatever else names a row.
        measured, predicted, roofline: [rows] in `unit`; NaN where nothing was predicted.
        groups: Columns that split the family; each is reported on its own.
        unit: For people and plots.
        inside: [rows] whether a row lies in its 90 % interval; None where that was not asked.
        note: What a reader must know.
        skipped: Rows that were not predicted, by reason: their names.
        reread: Rows that were read otherwise than they say, by how: their names.
        extra: Further figures of the whole family.
    """

    name: str
    frame: pd.DataFrame
    measured: Floats
    predicted: Floats
    roofline: Floats
    groups: tuple[str, ...]
    unit: str = "us"
    note: str = ""
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    reread: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    inside: NDArray[np.bool_] | None = None
    extra: MoreFigures = field(default_factory=MoreFigures)


def error_report(comparison: Comparison) -> FamilyErrors:
    """A family in JSON: its figures, and those of every group."""
    every = np.arange(len(comparison.measured))
    whole = _part(comparison, every)
    groups: list[GroupErrors] = []
    columns = [[str(value) for value in comparison.frame[name]] for name in comparison.groups]
    for key, index in rows_by(zip(*columns, strict=True)).items():
        keys = dict(zip(comparison.groups, key, strict=True))
        groups.append({"name": " ".join(keys.values()), "keys": keys, **_part(comparison, index)})
    return {
        **whole,
        "unit": comparison.unit,
        "note": comparison.note,
        "skipped": comparison.skipped,
        "reread": comparison.reread,
        **comparison.extra,
        "groups": groups,
    }


def _part(comparison: Comparison, index: NDArray[np.int64]) -> PartErrors:
    """The figures of some rows, with their share inside the 90 % interval."""
    measured, predicted = comparison.measured[index], comparison.predicted[index]
    coverage = None
    if comparison.inside is not None and np.isfinite(predicted).any():
        coverage = float(comparison.inside[index][np.isfinite(predicted)].mean())
    return {**figures(measured, predicted, comparison.roofline[index]), "coverage": coverage}


def not_checked(reason: str) -> FamilyErrors:
    """A family without rows: every figure is null."""
    return {
        **figures(np.zeros(0), np.zeros(0), np.zeros(0)),
        "coverage": None,
        "unit": "",
        "note": f"not checked: {reason}",
        "skipped": {},
        "reread": {},
        "groups": [],
    }


def figures(measured: Floats, predicted: Floats, roofline: Floats) -> ErrorFigures:
    """Rows, errors (shares of the measured value), rank correlation and the bare roofline's error.

    Rows without a prediction count as `unpredicted` and in nothing else.
    """
    known = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    if not known.any():
        return {
            "rows": 0,
            "unpredicted": len(known),
            "mape": None,
            "median_ape": None,
            "p90_ape": None,
            "bias": None,
            "rank_correlation": None,
            "roofline_mape": None,
            "roofline_median_ape": None,
        }
    error, light = (values[known] / measured[known] - 1 for values in (predicted, roofline))
    light = light[np.isfinite(light)]
    return {
        "rows": int(known.sum()),
        "unpredicted": int((~known).sum()),
        "mape": float(np.abs(error).mean()),
        "median_ape": float(np.median(np.abs(error))),
        "p90_ape": float(np.quantile(np.abs(error), 0.9)),
        "bias": float(error.mean()),
        "rank_correlation": rank_correlation(measured[known], predicted[known]),
        "roofline_mape": float(np.abs(light).mean()) if light.size else None,
        "roofline_median_ape": float(np.median(np.abs(light))) if light.size else None,
    }


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Spearman's rank correlation; None for few rows or where one side is constant."""
    if len(first) < LEAST_RANKED:
        return None
    one, two = (np.asarray(pd.Series(values).rank(), dtype=float) for values in (first, second))
    if np.ptp(one) == 0 or np.ptp(two) == 0:
        return None
    return float(np.corrcoef(one, two)[0, 1])


def within_groups(first: Floats, second: Floats, labels: Sequence[Any]) -> RankFigures:
    """Rank correlations inside each group of at least four rows: how many, mean, row-weighted mean, least."""
    found: list[tuple[float, int]] = []
    for index in rows_by(labels).values():
        correlation = rank_correlation(first[index], second[index])
        if correlation is not None:
            found.append((correlation, len(index)))
    if not found:
        return {"groups": 0, "mean": None, "row_weighted": None, "min": None}
    values, weights = np.array(found, dtype=float).T
    return {
        "groups": len(found),
        "mean": float(values.mean()),
        "row_weighted": float(np.average(values, weights=weights)),
        "min": float(values.min()),
    }
