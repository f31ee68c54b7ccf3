"""Where the weights of models are, in which format, and how an engine comes by the format that was priced.

An engine runs weights as their repository has them, quantises plain ones when it starts, or needs others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raysearch.deploy.export.deployment import Deployment, check_weights
from raysearch.deploy.export.engine_words import capability_of
from raysearch.deploy.export.render import Variable
from sim.config.catalog import imported_model
from sim.config.files import CatalogError, config_path
from sim.engines.engine_rules import EngineRules
from sim.layers.model import Model
from sim.prices.dtypes import Dtype
from sim.workload import Workload

_AT_START: Mapping[str, Mapping[Dtype, str]] = {
    "vllm": {"fp8": "fp8_per_tensor", "fp8_block": "fp8_per_block", "mxfp4": "mxfp4"},
    "sglang": {"fp8": "fp8"},
}
"""What `--quantization` makes of weights in bf16 when an engine starts.

Source: vllm/config/quantization.py of 0.33.0, where "fp8" is deprecated for this; sglang/srt/layers/quantization/fp8.py
of 0.5.23, whose blocks must be stored. TensorRT-LLM's PyTorch backend takes quantised checkpoints alone (its page on
quantization). Weights that are stored quantised are refused by both (`_verify_quantization`).
"""
_STORED = (".safetensors", ".bin", ".pt", ".gguf")
"""How names of files with weights end."""
CHECKPOINT = Variable("CHECKPOINT")
"""In the place of weights that somebody must quantise first."""


@dataclass(frozen=True)
class Supported:
    """A deployment as far as an engine supports it.

    Attributes:
        deployment: With what it runs in place of what it does not support.
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
    return check_weights(next(iter(model.published.repositories.values()), model.name))


def repository(workload: Workload, model: str | Path | None = None) -> str:
    """The repository of a workload's weights, or the folder that they lie in beside the model's config.json.

    Args:
        workload: What is served.
        model: The model as it was asked for: a name, or a path.

    Returns:
        Of a model without either its name, to be replaced.
    """
    name, published = workload.model.name, workload.model.published.repositories
    if published:
        return published.get(workload.precisions.weights, next(iter(published.values())))
    path = config_path("models", model) if model is not None else Path(name)
    beside = path.resolve().parent
    if path.suffix == ".json" and (path.name == "config.json" or any(beside.glob("*.safetensors"))):
        return str(beside)
    return name


def weights_of(workload: Workload, model: str | Path | None, named: str | None) -> str:
    """The weights that somebody named, or else `repository`."""
    return repository(workload, model) if named is None else named


def stored_format(model: Model, path: str) -> Dtype | None:
    """The format of all weights but those that the model itself gives one; None where it is not known.

    >>> from sim.config.catalog import load_model
    >>> stored_format(load_model("deepseek_v3"), "deepseek-ai/DeepSeek-V3")
    'fp8_block'
    """
    for dtype, name in model.published.repositories.items():
        if name == path:
            return dtype
    if path == model.published.fp8_kv_repository:
        return "fp8"
    config = Path(path) / "config.json"
    try:
        imported = imported_model(config) if os.path.isfile(config) else None
    except CatalogError:  # a family that is not known: its weights can be served all the same
        return None
    return imported.formats.weights if imported else None


def with_weights(deployment: Deployment, engine: EngineRules) -> Supported:
    """The deployment with weights in the format that was priced, or else in that which their repository has."""
    workload, path = deployment.workload, str(deployment.served_model)
    model, wanted = workload.model, workload.precisions.weights
    stored = stored_format(model, path)
    if stored is None:
        lost = "/" not in path and not os.path.exists(path)
        where = f"put their repository or folder in the place of {path} (--set serve=PATH)" if lost else path
        return Supported(deployment, notes=(f"weights must be in {_shown(model, wanted)}, as priced: {where}",))
    if stored == wanted:
        there = not os.path.isdir(path) or any(True for end in _STORED for _ in Path(path).glob(f"*{end}"))
        missing = f"no weights are in {path} yet: put them there, or name their repository (--set serve=PATH)"
        return Supported(deployment, notes=() if there else (missing,))
    if stored != "bf16" or model.expert_dtype is not None:
        runs = replace(workload, precisions=replace(workload.precisions, weights=stored))
        text = f"{path} has weights in {_shown(model, stored)}, which stay so; priced was {wanted}"
        return Supported(replace(deployment, workload=runs), (text,))
    if at_start := _at_start(workload, engine.name, wanted):
        return Supported(replace(deployment, quantization=at_start))
    if (wanted, workload.precisions.kv_cache) == ("fp8", "fp8") and model.published.fp8_kv_repository:
        return Supported(replace(deployment, served_model=model.published.fp8_kv_repository))
    note = (
        f"{engine.title} does not quantise {path} to {wanted} when it starts: do it before, with NVIDIA's Model "
        f"Optimizer (examples/llm_ptq), and set CHECKPOINT to the checkpoint's path"
    )
    return Supported(replace(deployment, served_model=CHECKPOINT), notes=(note,))


def _at_start(workload: Workload, engine: str, wanted: Dtype) -> str | None:
    """The word of `--quantization` that makes a format of bf16, if the engine's version has one."""
    word = _AT_START.get(engine, {}).get(wanted)
    if word is None:
        return None
    _, lost = capability_of(workload, engine)[0].words([("--quantization", word)])
    return None if lost else word


def _shown(model: Model, weights: Dtype) -> str:
    return f"{weights} with experts in {model.expert_dtype}" if model.expert_dtype else weights
