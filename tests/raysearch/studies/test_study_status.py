"""The status of a study, read while it runs, when it was stopped and when it is done."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysearch.base.errors import InputError
from raysearch.cli.commands import status as status_command
from raysearch.cli.commands.status import show_status
from raysearch.processes.claim import claimed, in_use
from raysearch.runs.run import SearchRun
from raysearch.studies.journal import JOURNAL_FILE, Journal
from raysearch.studies.study_file import load_study, run_dir, write_study
from raysearch.studies.study_status import StudyStatus, read_status


def study_file(folder: Path, workload: Path, **changes: Any) -> Path:
    keys = {"name": "s", "workloads": [str(workload)], "searchers": ["random", "megatron"], "seeds": [0, 1]}
    keys |= {"budget": 60, **changes}
    path = folder / "study.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


@pytest.fixture
def out(tiny_workload: Path, tmp_path: Path) -> Path:
    """A study with one run finished, one 20 calls on, one that failed at once, and one that never began."""
    study = load_study(study_file(tmp_path, tiny_workload))
    write_study(study, {str(tiny_workload): 800.0}, tmp_path / "out")
    journal = Journal(tmp_path / "out")
    specs = study.specs()
    for run_id, calls in (("tiny-megatron-s0", 60), ("tiny-random-s0", 20)):
        journal.started(run_id)
        run = SearchRun(specs[run_id], run_dir(tmp_path / "out", run_id), optimum=800.0)
        run.advance(calls)
        if run.done:
            run.finish()
            journal.finished(run_id)
        run.close()
    journal.started("tiny-random-s1")
    journal.failed("tiny-random-s1")
    return tmp_path / "out"


def states(status: StudyStatus) -> dict[str, str]:
    return {run.run_id: run.state for run in status.runs}


def test_a_live_study_has_runs_under_way_and_a_forecast(out: Path) -> None:
    with claimed(out, resume=True):
        status = read_status(out)
    assert status.state == "running"
    assert states(status) == {
        "tiny-random-s0": "running",
        "tiny-megatron-s0": "finished",
        "tiny-random-s1": "failed",
        "tiny-megatron-s1": "waiting",
    }
    assert [(run.calls, run.budget) for run in status.runs] == [(20, 60), (16, 16), (0, 60), (0, 16)]
    under_way, finished, *_ = status.runs
    assert finished.fraction_of_optimum == finished.best / 800.0
    assert under_way.fraction_of_optimum == under_way.best / 800.0
    assert status.remaining_s is not None
    assert status.remaining_s > 0
    assert [run.best for run in status.best()] == [max(run.best for run in status.runs)]
    assert status.changed_s is not None
    assert abs(time.time() - status.changed_s) < 60


def test_a_study_that_stopped_tells_what_failed_and_what_was_cut_short(out: Path) -> None:
    status = read_status(out)
    assert (status.state, status.remaining_s) == ("failed", None)
    assert states(status)["tiny-random-s0"] == "interrupted"


def test_a_study_that_goes_on_starts_from_waiting_runs(out: Path) -> None:
    with claimed(out, resume=True):
        Journal(out)
        status = read_status(out)
    assert set(states(status).values()) == {"finished", "waiting"}
    assert status.runs[0].calls == 20


def test_half_a_row_and_half_an_event_do_not_count(out: Path) -> None:
    for path in (out / "runs/tiny-random-s0/rows.jsonl", out / JOURNAL_FILE):
        with path.open("ab") as file:
            file.write(b'{"run_id": "tiny-ran')
    status = read_status(out)
    assert (status.runs[0].calls, status.runs[0].state) == (20, "interrupted")


@pytest.mark.parametrize(
    "line", [b'{"at": "2026-01-01", "event": "started", "run": [1]}\n', b"[" * 100_000 + b"\n", b'{"at": 1e999}\n']
)
def test_a_line_that_is_no_event_is_passed_over(out: Path, line: bytes) -> None:
    before = read_status(out)
    with (out / JOURNAL_FILE).open("ab") as file:
        file.write(line)
    assert states(read_status(out)) == states(before)


def test_damage_is_reported_and_a_folder_without_results_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results in"):
        read_status(tmp_path)
    (out / "runs/tiny-random-s0/rows.jsonl").write_text("garbage\n")
    (damaged,) = (run for run in read_status(out).runs if run.state == "damaged")
    assert damaged.run_id == "tiny-random-s0"
    assert "rows.jsonl, line 1 is damaged" in damaged.damage


def test_looking_neither_claims_a_folder_nor_keeps_others_from_it(tmp_path: Path) -> None:
    assert not in_use(tmp_path)
    with claimed(tmp_path):
        assert in_use(tmp_path)
        with pytest.raises(InputError, match="in use by another"), claimed(tmp_path):
            pass
    assert not in_use(tmp_path)


def test_a_search_by_itself_has_a_status_too(
    tiny_workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = next(iter(load_study(study_file(tmp_path, tiny_workload)).specs().values()))
    run = SearchRun(spec, tmp_path / "run", optimum=800.0)
    run.advance(30)
    assert states(read_status(tmp_path / "run")) == {"tiny-random-s0": "interrupted"}
    with claimed(tmp_path / "run", resume=True):
        assert read_status(tmp_path / "run").state == "running"
    run.advance(30)
    run.finish()
    show_status(path=tmp_path / "run", assignments=["watch"])  # ends at once: nothing runs
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'run'}: finished, 1 of 1 runs finished, 60 of 60 calls, last" in " ".join(shown.split())
    assert shown.strip().splitlines()[-1].split()[:4] == ["tiny-random-s0", "finished", "60", "60"]


def test_a_study_with_an_own_searcher_has_a_status(tiny_workload: Path, tmp_path: Path) -> None:
    searchers = ["raysearch.searchers.random:RandomSearcher", "random"]
    study = load_study(study_file(tmp_path, tiny_workload, searchers=searchers, seeds=[0]))
    write_study(study, {str(tiny_workload): 800.0}, tmp_path / "out")
    assert [(run.workload, run.searcher) for run in read_status(tmp_path / "out").runs] == [
        ("tiny", searcher) for searcher in searchers
    ]


@pytest.mark.parametrize("kind", ["link", "other name", "link to nothing", "pipe"])
def test_a_journal_that_is_somebody_elses_file_is_not_written_to(out: Path, tmp_path: Path, kind: str) -> None:
    (theirs := tmp_path / "theirs").write_text("theirs\n")
    (journal := out / JOURNAL_FILE).unlink(missing_ok=True)
    match kind:
        case "link":
            journal.symlink_to(theirs)
        case "other name":
            journal.hardlink_to(theirs)
        case "link to nothing":
            journal.symlink_to(tmp_path / "new")
        case _:
            os.mkfifo(journal)
    Journal(out).started("tiny-random-s0")
    assert (theirs.read_text(), (tmp_path / "new").exists()) == ("theirs\n", False)
    assert [json.loads(line)["event"] for line in journal.read_text().splitlines()] == ["begun", "started"]


def test_watching_looks_again_until_nothing_runs(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = claimed(out, resume=True)
    claim.__enter__()
    # A clock of the command's own: threads of other libraries sleep by `time.sleep` too.
    clock = SimpleNamespace(sleep=lambda _: claim.__exit__(None, None, None), time=time.time)
    monkeypatch.setattr(status_command, "time", clock)
    show_status(path=out, assignments=["watch"], as_json=True)
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["running", "failed"]
