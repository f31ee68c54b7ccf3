"""Requests that arrive at random."""

import numpy as np
import pytest

from sim.replay.arrivals import Stream, draw_arrivals


def test_gaps_have_the_mean_and_the_burstiness_asked_for() -> None:
    for cv in (0.5, 1.0, 4.0):
        arrivals = draw_arrivals([Stream(5.0, cv)], 40_000.0, 0)
        gaps = np.diff(arrivals.times_s)
        assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_are_as_many_in_the_first_second_as_later() -> None:
    counts = [len(draw_arrivals([Stream(2.0, cv=4.0)], 1.0, seed)) for seed in range(4000)]
    assert np.mean(counts) == pytest.approx(2.0, abs=0.25)


def test_another_models_load_leaves_arrivals_as_they_are() -> None:
    one, other = (draw_arrivals([Stream(2.0), Stream(rate, 3.0)], 100.0, 5) for rate in (1.0, 4.0))
    assert (one.times_s[one.models == 0] == other.times_s[other.models == 0]).all()
