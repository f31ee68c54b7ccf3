"""Published throughputs of endtoend.csv: saturated servers, servers under load, prefill and decode deployments.

Every row is priced by `sim.simulate.evaluate`, as a searched strategy is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.deployments import (
    MeasuredMachine,
    ServingRun,
    Skipped,
    known_model,
    strategy_of_run,
)
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.measured_tables import read_text
from raysearch.fidelity.calibration.serving_fit import number_cells, numbers_of, records, rows_by
from raysearch.fidelity.validation.error_figures import Comparison, ErrorFigures, PublishedGain, figures
from raysearch.fidelity.validation.light import light_step_s
from sim.engines.engine_registry import engine_rules
from sim.evaluation import Evaluation
from sim.json_object import JsonFields
from sim.layers.model import Model
from sim.prices.calibration import Calibration
from sim.prices.dtypes import Dtype
from sim.prices.engine import EngineTimes, MemoryPolicy
from sim.prices.roofline import PRICED_BY_MEDIANS
from sim.simulate import evaluate, steady_state

PUBLISHED_FILE = "endtoend.csv"
_COLUMNS = ("model", "precision", "framework", "parallelism", "batch_or_concurrency", "isl", "osl", "phase")
_NUMBERS = ("isl", "osl", "tok_s_per_gpu", "num_gpus")
MTP_ACCEPTED = 0.6
"""[published] Share of drafted tokens accepted, where a row says that multi-token prediction was simulated."""
_COPIES = 32
"""[published] Redundant experts of the pools of DeepSeek-V3, but where a row simulates balance (LMSYS; DeepSeek-AI)."""
TENSORRT_LLM_TABLES = replace(engine_rules("trtllm").memory, share=0.95)
"""[published] The benchmarks of TensorRT-LLM's perf-overview.md set kv_cache_free_gpu_mem_fraction to 0.95."""
_BACKENDS = {"sglang": "sglang", "vllm": "vllm"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens per second and GPU, fitted and by the bare roofline, and the requests (or prompts) in flight per GPU."""

    tokens_per_s_per_gpu: float
    roofline: float
    running: float


@dataclass(frozen=True, slots=True)
class Server:
    """A published deployment, on the machine and under the engine that it is priced with.

    Attributes:
        run: The deployment; its batch is one request where the row leaves it to the server.
    """

    run: ServingRun
    machine: MeasuredMachine
    times: EngineTimes
    memory: MemoryPolicy

    def evaluate(self, batch: int) -> Evaluation:
        """The figures with so many requests in flight."""
        return evaluate(
            self.run.workload(self.machine, self.times, self.memory), replace(self.run.strategy, batch=batch)
        )

    def light_step_s(self, batch: int) -> float:
        """Mean seconds of a step at the bare roofline."""
        workload, strategy = self.run.workload(self.machine), replace(self.run.strategy, batch=batch)
        return light_step_s(workload, strategy, steady_state(workload, strategy).batching)

    def most_requests(self) -> int:
        """Requests in flight of a server that is always full."""
        low, high = 1, self.memory.max_sequences * self.run.strategy.attention_dp
        while low < high:
            batch = (low + high + 1) // 2
            crowded = any(limit.kind in ("hbm", "sequences") for limit in self.evaluate(batch).violations)
            low, high = (low, batch - 1) if crowded else (batch, high)
        return low


def compare_published(directory: Path, calibration: Calibration, machine: MeasuredMachine) -> Comparison | None:
    """Predicted tokens/s/GPU of the published rows; None if the folder has no such file.

    Nothing was fitted to these rows.

    Raises:
        InputError: A file that cannot be used.
    """
    frame = read_published_runs(directory)
    if frame is None:
        return None
    found = [predict_published(row, calibration, machine) for row in records(frame)]
    columns = np.full((len(frame), 3), np.nan)
    skipped: dict[str, list[str]] = {}
    for number, each in enumerate(found):
        if isinstance(each, Skipped):
            skipped.setdefault(each.reason, []).append(f"line {number + 2}")
        else:
            columns[number] = each.tokens_per_s_per_gpu, each.roofline, each.running
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
        note="published throughput, none of it fitted",
        skipped=skipped,
        extra={"phases": _phases(frame, columns), "capacity_cliff": _cliff(frame, columns[:, 0])},
    )


def read_published_runs(directory: Path) -> pd.DataFrame | None:
    """The rows of endtoend.csv; None if there is no such file.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds an impossible value.
    """
    path = directory / PUBLISHED_FILE
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


def predict_published(row: JsonFields, calibration: Calibration, machine: MeasuredMachine) -> Prediction | Skipped:
    """One row, or why it is not predicted."""
    known, degrees = known_model(str(row["model"])), _degrees(str(row["parallelism"]))
    if known is None:
        return Skipped(f"unknown model {row['model']!r}")
    if degrees is None:
        return Skipped(f"its parallelism is {row['parallelism']!r}")
    if not (row["isl"] >= 0 and row["osl"] >= 0):
        return Skipped("it states no lengths of prompts and outputs")
    server = _server(row, *known, degrees, calibration, machine)
    if any(PRICED_BY_MEDIANS in each for each in server.evaluate(server.run.strategy.batch).extrapolated):
        return Skipped("it needs kernels that the calibration lacks")
    return _PREDICT.get(row["phase"], _aggregated)(row, server)


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


def _server(
    row: JsonFields,
    model: Model,
    published: Dtype,
    degrees: Mapping[str, int],
    calibration: Calibration,
    machine: MeasuredMachine,
) -> Server:
    backend = next((b for name, b in _BACKENDS.items() if name in str(row["framework"]).lower()), "trtllm")
    tp, dp = degrees["attention_tp"], degrees["attention_dp"]
    low, pool = str(row["precision"]).startswith("fp8"), row["phase"] in _PREDICT
    spread = dp > 1 and (backend == "sglang" or tp * dp > 8)
    balanced = pool and bool(re.search("perfect EPLB|profile", str(row["framework"])))
    weights: Dtype = ("fp8_block" if published == "fp8_block" else "fp8") if low else "bf16"
    strategy, replicas = strategy_of_run(model, dp, tp, dp, dp)
    run = ServingRun(
        model,
        prompt_tokens=max(1, int(row["isl"])),
        output_tokens=max(1, int(row["osl"])),
        weights=weights,
        kv_cache="fp8" if "fp8 KV" in str(row["precision"]) else "bf16",
        strategy=strategy,
        backend=backend,
        engine=backend,
        stated=dp,
        replicas=replicas,
        phase=row["phase"] if pool else "serve",
        routing="balanced" if balanced else "skewed",
        expert_exchange="all_to_all" if spread else "all_gather",
        redundant_experts=_COPIES if pool and not balanced else 0,
        two_batch_overlap=pool and "no-TBO" not in str(row["framework"]),
    )
    memory = TENSORRT_LLM_TABLES if backend == "trtllm" else engine_rules(backend).memory
    return Server(run, machine, engine_times(calibration, run), memory)


def _aggregated(row: JsonFields, server: Server) -> Prediction:
    """A server that is always full, or one that gets so many requests a second and has Little's law's many in it."""
    rate = re.search(r"qps\s*=\s*([\d.]+)", str(row["batch_or_concurrency"]).lower())
    run, most = server.run, server.most_requests()
    full, light = server.evaluate(most).tokens_per_s_per_gpu, most / server.light_step_s(most) / run.strategy.gpus
    if not rate:
        return Prediction(full, light, most / run.gpus)
    offered_per_s, in_flight = float(rate[1]) / run.replicas, 1
    for _ in range(20):
        tpot_s = server.evaluate(in_flight).tpot_s
        in_flight = max(1, min(most, round(offered_per_s * run.output_tokens * tpot_s)))
    offered = offered_per_s * run.output_tokens / run.strategy.gpus
    if asked := re.search(r"(\d+) requests", str(row.get("source", ""))):  # a short test: its last answers run on alone
        arriving_s = float(asked[1]) / float(rate[1])
        offered *= arriving_s / (arriving_s + run.output_tokens * tpot_s)
    return Prediction(min(offered, full), min(offered, light), in_flight / run.gpus)


def _prefill(row: JsonFields, server: Server) -> Prediction | Skipped:
    found = re.search(r"(\d+) tokens/GPU", str(row["batch_or_concurrency"]))
    if not found:
        return Skipped("it states no tokens per GPU")
    run, tokens = server.run, float(found[1])
    prompts = max(1, round(tokens * run.gpus / run.prompt_tokens))
    tokens = prompts * run.prompt_tokens / run.gpus
    light_s = server.light_step_s(prompts)
    return Prediction(tokens / _step_s(server, prompts), tokens / light_s, prompts / run.gpus)


def _decode(row: JsonFields, server: Server) -> Prediction | Skipped:
    """A decode worker. A drafted token doubles the tokens of a step and shares its cache reads."""
    found = re.search(r"(\d+) req/GPU", str(row["batch_or_concurrency"]))
    if not found:
        return Skipped("it states no requests per GPU")
    run, requests = server.run, int(found[1]) * server.run.gpus
    drafts = 1 if "MTP" in f"{row['framework']} {row['note']}" else 0
    context = round((run.prompt_tokens + run.output_tokens / 2) / (1 + drafts))
    stepping = replace(server, run=replace(run, prompt_tokens=context, output_tokens=1))
    made = requests * (1 + drafts * MTP_ACCEPTED) / run.gpus
    step_s = _step_s(stepping, requests * (1 + drafts))
    return Prediction(made / step_s, made / server.light_step_s(requests), requests / run.gpus)


_PREDICT = {"prefill": _prefill, "decode": _decode}
"""How the rows of a pool are predicted, by the phase they state; the others are of whole servers."""


def _step_s(server: Server, batch: int) -> float:
    """Seconds of a step of a pool."""
    found = server.evaluate(batch)
    return found.stage.total_s + found.engine_s


def _phases(frame: pd.DataFrame, columns: np.ndarray) -> dict[str, ErrorFigures]:
    measured = numbers_of(frame, "tok_s_per_gpu")
    return {
        phase: figures(measured[index], columns[index, 0], columns[index, 1])
        for phase, index in rows_by(map(str, frame["phase"])).items()
    }


def _cliff(frame: pd.DataFrame, predicted: np.ndarray) -> list[PublishedGain]:
    """Gain in tokens/s/GPU from one GPU to two, where a published table has both."""
    measured, gains = numbers_of(frame, "tok_s_per_gpu"), list[PublishedGain]()
    known, parallelism = np.isfinite(predicted), np.array(frame["parallelism"])
    servers = list(zip(frame["model"], frame["framework"], frame["isl"].fillna(0), frame["osl"], strict=True))
    for (model, framework, isl, osl), index in rows_by(servers).items():
        one, two = (index[known[index] & (parallelism[index] == name)] for name in ("TP1", "TP2"))
        if len(one) == 1 and len(two) == 1:
            gains.append(
                {
                    "model": model,
                    "framework": framework,
                    "isl": int(isl),
                    "osl": int(osl),
                    "measured_gain": float(measured[two[0]] / measured[one[0]]),
                    "predicted_gain": float(predicted[two[0]] / predicted[one[0]]),
                }
            )
    return gains
