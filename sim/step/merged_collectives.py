"""Merged collectives: two that stand next to each other as one call, where that is legal and faster.

Two collectives may be one where neither needs what the other brings, they run next to each other, over the same group,
and are of one kind. In a layer these are the moves of two inputs of one op, as of a layer's tokens and their routing
before they are sent to experts; and the gather of an op's input and that of its weight at use. What the later one costs
more in the one call than the earlier one alone stands where a layer is a sum, with the later one; of a weight, with the
input. Others next to each other depend on each other, as a sum and the statistic of what it leaves. Inputs that cross
from one side of a layer to the other, as the residual stream does, are moved by a route of their own and not merged.

A reduce-scatter behind which its result is gathered is an all-reduce, which is what is charged where a whole result is
wanted; where the two calls are the faster ones, the sum is made by these (`sim.prices.collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from sim.layers.ops import Layer, Tensor, crossing_tensors, gathers_weight
from sim.ops.rank import Rank
from sim.prices.collectives import Collective
from sim.sharding.redistribute import sent_share
from sim.step.costs import Move, move_s, moved, moves, op_parts

_GATHER = "all_gather"


@lru_cache(maxsize=1024)
def merging_ops(layer: Layer, tensor: Tensor) -> tuple[str, ...]:
    """Ops whose choices decide what a tensor's moves take: those at its ends, then at those it may be merged with."""
    partners = [_partner(layer, tensor, name) for name in tensor.consumers]
    return tuple(dict.fromkeys((*tensor.ops, *(name for each in partners if each for name in each.ops))))


@lru_cache(maxsize=1024)
def _partner(layer: Layer, tensor: Tensor, consumer: str) -> Tensor | None:
    """The earlier input of an op within the same side of the layer, if there is one."""
    crossing = crossing_tensors(layer)
    if tensor in crossing:
        return None
    inputs = layer.op(consumer).inputs
    before = (layer.tensor(name) for name in inputs[: inputs.index(tensor.name)])
    return next((each for each in before if each not in crossing), None)


def merged_moves_s(rank: Rank, tensor: Tensor, choices: Sequence[int]) -> tuple[float, ...]:
    """Seconds of a tensor's moves within a group, to each op that reads it, each as it is or in one call with another.

    Args:
        rank: The GPU.
        tensor: What is moved.
        choices: Of `merging_ops`.
    """
    chosen = dict(zip(merging_ops(rank.layer, tensor), choices, strict=True))
    return tuple(
        min([move_s(rank, move), *(more_s for more_s, _ in _more_s(rank, tensor, move, name, chosen))])
        for name, move in zip(tensor.consumers, _moves(rank, tensor, chosen), strict=True)
    )


def merged_moves(rank: Rank, tensor: Tensor, choices: Sequence[int]) -> tuple[tuple[Collective, ...], ...]:
    """What is behind that."""
    chosen = dict(zip(merging_ops(rank.layer, tensor), choices, strict=True))
    found: list[tuple[Collective, ...]] = []
    for name, move in zip(tensor.consumers, _moves(rank, tensor, chosen), strict=True):
        alone, more = moved(rank, move), _more_s(rank, tensor, move, name, chosen)
        if more and min(more)[0] < move_s(rank, move):
            assert move is not None
            more_s, what = min(more)
            (plain,) = rank.tp_collective(move.kind, move.tensor.name, move.tensor_bytes(rank))
            alone = (replace(plain, time_s=more_s, algorithm=f"{plain.algorithm}, with {what}"),)
        found.append(alone)
    return tuple(found)


def _moves(rank: Rank, tensor: Tensor, chosen: Mapping[str, int]) -> tuple[Move | None, ...]:
    return moves(rank.layer, tensor, tuple([chosen[name] for name in tensor.ops]))


def _more_s(
    rank: Rank, tensor: Tensor, move: Move | None, consumer: str, chosen: Mapping[str, int]
) -> list[tuple[float, str]]:
    """By how much a move lengthens another one before the same op, and what that moves; none where none is like it."""
    if move is None or move.route is not None or move.late or tensor in crossing_tensors(rank.layer):
        return []
    gathered = gathers_weight(chosen[consumer])
    if gathered and move.kind == _GATHER:
        parts = op_parts(rank, rank.layer.op(consumer), chosen[consumer]).work.collectives
        weights = [each for each in parts if each.tensor == "weight"]
        share = sent_share(_GATHER, rank.tp)
        return [
            (_lengthened_s(rank, move, each.bytes_per_device / share, each.time_s), "the weight") for each in weights
        ]
    other = _partner(rank.layer, tensor, consumer)
    if other is None or gathered:
        return []
    their = _moves(rank, other, chosen)[other.consumers.index(consumer)]
    if their is None or their.kind != move.kind or their.route is not None or their.late:
        return []
    return [(_lengthened_s(rank, move, their.tensor_bytes(rank), move_s(rank, their)), other.name)]


def _lengthened_s(rank: Rank, move: Move, their_bytes: float, their_s: float) -> float:
    """Seconds of one call for a tensor and another one, less those of the other one alone."""
    return max(0.0, rank.tp_s(move.kind, their_bytes + move.tensor_bytes(rank)) - their_s)
