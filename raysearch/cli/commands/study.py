"""`raysearch study`: many runs on Ray Tune, and the table they end with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysearch.base.errors import InputError, Interrupted, RunFailed
from raysearch.base.file_io import results_folder
from raysearch.base.limits import MOST_CPUS
from raysearch.cli.commands.options import JsonOption, OnFailureOption, OutOption, SimulatorOption, TrustCodeOption
from raysearch.optima.named_spaces import optimum_value
from raysearch.processes.claim import claimed
from raysearch.processes.watcher import can_go_on_with, kept_by

if TYPE_CHECKING:
    from raysearch.studies.study_file import Study


def run(
    file: Annotated[str, typer.Argument(help="Path of a study's TOML file, or a name in configs/studies.")],
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished study in --out.")] = False,
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
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes that evaluate for each run.", show_default="as FILE says, else 1 for a --simulator"
        ),
    ] = None,
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
    from raysearch.studies.study_file import check_study_code, has_begun, load_study

    if resume and out is None:
        raise InputError("--resume needs --out: the folder of the study to continue")
    if resume and out is not None:
        check_study_code(out, trusted=trust_code)  # before any of it is imported
    failures = on_failure.value if on_failure else None
    study = load_study(file, simulator=simulator, workers=workers, on_failure=failures)
    folder = results_folder(out, study.file.name)
    with claimed(folder, resume=resume):
        if resume:
            _check_begun(study, folder)
        given = {"out": folder, "simulator": simulator, "workers": workers, "on-failure": failures}
        same = [*_flags({**given, "address": address, "cpus": cpus}), *(["--trust-code"] if trust_code else [])]
        again = [file, *same, *(["--json"] if as_json else [])]
        try:
            begun = partial(can_go_on_with, ["study", *again, "--resume"])
            _run_open(study, _optima(study), folder, address, cpus, resume, begun)
        except (Interrupted, RunFailed) as stop:
            if not has_begun(folder):
                raise
            rest = kept_by(["study", file, *same, "--resume"])
            if isinstance(stop, Interrupted):
                raise Interrupted(stop.signum, f"{stop}; {rest}") from None
            raise RunFailed(f"{stop}; {rest}") from stop
    from raysearch.cli.commands.report import report_results

    report_results(folder, as_json)


def _flags(given: Mapping[str, object]) -> list[str]:
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def _check_begun(study: Study, folder: Path) -> None:
    from raysearch.studies.damage import set_aside_damaged
    from raysearch.studies.study_file import check_same_study

    check_same_study(study, folder)
    for what in set_aside_damaged(folder).values():
        print(f"note: {what}: the run is made again", file=sys.stderr)


def _optima(study: Study) -> dict[str, float | None]:
    from raysearch.base.progress import stepping

    optima: dict[str, float | None] = {}
    if study.file.simulator is not None:
        return dict.fromkeys(study.workloads)
    for text, workload in study.workloads.items():
        with stepping(f"exact optimum of {workload.name}") as progress:
            optima[text] = optimum_value(workload, progress)
    return optima


def _run_open(
    study: Study,
    optima: dict[str, float | None],
    folder: Path,
    address: str | None,
    cpus: int | None,
    resume: bool,
    begun: Callable[[], None],
) -> None:
    from raysearch.runs.run import finish_rows, finished_summary
    from raysearch.studies.study_file import run_dir

    summaries = {run_id: finished_summary(run_dir(folder, run_id)) for run_id in study.specs()}
    finished = {run_id: summary for run_id, summary in summaries.items() if summary}
    for run_id in finished:  # one may have been killed between its summary and the last step
        finish_rows(run_dir(folder, run_id))
    if len(finished) == len(summaries):
        return
    from raysearch.studies.journal import Journal
    from raysearch.studies.study_display import Displays, StudyBars
    from raysearch.studies.tuning import run_study

    with StudyBars(study.file.name, study.specs(), finished) as bars:
        display = Displays(bars, Journal(folder))
        run_study(study, optima, folder, display=display, address=address, cpus=cpus, resume=resume, begun=begun)
