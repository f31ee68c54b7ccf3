"""Fits whole families and cross-validates them through the very code that will price kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.calibration.families import FITS, grids_of
from raysearch.calibration.predict import predict
from raysearch.calibration.tables import FAMILIES, measured_us
from sim.prices.calibration import FORMAT, Calibration

Floats = NDArray[np.float64]
H100_SXM = {
    "bf16_tflops": 989.0,
    "fp8_tflops": 1979.0,
    "hbm_gb_per_s": 3350.0,
    "nvlink_gb_per_s": 450.0,
    "network_gb_per_s": 50.0,
}
"""Peaks no time may beat. [published] H100 SXM datasheet, NVLink 4 per direction, NDR InfiniBand per port."""


def as_data(series: Mapping[str, Mapping[str, Any]], light: Mapping[str, float] = H100_SXM) -> dict[str, Any]:
    """What `sim.prices.calibration.Calibration` reads: series, the grids they lie on and the speed of light."""
    return {
        "format": FORMAT,
        "speed_of_light": dict(light),
        "grids": grids_of(series.values()),
        "series": dict(series),
    }


def fit_family(family: str, frame: pd.DataFrame, light: Mapping[str, float] = H100_SXM) -> Calibration:
    """Coefficients of one family from all rows of its frame (as `tables.read_table` gives it)."""
    return Calibration(family, as_data(FITS[family](frame), light))


def fold_numbers(family: str, frame: pd.DataFrame, folds: int = 5, seed: int = 0) -> NDArray[np.int64]:
    """[rows] fold of each row; rows that share the family's keys share a fold."""
    group = frame.groupby(list(FAMILIES[family].keys)).ngroup().to_numpy()
    return (np.random.default_rng(seed).permutation(group.max() + 1) % folds)[group]


def cross_validated_predictions(
    family: str, frame: pd.DataFrame, light: Mapping[str, float] = H100_SXM, *, folds: int = 5, seed: int = 0
) -> Floats:
    """[rows] microseconds, each from a fit that saw no row of its group; NaN for a series found in one fold only."""
    fold = fold_numbers(family, frame, folds, seed)
    predicted = np.full(len(frame), np.nan)
    for held_out in np.unique(fold):
        test = fold == held_out
        if not test.all():
            predicted[test] = predict(family, frame.loc[test], fit_family(family, frame.loc[~test], light))
    return predicted


INSIDE = (0.05, 0.95)
"""Quantiles of measured over predicted between which 90 % of rows lie."""


def interval(predicted: Floats, measured: Floats) -> list[float]:
    """Factors on a prediction between which 90 % of the measured times lie."""
    return [float(f"{value:.4g}") for value in np.quantile(measured / predicted, INSIDE)]


def errors(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Rows, mean, median and 90th percentile of the relative error, its signed mean, 90 % interval; None without rows.

    See `interval` for the last.
    """
    known = np.isfinite(predicted)
    if not known.any():
        return {"rows": 0} | dict.fromkeys(("mape", "median_ape", "p90_ape", "bias", "interval"))
    relative = predicted[known] / measured[known] - 1
    size = np.abs(relative)
    return {
        "rows": int(known.sum()),
        "mape": float(size.mean()),
        "median_ape": float(np.median(size)),
        "p90_ape": float(np.quantile(size, 0.9)),
        "bias": float(relative.mean()),
        "interval": interval(predicted[known], measured[known]),
    }


def family_errors(family: str, frame: pd.DataFrame) -> tuple[dict[str, Any], Floats]:
    """Cross-validated errors of a family, and the predictions they rest on."""
    predicted = cross_validated_predictions(family, frame)
    return errors(predicted, measured_us(frame)), predicted
