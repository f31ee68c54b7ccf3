"""The strategy that a command line describes, for the commands that take one."""

from __future__ import annotations

from typing import Annotated

import typer

from raysearch.errors import InputError
from sim.heuristics import megatron_dims, megatron_sp_dims
from sim.types import Model, Strategy, Workload
from sim.validate import check_strategy

TpOption = Annotated[int, typer.Option(help="Tensor-parallel degree; of attention, where it has a mesh of its own.")]
EpOption = Annotated[int, typer.Option("--ep", "--moe-ep", help="Expert-parallel degree.")]
PpOption = Annotated[int, typer.Option(help="Pipeline-parallel degree.")]
BatchOption = Annotated[int, typer.Option(help="Sequences of one microbatch over the ep group.")]
DimsOption = Annotated[
    str,
    typer.Option(
        help="One number per fused op, or 'megatron', 'megatron-sp'. 0, 1: its dim 0 or 1; 2: none. GEMMs of the "
        "extended space also take 3: tokens; 4 and 5: tokens and none, with weights gathered at use."
    ),
]
CpOption = Annotated[int, typer.Option(help="Degree over which attention cuts the context (extended space).")]
DpOption = Annotated[
    int | None, typer.Option(help="Data-parallel degree of attention (extended space).  [default: as --ep]")
]
MoeTpOption = Annotated[
    int | None,
    typer.Option(help="GPUs that share an expert (extended space).  [default: tp * dp * cp / ep]"),
]

_NAMED_DIMS = {"megatron": megatron_dims, "megatron-sp": megatron_sp_dims}


def strategy_of(
    workload: Workload,
    tp: int,
    ep: int,
    pp: int,
    batch: int,
    dims: str,
    cp: int = 1,
    dp: int | None = None,
    moe_tp: int | None = None,
) -> Strategy:
    """The strategy that the options describe, checked.

    Raises:
        InputError: `dims` is no list of numbers, or the degrees of both meshes contradict each other.
        StrategyError: See `sim.validate.check_strategy`.
    """
    if moe_tp is not None and dp is None and tp > 0 and cp > 0 and (moe_tp * ep) % (tp * cp) == 0:
        dp = moe_tp * ep // (tp * cp)
    strategy = Strategy(tp, ep, pp, batch, parse_dims(dims, workload.model), cp, dp)
    check_strategy(workload, strategy)
    if moe_tp is not None and moe_tp * ep != strategy.stage_gpus:
        raise InputError(
            f"tp * dp * cp ({tp} * {strategy.attention_dp} * {cp}) must equal --moe-tp times --moe-ep "
            f"({moe_tp} * {ep}); leave out --moe-tp or --dp, and it follows"
        )
    return strategy


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
