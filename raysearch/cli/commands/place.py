"""`raysearch place`: which of several models share which GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.placed import PlacementResult
from raysearch.cli.commands.options import OUT_HELP, JsonOption, at_home, exit_unless_feasible, show_result
from raysearch.processes.claim import check_folder


def place(
    fleet: Annotated[str, typer.Argument(help="Name in configs/fleets, or the path of a TOML file.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=256, help="GPUs available.", show_default="the file's")] = None,
    rate: Annotated[
        float, typer.Option(min=0.001, max=1000.0, help="Times the requests per second of the file.")
    ] = 1.0,
    cv: Annotated[
        float | None,
        typer.Option(min=0.05, max=20.0, help="Burstiness of all models; 1 is Poisson.", show_default="the file's"),
    ] = None,
    requests: Annotated[int, typer.Option(min=100, max=1_000_000, help="Requests of a simulated run.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Runs behind each figure.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=OUT_HELP, show_default="none", callback=at_home),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Place several models on one cluster so that most requests meet their latency limits under bursty arrivals.

    Simulates queueing on top of the step model: which GPUs form groups, how models are sharded on them and which models
    share a group. Compares with the best without sharding and the best with a group for each model. Exits with 3
    where no request can meet its limits.

    \b
    Examples:
      raysearch place bursty_qwens
      raysearch place bursty_qwens --cv 1 --rate 2
      raysearch place my_fleet.toml --gpus 16 --seeds 20 --out results/fleet
      raysearch place my_fleet.toml --json
    """
    from raysearch.base.progress import following

    check_folder(out)
    with following(f"placements of {fleet}") as progress:
        found = PlacementResult.of(
            fleet, gpus=gpus, rate=rate, cv=cv, requests=requests, seeds=seeds, progress=progress
        )
        if out is not None:
            found.write(out)
    show_result(found, as_json=as_json, written=out)
    exit_unless_feasible(found)
