"""One layer of a step under its ops' choices: what each op costs, and the seconds of all."""

from __future__ import annotations

from collections.abc import Mapping

from sim.ops.rank import OpCost
from sim.step.costs import move_s, moves, op_cost
from sim.step.two_meshes import Sides


def layer_costs(sides: Sides, choices: Mapping[str, int]) -> dict[str, OpCost]:
    """The cost of each fused op, by its name."""
    return {op.name: op_cost(sides.rank_by_op[op.name], op, choices[op.name]) for op in sides.experts.layer.ops}


def layer_s(sides: Sides, choices: Mapping[str, int], costs: Mapping[str, OpCost]) -> float:
    """Seconds of a layer; what it leaves is moved to a next one of its own group."""
    incoming_s = dict.fromkeys(costs, 0.0)
    rank, one_mesh = sides.experts, sides.attention is sides.experts and sides.experts.cp == 1
    for tensor in rank.layer.tensors:
        ends = tuple([choices[name] for name in tensor.ends])
        if one_mesh:  # as `Sides.moves_s` has it, without asking per tensor: this is a search's innermost loop
            for name, move in zip(tensor.consumers, moves(rank.layer, tensor, ends), strict=True):
                incoming_s[name] += move_s(rank, move)
        else:
            for name, seconds in zip(tensor.consumers, sides.moves_s(tensor, ends), strict=True):
                incoming_s[name] += seconds
    return sum([cost.kernel_s + (incoming_s[name] + cost.collective_s) for name, cost in costs.items()])
