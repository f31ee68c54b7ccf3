"""What each kind of fused op does on one GPU: kernels, collectives of its own, weights, KV cache.

A layer stands for the mean of all layers: where some have a sliding window or a dense feed-forward network, each kind's
kernels count with its share of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from sim.layers.choices import held
from sim.layers.declared import declared_choices
from sim.layers.model import LatentAttention
from sim.layers.ops import FusedOp, gathers_weight
from sim.layers.sizes import ROUTING_ENTRY_BYTES, tensor_dtype
from sim.prices.collectives import Collective, expert_all_to_all
from sim.prices.curves import (
    DecodeAttention,
    ExpertActivation,
    Gemm,
    GroupedGemm,
    LatentDecode,
    Permute,
    PrefillAttention,
    Routing,
    Shape,
)
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.mesh import Group, group
from sim.prices.roofline import Kernel
from sim.step.context import merge_partials
from sim.step.rank import Rank
from sim.strategy import NONE

_STATISTIC_BYTES = 4
"""A norm's sum of squares is kept in fp32."""


class Work(NamedTuple):
    """One op under one choice, before it is priced.

    Attributes:
        kernels: Its launches, in order.
        collectives: Communication inside the op: all-to-all over ep, a norm's statistic, ...
        weight_bytes: Weights of the op that the GPU holds.
        kv_bytes: KV cache of one layer and one microbatch that the GPU holds.
        buffer_bytes: What the op holds besides its inputs, its output and its weight at rest.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...] = ()
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    buffer_bytes: float = 0.0


def op_work(rank: Rank, op: FusedOp, choice: int) -> Work:
    """The work of a fused op under a choice of the strategy; declared ones may bring their own."""
    declared = declared_choices(op.key).get(choice)
    if declared and declared.work:
        return declared.work(rank, op)
    work = _WORK[op.kind](rank, op, op.label(choice))
    return _gathering(rank, work) if gathers_weight(choice) else work


def _gathering(rank: Rank, work: Work) -> Work:
    """The same with a weight that rests in equal shares on the group's GPUs and is gathered into a buffer at use."""
    if rank.tp == 1:
        return work
    gather = rank.tp_collective("all_gather", "weight", work.weight_bytes)
    at_rest = work.weight_bytes / rank.tp
    return work._replace(collectives=gather, weight_bytes=at_rest, buffer_bytes=work.weight_bytes)


def elementwise(
    rank: Rank, flops: float, traffic_bytes: float, shape: Shape | None = None, *, launches: float = 1.0
) -> Kernel:
    """A kernel that streams activations; those around the experts' GEMMs have a measured shape."""
    dtype = rank.workload.precisions.activations
    return Kernel("elementwise", dtype, dtype, flops, traffic_bytes, shape, launches)


def gemm(rank: Rank, dtype: Dtype, shape: Gemm | GroupedGemm, input_each: float, *, launches: float = 1.0) -> Kernel:
    """A GEMM [rows, inner] x [inner, columns], or one per active expert that share the rows.

    Args:
        rank: Whose activations it reads and writes.
        dtype: Format of the weights and of the arithmetic.
        shape: Rows summed over the experts, widths, experts.
        input_each: Bytes per input element.
        launches: Share of the layers that have it.
    """
    rows, inner, columns = shape[:3]
    matrices = shape.active if isinstance(shape, GroupedGemm) else 1.0
    weights = matrices * inner * columns * DTYPE_BYTES[dtype]
    traffic = rows * inner * input_each + weights + rows * columns * rank.activation_each
    return Kernel("gemm", dtype, dtype, 2.0 * rows * inner * columns, traffic, shape, launches)


def _norm(rank: Rank, op: FusedOp, label: str) -> Work:
    """Fused with the residual add before it, whose sum it still has in registers: it writes, and reads its weight.

    [assumed] as every engine's fused add-and-norm kernel does; the add has its own traffic and no launch.
    """
    rows = rank.shard(rank.sizes.tokens, when=label == "t")
    columns = rank.shard(rank.sizes.columns["d"], when=label == "d")
    weight_bytes = columns * rank.activation_each
    kernel = elementwise(rank, 4.0 * rows * columns, rows * columns * rank.activation_each + weight_bytes)
    statistic = rank.tp_collective("all_reduce", "statistic", rows * _STATISTIC_BYTES) if label == "d" else ()
    return Work((kernel,), statistic, weight_bytes)


def _einsum(rank: Rank, op: FusedOp, label: str) -> Work:
    """Dense `td,dq->tq` or, over the local experts, grouped `ecd,edf->ecf`."""
    assert op.equation is not None
    if rank.workload.model.latent_attention is not None and op.name == "qkv_proj":
        return _latent_projections(rank, rank.workload.model.latent_attention, label)
    sizes, model = rank.sizes, rank.workload.model
    activation, weight = op.equation.split("->")[0].split(",")
    inner_label, column_label = weight[-2:]
    inner = rank.shard(sizes.columns[inner_label], when=label == inner_label)
    columns = _columns(rank, op, sharded=label == column_label)
    grouped = "e" in activation
    rows = sizes.expert_tokens if grouped else sizes.tokens
    by_rows = label == activation[-2]
    if by_rows:
        rows = rank.shard(rows, when=True)
    input_each = DTYPE_BYTES[tensor_dtype(rank.workload, rank.layer.tensor(op.inputs[0]))]
    if not grouped:
        dtype = rank.workload.precisions.weights
        kernel = gemm(rank, dtype, Gemm(rows, inner, columns), input_each)
        return Work((kernel,), weight_bytes=inner * columns * DTYPE_BYTES[dtype])
    dtype, share = rank.expert_dtype, model.moe_layers / model.layers
    # A share of the tokens visits fewer experts.
    active = rank.active_experts_of_a_share() if by_rows else sizes.active_experts
    skewed = rank.workload.routing == "skewed"
    shape = GroupedGemm(rows, inner, columns, active, sizes.local_experts, model.gated, skewed)
    beside, beside_bytes = _beside_experts(rank, op.name)
    experts_bytes = share * sizes.local_experts * inner * columns * DTYPE_BYTES[dtype]
    return Work(
        (gemm(rank, dtype, shape, input_each, launches=share), *beside), weight_bytes=experts_bytes + beside_bytes
    )


def _beside_experts(rank: Rank, op: str) -> tuple[tuple[Kernel, ...], float]:
    """Shared experts and dense layers among those with experts: kernels and bytes of their half of a feed-forward.

    Both are computed by the group that shares the tokens, columns of ffn1 and rows of ffn2 sharded over it whatever
    the choice, as every engine does. [assumed]
    """
    model, dtype = rank.workload.model, rank.workload.precisions.weights
    kernels: list[Kernel] = []
    weight_bytes = 0.0
    for width, layers in (
        (model.shared_experts * model.ffn_hidden, model.moe_layers),
        (model.dense_ffn_hidden, model.dense_layers),
    ):
        if not width or not layers:
            continue
        share, mine = layers / model.layers, math.ceil(width / (rank.tp * rank.copies))
        matrices = 2 if model.gated else 1
        if op == "activation":
            traffic = rank.sizes.tokens * mine * (matrices + 1) * rank.activation_each
            kernels.append(elementwise(rank, 5.0 * rank.sizes.tokens * mine, traffic, launches=share))
            continue
        inner, columns = (model.hidden, matrices * mine) if op == "ffn1" else (mine, model.hidden)
        kernels.append(gemm(rank, dtype, Gemm(rank.sizes.tokens, inner, columns), rank.activation_each, launches=share))
        weight_bytes += share * inner * columns * DTYPE_BYTES[dtype]
    return tuple(kernels), weight_bytes


def _latent_projections(rank: Rank, latent: LatentAttention, label: str) -> Work:
    """Down to the latents on every GPU, up to its heads; decoding reads the up-projection of keys and values too.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C. The absorbed products run in the activations'
    format. [assumed]
    """
    model, precisions, load = rank.workload.model, rank.workload.precisions, rank.sizes.load
    dtype, tokens = precisions.weights, rank.sizes.tokens
    heads = rank.shard(model.heads, when=label == "q")
    query_width = heads * (model.head_dim + latent.rope_dim)
    shapes = [Gemm(tokens, model.hidden, latent.query_rank + latent.cached_width)]
    shapes.append(Gemm(tokens, latent.query_rank, query_width))
    expanded = heads * (model.head_dim + latent.value_dim)
    kernels = [gemm(rank, dtype, shape, rank.activation_each) for shape in shapes]
    if load.sequences:  # one small GEMM per head: together the work and the weights of one GEMM of all heads
        for absorbed in (
            Gemm(load.sequences, heads * model.head_dim, latent.kv_rank),
            Gemm(load.sequences, latent.kv_rank, heads * latent.value_dim),
        ):
            kernels.append(gemm(rank, precisions.activations, absorbed, rank.activation_each))
    if load.prompts:
        prompt_tokens = load.prompts * load.prompt_tokens
        kernels.append(gemm(rank, dtype, Gemm(prompt_tokens, latent.kv_rank, expanded), rank.activation_each))
    weights = sum(shape.inner * shape.columns for shape in shapes) + latent.kv_rank * expanded
    return Work(tuple(kernels), weight_bytes=weights * DTYPE_BYTES[dtype])


def _columns(rank: Rank, op: FusedOp, *, sharded: bool) -> int:
    model = rank.workload.model
    if op.name == "qkv_proj" and sharded:
        return rank.local_qkv_columns()
    if op.name == "ffn1":  # gate and up are sharded alike
        return rank.shard(model.ffn_hidden, when=sharded) * (model.ffn_in_width // model.ffn_hidden)
    assert op.equation is not None
    return rank.shard(rank.sizes.columns[op.equation[-1]], when=sharded)


def _attention(rank: Rank, op: FusedOp, label: str) -> Work:
    """Rotary embedding and cache write, decoding sequences, prompts; then the merge where the context is sharded."""
    model, load = rank.workload.model, rank.sizes.load
    sequences, prompts = load.sequences, load.prompts
    if label == "t":
        sequences = math.ceil(sequences / rank.head_tp)
        prompts = math.ceil(prompts / rank.head_tp) if prompts > 1 else prompts
    heads, kv_heads = rank.local_heads() if label == "h" else (model.heads, model.kv_heads)
    price = _latent_attention if model.latent_attention else _grouped_attention
    kernels, kv_bytes = price(rank, sequences, prompts, heads, kv_heads)
    if rank.cp == 1:
        return Work(kernels, kv_bytes=kv_bytes)
    merge = merge_partials(rank, sequences * heads, whole=not label)
    return Work((*kernels, merge.kernel), merge.collectives, kv_bytes=kv_bytes, buffer_bytes=merge.buffer_bytes)


def _grouped_attention(
    rank: Rank, sequences: int, prompts: float, heads: int, kv_heads: int
) -> tuple[tuple[Kernel, ...], float]:
    """(kernels, bytes of KV cache) of attention whose query heads share KV heads, with or without a window."""
    workload, model, load = rank.workload, rank.workload.model, rank.sizes.load
    kv_dtype = workload.precisions.kv_cache
    row_bytes = 2.0 * kv_heads * model.head_dim * DTYPE_BYTES[kv_dtype]  # one token's keys and values
    tokens = sequences + prompts * load.prompt_tokens
    written = tokens * (heads + 2 * kv_heads) * model.head_dim * 2 * rank.activation_each
    kernels, kv_bytes = [elementwise(rank, 0.0, written)], 0.0
    multi_head = model.heads == model.kv_heads
    windowed = model.sliding_layers / model.layers
    for share, window in ((1 - windowed, math.inf), (windowed, float(model.sliding_window))):
        if not share:
            continue
        context = math.ceil(min(load.context_tokens, window) / rank.cp)
        cached = math.ceil(min(rank.load.cached_tokens, window) / rank.cp)
        held = sequences * cached if sequences else prompts * min(load.prompt_tokens, window)
        kv_bytes += share * held * row_bytes
        new = 2 * (heads + kv_heads) * model.head_dim  # q, k and v in, the output out
        if sequences:
            shape = DecodeAttention(sequences, context, heads, kv_heads, model.head_dim, multi_head)
            flops = 4.0 * sequences * heads * model.head_dim * context  # scores and values
            traffic = sequences * context * row_bytes + sequences * new * rank.activation_each
            dtype = workload.precisions.activations
            kernels.append(Kernel("attention", dtype, kv_dtype, flops, traffic, shape, share))
        if prompts:
            shape = _causal(prompts, load.prompt_tokens, window, heads, kv_heads, model.head_dim)
            kernels.append(_prefill_kernel(rank, shape, kv_dtype, share))
    return tuple(kernels), kv_bytes


def _causal(prompts: float, tokens: int, window: float, heads: int, kv_heads: int, head_dim: int) -> PrefillAttention:
    """Causal attention; a window of w makes n tokens see n*w - w*w/2 pairs instead of n*n/2, as independent chunks."""
    if window >= tokens:
        return PrefillAttention(prompts, tokens, heads, kv_heads, head_dim)
    # A chunk of 2w tokens, causal, has as many pairs per token as the window: 2w * w / 2w = w.
    return PrefillAttention(prompts * tokens / (2 * window), 2 * window, heads, kv_heads, head_dim)


def _prefill_kernel(rank: Rank, shape: PrefillAttention, kv_dtype: Dtype, share: float = 1.0) -> Kernel:
    dtype = rank.workload.precisions.activations
    flops = 2.0 * shape.sequences * shape.heads * shape.head_dim * shape.tokens**2
    streamed = shape.sequences * shape.tokens * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return Kernel("attention", dtype, kv_dtype, flops, streamed * rank.activation_each, shape, share)


def _latent_attention(
    rank: Rank, sequences: int, prompts: float, heads: int, kv_heads: int
) -> tuple[tuple[Kernel, ...], float]:
    """The same with one latent per token for all heads: tp does not divide the cache, cp does."""
    workload, model, load = rank.workload, rank.workload.model, rank.sizes.load
    latent = model.latent_attention
    assert latent is not None
    kv_dtype, dtype = workload.precisions.kv_cache, workload.precisions.activations
    row_bytes = latent.cached_width * DTYPE_BYTES[kv_dtype]
    query_width = heads * (model.head_dim + latent.rope_dim)
    tokens = sequences + prompts * load.prompt_tokens
    kernels = [elementwise(rank, 0.0, tokens * (query_width + latent.cached_width) * 2 * rank.activation_each)]
    context = math.ceil(load.context_tokens / rank.cp)
    cached = math.ceil(rank.load.cached_tokens / rank.cp)
    if sequences:
        flops = 2.0 * sequences * heads * context * (latent.cached_width + latent.kv_rank)
        traffic = sequences * context * row_bytes + sequences * heads * latent.kv_rank * 2 * rank.activation_each
        kernels.append(Kernel("attention", dtype, kv_dtype, flops, traffic, LatentDecode(sequences, context, heads)))
    if prompts:
        mean_dim = (model.head_dim + latent.rope_dim + latent.value_dim) // 2  # of scores and of values
        shape = PrefillAttention(prompts, load.prompt_tokens, heads, heads, mean_dim)
        kernels.append(_prefill_kernel(rank, shape, kv_dtype))
    held = sequences * cached if sequences else prompts * load.prompt_tokens
    return tuple(kernels), held * row_bytes


def _pointwise(rank: Rank, op: FusedOp, label: str) -> Work:
    """Reads every input once, writes the output once. A residual add is fused into the norm that follows."""
    output, *inputs = held(op, rank.layer, op.labels.index(label) if label in op.labels else NONE)
    output_bytes = rank.local_bytes(*output)
    traffic = output_bytes + sum([rank.local_bytes(*each) for each in inputs])
    if op.kind == "residual_add":
        return Work((elementwise(rank, output_bytes / rank.activation_each, traffic)._replace(fused=True),))
    flops = 5.0 * output_bytes / rank.activation_each  # SwiGLU: exp, add, divide and two products
    model = rank.workload.model
    if not model.is_moe:
        return Work((elementwise(rank, flops, traffic),))
    rows = rank.shard(rank.sizes.expert_tokens, when=label == "c")
    width = rank.shard(model.ffn_hidden, when=label == "f")
    share = model.moe_layers / model.layers
    kernel = elementwise(rank, flops, traffic, ExpertActivation(rows, width, *_experts(rank)), launches=share)
    return Work((kernel, *_beside_experts(rank, op.name)[0]))


def _router(rank: Rank, op: FusedOp, label: str) -> Work:
    sizes, model = rank.sizes, rank.workload.model
    share = model.moe_layers / model.layers
    rows = rank.shard(sizes.tokens, when=label == "t")
    columns = rank.shard(model.experts, when=label == "e")
    dtype = rank.workload.precisions.activations  # routers are kept out of low precision
    logits_bytes = rows * model.experts * rank.activation_each
    routing_bytes = rows * model.experts_per_token * ROUTING_ENTRY_BYTES
    shape = Routing(rows, model.experts, model.experts_per_token, *_experts(rank))
    kernels = (
        gemm(rank, dtype, Gemm(rows, model.hidden, columns), rank.activation_each, launches=share),
        elementwise(rank, 5.0 * rows * model.experts, logits_bytes + routing_bytes, shape, launches=share),
    )
    gather = rank.tp_collective("all_gather", "logits", logits_bytes) if label == "e" else ()
    return Work(kernels, gather, share * model.hidden * columns * DTYPE_BYTES[dtype])


def _dispatch(rank: Rank, op: FusedOp, label: str) -> Work:
    """Copies every token for each of its experts, and sends the copies to their ranks, or every token to all."""
    rows, copies, columns = _routed(rank, label)
    each, share = DTYPE_BYTES[rank.workload.precisions.dispatch], _moe_share(rank)
    gathered = rank.workload.expert_exchange == "all_gather"
    if gathered:
        each = rank.activation_each
    traffic = rows * columns * rank.activation_each + copies * columns * each
    permute = elementwise(rank, 0.0, traffic, Permute(rows, copies, columns, *_experts(rank)), launches=share)
    if gathered:
        gather = rank.collective("all_gather", *_other_tokens(rank), "tokens", rows * columns * each)
        return Work((permute,), _counted(gather, share))
    return Work((permute,), _expert_all_to_all(rank, op, copies, columns, each))


def _combine(rank: Rank, op: FusedOp, label: str) -> Work:
    """Sends expert results back, sums each token's by weight, adds the residual stream."""
    rows, copies, columns = _routed(rank, label)
    each, share = rank.activation_each, _moe_share(rank)
    flops, traffic = 2.0 * copies * columns + rows * columns, (copies + 2 * rows) * columns * each
    shape = Permute(rows, copies, columns, *_experts(rank))
    weighted_sum = elementwise(rank, flops, traffic, shape, launches=share)
    if rank.workload.expert_exchange == "all_to_all":
        return Work((weighted_sum,), _expert_all_to_all(rank, op, copies, columns, each))
    scatter = rank.collective("reduce_scatter", *_other_tokens(rank), "tokens", rows * columns * each)
    own_bytes = rows / rank.token_groups * columns * each
    total = rank.collective("all_reduce", *_same_tokens(rank), "tokens", own_bytes)
    return Work((weighted_sum,), (*_counted(scatter, share), *total))


def _counted(collectives: tuple[Collective, ...], share: float) -> tuple[Collective, ...]:
    """Collectives that only a share of the layers has."""
    if share == 1:
        return collectives
    return tuple(replace(c, time_s=share * c.time_s, bytes_per_device=share * c.bytes_per_device) for c in collectives)


def _other_tokens(rank: Rank) -> tuple[str, Group]:
    """The groups with tokens of their own, as an axis."""
    tiers = rank.workload.hardware.tiers
    return rank.experts_axis, group(rank.tp * rank.copies, rank.token_groups, *tiers)


def _same_tokens(rank: Rank) -> tuple[str, Group]:
    """The groups of experts that have the same tokens, as an axis."""
    return rank.experts_axis, group(rank.tp, rank.copies, *rank.workload.hardware.tiers)


def _moe_share(rank: Rank) -> float:
    return rank.workload.model.moe_layers / rank.workload.model.layers


def _experts(rank: Rank) -> tuple[Dtype, bool]:
    """What selects the measured kernels around the experts: the format of their weights, and gating."""
    return rank.expert_dtype, rank.workload.model.gated


def _routed(rank: Rank, label: str) -> tuple[float, int, int]:
    """Tokens, their copies for experts, and hidden columns on this GPU.

    Where tokens are gathered a rank sees those of all groups; where they travel, its own.
    """
    sizes = rank.sizes
    tokens = sizes.tokens if rank.workload.expert_exchange == "all_to_all" else sizes.all_tokens
    rows, copies = (rank.shard(size, when=label == "t") for size in (tokens, sizes.expert_tokens))
    return rows, copies, rank.shard(sizes.columns["d"], when=label == "d")


def _expert_all_to_all(rank: Rank, op: FusedOp, copies: float, columns: int, each: float) -> tuple[Collective, ...]:
    if rank.ep == 1:
        return ()
    hardware, model = rank.workload.hardware, rank.workload.model
    # With prompts on one group alone, what it sends is more than what it gets.
    most = max(copies, rank.sizes.tokens * model.experts_per_token * copies / max(rank.sizes.expert_tokens, 1.0))
    shape = (most / model.experts_per_token, columns, each, model.experts, model.experts_per_token)
    priced = expert_all_to_all(hardware, op.kind, rank.ep_group, *shape)
    sent_bytes = most * columns * each * (rank.ep - 1) / rank.ep
    sent = Collective("all_to_all", rank.experts_axis, rank.ep, "routed tokens", sent_bytes, *priced)
    return _counted((sent,), _moe_share(rank))


_WORK: dict[str, Callable[[Rank, FusedOp, str], Work]] = {
    "norm": _norm,
    "einsum": _einsum,
    "attention": _attention,
    "residual_add": _pointwise,
    "activation": _pointwise,
    "router": _router,
    "dispatch": _dispatch,
    "combine": _combine,
}
