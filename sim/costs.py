"""Prices of one layer and of both ends of the model: seconds and bytes, per op and choice.

`sim.simulate` asks for the choices of one strategy, `sim.optimum` for all of them, so both see
the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from sim.mesh_moves import axes_of, mesh_collectives
from sim.ops import FusedOp, Tensor
from sim.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from sim.pricing import Gemm
from sim.rank import Rank
from sim.redistribute import collective_between, collectives_for
from sim.roofline import Kernel, KernelTime, kernel_time
from sim.sharding import rule
from sim.types import Collective, Workload
from sim.work import Work, elementwise, gemm, op_work


@dataclass(frozen=True, slots=True)
class OpCost:
    """One fused op under one choice on the busiest GPU, without the moves of its inputs.

    Attributes:
        work: What it does.
        kernels: Seconds of each of its launches.
        time_s: Launches and the op's own collectives, one after the other.
        activation_bytes: Its inputs and its output on one GPU.
    """

    work: Work
    kernels: tuple[KernelTime, ...]
    time_s: float
    activation_bytes: float


@lru_cache(maxsize=1024)
def rank_of(
    workload: Workload, tp: int, ep: int, batch: int, *, cp: int = 1, axis: str = "tp", experts_axis: str = "ep"
) -> Rank:
    """The busiest GPU under these degrees, with what is known of its costs."""
    return Rank(workload, tp, ep, batch, cp=cp, axis=axis, experts_axis=experts_axis)


def price(rank: Rank, kernel: Kernel) -> KernelTime:
    """Seconds of one kernel on the workload's hardware."""
    return kernel_time(rank.workload.hardware, kernel)


def seconds(collectives: Sequence[Collective]) -> float:
    """Seconds of collectives that run one after the other."""
    return sum([collective.time_s for collective in collectives])


def op_cost(rank: Rank, op: FusedOp, choice: int) -> OpCost:
    """The cost of one op under one choice of the strategy."""
    key = (op.name, choice)
    found = rank.remembered.get(key)
    if found is None:
        found = rank.remembered[key] = _op_cost(rank, op, choice)
    return cast(OpCost, found)


def _op_cost(rank: Rank, op: FusedOp, choice: int) -> OpCost:
    work = op_work(rank, op, choice)
    kernels = tuple(price(rank, kernel) for kernel in work.kernels)
    op_rule, layer = rule(op, rank.layer, choice), rank.layer
    activation_bytes = work.buffer_bytes + rank.local_bytes(layer.tensor(op.output), op_rule.output)
    for name, placement in zip(op.inputs, op_rule.inputs, strict=True):
        activation_bytes += rank.local_bytes(layer.tensor(name), placement)
    time_s = sum([kernel.total_s for kernel in kernels]) + seconds(work.collectives)
    return OpCost(work, kernels, time_s, activation_bytes)


def moves(
    rank: Rank, tensor: Tensor, producer_choice: int, consumer_choices: Sequence[int]
) -> tuple[tuple[Collective, ...], ...]:
    """The redistributions of a tensor over tp, one tuple per consumer.

    Args:
        rank: The busiest GPU.
        tensor: What is moved.
        producer_choice: Choice of the op that leaves it.
        consumer_choices: Choices of `tensor.consumers`, in that order.
    """
    if rank.tp == 1:
        return ((),) * len(consumer_choices)
    key = (tensor.name, producer_choice, *consumer_choices)
    found = rank.remembered.get(key)
    if found is None:
        found = rank.remembered[key] = _moves(rank, tensor, producer_choice, consumer_choices)
    return cast(tuple[tuple[Collective, ...], ...], found)


def _moves(
    rank: Rank, tensor: Tensor, producer_choice: int, consumer_choices: Sequence[int]
) -> tuple[tuple[Collective, ...], ...]:
    layer = rank.layer
    source = rule(layer.op(tensor.producer), layer, producer_choice).output
    consumers = [layer.op(name) for name in tensor.consumers]
    rules = [rule(op, layer, choice) for op, choice in zip(consumers, consumer_choices, strict=True)]
    if isinstance(source, Partial) and rules[0].passes_partial:
        result = layer.tensor(consumers[0].output)  # summed late, on the consumer's own, smaller result
        return (rank.tp_collective("all_reduce", result.name, rank.tensor_bytes(result)),)
    targets = tuple(r.inputs[op.inputs.index(tensor.name)] for op, r in zip(consumers, rules, strict=True))
    if rank.cp > 1 and tensor.name == "qkv":
        return (_queries_to_heads(rank, source, *targets),)
    return tuple(
        rank.tp_collective(kind, tensor.name, _moved_bytes(rank, tensor, target)) if kind else ()
        for kind, target in zip(collectives_for(source, targets), targets, strict=True)
    )


def _queries_to_heads(rank: Rank, source: Placement, target: Placement) -> tuple[Collective, ...]:
    """Moves queries, keys and values on the mesh (tp, cp): every GPU that shares a context takes the same of them.

    The projection leaves heads cut over tp alone, tokens and parts over both axes.
    """
    columns = rank.sizes.columns["q"]
    if target == Shard(1):
        columns = rank.head_tp * rank.local_qkv_columns()
    return mesh_collectives(
        rank.workload.hardware,
        axes_of(tp=rank.head_tp, cp=rank.cp),
        (source, REPLICATE if source == Shard(1) else source),
        (target, REPLICATE),
        (rank.sizes.tokens, columns),
        rank.activation_each,
        "qkv",
    )


def _moved_bytes(rank: Rank, tensor: Tensor, target: Placement) -> float:
    """V of the redistribution table; heads take the KV heads they share with other GPUs along."""
    if tensor.name == "qkv" and target == Shard(1):
        return rank.tp * rank.local_bytes(tensor, target)
    return rank.tensor_bytes(tensor)


def choice_violation(rank: Rank, op: FusedOp, choice: int) -> str | None:
    """The kind of limit that a choice breaks at this tp degree: "heads", "tokens" or None."""
    label = op.label(choice)
    if label == "h" and rank.workload.model.heads % rank.tp:
        return "heads"
    if label == "q" and rank.workload.model.heads % rank.head_tp:
        return "heads"
    if label in ("t", "c") and token_rows(rank, op, choice) < rank.tp:
        return "tokens"
    return None


def token_rows(rank: Rank, op: FusedOp, choice: int) -> float:
    """Rows that an op sharded over tokens has to share out: tokens, or their copies for experts."""
    return rank.sizes.expert_tokens if op.label(choice) == "c" else rank.sizes.tokens


# --- both ends of the model ---------------------------------------------------------------------------


def stream_placement(rank: Rank, combine_choice: int) -> Placement:
    """Placement of the residual stream between layers, as the last op of a layer leaves it."""
    return rule(rank.layer.op("combine"), rank.layer, combine_choice).output


def embedding_s(rank: Rank, combine_choice: int) -> float:
    """Seconds of the vocabulary-parallel look-up, whose parts are reduced to the layers' placement."""
    stream = rank.layer.tensor("residual_in")
    whole_bytes = rank.tensor_bytes(stream)
    kind = collective_between(PARTIAL, stream_placement(rank, combine_choice))
    reduce = rank.tp_collective(kind, stream.name, whole_bytes) if kind else ()
    return price(rank, elementwise(rank, 0.0, 2 * whole_bytes)).total_s + seconds(reduce)


def head_s(rank: Rank, combine_choice: int) -> float:
    """Seconds of the final norm, the LM head with its columns over tp, and greedy sampling."""
    model, tokens = rank.workload.model, rank.sizes.tokens
    stream = rank.layer.tensor("residual_in")
    whole_bytes = rank.tensor_bytes(stream)
    replicated = stream_placement(rank, combine_choice) == REPLICATE
    gather = () if replicated else rank.tp_collective("all_gather", stream.name, whole_bytes)
    norm = elementwise(rank, 4.0 * tokens * model.hidden, 2 * whole_bytes)
    shape = Gemm(tokens, model.hidden, rank.cut(model.vocab, when=True))
    head = gemm(rank, rank.workload.precisions.weights, shape, rank.activation_each)
    # Each rank offers its best token and score: 8 bytes per sequence and rank.
    sample = rank.tp_collective("all_gather", "candidates", 8.0 * tokens * rank.tp)
    return price(rank, norm).total_s + price(rank, head).total_s + seconds(gather + sample)


def vocabulary_bytes(rank: Rank) -> float:
    """Bytes of the embedding, or of the LM head, on one GPU; both are sharded over tp."""
    model = rank.workload.model
    return rank.cut(model.vocab, when=True) * model.hidden * rank.weight_each


def stream_bytes(rank: Rank) -> float:
    """Bytes of the residual stream of one microbatch, held whole through every op."""
    return rank.tensor_bytes(rank.layer.tensor("residual_in"))


def handed_on_bytes(rank: Rank, combine_choice: int) -> float:
    """Bytes of the residual stream that one GPU hands to the next stage."""
    return rank.local_bytes(rank.layer.tensor("residual_in"), stream_placement(rank, combine_choice))


def head_activation_bytes(rank: Rank) -> float:
    """The hidden state and the fp32 logits at the LM head."""
    return stream_bytes(rank) + rank.sizes.tokens * rank.cut(rank.workload.model.vocab, when=True) * 4.0
