"""`raysearch complete`: a strategy that is partly given, completed by propagation and exactly."""

from __future__ import annotations

from typing import Annotated

import typer

from raysearch.answers.completed import WEIGHTS, CompletionResult
from raysearch.answers.strategy_text import strategy_of
from raysearch.base.errors import InputError
from raysearch.cli.commands.options import JsonOption, exit_unless_feasible, show_result
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.strategy_options import (
    BatchOption,
    CpOption,
    DpOption,
    EpOption,
    LayoutOption,
    PpOption,
    TpOption,
)
from sim.config.question import Question
from sim.layouts import degrees_of_layout


@takes_question
def complete(
    question: Question,
    tp: TpOption = None,
    batch: BatchOption = None,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: Annotated[
        str,
        typer.Option(
            help="A number per fused op as in `evaluate`, or '?' where it is open; or tensors with the dims that tp "
            "shards, as in 'qkv\\[t,q_tp]'.",
            show_default="Megatron-LM's choices for the GEMMs",
        ),
    ] = WEIGHTS,
    cp: CpOption = 1,
    dp: DpOption = None,
    layout: LayoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a partial strategy: by sharding propagation, as compilers do, and exactly, side by side.

    --dims has '?' for each open choice, or names tensors with the dims that tp shards; by default Megatron-LM's choices
    for the GEMMs are given. Without --tp and --layout, each completion gets its best degrees and batch. Exits with 3 if
    nothing is feasible with the given choices.

    \b
    Examples:
      raysearch complete -w gpt_moe_1_2t_16k
      raysearch complete -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims "?,1,?,0,?,?,?,?,1,?,0,?"
      raysearch complete -w mixtral_8x22b_8k --dims "qkv\\[t,q_tp] ffn_mid\\[e,c,f_tp]" --json
    """
    workload = loaded(question)
    degrees, vocabulary = dict[str, int](), ()
    if tp is not None or layout is not None:
        named = strategy_of(workload, tp, ep, pp, batch, "megatron", cp, dp, layout)
        degrees = {"tp": named.tp, "ep": named.ep, "pp": named.pp, "cp": named.cp}
        written = degrees_of_layout(layout) if layout is not None else None
        if written and written.dims:
            raise InputError("--layout has a choice for every op, so nothing is left to complete: leave its dims out")
        stated, vocabulary = (written and written.batch) or batch, named.vocabulary
        degrees |= {} if stated is None else {"batch": stated}
        degrees |= {} if named.dp is None else {"dp": named.dp}
    elif (ep, pp, batch, cp, dp) != (None, 1, None, 1, None):
        raise InputError("expected --tp or --layout with the other degrees; without any degree the best ones are found")
    found = CompletionResult.of(question, workload, dims, degrees, vocabulary)
    show_result(found, as_json=as_json)
    exit_unless_feasible(found)
