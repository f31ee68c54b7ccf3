"""`raysearch evaluate`: one strategy, explained op by op."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from raysearch.commands.options import HardwareOption, JsonOption, MarginOption, SpaceOption, WorkloadOption, print_json
from raysearch.commands.strategy import (
    BatchOption,
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    MoeTpOption,
    PpOption,
    TpOption,
    strategy_of,
)
from raysearch.files import strategy_dict
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.nearness import near_limits
from sim.optimum.spaces import space_of
from sim.simulate import evaluate


def evaluate_strategy(
    workload: WorkloadOption,
    tp: TpOption,
    ep: EpOption,
    pp: PpOption,
    batch: BatchOption,
    dims: DimsOption,
    cp: CpOption = 1,
    dp: DpOption = None,
    moe_tp: MoeTpOption = None,
    hardware: HardwareOption = None,
    space: SpaceOption = None,
    margin: MarginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one strategy: speed, memory, violations and a breakdown per op.

    \b
    Examples:
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims 2,1,1,0,2,2,2,2,1,1,0,2 --json
      raysearch evaluate -w gpt_moe_1_2t_1m --tp 2 --cp 4 --dp 16 --ep 16 --pp 1 --batch 64 --dims megatron
    """
    loaded = load_workload(workload, hardware, space.value if space else None, margin)
    evaluation = evaluate(loaded, strategy_of(loaded, tp, ep, pp, batch, dims, cp, dp, moe_tp))
    outside = space_of(loaded).outside(evaluation.strategy)
    near = [asdict(limit) for limit in near_limits(loaded, evaluation)]
    if as_json:
        told = {"workload": loaded.name, "hardware": loaded.hardware.name, "space": loaded.space}
        print_json({**told, "outside_space": outside, **evaluation_dict(evaluation), "near_limits": near})
        return
    from raysearch.tables import explanation, printer

    printer().print(*explanation(loaded, evaluation), sep="\n")
    if outside:
        print(f"Not in the space {loaded.space!r}: {'; '.join(outside)}")


def evaluation_dict(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as it stands in JSON."""
    return {
        "feasible": evaluation.feasible,
        "strategy": strategy_dict(evaluation.strategy),
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "expected_error": evaluation.expected_error,
        "extrapolated": list(evaluation.extrapolated),
        "tpot_s": evaluation.tpot_s,
        "gpus": evaluation.gpus,
        "memory_bytes": {**asdict(evaluation.memory_bytes), "total": evaluation.memory_bytes.total},
        "violations": [asdict(violation) for violation in evaluation.violations],
        "stage": asdict(evaluation.stage),
        "ops": [{**asdict(op), "time_s": op.time_s} for op in evaluation.ops],
    }
