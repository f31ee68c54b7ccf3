"""`raysearch place`: which of several models share which GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.base.errors import NOTHING_FEASIBLE
from raysearch.cli.commands.options import JsonOption, at_home, print_json
from raysearch.processes.claim import check_folder


def place(
    fleet: Annotated[str, typer.Argument(help="Name in configs/fleets, or the path of a TOML file.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=256, help="GPUs at hand.", show_default="the file's")] = None,
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
        typer.Option("--out", "-o", help="Folder for placement.json, curves.csv and curves.png.", callback=at_home),
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
    from dataclasses import replace

    from raysearch.base.progress import following
    from raysearch.deploy.place.fleet_file import load_fleet
    from raysearch.deploy.place.fleet_plan import curves, fleet_plan_dict, plan_fleet
    from raysearch.deploy.place.fleet_plan_text import show_fleet_plan, write_fleet_plan

    check_folder(out)
    loaded = load_fleet(fleet, **({} if gpus is None else {"gpus": gpus}))
    loaded = replace(loaded, cluster=loaded.cluster.at(rate, cv))
    with following(f"placements of {loaded.file.name}") as progress:
        found = plan_fleet(loaded, requests, seeds, progress)
        if out is not None:
            write_fleet_plan(found, curves(found, progress), out)
    if as_json:
        print_json(fleet_plan_dict(found))
    else:
        show_fleet_plan(found)
        if out is not None:
            print(f"Written: {out}")
    if found.best.attained.value == 0:
        raise typer.Exit(NOTHING_FEASIBLE)
