"""`raysearch study`: many runs on Ray Tune, and the table they end with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raysearch.answers.studied import run_study_file
from raysearch.base.errors import Interrupted, RunFailed
from raysearch.base.limits import MOST_CPUS
from raysearch.cli.commands.options import (
    JsonOption,
    OnFailureSetting,
    OutOption,
    ResumeOption,
    SimulatorOption,
    TrustCodeSetting,
    WorkersSetting,
)
from raysearch.cli.commands.settings import Setting, as_words, takes_settings
from raysearch.processes.watcher import can_go_on_with, kept_by
from raysearch.studies.study_file import has_begun


@takes_settings
def run(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Name in configs/studies, or the path of a TOML file.")],
    out: OutOption = None,
    resume: ResumeOption = False,
    trust_code: TrustCodeSetting = False,
    address: Annotated[
        str | None, Setting("Address of a running Ray cluster ('auto' finds it).", "$RAY_ADDRESS, else a local Ray")
    ] = None,
    cpus: Annotated[int | None, Setting("CPUs of the local Ray.", "all", least=1, most=MOST_CPUS)] = None,
    simulator: SimulatorOption = None,
    workers: WorkersSetting = None,
    on_failure: OnFailureSetting = None,
    as_json: JsonOption = False,
) -> None:
    """Run a study: every searcher on every workload with every seed, in parallel, on Ray Tune.

    Ctrl-C loses no evaluation; the same command with --resume continues, and the result is the same.
    On a cluster, --out must be a folder that all nodes share.

    \b
    Examples:
      raysearch study quickstart
      raysearch study configs/studies/smoke.toml --out results/smoke --json
      raysearch study configs/studies/smoke.toml --out results/smoke --resume
      raysearch study mine.toml --simulator my_package.cluster:measure --set workers=4
    """
    from raysearch.base.progress import stepping
    from raysearch.cli.commands.report import show_report

    settings: dict[str, Any] = {"workers": workers, "on_failure": on_failure, "address": address, "cpus": cpus}
    began = [out] if resume and out else []

    def again(*more: str) -> list[str]:
        black_box = ["--simulator", simulator] if simulator is not None else []
        words = as_words({**settings, "trust_code": trust_code or None})
        return ["study", path, "--out", str(began[-1]), *black_box, *words, *more, "--resume"]

    def begun(folder: Path) -> None:
        began.append(folder)
        can_go_on_with(again(*(["--json"] if as_json else [])))

    try:
        found = run_study_file(
            path,
            out=out,
            resume=resume,
            trust_code=trust_code,
            simulator=simulator,
            begun=begun,
            bars=stepping,
            **settings,
        )
    except (Interrupted, RunFailed) as stop:
        if not (began and has_begun(began[-1])):
            raise
        rest = kept_by(again())
        if isinstance(stop, Interrupted):
            raise Interrupted(stop.signum, f"{stop}; {rest}") from None
        raise RunFailed(f"{stop}; {rest}") from stop
    show_report(found, as_json=as_json)
