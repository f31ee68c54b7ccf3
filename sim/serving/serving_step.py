"""Seconds of one step of a serving deployment: every layer's kernels, the engine's collectives, the LM head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from sim.layers.model import Model
from sim.prices.dtypes import Dtype
from sim.serving.deployment import ACTIVATION_BYTES, Deployment, WeightFormat


class Kernels(Protocol):
    """Seconds of single kernels and collectives, as one engine runs them on one hardware."""

    def gemm(self, rows: float, columns: float, inner: float, weights: WeightFormat) -> float:
        """[rows, inner] x [inner, columns]."""
        ...

    def decode_attention(
        self, sequences: float, context: float, heads: int, kv_heads: int, head_dim: int, kv_cache: Dtype
    ) -> float:
        """One new token of each sequence against `context` cached tokens."""
        ...

    def prefill_attention(
        self, sequences: float, tokens: float, heads: int, kv_heads: int, head_dim: int, kv_cache: Dtype
    ) -> float:
        """Causal attention over `tokens` new tokens of each sequence."""
        ...

    def latent_attention(self, sequences: float, context: float, heads: int, kv_cache: Dtype) -> float:
        """One new token of each sequence against a cache of DeepSeek's latents."""
        ...

    def experts(self, tokens: float, model: Model, moe_tp: int, moe_ep: int, weights: WeightFormat) -> float:
        """Routed experts of one rank that sees all `tokens` of the group, without communication."""
        ...

    def dispatched_experts(self, tokens: float, model: Model, moe_ep: int, weights: WeightFormat) -> float:
        """The same for a rank that an all-to-all sent only its own experts' share of the group's tokens."""
        ...

    def elementwise(self, traffic_bytes: float) -> float:
        """A kernel that streams activations."""
        ...

    def all_reduce(self, size_bytes: float, degree: int) -> float:
        """The engine's all-reduce of `size_bytes` held by each of `degree` GPUs."""
        ...

    def exchange(self, size_bytes: float, degree: int) -> float:
        """All-gather of `size_bytes` in total over `degree` GPUs, and the reduce-scatter back."""
        ...

    def expert_all_to_all(self, tokens: float, model: Model, degree: int) -> float:
        """Dispatch and combine of `tokens` per rank over `degree` ranks by an expert-parallel library."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What one attention rank computes in one step.

    Attributes:
        sequences: Sequences that decode one token each.
        context: Tokens each of them has cached.
        prompt_tokens: Tokens of prompts computed in the same step.
        prompt_length: Tokens of one such prompt.
        all_prompt: Whether all ranks have prompts, as in a prefill deployment; else this one alone.
    """

    sequences: float
    context: float
    prompt_tokens: float = 0.0
    prompt_length: float = 1.0
    all_prompt: bool = False

    @property
    def tokens(self) -> float:
        """All tokens of the step on this rank."""
        return self.sequences + self.prompt_tokens

    def tokens_of_all(self, ranks: int) -> float:
        """All tokens of the step on `ranks` attention ranks, which compute the experts together."""
        return self.sequences * ranks + self.prompt_tokens * (ranks if self.all_prompt else 1)


def step_time(deployment: Deployment, kernels: Kernels, batch: Batch) -> float:
    """Seconds of one step. Overlapping, one half batch communicates while the other computes."""
    if not deployment.overlap:
        return math.fsum(step_parts(deployment, kernels, batch).values())
    half = replace(batch, sequences=batch.sequences / 2, prompt_tokens=batch.prompt_tokens / 2)
    parts = step_parts(deployment, kernels, half)
    communication_s = parts.pop("communication")
    return 2 * max(communication_s, math.fsum(parts.values()))


def step_parts(deployment: Deployment, kernels: Kernels, batch: Batch) -> dict[str, float]:
    """Seconds of one step by kind: attention, projections, experts or ffn, elementwise, communication, head."""
    model = deployment.model
    attention = _latent_attention if model.latent_attention else _grouped_attention
    projections_s, attention_s = attention(deployment, kernels, batch)
    ffn_s, elementwise_s = _ffn(deployment, kernels, batch)
    norms = 2 * kernels.elementwise(batch.tokens * model.hidden * 3 * ACTIVATION_BYTES)
    head = kernels.gemm(max(1.0, batch.sequences), model.vocab / deployment.attention_tp, model.hidden, "bf16")
    return {
        "projections": projections_s,
        "attention": attention_s,
        "ffn": ffn_s,
        "elementwise": elementwise_s + model.layers * norms,
        "communication": _communication(deployment, kernels, batch),
        "head": head,
    }


def _grouped_attention(deployment: Deployment, kernels: Kernels, batch: Batch) -> tuple[float, float]:
    """(projections, attention) of all layers. Rotary embedding and cache write are part of the attention."""
    model, heads, kv_heads = deployment.model, deployment.heads, deployment.kv_heads
    qkv = (heads + 2 * kv_heads) * model.head_dim
    projections = kernels.gemm(batch.tokens, qkv, model.hidden, deployment.weights)
    projections += kernels.gemm(batch.tokens, model.hidden, heads * model.head_dim, deployment.weights)
    shape = (heads, kv_heads, model.head_dim, deployment.kv_cache)
    seen = [(model.layers - model.sliding_layers, math.inf), (model.sliding_layers, float(model.sliding_window))]
    attention = model.layers * kernels.elementwise(batch.tokens * qkv * 2 * ACTIVATION_BYTES)
    for layers, window in seen:
        if not layers:
            continue
        if batch.sequences:
            attention += layers * kernels.decode_attention(batch.sequences, min(batch.context, window), *shape)
        if batch.prompt_tokens:
            attention += layers * _prompt_attention(kernels, batch, window, shape)
    return model.layers * projections, attention


def _prompt_attention(kernels: Kernels, batch: Batch, window: float, shape: tuple[int, int, int, Dtype]) -> float:
    """Causal attention; a window of w makes n tokens see n*w - w*w/2 pairs instead of n*n/2, as independent chunks."""
    length = min(batch.prompt_tokens, batch.prompt_length)
    prompts = batch.prompt_tokens / length
    if window >= length:
        return kernels.prefill_attention(prompts, length, *shape)
    # A chunk of 2w tokens, causal, has as many pairs per token as the window: 2w * w / 2w = w.
    return kernels.prefill_attention(prompts * length / (2 * window), 2 * window, *shape)


def _latent_attention(deployment: Deployment, kernels: Kernels, batch: Batch) -> tuple[float, float]:
    """(projections, attention) of all layers; decoding multiplies the up-projections into query and output."""
    model, heads = deployment.model, deployment.heads
    latent = model.latent_attention
    assert latent is not None
    tokens, weights = batch.tokens, deployment.weights
    query_width = heads * (model.head_dim + latent.rope_dim)
    projections = kernels.gemm(tokens, latent.query_rank + latent.cached_width, model.hidden, weights)
    projections += kernels.gemm(tokens, query_width, latent.query_rank, weights)
    projections += kernels.gemm(tokens, model.hidden, heads * latent.value_dim, weights)
    attention = kernels.elementwise(tokens * (query_width + latent.cached_width) * 2 * ACTIVATION_BYTES)
    if batch.sequences:  # one small GEMM per head: together the work and the weights of one GEMM of all heads
        projections += kernels.gemm(batch.sequences, latent.kv_rank, heads * model.head_dim, "bf16")
        projections += kernels.gemm(batch.sequences, heads * latent.value_dim, latent.kv_rank, "bf16")
        attention += kernels.latent_attention(batch.sequences, batch.context, heads, deployment.kv_cache)
    if batch.prompt_tokens:
        expanded = heads * (model.head_dim + latent.value_dim)
        projections += kernels.gemm(batch.prompt_tokens, expanded, latent.kv_rank, weights)
        length = min(batch.prompt_tokens, batch.prompt_length)
        mean_dim = (model.head_dim + latent.rope_dim + latent.value_dim) // 2  # of scores and of values
        prompts = batch.prompt_tokens / length
        attention += kernels.prefill_attention(prompts, length, heads, heads, mean_dim, deployment.kv_cache)
    return model.layers * projections, model.layers * attention


def _ffn(deployment: Deployment, kernels: Kernels, batch: Batch) -> tuple[float, float]:
    """(GEMMs or experts, elementwise) of all layers' feed-forward networks."""
    model, tp = deployment.model, deployment.attention_tp
    if not model.is_moe:
        return _dense(deployment, kernels, batch, model.layers, model.ffn_hidden / tp)
    everyone = batch.tokens_of_all(deployment.attention_dp)
    router = kernels.gemm(batch.tokens, model.experts, model.hidden, "bf16")
    if deployment.all_to_all:
        routed = kernels.dispatched_experts(everyone, model, deployment.moe_ep, deployment.weights)
    else:
        routed = kernels.experts(everyone, model, deployment.moe_tp, deployment.moe_ep, deployment.weights)
    ffn_s, elementwise_s = model.moe_layers * (router + routed), 0.0
    for layers, width in (
        (model.moe_layers, model.shared_experts * model.ffn_hidden / tp),
        (model.dense_layers, model.dense_ffn_hidden / tp),
    ):
        if layers and width:
            dense = _dense(deployment, kernels, batch, layers, width)
            ffn_s, elementwise_s = ffn_s + dense[0], elementwise_s + dense[1]
    return ffn_s, elementwise_s


def _dense(deployment: Deployment, kernels: Kernels, batch: Batch, layers: int, width: float) -> tuple[float, float]:
    model, matrices = deployment.model, 2 if deployment.model.gated else 1
    gemms = kernels.gemm(batch.tokens, matrices * width, model.hidden, deployment.weights)
    gemms += kernels.gemm(batch.tokens, model.hidden, width, deployment.weights)
    return layers * gemms, layers * kernels.elementwise(batch.tokens * width * (matrices + 1) * ACTIVATION_BYTES)


def _communication(deployment: Deployment, kernels: Kernels, batch: Batch) -> float:
    """Collectives of all layers. With attention data-parallelism tokens travel to the experts and back."""
    model, tp = deployment.model, deployment.attention_tp
    token_bytes = model.hidden * ACTIVATION_BYTES
    reduce_s = kernels.all_reduce(batch.tokens * token_bytes, tp) if tp > 1 else 0.0
    if deployment.attention_dp == 1:
        return 2 * model.layers * reduce_s
    if not model.is_moe:  # replicas that share nothing
        return 2 * model.layers * reduce_s
    if deployment.all_to_all:
        travel_s = kernels.expert_all_to_all(batch.tokens / tp, model, deployment.gpus)
    else:
        travel_s = kernels.exchange(batch.tokens_of_all(deployment.attention_dp) * token_bytes, deployment.gpus)
    return model.layers * reduce_s + model.moe_layers * travel_s + model.dense_layers * reduce_s
