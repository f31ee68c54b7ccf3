"""Rows of measured serving runs as deployments: model, engine, precisions and degrees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pandas as pd

from sim.config.catalog import load_model
from sim.layers.model import Model
from sim.prices.dtypes import Dtype
from sim.serving.deployment import Deployment, WeightFormat

_MODELS: tuple[tuple[str, str, WeightFormat], ...] = (
    # pattern in a model's name, file in configs/models, format in which it is published
    (r"deepseek-(v3|r1)", "deepseek_v3", "fp8_block"),
    (r"gpt-oss-120b", "gpt_oss_120b", "bf16"),
    (r"minimax-m2", "minimax_m2_5", "fp8_block"),
    (r"qwen3-235b.*fp8", "qwen3_235b_a22b", "fp8_block"),
    (r"qwen3-235b", "qwen3_235b_a22b", "bf16"),
    (r"qwen3-32b.*fp8", "qwen3_32b", "fp8_block"),
    (r"qwen3-32b", "qwen3_32b", "bf16"),
    (r"llama-2-70b", "llama_2_70b", "bf16"),
    (r"llama-?3.*405b", "llama_3_1_405b", "bf16"),
    (r"llama-?3.*70b", "llama_3_1_70b", "bf16"),
    (r"llama-?3.*8b", "llama_3_1_8b", "bf16"),
    (r"llama-?4.*scout", "llama_4_scout", "bf16"),
    (r"llama-?4.*maverick", "llama_4_maverick", "bf16"),
    (r"mixtral-8x22b", "mixtral_8x22b", "bf16"),
    (r"mixtral-8x7b", "mixtral_8x7b", "bf16"),
    (r"mistral-7b", "mistral_7b", "bf16"),
)


CLIENT_OF_512 = 512
"""Requests that InferenceX's script of gpt-oss-120b on H100 held open whatever step of the sweep it ran.

[published] SemiAnalysisAI/InferenceX: benchmarks/gptoss_fp4_h100_docker.sh starts vLLM with `--max-num-seqs=$CONC` and
asynchronous scheduling and sends `CONC * 10` requests; from pull request 227 to 310 (merged 2025-12-08, which calls it
a bug) its client ran with `--max-concurrency 512`. Such a row states the client's 512 and nowhere the server's limit.
"""
SWEPT = (4, 8, 16, 32, 64)
"""[published] Steps of that sweep, .github/configs/master.yaml, gptoss-fp4-h100-vllm: conc-start 4, conc-end 64."""


@dataclass(frozen=True, slots=True)
class ServingRow:
    """A deployment and the engine that runs it.

    Attributes:
        engine: Its name in the fitted serving parameters.
        stated: Requests in flight as the row states them; another number than the deployment's where the server's own
            limit is not in the row.
    """

    deployment: Deployment
    backend: str
    engine: str
    stated: int

    @property
    def states_its_batch(self) -> bool:
        """Whether the row says how many requests could run at once."""
        return self.stated == self.deployment.concurrency


@lru_cache(maxsize=64)
def known_model(name: str) -> tuple[Model, WeightFormat] | None:
    """The model behind a published name and the format it is published in, or None."""
    for pattern, file, published in _MODELS:
        if re.search(pattern, name.lower()):
            return load_model(file), published
    return None


def engine_of(backend: str, version: Any) -> str:
    """The engine's name in the serving parameters.

    vLLM schedules the next step while the GPU computes this one by default since 0.14 (vllm-project/vllm#31998 names
    the default); before, the scheduler's time is added to every step. An unknown version counts as current.
    """
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if backend == "vllm" and match and (int(match[1]), int(match[2])) < (0, 14):
        return "vllm<0.14"
    return backend


def agg_deployment(row: Mapping[str, Any]) -> ServingRow | None:
    """A row of endtoend_ttft_tpot.csv with mode agg; None if it lacks what a prediction needs.

    The identity attention_tp * attention_dp = moe_tp * moe_ep fixes the degree that a row leaves out. Engines switch
    attention data-parallelism on with a flag and go on counting all GPUs of a replica as their tensor-parallel size, so
    a row whose attention_dp_size equals its tp_size is that many GPUs, not their product: such rows take as long as
    plain tensor parallelism over tp_size GPUs does.
    """
    known = known_model(str(row["model_path"]))
    concurrency, per_rank = _number(row["concurrency"]), _number(row["batch_size"])
    if known is None or not (concurrency or per_rank):
        return None
    model, published = known
    weights = _weights(str(row["gemm_quant_mode"]), published)
    tp = _number(row["tp_size"]) or 1
    dp = _number(row["attention_dp_size"])
    moe_tp, moe_ep = _number(row["moe_tp_size"]) or 1, _number(row["moe_ep_size"]) or 1
    if not dp:
        dp = max(1, concurrency // per_rank) if per_rank and model.is_moe else 1
    gpus = tp * dp
    counts_all_gpus = moe_tp * moe_ep == tp and tp % dp == 0
    if model.is_moe and dp > 1 and (counts_all_gpus or dp == tp):
        tp, gpus = tp // dp, tp
    if model.is_moe and moe_tp * moe_ep != gpus:
        moe_tp = moe_tp if gpus % moe_tp == 0 else gpus
        moe_ep = gpus // moe_tp
    if not model.is_moe:
        moe_tp, moe_ep = gpus, 1
    stated = concurrency or per_rank * dp
    hidden = _hides_the_servers_limit(row, model, stated)
    return ServingRow(
        Deployment(
            model,
            isl=int(row["isl"]),
            osl=int(row["osl"]),
            concurrency=SWEPT[len(SWEPT) // 2] if hidden else stated,
            weights=weights,
            kv_cache=_kv_cache(str(row["backend"]), weights),
            attention_tp=tp,
            attention_dp=dp,
            moe_tp=moe_tp,
            moe_ep=moe_ep,
        ),
        str(row["backend"]),
        "vllm" if hidden else engine_of(str(row["backend"]), row["backend_version"]),
        stated,
    )


def _hides_the_servers_limit(row: Mapping[str, Any], model: Model, stated: int) -> bool:
    """Whether a row is of the script behind `CLIENT_OF_512`. Its server ran one of `SWEPT`: the middle one is taken."""
    dump = str(row.get("source", "")).startswith("source_file=")  # InferenceX, as the database names its dumps
    return dump and row["backend"] == "vllm" and model.name == "gpt_oss_120b" and stated == CLIENT_OF_512


def as_stated(row: ServingRow) -> ServingRow:
    """The row with as many requests at once as it states, whatever is known of its server."""
    return replace(row, deployment=replace(row.deployment, concurrency=row.stated))


def disagg_decoder(row: Mapping[str, Any]) -> ServingRow | None:
    """The decode workers of a row with separate prefill and decode workers; None if it lacks what is needed."""
    known, batch = known_model(str(row["model_path"])), _number(row.get("decode_batch_size"))
    if known is None or not batch:
        return None
    model, published = known
    weights = _weights(str(row["gemm_quant_mode"]), published)
    tp, dp = _number(row.get("decode_tp_size")) or 1, _number(row.get("decode_attention_dp_size")) or 1
    moe_tp = _number(row.get("decode_moe_tp_size")) or 1
    if (tp * dp) % moe_tp:
        moe_tp = tp * dp
    return ServingRow(
        Deployment(
            model,
            isl=int(row["isl"]),
            osl=int(row["osl"]),
            concurrency=batch * dp,
            weights=weights,
            kv_cache=_kv_cache(str(row["backend"]), weights),
            attention_tp=tp,
            attention_dp=dp,
            moe_tp=moe_tp,
            moe_ep=tp * dp // moe_tp,
        ),
        str(row["backend"]),
        engine_of(str(row["backend"]), row["backend_version"]),
        batch * dp,
    )


def _number(value: Any) -> int:
    """A count, or 0 for an empty cell and for the zeros that stand for "not used"."""
    return 0 if value == "" or pd.isna(value) else max(0, int(float(value)))


def _weights(quantisation: str, published: WeightFormat) -> WeightFormat:
    """The format that runs: a checkpoint published in fp8 blocks is served in them."""
    if published == "fp8_block" or quantisation == "fp8_block":
        return "fp8_block"
    return "fp8" if quantisation == "fp8" else "bf16"


def _kv_cache(backend: str, weights: WeightFormat) -> Dtype:
    """TensorRT-LLM caches in fp8 when it serves fp8 weights; the others in bf16 unless told [assumed for all rows]."""
    return "fp8" if backend == "trtllm" and weights != "bf16" else "bf16"
