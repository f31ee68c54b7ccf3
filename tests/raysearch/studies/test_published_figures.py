"""Published figures beside a study's own: the ratios by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_record
from raysearch.studies.published_figures import PublishedFigures, beside_published, published_table, read_published


def run(searcher: str, best: float, *, workload: str = "w", optimum: float | None = 600.0) -> dict[str, Any]:
    return {"workload": workload, "searcher": searcher, "best": best, "optimum": optimum}


RUNS = [
    run("walk", 100.0),
    run("walk", 300.0),
    run("agent", 300.0),
    run("agent", 500.0),
    run("agent", 100.0, workload="v"),
]


def published(**changes: Any) -> PublishedFigures:
    stated = {"source": "a paper", "statistic": "mean", "bases": ("walk",), "ratios": {"w": {"agent": 2.5}}}
    return PublishedFigures.model_validate({**stated, **changes})


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["workload"], row["searcher"]): row for row in rows}


def test_a_ratio_of_means_is_bounded_by_the_optimum_over_the_base() -> None:
    row = by_key(beside_published(published(), RUNS))["w", "agent"]
    assert row["throughput"] == 400.0
    assert row["ratios"] == {"walk": {"ours": 2.0, "bound": 3.0}}
    assert row["published"] == 2.5


def test_a_ratio_of_bests_is_of_the_best_seed_of_each() -> None:
    row = by_key(beside_published(published(statistic="best"), RUNS))["w", "agent"]
    assert row["throughput"] == 500.0
    assert row["ratios"]["walk"] == {"ours": pytest.approx(5 / 3), "bound": 2.0}


def test_without_the_base_or_its_success_there_is_no_ratio() -> None:
    rows = by_key(
        beside_published(published(), [*RUNS, run("walk", 0.0, workload="u"), run("agent", 1.0, workload="u")])
    )
    for workload in ("v", "u"):
        assert rows[workload, "agent"]["ratios"]["walk"] == {"ours": None, "bound": None}
        assert rows[workload, "agent"]["published"] is None


def test_without_an_optimum_there_is_no_bound() -> None:
    runs = [run("walk", 100.0, optimum=None), run("agent", 200.0, optimum=None)]
    assert by_key(beside_published(published(), runs))["w", "agent"]["ratios"]["walk"] == {"ours": 2.0, "bound": None}


def test_a_study_folder_says_what_was_published(tmp_path: Path) -> None:
    def write(study: dict[str, Any]) -> None:
        rest = {"runs": [], "budgets": {}, "specs": {}, "optima": {}, "hashes": {}, "version": "v"}
        plan = {"searchers": [], "seeds": [], "budget": 1}
        write_record(tmp_path / "study.json", {"study": {**plan, **study}, **rest})

    write({"published": published().model_dump(mode="json")})
    assert read_published(tmp_path) == published()
    write({})
    assert read_published(tmp_path) is None
    write({"published": 3})
    with pytest.raises(InputError, match="damaged"):
        read_published(tmp_path)


def test_the_table_shows_ours_theirs_and_the_bound_of_every_workload() -> None:
    figures = published(ratios={"w": {"agent": 2.5}, "v": {"agent": "up to 9"}})
    console = Console(width=120)
    with console.capture() as capture:
        console.print(published_table(figures, beside_published(figures, RUNS)))
    lines = [line.split() for line in capture.get().splitlines()]
    assert ["agent", "400.00", "2.00", "(3.00)", "2.50"] in lines
    assert ["agent", "100.00", "-", "(-)", "up", "to", "9"] in lines
    assert ["walk", "200.00", "1.00", "(3.00)", "-"] in lines
