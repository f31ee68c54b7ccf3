"""Attention on a mesh (dp, tp, cp) and the experts on a mesh (ep, moe_tp) of the same GPUs.

An op's costs are those of the GPU on its own side, tensors between ops of one side move within that side's group,
and only the residual stream crosses: after attention's residual add, and from the last op of a layer to the next.
Both meshes number the same GPUs in the same order, innermost axis first, so one side's groups are made of the
other's, and the stream is redistributed by the fastest route on the mesh of both. With equal groups and cp = 1 the
two sides are one, and everything is as in the paper's space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from sim.arrays import larger
from sim.layers.choices import rule
from sim.layers.ops import Layer, Tensor
from sim.ops.rank import Rank
from sim.ops.sizes import Load
from sim.prices.collectives import Collective
from sim.prices.hardware import Hardware
from sim.sharding.layout import Layout
from sim.sharding.placement import REPLICATE, Placement, Shard
from sim.sharding.routes import RouteStep
from sim.step.costs import move_s, moved, moves, rank_of, seconds, stream_bytes
from sim.step.mesh_moves import Axis, axes_of, fastest_route, mesh_collectives
from sim.strategy import Strategy
from sim.workload import Workload

Moves = tuple[tuple[Collective, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The busiest GPU as a member of its attention group and of its expert group: one `Rank` where they are equal.

    Attributes:
        rank_by_op: The side on which an op runs, by its name.
        known: What addends of a step are known to come to, by what decides them.
    """

    attention: Rank
    experts: Rank
    rank_by_op: Mapping[str, Rank]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Both sides, or the one that they are."""
        return (self.attention,) if self.attention is self.experts else (self.attention, self.experts)

    @property
    def leaves(self) -> Rank:
        """The side whose last op leaves the residual stream."""
        return self.rank_by_op[self.experts.layer.stream.producer]

    @property
    def leaves_elsewhere(self) -> bool:
        """Whether that is not attention's side, on which embedding and LM head lie."""
        return self.leaves is not self.attention

    def of_lanes(self, lanes: Any) -> Sides:
        """The same GPUs in some lanes alone, with nothing known of their costs."""
        attention = self.attention.of_lanes(lanes)
        return sides(attention, attention if self.attention is self.experts else self.experts.of_lanes(lanes))

    def stream_bytes(self) -> float:
        """Bytes of the residual stream, stored whole through every op of whichever side has more of it."""
        return larger(*[stream_bytes(rank) for rank in self.ranks])

    def moves_s(self, tensor: Tensor, ends: tuple[int, ...]) -> tuple[float, ...]:
        """Seconds of the redistribution of a tensor to each of its consumers.

        Args:
            tensor: What is moved.
            ends: Choices of the op that leaves it, then of `tensor.consumers`.
        """
        rank = self.rank_by_op[tensor.producer]
        if self.within_a_group(tensor):
            return tuple([move_s(rank, move) for move in moves(rank.layer, tensor, ends)])
        other = self.rank_by_op[tensor.consumers[0]]
        key = (tensor.name, other.tp, other.sizes.tokens, other.load.or_more, ends)
        found = rank.memo.moves.get(key)
        if found is None:
            found = rank.memo.moves[key] = tuple([seconds(each) for each in self._mesh_moves(tensor, ends)])
        return found

    def moves(self, tensor: Tensor, ends: tuple[int, ...]) -> Moves:
        """The collectives of that, in order, per consumer."""
        if not self.within_a_group(tensor):
            return self._mesh_moves(tensor, ends)
        rank = self.rank_by_op[tensor.producer]
        return tuple(moved(rank, move) for move in moves(rank.layer, tensor, ends))

    def within_a_group(self, tensor: Tensor) -> bool:
        """Whether one axis says how the tensor lies, before and after."""
        rank = self.rank_by_op[tensor.producer]
        return rank is self.rank_by_op[tensor.consumers[0]] and (rank.cp == 1 or tensor.name != "qkv")

    def _mesh_moves(self, tensor: Tensor, ends: tuple[int, ...]) -> Moves:
        """Every consumer is on one side. What is moved for one is not moved again, nor is a piece of it."""
        layer = self.experts.layer
        leaves, takes = self.rank_by_op[tensor.producer], self.rank_by_op[tensor.consumers[0]]
        route = self._queries if tensor.name == "qkv" else partial(crossing, leaves, takes)
        return _each_once(tensor, ends, layer, layer, takes, route)

    def _queries(self, tensor: Tensor, source: Placement, target: Placement) -> tuple[Collective, ...]:
        """Queries, keys and values on the mesh (tp, cp): all GPUs that share a context take the same of them.

        The projection leaves heads cut over tp alone, tokens and parts over both axes.
        """
        rank = self.attention
        by_heads = target.dims == (1,)
        columns = rank.head_tp * rank.local_qkv_columns() if by_heads else rank.sizes.columns["q"]
        return mesh_collectives(
            rank.workload.hardware,
            axes_of(tp=rank.head_tp, cp=rank.cp),
            (source, REPLICATE if source.dims == (1,) else source),
            (target, REPLICATE),
            (math.ceil(rank.sizes.tokens), columns),
            rank.activation_each,
            tensor.name,
            or_more=rank.load.or_more,
        )


Stack = tuple[Sides, ...]
"""Both sides of a GPU, per group of layers."""


def _each_once(
    tensor: Tensor,
    ends: tuple[int, ...],
    layer: Layer,
    into: Layer,
    takes: Rank,
    route: Callable[[Tensor, Placement, Placement], tuple[Collective, ...]],
) -> Moves:
    """The collectives of a tensor to each consumer. What is moved for one is not moved again, nor is a piece of it.

    A group of one GPU takes the whole, however its ops shard what they read.
    """
    source = rule(layer.op(tensor.producer), layer, ends[0]).output
    consumers = [into.op(name) for name in tensor.consumers]
    targets = [
        rule(op, into, choice).inputs[op.inputs.index(tensor.name)] if takes.tp > 1 else REPLICATE
        for op, choice in zip(consumers, ends[1:], strict=True)
    ]
    return tuple(
        ()
        if target in targets[:index] or (target != REPLICATE and REPLICATE in targets)
        else route(tensor, source, target)
        for index, target in enumerate(targets)
    )


def crossing(
    leaves: Rank, takes: Rank, tensor: Tensor, source: Placement, target: Placement, *, due: bool = False
) -> tuple[Collective, ...]:
    """The residual stream from one side to the other; with `due` only of tokens that get a next one.

    Its mesh is the larger group as one of groups of the smaller; where they do not fit, a violation, nearly that.
    """
    or_more = leaves.load.or_more or takes.load.or_more
    return mesh_collectives(*_ends(leaves, takes, source, target, due=due), tensor.name, or_more=or_more)


def crossing_steps(
    leaves: Rank, takes: Rank, source: Placement, target: Placement
) -> tuple[tuple[Axis, ...], tuple[RouteStep, ...]]:
    """How `crossing` gets there: the axes of more than one GPU and the steps over them, of which some move nothing."""
    or_more = leaves.load.or_more or takes.load.or_more
    return fastest_route(*_ends(leaves, takes, source, target, due=False), or_more=or_more)


def _ends(
    leaves: Rank, takes: Rank, source: Placement, target: Placement, *, due: bool
) -> tuple[Hardware, tuple[Axis, ...], Layout, Layout, tuple[int, ...], float]:
    """Machine, mesh, both layouts, shape and bytes per element of the residual stream from one side to the other."""
    larger, smaller = sorted((leaves, takes), key=lambda rank: (-rank.tp, rank.axis == "moe_tp"))
    inner = math.gcd(larger.tp, smaller.tp)
    outer = "dp" if larger.axis == "moe_tp" else "moe_ep"
    return (
        larger.workload.hardware,
        (Axis(outer, larger.tp // inner, inner), Axis(smaller.axis, inner, 1)),
        _layout(leaves, larger, source),
        _layout(takes, larger, target),
        (math.ceil(larger.sizes.output_tokens if due else larger.sizes.tokens), larger.sizes.columns["d"]),
        larger.activation_each,
    )


def _layout(rank: Rank, larger: Rank, placement: Placement) -> tuple[Placement, ...]:
    """A placement over a GPU's group on the mesh of both groups.

    Groups of the smaller side have tokens of their own, or copies where tokens do not travel to their experts.
    """
    if rank.tp == larger.tp:
        return placement, placement
    return (REPLICATE if rank.copies > 1 else Shard(0)), placement


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """The way of the residual stream from a layer of one group to a layer of another.

    Attributes:
        leaves, takes: The busiest GPU on the side of the op that leaves the stream, and of those that read it; one
            `Rank` where the sides are alike.
        stream: What one layer leaves, as the other reads it.
        into: The layer that reads it.
    """

    leaves: Rank
    takes: Rank
    stream: Tensor
    into: Layer
    _known: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    def moves_s(self, ends: tuple[int, ...]) -> float:
        """Seconds, given the choices of the op that leaves the stream, then of those that read it."""
        found = self._known.get(ends)
        if found is None:
            found = self._known[ends] = self._moves_s(ends)
        return found

    def _moves_s(self, ends: tuple[int, ...]) -> float:
        layer = self.leaves.layer
        if self.leaves is self.takes:
            return sum([move_s(self.leaves, move) for move in moves(layer, self.stream, ends, self.into)])
        route = partial(crossing, self.leaves, self.takes)
        return sum([seconds(each) for each in _each_once(self.stream, ends, layer, self.into, self.takes, route)])


def sides(attention: Rank, experts: Rank) -> Sides:
    """Both sides of a GPU; pass one `Rank` twice for the paper's single mesh."""
    by_op = {op.name: attention if op.side == "attention" else experts for op in experts.layer.ops}
    return Sides(attention, experts, by_op)


@lru_cache(maxsize=1024)
def sides_of(workload: Workload, load: Load, tp: int, cp: int, dp: int, ep: int) -> tuple[Sides, ...]:
    """Both sides of a GPU under these degrees, per group of the model's layers, with what is known of their costs."""
    return tuple(group_sides(workload, load, tp, cp, dp, ep, index) for index in range(len(workload.model.groups)))


def group_sides(
    workload: Workload,
    load: Load,
    tp: int,
    cp: int,
    dp: int,
    ep: int,
    layer_group: int,
    of: Callable[..., Rank] = rank_of,
) -> Sides:
    """Both sides of a GPU in the layers of one group.

    Dense layers of a model with experts lie on attention's mesh alone. [assumed] as vLLM and SGLang run the first
    layers of DeepSeek-V3.
    """
    if cp == 1 and dp == ep:
        both = of(workload, load, tp, ep, layer_group=layer_group)
        return sides(both, both)
    attention = attention_rank(workload, load, tp, cp, dp, layer_group, of)
    if on_attention_alone(workload, layer_group):
        return sides(attention, attention)
    moe_tp = -(-tp * cp * dp // ep)
    return sides(attention, experts_rank(workload, load, moe_tp, ep, dp, layer_group, of))


def on_attention_alone(workload: Workload, layer_group: int) -> bool:
    """Whether the layers of a group lie on attention's mesh, though other layers have experts."""
    return workload.model.is_moe and not workload.model.groups[layer_group].is_moe


def attention_rank(
    workload: Workload,
    load: Load,
    tp: int,
    cp: int,
    dp: int,
    layer_group: int = 0,
    of: Callable[..., Rank] = rank_of,
) -> Rank:
    """The busiest GPU as a member of an attention group."""
    axis = "tp" if cp == 1 else "tp x cp"
    return of(workload, load, tp * cp, dp, cp=cp, axis=axis, layer_group=layer_group)


def experts_rank(
    workload: Workload,
    load: Load,
    moe_tp: int,
    ep: int,
    dp: int,
    layer_group: int = 0,
    of: Callable[..., Rank] = rank_of,
) -> Rank:
    """The busiest GPU as a member of an expert group."""
    copies = 1
    if workload.expert_exchange == "all_gather" and ep > dp and ep % dp == 0:
        copies = ep // dp
    return of(workload, load, moe_tp, ep, copies=copies, axis="moe_tp", experts_axis="moe_ep", layer_group=layer_group)


def sides_in_lanes(workload: Workload, load: Load, tp: Any, cp: int, dp: Any, ep: Any) -> tuple[Sides, ...]:
    """The same of many meshes: degrees and load are `sim.arrays.Lanes`, but cp."""
    groups = range(len(workload.model.groups))
    return tuple(group_sides(workload, load, tp, cp, dp, ep, index, rank_of.__wrapped__) for index in groups)


def sides_of_strategy(workload: Workload, load: Load, strategy: Strategy) -> tuple[Sides, ...]:
    """Both sides of a GPU under a strategy, per group of the model's layers."""
    return sides_of(workload, load, strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep)


@lru_cache(maxsize=1024)
def meeting(left: Sides, right: Sides) -> Meeting:
    """The way of the residual stream from a layer of one group to a layer of another."""
    leaving, taking = left.experts.layer.stream, right.experts.layer.stream
    leaves, takes = left.rank_by_op[leaving.producer], right.rank_by_op[taking.consumers[0]]
    alike = (leaves.axis, leaves.tp, leaves.cp) == (takes.axis, takes.tp, takes.cp)  # a side may stand for all groups
    return Meeting(leaves, leaves if alike else takes, leaving.read_by(taking.consumers), right.experts.layer)
