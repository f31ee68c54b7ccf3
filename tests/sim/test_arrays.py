"""What is written for numbers takes lanes of them, to the last bit."""

import math

import numpy as np
import pytest

from sim.arrays import Diverges, Lanes, by_distinct, figures_in_lanes, in_lanes, larger, log_of


def lanes(*numbers):
    return np.array(numbers).view(Lanes)


def test_a_function_that_branches_is_in_each_lane_what_it_is_of_its_number():
    def price(tokens, ranks):
        shared = math.ceil(tokens / ranks) if ranks > 1 else tokens
        seconds = (1 - 1 / shared) ** tokens + max(shared, 7.5) * 0.1
        seconds /= log_of(larger(shared, 2.0))
        return min(seconds, 0.3) if shared % 2 else seconds

    rng = np.random.default_rng(0)
    tokens, ranks = rng.integers(1, 40, 200), rng.integers(1, 5, 200)
    each = [price(*numbers) for numbers in zip(tokens.tolist(), ranks.tolist(), strict=True)]
    assert in_lanes(price, tokens.view(Lanes), ranks.view(Lanes)).tolist() == each


def test_lanes_that_differ_in_a_branch_are_no_truth():
    assert lanes(3, 4) > 2
    assert not lanes(3, 4) > 4
    with pytest.raises(Diverges) as diverging:
        bool(lanes(3, 4) > 3)
    assert diverging.value.taken.tolist() == [False, True]


def test_powers_are_python_s_and_nothing_changes_in_place():
    before = lanes(0.1, 0.7, 1.3)
    after = before
    after *= 2
    after **= 0.05
    assert after.tolist() == [(2 * each) ** 0.05 for each in (0.1, 0.7, 1.3)]
    assert (3 ** lanes(30, 2)).tolist() == [3**30, 9]
    assert before.tolist() == [0.1, 0.7, 1.3]


def test_lanes_are_no_key_of_a_cache():
    with pytest.raises(TypeError):
        hash(lanes(1, 1))


def test_few_numbers_are_worked_out_once_each():
    asked = []

    def parts(ranks, size):
        asked.append((ranks, size))
        return divmod(ranks, size)

    quotient, rest = by_distinct(parts, lanes(7, 8, 7, 9), 4)
    assert (quotient.tolist(), rest.tolist()) == ([1, 2, 1, 2], [3, 0, 3, 1])
    assert sorted(asked) == [(7, 4), (8, 4), (9, 4)]


def test_figures_of_lanes_that_branch_stand_side_by_side():
    found = figures_in_lanes(lambda ranks: (ranks, 0.0) if ranks > 1 else (1.0, ranks * 5), lanes(1, 3, 1))
    assert found.tolist() == [[1.0, 5.0], [3.0, 0.0], [1.0, 5.0]]
