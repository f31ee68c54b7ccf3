"""`evaluate`: how fast a strategy would run, why, and whether it is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from sim.evaluation import Evaluation, Memory, StageBreakdown, Violation
from sim.prices.collectives import hand_on_s
from sim.prices.mesh import stages_share_a_node
from sim.step.breakdown import explain
from sim.step.costs import (
    OpCost,
    ends_s,
    handed_on_bytes,
    head_activation_bytes,
    move_s,
    moves,
    op_cost,
    token_rows,
    vocabulary_bytes,
)
from sim.step.rank import Rank
from sim.step.two_meshes import Sides, sides_of_strategy
from sim.strategy import Strategy
from sim.workload import Workload

ROUNDING = 1e-9
"""Relative excess of a TPOT over its SLO that is put down to the order in which seconds were added up."""


def evaluate(workload: Workload, strategy: Strategy) -> Evaluation:
    """Simulates one strategy.

    Args:
        workload: Model, hardware, context, SLO and budget.
        strategy: Degrees, batch and one choice per fused op; see `sim.validate.check_strategy`.

    Returns:
        Throughput, latency, memory by kind, violations with amounts and a breakdown per op, which is worked
        out when it is read. An infeasible strategy has its figures too.

    >>> from sim.config.catalog import load_workload
    >>> from sim.layers.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> evaluation = evaluate(workload, Strategy(8, 16, 2, 512, megatron_dims(workload.model)))
    >>> evaluation.gpus, evaluation.feasible
    (256, True)
    """
    sides = sides_of_strategy(workload, strategy)
    rank, rank_by_op = sides.experts, sides.rank_by_op
    choices = dict(zip(rank.layer.op_by_name, strategy.dims, strict=True))
    costs = {op.name: op_cost(rank_by_op[op.name], op, choices[op.name]) for op in rank.layer.ops}
    stage = stage_time(rank, strategy.pp, _layer_s(sides, choices, costs), choices["combine"])
    tpot_s = strategy.pp * stage.total_s
    memory = memory_bytes(
        sides,
        strategy.pp,
        layer_weight_bytes=sum([cost.weight_bytes for cost in costs.values()]),
        layer_kv_bytes=sum([cost.kv_bytes for cost in costs.values()]),
        peak_op_bytes=max([cost.activation_bytes for cost in costs.values()]),
    )
    return Evaluation(
        strategy=strategy,
        tokens_per_s_per_gpu=strategy.batch * strategy.pp / (tpot_s * strategy.gpus),
        tpot_s=tpot_s,
        gpus=strategy.gpus,
        memory_bytes=memory,
        violations=tuple(_violations(sides, strategy, choices, costs, memory.total, tpot_s)),
        stage=stage,
    ).explained_by(partial(explain, workload, strategy))


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
    counts, and every stage hands its residual stream on.
    """
    workload = rank.workload
    layers = layers_per_stage(workload, pp)
    first_s, last_s = ends_s(rank, combine_choice)
    send_recv_s = 0.0
    if pp > 1:
        send_recv_s = hand_on_s(
            workload.hardware,
            same_node=stages_share_a_node(rank.tp, rank.ep, pp, workload.hardware.node_gpus),
            sent_bytes=handed_on_bytes(rank, combine_choice),
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
    return Memory(
        weights=layers * layer_weight_bytes + vocabularies * vocabulary_bytes(rank),
        kv_cache=layers * pp * layer_kv_bytes,
        activations=sides.stream_bytes() + max(peak_op_bytes, head_activation_bytes(rank)),
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


def mesh_violations(workload: Workload, tp: int, cp: int, dp: int, ep: int) -> list[Violation]:
    """Limits that attention's own degrees break: one must be able to lay both meshes on the same GPUs."""
    violations: list[Violation] = []
    gpus, group = tp * cp * dp, tp * cp
    if gpus % ep:
        message = f"tp*dp*cp ({tp}*{dp}*{cp}) must equal moe_tp*ep, but ep={ep} does not divide it"
        violations.append(Violation("meshes", ep, gpus, message))
    elif (moe_tp := gpus // ep) % group and group % moe_tp:
        message = f"groups of tp*cp={group} and of moe_tp={moe_tp} GPUs do not fit: one must divide the other"
        violations.append(Violation("meshes", moe_tp, group, message))
    if workload.context_tokens % cp:
        message = f"cp={cp} does not divide the context of {workload.context_tokens} tokens"
        violations.append(Violation("context", cp, workload.context_tokens, message))
    return violations


def _violations(
    sides: Sides,
    strategy: Strategy,
    choices: Mapping[str, int],
    costs: Mapping[str, OpCost],
    memory_total_bytes: float,
    tpot_s: float,
) -> list[Violation]:
    workload = sides.experts.workload
    violations = degree_violations(workload, strategy.moe_tp, strategy.ep, strategy.pp)
    if strategy.extended:
        violations += mesh_violations(workload, strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep)
    if broken := {name: cost for name, cost in costs.items() if cost.broken}:
        for rank in sides.ranks:
            on_side = {name: cost for name, cost in broken.items() if sides.rank_by_op[name] is rank}
            violations += _choice_violations(rank, choices, on_side)
    hbm_bytes, tpot_limit_s = workload.hbm_limit_bytes, workload.tpot_limit_s
    less = f", less a margin of {workload.margin:.1%}" if workload.margin else ""
    if memory_total_bytes > hbm_bytes:
        had_gb = workload.hardware.hbm_bytes / 1e9
        message = f"needs {memory_total_bytes / 1e9:.1f} GB of HBM, a GPU has {had_gb:.1f} GB{less}"
        violations.append(Violation("hbm", memory_total_bytes, hbm_bytes, message))
    if tpot_s > tpot_limit_s * (1 + ROUNDING):
        message = f"TPOT is {tpot_s * 1e3:.1f} ms, the SLO is {workload.tpot_slo_s * 1e3:.1f} ms{less}"
        violations.append(Violation("tpot", tpot_s, tpot_limit_s, message))
    return violations


def _choice_violations(rank: Rank, choices: Mapping[str, int], costs: Mapping[str, OpCost]) -> list[Violation]:
    """What the choices of some ops of one side break."""
    violations: list[Violation] = []
    if names := [name for name, cost in costs.items() if cost.broken == "heads"]:
        heads = rank.workload.model.heads
        message = f"{rank.axis}={rank.tp} does not divide {heads} heads ({', '.join(names)})"
        violations.append(Violation("heads", rank.tp, heads, message))
    if names := [name for name, cost in costs.items() if cost.broken == "tokens"]:
        rows = min(token_rows(rank, rank.layer.op(name), choices[name]) for name in names)
        message = f"{rows:g} tokens cannot be sharded over {rank.axis}={rank.tp} ({', '.join(names)})"
        violations.append(Violation("tokens", rank.tp, rows, message))
    return violations
