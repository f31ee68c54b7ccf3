"""`raysearch evaluate`: one strategy, explained op by op."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from raysearch.commands.options import HardwareOption, JsonOption, WorkloadOption, print_json
from raysearch.errors import InputError
from raysearch.files import strategy_dict
from sim.catalog import load_workload
from sim.heuristics import megatron_dims, megatron_sp_dims
from sim.simulate import evaluate
from sim.types import Evaluation, Model, Strategy
from sim.validate import check_strategy

_NAMED_DIMS = {"megatron": megatron_dims, "megatron-sp": megatron_sp_dims}


def evaluate_strategy(
    workload: WorkloadOption,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.")],
    ep: Annotated[int, typer.Option(help="Expert-parallel degree.")],
    pp: Annotated[int, typer.Option(help="Pipeline-parallel degree.")],
    batch: Annotated[int, typer.Option(help="Sequences of one microbatch over the ep group.")],
    dims: Annotated[
        str,
        typer.Option(help="One number per fused op (0, 1: its dim 0 or 1; 2: none), or 'megatron', 'megatron-sp'."),
    ],
    hardware: HardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one strategy: speed, memory, violations and a breakdown per op.

    \b
    Examples:
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims 2,1,1,0,2,2,2,2,1,1,0,2 --json
    """
    loaded = load_workload(workload, hardware)
    strategy = Strategy(tp, ep, pp, batch, parse_dims(dims, loaded.model))
    check_strategy(loaded, strategy)
    evaluation = evaluate(loaded, strategy)
    if as_json:
        print_json({"workload": loaded.name, "hardware": loaded.hardware.name, **evaluation_dict(evaluation)})
        return
    from raysearch.tables import explanation, printer

    printer().print(*explanation(loaded, evaluation), sep="\n")


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


def parse_dims(text: str, model: Model) -> tuple[int, ...]:
    """The dims that an option's text stands for: numbers joined by commas, or a heuristic's name."""
    if text in _NAMED_DIMS:
        return _NAMED_DIMS[text](model)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--dims takes numbers joined by commas, or one of {', '.join(_NAMED_DIMS)}; got {text!r}"
        ) from None
