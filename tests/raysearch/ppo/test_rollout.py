import numpy as np
import pytest

from raysearch.ppo.rollout import Rollout, estimate_advantages, normalize, rank_advantages


def test_advantages_by_hand():
    rewards, values = np.array([1.0, 2.0]), np.array([0.5, 3.0, 4.0])
    second = 2.0 + 0.9 * 4.0 - 3.0
    first = (1.0 + 0.9 * 3.0 - 0.5) + 0.9 * 0.8 * second
    np.testing.assert_allclose(estimate_advantages(rewards, values, 0.9, 0.8), [first, second])


def test_lambda_0_looks_one_step_ahead():
    rewards, values = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0, 7.0])
    np.testing.assert_allclose(estimate_advantages(rewards, values, 0.5, 0.0), [-0.5, 0.0, 0.5])


def test_lambda_1_sums_up_all_rewards():
    rewards, values = np.array([1.0, 2.0]), np.array([0.25, 9.0, 4.0])
    assert estimate_advantages(rewards, values, 1.0, 1.0)[0] == pytest.approx(1 + 2 + 4 - 0.25)


def test_a_single_call_has_an_advantage():
    np.testing.assert_allclose(estimate_advantages(np.array([2.0]), np.array([1.0, 3.0]), 0.5, 0.95), [2.5])


def test_two_advantages_keep_only_their_signs_when_normalised():
    np.testing.assert_allclose(normalize(np.array([-3.0, 100.0])), [-np.sqrt(0.5), np.sqrt(0.5)])


def test_equal_advantages_normalise_to_zero_and_one_is_left_alone():
    np.testing.assert_array_equal(normalize(np.array([7.0, 7.0])), [0.0, 0.0])
    np.testing.assert_array_equal(normalize(np.array([7.0])), [7.0])


def test_observations_without_repetitions_say_what_every_call_saw():
    a, b, c = np.random.default_rng(0).random((3, 2, 5), np.float32)
    observations, none = np.stack([a, b, a, a, c, b]), np.zeros(6)
    distinct, seen = Rollout(observations, none, none, none, none).distinct_observations()
    np.testing.assert_array_equal(distinct, [a, b, c])
    np.testing.assert_array_equal(distinct[seen], observations)


def test_ranks_say_nothing_about_how_much_better_a_call_was():
    rewards = np.array([5.0, -1e9, 5.0, 6.0, 1e9])
    advantages = rank_advantages(rewards)
    np.testing.assert_allclose(advantages, rank_advantages(np.array([2.0, 1.0, 2.0, 3.0, 4.0])))
    assert advantages[0] == advantages[2]
    assert advantages.sum() == pytest.approx(0.0)
    assert rank_advantages(np.arange(1000.0)).std() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_array_equal(rank_advantages(np.array([-7.0])), [0.0])
