"""AISimulate's performance database as a black box: degrees only, one decode step per call.

Install it with `pip install -e '.[aisimulate]'` in the checkout and search it with `--simulator aisimulate`. It reads
kernels measured on the accelerator (H100 SXM unless the hardware is another of its systems) under TensorRT-LLM.

A strategy's mesh in its words: attention has tensor size tp and data size ep, experts have tensor size tp and expert
size ep, so that tp * ep = moe_tp * moe_ep; the batch of a microbatch is spread over the ep data ranks.

Source: NVIDIA, github.com/ai-dynamo/aisimulate (Apache-2.0), AIConfigurator's successor, version 0.13.
"""
# pyright: reportMissingImports=false
# (an optional extra)

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.simulators.measurement import Measurement, name_in, refuse_beyond_plain_decoding
from sim.config.catalog import load_model
from sim.json_object import JsonObject
from sim.ops.dims import spread_choices
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Workload

BACKEND = "trtllm"
_PRECISION = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}


def measure(workload: Workload, strategy: Strategy) -> Measurement:
    """One decode step as AISimulate interpolates it; what its database does not cover is not supported.

    Raises:
        InputError: The package is missing, or it does not know the model or the hardware.
    """
    refuse_beyond_plain_decoding(workload, "AISimulate")
    unsupported = _unsupported(workload, strategy)
    if unsupported is not None:
        return unsupported
    _session(workload.hardware.name)  # which says what is missing
    from aisimulate.sdk.errors import PerfDataNotAvailableError

    try:
        row = _decode_step(workload, strategy)
    except PerfDataNotAvailableError as error:
        return Measurement(unsupported=str(error).partition("{")[0].strip())
    return Measurement(
        tokens_per_s_per_gpu=float(row["tokens/s/gpu"]),
        tpot_s=float(row["tpot"]) * 1e-3,
        gpus=int(row["num_total_gpus"]),
        memory_bytes=float(row["memory"]) * 2**30,
    )


measure.degrees_only = True  # pyright: ignore[reportFunctionMemberAccess]
measure.packages = ("aisimulate",)  # pyright: ignore[reportFunctionMemberAccess]


def _unsupported(workload: Workload, strategy: Strategy) -> Measurement | None:
    model = workload.model
    if strategy.batch % strategy.ep:
        return Measurement(unsupported=f"ep={strategy.ep} data ranks do not divide a batch of {strategy.batch}")
    if model.layers % strategy.pp:
        return Measurement(unsupported=f"pp={strategy.pp} does not divide {model.layers} layers")
    if model.heads % strategy.tp:
        return Measurement(unsupported=f"tp={strategy.tp} does not divide {model.heads} heads")
    if model.experts % strategy.ep:
        return Measurement(unsupported=f"ep={strategy.ep} does not divide {model.experts} experts")
    return None


def _decode_step(workload: Workload, strategy: Strategy) -> Any:
    from aisimulate.sdk import common, config, models
    from aisimulate.sdk.inference_session import InferenceSession

    weights = _PRECISION[workload.precisions.weights]
    parallel = config.ModelConfig(
        tp_size=strategy.tp,
        pp_size=strategy.pp,
        attention_dp_size=strategy.ep,
        moe_tp_size=strategy.tp,
        moe_ep_size=strategy.ep,
        gemm_quant_mode=common.GEMMQuantMode[weights],
        moe_quant_mode=common.MoEQuantMode[weights],
        kvcache_quant_mode=common.KVCacheQuantMode[_PRECISION[workload.precisions.kv_cache]],
        fmha_quant_mode=common.FMHAQuantMode.bfloat16,
    )
    database, backend = _session(workload.hardware.name)
    model = models.get_model(name_in("aisimulate", workload), parallel, BACKEND)
    runtime = config.RuntimeConfig(batch_size=strategy.batch // strategy.ep, isl=workload.context_tokens, osl=2)
    summary = InferenceSession(model, database, backend).run_static(runtime, "static_gen", stride=1)
    return summary.get_result_dict()  # its data frame takes four times as long as the estimate


@cache
def _session(system: str) -> tuple[Any, Any]:
    """The database and the backend, loaded once per process: seconds against a fraction of a millisecond per call."""
    check_here()
    from aisimulate.sdk import perf_database
    from aisimulate.sdk.backends.factory import get_backend

    version = perf_database.get_latest_database_version(system, BACKEND)
    if version is None:
        raise InputError(f"AISimulate has no {BACKEND} data of hardware {system!r}")
    return perf_database.get_database(system, BACKEND, version), get_backend(BACKEND)


@dataclass(frozen=True)
class Recommended:
    """What AISimulate would run, on one pool that computes prompts and answers.

    Attributes:
        strategy: In our words: Megatron-LM's dims, its batch over all attention ranks.
        tokens_per_s_per_gpu, tpot_s, ttft_s: By its figures.
        version: Of the engine whose data it has.
    """

    strategy: Strategy
    tokens_per_s_per_gpu: float
    tpot_s: float
    ttft_s: float
    version: str


_MODES: Mapping[str, tuple[str, str]] = {"fp8": ("fp8_block", "fp8_block"), "fp4": ("bfloat16", "nvfp4")}
"""Precision of an announced run -> its modes of dense layers and experts, unless the checkpoint has experts so."""


def forecast_tpot_ms(prediction: JsonObject) -> float | None:
    """Its time per token of a deployment in a forecast, seconds later.

    None where it has no figure, and of pools and drafts, which need settings that a forecast does not have.
    """
    if "prefill" in prediction or prediction["draft_tokens"]:
        return None
    model = load_model(prediction["model"])
    dense, experts = (None, None) if model.expert_dtype else _MODES.get(prediction["precision"], (None, None))
    check_here()
    from aisimulate.legacy_cli.api import cli_estimate

    worker = prediction["decode"]
    gpus, ep, dp = worker["gpus"], worker["ep"], worker["dp"]
    try:
        with redirect_stdout(sys.stderr):
            found = cli_estimate(
                model_path=next(iter(model.published.repositories.values())),
                system_name=prediction["machine"].removesuffix("_nvl72"),
                backend_name=prediction["engine"],
                isl=prediction["isl"],
                osl=prediction["osl"],
                batch_size=-(-prediction["requests"] // (worker["count"] * dp)),
                tp_size=gpus // dp,
                pp_size=worker["pp"],
                attention_dp_size=dp,
                moe_tp_size=gpus // ep,
                moe_ep_size=ep,
                gemm_quant_mode=dense,
                moe_quant_mode=experts,
            )
    except (ValueError, KeyError, RuntimeError, SystemExit):  # as it says what it lacks
        return None
    return float(found.tpot)


def check_here() -> None:
    """Looks for the package before anything else takes its time.

    Raises:
        InputError: It is missing.
    """
    check_installed("aisimulate", "the black box 'aisimulate'")


def recommendation(workload: Workload, gpus: int) -> Recommended | None:
    """What AISimulate recommends for a workload of phase serve under its engine; None where nothing meets the SLOs.

    Its sweep takes a minute or two.

    Raises:
        InputError: The package is missing, or it does not know the model, the engine or the hardware.
    """
    refuse_beyond_plain_decoding(workload, "AISimulate")
    check_here()
    from aisimulate.legacy_cli.api import cli_default

    engine = workload.engine.family if workload.engine else BACKEND
    slos_ms = [min(slo_s, _NO_LIMIT_S) * 1e3 for slo_s in (workload.ttft_slo_s, workload.tpot_slo_s)]
    try:
        with redirect_stdout(sys.stderr):
            found = cli_default(
                model_path=name_in("aisimulate", workload),
                total_gpus=gpus,
                system=workload.hardware.name,
                backend=engine,
                isl=workload.prompt_tokens,
                osl=workload.output_tokens,
                ttft=slos_ms[0],
                tpot=slos_ms[1],
                top_n=1,
            )
    except (ValueError, KeyError, RuntimeError, SystemExit) as error:
        raise InputError(f"AISimulate cannot answer for {engine} on {workload.hardware.name}: {error}") from error
    table = found.best_configs.get("agg")
    if table is None or not len(table):
        return None
    row = table.iloc[0]
    tp, dp, ep = int(row["tp"]), int(row["dp"]), int(row["moe_ep"])
    batch = int(row["bs"]) * dp
    strategy = Strategy(
        tp,
        ep,
        int(row["pp"]),
        batch,
        spread_choices(workload, megatron_dims(workload.model)),
        1,
        None if dp == ep else dp,
    )
    figures = (float(row["tokens/s/gpu"]), float(row["tpot"]) * 1e-3, float(row["ttft"]) * 1e-3)
    return Recommended(strategy, *figures, version=str(row["version"]))


_NO_LIMIT_S = 1000.0
"""What stands for no SLO where it wants a number. [assumed]"""
