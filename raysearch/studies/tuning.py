"""Runs a study on Ray Tune: connects, checks the resources, fits, resumes, and reports to the display."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # read on import; the new output prints a banner even when silent
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # of which we choose ours

from raysearch.processes.connection import connected  # before Ray, whose environment it prepares

# isort: split
import ray
from ray import tune
from ray.tune.logger import JsonLoggerCallback, TBXLoggerCallback

from raysearch.base.errors import Interrupted, RunFailed
from raysearch.processes.cluster import check_room, check_shared
from raysearch.processes.heartbeat import Hearts
from raysearch.processes.watcher import got_on, let_go_of_terminal
from raysearch.runs.records import HEAD_FILE
from raysearch.runs.run import finished_summary
from raysearch.studies.deaths import MOST_IDLE_RESTARTS, Deaths
from raysearch.studies.study_display import StudyDisplay
from raysearch.studies.study_file import TUNE_FOLDER, Study, run_dir, write_study
from raysearch.studies.trial import FAILURE_KEY, SearchTrial, trial_config

if TYPE_CHECKING:
    from types import ModuleType

    from raysearch.base.progress import RunMetrics

_display: ContextVar[StudyDisplay] = ContextVar("display of the study that is running")
_hearts: ContextVar[Hearts] = ContextVar("hearts of its runs")
_calls: ContextVar[dict[str, int]] = ContextVar("calls of its runs so far")
_deaths: ContextVar[Deaths] = ContextVar("deaths of its runs")


def run_study(
    study: Study,
    optima: Mapping[str, float | None],
    out: Path,
    *,
    display: StudyDisplay,
    address: str | None = None,
    cpus: int | None = None,
    resume: bool = False,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Runs every run of a study that is not finished yet; returns when all of them are.

    Args:
        study: What to run.
        optima: f* by workload text, for the scores.
        out: The study's folder, new or the one to resume in; on a cluster one that all nodes share.
        display: Called with every report.
        address: Of a running Ray cluster; else $RAY_ADDRESS, else a local Ray is started for the study.
        cpus: Of that local Ray; else all of the machine.
        resume: Whether the folder holds the beginnings of the study.
        begun: Called once it does.

    Raises:
        InputError: The cluster cannot run it, ever, or does not see the study's folder.
        Interrupted: By a signal; every row is kept.
        RunFailed: Some runs broke down; the others are finished.
    """
    # Stdout is for results: what Tune, a library or Ray's own threads print goes to stderr.
    with redirect_stdout(sys.stderr), connected(address, cpus):
        check_room(study.file.cpus_per_run, study.file.workers_per_run, study.file.cpus_per_worker)
        check_shared(out)
        if not resume:
            write_study(study, optima, out)
        begun()
        finished = {run_id: finished_summary(run_dir(out, run_id)) for run_id in study.specs()}
        calls = {run_id: summary["calls"] for run_id, summary in finished.items() if summary}
        tokens = _display.set(display), _hearts.set(hearts := Hearts()), _calls.set(calls), _deaths.set(Deaths())
        try:
            with hearts.watching(), _stopped_as_interrupted() as signals:
                reasons = _fit(_tuner(study, optima, out))
        finally:
            _display.reset(tokens[0])
            _hearts.reset(tokens[1])
            _calls.reset(tokens[2])
            _deaths.reset(tokens[3])
    _judge(study, out, reasons, signals)


def _fit(tuner: tune.Tuner) -> dict[str, str]:
    """Makes the runs; returns why some failed, by run id."""
    try:
        results = tuner.fit()
    except (tune.TuneError, OSError, EOFError) as error:  # its own files, on a disk that is full
        raise RunFailed(f"Ray Tune stopped: {_last_line(error)}") from error
    reasons: dict[str, str] = {}
    for result in results:
        reason = (result.metrics or {}).get(FAILURE_KEY) or (result.error and _last_line(result.error))
        if reason:
            reasons[(result.config or {})["run"]["run_id"]] = reason
    return reasons


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


class _Relay(tune.Callback):
    """Passes what Tune reports to the display of the running study. Tune pickles it, so it has no state."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        run_id, folder = trial.config["run"]["run_id"], Path(trial.config["run"]["folder"])
        actor = trial.temporary_state.ray_actor
        _name_steps(actor, run_id)
        _hearts.get().watch(run_id, folder / HEAD_FILE, lambda: ray.kill(actor))
        _deaths.get().began(trial)
        _display.get().started(run_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        _display.get().reported(run_id := trial.config["run"]["run_id"], cast("RunMetrics", result))
        (calls := _calls.get())[run_id] = result["calls"]
        got_on(sum(calls.values()))
        _deaths.get().reported(trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _deaths.get().recovered(trial)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ended = _display.get().failed if FAILURE_KEY in trial.last_result else _display.get().finished
        _hearts.get().leave(run_id := trial.config["run"]["run_id"])
        ended(run_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _hearts.get().leave(run_id := trial.config["run"]["run_id"])
        _display.get().failed(run_id)


def _name_steps(actor: Any, run_id: str) -> None:
    """Has Ray's dashboard, and ps, show the steps of a run by its name. An actor is reused, so it has none of its own.

    Tune asks the handle for `train`, and would get the method whose tasks are named after the class.
    """
    actor.train = actor.__getattr__("train").options(name=run_id)


def _tuner(study: Study, optima: Mapping[str, float | None], out: Path) -> tune.Tuner:
    """A Tune experiment of the runs that are not finished.

    Tune's own snapshots are not asked what is: they lag behind, and a full disk leaves them damaged.
    """
    for snapshot in (out / TUNE_FOLDER).glob("*[-_]state-*.json"):
        snapshot.unlink()
    configs = [
        trial_config(
            spec,
            run_dir(out.resolve(), run_id),
            optimum=optima[spec.workload],
            report_every=study.file.report_every,
            cpus=study.file.cpus_per_run,
            patience=study.file.patience,
        )["run"]
        for run_id, spec in study.specs().items()
        if finished_summary(run_dir(out, run_id)) is None
    ]
    with _torch_left_out():
        tensorboard = TBXLoggerCallback()
    return tune.Tuner(
        SearchTrial,
        param_space={"run": Grid(grid_search=configs)},
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
            callbacks=[JsonLoggerCallback(), tensorboard, _Relay()],
            failure_config=tune.FailureConfig(max_failures=MOST_IDLE_RESTARTS),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs keep their own, one each
        ),
    )


@contextmanager
def _torch_left_out() -> Iterator[None]:
    """Imports as without PyTorch, which tensorboardX loads for two seconds to annotate its methods with tensors."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = cast("ModuleType", None)  # [spec] so that importing it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


class Grid(dict[str, Any]):
    """What `tune.grid_search` returns, but never copied.

    Ray Tune would copy the whole grid for each of its values: of ten thousand runs the first would wait for minutes.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        return self


def _run_id(trial: Any) -> str:
    return trial.config["run"]["run_id"]


@contextmanager
def _stopped_as_interrupted() -> Iterator[list[int]]:
    """Lets SIGTERM and SIGHUP end a fit as SIGINT does, which Tune ends well on; yields what came."""
    came: list[int] = []

    def pass_on(signum: int, _frame: Any) -> None:
        if signum == signal.SIGHUP:
            let_go_of_terminal()
        came.append(signum)
        signal.raise_signal(signal.SIGINT)

    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for which in (signal.SIGTERM, signal.SIGHUP):
        if before[which] is not signal.SIG_IGN:
            signal.signal(which, pass_on)
    try:
        yield came
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _judge(study: Study, out: Path, reasons: dict[str, str], signals: list[int]) -> None:
    """Distinguishes a finished study, a broken and an interrupted one: Tune returns normally from all three."""
    unfinished = [run_id for run_id in study.specs() if finished_summary(run_dir(out, run_id)) is None]
    if not unfinished:
        return
    some = f"{len(unfinished)} of {len(study.specs())} runs"
    if all(run_id in reasons for run_id in unfinished):
        first = unfinished[0]
        others = f" (the others: {', '.join(unfinished[1:])})" if unfinished[1:] else ""
        raise RunFailed(f"{some} failed: {first}: {reasons[first]}{others}")
    raise Interrupted(signals[0] if signals else signal.SIGINT, f"interrupted with {some} unfinished")
