"""The options of a strategy, for the commands that take one."""

from __future__ import annotations

from typing import Annotated

import typer

from raysearch.cli.commands.settings import Setting

LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="Instead of --tp, --ep and --dp, a name with the GPUs per stage: tp8 is tensor parallelism throughout, "
        "tep8 has expert parallelism, dep8 data-parallel attention too, dep8pp2 two stages. Degrees as answers print "
        "them are read too.",
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
        help="Sequences per microbatch of the ep group; in phase serve, requests in flight on all attention ranks.",
        show_default="the best within memory and limits",
    ),
]
DimsOption = Annotated[
    str,
    typer.Option(
        help="What each fused op is sharded along: a number per op, or 'megatron' or 'megatron-sp'. 0 and 1: its dim 0 "
        "or 1; 2: nothing. GEMMs in the extended space also take 3: tokens; 4 and 5: tokens and nothing, with weights "
        "gathered at use."
    ),
]
VocabularyOption = Annotated[
    str | None,
    Setting(
        "What embedding, LM head and sampling are sharded along: a number each, such as 3,1,1, as in optima of the "
        "space 'generated'.",
        "the vocabulary, as engines do",
    ),
]
CpOption = Annotated[int, typer.Option(help="Context-parallel degree of attention (extended space).")]
DpOption = Annotated[
    int | None, typer.Option(help="Data-parallel degree of attention (extended space).", show_default="as --ep")
]
