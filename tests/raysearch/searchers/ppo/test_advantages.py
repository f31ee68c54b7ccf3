import numpy as np
import pytest

from raysearch.searchers.ppo.advantages import normalize, rank_advantages


def test_two_advantages_keep_only_their_signs_when_normalised():
    np.testing.assert_allclose(normalize(np.array([-3.0, 100.0])), [-np.sqrt(0.5), np.sqrt(0.5)])


def test_equal_advantages_normalise_to_zero_and_one_is_left_alone():
    np.testing.assert_array_equal(normalize(np.array([7.0, 7.0])), [0.0, 0.0])
    np.testing.assert_array_equal(normalize(np.array([7.0])), [7.0])


def test_ranks_say_nothing_about_how_much_better_a_call_was():
    rewards = np.array([5.0, -1e9, 5.0, 6.0, 1e9])
    advantages = rank_advantages(rewards)
    np.testing.assert_allclose(advantages, rank_advantages(np.array([2.0, 1.0, 2.0, 3.0, 4.0])))
    assert advantages[0] == advantages[2]
    assert advantages.sum() == pytest.approx(0.0)
    assert rank_advantages(np.arange(1000.0)).std() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_array_equal(rank_advantages(np.array([-7.0])), [0.0])
