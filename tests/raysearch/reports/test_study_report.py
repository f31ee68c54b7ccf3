"""Reports: the scores by hand, unfinished runs from their rows, curves, explanations."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysearch.answers.reported import ReportResult
from raysearch.base.errors import InputError
from raysearch.base.limits import LARGEST_BUDGET
from raysearch.cli.commands.report import report_results
from raysearch.reports.learning_curves import read_curves
from raysearch.reports.study_report import NotExplained, best_runs, explain_best, read_report, score
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.studies.results import read_study_runs, study_frame
from raysearch.studies.study_file import StudyFile, check_study, run_dir, write_study


def run(searcher: str, best: float, *, seed: int = 0, workload: str = "w", **changes: Any) -> dict[str, Any]:
    return {
        "run_id": f"{workload}-{searcher}-s{seed}",
        "workload": workload,
        "searcher": searcher,
        "seed": seed,
        "calls": 100,
        "unique_calls": 80,
        "feasible_calls": 25,
        "best": best,
        "optimum": 400.0,
        "strategy": {"tp": 1} if best else None,
        "wall_s": 2.0,
        "complete": True,
        **changes,
    }


def test_scores_are_means_over_seeds_and_ratios_of_means() -> None:
    walks = [run("random_walk", 100.0), run("random_walk", 140.0, seed=1)]
    others = [run("annealing", 300.0), run("annealing", 300.0, seed=1)]
    best, walk = score([*walks, *others])
    assert (best["searcher"], best["best"], best["best_sd"]) == ("annealing", 300.0, 0.0)
    assert best["fraction_of_optimum"] == 0.75
    assert best["ratio"] == 300.0 / 120.0
    assert walk["best"] == 120.0
    assert walk["best_sd"] == pytest.approx(20.0 * 2**0.5)
    assert walk["ratio"] == 1.0
    assert best["ratio_bound"] == walk["ratio_bound"] == 400.0 / 120.0


def test_shares_are_of_all_calls_made() -> None:
    (row,) = score([run("a", 1.0), run("a", 1.0, seed=1, calls=300, unique_calls=300, feasible_calls=15)])
    assert row["unique_share"] == 380 / 400
    assert row["feasible_share"] == 40 / 400
    assert row["calls"] == 200


def test_each_workload_has_its_own_random_walk_and_the_given_order() -> None:
    runs = [run("a", 2.0, workload="z"), run("random_walk", 1.0, workload="z"), run("a", 9.0, workload="b")]
    rows = score(runs)
    assert [(row["workload"], row["searcher"]) for row in rows] == [("z", "a"), ("z", "random_walk"), ("b", "a")]
    assert rows[0]["ratio"] == 2.0
    assert rows[2]["ratio"] is None
    assert rows[2]["ratio_bound"] is None


def test_a_random_walk_that_found_nothing_gives_no_ratio() -> None:
    rows = score([run("random_walk", 0.0), run("a", 5.0)])
    assert [row["ratio"] for row in rows] == [None, None]


def test_without_an_optimum_there_is_no_fraction() -> None:
    (row,) = score([run("random_walk", 10.0, optimum=None)])
    assert row["fraction_of_optimum"] is None
    assert row["ratio_bound"] is None


def test_the_best_run_of_a_workload_found_something_feasible() -> None:
    first, second = run("a", 3.0), run("b", 3.0)
    assert best_runs([run("random_walk", 0.0), first, second, run("a", 0.0, workload="v")]) == [first]


@pytest.fixture(scope="module")
def search(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("search")
    made = SearchRun(RunSpec(str(tiny_workload), "megatron", 0, 100), folder, optimum=700.0)
    made.advance(100)
    made.finish()
    return folder


def test_an_unfinished_run_is_read_from_its_rows(tiny_workload: Path, tmp_path: Path, search: Path) -> None:
    going = SearchRun(RunSpec(str(tiny_workload), "megatron", 0, 100), tmp_path, optimum=700.0)
    going.advance(100)  # but never finished
    going.close()
    (unfinished,), (finished,) = read_study_runs(tmp_path), read_study_runs(search)
    assert not unfinished["complete"]
    for name in ("run_id", "calls", "unique_calls", "feasible_calls", "best", "fraction_of_optimum", "strategy"):
        assert unfinished[name] == finished[name]


def test_a_run_without_a_row_yet_has_zero_calls(tiny_workload: Path, tmp_path: Path) -> None:
    SearchRun(RunSpec(str(tiny_workload), "random", 0, 100), tmp_path).close()
    (row,) = study_frame(tmp_path).to_dict("records")
    assert (row["calls"], row["best"], row["strategy"]) == (0, 0.0, None)
    assert read_report(tmp_path).statistics is None
    report_results(tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_a_search_that_ends_without_an_evaluation_says_so(tiny_workload: Path, tmp_path: Path) -> None:
    ended = SearchRun(RunSpec(str(tiny_workload), "random", 0, 100), tmp_path)
    ended.finish()
    found = ReportResult.of(tmp_path)
    assert found.report.statistics is None
    assert "random (ended without an evaluation)" in str(found)


def test_an_interrupted_search_is_judged_by_the_calls_it_made(tiny_workload: Path, tmp_path: Path) -> None:
    going = SearchRun(RunSpec(str(tiny_workload), "megatron", 0, 100), tmp_path, optimum=700.0)
    going.advance(10)
    going.close()
    statistics = read_report(tmp_path).statistics
    assert statistics is not None
    assert statistics["budget"] == 10
    scores = statistics["searchers"]["megatron"]["scores"]
    assert scores == {"calls": [10], "value": [going._gate.best_raw / 700.0], "low": None, "high": None}
    assert statistics["searchers"]["megatron"]["curve_by_time"] is None  # not timed until it is finished


def test_the_best_strategy_is_explained_by_evaluating_it_again(search: Path) -> None:
    (run,) = read_study_runs(search)
    explained = explain_best(search, run)
    assert explained is not None
    workload, evaluation = explained
    assert workload.name == "tiny"
    assert evaluation.feasible
    assert evaluation.tokens_per_s_per_gpu == run["best"]


def test_a_workload_that_changed_is_not_explained(search: Path) -> None:
    (run,) = read_study_runs(search)
    with pytest.raises(NotExplained, match="its workload has changed"):
        explain_best(search, {**run, "config_hash": "other"})


def test_a_folder_without_results_is_refused(tmp_path: Path, search: Path) -> None:
    with pytest.raises(InputError, match="no results in"):
        read_study_runs(tmp_path)
    with pytest.raises(InputError, match="no results in"):
        study_frame(tmp_path / "nowhere")
    shutil.copy(search / "rows.parquet", tmp_path)
    with pytest.raises(InputError, match="no results in"):
        read_study_runs(tmp_path)


Damage = Callable[[bytes], bytes]


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def without(key: str) -> Damage:
    return lambda content: json.dumps({k: v for k, v in json.loads(content).items() if k != key}).encode()


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("complete", "name", "damage"),
    [
        (True, "run.json", half),
        (True, "summary.json", half),
        (True, "summary.json", lambda _: b"[]"),
        (True, "summary.json", lambda _: b"{}"),
        (True, "summary.json", without("best")),
        (True, "rows.parquet", half),
        (True, "rows.parquet", lambda _: b""),
        (False, "run.json", half),
        (False, "run.json", lambda _: b"{}"),
        (False, "run.json", lambda content: content.replace(b'"seed": 0', b'"seed": "one"')),
        (False, "rows.jsonl", lambda _: b"garbage\n"),
        (False, "rows.jsonl", lambda _: b"{}\n"),
        (False, "rows.jsonl", lambda content: content.replace(b'"call": 2,', b'"call": "two",')),
        (False, "rows.jsonl", None),
    ],
)
def test_damage_is_one_message_that_names_the_file_and_what_to_do(
    tiny_workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    complete: bool,
    name: str,
    damage: Damage | None,
    as_json: bool,
) -> None:
    made = SearchRun(RunSpec(str(tiny_workload), "megatron", 0, 100), tmp_path, optimum=700.0)
    made.advance(100)
    made.finish() if complete else made.close()
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    named = re.escape(str(path if damage else tmp_path))
    with pytest.raises(InputError, match=rf"^{named}.* is damaged: .*; bring it back from a copy") as error:
        report_results(tmp_path, as_json)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_curve_that_cannot_be_written_is_a_note(
    search: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(search, folder)
    (folder / "curve.png").unlink(missing_ok=True)
    (folder / "curve.png" / "in the way").mkdir(parents=True)  # read-only folders do not stop a root user
    report_results(folder, as_json)
    shown = capsys.readouterr()
    assert shown.err.startswith("note: no pictures: ")
    assert "megatron" in shown.out
    assert not as_json or json.loads(shown.out)["curve"] is None


def test_a_reports_memory_grows_with_the_calls_made_and_not_with_the_budget(
    tiny_workload: Path, tmp_path: Path
) -> None:
    file = StudyFile(
        name="s", workloads=(str(tiny_workload),), searchers=("megatron",), seeds=(0,), budget=LARGEST_BUDGET
    )
    study = check_study(file)
    write_study(study, dict.fromkeys(study.workloads), tmp_path)
    ((run_id, spec),) = study.specs().items()
    run = SearchRun(spec, run_dir(tmp_path, run_id))
    run.advance(100)
    run.finish()
    curves = read_curves(tmp_path, read_study_runs(tmp_path))
    assert curves.best["megatron"].shape == (1, 16)
