"""Measured serving runs: read from a file, and fitted to: engines' own times and the intervals around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun, Skipped, agg_run
from raysearch.fidelity.calibration.engines import (
    fit_engine,
    fitted_to,
    held_out_times,
    shapes_of,
    stating_their_batch,
    steps_of,
)
from raysearch.fidelity.calibration.inferencex_results import serving_frame
from raysearch.fidelity.calibration.intervals import serving_intervals
from raysearch.fidelity.calibration.measured_tables import LARGEST_MEASURED, check_names, read_text
from sim.arrays import Floats
from sim.json_object import JsonFields, JsonObject

RUNS_FILE = "endtoend_ttft_tpot.csv"
RUNS_OF_MANY = "runs.csv"
"""The same of several machines, which the column "system" names."""
_COLUMNS = ("id", "backend", "backend_version", "model_path", "mode", "gemm_quant_mode")
_NUMBERS = ("isl", "osl", "silicon_tpot_ms")
LEAST_JUDGED = 40
"""Runs below which no interval is fitted: it is the outermost tenth of them."""
_LOOSE_NUMBERS = ("concurrency", "batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def read_serving_runs(directory: Path, hardware: str = "") -> pd.DataFrame | None:
    """The serving runs of endtoend_ttft_tpot.csv, or of runs.csv beside; None if there is neither.

    Args:
        directory: Folder of the file.
        hardware: Machine whose rows are meant where a column "system" names several (gb200 is gb200_nvl72's).

    Raises:
        InputError: The file cannot be read, lacks a column, or holds an impossible value.
    """
    path = _runs_path(directory)
    if path is None:
        return None
    if path.is_file() and _is_published(path):
        frame = serving_frame(path)
        return pd.DataFrame(frame[frame["system"] == hardware]).reset_index(drop=True) if hardware else frame
    raw = read_text(path)
    if hardware and "system" in raw.columns:
        ours = [hardware == name or hardware.startswith(f"{name}_") for name in raw["system"]]
        raw = pd.DataFrame(raw[np.array(ours, dtype=bool)]).reset_index(drop=True)
    if missing := [name for name in (*_COLUMNS, *_NUMBERS, *_LOOSE_NUMBERS) if name not in raw.columns]:
        raise InputError(f"{path}: no column {missing[0]!r}")
    check_names(path, "backend", raw["backend"])
    frame = raw.copy()
    for name in raw.columns:
        if name in _NUMBERS or name in _LOOSE_NUMBERS or name.startswith(("decode_", "prefill_")):
            needed, whole = name in _NUMBERS, not name.endswith("_ms")
            frame[name] = number_cells(path, name, list(raw[name]), needed=needed, whole=whole)
    return frame


def _is_published(path: Path) -> bool:
    """Whether it has InferenceX's own fields."""
    return path.suffix == ".json" or "spec_method" in read_text(path).columns


def _runs_path(directory: Path) -> Path | None:
    if directory.is_file():
        return directory
    return next((each for name in (RUNS_FILE, RUNS_OF_MANY) if (each := directory / name).exists()), None)


def names_machines(directory: Path) -> bool:
    """Whether the runs of a folder say on which machine they ran."""
    path = _runs_path(directory)
    return path is not None and (_is_published(path) or "system" in read_text(path).columns)


def number_cells(path: Path, column: str, cells: Sequence[str], *, needed: bool, whole: bool) -> Floats:
    """[rows] the numbers of a column read as text; NaN for an empty cell unless every row needs one above 0.

    Raises:
        InputError: A cell that holds no such number.
    """
    values = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        if not needed and cell.strip().lower() in ("", "nan"):
            continue
        try:
            values[row] = float(cell)
        except ValueError:
            values[row] = np.inf
        bad = not abs(values[row]) <= LARGEST_MEASURED or (whole and values[row] % 1)
        if bad or (needed and values[row] <= 0):
            expected = (
                f"a {'whole ' * whole}number {'above 0' if needed else 'or nothing'}, at most {LARGEST_MEASURED:,}"
            )
            raise InputError(f"{path}, line {row + 2}, column {column}: expected {expected}, got {cell!r}")
    return values


def numbers_of(frame: pd.DataFrame, column: str) -> Floats:
    """[rows] a column as floats."""
    return np.asarray(frame[column], dtype=float)


def rows_by(keys: Iterable[Any]) -> dict[Any, NDArray[np.int64]]:
    """Row numbers of each key, keys in ascending order."""
    found: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return {key: np.array(found[key]) for key in sorted(found)}


def records(frame: pd.DataFrame) -> list[JsonObject]:
    """[rows] each row by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


class Runs(NamedTuple):
    """Rows that can be priced, the deployments behind them, and what is left out.

    Attributes:
        rows: [runs] as read.
        runs: The deployments.
        skipped: Rows that are not priced, by reason: their ids.
    """

    rows: pd.DataFrame
    runs: list[ServingRun]
    skipped: dict[str, list[str]]

    @property
    def reread(self) -> dict[str, list[str]]:
        """Ids of the runs that are not what their rows say word for word, by how they were read."""
        found: dict[str, list[str]] = {}
        for run, name in zip(self.runs, self.rows["id"], strict=True):
            for how in run.reread:
                found.setdefault(how, []).append(str(name))
        return found


def runs_of(rows: pd.DataFrame, read: Callable[[JsonFields], ServingRun | Skipped]) -> Runs:
    """The deployments of some rows, read one by one."""
    found = [read(row) for row in records(rows)]
    skipped: dict[str, list[str]] = {}
    for run, name in zip(found, rows["id"], strict=True):
        if isinstance(run, Skipped):
            skipped.setdefault(run.reason, []).append(str(name))
    known = np.array([isinstance(run, ServingRun) for run in found], dtype=bool)
    kept = pd.DataFrame(rows[known]).reset_index(drop=True)
    return Runs(kept, [run for run in found if isinstance(run, ServingRun)], skipped)


def agg_runs(frame: pd.DataFrame) -> Runs:
    """The aggregated runs."""
    return runs_of(pd.DataFrame(frame[frame["mode"] == "agg"]), agg_run)


def fit_serving(directory: Path, machine: MeasuredMachine) -> JsonObject | None:
    """Engine parameters with provenance, as the key "serving" of a coefficients file; None without serving runs.

    Runs whose kernels the calibration lacks are left out and counted; where none is left, the record says why.

    Raises:
        InputError: See `read_serving_runs`.
    """
    frame = read_serving_runs(directory, machine("vllm").name)
    if frame is None:
        return None
    rows, runs, _ = agg_runs(frame)
    if rows.empty:
        return None
    steps = steps_of(runs, machine)
    priced = np.flatnonzero(steps.priced)
    missing = {"unpredicted": len(runs) - len(priced)} if len(priced) < len(runs) else {}
    if not len(priced):
        why = f"each of its {len(runs)} runs needs a kernel that no file measures"
        return {"source": RUNS_FILE, **missing, "left_at_defaults": why}
    rows, runs, steps = pd.DataFrame(rows.iloc[priced]).reset_index(drop=True), [runs[i] for i in priced], steps[priced]
    measured = numbers_of(rows, "silicon_tpot_ms") / 1e3
    held_out = held_out_times(runs, steps, measured, shapes_of(runs))
    blind, fitted = steps.tpot_of_each_s(held_out), {}
    for name in sorted({run.engine for run in runs}):
        own = np.array([run.engine == name for run in runs])
        train = np.flatnonzero(own & fitted_to(runs))
        times = fit_engine(steps[train], measured[train])
        fitted[name] = {
            **{key: float(f"{value:.4g}") for key, value in asdict(times).items()},
            **_held_out(blind[own], measured[own]),
            "models": sorted({run.model.name for run in runs if run.engine == name}),
        }
    intervals = {"interval": serving_intervals(runs, steps, measured, held_out)} if len(runs) >= LEAST_JUDGED else {}
    return {
        "source": RUNS_FILE,
        **missing,
        "batch_not_stated": int((~stating_their_batch(runs)).sum()),
        **_held_out(blind, measured),
        "engines": fitted,
        **intervals,
    }


def _held_out(predicted: Floats, measured: Floats) -> JsonObject:
    """Rows and errors of predictions whose engine was fitted without their workload."""
    error = np.abs(predicted / measured - 1)
    if not len(error):
        return {"rows": 0, "mape": None, "median_ape": None}
    return {
        "rows": len(error),
        "mape": round(float(error.mean()), 4),
        "median_ape": round(float(np.median(error)), 4),
    }
