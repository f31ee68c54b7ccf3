"""`raysearch evaluate`: one strategy, explained op by op."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from raysearch.commands.options import JsonOption, print_json
from raysearch.commands.strategy import (
    BatchOption,
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    LayoutOption,
    MoeTpOption,
    PpOption,
    TpOption,
    strategy_of,
)
from raysearch.commands.workload_flags import takes_workload
from raysearch.described import model_import
from raysearch.errors import NOTHING_FEASIBLE
from raysearch.files import strategy_dict
from sim.engines.registry import lacking_formats
from sim.evaluation import Evaluation
from sim.layouts import layout_of
from sim.nearness import idle_slos, near_limits
from sim.optimum.spaces import space_of
from sim.precision import slow_precision
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload


@takes_workload
def evaluate_strategy(
    workload: Workload,
    batch: BatchOption,
    tp: TpOption = None,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    cp: CpOption = 1,
    dp: DpOption = None,
    moe_tp: MoeTpOption = None,
    layout: LayoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one strategy: speed, memory, violations and a breakdown per op.

    One that breaks a limit, or that the engine cannot be told, says so first; the exit code is then 3.

    \b
    Examples:
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims 2,1,1,0,2,2,2,2,1,1,0,2 --json
      raysearch evaluate -w gpt_moe_1_2t_1m --tp 2 --cp 4 --dp 16 --ep 16 --pp 1 --batch 64 --dims megatron
      raysearch evaluate --model qwen3_32b --phase serve --isl 4000 --osl 500 --engine vllm --tp 4 --batch 32
      raysearch evaluate --model deepseek_v3 --phase serve --isl 8000 --osl 1000 --layout dep16 --batch 512
      raysearch evaluate --model deepseek_v3 --isl 8000 --osl 1000 --layout tep16 --batch 64 --draft-tokens 1 --acceptance 0.85
    """  # noqa: E501
    evaluation = evaluate(workload, strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, moe_tp, layout))
    space = space_of(workload)
    outside = space.outside(evaluation.strategy)
    broken = [violation.message for violation in evaluation.violations]
    broken += space.engine.refusals(workload, evaluation.strategy) if space.engine else []
    near = [asdict(limit) for limit in near_limits(workload, evaluation)]
    slow = slow_precision(
        workload,
        evaluation.tokens_per_s_per_gpu,
        lambda other: evaluate(other, evaluation.strategy).tokens_per_s_per_gpu,
    )
    warnings = [*lacking_formats(workload), *idle_slos(workload), *([slow] if slow else [])]
    if as_json:
        told = {**workload_dict(workload), "outside_space": outside, **evaluation_dict(workload, evaluation)}
        print_json({**told, "near_limits": near, "warnings": warnings})
    else:
        from raysearch.tables import explanation, printer

        for text in broken:
            print(f"Infeasible: {text}")
        printer().print(*explanation(workload, evaluation), sep="\n")
        if outside:
            print(f"Not in the space {workload.space!r}: {'; '.join(outside)}")
        for warning in warnings:
            print(f"Warning: {warning}")
    if broken:
        raise typer.Exit(NOTHING_FEASIBLE)


def workload_dict(workload: Workload) -> dict[str, Any]:
    """What was asked, as it stands in JSON; `engine` is null for the bare machine."""
    curves, imported = workload.hardware.curves, model_import()
    return {
        "workload": workload.name,
        "hardware": workload.hardware.name,
        "phase": workload.phase,
        "engine": workload.engine.name if workload.engine else None,
        "kernels": curves.engine if curves else None,
        "precisions": asdict(workload.precisions),
        "space": workload.space,
        "groups": workload.groups,
        "redundant_experts": workload.redundant_experts,
        "prompt_wait_steps": workload.prompt_wait_steps,
        "speculation": _speculation_dict(workload),
        **({"model_import": imported} if imported else {}),
    }


def _speculation_dict(workload: Workload) -> dict[str, Any] | None:
    drafted = workload.speculation
    if drafted is None:
        return None
    told = {"draft_tokens": drafted.draft_tokens, "accepted": list(drafted.accepted), "draft": drafted.drafter}
    return told | {"tokens_per_step": drafted.tokens_per_step}


def evaluation_dict(workload: Workload, evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as it stands in JSON; latencies that the phase does not have are null."""
    phase = phase_of(workload)
    return {
        "feasible": evaluation.feasible,
        "strategy": strategy_dict(evaluation.strategy),
        "layout": layout_of(evaluation.strategy),
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "tpot_s": evaluation.tpot_s if phase.decodes else None,
        "tpot_interval_s": list(evaluation.tpot_interval_s) if phase.decodes else None,
        "interval_because": evaluation.interval_because,
        "ttft_s": evaluation.ttft_s if phase.prefills else None,
        "ttft_interval_s": list(evaluation.ttft_interval_s) if phase.prefills else None,
        "expected_error": evaluation.expected_error,
        "extrapolated": list(evaluation.extrapolated),
        "gpus": evaluation.gpus,
        "running": evaluation.running,
        "engine_s": evaluation.engine_s,
        "memory_bytes": {**asdict(evaluation.memory_bytes), "total": evaluation.memory_bytes.total},
        "violations": [asdict(violation) for violation in evaluation.violations],
        "stage": asdict(evaluation.stage),
        "prompt_stage": asdict(evaluation.prompt_stage) if evaluation.prompt_stage else None,
        "ops": [{**asdict(op), "time_s": op.time_s} for op in evaluation.ops],
    }
