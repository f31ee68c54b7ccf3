"""Where the weights of models are, in which format, and how an engine comes by the format that was charged.

An engine runs weights as their repository holds them, quantises plain ones when it starts, or needs others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raysearch.export.deployment import Deployment, check_weights
from raysearch.export.render import Variable
from sim.config.catalog import imported_model
from sim.config.files import CatalogError, config_path
from sim.engines.rules import EngineRules
from sim.layers.model import Model
from sim.prices.dtypes import Dtype
from sim.workload import Workload

_PUBLISHED: Mapping[str, Mapping[Dtype, str]] = {
    "deepseek_v3": {"fp8_block": "deepseek-ai/DeepSeek-V3"},
    "glm_5": {"bf16": "zai-org/GLM-5", "fp8_block": "zai-org/GLM-5-FP8"},
    "gpt_oss_120b": {"bf16": "openai/gpt-oss-120b"},  # all but its experts, which are in mxfp4
    "kimi_k2_5": {"bf16": "moonshotai/Kimi-K2.5"},  # all but its experts, which are in int4
    "llama_2_70b": {"bf16": "meta-llama/Llama-2-70b-chat-hf"},
    "llama_3_1_405b": {"bf16": "meta-llama/Llama-3.1-405B-Instruct"},
    "llama_3_1_70b": {"bf16": "meta-llama/Llama-3.1-70B-Instruct"},
    "llama_3_1_8b": {"bf16": "meta-llama/Llama-3.1-8B-Instruct"},
    "llama_4_maverick": {"bf16": "meta-llama/Llama-4-Maverick-17B-128E-Instruct"},
    "llama_4_scout": {"bf16": "meta-llama/Llama-4-Scout-17B-16E-Instruct"},
    "minimax_m2_5": {"fp8_block": "MiniMaxAI/MiniMax-M2.5"},
    "mistral_7b": {"bf16": "mistralai/Mistral-7B-Instruct-v0.3"},
    "mixtral_8x22b": {"bf16": "mistralai/Mixtral-8x22B-Instruct-v0.1"},
    "mixtral_8x7b": {"bf16": "mistralai/Mixtral-8x7B-Instruct-v0.1"},
    "qwen3_235b_a22b": {"bf16": "Qwen/Qwen3-235B-A22B", "fp8_block": "Qwen/Qwen3-235B-A22B-FP8"},
    "qwen3_32b": {"bf16": "Qwen/Qwen3-32B", "fp8_block": "Qwen/Qwen3-32B-FP8"},
    "qwen3_5_397b_a17b": {"bf16": "Qwen/Qwen3.5-397B-A17B", "fp8_block": "Qwen/Qwen3.5-397B-A17B-FP8"},
}
"""Repositories of the models' makers on Hugging Face, the first one preferred. [published]"""
_MODEL_OPTIMIZER: Mapping[str, str] = {
    "llama_3_1_405b": "nvidia/Llama-3.1-405B-Instruct-FP8",
    "llama_3_1_70b": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "llama_3_1_8b": "nvidia/Llama-3.1-8B-Instruct-FP8",
    "llama_4_maverick": "nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8",
    "llama_4_scout": "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8",
    "qwen3_235b_a22b": "nvidia/Qwen3-235B-A22B-FP8",
}
"""The same in fp8, KV cache too, by NVIDIA's Model Optimizer. [published] TensorRT-LLM's performance overviews."""
_AT_START: Mapping[str, Mapping[Dtype, str]] = {
    "vllm": {"fp8": "fp8_per_tensor", "fp8_block": "fp8_per_block", "mxfp4": "mxfp4"},
    "sglang": {"fp8": "fp8"},
}
"""What `--quantization` makes of weights in bf16 when an engine starts.

Source: vllm/config/quantization.py of 0.33.0, where "fp8" is deprecated for this; sglang/srt/layers/quantization/fp8.py
of 0.5.23, whose blocks must be stored. TensorRT-LLM's PyTorch backend takes quantised checkpoints alone (its page on
quantization). Weights that are stored quantised are refused by both (`_verify_quantization`).
"""
CHECKPOINT = Variable("CHECKPOINT")
"""In the place of weights that somebody must quantise first."""


@dataclass(frozen=True)
class Told:
    """A deployment as far as an engine can be told of it.

    Attributes:
        deployment: With what it runs in place of what it cannot be told.
        dropped: What that is.
        notes: What its user must know.
    """

    deployment: Deployment
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def draft_repository(model: Model) -> str:
    """The repository of a draft model's weights, as published, or else its name.

    Raises:
        InputError: No command line can have that name.
    """
    return check_weights(next(iter(_PUBLISHED.get(model.name, {}).values()), model.name))


def repository(workload: Workload, model: str | Path | None = None) -> str:
    """The repository of a workload's weights, or the folder that they lie in beside the model's config.json.

    Args:
        workload: What is served.
        model: The model as it was asked for: a name, or a path.

    Returns:
        Of a model without either its name, to be replaced.
    """
    name = workload.model.name
    if name in _PUBLISHED:
        published = _PUBLISHED[name]
        return published.get(workload.precisions.weights, next(iter(published.values())))
    path = config_path("models", model) if model is not None else Path(name)
    beside = path.resolve().parent
    return str(beside) if path.suffix == ".json" and any(beside.glob("*.safetensors")) else name


def stored_format(model: Model, path: str) -> Dtype | None:
    """The format of all weights but those that the model itself gives one; None where it is not known.

    >>> from sim.config.catalog import load_model
    >>> stored_format(load_model("deepseek_v3"), "deepseek-ai/DeepSeek-V3")
    'fp8_block'
    """
    for dtype, name in _PUBLISHED.get(model.name, {}).items():
        if name == path:
            return dtype
    if path == _MODEL_OPTIMIZER.get(model.name):
        return "fp8"
    config = Path(path) / "config.json"
    try:
        imported = imported_model(config) if config.is_file() else None
    except CatalogError:  # a family that is not known: its weights can be served all the same
        return None
    return imported.formats.weights if imported else None


def with_weights(deployment: Deployment, engine: EngineRules) -> Told:
    """The deployment with weights in the format that was charged, or else in that which their repository has."""
    workload, path = deployment.workload, str(deployment.served_model)
    model, wanted = workload.model, workload.precisions.weights
    stored = stored_format(model, path)
    if stored is None:
        lost = "/" not in path and not Path(path).exists()
        where = f"put their repository or folder in the place of {path} (--serve)" if lost else path
        return Told(deployment, notes=(f"weights must be in {_shown(model, wanted)}, as was charged: {where}",))
    if stored == wanted:
        return Told(deployment)
    if stored != "bf16" or model.expert_dtype is not None:
        runs = replace(workload, precisions=replace(workload.precisions, weights=stored))
        text = f"{path} has weights in {_shown(model, stored)}, which stay so: not in {wanted}"
        return Told(replace(deployment, workload=runs), (text,))
    if at_start := _AT_START.get(engine.name, {}).get(wanted):
        return Told(replace(deployment, quantization=at_start))
    if (wanted, workload.precisions.kv_cache) == ("fp8", "fp8") and model.name in _MODEL_OPTIMIZER:
        return Told(replace(deployment, served_model=_MODEL_OPTIMIZER[model.name]))
    note = (
        f"{engine.title} does not quantise {path} to {wanted} when it starts: do it before, with NVIDIA's Model "
        f"Optimizer (examples/llm_ptq), and set CHECKPOINT to the checkpoint's path"
    )
    return Told(replace(deployment, served_model=CHECKPOINT), notes=(note,))


def _shown(model: Model, weights: Dtype) -> str:
    return f"{weights} beside experts in {model.expert_dtype}" if model.expert_dtype else weights
