"""Why a strategy takes as long as it does: every op of its layer, and how far to trust the sum.

A search asks `sim.simulate.evaluate` for figures alone, a thousand times for each strategy that anyone reads about.
So nothing of this is kept: it is worked out again, to the same bit, for the strategy that someone asks about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from sim.evaluation import Explanation, OpBreakdown
from sim.layers.choices import rule
from sim.layers.dims import choices_of
from sim.layers.ops import FusedOp, Layer
from sim.layers.sizes import Load
from sim.ops.rank import Rank
from sim.ops.work import Work, op_work
from sim.prices.collectives import Collective
from sim.prices.priced import PricedKernel
from sim.prices.roofline import KernelTime
from sim.prices.trust import step_interval, trust_of
from sim.sharding.placement import PARTIAL
from sim.step.attention_expert_meshes import Sides, sides_of_strategy
from sim.step.costs import price, seconds
from sim.step.speculative_decoding import passes_of
from sim.step.stage import end_of
from sim.strategy import Strategy
from sim.workload import Workload

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
_PROMPTS_ALONE = "of steps, those that also decode were measured"


def explain(
    workload: Workload, strategy: Strategy, loads: Sequence[Load], tpot_s: float, ttft_s: float, prompt_share: float
) -> Explanation:
    """What stands behind the figures of `sim.simulate.evaluate`: the ops of the first step, and the trust in all.

    Args:
        workload: As evaluated.
        strategy: As evaluated.
        loads: What is in each kind of step.
        tpot_s: The time per output token.
        ttft_s: The time to the first one.
        prompt_share: Share of it that other requests' prompts take.
    """
    choices = choices_of(workload, strategy.dims)
    parts: list[PricedKernel] = []
    explained: list[tuple[OpBreakdown, ...]] = []
    for load in loads:
        ops: list[OpBreakdown] = []
        stack = sides_of_strategy(workload, load, strategy)
        for group, sides, chosen in zip(workload.model.groups, stack, choices, strict=True):
            share = group.count / workload.model.layers
            incoming = _incoming_collectives(sides, chosen)
            for op in sides.experts.layer.ops:
                rank = sides.rank_by_op[op.name]
                work = op_work(rank, op, chosen[op.name])
                kernels = [price(rank, kernel) for kernel in work.kernels]
                ops.append(_breakdown(rank, op, chosen, work, kernels, incoming[op.name]))
                parts += [_part(each, share) for each in (*kernels, *work.collectives)]
            parts += [_part(collective, share) for collectives in incoming.values() for collective in collectives]
        parts += _draft_parts(end_of(stack), workload.model.layers)
        explained.append(tuple(ops))
    trust = trust_of(workload.hardware, parts)
    engine = workload.engine.name if workload.engine else None
    moe, name = workload.model.is_moe, workload.model.name
    stated, first = (
        step_interval(workload.hardware, engine, name, moe=moe, prompt_share=share, kernels=trust.kernels)
        for share in (prompt_share, 1.0)
    )
    because = "; ".join(filter(None, (stated.because, "" if any(load.sequences for load in loads) else _PROMPTS_ALONE)))
    (low, high), (least, most) = stated.factors, first.factors
    return Explanation(explained[0], *trust, (low * tpot_s, high * tpot_s), (least * ttft_s, most * ttft_s), because)


def _draft_parts(end: Sides, layers: int) -> list[PricedKernel]:
    """What drafting is priced by, its ops' kernels and collectives, per layer of the model."""
    parts: list[PricedKernel] = []
    for stack, dims, _ in passes_of(end):
        choices = choices_of(stack[0].experts.workload, dims)
        for sides, chosen in zip(stack, choices, strict=True):
            share = sides.experts.layers.count / layers
            for op in sides.experts.layer.ops:
                rank = sides.rank_by_op[op.name]
                work = op_work(rank, op, chosen[op.name])
                parts += [_part(price(rank, kernel), share) for kernel in work.kernels]
                parts += [_part(collective, share) for collective in work.collectives]
    return parts


def _part(found: KernelTime | Collective, share: float) -> PricedKernel:
    """A kernel or a collective that a share of the layers has."""
    time_s = found.total_s if isinstance(found, KernelTime) else found.time_s
    return PricedKernel(share * time_s, found.error, found.interval, found.extrapolated)


def _incoming_collectives(sides: Sides, choices: Mapping[str, int]) -> dict[str, list[Collective]]:
    incoming: dict[str, list[Collective]] = {op.name: [] for op in sides.experts.layer.ops}
    for tensor in sides.experts.layer.tensors:
        ends = tuple([choices[name] for name in tensor.ends])
        for name, collectives in zip(tensor.consumers, sides.moves(tensor, ends), strict=True):
            incoming[name].extend(collectives)
    return incoming


@lru_cache(maxsize=1024)
def _placements_in(layer: Layer, op: FusedOp, choice: int, producer_choice: int) -> Mapping[str, str]:
    """Placement of each input as the op reads it; parts that it passes through show as parts."""
    op_rule = rule(op, layer, choice)
    placements = [str(placement) for placement in op_rule.inputs]
    left = rule(_first_producer(layer, op), layer, producer_choice).output
    if op_rule.passes_partial and left == PARTIAL:
        placements[0] = str(left)
    return dict(zip(op.inputs, placements, strict=True))


def _first_producer(layer: Layer, op: FusedOp) -> FusedOp:
    return layer.op(layer.tensor(op.inputs[0]).producer)


def _total_s(kernel: KernelTime) -> float:
    return kernel.total_s


def _breakdown(
    rank: Rank,
    op: FusedOp,
    choices: Mapping[str, int],
    work: Work,
    kernels: Sequence[KernelTime],
    incoming: Sequence[Collective],
) -> OpBreakdown:
    choice = choices[op.name]
    op_rule = rule(op, rank.layer, choice)
    collectives = (*incoming, *work.collectives)
    communication_s = seconds(collectives)
    kernel_s = sum([kernel.total_s for kernel in kernels])
    compute_s = sum([kernel.compute_s for kernel in kernels])
    memory_s = sum([kernel.memory_s for kernel in kernels])
    return OpBreakdown(
        name=op.name,
        choice=choice,
        label=CHOICE_LABELS[op.label(choice)],
        placements_in=_placements_in(rank.layer, op, choice, choices[_first_producer(rank.layer, op).name]),
        placement_out=str(op_rule.output),
        collectives=collectives,
        work_flops=sum([kernel.flops for kernel in work.kernels]),
        traffic_bytes=sum([kernel.traffic_bytes for kernel in work.kernels]),
        compute_time_s=compute_s,
        memory_time_s=memory_s,
        kernel_time_s=kernel_s,
        communication_time_s=communication_s,
        bound="communication" if communication_s >= kernel_s else max(kernels, key=_total_s).bound,
        group=rank.layers.name,
    )
