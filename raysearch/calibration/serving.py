"""Fits the four parameters that an engine adds to its kernels, from measured serving runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.calibration.deployments import ServingRow, agg_deployment
from raysearch.calibration.tables import LARGEST, check_names, read_text
from raysearch.errors import InputError
from sim.prices.calibration import Calibration, MissingSeries
from sim.serving.batching import Engine, Work, steady_work, time_per_token
from sim.serving.deployment import MEMORY_POLICIES
from sim.serving.serving_kernels import FittedKernels

Floats = NDArray[np.float64]

FILE = "endtoend_ttft_tpot.csv"
_PARAMETERS = ("step_s", "sequence_s", "prefill_share", "launch_layer_s")
NO_OVERHEAD = Engine("unknown", 0.0, 0.0, 1.0)
_COLUMNS = ("id", "backend", "backend_version", "model_path", "mode", "gemm_quant_mode")
_NUMBERS = ("isl", "osl", "silicon_tpot_ms")
_LOOSE_NUMBERS = ("concurrency", "batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def read_runs(directory: Path) -> pd.DataFrame | None:
    """The serving runs of endtoend_ttft_tpot.csv; None if there is no such file.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds an impossible value.
    """
    path = directory / FILE
    if not path.exists():
        return None
    raw = read_text(path)
    if missing := [name for name in (*_COLUMNS, *_NUMBERS, *_LOOSE_NUMBERS) if name not in raw.columns]:
        raise InputError(f"{path}: no column {missing[0]!r}")
    check_names(path, "backend", raw["backend"])
    frame = raw.copy()
    for name in raw.columns:
        if name in _NUMBERS or name in _LOOSE_NUMBERS or name.startswith(("decode_", "prefill_")):
            needed, whole = name in _NUMBERS, not name.endswith("_ms")
            frame[name] = number_cells(path, name, list(raw[name]), needed=needed, whole=whole)
    return frame


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
        bad = not abs(values[row]) <= LARGEST or (whole and values[row] % 1)
        if bad or (needed and values[row] <= 0):
            expected = f"a {'whole ' * whole}number {'above 0' if needed else 'or nothing'}, at most {LARGEST:,}"
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


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """[rows] each row by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def agg_runs(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[ServingRow]]:
    """The aggregated runs that can be priced, and the deployments behind them."""
    rows = pd.DataFrame(frame[frame["mode"] == "agg"])
    deployments = [agg_deployment(row) for row in records(rows)]
    known = np.array([deployment is not None for deployment in deployments], dtype=bool)
    runs = pd.DataFrame(rows[known]).reset_index(drop=True)
    return runs, [deployment for deployment in deployments if deployment is not None]


def works_of(rows: Sequence[ServingRow], calibration: Calibration, hbm_bytes: float) -> list[Work | None]:
    """The kernels of each deployment, before any engine's own time; None where the calibration lacks one of them."""
    kernels = {backend: FittedKernels(calibration, backend) for backend in {row.backend for row in rows}}
    return [_work(row, kernels[row.backend], hbm_bytes) for row in rows]


def _work(row: ServingRow, kernels: FittedKernels, hbm_bytes: float) -> Work | None:
    policy = MEMORY_POLICIES.get(row.backend, MEMORY_POLICIES["vllm"])
    try:
        return steady_work(row.deployment, kernels, hbm_bytes, policy)
    except MissingSeries:
        return None


def stating_their_batch(rows: Sequence[ServingRow]) -> NDArray[np.bool_]:
    """[rows] whether a run says how many requests could run at once; engines are fitted to those alone."""
    return np.array([row.states_its_batch for row in rows], dtype=bool)


def fit_serving(directory: Path, calibration: Calibration, hbm_bytes: float) -> dict[str, Any] | None:
    """Engine parameters with provenance, as the key "serving" of a coefficients file; None without serving runs.

    Runs whose kernels the calibration lacks are left out and counted; where none is left, the record says why.

    Raises:
        InputError: See `read_runs`.
    """
    frame = read_runs(directory)
    if frame is None:
        return None
    runs, rows = agg_runs(frame)
    if runs.empty:
        return None
    found = works_of(rows, calibration, hbm_bytes)
    priced = np.array([work is not None for work in found])
    missing = {"unpredicted": int((~priced).sum())} if not priced.all() else {}
    if not priced.any():
        why = f"each of its {len(rows)} runs needs a kernel that no file measures"
        return {"source": FILE, **missing, "left_at_defaults": why}
    runs, works = pd.DataFrame(runs[priced]).reset_index(drop=True), [work for work in found if work is not None]
    rows, measured = [rows[i] for i in np.flatnonzero(priced)], numbers_of(runs, "silicon_tpot_ms") / 1e3
    blind, fitted = cross_validated_tpot(runs, rows, works), {}
    for name in sorted({row.engine for row in rows}):
        own = np.array([row.engine == name for row in rows])
        train = np.flatnonzero(own & stating_their_batch(rows))
        engine = fit_engine(name, [works[i] for i in train], measured[train])
        fitted[name] = {
            **{key: float(f"{value:.4g}") for key, value in asdict(engine).items() if key != "name"},
            **_held_out(blind[own], measured[own]),
        }
    return {
        "source": FILE,
        **missing,
        "batch_not_stated": int((~stating_their_batch(rows)).sum()),
        **_held_out(blind, measured),
        "engines": fitted,
    }


def _held_out(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Rows and errors of predictions whose engine was fitted without their workload."""
    error = np.abs(predicted / measured - 1)
    if not len(error):
        return {"rows": 0, "mape": None, "median_ape": None}
    return {
        "rows": len(error),
        "mape": round(float(error.mean()), 4),
        "median_ape": round(float(np.median(error)), 4),
    }


def engines_of(calibration: Calibration) -> Mapping[str, Engine]:
    """The fitted engines of a coefficients file, by name; empty if it was made without serving runs."""
    engines = calibration.data.get("serving", {}).get("engines", {})
    return {name: Engine(name, *(record.get(field, 0.0) for field in _PARAMETERS)) for name, record in engines.items()}


def engine_for(engines: Mapping[str, Engine], name: str) -> Engine:
    """The engine of that name, of the same family, or one without time of its own."""
    family = name.partition("<")[0]
    related = [engine for known, engine in engines.items() if known.partition("<")[0] == family]
    return engines.get(name) or (related[0] if related else next(iter(engines.values()), NO_OVERHEAD))


def cross_validated_tpot(runs: pd.DataFrame, rows: Sequence[ServingRow], works: Sequence[Work | None]) -> Floats:
    """[runs] seconds per output token, each with engine parameters fitted without its model, ISL and OSL.

    NaN where the kernels are not known.
    """
    measured = numbers_of(runs, "silicon_tpot_ms") / 1e3
    names = np.array([row.engine for row in rows])
    group = np.zeros(len(runs), dtype=np.int64)
    for number, index in enumerate(rows_by(zip(runs["model_path"], runs["isl"], runs["osl"], strict=True)).values()):
        group[index] = number
    predicted, priced = np.full(len(runs), np.nan), {row: work for row, work in enumerate(works) if work is not None}
    stating = stating_their_batch(rows)
    for name in sorted(set(names)):
        own = np.array([row for row in priced if names[row] == name], dtype=np.int64)
        groups = np.unique(group[own])
        fold = dict(zip(groups, np.random.default_rng(0).permutation(len(groups)) % 5, strict=True))
        folds = np.array([fold[g] for g in group[own]])
        for held_out in np.unique(folds):
            test, train = own[folds == held_out], own[(folds != held_out) & stating[own]]
            engine = fit_engine(name, [priced[i] for i in train], measured[train])
            predicted[test] = [time_per_token(priced[i], engine) for i in test]
    return predicted


_CUT = 1.0
"""Largest |log error| that moves the fit: a run whose stated concurrency is not what ran must not bend the rest."""
_UNITS = (1e-3, 1e-5, 1.0, 1e-5)
"""Seconds or share that count as one in the fit, in the order of an engine's parameters."""
_PRIORS = (3e-3, 3e-4, 1e-2, 1e-5)
"""Weights that pull prefill_share to one and the others to zero, where rows do not say."""
_STARTS = ((0.5, 0.2, 1.0, 6.0), (2.0, 1.0, 0.6, 20.0), (0.1, 0.1, 1.3, 2.0))


def fit_engine(name: str, works: Sequence[Work], measured_s: Floats) -> Engine:
    """The engine whose time per output token is nearest to the measured one, in mean absolute log error."""
    from scipy.optimize import minimize

    if not len(works):
        return Engine(name, 0.0, 0.0, 1.0)
    running, decode_s, prompts, waits_s, layers = np.array(
        [(w.running, w.decode_s, w.others_prompts / w.together, w.others_prompts * w.prompt_s, w.layers) for w in works]
    ).T

    def loss(parameters: Floats) -> float:
        step_s, sequence_s, share, launch_s = np.abs(parameters) * _UNITS
        launches_s = prompts * np.maximum(0, layers * launch_s - decode_s)
        predicted = decode_s + step_s + sequence_s * running + share * waits_s + launches_s
        error = np.minimum(np.abs(np.log(predicted / measured_s)), _CUT).mean()
        return float(error + np.dot(_PRIORS, np.abs(np.abs(parameters) - (0, 0, 1, 0))))

    options = {"maxiter": 3000, "maxfev": 3000}
    found = [minimize(loss, start, method="Nelder-Mead", options=options) for start in _STARTS]
    best = min(found, key=lambda result: result.fun)
    return Engine(name, *(float(value) for value in np.abs(best.x) * _UNITS))
