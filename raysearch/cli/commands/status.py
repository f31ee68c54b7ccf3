"""`raysearch status`: how far a study is, from another terminal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysearch.base.errors import FAILURE
from raysearch.cli.commands.options import JsonOption, ResultsArgument, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from raysearch.studies.study_status import StudyStatus

WATCH_EVERY_S = 2.0
"""Seconds between two looks."""


@takes_settings
def show_status(
    path: ResultsArgument,
    watch: Annotated[bool, Setting("Refresh every 2 s until nothing is running.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a study or a search: running, stopped or finished.

    Only reads the files in DIR. Run it on the machine where the study was started: on others, some file systems do not
    show whether it is still running. With --set watch, --json prints one object per line. Exits with 1 if a run is
    damaged.

    \b
    Examples:
      raysearch status results/smoke
      raysearch status results/smoke --set watch
      raysearch status results/smoke --json
    """
    from raysearch.studies.study_status import read_status

    if watch:
        status = _watch(path, as_json)
    else:
        status = read_status(path)
        if as_json:
            print_json(_plain(path, status))
        else:
            from raysearch.base.rich_tables import printer
            from raysearch.studies.status_table import status_text

            printer().print(*status_text(path, status, time.time()), sep="\n")
    if any(run.state == "damaged" for run in status.runs):
        raise typer.Exit(FAILURE)


def _watch(path: Path, as_json: bool) -> StudyStatus:
    from rich.console import Group
    from rich.live import Live

    from raysearch.base.rich_tables import printer
    from raysearch.studies.status_table import status_text
    from raysearch.studies.study_status import read_status

    status = read_status(path)
    console = printer()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if as_json:
                print(json.dumps(_plain(path, status), allow_nan=False), flush=True)
            else:
                live.update(Group(*status_text(path, status, time.time())), refresh=console.is_terminal)
            if status.state != "running":
                return status
            time.sleep(WATCH_EVERY_S)
            status = read_status(path)


def _plain(path: Path, status: StudyStatus) -> JsonObject:
    return {
        "folder": str(path),
        "state": status.state,
        "finished_runs": sum(run.state == "finished" for run in status.runs),
        "calls": sum(run.calls for run in status.runs),
        "remaining_s": status.remaining_s,
        "changed": _utc(status.changed_s),
        "best": [run.run_id for run in status.best()],
        "runs": [{**(fields := asdict(run)), "changed": _utc(fields.pop("changed_s"))} for run in status.runs],
    }


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
