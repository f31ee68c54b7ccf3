"""What an engine's scheduler puts into a step, and whom it lets in: rules as numbers, one set per engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.engines.engine_registry import engine_rules
from sim.prices.engine import SchedulerPolicy
from sim.serving.phases import most_sequences
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The rules of one attention rank.

    Attributes:
        policy: What a step may hold.
        max_sequences: That run at once, those whose prompts are being computed among them.
        reserves_output: Whether a request's whole answer has its room from its start.
    """

    policy: SchedulerPolicy
    max_sequences: int
    reserves_output: bool


def scheduler_of(workload: Workload, batch: int, ranks: int) -> Scheduler:
    """The scheduler of a workload's engine, as a deployment of this batch is told to run.

    Args:
        workload: Its engine, machine and chunk.
        batch: Most requests of one microbatch over all attention ranks.
        ranks: Attention ranks.
    """
    engine = workload.engine
    policy = engine_rules(engine.name).scheduler(workload.hardware) if engine else SchedulerPolicy()
    if workload.chunk_tokens is not None:
        policy = replace(policy, step_tokens=workload.chunk_tokens, chunks=True, shared_by_ranks=False)
    if policy.shared_by_ranks:
        policy = replace(policy, step_tokens=max(1, policy.step_tokens // ranks))
    most = min(-(-batch // ranks), most_sequences(workload, ranks) / ranks)
    reserves = engine is not None and engine.memory.reserves_output
    return Scheduler(policy, max(1, int(most)), reserves)
