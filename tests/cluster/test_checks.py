"""What a study asks before it starts, and a run on a node that was not there to be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysearch.base.errors import InputError, RunFailed
from raysearch.processes import cluster
from raysearch.runs.records import RunSpec
from raysearch.studies.trial import SearchTrial, trial_config


def nodes(*cpus: int) -> list[dict]:
    return [{"Alive": True, "Resources": {"CPU": float(count)} if count else {}} for count in cpus]


def test_a_run_must_fit_into_the_largest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes(2, 4))
    cluster.check_room(4)
    with pytest.raises(InputError, match="every run asks for 5 CPUs, but the largest node of this Ray has 4"):
        cluster.check_room(5)


def test_a_head_without_cpus_waits_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes(0))
    cluster.check_room(4)


def test_a_node_says_what_keeps_it_from_using_the_folder(tmp_path: Path) -> None:
    assert "does not see" in cluster._answer(str(tmp_path / "probe"), "a")
    (tmp_path / "probe").touch()
    assert cluster._answer(str(tmp_path / "probe"), "a") == ""
    assert (tmp_path / "probe-a").is_file()
    assert "cannot write there" in cluster._answer("/proc/version", "a")


def test_a_run_on_a_node_that_joined_later_and_does_not_see_the_study_stops(
    tiny_workload: Path, tmp_path: Path
) -> None:
    spec = RunSpec(str(tiny_workload), "random_walk", 0, 10)
    folder = tmp_path / "out/runs/tiny-random_walk-s0"
    trial = SearchTrial(trial_config(spec, folder, optimum=None, report_every=10, cpus=1))
    with pytest.raises(RunFailed, match=f"does not see the results folder {tmp_path / 'out'}"):
        trial.step()
    assert not (tmp_path / "out").exists()
