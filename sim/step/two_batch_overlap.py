"""Two-batch overlap: a step's batch in two halves, one's exchange of tokens with its experts behind the other's work.

What a layer then takes depends on kernels of all its ops, yet it is stated where a layer is a sum: as the time by which
the exchange still lengthens the layer, a share of its own. The kernels of the layer are those that the engine runs.

Source: SGLang, sglang/srt/batch_overlap/operations_strategy.py. Decoding, the halves are two stages apart, so that
dispatch is in flight while the other half projects into its attention and the shared expert is computed, and combine
while the other half has its attention and its gate. Prompts: dispatch and combine of one half are in flight during
attention and during the experts of the other; their kernels run on the multiprocessors that DeepEP leaves. [assumed] of
vLLM's dual-batch overlap (--enable-dbo), too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sim.layers.ops import FusedOp
from sim.ops.rank import OpCost, Rank
from sim.ops.sizes import Load
from sim.step.attention_expert_meshes import group_sides
from sim.step.costs import OpParts, op_cost, op_parts
from sim.workload import Workload

_EXCHANGES = ("dispatch", "combine")
LEFT_TO_EXPERTS = 9 / 11
"""[published] Share of the multiprocessors that DeepEP leaves to experts; its normal kernels take 2 of 11 on Hopper."""


def lengthens(rank: Rank, op: FusedOp) -> bool:
    """Whether what an op sends is partly behind the work of another half batch, where batches overlap."""
    return op.kind in _EXCHANGES and rank.ep > 1


def overlapped_cost(rank: Rank, cost: OpCost) -> OpCost:
    """The cost of an exchange with what is left of its time."""
    return cost._replace(collective_s=cost.collective_s * _share_left(rank))


def overlapped_parts(rank: Rank, parts: OpParts) -> OpParts:
    """What is behind that."""
    share = _share_left(rank)
    left = tuple(replace(each, time_s=each.time_s * share) for each in parts.work.collectives)
    return parts._replace(work=parts.work._replace(collectives=left))


class _Layer(NamedTuple):
    """Seconds of a layer of one batch, and what is behind what.

    Attributes:
        into: Norm and projection into attention.
        attention: The rest of attention's side, norm and gate.
        shared: The shared experts.
        experts: The routed ones, with what is done to their tokens.
        dispatch, combine: Exchanges.
    """

    into: float
    attention: float
    shared: float
    experts: float
    dispatch: float
    combine: float

    @property
    def kernels_s(self) -> float:
        """All but the exchanges."""
        return self.into + self.attention + self.shared + self.experts

    def in_pairs_s(self, *, prompts: bool) -> float:
        """Seconds of two of them, overlapping; never below what both exchange or both compute."""
        if prompts:
            experts = self.experts / LEFT_TO_EXPERTS
            attention, kernels_s = self.into + self.attention, self.kernels_s + experts - self.experts
            late = _over(self.dispatch, attention) + _over(self.dispatch, experts)
            late += _over(self.combine, experts) + _over(self.combine, self.shared + attention)
        else:
            kernels_s = self.kernels_s
            late = 2 * (_over(self.dispatch, self.into + self.shared) + _over(self.combine, self.attention))
        return max(2 * kernels_s + late, 2 * (self.dispatch + self.combine))


def _over(exchange_s: float, behind_s: float) -> float:
    return max(0.0, exchange_s - behind_s)


def _share_left(rank: Rank) -> float:
    if rank.load.or_more:
        return 0.0  # a larger batch may hide all of it: the share falls as kernels grow
    return _share(rank.workload, rank.load, rank.tp * rank.ep, rank.ep, rank.layer_group)


@lru_cache(maxsize=4096)
def _share(workload: Workload, load: Load, gpus: int, ep: int, layer_group: int) -> float:
    """What of an exchange's time lengthens a layer; above 1 where halves are so small that overlapping costs time."""
    whole = _layer(workload, load, gpus, ep, layer_group)
    exchange_s = whole.dispatch + whole.combine
    if not exchange_s:
        return 0.0
    half = _layer(workload, _half(load), gpus, ep, layer_group)
    pair_s = half.in_pairs_s(prompts=load.prompts > 0)
    return max(0.0, pair_s - whole.kernels_s) / exchange_s


def _half(load: Load) -> Load:
    most = load.busiest_prompts
    return load._replace(
        sequences=-(-load.sequences // 2),
        prompts=load.prompts / 2,
        busiest_prompts=None if most is None else most / 2,
    )


def _layer(workload: Workload, load: Load, gpus: int, ep: int, layer_group: int) -> _Layer:
    dp = load.attention_groups
    sides = group_sides(workload, load, gpus // dp, 1, dp, ep, layer_group)
    found = dict.fromkeys(_Layer._fields, 0.0)
    part = "into"
    for op in sides.experts.layer.ops:
        rank, choice = sides.rank_by_op[op.name], op.megatron.plain
        cost = op_cost(rank, op, choice)
        if op.kind in _EXCHANGES:
            found[op.kind], part = cost.collective_s, "experts"
            found[part] += cost.kernel_s
            continue
        if op.kind == "attention":
            part = "attention"
        beside = sum([each.total_s for each in op_parts(rank, op, choice).kernels[1:]]) if part == "experts" else 0.0
        found["shared"] += beside
        found[part] += cost.time_s - beside
    return _Layer(**found)
