"""Attention on a mesh (dp, tp, cp) and the experts on a mesh (ep, moe_tp) of the same GPUs.

An op's costs are those of the GPU on its own side, tensors between ops of one side move within that side's group,
and only the residual stream crosses: after attention's residual add, and from the last op of a layer to the next.
Both meshes number the same GPUs in the same order, innermost axis first, so one side's groups are made of the
other's, and the stream is redistributed by the fastest route on the mesh of both. With equal groups and cp = 1 the
two sides are one, and everything is as in the paper's space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sim.costs import moves, rank_of
from sim.mesh_moves import Axis, mesh_collectives
from sim.ops import FusedOp, Tensor
from sim.placement import REPLICATE, Placement, Shard
from sim.rank import Rank
from sim.sharding import rule
from sim.types import Collective, Strategy, Workload

ATTENTION_SIDE = ("attn_norm", "qkv_proj", "attention", "o_proj", "attn_residual")
"""The ops on attention's mesh; the others are on the experts'."""
Moves = tuple[tuple[Collective, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The busiest GPU as a member of its attention group and of its expert group: one `Rank` where they are equal."""

    attention: Rank
    experts: Rank

    def rank(self, op: FusedOp | str) -> Rank:
        """The side on which an op runs."""
        name = op if isinstance(op, str) else op.name
        return self.attention if name in ATTENTION_SIDE else self.experts

    def moves(self, tensor: Tensor, producer_choice: int, consumer_choices: Sequence[int]) -> Moves:
        """The redistributions of a tensor, one tuple per consumer; see `sim.costs.moves`."""
        source, target = self.rank(tensor.producer), self.rank(tensor.consumers[0])
        if source is target:
            return moves(source, tensor, producer_choice, consumer_choices)
        return self._crossing(tensor, producer_choice, tuple(consumer_choices))

    def _crossing(self, tensor: Tensor, producer_choice: int, consumer_choices: tuple[int, ...]) -> Moves:
        """Every consumer is on the other side. What is moved for one is not moved again, nor is a piece of it."""
        layer = self.attention.layer
        left = rule(layer.op(tensor.producer), layer, producer_choice).output
        consumers = [layer.op(name) for name in tensor.consumers]
        targets = [
            rule(op, layer, choice).inputs[op.inputs.index(tensor.name)]
            for op, choice in zip(consumers, consumer_choices, strict=True)
        ]
        result: list[tuple[Collective, ...]] = []
        for index, target in enumerate(targets):
            held = target in targets[:index] or (target != REPLICATE and REPLICATE in targets)
            result.append(() if held else self._cross(tensor, left, target))
        return tuple(result)

    def _cross(self, tensor: Tensor, source: Placement, target: Placement) -> tuple[Collective, ...]:
        mesh, attention_first = self._mesh(), tensor.producer in ATTENTION_SIDE
        layouts = (self._layout(self.attention, source), self._layout(self.experts, target))
        if not attention_first:
            layouts = (self._layout(self.experts, source), self._layout(self.attention, target))
        group = max(self.attention, self.experts, key=lambda rank: rank.tp)
        shape = (group.sizes.tokens, group.sizes.columns["d"])
        hardware = group.workload.hardware
        return mesh_collectives(hardware, mesh, *layouts, shape, group.activation_each, tensor.name)

    def _mesh(self) -> tuple[Axis, Axis]:
        """The larger group as a mesh of groups of the smaller one. Where they do not fit, which is a violation: nearly."""
        larger, smaller = sorted((self.attention, self.experts), key=lambda rank: -rank.tp)
        inner = math.gcd(larger.tp, smaller.tp)
        outer = "moe_ep" if larger is self.attention else "dp"
        return Axis(outer, larger.tp // inner, inner), Axis(smaller.axis, inner, 1)

    def _layout(self, rank: Rank, placement: Placement) -> tuple[Placement, Placement]:
        """A placement over a side's group on the mesh of both: the groups of the smaller side each have own tokens."""
        larger = max(self.attention.tp, self.experts.tp)
        return (placement if rank.tp == larger else Shard(0)), placement


@lru_cache(maxsize=1024)
def sides_of(workload: Workload, tp: int, cp: int, dp: int, ep: int, batch: int) -> Sides:
    """Both sides of a GPU under these degrees, with what is known of their costs."""
    group = tp * cp
    moe_tp = -(-group * dp // ep)
    if cp == 1 and dp == ep:
        both = rank_of(workload, tp, ep, batch)
        return Sides(both, both)
    return Sides(
        rank_of(workload, group, dp, batch, cp=cp, axis="tp" if cp == 1 else "tp x cp"),
        rank_of(workload, moe_tp, ep, batch, axis="moe_tp", experts_axis="moe_ep"),
    )


def sides_of_strategy(workload: Workload, strategy: Strategy) -> Sides:
    """Both sides of a GPU under a strategy."""
    degrees = strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep
    return sides_of(workload, *degrees, strategy.batch)
