"""Prices of one layer: seconds and bytes, per op and choice.

`sim.simulate` asks for the choices of one strategy, `sim.optimum.landscape` for all of them, so both see
the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sim.arrays import add_up, larger
from sim.layers.choices import ShardedDim, kept_tensors, rule, sharded_dim
from sim.layers.ops import FusedOp, Layer, Tensor, by_expert
from sim.ops.layers import layer_of
from sim.ops.rank import OpCost, Rank, Work
from sim.ops.sizes import Load
from sim.ops.two_letters import grid_letters
from sim.ops.work import op_work
from sim.prices.collectives import Collective
from sim.prices.mesh import group
from sim.prices.roofline import Kernel, KernelTime, kernel_time
from sim.sharding.grid import GridShard, lifted, sub_degrees
from sim.sharding.layout import Layout
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard
from sim.sharding.redistribute import collective_between, collectives_for
from sim.step.mesh_moves import axes_of, mesh_collectives
from sim.strategy import FIRST_DECLARED, GRID, NONE
from sim.workload import Workload


@lru_cache(maxsize=1024)
def rank_of(
    workload: Workload,
    load: Load,
    tp: int,
    ep: int,
    *,
    cp: int = 1,
    copies: int = 1,
    axis: str = "tp",
    experts_axis: str = "ep",
    layer_group: int = 0,
) -> Rank:
    """The busiest GPU under these degrees, with what is known of its costs."""
    names = {"axis": axis, "experts_axis": experts_axis}
    layer = _layers(workload)[layer_group]
    return Rank(workload, load, tp, ep, layer, cp=cp, copies=copies, **names, layer_group=layer_group)


@lru_cache(maxsize=64)
def _layers(workload: Workload) -> tuple[Layer, ...]:
    return tuple(layer_of(group) for group in workload.model.groups)


def price(rank: Rank, kernel: Kernel) -> KernelTime:
    """Seconds of one kernel on the workload's hardware."""
    return (kernel_time.__wrapped__ if rank.in_lanes else kernel_time)(rank.workload.hardware, kernel)


def seconds(collectives: Sequence[Collective]) -> float:
    """Seconds of collectives that run one after the other."""
    times_s = [collective.time_s for collective in collectives]
    return add_up(times_s) if len(times_s) > 1 else times_s[0] if times_s else 0


def op_cost(rank: Rank, op: FusedOp, choice: int) -> OpCost:
    """The cost of one op under one choice of the strategy; on one GPU all but declared ones come to the same."""
    if rank.tp == 1 and choice < FIRST_DECLARED:
        choice = NONE
    key = (op.name, choice)
    known = (rank.memo if by_expert(op, rank.layer) else rank.memo_of_tokens).ops
    found = known.get(key)
    if found is None:
        found = known[key] = _op_cost(rank, op, choice)
    return found


class OpParts(NamedTuple):
    """What the cost of an op is made of.

    Attributes:
        work: Before it is priced.
        kernels: Its launches, priced.
    """

    work: Work
    kernels: list[KernelTime]


def op_parts(rank: Rank, op: FusedOp, choice: int) -> OpParts:
    """What stands behind `op_cost`."""
    work = op_work(rank, op, choice)
    return OpParts(work, [price(rank, kernel) for kernel in work.kernels])


def _op_cost(rank: Rank, op: FusedOp, choice: int) -> OpCost:
    work, kernels = op_parts(rank, op, choice)
    total = add_up if rank.in_lanes else sum
    return OpCost(
        kernel_s=total([kernel.total_s for kernel in kernels]),
        collective_s=seconds(work.collectives),
        weight_bytes=work.weight_bytes,
        kv_bytes=work.kv_bytes,
        activation_bytes=work.buffer_bytes
        + total([rank.local_bytes(*each) for each in kept_tensors(op, rank.layer, choice)]),
        broken=choice_violation(rank, op, choice),
    )


def choice_violation(rank: Rank, op: FusedOp, choice: int) -> str | None:
    """The kind of limit that a choice breaks at this tp degree: "heads", "tokens", "unsupported" or None."""
    label = op.label(choice)
    if choice in GRID:
        return _grid_violation(rank, op, choice)
    if op.unsupported and op.unsupported(rank, label):
        return "unsupported"
    if label == "h" and rank.attention.heads % rank.tp:
        return "heads"
    if label == "q" and rank.attention.heads % rank.head_tp:
        return "heads"
    if label in ("t", "c") and rank.tp > 1 and token_rows(rank, op, choice) < rank.tp:
        return "tokens"
    return None


def _grid_violation(rank: Rank, op: FusedOp, choice: int) -> str | None:
    for letter, degree in grid_letters(op, choice, rank.tp):
        if degree > 1 and (rank.cp > 1 or (op.unsupported and op.unsupported(rank, letter))):
            return "unsupported"
        if letter in ("h", "q") and rank.attention.heads % degree:
            return "heads"
        if letter in ("t", "c") and degree > 1 and token_rows(rank, op, choice) < degree:
            return "tokens"
    return None


def token_rows(rank: Rank, op: FusedOp, choice: int) -> float:
    """Rows that an op sharded over tokens has to share out: tokens, or their copies for experts."""
    return rank.sizes.expert_tokens if "c" in op.label(choice) else rank.sizes.tokens


# --- moves between ops --------------------------------------------------------------------------------


class Move(NamedTuple):
    """A redistribution over tp, whatever the degrees.

    Attributes:
        kind: Its collective.
        tensor: What is moved.
        by_heads: Whether heads are sharded, which take the KV heads they share with other GPUs along.
        route: Where it lies and shall lie on two sub-axes, where one of the two is on them.
        inner_ranks: GPUs of the inner one.
        late: Whether it sums what the layer's last op leaves, as that op's own sum over copies of the tokens does.
    """

    kind: str
    tensor: Tensor
    by_heads: bool = False
    late: bool = False
    route: tuple[Layout, Layout] | None = None
    inner_ranks: int = 1

    def tensor_bytes(self, rank: Rank) -> float:
        """V of the redistribution table."""
        if self.by_heads:
            return rank.tp * rank.local_bytes(self.tensor, "columns")
        return rank.tensor_bytes(self.tensor)


@lru_cache(maxsize=4096)
def moves(layer: Layer, tensor: Tensor, choices: tuple[int, ...], into: Layer | None = None) -> tuple[Move | None, ...]:
    """The redistribution of a tensor to each of its consumers.

    Args:
        layer: Of the tensor.
        tensor: What is moved.
        choices: Of the op that leaves it, then of `tensor.consumers`.
        into: The layer of the consumers, if it is another.
    """
    producer_choice, *consumer_choices = choices
    source = rule(layer.op(tensor.producer), layer, producer_choice).output
    into = into or layer
    consumers = [into.op(name) for name in tensor.consumers]
    rules = [rule(op, into, choice) for op, choice in zip(consumers, consumer_choices, strict=True)]
    if source == PARTIAL and rules[0].passes_partial:
        result = into.tensor(consumers[0].output)  # summed late, on the consumer's own, smaller result
        kind = collective_between(PARTIAL, rules[0].output)
        return (Move(kind, result, late=kind == "all_reduce"),) if kind else (None,)
    targets = tuple(r.inputs[op.inputs.index(tensor.name)] for op, r in zip(consumers, rules, strict=True))
    if any(isinstance(each, GridShard) for each in (source, *targets)):
        return tuple(_over_sub_axes(tensor, source, targets))
    return tuple(
        Move(kind, tensor, by_heads=tensor.name == "qkv" and target.dims == (1,)) if kind else None
        for kind, target in zip(collectives_for(source, targets), targets, strict=True)
    )


def _over_sub_axes(tensor: Tensor, source: Placement, targets: Sequence[Placement]) -> Iterator[Move | None]:
    """What is moved for one reader is not moved again, nor is a piece of it."""
    ranks = next(each.inner_ranks for each in (source, *targets) if isinstance(each, GridShard))
    for index, target in enumerate(targets):
        known = target in targets[:index] or (target != REPLICATE and REPLICATE in targets)
        ends = lifted(source), lifted(target)
        if known or source == target or ends[0] is None or ends[1] is None:
            yield None
        else:
            route = _as_matrix(tensor, ends[0]), _as_matrix(tensor, ends[1])
            yield Move("route", tensor, route=route, inner_ranks=ranks)


def _as_matrix(tensor: Tensor, layout: Layout) -> Layout:
    """A layout of [rows, columns]."""
    last = len(tensor.letters) - 1
    return tuple(Shard(int(each.dim == last)) if isinstance(each, Shard) else each for each in layout)


def _routed(rank: Rank, move: Move) -> tuple[Collective, ...]:
    """The fastest route on the sub-axes of the group."""
    outer, inner = sub_degrees(rank.tp, move.inner_ranks)
    assert move.route is not None
    if rank.tp == 1:
        return ()
    degree = math.prod(ranks for ranks, *lies in zip((outer, inner), *move.route, strict=True) if Shard(1) in lies)
    columns = degree * rank.columns_of(move.tensor, degree)
    whole_columns, each_bytes = rank.widths[move.tensor.name]
    rows = rank.tensor_bytes(move.tensor) / (whole_columns * each_bytes)
    return mesh_collectives(
        rank.workload.hardware,
        axes_of(**{f"{rank.axis} outer": outer, f"{rank.axis} inner": inner}),
        *move.route,
        (math.ceil(rows), columns),
        each_bytes,
        move.tensor.name,
        or_more=rank.load.or_more,
    )


def move_s(rank: Rank, move: Move | None) -> float:
    """Seconds of a redistribution on the busiest GPU."""
    if move is None or rank.tp == 1:
        return 0.0
    if rank.in_lanes:  # as other moves of as large a tensor
        key = (
            move.kind,
            move.tensor if move.by_heads else rank.widths[move.tensor.name],
            move.tensor.by_expert,
            move[2:],
        )
        found = rank.memo.alike.get(key)
        if found is None:
            found = rank.memo.alike[key] = _move_s(rank, move)
        return found
    return _move_s(rank, move)


def _move_s(rank: Rank, move: Move) -> float:
    if move.route is not None:
        return seconds(_routed(rank, move))
    tensor_bytes = move.tensor_bytes(rank)
    if costs_the_difference(rank, move):
        return seconds(_widened(rank, move, tensor_bytes))
    return rank.tp_s(move.kind, tensor_bytes, rank.widths[move.tensor.name][1])


def moved(rank: Rank, move: Move | None) -> tuple[Collective, ...]:
    """The collectives of a redistribution; none at degree 1."""
    if move is None:
        return ()
    if move.route is not None:
        return _routed(rank, move)
    tensor_bytes = move.tensor_bytes(rank)
    if costs_the_difference(rank, move):
        return _widened(rank, move, tensor_bytes)
    return rank.tp_collective(move.kind, move.tensor.name, tensor_bytes, rank.widths[move.tensor.name][1])


def costs_the_difference(rank: Rank, move: Move) -> bool:
    """Whether a sum over tp joins the all-reduce over the groups, and costs what that one takes longer."""
    return move.late and rank.copies > 1


def _widened(rank: Rank, move: Move, tensor_bytes: float) -> tuple[Collective, ...]:
    """What it costs more to sum over tp as well, in the one all-reduce over the groups that have the same tokens.

    That one stands with the op (`sim.ops.work`); it is paid for in any case.
    """
    if rank.tp == 1:
        return ()
    if rank.load.or_more and rank.load.busiest_prompts is not None:
        return ()  # the op sums the mean of the groups, this is of the busiest: no bound of the difference is known
    tiers = rank.workload.hardware.tiers
    axis = f"{rank.axis} x {rank.experts_axis}"
    (both,) = rank.collective(move.kind, axis, group(1, rank.tp * rank.copies, *tiers), "tokens", tensor_bytes)
    (alone,) = rank.collective(move.kind, axis, group(rank.tp, rank.copies, *tiers), "tokens", tensor_bytes)
    more_bytes = both.bytes_per_device - alone.bytes_per_device
    return (replace(both, time_s=larger(0.0, both.time_s - alone.time_s), bytes_per_device=more_bytes),)


@lru_cache(maxsize=1024)
def stream_placement(layer: Layer, last_choice: int) -> Placement:
    """Placement of the residual stream between layers, as the last op of a layer leaves it."""
    return rule(layer.op(layer.stream.producer), layer, last_choice).output


def stream_bytes(rank: Rank) -> float:
    """Bytes of the residual stream of one microbatch, stored whole through every op."""
    return rank.tensor_bytes(rank.layer.stream)


def sent_on_bytes(rank: Rank, last_choice: int) -> float:
    """Bytes of the residual stream that one GPU hands to the next stage."""
    return rank.local_bytes(rank.layer.stream, _stream_dim(rank.layer, last_choice))


@lru_cache(maxsize=1024)
def _stream_dim(layer: Layer, last_choice: int) -> ShardedDim:
    return sharded_dim(layer.stream, stream_placement(layer, last_choice))
