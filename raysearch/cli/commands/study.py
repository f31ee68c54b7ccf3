"""`raysearch study`: many runs on Ray Tune, and the table they end with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.studied import run_study_file
from raysearch.base.errors import Interrupted, RunFailed
from raysearch.base.limits import MOST_CPUS
from raysearch.cli.commands.options import (
    JsonOption,
    OnFailureOption,
    OutOption,
    ResumeOption,
    SimulatorOption,
    TrustCodeOption,
    WorkersOption,
)
from raysearch.processes.watcher import can_go_on_with, kept_by
from raysearch.studies.study_file import has_begun


def run(
    file: Annotated[str, typer.Argument(help="Path of a study's TOML file, or a name in configs/studies.")],
    out: OutOption = None,
    resume: ResumeOption = False,
    trust_code: TrustCodeOption = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a running Ray cluster ('auto' finds it).", show_default="$RAY_ADDRESS, or a Ray of its own"
        ),
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, max=MOST_CPUS, help="CPUs of the own Ray.", show_default="all")
    ] = None,
    simulator: SimulatorOption = None,
    workers: WorkersOption = None,
    on_failure: OnFailureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every searcher on every workload with every seed, in parallel, on Ray Tune.

    Ctrl-C keeps every call; the same command with --resume continues, with the same result as without a stop.
    On a cluster, --out must be a folder that all nodes share.

    \b
    Examples:
      raysearch study quickstart
      raysearch study configs/studies/smoke.toml --out results/smoke --json
      raysearch study configs/studies/smoke.toml --out results/smoke --resume
      raysearch study mine.toml --simulator my_package.cluster:measure --workers 4
    """
    from raysearch.base.progress import stepping
    from raysearch.cli.commands.report import show_report

    options = {"simulator": simulator, "workers": workers, "on_failure": on_failure.value if on_failure else None}
    options |= {"address": address, "cpus": cpus}
    began = [out] if resume and out else []

    def again(*more: str) -> list[str]:
        flags = [*_flags({"out": began[-1], **options}), *(["--trust-code"] if trust_code else [])]
        return ["study", file, *flags, *more, "--resume"]

    def begun(folder: Path) -> None:
        began.append(folder)
        can_go_on_with(again(*(["--json"] if as_json else [])))

    try:
        found = run_study_file(
            file, out=out, resume=resume, trust_code=trust_code, begun=begun, bars=stepping, **options
        )
    except (Interrupted, RunFailed) as stop:
        if not (began and has_begun(began[-1])):
            raise
        rest = kept_by(again())
        if isinstance(stop, Interrupted):
            raise Interrupted(stop.signum, f"{stop}; {rest}") from None
        raise RunFailed(f"{stop}; {rest}") from stop
    show_report(found, as_json=as_json)


def _flags(given: Mapping[str, object]) -> list[str]:
    words = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None)
    return [part for pair in words for part in pair]
