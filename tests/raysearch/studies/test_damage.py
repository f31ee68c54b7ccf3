"""Every file of a study is deleted, cut, flipped, swapped, emptied or replaced: it is noticed, or it does not matter.

The rule: what a study says after --resume is bit for bit what an undisturbed one says, or it is a clear refusal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.calls import CallRow
from envs.rows import ROWS_FILE, RowWriter, read_rows
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import aside, write_record
from raysearch.cli.commands.verify import verify_results
from raysearch.reports.study_report import read_report
from raysearch.runs.checkpoint import load_checkpoint, write_checkpoint
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun, finished_summary
from raysearch.studies.damage import set_aside_damaged
from raysearch.studies.results import read_study_runs, survey, verify
from raysearch.studies.study_file import Study, StudyFile, check_same_study, check_study, run_dir, write_study
from raysearch.studies.study_status import read_status

FINISHED, OTHER, UNDER_WAY = "tiny-random_walk-s0", "tiny-random_walk-s1", "tiny-annealing-s0"
SAVED, MADE, BUDGET = 5, 9, 12


@pytest.fixture(scope="module")
def study(tiny_workload: Path) -> Study:
    file = StudyFile(
        name="s", workloads=(str(tiny_workload),), searchers=("random_walk", "annealing"), seeds=(0, 1), budget=BUDGET
    )
    return check_study(file)


@pytest.fixture(scope="module")
def begun(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was killed: two runs are finished, one is under way with calls beyond its checkpoint, one waits."""
    out = tmp_path_factory.mktemp("study") / "out"
    write_study(study, dict.fromkeys(study.workloads), out)
    for run_id in (FINISHED, OTHER, UNDER_WAY):
        run = SearchRun(study.specs()[run_id], run_dir(out, run_id))
        if run_id == UNDER_WAY:
            run.advance(SAVED)
            run.save()
            run.advance(MADE - SAVED)
            run.close()
        else:
            run.advance(BUDGET)
            run.finish()
    return out


@pytest.fixture
def out(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "out"))


@pytest.fixture(scope="module")
def undisturbed(study: Study, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of all runs of the same study that nobody stopped or damaged."""
    out = Path(shutil.copytree(begun, tmp_path_factory.mktemp("whole") / "out"))
    return go_on(study, out)


def go_on(study: Study, out: Path) -> dict[str, str]:
    """What a study does on --resume, without Ray; the digests it ends with."""
    set_aside_damaged(out)
    for run_id, spec in study.specs().items():
        if finished_summary(run_dir(out, run_id)) is None:
            run = SearchRun(spec, run_dir(out, run_id), resume=True)
            run.advance(BUDGET)
            run.finish()
    assert survey(out).damaged == {}
    return {run["run_id"]: run["digest"] for run in read_study_runs(out)}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "delete": Path.unlink,
    "truncate": halve,
    "flip": flip,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(200)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "foreign": lambda path: path.write_text('{"a": 1}\n'),
    "pipe": become_a_pipe,
}
FILES = {"run.json": "checkpoint.bin", "summary.json": "run.json", "rows.parquet": "rows.jsonl"}
"""Of the finished run, and of the one under way."""


EVERYWHERE = ("delete", "flip", "foreign", "pipe")
"""Of the others one for each file: all of them are met by what reads records, checkpoints and rows alike."""
CASES = [
    *((name, damage) for name in FILES for damage in EVERYWHERE),
    ("run.json", "truncate"),
    ("run.json", "nested"),
    ("summary.json", "garbage"),
    ("rows.parquet", "empty"),
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damaged_files_of_runs_are_noticed_and_the_study_ends_as_if_they_had_not_been(
    study: Study, out: Path, undisturbed: dict[str, str], name: str, damage: str
) -> None:
    noticed: set[str] = set()
    for run_id, file in ((FINISHED, name), (UNDER_WAY, FILES[name])):
        DAMAGE[damage](out / "runs" / run_id / file)
        # Without its summary a run is one under way, and without its checkpoint it starts again.
        if (file, damage) != ("summary.json", "delete") and (file != "checkpoint.bin" or damage == "pipe"):
            noticed.add(run_id)
    found = survey(out)
    if name == "run.json":
        assert noticed <= found.damaged.keys() <= noticed | {UNDER_WAY}
        assert damage != "pipe" or "no regular file" in found.damaged[UNDER_WAY]
    else:
        assert found.damaged.keys() == noticed
        assert {run.run_id for run in read_status(out).runs if run.state == "damaged"} == noticed
    named = noticed if name != "run.json" else noticed - {UNDER_WAY}
    assert all(str(out / "runs" / run_id) in found.damaged[run_id] for run_id in named)
    if damage == "flip":
        assert not read_report(out).complete
    assert go_on(study, out) == undisturbed


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in ("delete", "pipe")])
def test_a_damaged_record_of_a_study_is_refused(out: Path, damage: str) -> None:
    DAMAGE[damage](out / "study.json")
    for read in (survey, set_aside_damaged, read_status, read_report):
        with pytest.raises(InputError, match=r"study\.json is damaged"):
            read(out)


@pytest.mark.parametrize("forged", [{"searchers": 7}, {"budget": "x"}, {"seeds": None}])
def test_a_record_of_a_study_that_says_nothing_of_use_is_refused(out: Path, forged: dict[str, object]) -> None:
    record = json.loads((out / "study.json").read_text())
    del record["sha256"]
    write_record(out / "study.json", {**record, "study": {**record["study"], **forged}})
    for read in (survey, set_aside_damaged, read_status, read_report):
        with pytest.raises(InputError, match=r"study\.json is damaged.*study\." + next(iter(forged))):
            read(out)


def test_a_study_whose_runs_lie_elsewhere_is_refused(out: Path) -> None:
    record = json.loads((out / "study.json").read_text())
    del record["sha256"]
    (out.parent / "mine").mkdir()
    write_record(out / "study.json", {**record, "runs": [*record["runs"], "../../mine"]})
    for read in (survey, set_aside_damaged, read_status, read_report):
        with pytest.raises(InputError, match=r"study\.json is damaged.*names its folder"):
            read(out)
    assert (out.parent / "mine").is_dir()


def test_a_study_is_gone_on_with_only_by_its_own_runs(study: Study, out: Path) -> None:
    record = json.loads((out / "study.json").read_text())
    del record["sha256"]
    for forged in ({"runs": record["runs"][:-1]}, {"budgets": dict.fromkeys(record["runs"], 7)}):
        write_record(out / "study.json", {**record, **forged})
        with pytest.raises(InputError, match="its runs are not those of its study"):
            check_same_study(study, out)
    write_record(out / "study.json", {**record, "runs": ["tiny-other-s9"]})
    with pytest.raises(InputError, match="it has no run 'tiny-other-s9'"):
        read_status(out)


def test_strategies_that_do_the_same_count_once_when_rows_are_worked_out_again(tmp_path: Path) -> None:
    run = SearchRun(RunSpec("gpt_moe_1_2t_16k", "annealing", seed=0, budget=300), tmp_path)
    run.advance(300)
    unique = run.finish()["unique_calls"]
    assert unique < len(read_rows(tmp_path).drop_duplicates(["tp", "ep", "pp", "batch", "dims"]))
    assert verify(tmp_path).damaged == {}


def swap_lines(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3], lines[7] = lines[7], lines[3]
    path.write_bytes(b"".join(lines))


def double_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[4], *lines[5:]]))


def lose_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))


def alter_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"feasible": false', b'"feasible": true', 1))


@pytest.mark.parametrize("damage", [swap_lines, double_line, lose_line, alter_line])
def test_rows_that_were_moved_or_altered_are_made_again(
    study: Study, out: Path, undisturbed: dict[str, str], damage: Callable[[Path], None]
) -> None:
    damage(out / "runs" / UNDER_WAY / ROWS_FILE)
    assert "does not follow from the lines before it" in survey(out).damaged[UNDER_WAY]
    assert go_on(study, out) == undisturbed


def test_garbage_beyond_the_checkpoint_costs_nothing_but_those_calls(
    study: Study, out: Path, undisturbed: dict[str, str]
) -> None:
    with (out / "runs" / UNDER_WAY / ROWS_FILE).open("ab") as file:
        file.write(b"garbage\n")
    run = SearchRun(study.specs()[UNDER_WAY], run_dir(out, UNDER_WAY), resume=True)
    assert run.calls == SAVED
    run.close()
    assert go_on(study, out) == undisturbed


def test_rows_that_were_cut_below_the_checkpoint_are_noticed_and_made_again(
    study: Study, out: Path, undisturbed: dict[str, str]
) -> None:
    path = out / "runs" / UNDER_WAY / ROWS_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: SAVED - 1]))
    what = f"it has {SAVED - 1} rows, but was saved after {SAVED} calls"
    assert what in survey(out).damaged[UNDER_WAY]
    assert [run.run_id for run in read_status(out).runs if what in run.damage] == [UNDER_WAY]
    assert go_on(study, out) == undisturbed


def test_rows_that_were_altered_and_chained_anew_are_noticed_and_made_again(
    study: Study, out: Path, undisturbed: dict[str, str]
) -> None:
    path = out / "runs" / UNDER_WAY / ROWS_FILE
    rows = [CallRow(*values) for values in read_rows(path.parent).itertuples(index=False)]
    rows[3] = rows[3]._replace(tokens_per_s_per_gpu=1e6, best_so_far=1e6)
    path.unlink()
    with contextlib.closing(RowWriter(path)) as writer:
        for row in rows:
            writer.write(row)
    what = f"it has other rows, but was saved after {SAVED} calls"
    assert what in survey(out).damaged[UNDER_WAY]
    assert [run.run_id for run in read_status(out).runs if what in run.damage] == [UNDER_WAY]
    assert go_on(study, out) == undisturbed


@pytest.mark.parametrize("files", [["rows.parquet"], ["summary.json"], ["run.json", "summary.json", "rows.parquet"]])
def test_files_that_two_runs_have_exchanged_are_noticed(
    study: Study, out: Path, undisturbed: dict[str, str], files: list[str]
) -> None:
    mine, other = run_dir(out, FINISHED), run_dir(out, OTHER)
    for name in files:
        content = (mine / name).read_bytes()
        (mine / name).write_bytes((other / name).read_bytes())
        (other / name).write_bytes(content)
    assert set(survey(out).damaged) == {FINISHED, OTHER}
    assert go_on(study, out) == undisturbed


@pytest.mark.parametrize("name", [".", "checkpoint.bin"], ids=["folders", "checkpoints"])
def test_what_two_runs_under_way_have_exchanged_is_made_again_run_by_run(
    study: Study, out: Path, undisturbed: dict[str, str], name: str
) -> None:
    other = "tiny-annealing-s1"
    run = SearchRun(study.specs()[other], run_dir(out, other))
    run.advance(SAVED)
    run.save()
    run.close()
    places = [run_dir(out, run_id) / name for run_id in (UNDER_WAY, other)]
    for source, target in zip([*places, out / "held"], [out / "held", *places], strict=True):
        source.rename(target)
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}
    assert set(verify(out).damaged) == set(survey(out).damaged) | {UNDER_WAY, other} == {UNDER_WAY, other}
    assert go_on(study, out) == undisturbed
    assert {path.name for path in (out / "damaged").iterdir()} == {f"{UNDER_WAY}.0", f"{other}.0"}
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_an_edited_best_is_noticed_even_with_a_seal_of_its_own(
    study: Study, out: Path, undisturbed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from raysearch.base.file_io import SEAL, write_record

    path = out / "runs" / FINISHED / "summary.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "best": fields["best"] + 1}))
    assert "altered since it was written" in survey(out).damaged[FINISHED]
    del fields[SEAL]
    write_record(path, {**fields, "best": fields["best"] + 1})
    assert survey(out).damaged == {}
    with pytest.raises(RunFailed, match=rf"{FINISHED} is damaged: its rows say best "):
        verify_results(out)
    assert f"2 runs with {BUDGET + MADE} calls verified: unchanged" in capsys.readouterr().out


def test_what_is_put_aside_takes_the_first_free_name(tmp_path: Path) -> None:
    (tmp_path / "run.1").mkdir()  # somebody has cleaned up
    aside(tmp_path / "run").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.0", "run.1"]
    assert aside(tmp_path / "run").name == "run.2"


def test_a_run_of_another_study_is_put_aside(study: Study, out: Path, undisturbed: dict[str, str]) -> None:
    shutil.copytree(run_dir(out, FINISHED), run_dir(out, "tiny-random_walk-s9"))
    assert "is not a run of this study" in survey(out).damaged["tiny-random_walk-s9"]
    assert go_on(study, out) == undisturbed
    assert [path.name for path in (out / "damaged").iterdir()] == ["tiny-random_walk-s9.0"]


def test_a_whole_study_is_verified(study: Study, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_results(out)
    assert capsys.readouterr().out == f"3 runs with {2 * BUDGET + MADE} calls verified: unchanged\n"


def test_a_stray_line_beside_a_finished_run_costs_that_run_alone(
    study: Study, out: Path, undisturbed: dict[str, str]
) -> None:
    (out / "runs" / FINISHED / ROWS_FILE).write_text('{"call": 1}\n')
    (out / "runs" / OTHER / ROWS_FILE).write_text("")
    assert set(survey(out).damaged) == {FINISHED, OTHER}
    report = read_report(out)
    assert [run["run_id"] for run in report.runs] == [UNDER_WAY]
    assert set(report.damaged) == {FINISHED, OTHER}
    assert go_on(study, out) == undisturbed
    assert sorted(path.name for path in (out / "damaged").iterdir()) == [f"{FINISHED}.0", f"{OTHER}.0"]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("improvements", [[1000000000, 1.0]], "improvements at ascending calls"),
        ("budget", -1, "budget"),
        ("best", 1e300, "best"),
    ],
)
def test_what_no_run_can_have_found_is_named_and_left_out_of_the_report(
    out: Path, key: str, value: object, what: str
) -> None:
    path = out / "runs" / FINISHED / "summary.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    write_record(path, {**fields, key: value})
    report = read_report(out)
    assert list(report.damaged) == [FINISHED]
    assert what in report.damaged[FINISHED]
    assert not report.complete


@pytest.mark.parametrize("size_bytes", [10**30, 10**18, -1])
def test_a_seal_of_more_bytes_than_there_are_is_noticed_and_the_run_made_again(
    study: Study, out: Path, undisturbed: dict[str, str], size_bytes: int
) -> None:
    folder = run_dir(out, UNDER_WAY)
    state = load_checkpoint(folder)
    assert state
    content = hashlib.blake2b((folder / ROWS_FILE).read_bytes() if size_bytes > 0 else b"", digest_size=16).hexdigest()
    gate = {**state["gate"], "rows": {**state["gate"]["rows"], "size_bytes": size_bytes, "content": content}}
    write_checkpoint(folder, {**state, "gate": gate})
    assert list(verify(out).damaged) == [UNDER_WAY]
    assert go_on(study, out) == undisturbed


def test_verify_names_a_checkpoint_that_was_altered(out: Path) -> None:
    flip(out / "runs" / UNDER_WAY / "checkpoint.bin")
    assert "checkpoint.bin is damaged: its digest is not that of its content" in verify(out).damaged[UNDER_WAY]


def test_a_run_behind_a_link_is_put_aside_and_nothing_is_written_through_it(study: Study, out: Path) -> None:
    run_id = sorted(path.name for path in (out / "runs").iterdir())[0]
    elsewhere = out.parent / "elsewhere"
    (out / "runs" / run_id).rename(elsewhere)
    (out / "runs" / run_id).symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    found = survey(out)
    assert run_id in found.damaged
    assert run_id not in {run["run_id"] for run in found.runs}
    assert run_id in set_aside_damaged(out)
    assert (out / "damaged" / f"{run_id}.0").is_symlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_file_behind_a_link_is_damage(out: Path) -> None:
    run = sorted((out / "runs").iterdir())[0]
    (run / ROWS_FILE).rename(out.parent / "rows") if (run / ROWS_FILE).exists() else (out.parent / "rows").touch()
    (run / ROWS_FILE).symlink_to(out.parent / "rows")
    assert f"{ROWS_FILE} is no regular file" in survey(out).damaged[run.name]


def test_nothing_is_put_aside_behind_a_link(out: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "site-packages").mkdir()
    (out / "damaged").symlink_to(elsewhere)
    (out / "runs" / "numpy").mkdir()
    with pytest.raises(InputError, match="damaged is a link: expected a folder"):
        set_aside_damaged(out)
    assert list(elsewhere.iterdir()) == []


def test_runs_behind_a_link_are_refused(out: Path) -> None:
    (out / "runs").rename(out.parent / "elsewhere")
    (out / "runs").symlink_to(out.parent / "elsewhere")
    for look in (survey, set_aside_damaged):
        with pytest.raises(InputError, match="runs is a link: expected a folder"):
            look(out)
