"""A workload described in a few words, without a file: its degrees follow from the model and the budget."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sim.config.catalog import assembled, default_hardware, imported_model, read_model
from sim.config.files import CatalogError, config_path, explain
from sim.config.schemas import ANY_DEGREES, DEEPEST, WorkloadFile
from sim.engines.registry import UnknownEngine, engine_rules
from sim.workload import Workload

WIDEST = 128
"""Largest searched tp and ep. [assumed] as in the paper's table 1, whose tp ends there."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a command line says of a workload, in its words.

    Attributes:
        model, hardware: Names or paths; without hardware it is `sim.config.catalog.default_hardware`.
        isl, osl: Tokens of a prompt and of an answer.
        engine: Inference engine, or None for the bare machine.
        weights, kv_cache: Formats; None for those of a Hugging Face checkpoint, else fp8 as the model is published
            (weights bf16 beside experts in a format of their own), or what the engine has.
        tpot_ms, ttft_ms: SLOs, or None for none.
        max_gpus: Device budget.
        chunk_tokens: Most prompt tokens of a step; None computes prompts whole.
    """

    model: str
    hardware: str | None = None
    phase: str = "decode"
    isl: int | None = None
    osl: int | None = None
    engine: str | None = None
    weights: str | None = None
    kv_cache: str | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    max_gpus: int = 64
    chunk_tokens: int | None = None


def described_workload(said: Description, instead: dict[str, Any] | None = None) -> Workload:
    """The workload of a description; `instead` replaces keys of the file that it stands for.

    Routing is skewed as measured, since real prompts are.

    Raises:
        CatalogError: An unknown name, or figures that no workload file may have.

    >>> described_workload(Description("mixtral_8x7b", isl=1024, osl=256, max_gpus=8)).degrees.ep
    (1, 2, 4, 8)
    """
    if missing := [f"--{name}" for name in ("isl", "osl") if getattr(said, name) is None]:
        raise CatalogError(f"{' and '.join(missing)} must be given with a model: tokens of a prompt and of an answer")
    hardware = said.hardware or default_hardware()
    model_path, hardware_path = config_path("models", said.model), config_path("hardware", hardware)
    file, imported = read_model(model_path), imported_model(model_path)
    model = file.to_si()
    stored = imported.formats if imported else None
    weights, kv_cache = _of_engine(said.engine, (stored and stored.weights) or file.usual_weights, "fp8")
    precisions = {
        "weights": said.weights or weights,
        "kv_cache": said.kv_cache or (stored and stored.kv_cache) or kv_cache,
        "activations": "bf16",
        "dispatch": "fp8",
    }
    copies = (instead or {}).get("redundant_experts", 0) if model.is_moe else 0
    content: dict[str, Any] = {
        "name": f"{model.name}_{said.phase}",
        "model": said.model,
        "hardware": hardware,
        "engine": said.engine,
        "phase": said.phase,
        "prompt_tokens": said.isl,
        "output_tokens": said.osl,
        "tpot_slo_ms": said.tpot_ms,
        "ttft_slo_ms": said.ttft_ms,
        "max_gpus": said.max_gpus,
        "routing": "skewed" if model.is_moe else "balanced",
        "chunk_tokens": said.chunk_tokens,
        "precisions": precisions,
        "degrees": {
            "tp": [n for n in _powers_of_two(min(WIDEST, said.max_gpus)) if model.heads % n == 0],
            "ep": [
                n
                for n in _powers_of_two(min(WIDEST, said.max_gpus))
                if model.experts % n == 0 or (model.experts + copies) % n == 0
            ],
            "pp": _stages(model.layers, min(DEEPEST, said.max_gpus, model.layers)),
            "batch": "powers_of_two",
        },
    }
    for key, value in (instead or {}).items():
        (content["degrees"] if key in ("batch", *ANY_DEGREES) else content)[key] = value
    try:
        workload = WorkloadFile.model_validate(content)
    except ValidationError as error:
        raise CatalogError(f"the workload of the options: {_in_options(explain(error, WorkloadFile))}") from error
    return assembled(workload, model_path, Path(hardware_path))


_OPTIONS = {
    "precisions.weights": "--weights",
    "precisions.kv_cache": "--kv-cache",
    "speculation.acceptance": "--acceptance",
    "speculation.draft_tokens": "--draft-tokens",
    "tpot_slo_ms": "--tpot-ms",
    "ttft_slo_ms": "--ttft-ms",
    "prompt_tokens": "--isl",
    "output_tokens": "--osl",
    "chunk_tokens": "--chunk-tokens",
    "prompt_wait_steps": "--prompt-wait-steps",
    "redundant_experts": "--redundant-experts",
    "max_gpus": "--max-gpus",
}
"""What a command line calls the keys of a workload file."""
_KEYS = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, _OPTIONS))})(?![\w.])")


def _in_options(text: str) -> str:
    """What is wrong with the keys that options stand for, in the options' names."""
    return _KEYS.sub(lambda found: _OPTIONS[found[0]], text.removeprefix("file: "))


def _of_engine(engine: str | None, weights: str, kv_cache: str) -> tuple[str, str]:
    """Usual formats, or in their place the first that an engine has."""
    try:
        rules = engine_rules(engine) if engine else None
    except UnknownEngine:  # told with the others of its kind, by `assembled`
        rules = None
    if rules is None:
        return weights, kv_cache
    return (
        weights if weights in rules.weights else rules.weights[0],
        kv_cache if kv_cache in rules.kv_cache else rules.kv_cache[0],
    )


def _stages(layers: int, most: int) -> list[int]:
    """Divisors of the layers, whose stages are equal, and powers of two, since GPUs come in those.

    Others are in no list of their own: between two powers of two they leave GPUs of a node idle.
    """
    return sorted({n for n in range(1, most + 1) if layers % n == 0} | set(_powers_of_two(most)))


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(max(most, 1).bit_length())]
