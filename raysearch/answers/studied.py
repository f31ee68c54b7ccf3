"""A study, from its file to its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from raysearch.answers.optimal import Bars, no_bars
from raysearch.answers.reported import ReportResult
from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.base.file_io import results_folder
from raysearch.optima.named_spaces import optimum_value
from raysearch.processes.claim import claimed
from raysearch.runs.records import OnFailure
from raysearch.runs.run import finish_rows, finished_summary
from raysearch.studies.study_file import Study, check_same_study, check_study_code, load_study, run_dir

if TYPE_CHECKING:
    from raysearch.base.progress import RunMetrics

_log = logging.getLogger(__name__)


def run_study_file(
    file: str | Path,
    *,
    out: Path | None,
    resume: bool,
    trust_code: bool,
    address: str | None,
    cpus: int | None,
    simulator: str | None,
    workers: int | None,
    on_failure: OnFailure | None,
    begun: Callable[[Path], None] = lambda _: None,
    bars: Bars = no_bars,
) -> ReportResult:
    """Runs what of a study is not finished; see `raysearch.api.study`.

    `begun` is called with the folder once it can be resumed, `bars` show the search for the exact optima.
    """
    if resume and out is None:
        raise InputError("--resume needs --out: the folder of the study to continue")
    if resume and out is not None:
        check_study_code(out, trusted=trust_code)  # before any of it is imported
    study = load_study(file, simulator=simulator, workers=workers, on_failure=on_failure)
    folder = results_folder(out, study.file.name)
    with claimed(folder, resume=resume):
        if resume:
            _check_begun(study, folder)
        _run_open(study, _optima(study, bars), folder, address, cpus, resume, lambda: begun(folder))
    return ReportResult.of(folder)


def _check_begun(study: Study, folder: Path) -> None:
    from raysearch.studies.damage import set_aside_damaged

    check_same_study(study, folder)
    for what in set_aside_damaged(folder).values():
        _log.warning("note: %s: the run is made again", what)


def _optima(study: Study, bars: Bars) -> dict[str, float | None]:
    if study.file.simulator is not None:
        return dict.fromkeys(study.workloads)
    optima: dict[str, float | None] = {}
    for text, workload in study.workloads.items():
        with bars(f"exact optimum of {workload.name}") as progress:
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
    summaries = {run_id: finished_summary(run_dir(folder, run_id)) for run_id in study.specs()}
    finished = {run_id: cast("RunMetrics", summary) for run_id, summary in summaries.items() if summary}
    for run_id in finished:  # one may have been killed between its summary and the last step
        finish_rows(run_dir(folder, run_id))
    if len(finished) == len(summaries):
        return
    check_installed("search", "a study", "each of its runs by `raysearch search`")
    from raysearch.studies.journal import Journal
    from raysearch.studies.study_display import Displays, StudyBars
    from raysearch.studies.tuning import run_study

    with StudyBars(study.file.name, study.specs(), finished) as shown:
        display = Displays(shown, Journal(folder))
        run_study(study, optima, folder, display=display, address=address, cpus=cpus, resume=resume, begun=begun)
