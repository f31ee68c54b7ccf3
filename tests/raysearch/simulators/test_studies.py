"""Studies of a plugged-in simulator, whose workers live beside the runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from envs.rows import read_rows
from raysearch.base.errors import InputError, RunFailed
from raysearch.runs.in_flight import recorded_order
from raysearch.runs.run import SearchRun
from raysearch.simulators.plugin import load_plugin
from raysearch.simulators.protocol import InProcess
from raysearch.studies.results import read_study_runs
from raysearch.studies.study_display import Displays, StudyBars, StudyDisplay
from raysearch.studies.study_file import Study, StudyFile, check_study, run_dir
from tests.conftest import run_here
from tests.processes import LONGEST_S, descendants, wait_until
from tests.raysearch.simulators.boxes import BAD_BATCH, blocked_processes

BOXES = "tests.raysearch.simulators.boxes:"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_of_nine")]


def study(box: str | None, **other) -> Study:
    given = {"name": "boxes", "workloads": ["gpt_moe_1_2t_16k"], "searchers": ["random", "annealing"], "seeds": [0]}
    return check_study(StudyFile(**{**given, "budget": 40, "simulator": BOXES + box if box else None, **other}))


def run(planned: Study, out: Path, *others: StudyDisplay) -> None:
    from raysearch.studies.tuning import run_study

    out.mkdir()
    with StudyBars("boxes", planned.specs(), {}) as bars:
        run_study(planned, dict.fromkeys(planned.workloads), out, display=Displays(bars, *others))


def digests(out: Path) -> dict[str, str]:
    """Of the runs of a finished study by run id; each of them has every call once."""
    runs = {each["run_id"]: each for each in read_study_runs(out)}
    for run_id, each in runs.items():
        assert each["complete"]
        assert each["optimum"] is None
        assert read_rows(run_dir(out, run_id))["call"].tolist() == list(range(1, each["budget"] + 1))
    return {run_id: each["digest"] for run_id, each in runs.items()}


def digests_alone(planned: Study, box: str, folder: Path, study_folder: Path) -> dict[str, str]:
    """Of the same runs, each made in this process by itself, their answers in the order of the study's rows."""
    found = {}
    for run_id, spec in planned.specs().items():
        simulator, order = InProcess(load_plugin(BOXES + box)), recorded_order(run_dir(study_folder, run_id))
        with contextlib.closing(SearchRun(spec, folder / run_id, simulator=simulator, order=order)) as alone:
            alone.advance(spec.budget)
            found[run_id] = alone.summary()["digest"]
    return found


def test_a_worker_and_a_run_killed_in_mid_call_change_nothing(tmp_path: Path, log: Path) -> None:
    planned = study("kept", workers=2, searchers=["random"], timeout_s=LONGEST_S)
    over = threading.Event()
    killer = threading.Thread(target=kill, args=(log, over), daemon=True)
    killer.start()
    try:
        run(planned, tmp_path / "study")
    finally:
        over.set()
    killer.join()
    assert all(blocked.is_symlink() for blocked in blocked_processes(log))
    assert digests(tmp_path / "study") == digests_alone(planned, "hilly", tmp_path, tmp_path / "study")


def kill(log: Path, over: threading.Event) -> None:
    """Kills the first worker that `kept` keeps, then the run that waits for the second one; both workers must end.

    However long the study takes to come to it, it comes before the study is over.
    """
    for victim, blocked in zip(("worker", "run"), blocked_processes(log), strict=True):
        while not blocked.is_symlink():
            assert not over.wait(0.02)
        worker = int(os.readlink(blocked))
        titles = descendants(os.getpid())
        assert "ray::SimulatorWorker.evaluate" in titles[worker]
        (waiting,) = [pid for pid, title in titles.items() if "ray::gpt_moe_1_2t_16k-random" in title]
        os.kill(worker if victim == "worker" else waiting, signal.SIGKILL)
        wait_until(lambda worker=worker: worker not in descendants(os.getpid()))


def test_a_black_box_that_fails_ends_its_runs_with_the_strategy_and_the_reason(tmp_path: Path) -> None:
    # Further ways to fail are those of a run: tests/raysearch/simulators/test_workers.py.
    planned = study("dies", budget=300, searchers=["random"], timeout_s=1.0, retries=0)
    with pytest.raises(RunFailed, match=r"failed on Strategy\(.*batch=64.*process died"):
        run(planned, tmp_path / "study")
    rows = read_rows(run_dir(tmp_path / "study", "gpt_moe_1_2t_16k-random-s0"))
    assert rows["call"].tolist() == list(range(1, len(rows) + 1))
    assert 64 not in rows["batch"].tolist()


def test_a_study_of_an_rllib_agent_goes_on_after_calls_that_never_return(tmp_path: Path) -> None:
    agent = {"searchers": ["ppo_paper"], "seeds": [3], "budget": 5}
    run(study("hangs", **agent, timeout_s=1.0, retries=0, on_failure="infeasible"), tmp_path / "study")
    rows = read_rows(run_dir(tmp_path / "study", "gpt_moe_1_2t_16k-ppo_paper-s3"))
    assert rows["call"].tolist() == list(range(1, 6))
    assert set(rows["violations"][rows["batch"] == BAD_BATCH]) == {"failed"}


class Starts(StudyDisplay):
    """Keeps the order in which runs start."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def started(self, run_id: str) -> None:
        self.seen.append(run_id)


def test_workloads_take_turns_no_run_shares_its_worker_and_all_make_the_calls_that_they_make_alone(
    tmp_path: Path, log: Path
) -> None:
    names = ["gpt_moe_1_2t_16k", "gpt_moe_1_6t_64k"]
    planned = study("hilly", workloads=names, seeds=[3], cpus_per_run=3, budget=12)
    starts = Starts()
    run(planned, tmp_path / "study", starts)
    turns = [starts.seen[:2], starts.seen[2:]]  # two runs at a time have room
    assert [sorted(turn) for turn in turns] == [
        [f"{name}-{searcher}-s3" for name in names] for searcher in planned.file.searchers
    ]
    asked = {tuple(line.split()[:2]) for line in log.read_text(encoding="utf-8").splitlines()}
    workers = {name: {process for workload, process in asked if workload == name} for name in names}
    assert [len(workers[name]) for name in names] == [2, 2]  # one for each run
    assert not workers[names[0]] & workers[names[1]]
    assert digests(tmp_path / "study") == digests_alone(planned, "hilly", tmp_path, tmp_path / "study")


def test_more_cpus_than_the_cluster_has_are_refused_with_what_fits(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs 13 CPUs .* the cluster has 9: run with --set workers=8"):
        run(study(None, workers=12), tmp_path / "study")
    text = 'name = "a"\nworkloads = ["gpt_moe_1_2t_16k"]\nsearchers = ["random"]\nseeds = [0]\nbudget = 5\n'
    (tmp_path / "study.toml").write_text(f"{text}cpus_per_run = 10\n")
    refused = run_here("study", tmp_path / "study.toml", "--out", tmp_path / "out")
    assert refused.returncode == 2
    assert "asks for 10 CPUs" in refused.stderr
    assert "cpus_per_run" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_plugged_in_simulator_gets_a_worker_and_ours_none() -> None:
    assert study("hilly").file.workers_per_run == 1
    assert study(None).file.workers_per_run == 0
    with pytest.raises(InputError, match="needs workers: expected >= 1, got 0"):
        study("hilly", workers=0)
