"""`raysearch export`: a strategy in the words of what runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.strategy_text import strategy_of
from raysearch.base.errors import NOTHING_FEASIBLE, InputError
from raysearch.base.file_io import strategy_dict, write_together
from raysearch.cli.commands.options import JsonOption, at_home, print_json
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.strategy_options import (
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    LayoutOption,
    MoeTpOption,
    PpOption,
)
from raysearch.deploy.export.deployment import Deployment, Export
from raysearch.deploy.export.formats import exporter, exporter_names, pools_exporter
from raysearch.processes.claim import check_folder
from sim.config.question import Question
from sim.json_object import JsonObject

_OUT = typer.Option("--out", "-o", help="Folder for the files.", show_default="printed", callback=at_home)


@takes_question
def export_strategy(
    question: Question | None = None,
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of `recommend`, `pools`, `tune-live`, `search` or `study`, or a JSON file with a strategy."
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", help="; ".join(exporter_names()), show_default=True)] = "vllm",
    alternative: Annotated[
        int, typer.Option(help="Of a recommendation: 0 is the best, then its alternatives; of `pools` a point.", min=0)
    ] = 0,
    serve: Annotated[
        str | None, typer.Option(help="Weights: a Hugging Face repository or a path.", show_default="the model's")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree, in place of a source.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of one microbatch, in place of a source.")] = None,
    replicas: Annotated[int, typer.Option(help="Independent replicas.", min=1)] = 1,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    cp: CpOption = 1,
    dp: DpOption = None,
    moe_tp: MoeTpOption = None,
    layout: LayoutOption = None,
    ops: Annotated[
        str | None,
        typer.Option(help="Shard only these ops, e.g. qkv_proj,o_proj; the others stay whole.", show_default="all"),
    ] = None,
    out: Annotated[Path | None, _OUT] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a strategy as the command, configuration or code that runs it, and list what the target cannot express.

    The command is printed on stdout, notes and what was left out on stderr. Where the strategy breaks a limit, stderr
    says so first and the exit code is 3.

    \b
    Examples:
      raysearch export results/qwen --to vllm
      raysearch export results/qwen --to dynamo --alternative 2 --out deploy
      raysearch export results/pools --to llm-d --out deploy
      raysearch export best.json -w gpt_moe_1_2t_16k --to megatron
      raysearch export --model qwen3_32b --isl 4000 --osl 500 --engine sglang --tp 4 --batch 32 --to sglang
      raysearch export best.json -w gpt_moe_1_2t_16k --to dtensor --ops qkv_proj,attention,o_proj --out mine
    """
    check_folder(out)
    write = exporter(to)
    if source is not None:
        from raysearch.deploy.export.source import read_deployments

        deployments = read_deployments(source, question, alternative, serve)
    else:
        said = (ep, pp, dims, cp, dp, moe_tp, layout)
        deployments = {"": _described(question, tp, batch, replicas, serve, said)}
    if ops is not None:
        from raysearch.deploy.export.cut import with_ops

        names = [name.strip() for name in ops.split(",")]
        deployments = {pool: with_ops(each, names) for pool, each in deployments.items()}
    together = pools_exporter(to) if len(deployments) > 1 else None
    exports: dict[str, Export] = {}
    try:
        exports = {"": together(deployments)} if together else {pool: write(each) for pool, each in deployments.items()}
    except ValueError as error:
        raise InputError(f"{to} cannot run it: {error}") from error
    if out is not None:
        files = {Path(pool) / name: text for pool, each in exports.items() for name, text in each.all_files.items()}
        write_together(out, {str(path): text.encode() for path, text in files.items()})
    if as_json:
        print_json(_told(to, deployments, exports))
    else:
        for pool, export in exports.items():
            _print(export, pool, shown=out is None)
    if any(export.violations for export in exports.values()):
        raise typer.Exit(NOTHING_FEASIBLE)


def _told(to: str, deployments: dict[str, Deployment], exports: dict[str, Export]) -> JsonObject:
    """What was exported: of one pool all in one, of several by their names, what is written for all together beside."""
    told: dict[str, JsonObject] = {
        pool: {"to": to, "strategy": strategy_dict(each.strategy), "replicas": each.replicas}
        for pool, each in deployments.items()
    }
    for pool, export in exports.items():
        told.setdefault(pool, {"to": to}).update(
            command=export.command_text,
            files=dict(export.files),
            violations=list(export.violations),
            dropped=list(export.dropped),
            notes=list(export.notes),
        )
    whole = told.pop("", {})
    return {**whole, "pools": told} if told else whole


def _described(
    question: Question | None, tp: int | None, batch: int | None, replicas: int, serve: str | None, rest: tuple
) -> Deployment:
    from raysearch.deploy.export.models import repository

    if question is None or (tp is None and rest[-1] is None) or batch is None:
        raise InputError("expected a folder or a file to export from, or a workload with --tp or --layout, and --batch")
    workload = loaded(question)
    ep, pp, *others = rest
    strategy = strategy_of(workload, tp, ep, pp, batch, *others)
    return Deployment(workload, strategy, serve or repository(workload, question.model), replicas)


def _print(export: Export, pool: str, *, shown: bool) -> None:
    if pool:
        print(f"# The {pool} pool")
        print(f"the {pool} pool:", file=sys.stderr)
    for text in export.violations:
        print(f"infeasible: {text}", file=sys.stderr)
    texts = [export.command_text] if export.command else []
    if shown:
        texts += [
            f"# {name}\n{text.rstrip()}" if export.command else text.rstrip() for name, text in export.files.items()
        ]
    print("\n\n".join(texts))
    for text in export.dropped:
        print(f"left out: {text}", file=sys.stderr)
    for text in export.notes:
        print(f"note: {text}", file=sys.stderr)
