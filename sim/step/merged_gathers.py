"""Merged gathers: the all-gathers of an op's input and of its weight as one call, where that is faster.

Two collectives may be one where neither needs what the other brings, they run next to each other, over the same group,
and are of one kind. In a step these are the gather of an op's input and the gather of its weight at use: other
collectives next to each other are a sum and what is computed from it, or of two kinds. What the input costs more in
the one call than the weight alone stands where a layer is a sum, with the input; the weight's stays with the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.layers.ops import Tensor, crossing_tensors, gathers_weight
from sim.ops.rank import Rank
from sim.prices.collectives import Collective
from sim.sharding.redistribute import sent_share
from sim.step.costs import Move, move_s, moved, moves, op_parts

_KIND = "all_gather"


def merged_moves_s(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds of a tensor's moves within a group, to each op that reads it, each as it is or with the op's weight."""
    found = moves(rank.layer, tensor, choices)
    return tuple(min([move_s(rank, move), *_more_s(rank, tensor, move, at, choices)]) for at, move in enumerate(found))


def merged_moves(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> tuple[tuple[Collective, ...], ...]:
    """What is behind that."""
    found: list[tuple[Collective, ...]] = []
    for at, move in enumerate(moves(rank.layer, tensor, choices)):
        alone, more_s = moved(rank, move), _more_s(rank, tensor, move, at, choices)
        if more_s and more_s[0] < move_s(rank, move):
            assert move is not None
            (plain,) = rank.tp_collective(_KIND, move.tensor.name, move.tensor_bytes(rank))
            alone = (replace(plain, time_s=more_s[0], algorithm=f"{plain.algorithm}, with the weight"),)
        found.append(alone)
    return tuple(found)


def _more_s(rank: Rank, tensor: Tensor, move: Move | None, at: int, choices: Sequence[int]) -> tuple[float, ...]:
    """By how much a gather lengthens that of the weight of the op that reads it, if there are both."""
    choice, op = choices[1 + at], rank.layer.op(tensor.consumers[at])
    if move is None or move.kind != _KIND or not gathers_weight(choice) or tensor in crossing_tensors(rank.layer):
        return ()
    weights = [each for each in op_parts(rank, op, choice).work.collectives if each.tensor == "weight"]
    if not weights:
        return ()
    (weight,) = weights
    weight_bytes = weight.bytes_per_device / sent_share(_KIND, rank.tp)
    together_s = rank.tp_s(_KIND, weight_bytes + move.tensor_bytes(rank))
    return (max(0.0, together_s - weight.time_s),)
