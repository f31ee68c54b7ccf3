"""The display of a running study where stderr is no terminal, and as it is drawn on one."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from raysearch.base import progress
from raysearch.runs.records import RunSpec
from raysearch.studies.study_display import Displays, StudyBars

SPECS = {
    f"{workload}-{searcher}-s0": RunSpec(workload, searcher, 0, 100)
    for workload in ("v", "w")
    for searcher in ("random", "annealing")
}


def metrics(calls: int, best: float, wall_s: float) -> dict[str, Any]:
    return {"calls": calls, "best": best, "fraction_of_optimum": best / 1000, "wall_s": wall_s}


def test_lines_tell_what_is_done_and_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    bars = StudyBars("s", SPECS, {"v-random-s0": metrics(80, 500.0, 8.0)})
    bars.started("v-annealing-s0")
    bars.reported("v-annealing-s0", metrics(40, 700.0, 8.0))
    bars.failed("v-annealing-s0")
    # A run that ended early has nothing left. 60 x 0.2 s, then 100 x 0.1 s and 100 x 0.2 s, one at a time.
    assert capsys.readouterr().err.splitlines() == [
        "140 of 400 calls, about 42 s left",
        "2/4 v-annealing-s0: FAILED after 40 calls",
    ]


def test_a_terminal_shows_the_whole_the_best_of_each_workload_and_the_runs_under_way() -> None:
    bars = StudyBars("s", SPECS, {"v-random-s0": metrics(80, 500.0, 8.0)})
    for run_id, best in (("w-random-s0", 300.0), ("w-annealing-s0", 200.0)):
        bars.started(run_id)
        bars.reported(run_id, metrics(50, best, 5.0))
    console = Console(width=140)
    with console.capture() as capture:
        console.print(bars._render())
    shown = capture.get()
    assert "v-random-s0: best 500.00 tok/s/GPU = 0.500 f*" in shown
    assert "w-random-s0: best 300.00 tok/s/GPU = 0.300 f*" in shown
    assert "w-annealing-s0: best" not in shown


def test_several_displays_are_sent_the_same() -> None:
    reports: list[tuple[str, ...]] = []

    class Listener:
        def __getattr__(self, event: str) -> Any:
            return lambda *what: reports.append((event, what[0]))

    displays = Displays(Listener(), Listener())
    displays.started("a")
    displays.reported("a", {})
    displays.finished("a")
    displays.failed("b")
    assert reports == [
        (e, r) for e, r in (("started", "a"), ("reported", "a"), ("finished", "a"), ("failed", "b")) for _ in "12"
    ]
