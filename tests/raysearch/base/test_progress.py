"""Progress where stderr is no terminal: lines now and then, with names as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raysearch.base import progress


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is due."""
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_work_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.stepping("exact optimum of [/foo]") as show:
        show(3, 12)
    assert capsys.readouterr().err == "exact optimum of [/foo]: 3 of 12 steps\n"


@pytest.mark.usefixtures("impatient")
def test_a_search_says_how_far_it_is_and_its_best(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.searching("w-random-s0", 4000) as show:
        show({"calls": 1000, "best": 3.0, "fraction_of_optimum": 0.5})
    assert capsys.readouterr().err == "w-random-s0: 1,000 of 4,000 calls, best 3.00 tok/s/GPU = 0.500 f*\n"


def test_short_work_says_nothing_and_long_work_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock))
    with progress.stepping("work") as show:
        for done in range(100):
            clock = done * 0.3
            show(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["work: 4 of 100 steps", "work: 54 of 100 steps"]
