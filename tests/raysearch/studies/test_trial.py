"""A trial without Ray around it: how it advances its run, and how it tells that the run cannot go on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.rows import read_rows
from raysearch.base import progress
from raysearch.runs.checkpoint import CHECKPOINT_FILE
from raysearch.runs.records import STUDY_FILE, RunSpec
from raysearch.runs.run import SearchRun, finished_summary
from raysearch.studies.study_display import StudyBars
from raysearch.studies.trial import FAILURE_KEY, SearchTrial, trial_config
from sim.evaluation import Evaluation
from sim.replay import goodput
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

FAILING_CALL = 30


@pytest.fixture
def trial(tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SearchTrial]:
    """Of a run of 60 calls that reports every 25, each time with a checkpoint."""
    monkeypatch.setattr("raysearch.studies.trial.SAVE_EVERY_S", 0.0)
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune makes folders there
    spec = RunSpec(str(tiny_workload), "annealing", seed=0, budget=60)
    folder = tmp_path / "runs" / "tiny-annealing-s0"
    (tmp_path / STUDY_FILE).touch()  # a node that does not see it refuses to run
    trial = SearchTrial(trial_config(spec, folder, optimum=None, report_every=25, cpus=1))
    yield trial
    trial.stop()


def straight(workload: Path, folder: Path) -> str:
    run = SearchRun(RunSpec(str(workload), "annealing", seed=0, budget=60), folder)
    run.advance(60)
    return run.finish()["digest"]


def raises(evaluation: Evaluation) -> Evaluation:
    raise RuntimeError("out of tune")


def is_not_finite(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, tokens_per_s_per_gpu=math.nan)


@pytest.mark.parametrize(("fault", "reason"), [(raises, "out of tune"), (is_not_finite, "got nan")])
def test_a_failing_simulator_ends_the_run_with_the_strategys_name_until_it_is_mended(
    trial: SearchTrial,
    tiny_workload: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Evaluation], Evaluation],
    reason: str,
) -> None:
    calls: list[Strategy] = []

    def failing(workload: Workload, strategy: Strategy) -> Evaluation:
        calls.append(strategy)
        evaluation = evaluate(workload, strategy)
        return fault(evaluation) if len(calls) >= FAILING_CALL else evaluation

    with monkeypatch.context() as patch:
        patch.setattr(goodput, "evaluate", failing)
        assert trial.step()["calls"] == 25
        last = trial.step()
    assert last["done"]
    assert last[FAILURE_KEY].startswith(f"the simulator failed on {calls[-1]}: ")
    assert reason in last[FAILURE_KEY]
    folder = Path(trial.config["run"]["folder"])
    assert len(read_rows(folder)) == last["calls"] >= 29
    assert finished_summary(folder) is None

    trial.reset_config(trial.config)
    reports = [trial.step() for _ in range(2)]
    assert [report["calls"] for report in reports] == [50, 60]
    assert FAILURE_KEY not in reports[-1]
    summary = finished_summary(folder)
    assert summary is not None
    assert summary["digest"] == straight(tiny_workload, tmp_path / "straight")


def test_a_folder_that_takes_no_more_ends_the_run_with_a_reason(
    trial: SearchTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        last = trial.step()
    assert last["done"]
    assert last[FAILURE_KEY] == f"cannot write to {trial.config['run']['folder']}: No space left on device"
    trial.reset_config(trial.config)
    while not trial.step()["done"]:
        pass
    assert len(read_rows(Path(trial.config["run"]["folder"]))) == 60


def test_a_run_that_cannot_even_start_is_shown_with_the_reason(
    trial: SearchTrial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trial.config["run"]["folder"])
    folder.parent.write_text("in the way")
    last = trial.step()
    assert (last["done"], last["calls"]) == (True, 0)
    assert last[FAILURE_KEY] == f"cannot write to {folder}: Not a directory"
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    bars = StudyBars("s", {folder.name: RunSpec("tiny", "annealing", seed=0, budget=60)}, {})
    bars.reported(folder.name, last)
    bars.failed(folder.name)
    assert capsys.readouterr().err.splitlines()[-1] == f"1/1 {folder.name}: FAILED after 0 calls"


def test_a_fast_run_saves_itself_once_in_a_while_and_a_slow_one_at_every_report(
    trial: SearchTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Path(trial.config["run"]["folder"]) / CHECKPOINT_FILE
    monkeypatch.setattr("raysearch.studies.trial.SAVE_EVERY_S", 1000.0)
    trial.step()
    assert not checkpoint.exists()
    monkeypatch.setattr("raysearch.studies.trial.SAVE_EVERY_S", 0.0)
    trial.step()
    assert checkpoint.exists()


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_from_the_end_of_a_chunk(
    tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next node has nothing but the folder."""
    monkeypatch.setattr("raysearch.studies.trial.SAVE_EVERY_S", math.inf)
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = RunSpec(str(tiny_workload), "ppo_paper", seed=0, budget=40)
    folder = tmp_path / "runs" / "tiny-ppo_paper-s0"
    (tmp_path / STUDY_FILE).touch()
    reports: list[dict[str, Any]] = []
    while not reports or not reports[-1]["done"]:  # a trial of its own for each chunk
        trial = SearchTrial(trial_config(spec, folder, optimum=None, report_every=100, cpus=1))
        reports.append(trial.step())
        trial.stop()
    assert [(each["chunk"], each["calls"]) for each in reports] == [(1, 8), (2, 16), (3, 24), (4, 32), (5, 40)]
    moved = finished_summary(folder)
    run = SearchRun(spec, tmp_path / "straight")
    run.advance(40)
    assert moved is not None
    assert moved["digest"] == run.finish()["digest"]


def test_a_trial_that_starts_again_after_the_runs_end_reports_the_same(trial: SearchTrial) -> None:
    while not (last := trial.step())["done"]:
        pass
    trial.reset_config(trial.config)
    assert trial.step() == last
