"""A forecast: predictions with intervals of deployments that nobody has measured yet, in a file with its digest.

Steps are priced by `sim.simulate.evaluate`; workers of their own for prompts by the closed loop that measured runs are
read by (`raysearch.fidelity.validation.disaggregated`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from raysearch.base.errors import InputError
from raysearch.base.file_io import LARGEST_RECORD_BYTES, read_record
from raysearch.base.version import __version__
from raysearch.fidelity.calibration.deployments import ServingRun, Skipped, strategy_of_run
from raysearch.fidelity.forecasts.announced_deployments import (
    LARGEST_ANNOUNCEMENT_BYTES,
    Announced,
    Worker,
    announced,
    read_entries,
)
from raysearch.fidelity.validation.disaggregated import PoolPair, predict_pair
from sim.config.catalog import CatalogError, load_hardware, measured_machine
from sim.config.question import Question
from sim.config.reading import Unreadable, parse_object, read_bytes
from sim.json_object import JsonObject
from sim.ops.heuristics import megatron_dims
from sim.prices.dtypes import Dtype
from sim.prices.priced import Interval, error_interval, together
from sim.serving.phases import DECODE, PREFILL
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

BALANCED_STEPS = 60
"""[published] timeout_iters of attention_dp_config in InferenceX's scripts for TensorRT-LLM, with enable_balance."""
DISAGGREGATED_ERROR = 0.14
"""Mean error of the time per token of measured runs with workers of their own, workload held out. [fitted: 314 runs]"""
WIDE = 8
"""GPUs sharing experts beyond which tokens are sent to them. [assumed] as published recipes of wide deployments do."""


_Figure = Annotated[float, Field(gt=1e-9, lt=1e12)]


class _Workers(BaseModel):
    count: int
    gpus: int
    ep: int
    dp: int


class _Prediction(BaseModel):
    entry: str
    model: str
    machine: str
    framework: str
    precision: str
    isl: int
    osl: int
    draft_tokens: int
    requests: int
    decode: _Workers
    tokens_per_s_per_gpu: tuple[_Figure, _Figure, _Figure]
    tpot_ms: tuple[_Figure, _Figure, _Figure]


class _ForecastFile(BaseModel):
    made_by: str
    date: str
    predictions: list[_Prediction]
    not_predicted: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a deployment is to do, and the 90 % interval of its time per token as factors."""

    tokens_per_s_per_gpu: float
    tpot_s: float
    factors: Interval

    def record(self) -> JsonObject:
        """As a forecast has it."""
        low, high = self.factors
        rate, tpot_ms = self.tokens_per_s_per_gpu, self.tpot_s * 1e3
        return {
            "tokens_per_s_per_gpu": [_short(each) for each in (rate, rate / high, rate / low)],
            "tpot_ms": [_short(each) for each in (tpot_ms, tpot_ms * low, tpot_ms * high)],
        }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def forecast_of(
    paths: Iterable[Path],
    today: str,
    left_out: Callable[[Announced], bool] = lambda _: False,
    tell: Callable[[str], object] = lambda _: None,
) -> JsonObject:
    """Predictions of all that some files announce, with what is not predicted and why.

    Args:
        paths: Files of entries.
        today: The date.
        left_out: What was measured already.
        tell: Called with the name of each entry.

    Raises:
        InputError: A file that cannot be read, or that announces nothing.
    """
    predictions: list[JsonObject] = []
    reasons: dict[str, dict[str, int]] = {}
    sources: list[JsonObject] = []
    for path in paths:
        entries = read_entries(path)
        digest = hashlib.sha256(read_bytes(path, LARGEST_ANNOUNCEMENT_BYTES)).hexdigest()
        sources.append({"file": path.name, "sha256": digest})
        for name, entry in entries.items():
            tell(name)
            for point in announced(name, entry, path):
                found = point if isinstance(point, Skipped) else _predict_unless(point, left_out)
                if isinstance(found, Skipped):
                    of_entry = reasons.setdefault(found.reason, {})
                    of_entry[name] = of_entry.get(name, 0) + 1
                else:
                    assert isinstance(point, Announced)
                    predictions.append(point.record() | found.record())
    if not (predictions or reasons):
        raise InputError(
            "nothing is announced: expected files of entries such as InferenceX's configs/nvidia-master.yaml"
        )
    return {
        "made_by": f"raysearch {__version__}",
        "date": today,
        "sources": sources,
        "intervals": "90 %: predicted, least, most",
        "predictions": predictions,
        "not_predicted": reasons,
    }


def is_forecast(path: Path) -> bool:
    """Whether a file is a forecast, changed or not, and no other record."""
    try:
        return {"predictions", "not_predicted"} <= parse_object(read_bytes(path, LARGEST_RECORD_BYTES)).keys()
    except (OSError, Unreadable):
        return False


def read_forecast(path: Path) -> JsonObject:
    """A forecast as it was written.

    Raises:
        InputError: The file is none, or was changed since.
    """
    try:
        return read_record(path, _ForecastFile)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _predict_unless(point: Announced, left_out: Callable[[Announced], bool]) -> Predicted | Skipped:
    if left_out(point):
        return Skipped("measured already")
    try:
        return _predict_pools(point) if point.prefill else _predict_whole(point)
    except CatalogError as error:
        return Skipped(str(error))


def _predict_whole(point: Announced) -> Predicted | Skipped:
    """One worker, of which clients send each its share."""
    worker = point.decode
    each = math.ceil(point.requests / worker.count)
    workload = _workload(point)
    if worker.gpus % worker.dp or (worker.gpus * worker.pp) % max(worker.ep, 1):
        return Skipped(f"ep {worker.ep} does not share {worker.gpus} GPUs")
    strategy = Strategy(
        worker.gpus // worker.dp,
        worker.ep,
        worker.pp,
        max(1, each // worker.pp),
        megatron_dims(workload.model),
        dp=worker.dp,
    )
    if any(limit.kind == "hbm" for limit in evaluate(workload, replace(strategy, batch=1)).violations):
        return Skipped("it does not fit into memory by our figures")
    found = evaluate(workload, strategy)
    low, high = found.tpot_interval_s
    return Predicted(found.tokens_per_s_per_gpu, found.tpot_s, (low / found.tpot_s, high / found.tpot_s))


def _predict_pools(point: Announced) -> Predicted | Skipped:
    """Workers of their own for prompts."""
    assert point.prefill
    machine = load_hardware(point.machine).curves
    if machine is None:
        return Skipped("no kernels of this machine are known")
    workload = _workload(point)
    decode, prefill = (_run(workload, point, each) for each in (point.decode, point.prefill))
    prefill = replace(prefill, phase=PREFILL.name, speculation=None)
    places = point.decode.count * decode.strategy.batch
    pair = PoolPair(
        prefill, replace(decode, phase=DECODE.name), point.prefill.count, point.decode.count, point.requests, places
    )
    found = predict_pair(pair, machine.calibration, measured_machine(point.machine))
    if isinstance(found, Skipped):
        return found
    per_s = point.requests / (found.ttft_s + point.osl * found.tpot_s)  # Little's law
    decoding = replace(workload, phase=DECODE.name)
    stepped = evaluate(decoding, replace(decode.strategy, batch=decode.strategy.batch))
    low, high = stepped.tpot_interval_s
    factors = together((low / stepped.tpot_s, high / stepped.tpot_s), error_interval(DISAGGREGATED_ERROR))
    return Predicted(per_s * point.osl / point.gpus, found.tpot_s, factors)


def _run(workload: Workload, point: Announced, worker: Worker) -> ServingRun:
    is_decode = worker is point.decode
    batch = math.ceil(point.requests / worker.count) if is_decode else worker.dp
    strategy, _ = strategy_of_run(workload.model, batch, worker.gpus // worker.dp, worker.dp, worker.ep)
    return ServingRun(
        workload.model,
        point.isl,
        point.osl,
        workload.precisions.weights,
        workload.precisions.kv_cache,
        strategy,
        point.engine,
        point.engine,
        batch,
        expert_exchange="all_to_all" if worker.ep > WIDE else "all_gather",
        speculation=workload.speculation if is_decode else None,
    )


_HOPPER = ("h100_sxm", "h200_sxm")
"""[published] InferenceX's scripts ask for caches in fp8 but here, where SGLang keeps its usual bf16."""


@lru_cache(maxsize=256)
def _question(
    model: str,
    machine: str,
    engine: str,
    precision: str,
    isl: int,
    osl: int,
    drafts: int,
    exchange: str | None,
    waits: int,
) -> Workload:
    weights: Dtype | None = "bf16" if precision == "bf16" else None
    experts: Dtype | None = None
    if precision.startswith("fp4"):
        experts = "mxfp4" if machine.startswith("mi") or model == "kimi_k3" else "nvfp4"
        weights = "fp8_block" if model == "deepseek_v4_pro" else "bf16"
    elif precision == "fp8":
        usual = Question(model=model, hardware=machine, engine=engine, isl=isl, osl=osl).load().precisions.weights
        weights = usual if usual.startswith("fp8") else "fp8"
        experts = weights
    elif precision == "int4":
        experts = "int4"
    found = Question(
        model=model,
        hardware=machine,
        engine=engine,
        isl=isl,
        osl=osl,
        weights=weights,
        kv_cache="bf16" if (model, engine) == ("deepseek_v3", "sglang") and machine in _HOPPER else "fp8",
        gpus=4096,
        tpot_ms=0,
        ttft_ms=0,
        draft_tokens=drafts or None,
        expert_exchange="all_to_all" if exchange == "all_to_all" else None,
        prompt_wait_steps=waits or None,
    ).load()
    if experts and found.model.is_moe:
        found = replace(found, model=replace(found.model, expert_dtype=experts))
    return found


def _workload(point: Announced) -> Workload:
    """[published] DeepSeek-V4's own checkpoint keeps attention in fp8 beside its 4-bit experts; NVFP4 ones in bf16."""
    wide = point.decode.ep > WIDE
    waits = BALANCED_STEPS if point.engine == "trtllm" and point.decode.dp > 1 and not point.prefill else 0
    return _question(
        point.model,
        point.machine,
        point.engine,
        point.precision,
        point.isl,
        point.osl,
        point.draft_tokens,
        "all_to_all" if wide else None,
        waits,
    )
