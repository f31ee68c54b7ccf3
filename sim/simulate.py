"""`evaluate`: how fast a strategy would run, why, and whether it is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sim.arrays import larger, smaller
from sim.evaluation import Evaluation, Memory, Violation, unlike_texts
from sim.ops.rank import OpCost, Rank
from sim.serving.confidence import ROUNDING, at_confidence_s, slower
from sim.serving.phases import Batching, batching, most_sent_requests, most_sequences, phase_of
from sim.step.attention_expert_meshes import Sides, sides_of_strategy
from sim.step.breakdown import explain
from sim.step.costs import token_rows
from sim.step.layer import GroupSum, group_sums
from sim.step.stage import Step, needed_and_allowed_bytes, price_step
from sim.strategy import Strategy
from sim.workload import EVEN_ODDS, Workload, with_vocabulary


def evaluate(workload: Workload, strategy: Strategy) -> Evaluation:
    """Simulates one strategy.

    Args:
        workload: Model, hardware, phase, traffic, SLO and budget.
        strategy: Degrees, batch and one choice per fused op; see `sim.strategy_checks.check_strategy`.

    Returns:
        Throughput, latency, memory by kind, violations with amounts and a breakdown per op, which is worked
        out when it is read. An infeasible strategy has its figures too: in phase serve those of the requests that
        run at once, while the others wait.

    >>> from sim.config.catalog import load_workload
    >>> from sim.ops.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> evaluation = evaluate(workload, Strategy(8, 16, 2, 512, megatron_dims(workload.model)))
    >>> evaluation.gpus, evaluation.feasible
    (256, True)
    """
    workload = with_vocabulary(workload, strategy.vocabulary)
    gpus, state = strategy.gpus, steady_state(workload, strategy)
    steps = state.batching.steps(state.decode_s, state.mixed_s)
    tpot_s, ttft_s, prompt_share = steps.tpot_s, steps.ttft_s, steps.prompt_share
    first, last, factors = state.steps[0], state.steps[-1], slower(workload)
    token = factors.token(prompt_share) if factors.guarded else 1.0
    found = Evaluation(
        strategy=strategy,
        tokens_per_s_per_gpu=state.batching.throughput(steps.step_s, gpus),
        tpot_s=tpot_s,
        gpus=gpus,
        memory_bytes=state.memory,
        violations=(
            *degree_limits(workload, strategy),
            *engine_limits(workload, strategy),
            *state.violations,
            *latency_limits(workload, token * tpot_s, factors.first * ttft_s),
        ),
        stage=first.stage,
        ttft_s=ttft_s,
        running=state.batching.in_flight,
        prompt_stage=last.stage if state.batching.mixed else None,
        engine_s=state.batching.engine_s(state.decode_s, state.mixed_s),
    ).explained_by(partial(explain, workload, strategy, state.batching.loads, tpot_s, ttft_s, prompt_share))
    if factors.guarded and found.feasible:  # what its own kernels may be off
        sure = at_confidence_s(workload, (tpot_s, found.tpot_interval_s), (ttft_s, found.ttft_interval_s))
        return found.breaking(tuple(latency_limits(workload, *sure)))
    return found


class SteadyState(NamedTuple):
    """The steps that a deployment goes through, priced.

    Attributes:
        batching: What is in them and how often.
        steps: The step that decodes alone, then the one that carries prompts; one where the phase has but one.
        memory: Of all requests in flight, whether or not they have room.
        violations: Limits on the choices and on the requests in flight.
        decode_s: Seconds of the first through all stages, kernels and collectives alone.
        mixed_s: The same of the last.
    """

    batching: Batching
    steps: tuple[Step, ...]
    memory: Memory
    violations: tuple[Violation, ...]
    decode_s: float
    mixed_s: float


def steady_state(workload: Workload, strategy: Strategy) -> SteadyState:
    """Prices the steps of a strategy; engines' own times are fitted on this."""
    state = batching(workload, strategy.batch, strategy.attention_dp).through(strategy.pp)
    stacks = [sides_of_strategy(workload, load, strategy) for load in state.loads]
    steps = tuple([price_step(stack, strategy.pp, strategy.dims) for stack in stacks])
    memory = steps[-1].memory
    needed, allowed = needed_and_allowed_bytes(workload, memory)
    room = list(_room_limits(workload, strategy, needed, allowed))
    choice_limits = [
        violation
        for layers, group, sides, costs in zip(
            workload.model.named_groups, group_sums(workload), stacks[0], steps[0].costs, strict=True
        )
        if any(cost.broken for cost in costs)
        for violation in _choice_limits(layers, group, sides, costs, strategy.dims)
    ]
    violations = (*choice_limits, *room)
    if room and phase_of(workload).mixes:
        most = most_sequences(workload, strategy.attention_dp)
        running = int(running_requests(workload, strategy.batch, most, memory.kv_cache, needed - allowed))
        if running < strategy.batch:
            state = batching(workload, running, strategy.attention_dp).through(strategy.pp)
            stacks = [sides_of_strategy(workload, load, strategy) for load in state.loads]
            steps = tuple([price_step(stack, strategy.pp, strategy.dims) for stack in stacks])
    decode_s, mixed_s = strategy.pp * steps[0].stage.total_s, strategy.pp * steps[-1].stage.total_s
    return SteadyState(state, steps, memory, violations, decode_s, mixed_s)


def running_requests(workload: Workload, batch: Any, most: Any, kv_bytes: Any, missing_bytes: Any) -> Any:
    """Requests that run at once where not all fit, a whole number: those whose cache does, and that may run.

    The cache has what weights and the activations of all requests asked for leave, since an engine sets aside at its
    start what its largest batch needs (vLLM 0.11, `determine_available_memory`: it runs one); so a batch asked too
    large runs a little fewer.

    Args:
        workload: Of which engine.
        batch: Requests asked for; an array of several, as what follows.
        most: That the scheduler lets run.
        kv_bytes: Of the KV cache of all that are asked for.
        missing_bytes: What they need beyond what is allowed.
    """
    share = workload.engine.memory.share if workload.engine and workload.engine.memory.of == "free" else 1.0
    kept = 1 - larger(0.0, missing_bytes) / larger(1.0, missing_bytes, kv_bytes / share)  # at least a byte: none is 0
    return larger(1, smaller(batch * kept // 1, most))


def _room_limits(workload: Workload, strategy: Strategy, needed: float, allowed: float) -> Iterator[Violation]:
    """Whether the requests in flight have room."""
    if needed > allowed:
        has = f"a GPU has {workload.hardware.hbm_bytes / 1e9:.1f} GB"
        if workload.engine is not None:
            has = f"{workload.engine.name} may use {allowed / 1e9:.1f} GB"
        yield Violation("hbm", needed, allowed, f"needs {needed / 1e9:.1f} GB of HBM, {has}{_less(workload)}")
    most = most_sequences(workload, strategy.attention_dp)
    if strategy.batch > most:
        message = f"{strategy.batch} requests in flight, at most {most:g} run at once"
        if most == most_sent_requests(workload) * strategy.attention_dp:
            message += f": the buffers of DeepEP hold tokens of {most_sent_requests(workload)} per rank"
        yield Violation("sequences", strategy.batch, most, message)


def _less(workload: Workload) -> str:
    return f", less a margin of {workload.margin:.1%}" if workload.margin else ""


def degree_limits(workload: Workload, strategy: Strategy) -> list[Violation]:
    """Limits that degrees alone break."""
    violations = degree_violations(workload, strategy.moe_tp, strategy.ep, strategy.pp)
    if strategy.extended:
        violations += mesh_violations(workload, strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep)
    return violations


def latency_limits(workload: Workload, tpot_s: float, ttft_s: float) -> list[Violation]:
    """The limits on latencies, as long as they are with the workload's confidence, that are broken."""
    violations: list[Violation] = []
    at = f" at confidence {workload.confidence:g}" if workload.confidence > EVEN_ODDS else ""
    if tpot_s > workload.tpot_limit_s * (1 + ROUNDING):
        took, slo = unlike_texts(tpot_s * 1e3, workload.tpot_slo_s * 1e3)
        message = f"TPOT{at} is {took} ms, the limit is {slo} ms{_less(workload)}"
        violations.append(Violation("tpot", tpot_s, workload.tpot_limit_s, message))
    if ttft_s > workload.ttft_limit_s * (1 + ROUNDING):
        took, slo = unlike_texts(ttft_s * 1e3, workload.ttft_slo_s * 1e3, 0)
        message = f"TTFT{at} is {took} ms, the limit is {slo} ms{_less(workload)}"
        violations.append(Violation("ttft", ttft_s, workload.ttft_limit_s, message))
    return violations


def engine_limits(workload: Workload, strategy: Strategy) -> list[Violation]:
    """What an engine does not support of a strategy, where its space is searched."""
    rules = workload.rules
    return [Violation("engine", 1, 0, text) for text in rules.refusals(workload, strategy)] if rules else []


def degree_violations(workload: Workload, tp: int, ep: int, pp: int) -> list[Violation]:
    """Limits that the degrees alone break: the device budget and divisibility."""
    violations: list[Violation] = []
    gpus, layers, experts = tp * ep * pp, workload.model.layers, workload.model.experts + workload.redundant_experts
    if gpus > workload.max_gpus:
        message = f"needs {gpus} GPUs, the budget is {workload.max_gpus}"
        violations.append(Violation("gpus", gpus, workload.max_gpus, message))
    if pp > layers:
        violations.append(Violation("layers", pp, layers, f"pp={pp} stages share {layers} layers"))
    if ep > experts:
        message = f"ep={ep} exceeds the model's {experts} {'expert' if experts == 1 else 'experts'}"
        violations.append(Violation("experts", ep, experts, message))
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


def _choice_limits(
    layers: str, group: GroupSum, sides: Sides, costs: Sequence[OpCost], dims: tuple[int, ...]
) -> Iterator[Violation]:
    """Limits that the choices of the ops of a group of layers break."""
    broken = [(op.name, cost) for op, cost in zip(group.layer.costs, costs, strict=True) if cost.broken]
    for rank in sides.ranks:
        on_side = {name: cost for name, cost in broken if sides.rank_by_op[name] is rank}
        yield from _choice_violations(layers, rank, {name: dims[group.place[name]] for name in on_side}, on_side)


def _choice_violations(
    layers: str, rank: Rank, choices: Mapping[str, int], costs: Mapping[str, OpCost]
) -> list[Violation]:
    """What the choices of some ops of one side break."""
    violations: list[Violation] = []
    if names := [name for name, cost in costs.items() if cost.broken == "heads"]:
        heads = rank.attention.heads
        message = f"{rank.axis}={rank.tp} does not divide {heads} heads ({', '.join(names)}{layers})"
        violations.append(Violation("heads", rank.tp, heads, message))
    if names := [name for name, cost in costs.items() if cost.broken == "tokens"]:
        rows = min(token_rows(rank, rank.layer.op_by_name[name], choices[name]) for name in names)
        message = f"{rows:g} tokens cannot be sharded over {rank.axis}={rank.tp} ({', '.join(names)}{layers})"
        violations.append(Violation("tokens", rank.tp, rows, message))
    if names := [name for name, cost in costs.items() if cost.broken == "unsupported"]:
        message = (
            f"the projection into this attention is more than one product: {', '.join(names)}{layers} cannot be "
            "sharded on hidden"
        )
        violations.append(Violation("unsupported", rank.tp, 1, message))
    return violations
