"""Landscapes for tests of searchers: pure, instant, and with values that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

from sim.config.catalog import load_workload
from sim.evaluation import Evaluation, Memory, StageBreakdown, Violation
from sim.strategy import Strategy
from sim.workload import DegreeTables, Workload

MOE = "gpt_moe_1_2t_16k"
DENSE = "llama_3_1_405b_8k"
TOO_BIG = Violation("hbm", needed=2.0, allowed=1.0, message="needs 2 bytes, has 1")


def evaluation(strategy: Strategy, raw: float, *violations: Violation) -> Evaluation:
    """An evaluation that says `raw` and nothing else of interest."""
    return Evaluation(
        strategy=strategy,
        tokens_per_s_per_gpu=raw,
        tpot_s=0.01,
        gpus=strategy.gpus,
        memory_bytes=Memory(weights=1.0, kv_cache=2.0, activations=3.0, overhead=4.0),
        violations=violations,
        stage=StageBreakdown(layers=1, layer_s=0.0, embedding_s=0.0, head_s=0.0, send_recv_s=0.0, total_s=0.0),
        ops=(),
    )


def hilly(workload: Workload, strategy: Strategy) -> Evaluation:
    """A landscape with slopes, plateaus and an infeasible third."""
    sharded = sum(choice != 2 for choice in strategy.dims)
    raw = 10.0 * strategy.tp + strategy.batch / strategy.pp + 50.0 * sharded
    infeasible = (strategy.tp + strategy.ep + sum(strategy.dims)) % 3 == 0
    return evaluation(strategy, raw, *[TOO_BIG] * infeasible)


def barren(workload: Workload, strategy: Strategy) -> Evaluation:
    """Nothing is feasible."""
    return evaluation(strategy, 1.0, TOO_BIG)


def tiny_workload() -> Workload:
    """A dense workload with a single choice for most degrees."""
    degrees = DegreeTables(tp=(1,), ep=(1,), pp=(1, 2), batch=(1, 2))
    return replace(load_workload(DENSE), degrees=degrees)
