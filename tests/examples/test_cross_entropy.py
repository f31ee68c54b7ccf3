"""A searcher of one's own, from its conformance to the tables of a study."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from raysearch.testing import SearcherSuite
from tests.conftest import CHECKOUT, Command

NAME = "examples.cross_entropy:CrossEntropy"
STUDY = """
name = "mine"
workloads = ["{workload}"]
searchers = ["random", "mine:CrossEntropy"]
seeds = [0]
budget = 60
[options."mine:CrossEntropy"]
drawn = 20
"""


class TestCrossEntropy(SearcherSuite):
    searcher = NAME


def test_a_search_takes_it_and_goes_on_only_with_the_same_code(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    words = ("search", "-w", tiny_workload, "-b", "40", "--json")
    found = json.loads(raysearch(*words, "-s", NAME, "--out", tmp_path / "out").stdout)
    assert (found["searcher"], found["calls"]) == (NAME, 40)
    assert found["run_id"] == "tiny-examples.cross_entropy.CrossEntropy-s0"
    head = json.loads((tmp_path / "out/run.json").read_text())
    assert list(head["code"]) == [NAME]
    again = raysearch(*words, "-s", NAME, "--out", tmp_path / "out", "--resume")
    assert json.loads(again.stdout)["digest"] == found["digest"]


@pytest.mark.slow
def test_a_study_runs_it_in_its_actors_and_refuses_to_go_on_with_other_code(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    shutil.copy(CHECKOUT / "examples/cross_entropy.py", tmp_path / "mine.py")
    (tmp_path / "study.toml").write_text(STUDY.replace("{workload}", str(tiny_workload)))
    done = raysearch("study", "study.toml", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {row["searcher"] for row in report["scores"]} == {"random", "mine:CrossEntropy"}
    assert all(run["complete"] for run in report["runs"])
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    refused = raysearch("study", "study.toml", "--out", "out", "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert "the code of mine:CrossEntropy has changed since" in refused.stderr
    trusted = raysearch(
        "study", "study.toml", "--out", "out", "--resume", "--set", "trust_code", "--json", cwd=tmp_path
    )
    assert trusted.returncode == 0, trusted.stderr
