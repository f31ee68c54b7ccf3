"""`raysearch explain`: the layer as a picture, beside the same under a second strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.strategy_text import parse_dims, second_strategy_of, strategy_of
from raysearch.base.errors import NOTHING_FEASIBLE
from raysearch.base.file_io import degrees_text, strategy_dict, write_bytes
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.cli.commands.options import JsonOption, at_home, file_to_write, print_json
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import Setting
from raysearch.cli.commands.strategy_options import (
    BatchOption,
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    LayoutOption,
    PpOption,
    TpOption,
    VocabularyOption,
)
from sim.config.question import Question
from sim.replay.goodput import evaluate_in_phase
from sim.strategy import Strategy


@takes_question
def explain_strategy(
    question: Question,
    tp: TpOption = None,
    batch: BatchOption = None,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    against: Annotated[
        str | None,
        Setting(
            "A second strategy to draw: dims as in --dims, then the degrees in which it differs, as in "
            "'megatron tp=8 cp=1' or 'megatron layout=tep8'.",
            "none",
        ),
    ] = None,
    cp: CpOption = 1,
    dp: DpOption = None,
    layout: LayoutOption = None,
    vocabulary: VocabularyOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File of the picture to write, .svg, not the terminal.", callback=at_home),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw one layer of each kind: ops, the placement of each tensor, and the collectives with bytes and time.

    Exits with 3 if the strategy is infeasible.

    \b
    Examples:
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron-sp --set against=megatron --out layer.svg
      raysearch explain -w gpt_moe_1_2t_1m --tp 1 --cp 8 --dp 16 --ep 16 --pp 1 --batch 64 --dims 201022210102 --set against="megatron tp=8 cp=1"
      raysearch explain --model gpt_oss_120b --phase serve --isl 2000 --osl 500 --engine vllm --tp 4 --batch 8
    """  # noqa: E501
    from raysearch.reports.explain.picture import picture_dict, pictures_of

    if out is not None:
        file_to_write(out, ".svg")
    workload = loaded(question)
    first = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
    own = dims if parse_dims(dims, workload) == first.dims else ",".join(map(str, first.dims))
    shown = [(own, first)]
    if against is not None:
        degrees = {"tp": first.tp, "ep": first.ep, "pp": first.pp, "batch": first.batch, "cp": first.cp, "dp": dp}
        degrees |= {"dp": first.dp} if layout else {}
        second_dims, second = second_strategy_of(workload, against, degrees)
        shown.append((second_dims, replace(second, vocabulary=second.vocabulary or first.vocabulary)))
    evaluated = [(_title(text, strategy), evaluate_in_phase(workload, strategy)) for text, strategy in shown]
    drawn = [pictures_of(title, workload, evaluation) for title, evaluation in evaluated]
    groups = list(zip(*drawn, strict=True))
    on_degrees = " | ".join(dict.fromkeys(degrees_text(strategy) for _, strategy in shown))
    broken = list(dict.fromkeys(each.message for _, evaluation in evaluated for each in evaluation.violations))
    heading = "\n".join([priced_text(workload), on_degrees, *(f"Infeasible: {text}" for text in broken)])
    if out is not None:
        from raysearch.reports.explain.svg import draw_svg

        write_bytes(out, draw_svg(heading, groups).encode())
    if as_json:
        pictures = [picture_dict(picture) for pictures in groups for picture in pictures]
        svg = str(out) if out else None
        fields = {"workload": workload.name, "question": question.record(), **priced_dict(workload), "heading": heading}
        fields["strategy"] = strategy_dict(first)
        print_json({**fields, "violations": broken, "pictures": pictures, "svg": svg})
    elif out is not None:
        print(f"Picture: {out}")
    else:
        from raysearch.base.rich_tables import printer
        from raysearch.reports.explain.layer_text import draw_text

        printer().print(*draw_text(heading, groups), sep="\n")
    if broken:
        raise typer.Exit(NOTHING_FEASIBLE)


def _title(dims: str, strategy: Strategy) -> str:
    return f"dims {dims}" if dims[:1].isdigit() else f"{dims} ({','.join(map(str, strategy.dims))})"
