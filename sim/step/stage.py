"""One step of one pipeline stage under a strategy's choices: seconds and bytes. All that is priced comes by here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.evaluation import Memory, StageBreakdown
from sim.prices.collectives import hand_on_s
from sim.prices.mesh import stage_pair
from sim.step.costs import (
    ends_s,
    handed_on_bytes,
    head_activation_bytes,
    move_s,
    moves,
    op_cost,
    vocabulary_bytes,
)
from sim.step.rank import OpCost, Rank
from sim.step.two_meshes import Sides
from sim.workload import Workload


class Step(NamedTuple):
    """What a step costs on the busiest GPU.

    Attributes:
        stage: Seconds of the slowest stage, by part.
        memory: Bytes of the fullest stage, by kind.
        costs: Of each fused op of one layer, by name.
    """

    stage: StageBreakdown
    memory: Memory
    costs: Mapping[str, OpCost]


def price_step(sides: Sides, pp: int, choices: Mapping[str, int]) -> Step:
    """Prices one step of one microbatch.

    The searched strategy in every phase, the exact optimum (by the same terms, tabulated) and the validation against
    measured serving runs all come by here.

    Args:
        sides: The busiest GPU, and what is in the step.
        pp: Pipeline stages.
        choices: One per fused op, by name.
    """
    costs = {op.name: op_cost(sides.rank_by_op[op.name], op, choices[op.name]) for op in sides.experts.layer.ops}
    stage = stage_time(sides.experts, pp, _layer_s(sides, choices, costs), choices["combine"])
    memory = memory_bytes(
        sides,
        pp,
        layer_weight_bytes=sum([cost.weight_bytes for cost in costs.values()]),
        layer_kv_bytes=sum([cost.kv_bytes for cost in costs.values()]),
        peak_op_bytes=max([cost.activation_bytes for cost in costs.values()]),
    )
    return Step(stage, memory, costs)


def _layer_s(sides: Sides, choices: Mapping[str, int], costs: Mapping[str, OpCost]) -> float:
    incoming_s = dict.fromkeys(choices, 0.0)
    rank, one_mesh = sides.experts, sides.attention is sides.experts
    for tensor in rank.layer.tensors:
        ends = tuple([choices[name] for name in tensor.ends])
        if one_mesh:  # as `Sides.moves_s` has it, without asking per tensor: this is a search's innermost loop
            for name, move in zip(tensor.consumers, moves(rank.layer, tensor, ends), strict=True):
                incoming_s[name] += move_s(rank, move)
        else:
            for name, seconds in zip(tensor.consumers, sides.moves_s(tensor, ends), strict=True):
                incoming_s[name] += seconds
    return sum([cost.kernel_s + (incoming_s[name] + cost.collective_s) for name, cost in costs.items()])


def layers_per_stage(workload: Workload, pp: int) -> int:
    """Layers of the fullest pipeline stage."""
    return math.ceil(workload.model.layers / pp)


def stage_time(rank: Rank, pp: int, layer_s: float, combine_choice: int) -> StageBreakdown:
    """Seconds of the slowest pipeline stage for one microbatch.

    Without a pipeline one stage holds embedding and LM head; with one, the slower of the two ends
    counts, and every stage sends its residual stream on.
    """
    workload = rank.workload
    layers = layers_per_stage(workload, pp)
    first_s, last_s = ends_s(rank, combine_choice)
    send_recv_s = 0.0
    if pp > 1:
        send_recv_s = hand_on_s(
            workload.hardware,
            stage_pair(rank.tp, rank.ep, pp, *workload.hardware.tiers),
            handed_on_bytes(rank, combine_choice),
        )
    both_s = first_s + last_s if pp == 1 else max(first_s, last_s)
    return StageBreakdown(layers, layer_s, first_s, last_s, send_recv_s, layers * layer_s + both_s + send_recv_s)


def memory_bytes(
    sides: Sides, pp: int, *, layer_weight_bytes: float, layer_kv_bytes: float, peak_op_bytes: float
) -> Memory:
    """Bytes on a GPU of the fullest stage.

    Args:
        sides: The busiest GPU.
        pp: Pipeline stages; as many microbatches are in flight, each with its KV cache.
        layer_weight_bytes: Weights of one layer.
        layer_kv_bytes: KV cache of one layer and one microbatch.
        peak_op_bytes: Largest inputs plus output of any op of the layer.
    """
    rank, layers = sides.experts, layers_per_stage(sides.experts.workload, pp)
    vocabularies = 2 if pp == 1 else 1  # embedding and LM head meet on one stage
    activations = sides.stream_bytes() + max(peak_op_bytes, head_activation_bytes(rank))
    workload = rank.workload
    overhead = workload.hardware.overhead_bytes
    if workload.engine is not None:  # what an engine sets aside holds its activations too
        overhead = max(0.0, workload.engine.memory.runtime_bytes - activations)
    return Memory(
        weights=layers * layer_weight_bytes + vocabularies * vocabulary_bytes(rank),
        kv_cache=layers * pp * layer_kv_bytes,
        activations=activations,
        overhead=overhead,
    )


def needed_and_allowed_bytes(workload: Workload, memory: Memory) -> tuple[float, float]:
    """What a GPU must hold and what it may, by the engine's memory policy; by its capacity on the bare machine."""
    return room(workload, memory.total, memory.kv_cache)


def room(workload: Workload, total_bytes: Any, kv_bytes: Any) -> tuple[Any, float]:
    """The same of a total and the KV cache in it, which may be arrays."""
    hbm_bytes = workload.hbm_limit_bytes
    if workload.engine is None:
        return total_bytes, hbm_bytes
    policy = workload.engine.memory
    if policy.of == "total":
        return total_bytes, policy.share * hbm_bytes
    return total_bytes + kv_bytes * (1 / policy.share - 1), hbm_bytes
