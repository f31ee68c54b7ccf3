"""Files of coefficients: what was fitted, to what, and how well it does on rows held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_bytes
from raysearch.fidelity.calibration.deployments import MeasuredMachine
from raysearch.fidelity.calibration.fit import (
    Header,
    as_data,
    cross_validated,
    errors,
    inside_interval,
    interval,
    interval_group,
    interval_groups,
)
from raysearch.fidelity.calibration.kernel_families import FITS, ranges
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, measured_us, read_table, table_path
from raysearch.fidelity.calibration.mixer_tables import projections_us
from raysearch.fidelity.calibration.predict import bare_roofline, series_of
from raysearch.fidelity.calibration.serving_fit import fit_serving, numbers_of
from sim.config.files import LARGEST_JSON_BYTES
from sim.config.reading import parse_json, read_bytes
from sim.json_object import JsonFields, JsonObject
from sim.prices.calibration import Calibration
from sim.prices.machine import machine_of

LEAST_ROWS = 30
"""A family or series with fewer rows is left at the defaults: five folds would not say how well it fits."""


_OF_CHIP = {"speed_of_light": ("bf16_tflops", "fp8_tflops"), "machine": ("sms", "l2_mb")}
_SHARED = ("gemm", "attention_decode", "attention_prefill", "moe")
"""Families of kernels that a GPU runs alone."""


def fit_directory(
    directory: Path,
    provenance: JsonFields,
    header: Header,
    machine: Callable[[Calibration], MeasuredMachine],
    on_step: Callable[[str], None] = lambda _: None,
    sister: Calibration | None = None,
) -> JsonObject:
    """Fits every family whose file lies in a folder.

    Args:
        directory: Holds CSV files as `raysearch.fidelity.calibration.measured_tables.MEASURED_FAMILIES` names them.
        provenance: Source and date, written with the coefficients.
        header: The machine, as `sim.config.catalog.load_machine_header` gives it.
        machine: The machine under coefficients just fitted, on which serving runs are priced.
        on_step: Called with what is about to be done.
        sister: Of a machine with the same chip, whose kernels are taken where the folder has none of an engine and
            format; they count as extrapolated.

    Returns:
        The content of a file of coefficients.

    Raises:
        InputError: No file at all, or a bad one; the sister's chip is another.
    """
    if not directory.is_dir():
        raise InputError(f"no such folder: {directory}")
    series: dict[str, JsonObject] = {}
    families: dict[str, JsonObject] = {}
    for family in MEASURED_FAMILIES:
        on_step(f"reading {MEASURED_FAMILIES[family].file}")
        frame = read_table(directory, family)
        if frame is None or len(frame) < LEAST_ROWS:
            why = "no file" if frame is None else _too_few(len(frame))
            families[family] = {"rows": 0, "file": MEASURED_FAMILIES[family].file, "left_at_defaults": why}
            continue
        if family == "sparse_attention":
            frame = with_projections(frame, Calibration("just fitted", as_data(series, header)))
            if np.isnan(numbers_of(frame, "projections_us")).all():
                why = f"needs {MEASURED_FAMILIES['gemm'].file} beside it, which prices projections"
                families[family] = {"rows": 0, "file": MEASURED_FAMILIES[family].file, "left_at_defaults": why}
                continue
        on_step(f"fitting {family}: {len(frame):,} rows")
        fitted, figures = _fit(family, frame, header)
        if not fitted:
            reasons = "; ".join(f"{name} {why}" for name, why in figures["series_left_at_defaults"].items())
            families[family] = {"rows": 0, "file": MEASURED_FAMILIES[family].file, "left_at_defaults": reasons}
            continue
        series |= fitted
        path = table_path(directory, family)
        families[family] = {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            **figures,
        }
    if not series:
        raise InputError(f"{directory} {_nothing_to_fit(families)}")
    if sister is not None:
        series |= kernels_of_sister(series, header, sister)
    data = as_data(series, header)
    if serving := fit_serving(directory, machine(Calibration("just fitted", data))):
        on_step(f"fitted engines to {serving.get('rows', 0)} serving runs")
        data["serving"] = serving
    return {"format": data.pop("format"), "provenance": dict(provenance), "families": families, **data}


def kernels_of_sister(series: Mapping[str, JsonFields], header: Header, sister: Calibration) -> dict[str, JsonObject]:
    """Series of a machine with the same chip, of engines and formats of which there is none here.

    Memory may be faster or slower: coefficients are relative to it.

    Raises:
        InputError: Its peaks or its multiprocessors are others.
    """
    for part, names in _OF_CHIP.items():
        other = sister.data[part]
        for name in names:
            if header[part][name] != other[name]:
                raise InputError(
                    f"{sister.name} is no sister: its {name} is {other[name]:g}, not {header[part][name]:g}"
                )
    known = {_measured(name) for name in series}
    return {
        name: {**record, "measured_on": sister.name}
        for name, record in sister.series.items()
        if name.split("/")[0] in _SHARED and _measured(name) not in known and "measured_on" not in record
    }


def _measured(series: str) -> tuple[str, ...]:
    """What a series is of; of experts and GEMMs family, engine and format: an engine has several kernels of one."""
    parts = series.split("/")
    return {"moe": (*parts[:2], parts[-1]), "gemm": tuple(parts[:3])}.get(parts[0], tuple(parts))


def with_projections(frame: pd.DataFrame, calibration: Calibration) -> pd.DataFrame:
    """Rows of modules, with what the machine's GEMMs say of their projections as a column: NaN where they say none."""
    return frame.assign(projections_us=projections_us(frame, calibration))


def _too_few(rows: int) -> str:
    return f"has {rows} row{'s' if rows != 1 else ''}, {LEAST_ROWS} are needed"


def _nothing_to_fit(families: Mapping[str, JsonFields]) -> str:
    """Why no series came out of a folder: what is wrong with the files it has, or which it could have."""
    found = [f"{f['file']} {f['left_at_defaults']}" for f in families.values() if f["left_at_defaults"] != "no file"]
    if found:
        return f"contains too few rows to fit: {'; '.join(found)}"
    return f"contains none of the files to fit: {', '.join(family.file for family in MEASURED_FAMILIES.values())}"


def _fit(family: str, frame: pd.DataFrame, header: Header) -> tuple[dict[str, JsonObject], JsonObject]:
    """Series with their own errors, and the family's, both on rows held out from the fit.

    A series that cannot be judged is left out, and so are the family's rows behind it.
    """
    predicted, measured = cross_validated(family, frame, header), measured_us(frame)
    names, groups = np.array(series_of(family, frame)), interval_groups(family, frame)
    spans, series = ranges(family, frame), FITS[family](frame, machine_of(header))
    left_out: dict[str, str] = {}
    kept, light = np.ones(len(frame), dtype=bool), bare_roofline(family, frame, header)
    for name, record in list(series.items()):
        rows = names == name
        if not rows.any():  # what several series have in common
            rows = np.array([other.startswith(name + "/") for other in names])
            inside = [spans[other] for other in sorted(set(names[rows]))]
            spans[name] = {
                size: [min(s[size][0] for s in inside), max(s[size][1] for s in inside)] for size in inside[0]
            }
        figures = errors(predicted[rows], measured[rows])
        if why := _unfit(record, int(rows.sum()), figures, errors(light[rows], measured[rows])["mape"], left_out):
            left_out[name] = why
            kept &= ~rows
            del series[name]
        record |= _brief(figures) | {"range": spans[name]}
        group = interval_group(family, name)
        for key, alike in (("interval", groups == group), ("interval_of_few", groups == f"{group} few")):
            if (alike := alike & np.isfinite(predicted)).any():
                record[key] = interval(predicted[alike], measured[alike])
    bare = errors(light[kept], measured[kept])["mape"]
    inside = float(inside_interval(family, frame, predicted)[kept].mean()) if kept.any() else None
    figures = {**errors(predicted[kept], measured[kept]), "coverage": inside, "bare_roofline_mape": bare}
    return series, _brief(figures) | ({"series_left_at_defaults": left_out} if left_out else {})


def _unfit(record: JsonFields, rows: int, figures: JsonFields, bare: float, left_out: Mapping[str, str]) -> str:
    """Why a series is left at the defaults, or "". One that only departs from its parent needs fewer rows."""
    if parent := record.get("parent"):
        if parent in left_out:
            return f"departs from {parent}, which is left at the defaults"
    elif rows < LEAST_ROWS:
        return _too_few(rows)
    if figures["mape"] is None or not np.isfinite(figures["mape"]):
        return "could not be cross-validated: too many of its rows share a shape"
    if figures["mape"] > bare:
        return f"errs by {figures['mape']:.0%} where rows are held out, the bare roofline by {bare:.0%}"
    return ""


def _brief(figures: JsonFields) -> JsonObject:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def write_coefficients(path: Path, content: JsonFields, *, force: bool) -> bool:
    """Writes a file of coefficients unless it already says the same; whether it wrote.

    Raises:
        InputError: The file exists with other content and `force` is not given.
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    text = text.replace('},"', '},\n"') + "\n"  # a line per series, so that changes can be read
    if path.exists():
        if _same(path, content):
            return False
        if not force:
            raise InputError(f"{path} exists and has other content; give --set force to replace it, or another --out")
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
    return True


def _same(path: Path, content: JsonFields) -> bool:
    """Whether a file holds these coefficients; the day they were fitted does not count."""
    try:
        found = parse_json(read_bytes(path, LARGEST_JSON_BYTES))
    except (OSError, ValueError):
        return False
    return _undated(found) == _undated(content)


def _undated(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    provenance = content.get("provenance")
    undated = {k: v for k, v in provenance.items() if k != "date"} if isinstance(provenance, Mapping) else provenance
    return {**content, "provenance": undated}
