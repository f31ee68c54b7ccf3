"""Files of coefficients: what was fitted, to what, and how well it does on rows held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysearch.calibration.families import FITS, ranges
from raysearch.calibration.fit import as_data, cross_validated_predictions, errors
from raysearch.calibration.predict import bare_roofline, series_of
from raysearch.calibration.serving import fit_serving
from raysearch.calibration.tables import FAMILIES, measured_us, read_table
from raysearch.errors import InputError
from raysearch.files import write_bytes
from sim.calibration import Calibration

LEAST_ROWS = 30
"""A family with fewer rows is left at the defaults: five folds of it would not say how well it fits."""


def fit_directory(
    directory: Path,
    provenance: Mapping[str, Any],
    light: Mapping[str, float],
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fits every family whose file lies in a folder.

    Args:
        directory: Holds CSV files as `raysearch.calibration.tables.FAMILIES` names them.
        provenance: Source and date, written with the coefficients.
        light: Peak rates of the machine, as `sim.catalog.load_speed_of_light` gives them.
        on_step: Called with what is about to be done.

    Returns:
        The content of a file of coefficients.

    Raises:
        InputError: No file at all, or a bad one.
    """
    if not directory.is_dir():
        raise InputError(f"no such folder: {directory}")
    series: dict[str, dict[str, Any]] = {}
    families: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        on_step(f"reading {FAMILIES[family].file}")
        frame = read_table(directory, family)
        if frame is None or len(frame) < LEAST_ROWS:
            why = "no file" if frame is None else f"only {len(frame)} rows, {LEAST_ROWS} are needed"
            families[family] = {"rows": 0, "file": FAMILIES[family].file, "left_at_defaults": why}
            continue
        on_step(f"fitting {family}: {len(frame):,} rows")
        fitted, figures = _fit(family, frame, light)
        series |= fitted
        content = (directory / FAMILIES[family].file).read_bytes()
        families[family] = {"file": FAMILIES[family].file, "sha256": hashlib.sha256(content).hexdigest(), **figures}
    if not series:
        names = ", ".join(family.file for family in FAMILIES.values())
        raise InputError(f"{directory} holds none of the files to fit: {names}")
    data = as_data(series, light)
    if serving := fit_serving(directory, Calibration("just fitted", data)):
        on_step(f"fitted engines to {serving.get('rows', 0)} serving runs")
        data["serving"] = serving
    return {"format": data.pop("format"), "provenance": dict(provenance), "families": families, **data}


def _fit(
    family: str, frame: pd.DataFrame, light: Mapping[str, float]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Series with their own errors, and the family's, both on rows held out from the fit."""
    predicted, measured = cross_validated_predictions(family, frame, light), measured_us(frame)
    names = np.array(series_of(family, frame))
    spans, series = ranges(family, frame), FITS[family](frame)
    for name, record in series.items():
        rows = names == name
        if not rows.any():  # what several series have in common
            rows = np.array([other.startswith(name + "/") for other in names])
            inside = [spans[other] for other in sorted(set(names[rows]))]
            spans[name] = {
                size: [min(s[size][0] for s in inside), max(s[size][1] for s in inside)] for size in inside[0]
            }
        record |= _brief(errors(predicted[rows], measured[rows])) | {"range": spans[name]}
    bare = errors(bare_roofline(family, frame), measured)["mape"]
    return series, {**_brief(errors(predicted, measured)), "bare_roofline_mape": round(bare, 4)}


def _brief(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value if name == "rows" else round(value, 4) for name, value in figures.items()}


def write_coefficients(path: Path, content: Mapping[str, Any], *, force: bool) -> bool:
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
            raise InputError(f"{path} exists and holds something else; give --force to replace it, or another --out")
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
    return True


def _same(path: Path, content: Mapping[str, Any]) -> bool:
    """Whether a file holds these coefficients; the day they were fitted does not count."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return _undated(found) == _undated(content)


def _undated(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    provenance = content.get("provenance")
    undated = {k: v for k, v in provenance.items() if k != "date"} if isinstance(provenance, Mapping) else provenance
    return {**content, "provenance": undated}
