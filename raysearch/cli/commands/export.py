"""`raysearch export`: a strategy in the words of what runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from raysearch.answers.exported import ExportResult
from raysearch.answers.strategy_text import check_no_strategy, strategy_of
from raysearch.base.errors import InputError
from raysearch.base.terminal import verbatim
from raysearch.cli.commands.options import (
    OUT_HELP,
    AlternativeOption,
    JsonOption,
    at_home,
    exit_unless_feasible,
    show_result,
)
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
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.formats import exporter, exporter_names
from raysearch.deploy.export.source import read_deployments
from raysearch.processes.claim import check_folder
from sim.config.question import Question

_OUT = typer.Option("--out", "-o", help=OUT_HELP, show_default="printed", callback=at_home)


@takes_question
def export_strategy(
    question: Question | None = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="Folder of `recommend`, `pools`, `tune-live`, `search` or `study`, or a JSON file with a strategy.",
            callback=at_home,
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", help="; ".join(exporter_names()), show_default=True)] = "vllm",
    alternative: AlternativeOption = 0,
    serve: Annotated[str | None, Setting("Weights: a Hugging Face repository or a path.", "the model's")] = None,
    tp: TpOption = None,
    batch: BatchOption = None,
    replicas: Annotated[int, Setting("Number of independent replicas.", least=1)] = 1,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    cp: CpOption = 1,
    dp: DpOption = None,
    layout: LayoutOption = None,
    vocabulary: VocabularyOption = None,
    ops: Annotated[
        list[str] | None, Setting("Shard only these ops, such as qkv_proj,o_proj; the others stay whole.", "all")
    ] = None,
    longest_request: Annotated[
        int | None,
        Setting("Longest request to admit, prompt and answer, in tokens.", "twice --isl + --osl", least=1),
    ] = None,
    benchmark: Annotated[
        Literal["aiperf", "vllm-bench", "genai-perf", "guidellm"] | None,
        typer.Option(
            "--benchmark",
            help="Tool that measures the deployment; adds benchmark.sh, which prints what tune-live reads.",
            show_default="none",
        ),
    ] = None,
    out: Annotated[Path | None, _OUT] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a strategy as the command, configuration or code that runs it, and list what the target cannot express.

    The command is printed on stdout; what is deployed, notes and what was left out go to stderr. If the strategy breaks
    a limit, stderr says so first, and the exit code is 3; one that the engine does not run has no command.

    \b
    Examples:
      raysearch export results/qwen --to vllm
      raysearch export results/qwen --to dynamo --alternative 2 --out deploy
      raysearch export results/pools --to llm-d --out deploy
      raysearch export results/qwen --to vllm --benchmark aiperf --out bench
      raysearch export best.json -w gpt_moe_1_2t_16k --to megatron
      raysearch export --model qwen3_32b --isl 4000 --osl 500 --engine sglang --tp 4 --batch 32 --to sglang
      raysearch export best.json -w gpt_moe_1_2t_16k --to dtensor --set ops=qkv_proj,attention,o_proj --out mine
    """
    check_folder(out, "")
    exporter(to)
    choices = (ep, pp, dims, cp, dp, layout, vocabulary)
    if path is not None:
        check_no_strategy(path, tp, ep, pp, batch, *choices[2:])
        deployments = read_deployments(path, question, alternative, serve)
    else:
        deployments = {"": _deployed(question, tp, batch, replicas, serve, choices)}
    found = ExportResult.of(deployments, to, None if ops is None else [name.strip() for name in ops], longest_request)
    if benchmark is not None and found.files:
        found = found.measured_by(benchmark)
    if out is not None and found.files:
        found.write(out)
    if as_json:
        show_result(found, as_json=True)
    else:
        from raysearch.base.rich_tables import print_blocks

        print_blocks(found.heading(), stderr=True)
        if found.files:
            print("\n\n".join(found.texts(with_files=out is None)), file=verbatim(sys.stdout))
        print_blocks(found.remarks(), stderr=True)
    exit_unless_feasible(found)


def _deployed(
    question: Question | None, tp: int | None, batch: int | None, replicas: int, serve: str | None, rest: tuple
) -> Deployment:
    from raysearch.deploy.export.models import weights_of

    if question is None or (tp is None and rest[-2] is None):
        raise InputError("expected a folder or file to export, or a workload with --tp or --layout")
    workload = loaded(question)
    ep, pp, *others = rest
    strategy = strategy_of(workload, tp, ep, pp, batch, *others)
    return Deployment(workload, strategy, weights_of(workload, question.model, serve), replicas, named=True)
