"""Time per output token of a serving deployment: continuous batching of one engine on one kind of GPU.

A decode step is every layer's kernels, the engine's collectives and the LM head, from the fitted kernels. Continuous
batching adds the work of other requests' prompts and the engine's own time per step, whose few parameters are fitted
to measured serving runs; `raysearch.calibration.serving` fits them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from sim.types import Dtype, Model

WeightFormat = Literal["bf16", "fp8", "fp8_block"]
"""How weights are stored and multiplied; "fp8_block" has one scale per 128 x 128 weights."""
WEIGHT_BYTES: Mapping[WeightFormat, int] = {"bf16": 2, "fp8": 1, "fp8_block": 1}
KV_BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp8": 1}
_ACTIVATION_BYTES = 2
LAUNCH_LAYER_S = 60e-6
"""[assumed] A step with prompts runs outside the CUDA graph: about 12 launches of 5 us per layer show."""


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
class Engine:
    """How an inference engine schedules, and its own time beside the kernels.

    Attributes:
        step_s: Time of a step that no kernel accounts for.
        sequence_s: The same for each running sequence: sampling, detokenising, bookkeeping.
        prefill_share: Share of the other requests' prompt work that a running request waits for.
    """

    name: str
    step_s: float
    sequence_s: float
    prefill_share: float


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


@dataclass(frozen=True, slots=True)
class Work:
    """A deployment's kernels before the engine's own parameters: what these are fitted on.

    Attributes:
        running: Sequences that decode at once on one attention rank.
        decode_s: One decode step's kernels and collectives.
        prompt_s: What one prompt adds to a decode step.
        prompts: Prompts per step over the whole replica.
        others_prompts: The same without those of one request's own place.
        parts_s: The step by kind of kernel, before any overlap.
    """

    running: float
    decode_s: float
    prompt_s: float
    prompts: float
    others_prompts: float
    parts_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Serving:
    """How a deployment runs.

    Attributes:
        tpot_s: Mean time per output token after the first.
        running: Sequences that decode at once on one attention rank.
        work: The kernels behind it.
        tokens_per_s_per_gpu: Output tokens of the replica with every prompt's work counted.
    """

    tpot_s: float
    running: float
    work: Work
    tokens_per_s_per_gpu: float


def serve(deployment: Deployment, kernels: Kernels, engine: Engine, hbm_bytes: float, policy: MemoryPolicy) -> Serving:
    """How fast a deployment makes tokens in the steady state.

    Each of the running sequences is replaced once in `osl` steps, so that a request waits for the prompts of the
    others; `prefill_share` of that shows in its time per output token.
    """
    work = steady_work(deployment, kernels, hbm_bytes, policy)
    step_s = work.decode_s + engine.step_s + engine.sequence_s * work.running
    tpot_s = step_s + engine.prefill_share * work.others_prompts * work.prompt_s
    cycle_s = step_s + work.prompts * work.prompt_s
    made = work.running * deployment.attention_dp / cycle_s / deployment.gpus
    return Serving(tpot_s, work.running, work, made)


def steady_work(deployment: Deployment, kernels: Kernels, hbm_bytes: float, policy: MemoryPolicy) -> Work:
    """The kernels of a steady state: decode steps half way through the outputs, and prompts mixed into them."""
    per_rank = deployment.concurrency / deployment.attention_dp
    running = max(1.0, min(per_rank, sequence_limit(deployment, hbm_bytes, policy)))
    context = deployment.isl + deployment.osl / 2
    batch = Batch(running, context)
    decode_s = step_time(deployment, kernels, batch)
    sequences = running * deployment.attention_dp
    together = max(1.0, sequences / deployment.osl)  # prompts that share a step
    mixed = replace(batch, prompt_tokens=together * deployment.isl, prompt_length=float(deployment.isl))
    added_s = max(0.0, step_time(deployment, kernels, mixed) - decode_s) + LAUNCH_LAYER_S * deployment.model.layers
    return Work(
        running,
        decode_s,
        added_s / together,
        prompts=sequences / deployment.osl,
        others_prompts=max(0.0, sequences - 1) / deployment.osl,
        parts_s=step_parts(deployment, kernels, batch),
    )


def prefill_time(deployment: Deployment, kernels: Kernels, tokens: float) -> float:
    """Seconds of a step in which every attention rank computes `tokens` of prompts of `isl`, as a prefill worker."""
    batch = Batch(0.0, 1.0, tokens, min(tokens, deployment.isl), all_prompt=True)
    return step_time(deployment, kernels, batch)


# --- memory ---------------------------------------------------------------------------------------------


def weight_bytes(deployment: Deployment) -> float:
    """Weights of one GPU. Embedding and LM head stay in bf16 [assumed], cut over attention_tp."""
    model, each = deployment.model, WEIGHT_BYTES[deployment.weights]
    attention = model.layers * model.attention_parameters * each / deployment.attention_tp
    embedding = 2 * model.vocab * model.hidden * _ACTIVATION_BYTES / deployment.attention_tp
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


# --- one step -------------------------------------------------------------------------------------------


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
    norms = 2 * kernels.elementwise(batch.tokens * model.hidden * 3 * _ACTIVATION_BYTES)
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
    attention = model.layers * kernels.elementwise(batch.tokens * qkv * 2 * _ACTIVATION_BYTES)
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
    attention = kernels.elementwise(tokens * (query_width + latent.cached_width) * 2 * _ACTIVATION_BYTES)
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
    return layers * gemms, layers * kernels.elementwise(batch.tokens * width * (matrices + 1) * _ACTIVATION_BYTES)


def _communication(deployment: Deployment, kernels: Kernels, batch: Batch) -> float:
    """Collectives of all layers. With attention data-parallelism tokens travel to the experts and back."""
    model, tp = deployment.model, deployment.attention_tp
    token_bytes = model.hidden * _ACTIVATION_BYTES
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
