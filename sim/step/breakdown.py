"""Why a strategy takes as long as it does: every op of its layer, and how far to trust the sum.

A search asks `sim.simulate.evaluate` for figures alone, a thousand times for each strategy that anyone reads about.
So nothing of this is kept: it is worked out again, to the same bit, for the strategy that someone asks about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sim.evaluation import Explanation, OpBreakdown
from sim.layers.choices import rule
from sim.layers.ops import FusedOp, Layer
from sim.ops.rank import Rank, Work
from sim.ops.sizes import Load
from sim.prices.collectives import Collective
from sim.prices.priced import PricedKernel, together
from sim.prices.roofline import KernelTime
from sim.prices.trust import Stated, StepInterval, Trust, step_interval, trust_of
from sim.sharding.placement import PARTIAL
from sim.step.attention_expert_meshes import Sides, sides_of_strategy
from sim.step.costs import OpParts, seconds
from sim.step.layer import group_sums
from sim.step.speculative_decoding import draft_run, drafts, mesh_of_draft
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


def choice_text(op: FusedOp, choice: int) -> str:
    """What a choice shards, for people; over two sub-axes the outer one's letter first."""
    return " x ".join(CHOICE_LABELS[letter] for letter in op.label(choice)) or CHOICE_LABELS[""]


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
    ops: list[OpBreakdown] = []
    stack = sides_of_strategy(workload, loads[0], strategy)
    for summed, sides in zip(group_sums(workload), stack, strict=True):
        chosen = {name: strategy.dims[place] for name, place in summed.place.items()}
        for op, (own, waits) in zip(summed.layer.layer.ops, summed.behind(sides, strategy.dims), strict=True):
            ops.append(_breakdown(sides.rank_by_op[op.name], op, chosen, own, waits))
    trust, stated, first = trusted(workload, strategy, loads, prompt_share)
    because = "; ".join(filter(None, (stated.because, "" if any(load.sequences for load in loads) else _PROMPTS_ALONE)))
    (low, high), (least, most) = stated.factors, first.factors
    return Explanation(tuple(ops), *trust, (low * tpot_s, high * tpot_s), (least * ttft_s, most * ttft_s), because)


def trusted(
    workload: Workload, strategy: Strategy, loads: Sequence[Load], prompt_share: float
) -> tuple[Trust, Stated, Stated]:
    """How far to trust the steps, and the intervals of the time per token and of that to the first one."""
    trust = trust_of(workload.hardware, _priced_kernels(workload, strategy, loads))
    interval = interval_of(workload)
    stated, first = (interval.stated(share, trust.kernels) for share in (prompt_share, 1.0))
    if workload.speculation and workload.speculation.spread:
        factor = 1 + workload.speculation.spread
        stated = stated._replace(factors=together(stated.factors, (1 / factor, factor)))
    return trust, stated, first


@lru_cache(maxsize=1024)
def interval_of(workload: Workload) -> StepInterval:
    """The interval of a workload's steps."""
    engine, model = workload.engine.runs if workload.engine else None, workload.model
    return step_interval(workload.hardware, engine, model.name, moe=model.is_moe)


def _priced_kernels(workload: Workload, strategy: Strategy, loads: Sequence[Load]) -> list[PricedKernel]:
    """Kernels and collectives of the layers, with their share of those, and of a draft."""
    parts: list[PricedKernel] = []
    for load in loads:
        stack = sides_of_strategy(workload, load, strategy)
        for group, summed, sides in zip(workload.model.groups, group_sums(workload), stack, strict=True):
            share, behind = group.count / workload.model.layers, summed.behind(sides, strategy.dims)
            for own, _ in behind:
                parts += _parts(own, share)
            parts += [_part(collective, share) for _, waits in behind for collective in waits]
        parts += draft_parts(stack)
    return parts


def draft_parts(stack: Sequence[Sides]) -> list[PricedKernel]:
    """What the draft of speculative decoding is priced by, its ops' kernels and collectives, per layer of the model."""
    workload = stack[0].experts.workload
    if not drafts(workload):
        return []
    run = draft_run(workload, *mesh_of_draft(end_of(stack)))
    return [
        part
        for each in run.passes
        for summed, sides in zip(group_sums(run.workload), each.stack, strict=True)
        for own, _ in summed.behind(sides, each.dims)
        for part in _parts(own, sides.experts.layers.count / workload.model.layers)
    ]


def unsure_s(*behind: Any) -> float:
    """Seconds that what is behind an addend exceeds in few cases, by the interval of each kernel and collective."""
    kinds = (behind[0].collectives, *behind[1:]) if isinstance(behind[0], Work) else behind
    parts = [_part(each, 1.0) for kind in kinds for each in kind]
    return sum([part.time_s * part.interval[1] for part in parts])


def _parts(own: OpParts, share: float) -> list[PricedKernel]:
    """Kernels and collectives of an op that a share of the layers has."""
    return [_part(each, share) for each in (*own.kernels, *own.work.collectives)]


def _part(found: KernelTime | Collective, share: float) -> PricedKernel:
    """A kernel or a collective that a share of the layers has."""
    time_s = found.total_s if isinstance(found, KernelTime) else found.time_s
    return PricedKernel(share * time_s, found.error, found.interval, found.extrapolated)


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


def _breakdown(
    rank: Rank, op: FusedOp, choices: Mapping[str, int], own: OpParts, waits: Sequence[Collective]
) -> OpBreakdown:
    choice, (work, kernels) = choices[op.name], own
    op_rule = rule(op, rank.layer, choice)
    collectives = (*waits, *work.collectives)
    communication_s = seconds(collectives)
    kernel_s = sum([kernel.total_s for kernel in kernels])
    compute_s = sum([kernel.compute_s for kernel in kernels])
    memory_s = sum([kernel.memory_s for kernel in kernels])
    return OpBreakdown(
        name=op.name,
        choice=choice,
        label=choice_text(op, choice),
        placements_in=_placements_in(rank.layer, op, choice, choices[_first_producer(rank.layer, op).name]),
        placement_out=str(op_rule.output),
        collectives=collectives,
        work_flops=sum([kernel.flops for kernel in work.kernels]),
        traffic_bytes=sum([kernel.traffic_bytes for kernel in work.kernels]),
        compute_time_s=compute_s,
        memory_time_s=memory_s,
        kernel_time_s=kernel_s,
        communication_time_s=communication_s,
        bound="communication" if communication_s >= kernel_s else max(kernels, key=attrgetter("total_s")).bound,
        group=rank.layers.name,
    )
