"""A study's statistics on curves small enough to work out by hand, their tables and their pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysearch.base.rich_tables import printer
from raysearch.reports.comparison import compare
from raysearch.reports.figures import write_figures
from raysearch.reports.learning_curves import AnytimeCurves, Block, read_curves
from raysearch.reports.statistics_tables import statistics_tables
from raysearch.runs.run import SearchRun
from raysearch.studies.results import read_study_runs
from raysearch.studies.study_file import StudyFile, check_study, run_dir, write_study

BLOCKS = (Block("v", 0), Block("v", 1), Block("w", 0), Block("w", 1))


def curve(*rises: tuple[int, float]) -> list[float]:
    """Best after each of 300 calls, from (call, new best)."""
    best = np.zeros(300)
    for call, value in rises:
        best[call - 1 :] = value
    return best.tolist()


def run(*rises: tuple[int, float], **changes: Any) -> dict[str, Any]:
    """A run whose every call took 10 ms."""
    timed = [[call, call / 100] for call, _ in rises]
    return {"calls": 300, "feasible_calls": 150, "unique_calls": 240, "wall_s": 3.0, "improvements": timed, **changes}


FAST = [((1, 0.5), (20, 0.96)), ((1, 0.4), (40, 0.98)), ((10, 0.95),), ((30, 0.99),)]
SLOW = [((1, 0.5), (200, 0.95)), ((1, 0.4), (280, 0.8)), ((100, 0.9),), ((250, 0.99),)]


def made(**searchers: list[Any]) -> AnytimeCurves:
    rows = {name: np.array([curve(*rises) for rises in of_block]) for name, of_block in searchers.items()}
    runs = {name: tuple(run(*rises) for rises in of_block) for name, of_block in searchers.items()}
    return AnytimeCurves(BLOCKS[: len(next(iter(rows.values())))], rows, runs, exact=True, left_out=0)


@pytest.fixture(scope="module")
def statistics() -> dict[str, Any]:
    return compare(made(slow=SLOW, fast=FAST))


def test_searchers_come_best_first_with_their_scores_at_each_budget(statistics: dict[str, Any]) -> None:
    assert list(statistics["searchers"]) == ["fast", "slow"]
    # At 10 calls 0.5, 0.4, 0, 0; at 100 0.5, 0.4, 0.9, 0; at 250 0.95, 0.4, 0.9, 0.99; the middle two count.
    scores = statistics["searchers"]["slow"]["scores"]
    assert scores["calls"] == [10, 100, 250, 300]
    assert scores["value"] == pytest.approx([(0.4 + 0) / 2, (0.5 + 0.4) / 2, (0.95 + 0.9) / 2, (0.95 + 0.9) / 2])
    assert np.all(np.array(scores["low"]) <= scores["value"])
    assert np.all(np.array(scores["high"]) >= scores["value"])
    slow = statistics["searchers"]["slow"]
    assert slow["means"]["value"][:2] == pytest.approx([0.9 / 4, 1.8 / 4])
    assert slow["means"]["value"][2:] == pytest.approx([(0.95 + 0.4 + 0.9 + 0.99) / 4, (0.95 + 0.8 + 0.9 + 0.99) / 4])
    assert slow["worst"]["value"] == [0.0, 0.0, 0.4, 0.8]


def test_targets_are_reached_at_exact_calls_and_seconds_or_never(statistics: dict[str, Any]) -> None:
    fast, slow = (statistics["searchers"][name]["targets"] for name in ("fast", "slow"))
    assert [target["target"] for target in fast] == [0.95, 0.99]
    # 0.95 after 10, 20, 30 and 40 calls: the second of four is the first by which half are there.
    assert (fast[0]["reached"], fast[0]["runs"], fast[0]["calls"]["value"]) == (4, 4, 20)
    assert fast[0]["wall_s"] == 0.2
    assert (fast[1]["reached"], fast[1]["calls"]["value"], fast[1]["wall_s"]) == (1, None, None)
    # After 200 and 250 calls, and twice never.
    assert (slow[0]["reached"], slow[0]["calls"]["value"], slow[0]["calls"]["high"]) == (2, 250, None)


def test_pairs_are_compared_run_by_run(statistics: dict[str, Any]) -> None:
    (pair,) = statistics["pairs"]
    assert (pair["first"], pair["second"]) == ("fast", "slow")
    # v: 0.96 and 0.98 beat 0.95 and 0.8. w: 0.95 beats 0.9 alone, 0.99 beats 0.9 and ties with 0.99.
    assert pair["probability"]["value"] == (4 / 4 + 2.5 / 4) / 2
    assert pair["difference"]["value"] == pytest.approx((0.01 + 0.18 + 0.05 + 0.0) / 4)


def test_profiles_and_shares_are_of_all_runs(statistics: dict[str, Any]) -> None:
    slow = statistics["searchers"]["slow"]
    share = dict(zip(slow["profile"]["threshold"], slow["profile"]["value"], strict=True))
    assert (share[0.5], share[0.8], share[0.9], share[0.99], share[1.0]) == (1.0, 1.0, 0.75, 0.25, 0.0)
    assert slow["feasible_share"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert slow["unique_share"] == {"value": 0.8, "low": 0.8, "high": 0.8}


def test_curves_over_time_step_where_the_improvements_were_made() -> None:
    curves = made(fast=FAST)
    seconds = np.array([0.005, 0.01, 0.199, 0.2, 5.0])
    assert curves.best_at("fast", seconds)[0].tolist() == [0.0, 0.5, 0.5, 0.96, 0.96]


@pytest.mark.parametrize("wall_s", [0.0, 5e-324, 1e12])
def test_a_clock_that_stood_still_or_raced_gives_a_curve_over_time(wall_s: float) -> None:
    rows = {"fast": np.array([curve((1, 0.5))])}
    runs = {"fast": (run((1, 0.5), wall_s=wall_s),)}
    statistics = compare(AnytimeCurves(BLOCKS[:1], rows, runs, exact=True, left_out=0))
    seconds = statistics["searchers"]["fast"]["curve_by_time"]["wall_s"]
    assert np.all(np.diff(seconds) > 0)
    assert np.isfinite(seconds).all()


def test_one_seed_gives_figures_without_intervals_and_says_so(tmp_path: Path) -> None:
    curves = made(fast=FAST[:1], slow=SLOW[:1])
    statistics = compare(curves)
    assert statistics["searchers"]["fast"]["scores"]["low"] is None
    assert statistics["pairs"][0]["probability"] == {"value": 1.0, "low": None, "high": None}
    assert json.loads(json.dumps(statistics, allow_nan=False)) == statistics
    assert "No intervals: a single seed says nothing about other seeds." in statistics_tables(statistics)
    pictures = write_figures(tmp_path, statistics)
    assert pictures.keys() == {"curve", "comparison"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


def test_the_table_shows_every_budget_with_its_interval(
    statistics: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    printer().print(*statistics_tables(statistics), sep="\n")
    lines = capsys.readouterr().out.splitlines()
    assert "interquartile mean, 95 % interval (2 workloads x 2 seeds)" in lines[0]
    (scores, targets) = (line for line in lines if line.startswith(" slow"))
    assert scores.split()[1:] == ["0.200", "0.450", "0.925", "0.925"]
    intervals = lines[lines.index(scores) + 1].split()
    assert len(intervals) == 4
    assert all(re.fullmatch(r"(1|0?)\.\d{3}-(1|0?)\.\d{3}", interval) for interval in intervals)
    assert "250 (2/4)" in targets
    assert "never (1/4)" in targets


@pytest.fixture(scope="module")
def folder(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two searchers with two seeds each, of which one run is unfinished; a sweep beside a budget of 30."""
    folder = tmp_path_factory.mktemp("study")
    file = StudyFile(
        name="s", workloads=(str(tiny_workload),), searchers=("random", "megatron"), seeds=(0, 1), budget=30
    )
    study = check_study(file)
    write_study(study, {str(tiny_workload): 800.0}, folder)
    for run_id, spec in study.specs().items():
        made = SearchRun(spec, run_dir(folder, run_id), optimum=800.0)
        made.advance(30 if run_id != "tiny-random-s1" else 12)
        made.finish() if made.done else made.close()
    return folder


def test_only_blocks_that_every_searcher_finished_are_compared(folder: Path) -> None:
    runs = read_study_runs(folder)
    curves = read_curves(folder, runs)
    assert curves.blocks == (Block("tiny", 0),)
    assert curves.left_out == 2
    assert {name: best.shape for name, best in curves.best.items()} == {"random": (1, 30), "megatron": (1, 30)}
    for name, (run,) in curves.runs.items():
        assert curves.best[name][0, -1] == run["best"] / 800.0
        assert curves.best_at(name, np.array([run["wall_s"]]))[0, 0] == run["best"] / 800.0
    # 16 combinations of degrees, then nothing: the last value stays.
    assert len(set(curves.best["megatron"][0, 15:])) == 1


def test_without_an_optimum_scores_are_relative_to_the_best_found(folder: Path) -> None:
    runs = [{**run, "optimum": None} for run in read_study_runs(folder)]
    curves = read_curves(folder, runs)
    assert not curves.exact
    assert max(best.max() for best in curves.best.values()) <= 1.0
    best = max(run["best"] for run in runs)
    (run,) = curves.runs["random"]
    assert curves.best["random"][0, -1] == run["best"] / best
