"""`evaluate`: how fast a strategy would run, why, and whether it is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from sim.collectives import hand_on_s
from sim.costs import (
    OpCost,
    choice_violation,
    embedding_s,
    handed_on_bytes,
    head_activation_bytes,
    head_s,
    moves,
    op_cost,
    rank_of,
    seconds,
    stream_bytes,
    token_rows,
    vocabulary_bytes,
)
from sim.mesh import stages_share_a_node
from sim.ops import FusedOp, Layer
from sim.placement import Partial
from sim.rank import Rank
from sim.roofline import KernelTime
from sim.sharding import rule
from sim.trust import judge
from sim.types import (
    Collective,
    Evaluation,
    Memory,
    OpBreakdown,
    StageBreakdown,
    Strategy,
    Violation,
    Workload,
)

CHOICE_LABELS = {
    "": "none",
    "t": "tokens",
    "c": "tokens",
    "d": "hidden",
    "q": "heads",
    "h": "heads",
    "a": "heads",
    "e": "experts",
    "f": "ffn hidden",
}
"""What an einsum letter stands for when it is sharded."""


ROUNDING = 1e-9
"""Relative excess of a TPOT over its SLO that is put down to the order in which seconds were added up."""


def evaluate(workload: Workload, strategy: Strategy) -> Evaluation:
    """Simulates one strategy.

    Args:
        workload: Model, hardware, context, SLO and budget.
        strategy: Degrees, batch and one choice per fused op; see `sim.validate.check_strategy`.

    Returns:
        Throughput, latency, memory by kind, violations with amounts and a breakdown per op. An
        infeasible strategy has its figures too.

    >>> from sim.catalog import load_workload
    >>> from sim.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> evaluation = evaluate(workload, Strategy(8, 16, 2, 512, megatron_dims(workload.model)))
    >>> evaluation.gpus, evaluation.feasible
    (256, True)
    """
    rank = rank_of(workload, strategy.tp, strategy.ep, strategy.batch)
    choices = dict(zip(rank.layer.op_by_name, strategy.dims, strict=True))
    incoming = _incoming_collectives(rank, choices)
    costs = {op.name: op_cost(rank, op, choices[op.name]) for op in rank.layer.ops}
    ops = tuple(_breakdown(rank, op, choices, costs[op.name], incoming[op.name]) for op in rank.layer.ops)
    layer_s = sum(op.time_s for op in ops)
    stage = stage_time(rank, strategy.pp, layer_s, choices["combine"])
    tpot_s = strategy.pp * stage.total_s
    memory = memory_bytes(
        rank,
        strategy.pp,
        layer_weight_bytes=sum(cost.work.weight_bytes for cost in costs.values()),
        layer_kv_bytes=sum(cost.work.kv_bytes for cost in costs.values()),
        peak_op_bytes=max(cost.activation_bytes for cost in costs.values()),
    )
    trust = judge(workload.hardware, costs.values(), incoming.values())
    return Evaluation(
        strategy=strategy,
        tokens_per_s_per_gpu=strategy.batch * strategy.pp / (tpot_s * strategy.gpus),
        tpot_s=tpot_s,
        gpus=strategy.gpus,
        memory_bytes=memory,
        violations=tuple(_violations(rank, strategy, choices, memory.total, tpot_s)),
        stage=stage,
        ops=ops,
        expected_error=trust.expected_error,
        extrapolated=trust.extrapolated,
    )


def layers_per_stage(workload: Workload, pp: int) -> int:
    """Layers of the fullest pipeline stage."""
    return math.ceil(workload.model.layers / pp)


def stage_time(rank: Rank, pp: int, layer_s: float, combine_choice: int) -> StageBreakdown:
    """Seconds of the slowest pipeline stage for one microbatch.

    Without a pipeline one stage holds embedding and LM head; with one, the slower of the two ends
    counts, and every stage hands its residual stream on.
    """
    workload = rank.workload
    layers = layers_per_stage(workload, pp)
    first_s, last_s = embedding_s(rank, combine_choice), head_s(rank, combine_choice)
    send_recv_s = 0.0
    if pp > 1:
        send_recv_s = hand_on_s(
            workload.hardware,
            same_node=stages_share_a_node(rank.tp, rank.ep, pp, workload.hardware.node_gpus),
            sent_bytes=handed_on_bytes(rank, combine_choice),
        )
    ends_s = first_s + last_s if pp == 1 else max(first_s, last_s)
    return StageBreakdown(layers, layer_s, first_s, last_s, send_recv_s, layers * layer_s + ends_s + send_recv_s)


def memory_bytes(
    rank: Rank, pp: int, *, layer_weight_bytes: float, layer_kv_bytes: float, peak_op_bytes: float
) -> Memory:
    """Bytes on a GPU of the fullest stage.

    Args:
        rank: The busiest GPU.
        pp: Pipeline stages; as many microbatches are in flight, each with its KV cache.
        layer_weight_bytes: Weights of one layer.
        layer_kv_bytes: KV cache of one layer and one microbatch.
        peak_op_bytes: Largest inputs plus output of any op of the layer.
    """
    layers = layers_per_stage(rank.workload, pp)
    vocabularies = 2 if pp == 1 else 1  # embedding and LM head meet on one stage
    return Memory(
        weights=layers * layer_weight_bytes + vocabularies * vocabulary_bytes(rank),
        kv_cache=layers * pp * layer_kv_bytes,
        activations=stream_bytes(rank) + max(peak_op_bytes, head_activation_bytes(rank)),
        overhead=rank.workload.hardware.overhead_bytes,
    )


def degree_violations(workload: Workload, tp: int, ep: int, pp: int) -> list[Violation]:
    """Limits that the degrees alone break: the device budget and divisibility."""
    violations: list[Violation] = []
    gpus, layers, experts = tp * ep * pp, workload.model.layers, workload.model.experts
    if gpus > workload.max_gpus:
        message = f"needs {gpus} GPUs, the budget is {workload.max_gpus}"
        violations.append(Violation("gpus", gpus, workload.max_gpus, message))
    if layers % pp:
        violations.append(Violation("layers", pp, layers, f"pp={pp} does not divide {layers} layers"))
    if experts % ep:
        violations.append(Violation("experts", ep, experts, f"ep={ep} does not divide {experts} experts"))
    return violations


def _violations(
    rank: Rank, strategy: Strategy, choices: dict[str, int], memory_total_bytes: float, tpot_s: float
) -> list[Violation]:
    workload = rank.workload
    violations = degree_violations(workload, strategy.tp, strategy.ep, strategy.pp)
    broken = {op.name: choice_violation(rank, op, choices[op.name]) for op in rank.layer.ops}
    if names := [name for name, kind in broken.items() if kind == "heads"]:
        heads = workload.model.heads
        message = f"tp={rank.tp} does not divide {heads} heads ({', '.join(names)})"
        violations.append(Violation("heads", rank.tp, heads, message))
    if names := [name for name, kind in broken.items() if kind == "tokens"]:
        rows = min(token_rows(rank, rank.layer.op(name), choices[name]) for name in names)
        message = f"{rows:g} tokens cannot be sharded over tp={rank.tp} ({', '.join(names)})"
        violations.append(Violation("tokens", rank.tp, rows, message))
    hbm_bytes = workload.hardware.hbm_bytes
    if memory_total_bytes > hbm_bytes:
        message = f"needs {memory_total_bytes / 1e9:.1f} GB of HBM, a GPU has {hbm_bytes / 1e9:.1f} GB"
        violations.append(Violation("hbm", memory_total_bytes, hbm_bytes, message))
    if tpot_s > workload.tpot_slo_s * (1 + ROUNDING):
        message = f"TPOT is {tpot_s * 1e3:.1f} ms, the SLO is {workload.tpot_slo_s * 1e3:.1f} ms"
        violations.append(Violation("tpot", tpot_s, workload.tpot_slo_s, message))
    return violations


def _incoming_collectives(rank: Rank, choices: dict[str, int]) -> dict[str, list[Collective]]:
    incoming: dict[str, list[Collective]] = {name: [] for name in choices}
    for tensor in rank.layer.tensors:
        consumer_choices = [choices[name] for name in tensor.consumers]
        for name, collectives in zip(
            tensor.consumers, moves(rank, tensor, choices[tensor.producer], consumer_choices), strict=True
        ):
            incoming[name].extend(collectives)
    return incoming


@lru_cache(maxsize=1024)
def _placements_in(layer: Layer, op: FusedOp, choice: int, producer_choice: int) -> Mapping[str, str]:
    """Placement of each input as the op reads it; parts that it passes through show as parts."""
    op_rule = rule(op, layer, choice)
    placements = [str(placement) for placement in op_rule.inputs]
    left = rule(_first_producer(layer, op), layer, producer_choice).output
    if op_rule.passes_partial and isinstance(left, Partial):
        placements[0] = str(left)
    return dict(zip(op.inputs, placements, strict=True))


def _first_producer(layer: Layer, op: FusedOp) -> FusedOp:
    return layer.op(layer.tensor(op.inputs[0]).producer)


def _total_s(kernel: KernelTime) -> float:
    return kernel.total_s


def _breakdown(
    rank: Rank, op: FusedOp, choices: dict[str, int], cost: OpCost, incoming: Sequence[Collective]
) -> OpBreakdown:
    choice = choices[op.name]
    op_rule = rule(op, rank.layer, choice)
    collectives = (*incoming, *cost.work.collectives)
    communication_s = seconds(collectives)
    kernel_s = sum([kernel.total_s for kernel in cost.kernels])
    compute_s = sum([kernel.compute_s for kernel in cost.kernels])
    memory_s = sum([kernel.memory_s for kernel in cost.kernels])
    return OpBreakdown(
        name=op.name,
        choice=choice,
        label=CHOICE_LABELS[op.label(choice)],
        placements_in=_placements_in(rank.layer, op, choice, choices[_first_producer(rank.layer, op).name]),
        placement_out=str(op_rule.output),
        collectives=collectives,
        work_flops=sum([kernel.flops for kernel in cost.work.kernels]),
        traffic_bytes=sum([kernel.traffic_bytes for kernel in cost.work.kernels]),
        compute_time_s=compute_s,
        memory_time_s=memory_s,
        kernel_time_s=kernel_s,
        communication_time_s=communication_s,
        bound="communication" if communication_s >= kernel_s else max(cost.kernels, key=_total_s).bound,
    )
