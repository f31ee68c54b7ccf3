"""Published throughputs of endtoend.csv: saturated servers, servers under load, prefill and decode deployments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysearch.calibration.deployments import known_model
from raysearch.calibration.serving import engine_for, engines_of, number_cells, numbers_of, records, rows_by
from raysearch.calibration.tables import read_text
from raysearch.errors import InputError
from raysearch.validation.figures import Comparison, figures
from raysearch.validation.light import light_prompt_s, light_step_s
from sim.layers.model import Model
from sim.prices.calibration import Calibration, MissingSeries
from sim.prices.dtypes import Dtype
from sim.serving.batching import Engine, prefill_time, serve
from sim.serving.deployment import MEMORY_POLICIES, Deployment, MemoryPolicy, WeightFormat, sequence_limit
from sim.serving.serving_kernels import FittedKernels
from sim.serving.serving_step import Batch, step_time

FILE = "endtoend.csv"
_COLUMNS = ("model", "precision", "framework", "parallelism", "batch_or_concurrency", "isl", "osl", "phase")
_NUMBERS = ("isl", "osl", "tok_s_per_gpu", "num_gpus")
_ENDLESS = 1_000_000
"""Requests that keep any server full."""
MTP_ACCEPTED = 0.6
"""[published] Share of drafted tokens accepted, where a row says that multi-token prediction was simulated."""
TENSORRT_LLM_TABLES = replace(MEMORY_POLICIES["trtllm"], share=0.95)
"""[published] The benchmarks of TensorRT-LLM's perf-overview.md set kv_cache_free_gpu_mem_fraction to 0.95."""
_BACKENDS = {"sglang": "sglang", "vllm": "vllm"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens per second and GPU, fitted and by the bare roofline, and the batch behind them."""

    tokens_per_s_per_gpu: float
    roofline: float
    running: float


def compare_published(directory: Path, calibration: Calibration, hbm_bytes: float) -> Comparison | None:
    """Predicted tokens/s/GPU of the published rows; None if the folder has no such file.

    Nothing was fitted to these rows.

    Raises:
        InputError: A file that cannot be used.
    """
    frame = read_published(directory)
    if frame is None:
        return None
    found = [_known(row, calibration, hbm_bytes) for row in records(frame)]
    columns = np.array([[np.nan] * 3 if p is None else [p.tokens_per_s_per_gpu, p.roofline, p.running] for p in found])
    frame = frame.assign(running=columns[:, 2], predicted=columns[:, 0])
    measured = numbers_of(frame, "tok_s_per_gpu")
    return Comparison(
        "endtoend",
        frame,
        measured,
        columns[:, 0],
        columns[:, 1],
        ("phase", "model"),
        unit="tokens/s/GPU",
        note="published throughput, none of it fitted; rows without a known model, lengths or parallelism, or whose "
        "kernels the calibration lacks, are not predicted",
        extra={"phases": _phases(frame, columns), "capacity_cliff": _cliff(frame, columns[:, 0])},
    )


def _known(row: Mapping[str, Any], calibration: Calibration, hbm_bytes: float) -> Prediction | None:
    try:
        return predict_published(row, calibration, hbm_bytes)
    except MissingSeries:
        return None


def read_published(directory: Path) -> pd.DataFrame | None:
    """The rows of endtoend.csv; None if there is no such file.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds an impossible value.
    """
    path = directory / FILE
    if not path.exists():
        return None
    frame = read_text(path)
    for name in (*_COLUMNS, *_NUMBERS):
        if name not in frame.columns:
            raise InputError(f"{path}: no column {name!r}")
    if "note" not in frame.columns:
        frame["note"] = ""
    for name in _NUMBERS:
        measured = name == "tok_s_per_gpu"
        frame[name] = number_cells(path, name, list(frame[name]), needed=measured, whole=not measured)
    return frame


def predict_published(row: Mapping[str, Any], calibration: Calibration, hbm_bytes: float) -> Prediction | None:
    """One row, or None if it does not say enough."""
    known, degrees = known_model(str(row["model"])), _degrees(str(row["parallelism"]))
    if known is None or degrees is None or not (row["isl"] >= 0 and row["osl"] >= 0):
        return None
    model, published = known
    backend = next((b for name, b in _BACKENDS.items() if name in str(row["framework"]).lower()), "trtllm")
    deployment = _deployment(row, model, published, backend, degrees)
    kernels = FittedKernels(calibration, backend)
    engine = engine_for(engines_of(calibration), backend)
    if row["phase"] == "prefill":
        return _prefill(row, deployment, kernels)
    if row["phase"] == "decode":
        return _decode(row, deployment, kernels, engine)
    policy = TENSORRT_LLM_TABLES if backend == "trtllm" else MEMORY_POLICIES[backend]
    return _aggregated(row, deployment, kernels, engine, hbm_bytes, policy)


def _degrees(parallelism: str) -> Mapping[str, int] | None:
    """attention_tp, attention_dp of "TP4", "attn DP72, EP72" or "TP8 (+EP, attention DP ...)"; None if not stated."""
    if found := re.search(r"DP\s*(\d+), EP\s*(\d+)", parallelism):
        return {"attention_tp": 1, "attention_dp": int(found[1])}
    found = re.match(r"TP(\d+)", parallelism)
    if not found or "x DP" in parallelism:
        return None
    if "attention DP" in parallelism:
        return {"attention_tp": 1, "attention_dp": int(found[1])}
    return {"attention_tp": int(found[1]), "attention_dp": 1}


def _deployment(
    row: Mapping[str, Any], model: Model, published: WeightFormat, backend: str, degrees: Mapping[str, int]
) -> Deployment:
    gpus = degrees["attention_tp"] * degrees["attention_dp"]
    data_parallel = degrees["attention_dp"] > 1
    low = str(row["precision"]).startswith("fp8")
    weights: WeightFormat = ("fp8_block" if published == "fp8_block" else "fp8") if low else "bf16"
    kv_cache: Dtype = "fp8" if "fp8 KV" in str(row["precision"]) else "bf16"
    return Deployment(
        model,
        isl=max(1, int(row["isl"])),
        osl=max(1, int(row["osl"])),
        concurrency=_ENDLESS,
        weights=weights,
        kv_cache=kv_cache,
        attention_tp=degrees["attention_tp"],
        attention_dp=degrees["attention_dp"],
        moe_tp=1 if data_parallel or not model.is_moe else gpus,
        moe_ep=gpus if data_parallel and model.is_moe else 1,
        all_to_all=(data_parallel and backend == "sglang") or gpus > 8,
        overlap=_overlaps(row),
    )


def _overlaps(row: Mapping[str, Any]) -> bool:
    """Whether two batches overlap: large expert-parallel deployments do unless the row says no."""
    return row["phase"] in ("prefill", "decode") and "no-TBO" not in str(row["framework"])


def _aggregated(
    row: Mapping[str, Any],
    deployment: Deployment,
    kernels: FittedKernels,
    engine: Engine,
    hbm_bytes: float,
    policy: MemoryPolicy,
) -> Prediction:
    """A server that is always full, or one that gets so many requests a second and has Little's law's many in it."""
    rate = re.search(r"qps\s*=\s*([\d.]+)", str(row["batch_or_concurrency"]).lower())
    light: dict[str, float] = kernels.calibration.data["speed_of_light"]
    running = sequence_limit(deployment, hbm_bytes, policy) * deployment.attention_dp
    light_s = light_step_s(deployment, running / deployment.attention_dp, light)
    light_s += running / deployment.osl * light_prompt_s(deployment, deployment.isl, light)
    if not rate:
        full = serve(deployment, kernels, engine, hbm_bytes, policy)
        return Prediction(full.tokens_per_s_per_gpu, running / light_s / deployment.gpus, full.running)
    served = serve(replace(deployment, concurrency=1), kernels, engine, hbm_bytes, policy)
    for _ in range(20):
        in_flight = float(rate[1]) * deployment.osl * served.tpot_s
        served = serve(replace(deployment, concurrency=max(1, round(in_flight))), kernels, engine, hbm_bytes, policy)
    offered = float(rate[1]) * deployment.osl / deployment.gpus
    if asked := re.search(r"(\d+) requests", str(row.get("source", ""))):  # a short test: its last answers run on alone
        arriving_s = float(asked[1]) / float(rate[1])
        offered *= arriving_s / (arriving_s + deployment.osl * served.tpot_s)
    full = serve(deployment, kernels, engine, hbm_bytes, policy).tokens_per_s_per_gpu
    return Prediction(min(offered, full), min(offered, running / light_s / deployment.gpus), served.running)


def _prefill(row: Mapping[str, Any], deployment: Deployment, kernels: FittedKernels) -> Prediction | None:
    found = re.search(r"(\d+) tokens/GPU", str(row["batch_or_concurrency"]))
    if not found:
        return None
    tokens = float(found[1])
    seconds = prefill_time(deployment, kernels, tokens)
    light_s = light_prompt_s(deployment, tokens * deployment.gpus, kernels.calibration.data["speed_of_light"])
    return Prediction(tokens / seconds, tokens / light_s, tokens / deployment.isl)


def _decode(
    row: Mapping[str, Any], deployment: Deployment, kernels: FittedKernels, engine: Engine
) -> Prediction | None:
    """A decode worker. A drafted token doubles the tokens of a step and shares its cache reads."""
    found = re.search(r"(\d+) req/GPU", str(row["batch_or_concurrency"]))
    if not found:
        return None
    requests = float(found[1])
    drafts = 1 if "MTP" in f"{row['framework']} {row['note']}" else 0
    sequences, context = requests * (1 + drafts), (deployment.isl + row["osl"] / 2) / (1 + drafts)
    seconds = step_time(deployment, kernels, Batch(sequences, context))
    seconds += engine.step_s + engine.sequence_s * sequences
    made = requests * (1 + drafts * MTP_ACCEPTED)
    light_s = light_step_s(deployment, requests, kernels.calibration.data["speed_of_light"])
    return Prediction(made / seconds, made / light_s, requests)


def _phases(frame: pd.DataFrame, columns: np.ndarray) -> dict[str, Any]:
    measured = numbers_of(frame, "tok_s_per_gpu")
    return {
        phase: figures(measured[index], columns[index, 0], columns[index, 1])
        for phase, index in rows_by(map(str, frame["phase"])).items()
    }


def _cliff(frame: pd.DataFrame, predicted: np.ndarray) -> list[dict[str, Any]]:
    """Gain in tokens/s/GPU from one GPU to two, where a published table has both."""
    measured, gains = numbers_of(frame, "tok_s_per_gpu"), []
    known, parallelism = np.isfinite(predicted), np.array(frame["parallelism"])
    servers = list(zip(frame["model"], frame["framework"], frame["isl"].fillna(0), frame["osl"], strict=True))
    for (model, framework, isl, osl), index in rows_by(servers).items():
        one, two = (index[known[index] & (parallelism[index] == name)] for name in ("TP1", "TP2"))
        if len(one) == 1 and len(two) == 1:
            gain = {
                "measured_gain": float(measured[two[0]] / measured[one[0]]),
                "predicted_gain": float(predicted[two[0]] / predicted[one[0]]),
            }
            gains.append({"model": model, "framework": framework, "isl": int(isl), "osl": int(osl), **gain})
    return gains
