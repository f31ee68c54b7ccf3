"""`search --resume`: a search by itself goes on where it stopped, as if it never had."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.rows import COMPACT_FILE
from raysearch.answers import searched as running
from raysearch.base.errors import InputError, Interrupted
from raysearch.cli.commands.search import search_workload
from raysearch.runs.records import HEAD_FILE, SUMMARY_FILE
from raysearch.runs.run import SearchRun
from raysearch.studies.results import read_study_runs, verify

BUDGET = 120


def searched(workload: Path, out: Path, *, resume: bool = False, seed: int = 0) -> None:
    spec = {"workload": str(workload), "searcher": "annealing", "seed": seed, "budget": BUDGET}
    search_workload(**spec, out=out, resume=resume, as_json=True)


@pytest.fixture
def stopped(tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search that saved itself after each report and was stopped after 60 calls."""
    advance = SearchRun.advance

    def until_stopped(self: SearchRun, calls: int) -> None:
        if self.calls >= BUDGET / 2:
            raise Interrupted(signal.SIGTERM)
        advance(self, calls)

    monkeypatch.setattr(running, "SAVE_EVERY_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(SearchRun, "advance", until_stopped)
        with pytest.raises(Interrupted, match=r"60 of 120 calls, all kept in .* --resume continues"):
            searched(tiny_workload, tmp_path / "out")
    return tmp_path / "out"


def test_a_stopped_search_ends_as_if_it_had_never_been(tiny_workload: Path, tmp_path: Path, stopped: Path) -> None:
    searched(tiny_workload, stopped, resume=True)
    searched(tiny_workload, tmp_path / "straight")
    (resumed,), (straight,) = read_study_runs(stopped), read_study_runs(tmp_path / "straight")
    assert resumed["digest"] == straight["digest"]
    searched(tiny_workload, stopped, resume=True)  # once more: it is finished, and says so


def test_another_search_is_not_gone_on_with(tiny_workload: Path, tmp_path: Path, stopped: Path) -> None:
    with pytest.raises(InputError, match="contains another search: seed 0, not 1; resume with the same options"):
        searched(tiny_workload, stopped, resume=True, seed=1)
    with pytest.raises(InputError, match="nothing to resume in"):
        searched(tiny_workload, tmp_path / "empty", resume=True)
    with pytest.raises(InputError, match="--resume needs --out"):
        search_workload(workload=str(tiny_workload), searcher="annealing", resume=True)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")


@pytest.mark.parametrize("name", [HEAD_FILE, SUMMARY_FILE, COMPACT_FILE])
@pytest.mark.parametrize("damage", [Path.unlink, spoil])
def test_a_finished_search_that_was_damaged_is_made_again(
    tiny_workload: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    searched(tiny_workload, tmp_path)
    whole = json.loads(capsys.readouterr().out)
    damage(tmp_path / name)
    searched(tiny_workload, tmp_path, resume=True)
    printed = capsys.readouterr().out
    again = json.loads(printed)
    assert [again[key] for key in ("digest", "best", "calls")] == [whole[key] for key in ("digest", "best", "calls")]
    if (name, damage) != (SUMMARY_FILE, Path.unlink):  # without its summary it is only unfinished
        assert "the search is made again" in caplog.text
    assert verify(tmp_path).damaged == {}
