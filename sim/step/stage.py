"""One step through the stages of a pipeline, stated once: what a stage adds up in seconds and bytes.

A stage has so many layers of each group (`sim.step.layer`), the ways of the residual stream between groups, perhaps an
end of the model, and hands the stream on. Sums take floats or arrays: one strategy is `price_step`; `sim.batched` and
the exact optimum ask for the same sums over arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from sim.arrays import add_up, larger
from sim.evaluation import Memory, StageBreakdown
from sim.ops.rank import OpCost
from sim.ops.sizes import Load
from sim.prices.collectives import in_lanes_s, stage_send_s
from sim.prices.mesh import MeshGroup, stage_pair
from sim.step.attention_expert_meshes import Sides, meeting
from sim.step.costs import sent_on_bytes
from sim.step.layer import GroupSum, group_sums
from sim.step.pipeline import Pair, Stage, meet, pipeline
from sim.step.speculative_decoding import FREE, Draft, draft_run, drafts, mesh_of_draft
from sim.step.vocabulary_layers import embedding_s, head_s, vocabulary_cost
from sim.strategy import NONE
from sim.workload import Workload


class StepSum(NamedTuple):
    """A step as a sum over a strategy's dims.

    Attributes:
        groups: One layer of each group of the model's layers.
        meetings: Where the choices stand in `Strategy.dims` that `meeting_s` depends on, of groups that may meet.
        end: The group in whose placement the residual stream comes from the embedding and reaches the LM head.
        leaves: Where the choice of its last op stands.
    """

    groups: tuple[GroupSum, ...]
    meetings: Mapping[Pair, tuple[int, ...]]
    end: int
    leaves: int


@lru_cache(maxsize=64)
def step_sum(workload: Workload) -> StepSum:
    """A step of a workload as a sum."""
    groups, order = group_sums(workload), workload.model.order
    pairs = sorted({pair for pair in pairwise(order) if pair[0] != pair[1]}) if meet(workload) else []
    streams = [group.layer.layer.stream for group in groups]
    meetings = {
        (left, right): (
            *[groups[left].place[op] for op in streams[left].ops],
            *[groups[right].place[op] for op in streams[right].consumers],
        )
        for left, right in pairs
    }
    end = order[-1]
    return StepSum(groups, meetings, end, groups[end].place[streams[end].producer])


class Step(NamedTuple):
    """What a step costs on the busiest GPU.

    Attributes:
        stage: Seconds of the slowest stage, by part.
        memory: Bytes of the fullest stage, by kind.
        costs: Of each fused op of one layer, in order, per group of layers.
    """

    stage: StageBreakdown
    memory: Memory
    costs: tuple[list[OpCost], ...]


def price_step(stack: Sequence[Sides], pp: int, dims: tuple[int, ...]) -> Step:
    """Prices one step of one microbatch.

    The searched strategy in every phase and the validation against measured serving runs come by here.

    Args:
        stack: The busiest GPU and what is in the step, per group of the model's layers.
        pp: Pipeline stages. Without a pipeline one stage holds embedding and LM head; with one, every stage sends its
            residual stream on.
        dims: Choices, as a strategy has them.
    """
    workload = stack[0].experts.workload
    step, stages = step_sum(workload), pipeline(workload, pp)
    costs, layers_s, met = _layers(step, stages, stack, dims)
    vocabulary = vocabulary_seconds(stack[step.end], pp, dims[step.leaves])
    of_stages_s = [stage_s(stage, layers_s, met, vocabulary) for stage in stages]
    total_s = max(of_stages_s)
    stage = stages[of_stages_s.index(total_s)]
    layers = sum(stage.layers)  # none, where there are more stages than layers
    mean_s = layers_s[0] if len(layers_s) == 1 else inside_s(stage, layers_s, met) / max(layers, 1)
    head_s = vocabulary.last_s - vocabulary.draft_s if vocabulary.draft_s else vocabulary.last_s
    breakdown = StageBreakdown(
        layers,
        mean_s,
        vocabulary.first_s,
        head_s,
        vocabulary.send_s,
        total_s,
        stage.layers,
        tuple(layers_s),
        vocabulary.draft_s,
    )
    stored, base = _stored(costs), base_of(stack)
    kinds = [Memory(*stage_bytes(workload, each, pp, *stored, base)) for each in stages]
    memory = kinds[0]
    if len(kinds) > 1:
        memory = max(kinds, key=lambda each: needed_and_allowed_bytes(workload, each)[0])
    return Step(breakdown, memory, costs)


def _layers(
    step: StepSum, stages: Sequence[Stage], stack: Sequence[Sides], dims: tuple[int, ...]
) -> tuple[tuple[list[OpCost], ...], list[float], dict[Pair, float]]:
    """Costs of the ops of one layer of each group, its seconds, and those of meetings."""
    priced = [group.priced(sides, dims) for group, sides in zip(step.groups, stack, strict=True)]
    layers_s = [group.layer.time_s(*each) for group, each in zip(step.groups, priced, strict=True)]
    met: dict[Pair, float] = {}
    for pair in {pair for stage in stages for pair, _ in stage.meetings}:
        met[pair] = meeting_s(stack, pair, tuple([dims[place] for place in step.meetings[pair]]))
    return tuple([each.costs for each in priced]), layers_s, met


def _stored(costs: Sequence[Sequence[OpCost]]) -> tuple[list[float], list[float], float]:
    """Weights and KV cache of one layer of each group, and the largest activations of any op."""
    return (
        [add_up([cost.weight_bytes for cost in each]) for each in costs],
        [add_up([cost.kv_bytes for cost in each]) for each in costs],
        max([cost.activation_bytes for each in costs for cost in each]),
    )


# --- seconds ------------------------------------------------------------------------------------------


class VocabularySeconds(NamedTuple):
    """Seconds of embedding, LM head and between stages, or arrays of them.

    Attributes:
        first_s: Of the embedding.
        last_s: Of the LM head and the draft.
        send_s: In which a stage sends its residual stream on; 0 without a pipeline.
        draft_s: Of the draft, in `last_s`.
    """

    first_s: Any
    last_s: Any
    send_s: Any
    draft_s: float = 0.0


def inside_s(stage: Stage, layers_s: Sequence[Any], meetings_s: Mapping[Pair, Any]) -> Any:
    """Seconds of a stage between embedding and LM head, for one microbatch.

    Args:
        stage: Of one pipeline, or of many.
        layers_s: Of one layer of each group.
        meetings_s: Extra seconds of the residual stream's way from one group to another.
    """
    seconds = add_up([count * each_s for count, each_s in zip(stage.layers, layers_s, strict=True)])
    for pair, often in stage.meetings:
        seconds = seconds + often * meetings_s[pair]
    return seconds


def stage_s(
    stage: Stage, layers_s: Sequence[Any], meetings_s: Mapping[Pair, Any], vocabulary: VocabularySeconds
) -> Any:
    """Seconds of a stage for one microbatch: `inside_s`, its embedding or LM head, and handing the stream on."""
    return inside_s(stage, layers_s, meetings_s) + ends_s(stage, vocabulary) + vocabulary.send_s


def ends_s(stage: Stage, vocabulary: VocabularySeconds) -> Any:
    """Seconds of what a stage has of embedding and LM head."""
    return stage.first * vocabulary.first_s + stage.last * vocabulary.last_s


def meeting_s(stack: Sequence[Sides], pair: Pair, choices: tuple[int, ...]) -> float:
    """What it takes longer to move the residual stream to a layer of another group than to one of its own; or less.

    Args:
        stack: As of `price_step`.
        pair: The groups.
        choices: At both ends of the stream of the first one; of the ops that read it in the other.
    """
    left, right = (stack[group] for group in pair)
    stream = left.experts.layer.stream
    own, other = choices[: len(stream.ops)], choices[len(stream.ops) :]
    met = (meeting.__wrapped__ if left.experts.in_lanes else meeting)(left, right)
    return met.moves_s((own[0], *other)) - add_up(left.moves_s(stream, own))


def end_group(stack: Sequence[Sides]) -> int:
    """The group in whose placement the residual stream comes from the embedding and reaches the LM head: the last's."""
    return stack[0].experts.workload.model.order[-1]


def end_of(stack: Sequence[Sides]) -> Sides:
    """The GPU on whose attention's mesh embedding and LM head lie."""
    return stack[end_group(stack)]


def vocabulary_seconds(end: Sides, pp: int, last_choice: int) -> VocabularySeconds:
    """Seconds around layers whose last op leaves the residual stream under a choice."""
    known, key = end.known, ("vocabulary_layers", last_choice)
    found = known.get(key)
    if found is None:
        draft_s = draft_of(end).time_s
        last_s = head_s(end, last_choice) + draft_s
        found = known[key] = VocabularySeconds(embedding_s(end, last_choice), last_s, 0.0, draft_s)
    return found if pp == 1 else found._replace(send_s=stream_send_s(end, pp, last_choice))


def draft_of(end: Sides) -> Draft:
    """What a draft adds to the last stage of a GPU, given both its sides in the model's last layer."""
    workload = end.experts.workload
    return _draft(workload, *mesh_of_draft(end)) if workload.speculation and drafts(workload) else FREE


@lru_cache(maxsize=4096)
def _draft(workload: Workload, load: Load, tp: int, cp: int, dp: int, ep: int) -> Draft:
    """Its passes, each a step of a pipeline of one stage."""
    run = draft_run(workload, load, tp, cp, dp, ep)
    step, (stage,) = step_sum(run.workload), pipeline(run.workload, 1)
    time_s, stored = 0.0, list[tuple[list[float], list[float], float]]()
    for stack, dims, ahead, joining_s in run.passes:
        costs, layers_s, met = _layers(step, [stage], stack, dims)
        time_s += inside_s(stage, layers_s, met)
        time_s += ends_s(stage, VocabularySeconds(embedding_s(stack[-1], NONE), head_s(ahead, NONE), 0.0))
        time_s += joining_s
        stored.append(_stored(costs))
    layers = tuple([run.copies * count for count in stage.layers])
    copied = stage._replace(layers=layers, first=run.own_vocabulary, last=run.own_vocabulary)
    weights, kv, *_ = stage_bytes(run.workload, copied, 1, *stored[0], base_of(run.passes[0].stack))
    return Draft(time_s, weights + run.joining_bytes, kv)


def stream_send_s(end: Sides, pp: int, last_choice: int) -> float:
    """Seconds in which a stage sends its residual stream on; 0 without a pipeline."""
    rank = end.experts
    if pp == 1:
        return 0.0
    return stream_to_s(end, stage_pair(rank.tp, rank.ep, pp, *rank.workload.hardware.tiers), last_choice)


def stream_to_s(end: Sides, pair: MeshGroup, last_choice: int) -> Any:
    """Seconds in which a stage sends its residual stream to one that lies so beside it."""
    rank, hardware = end.experts, end.experts.workload.hardware
    sent_bytes = sent_on_bytes(rank, last_choice)
    if rank.in_lanes:
        return in_lanes_s(partial(stage_send_s.__wrapped__, hardware), pair, sent_bytes)
    return stage_send_s(hardware, pair, sent_bytes)


# --- bytes --------------------------------------------------------------------------------------------


class Base(NamedTuple):
    """What a GPU holds whatever the choices, in bytes; or arrays.

    Attributes:
        stream: The residual stream.
        head: Activations at the LM head.
        embedding, lm_head: Their weights.
        tied: What of them is stored once where both are on one stage.
        draft_weights, draft_kv: Of the draft.
    """

    stream: Any
    head: Any
    embedding: Any
    lm_head: Any
    tied: Any
    draft_weights: Any
    draft_kv: Any


def base_of(stack: Sequence[Sides]) -> Base:
    """What a GPU holds whatever the choices."""
    end = end_of(stack)
    draft, cost = draft_of(end), vocabulary_cost(end.attention)
    stream_bytes = larger(*[sides.stream_bytes() for sides in stack])
    return Base(stream_bytes, cost.activation_bytes, *cost.bytes, draft.weight_bytes, draft.kv_bytes)


def stage_bytes(
    workload: Workload,
    stage: Stage,
    pp: Any,
    layer_weights: Sequence[Any],
    layer_kv: Sequence[Any],
    peak_op_bytes: Any,
    base: Base,
) -> tuple[Any, Any, Any, Any]:
    """Weights, KV cache, activations and overhead of a stage, as `Memory` has them.

    Args:
        workload: An engine sets something aside, which holds its activations too.
        stage: Floats or arrays.
        pp: Pipeline stages; as many microbatches are in flight, each with its KV cache.
        layer_weights: Of one layer of each group.
        layer_kv: Of one layer of each group and one microbatch.
        peak_op_bytes: Largest inputs plus output of any op of any layer.
        base: What is stored besides.
    """
    vocabulary = vocabulary_stored(stage, base.embedding, base.lm_head, base.tied) + stage.last * base.draft_weights
    weights = add_up([count * each for count, each in zip(stage.layers, layer_weights, strict=True)]) + vocabulary
    kv = add_up([count * pp * each for count, each in zip(stage.layers, layer_kv, strict=True)])
    activations, overhead = base.stream + larger(peak_op_bytes, base.head), workload.hardware.overhead_bytes
    if workload.engine is not None:
        overhead = larger(0.0, workload.engine.memory.runtime_bytes - activations)
    return weights, kv + pp * (stage.last * base.draft_kv), activations, overhead


def vocabulary_stored(stage: Stage, embedding: Any, lm_head: Any, tied: Any) -> Any:
    """Bytes of what a stage has of embedding and LM head, tied ones once."""
    return stage.first * embedding + stage.last * lm_head - stage.first * stage.last * tied


def stage_room(
    workload: Workload, stage: Stage, pp: Any, weights: Sequence[Any], kv: Sequence[Any], peak: Any, base: Base
) -> tuple[Any, float]:
    """What a GPU of a stage must hold and what it may; takes what `stage_bytes` does."""
    kinds = stage_bytes(workload, stage, pp, weights, kv, peak, base)
    return room(workload, sum(kinds), kinds[1])


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
