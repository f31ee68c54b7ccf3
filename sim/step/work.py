"""What each kind of fused op does on one GPU: kernels, collectives of its own, weights, KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sim.layers.choices import held
from sim.layers.declared import declared_choices
from sim.layers.ops import ROUTING_ENTRY_BYTES, FusedOp, gathers_weight, tensor_dtype
from sim.prices.collectives import Collective, expert_all_to_all
from sim.prices.curves import DecodeAttention, ExpertActivation, Gemm, GroupedGemm, Permute, Routing, Shape
from sim.prices.dtypes import DTYPE_BYTES, Dtype
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


def elementwise(rank: Rank, flops: float, traffic_bytes: float, shape: Shape | None = None) -> Kernel:
    """A kernel that streams activations; those around the experts' GEMMs have a measured shape."""
    dtype = rank.workload.precisions.activations
    return Kernel("elementwise", dtype, dtype, flops, traffic_bytes, shape)


def gemm(rank: Rank, dtype: Dtype, shape: Gemm | GroupedGemm, input_each: float) -> Kernel:
    """A GEMM [rows, inner] x [inner, columns], or one per active expert that share the rows.

    Args:
        rank: Whose activations it reads and writes.
        dtype: Format of the weights and of the arithmetic.
        shape: Rows summed over the experts, widths, experts.
        input_each: Bytes per input element.
    """
    rows, inner, columns = shape[:3]
    matrices = shape.active if isinstance(shape, GroupedGemm) else 1.0
    weights = matrices * inner * columns * DTYPE_BYTES[dtype]
    traffic = rows * inner * input_each + weights + rows * columns * rank.activation_each
    return Kernel("gemm", dtype, dtype, 2.0 * rows * inner * columns, traffic, shape)


def _norm(rank: Rank, op: FusedOp, label: str) -> Work:
    rows = rank.cut(rank.sizes.tokens, when=label == "t")
    columns = rank.cut(rank.sizes.columns["d"], when=label == "d")
    weight_bytes = columns * rank.activation_each
    kernel = elementwise(rank, 4.0 * rows * columns, 2 * rows * columns * rank.activation_each + weight_bytes)
    statistic = rank.tp_collective("all_reduce", "statistic", rows * _STATISTIC_BYTES) if label == "d" else ()
    return Work((kernel,), statistic, weight_bytes)


def _einsum(rank: Rank, op: FusedOp, label: str) -> Work:
    """Dense `td,dq->tq` or, over the local experts, grouped `ecd,edf->ecf`."""
    assert op.equation is not None
    sizes, dtype = rank.sizes, rank.workload.precisions.weights
    activation, weight = op.equation.split("->")[0].split(",")
    inner_label, column_label = weight[-2:]
    inner = rank.cut(sizes.columns[inner_label], when=label == inner_label)
    columns = _columns(rank, op, sharded=label == column_label)
    grouped = "e" in activation
    rows = sizes.expert_tokens if grouped else sizes.tokens
    by_rows = label == activation[-2]
    if by_rows:
        rows = rank.cut(rows, when=True)
    shape = Gemm(rows, inner, columns)
    if grouped:
        gated = rank.workload.model.gated
        # A share of the tokens visits fewer experts.
        active = rank.active_experts_of_a_share() if by_rows else sizes.active_experts
        shape = GroupedGemm(rows, inner, columns, active, sizes.local_experts, gated)
    input_each = DTYPE_BYTES[tensor_dtype(rank.workload, rank.layer.tensor(op.inputs[0]))]
    kernel = gemm(rank, dtype, shape, input_each)
    held = sizes.local_experts if grouped else 1
    return Work((kernel,), weight_bytes=held * inner * columns * DTYPE_BYTES[dtype])


def _columns(rank: Rank, op: FusedOp, *, sharded: bool) -> int:
    model = rank.workload.model
    if op.name == "qkv_proj" and sharded:
        return rank.local_qkv_columns()
    if op.name == "ffn1":  # gate and up are cut alike
        return rank.cut(model.ffn_hidden, when=sharded) * (model.ffn_in_width // model.ffn_hidden)
    assert op.equation is not None
    return rank.cut(rank.sizes.columns[op.equation[-1]], when=sharded)


def _attention(rank: Rank, op: FusedOp, label: str) -> Work:
    workload, model = rank.workload, rank.workload.model
    context_tokens = math.ceil(workload.context_tokens / rank.cp)
    requests = math.ceil(rank.sizes.tokens / rank.head_tp) if label == "t" else rank.sizes.tokens
    heads, kv_heads = rank.local_heads() if label == "h" else (model.heads, model.kv_heads)
    kv_dtype = workload.precisions.kv_cache
    kv_bytes = requests * context_tokens * 2.0 * kv_heads * model.head_dim * DTYPE_BYTES[kv_dtype]
    flops = 4.0 * requests * heads * model.head_dim * context_tokens  # scores and values
    new_elements = requests * 2 * (heads + kv_heads) * model.head_dim  # q, k and v in, the output out
    traffic = kv_bytes + new_elements * rank.activation_each
    multi_head = model.heads == model.kv_heads
    shape = DecodeAttention(requests, context_tokens, heads, kv_heads, model.head_dim, multi_head)
    kernel = Kernel("attention", workload.precisions.activations, kv_dtype, flops, traffic, shape)
    if rank.cp == 1:
        return Work((kernel,), kv_bytes=kv_bytes)
    merge = merge_partials(rank, requests * heads, whole=not label)
    return Work((kernel, merge.kernel), merge.collectives, kv_bytes=kv_bytes, buffer_bytes=merge.buffer_bytes)


def _pointwise(rank: Rank, op: FusedOp, label: str) -> Work:
    """Reads every input once, writes the output once."""
    output, *inputs = held(op, rank.layer, op.labels.index(label) if label in op.labels else NONE)
    output_bytes = rank.local_bytes(*output)
    traffic = output_bytes + sum([rank.local_bytes(*each) for each in inputs])
    flops_each = 1.0 if op.kind == "residual_add" else 5.0  # SwiGLU: exp, add, divide and two products
    flops = flops_each * output_bytes / rank.activation_each
    if op.kind == "activation" and rank.workload.model.is_moe:
        sizes = rank.sizes
        rows = rank.cut(sizes.expert_tokens, when=label == "c")
        width = rank.cut(rank.workload.model.ffn_hidden, when=label == "f")
        shape = ExpertActivation(rows, width, *_experts(rank))
        return Work((elementwise(rank, flops, traffic, shape),))
    return Work((elementwise(rank, flops, traffic),))


def _router(rank: Rank, op: FusedOp, label: str) -> Work:
    sizes, model = rank.sizes, rank.workload.model
    rows = rank.cut(sizes.tokens, when=label == "t")
    columns = rank.cut(model.experts, when=label == "e")
    dtype = rank.workload.precisions.activations  # routers are kept out of low precision
    logits_bytes = rows * model.experts * rank.activation_each
    routing_bytes = rows * model.experts_per_token * ROUTING_ENTRY_BYTES
    kernels = (
        gemm(rank, dtype, Gemm(rows, model.hidden, columns), rank.activation_each),
        elementwise(
            rank,
            5.0 * rows * model.experts,
            logits_bytes + routing_bytes,
            Routing(rows, model.experts, model.experts_per_token, *_experts(rank)),
        ),
    )
    gather = rank.tp_collective("all_gather", "logits", logits_bytes) if label == "e" else ()
    return Work(kernels, gather, model.hidden * columns * DTYPE_BYTES[dtype])


def _dispatch(rank: Rank, op: FusedOp, label: str) -> Work:
    """Copies every token for each of its experts, then sends the copies to their ranks."""
    rows, copies, columns = _routed(rank, label)
    each = DTYPE_BYTES[rank.workload.precisions.dispatch]
    traffic = rows * columns * rank.activation_each + copies * columns * each
    permute = elementwise(rank, 0.0, traffic, Permute(rows, copies, columns, *_experts(rank)))
    return Work((permute,), _expert_all_to_all(rank, op, copies, columns, each))


def _combine(rank: Rank, op: FusedOp, label: str) -> Work:
    """Sends expert results back, sums each token's by weight, adds the residual stream."""
    rows, copies, columns = _routed(rank, label)
    each = rank.activation_each
    flops, traffic = 2.0 * copies * columns + rows * columns, (copies + 2 * rows) * columns * each
    weighted_sum = elementwise(rank, flops, traffic, Permute(rows, copies, columns, *_experts(rank)))
    return Work((weighted_sum,), _expert_all_to_all(rank, op, copies, columns, each))


def _experts(rank: Rank) -> tuple[Dtype, bool]:
    """What selects the measured kernels around the experts: the format of their weights, and gating."""
    return rank.workload.precisions.weights, rank.workload.model.gated


def _routed(rank: Rank, label: str) -> tuple[int, int, int]:
    """Tokens, their copies for experts, and hidden columns on this GPU."""
    sizes = rank.sizes
    rows, copies = (rank.cut(size, when=label == "t") for size in (sizes.tokens, sizes.expert_tokens))
    return rows, copies, rank.cut(sizes.columns["d"], when=label == "d")


def _expert_all_to_all(rank: Rank, op: FusedOp, copies: float, columns: int, each: float) -> tuple[Collective, ...]:
    if rank.ep == 1:
        return ()
    hardware, model = rank.workload.hardware, rank.workload.model
    shape = (copies / model.experts_per_token, columns, each, model.experts, model.experts_per_token)
    priced = expert_all_to_all(hardware, op.kind, rank.ep_group, *shape)
    sent_bytes = copies * columns * each * (rank.ep - 1) / rank.ep
    return (Collective("all_to_all", rank.experts_axis, rank.ep, "routed tokens", sent_bytes, *priced),)


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
