"""Studies of a plugged-in simulator, whose workers live beside the runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from raysearch.errors import InputError, RunFailed
from raysearch.results import read_runs
from raysearch.run import SearchRun
from raysearch.study import Study, StudyFile, check_study, run_dir
from raysearch.study_display import StudyBars

BOXES = "tests.raysearch.simulators.boxes:"
pytestmark = pytest.mark.slow


def study(box: str | None, **other) -> Study:
    given = {"name": "boxes", "workloads": ["gpt_moe_1_2t_16k"], "searchers": ["random", "annealing"], "seeds": [0]}
    return check_study(StudyFile(**{**given, "budget": 40, "simulator": BOXES + box if box else None, **other}))


def run(planned: Study, out: Path) -> None:
    from raysearch.tuning import run_study

    out.mkdir()
    with StudyBars("boxes", planned.specs(), {}) as bars:
        run_study(planned, dict.fromkeys(planned.workloads), out, display=bars)


def test_a_study_of_a_black_box_makes_the_calls_that_its_runs_make_alone(tmp_path: Path) -> None:
    planned = study("hilly", workers=2)
    run(planned, tmp_path / "study")
    found = {each["run_id"]: each for each in read_runs(tmp_path / "study")}
    assert set(found) == set(planned.specs())
    for run_id, spec in planned.specs().items():
        with contextlib.closing(SearchRun(spec, tmp_path / run_id)) as alone:
            alone.advance(spec.budget)
            assert alone.summary()["digest"] == found[run_id]["digest"]
        assert found[run_id]["optimum"] is None


def test_a_black_box_that_fails_ends_its_runs_with_the_strategy_and_the_reason(tmp_path: Path) -> None:
    planned = study("raises", budget=300, searchers=["random"])
    with pytest.raises(RunFailed, match=r"batch=64.*no such batch"):
        run(planned, tmp_path / "study")
    assert (run_dir(tmp_path / "study", "gpt_moe_1_2t_16k-random-s0") / "rows.jsonl").is_file()


def test_more_workers_than_the_cluster_has_are_refused_with_what_fits(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs 13 CPUs .* the cluster has 9: run with --workers 8"):
        run(study(None, workers=12), tmp_path / "study")


def test_a_plugged_in_simulator_gets_a_worker_and_ours_none() -> None:
    assert study("hilly").file.workers_per_run == 1
    assert study(None).file.workers_per_run == 0
