"""What a model or workload file may say, in the units people use, and its value in SI units."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from sim.config.fields import Count, Degrees, FileSchema, Name, Positive, Whole
from sim.config.files import did_you_mean
from sim.engines.registry import engine_names
from sim.layers import model as layers_model
from sim.prices import hardware
from sim.prices.dtypes import Dtype
from sim.workload import BatchGrid, DegreeTables, ExpertExchange, Phase, Routing, SpaceName


class _LatentAttention(FileSchema):
    query_rank: Count
    kv_rank: Count
    rope_dim: Count
    value_dim: Count


class ModelFile(FileSchema):
    """configs/models/*.toml: dimensions of a decoder-only transformer."""

    name: Name
    layers: Count
    hidden: Count
    ffn_hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    experts: Count
    experts_per_token: Count
    gated: Annotated[bool, Field(strict=True)]
    shared_experts: Whole = 0
    dense_layers: Whole = 0
    dense_ffn_hidden: Whole = 0
    sliding_window: Whole = 0
    sliding_layers: Whole = 0
    expert_dtype: Dtype | None = None
    latent_attention: _LatentAttention | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelFile:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        for key in ("dense_layers", "sliding_layers"):
            if getattr(self, key) > self.layers:
                raise ValueError(f"{key} ({getattr(self, key)}) exceeds layers ({self.layers})")
        for count, size in (("dense_layers", "dense_ffn_hidden"), ("sliding_layers", "sliding_window")):
            if bool(getattr(self, count)) != bool(getattr(self, size)):
                raise ValueError(f"{count} and {size} belong together: give both or neither")
        return self

    def to_si(self) -> layers_model.Model:
        """The model; nothing in it has a unit."""
        latent = self.latent_attention
        return layers_model.Model(
            **self.model_dump(exclude={"latent_attention"}),
            latent_attention=layers_model.LatentAttention(**latent.model_dump()) if latent else None,
        )


class _PrecisionsTable(FileSchema):
    weights: Dtype
    kv_cache: Literal["bf16", "fp8"]
    activations: Literal["bf16", "fp8"]
    dispatch: Literal["bf16", "fp8"]


def check_space(name: str) -> None:
    """Accepts the name of a strategy space.

    Raises:
        ValueError: There is none of that name.
    """
    known = ("paper", "joint", "extended", *engine_names())
    if name not in known:
        raise ValueError(f"unknown space {name!r}: {did_you_mean(name, known)}")


LARGEST_BATCH = 4096
"""Largest batch of a named list. [assumed] as in the paper's table 1."""


class _DegreesTable(FileSchema):
    tp: Degrees
    ep: Degrees
    pp: Degrees
    batch: Degrees | BatchGrid

    def to_si(self) -> DegreeTables:
        batch = self.batch
        if batch == "any":
            batch = tuple(range(1, LARGEST_BATCH + 1))
        elif batch == "powers_of_two":
            batch = tuple(1 << power for power in range(LARGEST_BATCH.bit_length()))
        return DegreeTables(self.tp, self.ep, self.pp, batch)


class WorkloadFile(FileSchema):
    """configs/workloads/*.toml: a model on a hardware under an objective, and the degrees to search."""

    name: Name
    model: str
    hardware: str
    engine: str | None = None  # the bare machine
    kernels: hardware.EngineName | None = None  # the engine's, or the hardware file's
    all_reduce: hardware.AllReduce | None = None  # the kernels', or the hardware file's
    phase: Phase
    context_tokens: Count | None = None  # half way through the answer
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    tpot_slo_ms: Positive | None = None
    ttft_slo_ms: Positive | None = None
    max_gpus: Count
    load_imbalance: Annotated[Positive, Field(ge=1)] = 1.0
    routing: Routing = "balanced"
    expert_exchange: ExpertExchange | None = None  # what the engine does; all_to_all on the bare machine
    chunk_tokens: Count | None = None  # prompts are computed whole
    precisions: _PrecisionsTable
    space: SpaceName = "joint"  # the engine's, where one is named
    declared_choices: str | None = None  # "module:function" that declares them; in the extended space only
    margin: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    degrees: _DegreesTable

    @model_validator(mode="before")
    @classmethod
    def _searches_what_its_engine_runs(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        said = cast("dict[str, Any]", content)
        if said.get("engine") and said.get("space") is None:
            return {**said, "space": str(said["engine"]).partition("<")[0]}
        return said

    @field_validator("space")
    @classmethod
    def _is_a_space(cls, name: str) -> str:
        check_space(name)
        return name

    @model_validator(mode="after")
    def _says_its_traffic(self) -> WorkloadFile:
        if self.phase != "decode":
            for key in ("prompt_tokens", "output_tokens"):
                if getattr(self, key) is None:
                    raise ValueError(f"phase {self.phase!r} needs {key}")
            if self.context_tokens is not None:
                raise ValueError(f"context_tokens is of phase 'decode'; phase {self.phase!r} takes it from the prompt")
        elif self.context_tokens is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("phase 'decode' needs context_tokens, or prompt_tokens and output_tokens")
        return self

    @property
    def context(self) -> int:
        """Cached tokens of a decoding sequence, on average."""
        return self.context_tokens or (self.prompt_tokens or 0) + (self.output_tokens or 0) // 2
