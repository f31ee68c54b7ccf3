"""Statistics: small cases by hand, limits, and whether intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from raysearch.reports.statistics import (
    Strata,
    at_least,
    estimate,
    first_call,
    improvement,
    interquartile_mean,
    mean,
    median,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def strata(*values: list[float]) -> Strata:
    return [np.array(of_workload) for of_workload in values]


def test_the_interquartile_mean_is_of_the_middle_half_over_all_workloads() -> None:
    # Of eight runs the two best and the two worst are cut: (3 + 4 + 5 + 6) / 4.
    assert interquartile_mean(*strata([100.0, 3.0, 4.0, 2.0], [1.0, 6.0, 5.0, 900.0])) == 4.5
    # Of five runs one at either end.
    assert interquartile_mean(*strata([0.0, 1.0, 2.0, 6.0, 99.0])) == 3.0
    assert interquartile_mean(*strata([7.0])) == 7.0


def test_the_median_is_a_value_that_half_of_the_runs_do_not_exceed() -> None:
    assert median(*strata([4.0, 1.0], [3.0, 2.0])) == 2.0
    assert median(*strata([4.0, 1.0], [3.0])) == 3.0


def test_a_figure_is_taken_at_every_column_alone() -> None:
    figures = estimate([np.array([[1.0, 10.0], [3.0, 10.0]])], mean, rng=rng())
    assert figures.value.tolist() == [2.0, 10.0]
    assert figures.low is not None
    assert figures.high is not None
    assert (figures.low[0], figures.high[0]) == (1.0, 3.0)
    assert (figures.low[1], figures.high[1]) == (10.0, 10.0)


def test_workloads_are_not_resampled() -> None:
    # Seeds agree within each workload, so no other draw of seeds gives another figure.
    figure = estimate(strata([0.2, 0.2, 0.2], [0.9, 0.9, 0.9]), mean, rng=rng())
    assert figure.value == figure.low == figure.high == pytest.approx(0.55)


def test_of_a_single_seed_there_is_no_interval() -> None:
    figure = estimate(strata([0.5], [0.6, 0.7, 0.8]), mean, rng=rng())
    assert figure.value == pytest.approx(0.65)
    assert figure.low is None
    assert figure.high is None


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    truth, source = np.array([0.5, 0.7, 0.8]), rng()
    kept = 0
    for _ in range(200):
        runs = [source.normal(centre, 0.1, size=12) for centre in truth]
        figure = estimate(runs, mean, rng=source, resamples=500)
        kept += bool(figure.low <= truth.mean() <= figure.high)
    # 190 expected; twelve seeds make a percentile interval a little narrow, and chance adds 3 or so either way.
    assert 176 <= kept <= 198


def test_the_interval_narrows_with_the_root_of_the_seeds() -> None:
    source = rng()
    widths = []
    for seeds in (10, 160):
        figure = estimate([source.normal(size=seeds) for _ in range(4)], mean, rng=source)
        widths.append(float(figure.high - figure.low))
    assert widths[0] / widths[1] == pytest.approx(4.0, rel=0.35)


def test_the_probability_of_improvement_counts_pairs_and_halves_of_ties() -> None:
    # First workload: 3 beats 1 and 2, 1 ties with 1 and loses to 2: 2.5 of 4. Second: all of 1.
    figure = improvement(strata([3.0, 1.0], [5.0]), strata([1.0, 2.0], [4.0]), rng=rng())
    assert figure.value == (2.5 / 4 + 1.0) / 2


def test_a_searcher_against_itself_is_even() -> None:
    values = strata([0.1, 0.4, 0.4], [0.9, 0.8, 0.7])
    figure = improvement(values, values, rng=rng())
    assert figure.value == 0.5
    assert figure.low < 0.5 < figure.high


def test_a_searcher_whose_worst_run_beats_the_others_best_always_improves() -> None:
    figure = improvement(strata([0.8, 0.9]), strata([0.1, 0.7]), rng=rng())
    assert figure.value == figure.low == figure.high == 1.0


SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6)


@given(st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=3))
def test_improvement_is_mann_whitney_and_either_way_adds_up_to_one(runs: list[tuple[list[float], list[float]]]) -> None:
    x, y = strata(*(first for first, _ in runs)), strata(*(second for _, second in runs))
    forth = improvement(x, y, rng=rng(), resamples=2).value
    back = improvement(y, x, rng=rng(), resamples=2).value
    assert forth + back == pytest.approx(1.0)
    scipys = [mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)) for a, b in zip(x, y, strict=True)]
    assert forth == pytest.approx(np.mean(scipys))


def test_a_profile_is_the_share_of_runs_at_or_above_each_threshold() -> None:
    reached = at_least(np.array([0.5, 0.9, 1.0, 0.2]), np.array([0.2, 0.5, 0.95, 1.0]))
    assert mean(reached).tolist() == [1.0, 0.75, 0.25, 0.25]


def test_the_first_call_counts_from_one_and_never_is_one_past_the_last() -> None:
    curves = np.array([[0.95, 0.95, 1.0], [0.0, 0.949, 0.95], [0.1, 0.2, 0.3]])
    assert first_call(curves, 0.95).tolist() == [1, 3, 4]
    assert first_call(curves, 1.0).tolist() == [3, 4, 4]
