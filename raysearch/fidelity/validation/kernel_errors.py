"""Kernel and collective families: rows of a CSV file, priced by the fitted series or the nearest one there is."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.coefficients import with_projections
from raysearch.fidelity.calibration.fit import cross_validated, inside_interval
from raysearch.fidelity.calibration.measured_tables import (
    MEASURED_FAMILIES,
    check_rows,
    long_form,
    measured_us,
    table_path,
    usable_rows,
    windowed_path,
)
from raysearch.fidelity.calibration.predict import SHORT_DTYPE, bare_roofline, predict, series_of
from raysearch.fidelity.validation.error_figures import Comparison, DegreeErrors, MoreFigures
from sim.arrays import Floats
from sim.prices.calibration import Calibration
from sim.prices.kernel_fallbacks import AITER

_KNOWN: dict[str, tuple[str, ...]] = {
    "framework": ("trtllm", "vllm", "sglang", AITER),
    "kv_cache_dtype": ("bfloat16", "fp8"),
    "attn_dtype": ("bfloat16", "fp8"),
    "dtype": ("bfloat16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
    "mode": ("low_latency", "normal"),
    "op": ("all_reduce", "all_gather", "reduce_scatter", "alltoall"),
    "scope": ("intra_node", "inter_node"),
}
"""Values of the closed columns of the CSV files; another value is read as the nearest of them."""
_ALIKE = {"half": "bfloat16", "float16": "bfloat16", "bf16": "bfloat16", "fp16": "bfloat16", "int8": "fp8"}
_SERIES_COLUMNS: dict[str, tuple[str, ...]] = {
    "gemm": ("framework", "dtype", "kernel_source"),
    "attention_decode": ("framework", "kv_cache_dtype"),
    "attention_prefill": ("framework", "attn_dtype", "kv_cache_dtype"),
    "mla_decode": ("kv_cache_dtype",),
    "moe": ("framework", "kernel_source", "dtype"),
    "collectives": ("op", "source", "dtype"),
    "moe_alltoall_deepep": ("mode", "side", "comm_sms"),
    "send_recv": ("scope",),
}
"""Columns behind the parts of a series' name, in order, of families whose unknown kernels the nearest known price."""


def compare_family(
    name: str, family: str, directory: Path, calibration: Calibration, *, held_out: bool = False
) -> Comparison | None:
    """Predictions for every row of a file; None if the folder does not have it.

    Args:
        name: Its key in the report: the family, or the file of its kernels under a sliding window.
        family: Key in `raysearch.fidelity.calibration.measured_tables.MEASURED_FAMILIES`.
        directory: Folder with the CSV files.
        calibration: Coefficients.
        held_out: Predict each row by a fit of this folder that did not see its group, instead of by `calibration`.

    Raises:
        InputError: A file that cannot be used.
    """
    frame, note = read_family(directory, family)
    windowed = MEASURED_FAMILIES[family].windowed.startswith(name)
    if frame is None or (windowed and windowed_path(directory, family) is None):
        return None
    header = calibration.data
    if family == "sparse_attention":
        frame = with_projections(frame, calibration)
    inside, extra = None, MoreFigures()
    reread: dict[str, list[str]] = {}
    if held_out:
        predicted = cross_validated(family, frame, header)
        inside = inside_interval(family, frame, predicted)
        if family == "moe":
            extra["by_expert_parallel_degree"] = _by_degree(frame, predicted, inside)
    else:
        known = as_fitted(family, frame, calibration)
        for number, (own, priced) in enumerate(zip(series_of(family, frame), series_of(family, known), strict=True)):
            if own != priced:
                reread.setdefault(f"{own} priced as {priced}", []).append(f"row {number + 1}")
        predicted = predict(family, known, calibration)
    groups = MEASURED_FAMILIES[family].groups
    if MEASURED_FAMILIES[family].windowed:
        rows = (frame["window_size"] > 0).to_numpy() == windowed
        frame, predicted, inside = frame.loc[rows], predicted[rows], None if inside is None else inside[rows]
    return Comparison(
        name,
        frame,
        measured_us(frame),
        predicted,
        bare_roofline(family, frame, header),
        groups,
        note=note,
        inside=inside,
        reread=reread,
        extra=extra,
    )


def _by_degree(frame: pd.DataFrame, predicted: Floats, inside: NDArray[np.bool_]) -> list[DegreeErrors]:
    """Bias and share inside the 90 % interval of MoE layers, by their degree of expert parallelism."""
    degree, ratio = frame["moe_ep_size"].to_numpy(), predicted / measured_us(frame)
    found: list[DegreeErrors] = []
    for low, high in ((1, 1), (2, 8), (16, 32), (64, None)):
        rows = (degree >= low) & (degree <= (high or np.inf)) & np.isfinite(predicted)
        if rows.any():
            name = f"{low}" if low == high else f"{low} to {high}" if high else f"{low} and more"
            bias, coverage = float(ratio[rows].mean() - 1), float(inside[rows].mean())
            found.append({"degree": name, "rows": int(rows.sum()), "bias": bias, "coverage": coverage})
    return found


def read_family(directory: Path, family: str) -> tuple[pd.DataFrame | None, str]:
    """The rows of a family in long form, and what was done to those that no schema foresees."""
    path, schema = table_path(directory, family), MEASURED_FAMILIES[family].schema
    if not path.exists():
        return None, ""
    notes: list[str] = []
    frames: list[pd.DataFrame] = []
    for each in filter(None, (path, windowed_path(directory, family))):
        raw, beside = _known_rows(family, each)
        notes += beside
        frames.append(check_rows(each, raw, schema))
    return long_form(family, pd.concat(frames, ignore_index=True)), "; ".join(dict.fromkeys(notes))


def _known_rows(family: str, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a file with the formats and engines that are known nearest to its own, and what was done to them."""
    raw, notes = usable_rows(family, path)
    if family == "collectives" and "num_nodes" in raw.columns:
        inside = np.array([cell.strip() in ("1", "1.0", "") for cell in raw["num_nodes"]], dtype=bool)
        if not inside.all() and inside.any():
            notes.append(
                f"{int((~inside).sum())} rows across nodes left out: the tables contain collectives of one node"
            )
            raw = pd.DataFrame(raw[inside])
    changed = np.zeros(len(raw), dtype=bool)
    for column, known in _KNOWN.items() if family in _SERIES_COLUMNS else ():
        if (
            column not in raw.columns
            or column not in MEASURED_FAMILIES[family].schema.model_fields
            or column == "scope"
        ):
            continue
        if family == "collectives" and column == "dtype":  # any text: a version's own correction or the library's
            continue
        fixed = [nearest(value, known) for value in raw[column]]
        changed |= np.array([new != old for new, old in zip(fixed, raw[column], strict=True)], dtype=bool)
        raw[column] = fixed
    if changed.any():
        notes.append(f"{int(changed.sum())} rows with unknown values were read as the nearest known ones")
    return raw, notes


def nearest(value: str, known: tuple[str, ...]) -> str:
    """The known value that is equal, alike or spelt most nearly so."""
    value = _ALIKE.get(value, value)
    return value if value in known else max(known, key=lambda other: SequenceMatcher(None, value, other).ratio())


def as_fitted(family: str, frame: pd.DataFrame, calibration: Calibration) -> pd.DataFrame:
    """The frame with the names of series that were fitted, where its own were not."""
    if family not in _SERIES_COLUMNS:
        return frame
    frame, fitted = frame.copy(), [name for name in calibration.series if name.startswith(f"{family}/")]
    names = np.array(series_of(family, frame))
    for name in sorted(set(names) - set(fitted)):
        if family == "collectives" and "/".join(name.split("/")[:3]) in fitted:
            continue  # a version without a correction of its own is priced as its library
        rows = names == name
        substitute = nearest_series(name, fitted)
        if substitute is None:
            continue
        for column, part in zip(_SERIES_COLUMNS[family], substitute.split("/")[1:], strict=False):
            if column == "side":
                continue
            frame.loc[rows, column] = _cell(column, part, frame[column].dtype.kind)
    return frame


def _cell(column: str, part: str, kind: str) -> str | int:
    if column == "scope":
        return f"{part}_node"
    if kind in "iu":
        return int(part)
    longer = {short: long for long, short in SHORT_DTYPE.items() if long in _KNOWN["dtype"]}
    return longer.get(part, part)


def nearest_series(name: str, fitted: list[str]) -> str | None:
    """The fitted series that shares most of a name's parts, numbers and spellings counting by their nearness."""
    parts = name.split("/")

    def similarity(other: str) -> float:
        theirs = other.split("/")
        pairs = list(zip(parts, theirs, strict=False))
        return sum(_similarity(mine, yours) for mine, yours in pairs) - abs(len(parts) - len(theirs))

    return max(fitted, key=similarity, default=None)


def _similarity(mine: str, yours: str) -> float:
    if mine == yours:
        return 2.0
    if mine.isdigit() and yours.isdigit():
        return 1 / (1 + abs(int(mine) - int(yours)))
    return SequenceMatcher(None, mine, yours).ratio()
