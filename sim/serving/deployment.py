"""What a serving deployment is: model, lengths, degrees and precisions; and what of it fits a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sim.layers.model import Model
from sim.prices.dtypes import Dtype

WeightFormat = Literal["bf16", "fp8", "fp8_block"]
"""How weights are stored and multiplied; "fp8_block" has one scale per 128 x 128 weights."""
WEIGHT_BYTES: Mapping[WeightFormat, int] = {"bf16": 2, "fp8": 1, "fp8_block": 1}
KV_BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp8": 1}
ACTIVATION_BYTES = 2
"""Activations, embedding and LM head stay in bf16. [assumed]"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One replica that serves a stream of equal requests.

    Attributes:
        isl, osl: Prompt and output tokens of a request.
        concurrency: Requests in flight over the whole replica.
        attention_tp: GPUs that share the heads of attention.
        attention_dp: Groups of those, each with its own requests.
        moe_tp, moe_ep: GPUs that share an expert's width, and groups of experts.
        all_to_all: Whether an expert-parallel library moves tokens between attention ranks, instead of NCCL.
        overlap: Whether communication hides behind another half batch's kernels (two-batch overlap).
    """

    model: Model
    isl: int
    osl: int
    concurrency: int
    weights: WeightFormat
    kv_cache: Dtype
    attention_tp: int = 1
    attention_dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    all_to_all: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        """Checks what the formulas rest on.

        Raises:
            ValueError: A degree below 1, or an expert group of another size than the attention group.
        """
        for name in ("isl", "osl", "concurrency", "attention_tp", "attention_dp", "moe_tp", "moe_ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.model.is_moe and self.moe_tp * self.moe_ep != self.gpus:
            raise ValueError(
                f"attention_tp * attention_dp ({self.attention_tp} * {self.attention_dp}) must equal "
                f"moe_tp * moe_ep ({self.moe_tp} * {self.moe_ep})"
            )

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.attention_tp * self.attention_dp

    @property
    def heads(self) -> int:
        """Query heads of one GPU."""
        return math.ceil(self.model.heads / self.attention_tp)

    @property
    def kv_heads(self) -> int:
        """KV heads of one GPU: with more GPUs than KV heads, each is held by several."""
        return math.ceil(self.model.kv_heads / self.attention_tp)


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How much memory an engine gives to the KV cache, and how it fills it.

    Attributes:
        share: Share of `of` that weights and KV cache ("total") or the KV cache alone ("free") may take.
        of: "total": the GPU's memory; "free": what weights and runtime leave.
        runtime_bytes: Context, communication buffers, graphs, activations.
        reserves_output: Whether a request holds its whole output's cache from its start (no eviction).
        max_sequences: Most sequences that run at once on one attention rank.
    """

    share: float
    of: Literal["total", "free"]
    runtime_bytes: float
    reserves_output: bool
    max_sequences: int


MEMORY_POLICIES: Mapping[str, MemoryPolicy] = {
    # [published] free_gpu_memory_fraction 0.9, GUARANTEED_NO_EVICT and max_batch_size 2048 are TensorRT-LLM's defaults.
    "trtllm": MemoryPolicy(0.90, "free", 2.5e9, True, 2048),
    # [published] gpu_memory_utilization 0.9 and, on an H100, max_num_seqs 1024 are vLLM's defaults.
    "vllm": MemoryPolicy(0.90, "total", 2.5e9, False, 1024),
    # [assumed] SGLang chooses mem_fraction_static by GPU and parallelism, about 0.88 on an H100.
    "sglang": MemoryPolicy(0.88, "total", 0.0, False, 2048),
}
"""The runtime's bytes are [assumed]."""


def weight_bytes(deployment: Deployment) -> float:
    """Weights of one GPU. Embedding and LM head stay in bf16 [assumed], cut over attention_tp."""
    model, each = deployment.model, WEIGHT_BYTES[deployment.weights]
    attention = model.layers * model.attention_parameters * each / deployment.attention_tp
    embedding = 2 * model.vocab * model.hidden * ACTIVATION_BYTES / deployment.attention_tp
    if not model.is_moe:
        return attention + model.layers * model.expert_parameters * each / deployment.attention_tp + embedding
    expert_each = model.expert_bits / 8 or each
    routed = model.moe_layers * model.experts * model.expert_parameters * expert_each
    shared = model.moe_layers * model.shared_experts * model.expert_parameters * each
    dense = model.dense_layers * model.dense_ffn_parameters * each
    return attention + routed / deployment.gpus + (shared + dense) / deployment.attention_tp + embedding


def cache_bytes(deployment: Deployment, tokens: float) -> float:
    """KV cache of one sequence of `tokens` on one GPU."""
    model, each = deployment.model, KV_BYTES[deployment.kv_cache]
    if model.latent_attention is not None:  # every GPU holds the latents of all heads
        return model.layers * model.latent_attention.cached_width * each * tokens
    windowed = model.sliding_layers * min(tokens, model.sliding_window)
    return 2 * deployment.kv_heads * model.head_dim * each * ((model.layers - model.sliding_layers) * tokens + windowed)


def sequence_limit(deployment: Deployment, hbm_bytes: float, policy: MemoryPolicy) -> float:
    """Sequences whose cache fits beside the weights on one attention rank, at most the engine's own limit."""
    weights = weight_bytes(deployment)
    if policy.of == "total":
        room = policy.share * hbm_bytes - policy.runtime_bytes - weights
    else:
        room = policy.share * (hbm_bytes - policy.runtime_bytes - weights)
    held = deployment.isl + deployment.osl * (1.0 if policy.reserves_output else 0.5)
    return max(1.0, min(policy.max_sequences, room / cache_bytes(deployment, held)))
