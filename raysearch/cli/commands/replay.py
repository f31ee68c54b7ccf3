"""`raysearch replay`: a deployment under traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.replayed import MOST_REPLICAS, ReplayResult, TrafficOptions, deployed_in, deployed_strategy
from raysearch.answers.strategy_text import check_no_strategy, strategy_of
from raysearch.base.errors import InputError
from raysearch.cli.commands.options import (
    SEEDS_HELP,
    AlternativeOption,
    AnswerOutOption,
    ConcurrencyOption,
    CvOption,
    JsonOption,
    PercentileOption,
    RequestsOption,
    RequestsPerSOption,
    TraceOption,
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
from raysearch.deploy.replay.trace_files import with_lengths_of
from raysearch.processes.claim import check_folder
from sim.config.question import Question


@takes_question
def replay_traffic(
    question: Question | None = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="Folder of `recommend`, `pools` or `search`, a JSON file, or one with a server's command.",
        ),
    ] = None,
    requests_per_s: RequestsPerSOption = None,
    concurrency: ConcurrencyOption = None,
    tp: TpOption = None,
    batch: BatchOption = None,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    cp: CpOption = 1,
    dp: DpOption = None,
    layout: LayoutOption = None,
    vocabulary: VocabularyOption = None,
    alternative: AlternativeOption = 0,
    replicas: Annotated[
        int | None, Setting("Number of independent replicas.", "the folder's, else 1", least=1, most=MOST_REPLICAS)
    ] = None,
    trace: TraceOption = None,
    cv: CvOption = 1.0,
    spread: Annotated[
        float,
        Setting("Lengths are uniform between this share of --isl and --osl and all of it.", least=0.01, most=1.0),
    ] = 1.0,
    length_cv: Annotated[
        float,
        Setting("Coefficient of variation of log-normal lengths, of mean --isl and --osl.", least=0.0, most=10.0),
    ] = 0.0,
    cached: Annotated[float, Setting("Share of each prompt that is in the prefix cache.", least=0.0, most=1.0)] = 0.0,
    router: Annotated[
        str, Setting("How requests are sent to replicas: least_loaded, round_robin or prefix.")
    ] = "least_loaded",
    percentile: PercentileOption = 99.0,
    requests: RequestsOption = 2000,
    seeds: Annotated[int | None, Setting(SEEDS_HELP, "5, of a trace 1", least=1, most=1000)] = None,
    out: AnswerOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay traffic on a deployment: percentiles of the latencies, goodput, and the load at which its limits break.

    An event-driven model of the engine's scheduler on top of the step model: arrivals, continuous batching, chunked
    prefill, KV cache capacity, preemption, prefix cache, router. Exits with 3 if the limits are not met
    with the probability `confidence`, by the same replays as sizes of `recommend`.

    \b
    Examples:
      raysearch replay results/qwen --requests-per-s 12
      raysearch replay --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 --ttft-ms 500 --tp 2 --batch 47 --requests-per-s 3
      raysearch replay --model qwen3_32b --isl 4000 --osl 500 --tp 2 --batch 64 --concurrency 64 --set spread=0.8
      raysearch replay serve.sh --isl 4000 --osl 500 --tpot-ms 30 --requests-per-s 3
      raysearch replay results/qwen --set trace=conversation_trace.jsonl --set router=prefix --out results/replay
    """  # noqa: E501
    check_folder(out, "replay.json")
    traffic = TrafficOptions(requests_per_s, concurrency, trace, cv, spread, length_cv, cached, requests)
    if path is not None:
        check_no_strategy(path, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
        deployed = deployed_in(path, question, alternative, traffic.recorded)
    elif question is None or (tp is None and layout is None):
        raise InputError("expected a folder or file to replay, or a workload with --tp or --layout")
    else:
        question = with_lengths_of(question, traffic.recorded)
        workload = loaded(question)
        strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
        deployed = deployed_strategy(workload, strategy)
    from raysearch.base.progress import telling

    with telling("replaying") as progress:
        found = ReplayResult.of(
            question,
            deployed,
            traffic,
            replicas=replicas,
            router=router,
            percentile=percentile,
            seeds=seeds,
            progress=progress,
        )
        if out is not None:
            found.write(out)
    show_result(found, as_json=as_json, written=out)
    exit_unless_feasible(found)
