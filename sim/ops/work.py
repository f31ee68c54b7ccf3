"""What fused ops do on one GPU: kernels, collectives of their own, weights.

`sim.ops.layers` says which is whose in a layer, `sim.ops.vocabulary` before and behind the layers.
"""

from __future__ import annotations

import math
from functools import lru_cache

from sim.arrays import add_up
from sim.layers.choices import kept_tensors
from sim.layers.declared import DeclaredWork, declared_choices
from sim.layers.ops import FusedOp, gathers_weight
from sim.ops.rank import Rank, Work, elementwise, gemm
from sim.ops.residuals import mix_after, mix_before
from sim.ops.sizes import ROUTING_ENTRY_BYTES, tensor_dtype
from sim.ops.token_mixers import token_mixer
from sim.ops.two_letters import grid_work
from sim.prices.collectives import Collective, carried, expert_all_to_all, expert_all_to_alls
from sim.prices.curves import ExpertActivation, ExpertRouting, Gemm, GroupedGemm, Permute
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.mesh import MeshGroup, group
from sim.prices.roofline import Kernel
from sim.strategy import GRID, NONE

_STATISTIC_BYTES = 4
"""A norm's sum of squares is kept in fp32."""
_OFFER_BYTES = 8
"""A token and its score."""


def op_work(rank: Rank, op: FusedOp, choice: int) -> Work:
    """The work of a fused op under a choice of the strategy; declared ones may bring their own."""
    if choice in GRID:
        return grid_work(rank, op, choice)
    own, label, gathers = _chosen(op, choice)
    if own:
        return own(rank, op)
    work: Work = op.work(rank, op, label if rank.tp > 1 else "")  # nothing is cut, not even to whole rows
    return _gathering(rank, work) if gathers else work


@lru_cache(maxsize=1024)
def _chosen(op: FusedOp, choice: int) -> tuple[DeclaredWork | None, str, bool]:
    """A choice's own work, the letter that it shards, and whether it gathers the weight."""
    declared = declared_choices(op.key).get(choice)
    return declared and declared.work, op.label(choice), gathers_weight(choice)


def _gathering(rank: Rank, work: Work) -> Work:
    """The same with a weight that rests in equal shares on the group's GPUs and is gathered into a buffer at use."""
    if rank.tp == 1:
        return work
    gather = rank.tp_collective("all_gather", "weight", work.weight_bytes)
    at_rest = work.weight_bytes / rank.tp
    return work._replace(collectives=gather, weight_bytes=at_rest, buffer_bytes=work.weight_bytes)


def norm_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Fused with the residual add before it, whose sum it still has in registers: it writes, and reads its weight.

    [assumed] as every engine's fused add-and-norm kernel does; the add has its own traffic and no launch.
    """
    rows = rank.shard(rank.sizes.tokens, when=label == "t")
    columns = rank.shard(rank.sizes.columns["d"], when=label == "d")
    weight_bytes = columns * rank.activation_each
    kernel = elementwise(rank, 4.0 * rows * columns, rows * columns * rank.activation_each + weight_bytes)
    several = rank.workload.model.mixes_residuals
    before, mix_bytes = mix_before(rank, rows, columns) if several else ((), 0.0)
    sums = 1 + rank.workload.model.stream_mix_columns
    statistic = rank.tp_collective("all_reduce", "statistic", rows * sums * _STATISTIC_BYTES) if label == "d" else ()
    return Work((*before, kernel), statistic, weight_bytes + mix_bytes)


def into_attention_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The fused projection, or those of the mixer's own, and what stands beside it."""
    mixer = token_mixer(rank.attention)
    if mixer.projections:
        own = mixer.projections(rank, rank.attention, label)
    else:
        own = _product(rank, op, label, rank.local_qkv_columns() if label == "q" else rank.sizes.columns["q"])
    beside = mixer.beside(rank, rank.attention) if mixer.beside else Work(())
    if not beside.kernels:
        return own
    return own._replace(kernels=(*own.kernels, *beside.kernels), weight_bytes=own.weight_bytes + beside.weight_bytes)


def out_of_attention_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The product back to the hidden state, or those of the mixer's own."""
    output = token_mixer(rank.attention).output
    return output(rank, rank.attention, label) if output else to_hidden_work(rank, op, label)


def contracts_in_two(rank: Rank, label: str) -> bool:
    """Whether hidden is to be contracted in parts where the way into attention is more than one product.

    A norm stands between the projections of latents, and an indexer's queries or a decay's second half come out of one.
    """
    return label == "d" and rank.tp > 1 and token_mixer(rank.attention).in_two(rank.attention)


def cuts_a_latent(rank: Rank, label: str) -> bool:
    """Whether hidden columns are to be cut where experts work in a latent, which every GPU projects into whole."""
    return label == "d" and rank.tp > 1 and rank.feed_forward.latent > 0


def to_hidden_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """A product whose columns are those of the hidden state; of experts, those of the latent that they work in."""
    grouped = "e" in op.letters
    return _product(
        rank, op, label, rank.shard(_width(rank) if grouped else rank.sizes.columns["d"], when=label == "d")
    )


def _width(rank: Rank) -> int:
    """Columns that experts read and leave."""
    return rank.feed_forward.latent or rank.workload.model.hidden


def ffn1_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Gate and up side by side, sharded alike; of experts also what all tokens visit."""
    feed_forward = rank.feed_forward
    columns = rank.shard(feed_forward.ffn_hidden, when=label == "f") * feed_forward.projections
    own = _product(rank, op, label, columns)
    return _beside(rank, own, rank.workload.model.hidden, feed_forward.projections * _shared_columns(rank))


def ffn2_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Back to the hidden state; of experts also what all tokens visit."""
    return _beside(rank, to_hidden_work(rank, op, label), _shared_columns(rank), rank.workload.model.hidden)


def _product(rank: Rank, op: FusedOp, label: str, columns: int) -> Work:
    """Dense `td,dq->tq` or, over the local experts, grouped `ecd,edf->ecf`, with so many columns of the weight here."""
    sizes, (activation, weight) = rank.sizes, op.operation.operands
    grouped = "e" in activation
    width = _width(rank) if grouped and weight[-2] == "d" else sizes.columns[weight[-2]]
    inner = rank.shard(width, when=label == weight[-2])
    rows = sizes.expert_tokens if grouped else sizes.tokens
    by_rows = label == activation[-2]
    if by_rows:
        rows = rank.shard(rows, when=True)
    input_each = DTYPE_BYTES[tensor_dtype(rank.workload, rank.layer.tensor_by_name[op.inputs[0]])]
    if not grouped:
        dtype = rank.workload.precisions.weights
        kernel = gemm(rank, dtype, Gemm(rows, inner, columns), input_each)
        return Work((kernel,), weight_bytes=inner * columns * DTYPE_BYTES[dtype])
    dtype = rank.expert_dtype
    # A share of the tokens visits fewer experts.
    active = rank.active_experts_of_a_share() if by_rows else sizes.active_experts
    skewed = rank.workload.routing == "skewed"
    shape = GroupedGemm(rows, inner, columns, active, sizes.local_experts, rank.feed_forward.gated, skewed)
    weight_bytes = sizes.local_experts * inner * columns * DTYPE_BYTES[dtype]
    return Work((gemm(rank, dtype, shape, input_each),), weight_bytes=weight_bytes)


def _beside(rank: Rank, own: Work, inner: int, columns: int) -> Work:
    """A product, of experts with that of the shared ones, whose widths on this GPU are given."""
    if not rank.layers.is_moe:
        return own
    shared, shared_bytes = (), 0.0
    if rank.feed_forward.shared_ffn_hidden:
        dtype = rank.workload.precisions.weights
        shared = (gemm(rank, dtype, Gemm(rank.sizes.tokens, inner, columns), rank.activation_each),)
        shared_bytes = inner * columns * DTYPE_BYTES[dtype]
    return own._replace(kernels=(*own.kernels, *shared), weight_bytes=own.weight_bytes + shared_bytes)


def _shared_columns(rank: Rank) -> int:
    """Columns of the shared experts on this GPU.

    They are computed by the group that shares the tokens, columns of ffn1 and rows of ffn2 sharded over it whatever
    the choice, as every engine does. [assumed]
    """
    return math.ceil(rank.feed_forward.shared_ffn_hidden / (rank.tp * rank.copies))


def residual_add_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Fused into the norm that follows; added to several streams it is a kernel of its own."""
    if rank.workload.model.residual_streams > 1:
        return Work(mix_after(rank, *_rows_and_columns(rank, label)))
    output_bytes, traffic = _streamed(rank, op, label)
    return Work((elementwise(rank, output_bytes / rank.activation_each, traffic)._replace(fused=True),))


def _rows_and_columns(rank: Rank, label: str) -> tuple[int, int]:
    """Of the hidden state on this GPU."""
    return rank.shard(rank.sizes.tokens, when=label == "t"), rank.shard(rank.sizes.columns["d"], when=label == "d")


def activation_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """SwiGLU or the like; of experts also what all tokens visit."""
    output_bytes, traffic = _streamed(rank, op, label)
    flops = 5.0 * output_bytes / rank.activation_each  # SwiGLU: exp, add, divide and two products
    if not rank.layers.is_moe:
        return Work((elementwise(rank, flops, traffic),))
    rows = rank.shard(rank.sizes.expert_tokens, when=label == "c")
    width = rank.shard(rank.feed_forward.ffn_hidden, when=label == "f")
    kernel = elementwise(rank, flops, traffic, ExpertActivation(rows, width, *_experts(rank)))
    if not rank.feed_forward.shared_ffn_hidden:
        return Work((kernel,))
    tokens, mine, matrices = rank.sizes.tokens, _shared_columns(rank), rank.feed_forward.projections
    shared = elementwise(rank, 5.0 * tokens * mine, tokens * mine * (matrices + 1) * rank.activation_each)
    return Work((kernel, shared))


def _streamed(rank: Rank, op: FusedOp, label: str) -> tuple[float, float]:
    """Bytes of the output, and of it and every input, each written or read once."""
    output, *inputs = kept_tensors(op, rank.layer, op.labels.index(label) if label in op.labels else NONE)
    output_bytes = rank.local_bytes(*output)
    return output_bytes, output_bytes + (add_up if rank.in_lanes else sum)([rank.local_bytes(*each) for each in inputs])


def router_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Logits of all experts, and the choice of the best."""
    sizes, hidden, feed_forward = rank.sizes, rank.workload.model.hidden, rank.feed_forward
    experts, topk = feed_forward.experts, feed_forward.experts_per_token
    rows = rank.shard(sizes.tokens, when=label == "t")
    columns = rank.shard(experts, when=label == "e")
    dtype = rank.workload.precisions.activations  # routers are kept out of low precision
    logits_bytes = rows * experts * rank.activation_each
    routing_bytes = rows * topk * ROUTING_ENTRY_BYTES
    shape = ExpertRouting(rows, experts, topk, *_experts(rank))
    kernels = (
        gemm(rank, dtype, Gemm(rows, hidden, columns), rank.activation_each),
        elementwise(rank, 5.0 * rows * experts, logits_bytes + routing_bytes, shape),
    )
    gather = rank.tp_collective("all_gather", "logits", logits_bytes) if label == "e" else ()
    return Work(kernels, gather, 1.0 * hidden * columns * DTYPE_BYTES[dtype])


def dispatch_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Copies every token for each of its experts, and sends the copies to their ranks, or every token to all.

    Where experts work in a latent, tokens are projected into it first.
    """
    rows, copies, columns = _routed(rank, label)
    into, weight_bytes = _latent_projection(rank, label, rank.workload.model.hidden, rank.feed_forward.latent)
    each = DTYPE_BYTES[rank.workload.precisions.dispatch]
    gathered = rank.workload.expert_exchange == "all_gather"
    if gathered:
        each = rank.activation_each
    traffic = rows * columns * rank.activation_each + copies * columns * each
    permute = elementwise(rank, 0.0, traffic, Permute(rows, copies, columns, *_experts(rank)))
    if gathered:
        gather = rank.collective("all_gather", *_other_tokens(rank), "tokens", rows * columns * each, each)
        return Work((*into, permute), gather, weight_bytes)
    return Work((*into, permute), _expert_all_to_all(rank, op, label, copies, columns, each), weight_bytes)


def combine_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Sends expert results back, sums each token's by weight, adds the residual stream."""
    rows, copies, columns = _routed(rank, label)
    back, weight_bytes = _latent_projection(rank, label, rank.feed_forward.latent, rank.workload.model.hidden)
    several = rank.workload.model.residual_streams > 1
    more = (*back, *mix_after(rank, *_rows_and_columns(rank, label))) if several else back
    each = rank.activation_each
    flops, traffic = 2.0 * copies * columns + rows * columns, (copies + 2 * rows) * columns * each
    shape = Permute(rows, copies, columns, *_experts(rank))
    weighted_sum = elementwise(rank, flops, traffic, shape)
    if rank.workload.expert_exchange == "all_to_all":
        exchange = _expert_all_to_all(rank, op, label, copies, columns, each)
        return Work((weighted_sum, *more), exchange, weight_bytes)
    scatter = rank.collective("reduce_scatter", *_other_tokens(rank), "tokens", rows * columns * each)
    own_bytes = rows / rank.token_groups * columns * each
    total = rank.collective("all_reduce", *_same_tokens(rank), "tokens", own_bytes)
    return Work((weighted_sum, *more), (*scatter, *total), weight_bytes)


def _latent_projection(rank: Rank, label: str, inner: int, columns: int) -> tuple[tuple[Kernel, ...], float]:
    """The product of this group's tokens into the latent that experts work in, or back, and its weight; none without.

    Its weight is whole on every GPU. [published] vLLM's nemotron_h.py and models of Kimi K3.
    """
    if not rank.feed_forward.latent:
        return (), 0.0
    dtype, rows = rank.workload.precisions.weights, rank.shard(rank.sizes.tokens, when=label == "t")
    shape = Gemm(rows, inner, columns)
    return (gemm(rank, dtype, shape, rank.activation_each),), inner * columns * DTYPE_BYTES[dtype]


def _other_tokens(rank: Rank) -> tuple[str, MeshGroup]:
    """The groups with tokens of their own, as an axis."""
    tiers = rank.workload.hardware.tiers
    return rank.experts_axis, group(rank.group_gpus * rank.copies, rank.token_groups, *tiers)


def _same_tokens(rank: Rank) -> tuple[str, MeshGroup]:
    """The groups of experts that have the same tokens, as an axis."""
    return rank.experts_axis, group(rank.group_gpus, rank.copies, *rank.workload.hardware.tiers)


def _experts(rank: Rank) -> tuple[Dtype, bool]:
    """What selects the measured kernels around the experts: the format of their weights, and gating."""
    return rank.expert_dtype, rank.feed_forward.gated


def _routed(rank: Rank, label: str) -> tuple[float, int, int]:
    """Tokens, their copies for experts, and hidden columns on this GPU.

    Where tokens are gathered a rank sees those of all groups; where they travel, its own.
    """
    sizes = rank.sizes
    tokens = sizes.tokens if rank.workload.expert_exchange == "all_to_all" else sizes.all_tokens
    rows, copies = (rank.shard(size, when=label == "t") for size in (tokens, sizes.expert_tokens))
    return rows, copies, rank.shard(_width(rank), when=label == "d")


def _expert_all_to_all(
    rank: Rank, op: FusedOp, label: str, copies: float, columns: int, each: float
) -> tuple[Collective, ...]:
    if rank.ep == 1:
        return ()
    hardware, feed_forward = rank.workload.hardware, rank.feed_forward
    topk = feed_forward.experts_per_token
    # With prompts on one group alone, what it sends is more than what it gets.
    share = copies / max(rank.sizes.expert_tokens, 1.0)
    if rank.load.or_more:  # as the tokens grow, their copies on a GPU, rounded up, are now more and now less over them
        share = 1 / rank.tp if label == "t" else 1.0
    most = max(copies, rank.sizes.tokens * topk * share)
    shape = (most / topk, columns, each, feed_forward.experts, topk)
    price = expert_all_to_alls if rank.in_lanes else expert_all_to_all
    priced = price(hardware, op.kind, rank.ep_group, *shape, rank.workload.deepep_mode)
    sent_bytes = most * columns * each * (rank.ep - 1) / rank.ep
    return (carried("all_to_all", rank.experts_axis, rank.ep, "routed tokens", sent_bytes, priced),)


# --- before and behind the layers ---------------------------------------------------------------------


def embedding_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Reads the rows of the tokens and writes them; of tokens that other GPUs have the rows of, zeros."""
    model, rows = rank.workload.model, rank.sizes.tokens
    if label == "t":
        rows = rank.shard(rows, when=True)
    columns = rank.shard(model.hidden, when=label == "d")
    table_bytes = rank.shard(model.vocab, when=label == "v") * columns * rank.activation_each
    return Work((elementwise(rank, 0.0, 2 * (rows * columns * rank.activation_each)),), weight_bytes=table_bytes)


def head_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The final norm, on what the head reads, and the product, of tokens that are due a next one."""
    model, rows = rank.workload.model, rank.sizes.output_tokens
    if label == "t":
        rows = rank.shard(rows, when=True)
    inner, columns = rank.shard(model.hidden, when=label == "d"), rank.shard(model.vocab, when=label == "v")
    norm = elementwise(rank, 4.0 * rows * inner, 2 * rows * inner * rank.activation_each)
    dtype = rank.workload.precisions.activations
    product = gemm(rank, dtype, Gemm(max(rows, 1.0), inner, columns), rank.activation_each)
    statistic = rank.tp_collective("all_reduce", "statistic", rows * _STATISTIC_BYTES) if label == "d" else ()
    return Work((norm, product), statistic, inner * columns * rank.activation_each)


def sampling_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The likeliest token: where the vocabulary is sharded, of those that each GPU offers with its score.

    Logits are looked through as they come out of the product or of what moved them. [assumed]
    """
    offers = _OFFER_BYTES * rank.sizes.output_tokens * rank.tp
    return Work((), rank.tp_collective("all_gather", "offers", offers) if label == "v" else ())
