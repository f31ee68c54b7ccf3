"""What an engine's scheduler puts into a step, and whom it lets in: rules as numbers, one set per engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.engines.engine_registry import engine_rules
from sim.prices.engine import SchedulerPolicy
from sim.serving.phases import charged_prompt_tokens, running_sequences, step_tokens
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The rules of one attention rank.

    Attributes:
        policy: What a step may hold.
        max_sequences: That run at once, those whose prompts are being computed among them.
        reserves_output: Whether a request's whole answer has its room from its start.
        receive_steps: Decode steps after which it looks for new requests; after prompts, and idle, it does at once.
        balance_steps: Most steps that prompts wait for those of other ranks while all ranks decode.
        rows: Of a step's tokens that a request takes which decodes: more than one where tokens are drafted.
    """

    policy: SchedulerPolicy
    max_sequences: int
    reserves_output: bool
    receive_steps: int = 1
    balance_steps: int = 0
    rows: int = 1


def scheduler_of(workload: Workload, batch: int, ranks: int, stages: int = 1, *, as_shipped: bool = False) -> Scheduler:
    """The scheduler of a workload's engine, as exported commands have it run, or as it is shipped.

    Exported commands cap the tokens of a step at what was charged: prompts or a chunk beside all running requests. A
    decode pool, whose steps have room for no more, computes anew who was preempted in what others leave of it.

    Args:
        workload: Its phase, engine, machine and chunk.
        batch: Most requests of one microbatch over all attention ranks.
        ranks: Attention ranks.
        stages: Of the pipeline.
        as_shipped: Whether the engine's own cap on the tokens of a step holds, as in benchmarks.
    """
    engine = workload.engine
    policy = engine_rules(engine.name).scheduler(workload.hardware) if engine else SchedulerPolicy()
    charged, capped = charged_prompt_tokens(workload, batch, ranks), step_tokens(workload, batch, ranks, stages)
    if (charged or (engine and policy.mixes)) and not as_shipped:
        # vLLM cuts prompts at its cap in any case; others only if they are told to.
        cut = workload.chunk_tokens is not None or (policy.mixes and policy.chunks)
        most = capped if policy.mixes else charged
        if policy.whole_blocks:
            most = policy.block_tokens * -(-most // policy.block_tokens)
        policy = replace(policy, step_tokens=most, chunks=cut, shared_by_ranks=False)
    elif workload.chunk_tokens is not None:
        policy = replace(policy, step_tokens=workload.chunk_tokens, chunks=True, shared_by_ranks=False)
    if policy.shared_by_ranks:
        policy = replace(policy, step_tokens=max(1, policy.step_tokens // ranks))
    waits = workload.prompt_wait_steps if ranks > 1 else 0
    reserves = engine is not None and engine.memory.reserves_output
    running = running_sequences(workload, batch, ranks)
    return Scheduler(policy, running, reserves, balance_steps=waits, rows=workload.queries)
