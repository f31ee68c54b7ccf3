"""`raysearch recommend`: from a model, GPUs and a service-level objective to what to run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from raysearch.commands.options import AnyDegreesOption, JsonOption, MarginOption, at_home, print_json
from raysearch.commands.workload_flags import AcceptanceOption, DraftOption, DraftTokensOption, PromptWaitOption
from raysearch.described import workload_of_options
from raysearch.errors import NOTHING_FEASIBLE, InputError
from raysearch.files import as_strategy, degrees_text, strategy_dict
from raysearch.processes.claim import check_folder
from raysearch.recommend.answer import Answer, answer
from raysearch.recommend.question import Question
from raysearch.recommend.record import figures
from sim.simulate import evaluate


def recommend(
    model: Annotated[str, typer.Option(help="Name in configs/models, or the path of a file.")],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs at hand.", min=1)],
    isl: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)],
    osl: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)],
    hardware: Annotated[str, typer.Option(help="Name in configs/hardware, or the path of a file.")] = "h100_sxm",
    tpot_ms: Annotated[float | None, typer.Option(help="Longest time per output token.", show_default="any")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Longest time to the first token.", show_default="any")] = None,
    engine: Annotated[
        str, typer.Option(help="vllm, sglang, trtllm, megatron_core, or an engine that a package adds.")
    ] = "vllm",
    phase: Annotated[str, typer.Option(help="serve, decode or prefill, as of `optimum`.")] = "serve",
    weights: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp8, fp8_block, mxfp4, nvfp4 or int4.", show_default="as published, if the engine has it"
        ),
    ] = None,
    kv_cache: Annotated[str | None, typer.Option(help="bf16 or fp8.", show_default="fp8 if the engine has it")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens of a step.", min=1, show_default="prompts whole")
    ] = None,
    prompt_wait_steps: PromptWaitOption = None,
    draft_tokens: DraftTokensOption = None,
    acceptance: AcceptanceOption = None,
    draft: DraftOption = None,
    any_degrees: AnyDegreesOption = None,
    margin: MarginOption = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Fewest GPUs for so many requests a second.", show_default="fill --gpus")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Fewest GPUs for so many requests at once.", min=1, show_default="fill --gpus")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of a GPU and hour.", show_default="none")] = None,
    against: Annotated[
        str | None, typer.Option(help="'aisimulate': its recommendation beside ours (a minute or two).")
    ] = None,
    top: Annotated[int, typer.Option(help="How many strategies to tell.", min=1)] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for recommendation.json, the front and the commands.", callback=at_home
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what to run: the best strategy that an engine can be told, what it gives, what else, and why not more.

    Exact over every strategy of the engine and every batch. What to run is printed as soon as it is known, what stands
    beside it follows. Exits with 3 where nothing is feasible, and says what comes nearest and what would make it fit.

    \b
    Examples:
      raysearch recommend --model qwen3_235b_a22b --gpus 32 --isl 8000 --osl 1000 --tpot-ms 50 --ttft-ms 2000
      raysearch recommend --model deepseek_v3 --gpus 64 --isl 4000 --osl 1000 --engine sglang --out results/v3
      raysearch recommend --model qwen3_235b_a22b --gpus 32 --isl 8000 --osl 1000 --tpot-ms 50 --against aisimulate
      raysearch recommend --model qwen3_32b --gpus 16 --isl 2000 --osl 300 --tpot-ms 30 --requests-per-s 5 --price 2.5
    """
    check_folder(out)
    if against not in (None, "aisimulate"):
        raise InputError(f"--against knows 'aisimulate', got {against!r}")
    if against:
        from raysearch.simulators.aisimulate import check_here

        check_here()
    options = {
        "model": model,
        "hardware": hardware,
        "phase": phase,
        "isl": isl,
        "osl": osl,
        "engine": engine,
        "weights": weights,
        "kv_cache": kv_cache,
        "tpot_ms": tpot_ms,
        "ttft_ms": ttft_ms,
        "max_gpus": gpus,
        "chunk_tokens": chunk_tokens,
        "prompt_wait_steps": prompt_wait_steps,
        "draft_tokens": draft_tokens,
        "acceptance": acceptance,
        "draft": draft,
        "any_degrees": any_degrees,
        "margin": margin,
    }
    said = {name: value for name, value in options.items() if value is not None}
    question = Question(
        workload_of_options(dict(said), "any"),
        {**said, "batch_grid": "any"},
        gpus,
        top,
        requests_per_s,
        concurrency,
        price,
    )
    from raysearch.recommend.record import answer_dict, write_answer
    from raysearch.recommend.show import show_best, show_rest

    def shown(so_far: Answer) -> None:
        try:
            show_best(so_far)
        except SystemExit as end:  # Rich's own, where the reader of a pipe has gone; the folder is asked for still
            if out is None or not isinstance(end.__context__, BrokenPipeError):
                raise

    told_of = _note if sys.stderr.isatty() else lambda _: None
    found = answer(question, told_of) if as_json else answer(question, told_of, shown)
    told = write_answer(found, out) if out is not None else answer_dict(found)
    other = _other_opinion(question) if against else None
    if as_json:
        print_json({**told, "against": other} if against else told)
    else:
        show_rest(found)
        if out is not None:
            print(f"Written: {out}")
        if against:
            print(_opinion_text(other))
    if not found.options:
        raise typer.Exit(NOTHING_FEASIBLE)


def _other_opinion(question: Question) -> dict[str, Any] | None:
    """What AISimulate recommends, by its figures and by ours."""
    from raysearch.simulators.aisimulate import recommendation

    theirs = recommendation(question.workload, question.gpus)
    if theirs is None:
        return None
    ours = evaluate(question.workload, theirs.strategy)
    return {
        **asdict(theirs),
        "strategy": strategy_dict(theirs.strategy),
        "by_ours": figures(question.workload, ours),
        "violations_by_ours": [violation.message for violation in ours.violations],
    }


def _opinion_text(other: dict[str, Any] | None) -> str:
    if other is None:
        return "AISimulate finds nothing that meets the SLOs on one pool."
    ours, degrees = other["by_ours"], degrees_text(as_strategy(other["strategy"]))
    broken = "".join(f"; breaks a limit by ours: {text}" for text in other["violations_by_ours"])
    return (
        f"AISimulate ({other['version']}): {degrees}; {other['tokens_per_s_per_gpu']:,.1f} tokens/s/GPU and "
        f"{other['tpot_s'] * 1e3:.1f} ms per token by its figures, {ours['tokens_per_s_per_gpu']:,.1f} and "
        f"{ours['tpot_s'] * 1e3:.1f} by ours{broken}"
    )


def _note(what: str) -> None:
    print(f"... {what}", file=sys.stderr)
