"""Forecasts, by hand."""

from __future__ import annotations

import pytest

from raysearch.studies.forecast import RunProgress, duration_text, remaining_s


def test_calls_left_go_at_their_searchers_pace_side_by_side() -> None:
    works = [
        RunProgress("fast", 100, 0, 1.0),
        RunProgress("slow", 50, 50, 50.0),
        RunProgress("fast", 0, 300, None),
        RunProgress("slow", 0, 100, None),
    ]
    # 300 x 0.01 s and 150 x 1 s.
    assert remaining_s(works, parallel=1) == pytest.approx(153.0)
    assert remaining_s(works, parallel=0) == pytest.approx(153.0)
    # On two places 76.5 s would do, but one run takes 100 s alone.
    assert remaining_s(works, parallel=2) == pytest.approx(100.0)


def test_a_searcher_not_seen_yet_is_taken_for_usual() -> None:
    works = [RunProgress("a", 10, 0, 1.0), RunProgress("b", 10, 0, 3.0), RunProgress("c", 0, 10, None)]
    assert remaining_s(works, parallel=1) == pytest.approx(2.0)


def test_nothing_is_predicted_without_a_pace() -> None:
    assert remaining_s([RunProgress("a", 0, 10, None), RunProgress("a", 0, 10, 3.0)], parallel=2) is None
    assert remaining_s([RunProgress("a", 5, 0, None)], parallel=2) == 0.0
    assert remaining_s([RunProgress("a", 5, 0, 1.0)], parallel=2) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.0, "59 min 59 s"), (7500.0, "2 h 5 min")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
