"""Fits whole families and cross-validates them through the very code that will price kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.kernel_families import FITS, grids_of
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, measured_us
from raysearch.fidelity.calibration.predict import predict, series_of
from sim.arrays import Floats
from sim.json_object import JsonFields, JsonObject
from sim.prices.calibration import FEW_EXPERTS, FORMAT, Calibration
from sim.prices.machine import machine_of

H100_SXM: Mapping[str, Mapping[str, float]] = {
    "speed_of_light": {
        "bf16_tflops": 989.0,
        "fp8_tflops": 1979.0,
        "hbm_gb_per_s": 3350.0,
        "nvlink_gb_per_s": 450.0,
        "network_gb_per_s": 50.0,
    },
    "machine": {"sms": 132, "l2_mb": 50.0, "node_gpus": 8},
}
"""A header: peaks no time may beat, and counts. [published] H100 SXM datasheet, NVLink 4 one way, NDR InfiniBand."""
Header = Mapping[str, Mapping[str, float]]


def as_data(series: Mapping[str, JsonFields], header: Header = H100_SXM) -> JsonObject:
    """What `sim.prices.calibration.Calibration` reads: series, the grids they lie on and the machine."""
    return {
        "format": FORMAT,
        **{name: dict(header[name]) for name in H100_SXM},
        "grids": grids_of(series.values()),
        "series": dict(series),
    }


def fit_family(family: str, frame: pd.DataFrame, header: Header = H100_SXM) -> Calibration:
    """Coefficients of one family from all rows of its frame (as `tables.read_table` gives it)."""
    return Calibration(family, as_data(FITS[family](frame, machine_of(header)), header))


def fold_numbers(family: str, frame: pd.DataFrame, folds: int = 5, seed: int = 0) -> NDArray[np.int64]:
    """[rows] fold of each row; rows that share the family's keys share a fold."""
    group = frame.groupby(list(MEASURED_FAMILIES[family].keys)).ngroup().to_numpy()
    return (np.random.default_rng(seed).permutation(group.max() + 1) % folds)[group]


def cross_validated(
    family: str, frame: pd.DataFrame, header: Header = H100_SXM, *, folds: int = 5, seed: int = 0
) -> Floats:
    """[rows] microseconds, each from a fit that saw no row of its group; NaN for a series found in one fold only."""
    fold = fold_numbers(family, frame, folds, seed)
    predicted = np.full(len(frame), np.nan)
    for held_out in np.unique(fold):
        test = fold == held_out
        if not test.all():
            predicted[test] = predict(family, frame.loc[test], fit_family(family, frame.loc[~test], header))
    return predicted


OUTSIDE = 0.05
"""Share of rows left out on either side of an interval."""


def interval(predicted: Floats, measured: Floats, outside: float = OUTSIDE) -> list[float]:
    """Factors on a prediction between which a further measured time lies in 90 % of cases.

    Source: split conformal prediction (Vovk et al., 2005): with n rows the (0.05 (n + 1))th smallest ratio, and as
    many from the top, so that few rows make a wide interval.

    Args:
        predicted: [n] seconds.
        measured: [n] the same.
        outside: Share of the cases on either side, if not a twentieth.
    """
    ratio = np.sort(measured / predicted)
    beyond = max(int(outside * (len(ratio) + 1)), 1)
    return [float(f"{value:.4g}") for value in (ratio[beyond - 1], ratio[-beyond])]


_PARTS = {"collectives": 3}
"""Leading parts of a series' name that share an interval, if not all of them: versions of NCCL have few rows."""


def interval_group(family: str, series: str) -> str:
    """The series whose interval another shares; see `interval_groups`."""
    return "/".join(series.split("/")[: _PARTS.get(family)])


def interval_groups(family: str, frame: pd.DataFrame) -> NDArray[np.str_]:
    """[rows] the rows that share an interval: a series, of collectives a library.

    Of experts, those of GPUs that hold few are apart.
    """
    names = np.array([interval_group(family, name) for name in series_of(family, frame)])
    if family == "moe":
        few = (frame["num_experts"] / frame["moe_ep_size"]).to_numpy() <= FEW_EXPERTS
        names = np.where(few, np.char.add(names, " few"), names)
    return names


def inside_interval(family: str, frame: pd.DataFrame, predicted: Floats) -> NDArray[np.bool_]:
    """[rows] whether a row held out lies in the 90 % interval that the rows of the other folds give its group.

    So neither its prediction nor its interval has seen it. False where there is no prediction.
    """
    groups, fold = interval_groups(family, frame), fold_numbers(family, frame)
    measured, found = measured_us(frame), np.zeros(len(frame), dtype=bool)
    for name in np.unique(groups):
        for held_out in np.unique(fold):
            test = (groups == name) & (fold == held_out)
            others = (groups == name) & (fold != held_out) & np.isfinite(predicted)
            if test.any() and others.any():
                low, high = interval(predicted[others], measured[others])
                ratio = measured[test] / predicted[test]
                found[test] = (low <= ratio) & (ratio <= high)
    return found


def errors(predicted: Floats, measured: Floats) -> JsonObject:
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
