"""One step of one pipeline stage under a strategy's choices: seconds and bytes. All that is priced comes by here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.evaluation import Memory, StageBreakdown
from sim.ops.rank import OpCost, Rank
from sim.prices.collectives import stage_send_s
from sim.prices.mesh import stage_pair
from sim.step.costs import sent_on_bytes
from sim.step.drafting import draft_of
from sim.step.ends import ends_s, head_activation_bytes, vocabulary_bytes
from sim.step.layer import layer_costs, layer_s
from sim.step.pipeline import Stage, pipeline
from sim.step.two_meshes import Sides, meeting
from sim.workload import Workload


class Step(NamedTuple):
    """What a step costs on the busiest GPU.

    Attributes:
        stage: Seconds of the slowest stage, by part.
        memory: Bytes of the fullest stage, by kind.
        costs: Of each fused op of one layer, by name, per group of layers.
    """

    stage: StageBreakdown
    memory: Memory
    costs: tuple[Mapping[str, OpCost], ...]


def price_step(stack: Sequence[Sides], pp: int, choices: Sequence[Mapping[str, int]]) -> Step:
    """Prices one step of one microbatch.

    The searched strategy in every phase, the exact optimum (by the same terms, tabulated) and the validation against
    measured serving runs all come by here.

    Args:
        stack: The busiest GPU and what is in the step, per group of the model's layers.
        pp: Pipeline stages.
        choices: One per fused op, by name, per group.
    """
    costs = tuple([layer_costs(*each) for each in zip(stack, choices, strict=True)])
    layers_s = tuple([layer_s(*each) for each in zip(stack, choices, costs, strict=True)])
    memory = memory_bytes(
        stack,
        pp,
        layer_weight_bytes=[sum([cost.weight_bytes for cost in each.values()]) for each in costs],
        layer_kv_bytes=[sum([cost.kv_bytes for cost in each.values()]) for each in costs],
        peak_op_bytes=max([cost.activation_bytes for each in costs for cost in each.values()]),
    )
    return Step(stage_time(stack, pp, layers_s, choices), memory, costs)


def meeting_s(left: Sides, right: Sides, choices: Mapping[str, int], next_choices: Mapping[str, int]) -> float:
    """What it takes longer to move the residual stream to a layer of another group than to one of its own; or less."""
    own, its = left.experts.layer.stream, right.experts.layer.stream
    own_s = sum(left.moves_s(own, tuple([choices[name] for name in own.ends])))
    ends = (choices[own.producer], *[next_choices[name] for name in its.consumers])
    return meeting(left, right).moves_s(ends) - own_s


# --- stages -------------------------------------------------------------------------------------------


def stage_time(
    stack: Sequence[Sides], pp: int, layers_s: Sequence[float], choices: Sequence[Mapping[str, int]]
) -> StageBreakdown:
    """Seconds of the slowest pipeline stage for one microbatch.

    Args:
        stack: As of `price_step`.
        pp: Pipeline stages. Without a pipeline one stage holds embedding and LM head; with one, every stage sends its
            residual stream on.
        layers_s: Seconds of one layer of each group.
        choices: As of `price_step`.
    """
    end = end_of(stack)
    last = choices[end_group(stack)][end.experts.layer.stream.producer]
    rank, draft_s = end.experts, draft_of(end).time_s
    first_s, last_s = model_ends_s(end, last)
    send_recv_s = stream_send_s(rank, pp, last)
    slowest: tuple[float, float, Stage] | None = None
    for stage in pipeline(rank.workload, pp):
        inside_s = sum([count * each_s for count, each_s in zip(stage.layers, layers_s, strict=True)])
        for left, right, often in stage.meetings:
            inside_s += often * meeting_s(stack[left], stack[right], choices[left], choices[right])
        total_s = inside_s + stage_ends_s(stage, first_s, last_s) + send_recv_s
        if slowest is None or total_s > slowest[0]:
            slowest = (total_s, inside_s, stage)
    assert slowest is not None
    total_s, inside_s, stage = slowest
    layers = sum(stage.layers)  # none, where there are more stages than layers
    mean_s = layers_s[0] if len(layers_s) == 1 else inside_s / max(layers, 1)
    ends = (first_s, last_s - draft_s if draft_s else last_s)
    return StageBreakdown(layers, mean_s, *ends, send_recv_s, total_s, stage.layers, tuple(layers_s), draft_s)


def end_group(stack: Sequence[Sides]) -> int:
    """The group in whose placement the residual stream comes from the embedding and reaches the LM head: the last's."""
    return stack[0].experts.workload.model.order[-1]


def end_of(stack: Sequence[Sides]) -> Sides:
    """The GPU on whose attention's mesh both ends of the model lie."""
    return stack[end_group(stack)]


def model_ends_s(end: Sides, last_choice: int) -> tuple[float, float]:
    """Seconds of the embedding, and of the LM head and the draft, which the last stage has."""
    first_s, last_s = ends_s(end, last_choice)
    return first_s, last_s + draft_of(end).time_s


def stage_ends_s(stage: Stage, first_s: Any, last_s: Any) -> Any:
    """Seconds of the ends of the model that a stage has; floats or arrays."""
    if stage.first and stage.last:
        return first_s + last_s
    return (first_s if stage.first else 0.0) + (last_s if stage.last else 0.0)


def stream_send_s(rank: Rank, pp: int, last_choice: int) -> float:
    """Seconds in which a stage sends its residual stream on; 0 without a pipeline."""
    if pp == 1:
        return 0.0
    hardware = rank.workload.hardware
    return stage_send_s(
        hardware,
        stage_pair(rank.tp, rank.ep, pp, *hardware.tiers),
        sent_on_bytes(rank, last_choice),
    )


# --- memory -------------------------------------------------------------------------------------------


def memory_bytes(
    stack: Sequence[Sides],
    pp: int,
    *,
    layer_weight_bytes: Sequence[float],
    layer_kv_bytes: Sequence[float],
    peak_op_bytes: float,
) -> Memory:
    """Bytes on a GPU of the fullest stage.

    Args:
        stack: As of `price_step`.
        pp: Pipeline stages; as many microbatches are in flight, each with its KV cache.
        layer_weight_bytes: Weights of one layer of each group.
        layer_kv_bytes: KV cache or state of one layer of each group and one microbatch.
        peak_op_bytes: Largest inputs plus output of any op of any layer.
    """
    end = end_of(stack)
    workload = end.attention.workload
    stream = max([sides.stream_bytes() for sides in stack])
    activations = stream + max(peak_op_bytes, head_activation_bytes(end.attention))
    overhead = workload.hardware.overhead_bytes
    if workload.engine is not None:  # what an engine sets aside holds its activations too
        overhead = max(0.0, workload.engine.memory.runtime_bytes - activations)
    stages = [
        Memory(
            weights=sum([n * each for n, each in zip(stage.layers, layer_weight_bytes, strict=True)])
            + end_weight_bytes(end, stage),
            kv_cache=sum([n * pp * each for n, each in zip(stage.layers, layer_kv_bytes, strict=True)])
            + pp * end_kv_bytes(end, stage),
            activations=activations,
            overhead=overhead,
        )
        for stage in pipeline(workload, pp)
    ]
    if len(stages) == 1:
        return stages[0]
    return max(stages, key=lambda memory: needed_and_allowed_bytes(workload, memory)[0])


def vocabularies(workload: Workload, stage: Stage) -> int:
    """How often a stage holds the vocabulary: as the embedding, and as the LM head unless they are one."""
    both = stage.first and stage.last
    return 1 if both and workload.model.tied_embeddings else stage.first + stage.last


def end_weight_bytes(end: Sides, stage: Stage) -> float:
    """Weights of the ends of the model that a stage has, and of the draft."""
    held = vocabularies(end.attention.workload, stage) * vocabulary_bytes(end.attention)
    return held + draft_of(end).weight_bytes if stage.last else held


def end_kv_bytes(end: Sides, stage: Stage) -> float:
    """Cache of the draft for one microbatch, where a stage has it."""
    return draft_of(end).kv_bytes if stage.last else 0.0


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
