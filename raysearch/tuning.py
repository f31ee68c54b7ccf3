"""Runs a study on Ray Tune: connects, checks the resources, fits, resumes, and tells the display how it goes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # read on import; the new output prints a banner even when silent

from raysearch.connection import connected  # before Ray, whose environment it prepares

# isort: split
import ray
from ray import tune

from raysearch.errors import InputError, Interrupted, RunFailed
from raysearch.run import finished_summary
from raysearch.study import TUNE_FOLDER, Study, run_dir, write_study
from raysearch.study_display import StudyDisplay
from raysearch.trial import SearchTrial, trial_config

MAX_FAILURES = 2
"""[assumed] Restarts of a run whose process dies, before the run counts as failed."""

_display: ContextVar[StudyDisplay] = ContextVar("display of the study that is running")


def run_study(
    study: Study,
    optima: Mapping[str, float | None],
    out: Path,
    *,
    display: StudyDisplay,
    address: str | None = None,
    cpus: int | None = None,
    resume: bool = False,
) -> None:
    """Runs every run of a study that is not finished yet; returns when all of them are.

    Args:
        study: What to run.
        optima: f* by workload text, for the scores.
        out: The study's folder, new or the one to resume in; on a cluster one that all nodes share.
        display: Told of every report.
        address: Of a running Ray cluster; else $RAY_ADDRESS, else a local Ray is started for the study.
        cpus: Of that local Ray; else all of the machine.
        resume: Whether to go on from Tune's last snapshot, if it wrote one.

    Raises:
        InputError: The cluster cannot run it, ever.
        Interrupted: By a signal; every row is kept.
        RunFailed: Some runs broke down; the others are finished.
    """
    with connected(address, cpus):
        _check_resources(study.file.cpus_per_run)
        if not resume:
            write_study(study, optima, out)
        token = _display.set(display)
        try:
            # Stdout is for results: what Tune or a library prints goes to stderr.
            with _terminate_as_interrupt() as signals, redirect_stdout(sys.stderr):
                results = _tuner(study, optima, out, resume).fit()
        finally:
            _display.reset(token)
    _judge(study, out, results, signals)


class _Relay(tune.Callback):
    """Tells the display of the running study what Tune reports. Tune pickles it, so it holds nothing."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _display.get().started(trial.config["run"]["run_id"])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        _display.get().reported(trial.config["run"]["run_id"], result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _display.get().finished(trial.config["run"]["run_id"])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _display.get().failed(trial.config["run"]["run_id"])


def _check_resources(cpus_per_run: int) -> None:
    """Refuses a study that would wait for ever."""
    largest = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if cpus_per_run > largest:
        raise InputError(
            f"every run asks for {cpus_per_run} CPUs, but the largest node of this Ray has {largest}: "
            f"lower cpus_per_run in the study, or give Ray more CPUs"
        )


def _tuner(study: Study, optima: Mapping[str, float | None], out: Path, resume: bool) -> tune.Tuner:
    folder = out.resolve() / TUNE_FOLDER
    # Without a snapshot Tune had not started a single run yet.
    if resume and tune.Tuner.can_restore(str(folder)) and any(folder.glob("experiment_state-*.json")):
        return tune.Tuner.restore(str(folder), trainable=SearchTrial, resume_unfinished=True, resume_errored=True)
    configs = [
        trial_config(
            spec,
            run_dir(out.resolve(), run_id),
            optimum=optima[spec.workload],
            report_every=study.file.report_every,
            cpus=study.file.cpus_per_run,
        )["run"]
        for run_id, spec in study.specs().items()
    ]
    return tune.Tuner(
        SearchTrial,
        param_space={"run": tune.grid_search(configs)},
        tune_config=tune.TuneConfig(
            metric="best",
            mode="max",
            reuse_actors=True,
            trial_name_creator=_run_id,
            trial_dirname_creator=_run_id,
        ),
        run_config=tune.RunConfig(
            name=TUNE_FOLDER,
            storage_path=str(out.resolve()),
            verbose=0,
            callbacks=[_Relay()],
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs keep their own, one each
        ),
    )


def _run_id(trial: Any) -> str:
    return trial.config["run"]["run_id"]


@contextmanager
def _terminate_as_interrupt() -> Iterator[list[int]]:
    """Lets SIGTERM end a fit as SIGINT does, which Tune turns into a last snapshot; yields what came."""
    came: list[int] = []

    def pass_on(signum: int, _frame: Any) -> None:
        came.append(signum)
        signal.raise_signal(signal.SIGINT)

    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield came
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _judge(study: Study, out: Path, results: tune.ResultGrid, signals: list[int]) -> None:
    """Tells a finished study from a broken and from an interrupted one: Tune returns normally from all three."""
    unfinished = [run_id for run_id in study.specs() if finished_summary(run_dir(out, run_id)) is None]
    if not unfinished:
        return
    if results.errors:
        reason = str(results.errors[0]).strip().splitlines()[-1]
        raise RunFailed(
            f"{len(unfinished)} of {len(study.specs())} runs failed ({', '.join(unfinished)}); the first: {reason}; "
            f"more in {out / TUNE_FOLDER}/*/error.txt"
        )
    signum = signals[0] if signals else signal.SIGINT
    raise Interrupted(signum, f"interrupted with {len(unfinished)} of {len(study.specs())} runs unfinished")
