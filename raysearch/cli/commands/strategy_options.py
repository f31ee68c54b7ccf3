"""The options of a strategy, for the commands that take one."""

from __future__ import annotations

from typing import Annotated

import typer

LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="Instead of --tp, --ep and --dp, by name and GPUs of a stage: tp8 shares everything, tep8 gives GPUs "
        "whole experts, dep8 also requests of their own.",
        show_default="by degrees",
    ),
]
TpOption = Annotated[
    int | None, typer.Option(help="Tensor-parallel degree; of attention, where it has a mesh of its own.")
]
EpOption = Annotated[
    int | None, typer.Option(help="Expert-parallel degree; tp*dp*cp/ep GPUs share an expert.", show_default="1")
]
PpOption = Annotated[int, typer.Option(help="Pipeline-parallel degree.")]
BatchOption = Annotated[
    int | None,
    typer.Option(
        help="Sequences of one microbatch over the ep group; serving, requests in flight on all attention ranks.",
        show_default="the best within memory and limits",
    ),
]
DimsOption = Annotated[
    str,
    typer.Option(
        help="One number per fused op, or 'megatron', 'megatron-sp'. 0, 1: its dim 0 or 1; 2: none. GEMMs of the "
        "extended space also take 3: tokens; 4 and 5: tokens and none, with weights gathered at use."
    ),
]
CpOption = Annotated[int, typer.Option(help="Degree over which attention cuts the context (extended space).")]
DpOption = Annotated[
    int | None, typer.Option(help="Data-parallel degree of attention (extended space).", show_default="as --ep")
]
