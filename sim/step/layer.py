"""One layer of a step, stated once: its addends, each under the choices of few ops, and their sum.

Whoever adds up layers interprets this: one strategy (`sim.step.stage`), many at once (`sim.batched`), all combinations
of a side's choices (`sim.optimum.fronts`) or of a layer's (`sim.optimum.landscape`), ranges of batches
(`sim.optimum.bounds`), the explanation (`sim.step.breakdown`). Sums take floats or arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sim.arrays import add_up
from sim.layers.ops import FusedOp, Layer, Tensor, crossing_tensors
from sim.ops.dims import dims_of
from sim.ops.layers import layer_of
from sim.ops.rank import OpCost
from sim.prices.collectives import Collective
from sim.step.attention_expert_meshes import Moves, Sides
from sim.step.costs import OpParts, moves, op_cost, op_parts
from sim.step.merged_collectives import merged_moves, merged_moves_s, merging_ops
from sim.step.operator_pipelines import pipelined_cost, pipelined_moves, pipelined_moves_s, pipelined_parts
from sim.step.two_batch_overlap import lengthens, overlapped_cost, overlapped_parts
from sim.workload import Workload

Choices = tuple[int, ...]
Pick = Callable[[Choices], Choices]
"""Takes those of an addend out of `Strategy.dims`."""


class Addend(NamedTuple):
    """A term that the choices of few ops decide.

    Attributes:
        name: Of the op; or of the tensor that is moved.
        ops: Whose choices decide, by name: the op itself; or the op that leaves the tensor, and those that read it.
        price: Its figures on both sides of a GPU under these choices: an `OpCost`; or seconds of the redistribution to
            each op that reads the tensor.
        behind: What these are made of: an `OpParts`; or the collectives to each op that reads the tensor.
        kind: What of these choices decides both, whatever the mesh.
    """

    name: str
    ops: tuple[str, ...]
    price: Callable[[Sides, Choices], Any]
    behind: Callable[[Sides, Choices], Any]
    kind: Callable[[Choices], Hashable] = tuple


@dataclass(frozen=True, slots=True, eq=False)
class LayerSum:
    """A layer as a sum.

    Attributes:
        layer: Of which ops.
        costs: The addend of each op, in order.
        moves: The addend of each tensor, in order.
        waiting: Of each tensor, the places of the ops that read it.
        addends: Costs, then moves.
    """

    layer: Layer
    costs: tuple[Addend, ...]
    moves: tuple[Addend, ...]
    waiting: tuple[tuple[int, ...], ...]
    addends: tuple[Addend, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "addends", self.costs + self.moves)

    def time_s(self, costs: Sequence[Any], moves: Sequence[Any]) -> Any:
        """Seconds of the layer: op after op, each waits for its inputs and has its kernels and collectives.

        What the layer leaves is moved to a next one like it.

        Args:
            costs: Of each op seconds of kernels, then of collectives; more is not looked at.
            moves: Of each tensor seconds for each op that reads it.
        """
        waits: dict[int, Any] = {}
        for ops, parts in zip(self.waiting, moves, strict=True):
            for op, part_s in zip(ops, parts):  # noqa: B905 arrays have room for the tensor with most readers
                waits[op] = waits[op] + part_s if op in waits else part_s
        return add_up([each[0] + (waits[op] + each[1] if op in waits else each[1]) for op, each in enumerate(costs)])


@lru_cache(maxsize=256)
def layer_sum(layer: Layer, *, merges: bool = False, cut: bool = False) -> LayerSum:
    """A layer as a sum.

    Args:
        layer: As given.
        merges: Whether collectives may be merged: a tensor's moves then go by those of other tensors, too.
        cut: Whether they are sent in parts: they then go by the ops at their ends.
    """
    places = {name: at for at, name in enumerate(layer.op_by_name)}
    return LayerSum(
        layer,
        tuple(Addend(op.name, (op.name,), partial(_cost, op), partial(_parts, op)) for op in layer.ops),
        tuple(
            Addend(tensor.name, ends, partial(_moves_s, tensor), partial(_moves, tensor), kind)
            for tensor in layer.tensors
            for ends in [merging_ops(layer, tensor) if merges else tensor.ops]
            for kind in [tuple if merges or cut else _kind_of_move(layer, tensor)]
        ),
        tuple(tuple(places[name] for name in tensor.consumers) for tensor in layer.tensors),
    )


def _kind_of_move(layer: Layer, tensor: Tensor) -> Callable[[Choices], Hashable]:
    """How a tensor is moved, if it is so within one group whatever the mesh: see `Sides.within_a_group`."""
    crosses = tensor in crossing_tensors(layer) or tensor.name == "qkv"
    return tuple if crosses else partial(moves, layer, tensor)


class PricedOp(NamedTuple):
    """What the addends of a layer come to.

    Attributes:
        costs: Of each op.
        moves: Of each tensor, seconds for each op that reads it.
    """

    costs: list[OpCost]
    moves: list[tuple[float, ...]]


class GroupSum(NamedTuple):
    """One layer of a group of a model's layers as a sum over a strategy's dims.

    Attributes:
        layer: The sum.
        place: Of each op, by name, where its choice stands in `Strategy.dims`.
        places: Of each addend, where its choices stand there.
        picks: What takes them out.
    """

    layer: LayerSum
    place: Mapping[str, int]
    places: tuple[tuple[int, ...], ...]
    picks: tuple[Pick, ...]

    def priced(self, sides: Sides, dims: Choices) -> PricedOp:
        """Figures of all addends under a strategy's dims; those that are known of this GPU are not priced again."""
        known = sides.known
        found: list[Any] = []
        for at, pick in enumerate(self.picks):
            choices = pick(dims)
            figures = known.get((at, choices))
            if figures is None:
                figures = known[at, choices] = self.layer.addends[at].price(sides, choices)
            found.append(figures)
        ops = len(self.layer.costs)
        return PricedOp(found[:ops], found[ops:])

    def behind(self, sides: Sides, dims: Choices) -> list[tuple[OpParts, list[Collective]]]:
        """Of each op what it is made of, and the collectives that it waits for."""
        known, ops = sides.known, len(self.layer.costs)
        found: list[Any] = []
        for at, pick in enumerate(self.picks):
            key = ("behind", at, choices := pick(dims))
            parts = known.get(key)
            if parts is None:
                parts = known[key] = self.layer.addends[at].behind(sides, choices)
            found.append(parts)
        waits: list[list[Collective]] = [[] for _ in range(ops)]
        for readers, parts in zip(self.layer.waiting, found[ops:], strict=True):
            for reader, collectives in zip(readers, parts, strict=True):
                waits[reader] += collectives
        return list(zip(found[:ops], waits, strict=True))


@lru_cache(maxsize=64)
def group_sums(workload: Workload) -> tuple[GroupSum, ...]:
    """One layer of each group of a model's layers."""
    found: list[GroupSum] = []
    for index, group in enumerate(workload.model.groups):
        place = {dim.op.name: at for at, dim in enumerate(dims_of(workload)) if index in dim.groups}
        merges, cut = workload.hardware.merge_collectives, workload.overlap_parts > 1
        layer = layer_sum(layer_of(group), merges=merges, cut=cut)
        places = tuple(tuple(place[op] for op in addend.ops) for addend in layer.addends)
        found.append(GroupSum(layer, place, places, tuple(map(_pick, places))))
    return tuple(found)


def _pick(places: Sequence[int]) -> Pick:
    if len(places) == 1:
        return operator.itemgetter(slice(places[0], places[0] + 1))  # of one alone, as a tuple too
    return operator.itemgetter(*places)


def _cost(op: FusedOp, sides: Sides, choices: Choices) -> OpCost:
    rank = sides.rank_by_op[op.name]
    cost = op_cost(rank, op, choices[0])
    if rank.workload.overlap_parts > 1:
        cost = pipelined_cost(rank, op, choices[0], cost)
    return overlapped_cost(rank, cost) if rank.workload.two_batch_overlap and lengthens(rank, op) else cost


def _parts(op: FusedOp, sides: Sides, choices: Choices) -> OpParts:
    rank = sides.rank_by_op[op.name]
    parts = op_parts(rank, op, choices[0])
    if rank.workload.overlap_parts > 1:
        parts = pipelined_parts(rank, op, choices[0], parts)
    return overlapped_parts(rank, parts) if rank.workload.two_batch_overlap and lengthens(rank, op) else parts


def _moves_s(tensor: Tensor, sides: Sides, choices: Choices) -> tuple[float, ...]:
    rank = sides.rank_by_op[tensor.producer]
    if rank.workload.overlap_parts > 1 and sides.within_a_group(tensor):
        return pipelined_moves_s(rank, tensor, choices)
    if rank.workload.hardware.merge_collectives and sides.within_a_group(tensor):
        return merged_moves_s(rank, tensor, choices)
    return sides.moves_s(tensor, choices)


def _moves(tensor: Tensor, sides: Sides, choices: Choices) -> Moves:
    rank = sides.rank_by_op[tensor.producer]
    if rank.workload.overlap_parts > 1 and sides.within_a_group(tensor):
        return pipelined_moves(rank, tensor, choices)
    if rank.workload.hardware.merge_collectives and sides.within_a_group(tensor):
        return merged_moves(rank, tensor, choices)
    return sides.moves(tensor, choices)
