"""`raysearch place`: which of several models share which GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from raysearch.answers.placed import PlacementResult
from raysearch.cli.commands.options import (
    CV_HELP,
    REQUESTS_HELP,
    SEEDS_HELP,
    AnswerOutOption,
    JsonOption,
    PercentileOption,
    TraceOption,
    exit_unless_feasible,
    show_result,
)
from raysearch.cli.commands.settings import Setting, takes_settings
from raysearch.processes.claim import check_folder


@takes_settings
def place(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Name in configs/fleets, or the path of a TOML file.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=256, help="GPUs available.", show_default="the file's")] = None,
    rate: Annotated[float, Setting("Factor on the request rates of the file.", least=0.001, most=1000.0)] = 1.0,
    cv: Annotated[
        float | None,
        Setting(CV_HELP, "the file's", least=0.05, most=20.0),
    ] = None,
    trace: TraceOption = None,
    percentile: PercentileOption = 99.0,
    requests: Annotated[int, Setting(REQUESTS_HELP, least=100, most=1_000_000)] = 1000,
    seeds: Annotated[int, Setting(SEEDS_HELP, least=1, most=10_000)] = 10,
    out: AnswerOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place several models on one cluster so that most requests meet their latency limits under bursty arrivals.

    Decides which GPUs form groups, how models are sharded on them and which models share a group, by simulating queues
    on top of the step model. Compares with the best placement without sharding and the best with a group per model.
    Exits with 3 if no request can meet its limits.

    \b
    Examples:
      raysearch place bursty_qwens
      raysearch place bursty_qwens --set cv=1 --set rate=2
      raysearch place my_fleet.toml --gpus 16 --set seeds=20 --out results/fleet
      raysearch place my_fleet.toml --set trace=conversation_trace.jsonl --set percentile=90 --json
    """
    from raysearch.base.progress import following

    check_folder(out, "placement.json")
    with following(f"placements of {path}") as progress:
        found = PlacementResult.of(
            path,
            gpus=gpus,
            rate=rate,
            cv=cv,
            trace=trace,
            percentile=percentile,
            requests=requests,
            seeds=seeds,
            progress=progress,
        )
        if out is not None:
            found.write(out)
    show_result(found, as_json=as_json, written=out)
    exit_unless_feasible(found)
