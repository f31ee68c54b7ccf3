from functools import partial

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from envs.strategy_env import StrategyEnv
from envs.vector_env import FIGURES, VectorStrategyEnv
from sim import batched, simulate
from sim.config.catalog import load_workload

BUDGET = 4


@pytest.fixture(scope="module")
def workload():
    return load_workload("gpt_moe_1_2t_16k")


@pytest.fixture
def make(workload):
    return partial(StrategyEnv, workload, budget=BUDGET)


def one_by_one(workload, strategies):
    return [simulate.evaluate(workload, strategy) for strategy in strategies]


@pytest.mark.parametrize(("evaluate_many", "number"), [(None, 3), (one_by_one, 8), (batched.evaluate_many, 8)])
def test_it_does_what_gymnasiums_own_vector_of_environments_does(make, evaluate_many, number):
    ours = VectorStrategyEnv([make() for _ in range(number)], evaluate_many=evaluate_many)
    theirs = SyncVectorEnv([make] * number)
    np.testing.assert_array_equal(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
    ours.action_space.seed(5)
    for _ in range(2 * BUDGET + 3):
        actions = ours.action_space.sample()
        got, expected = ours.step(actions), theirs.step(actions)
        for one, other in zip(got[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(one, other)
        for name in FIGURES:
            if name in expected[4]:
                np.testing.assert_array_equal(got[4][name], expected[4][name])
                np.testing.assert_array_equal(got[4][f"_{name}"], expected[4][f"_{name}"])


def test_a_step_asks_once_for_all_strategies_and_not_for_searches_that_are_over(workload, make):
    asked = []

    def count(workload, strategies):
        asked.append(len(strategies))
        return one_by_one(workload, strategies)

    envs = VectorStrategyEnv([make(), StrategyEnv(workload)], evaluate_many=count)
    envs.reset()
    envs.action_space.seed(0)
    for _ in range(BUDGET + 2):
        envs.step(envs.action_space.sample())
    assert asked == [2] * BUDGET + [1, 2]


def test_state_goes_back_and_forth(make):
    envs = VectorStrategyEnv([make(), make()])
    envs.reset()
    envs.action_space.seed(3)
    actions = [envs.action_space.sample() for _ in range(4)]
    envs.step(actions[0])
    state = envs.get_state()
    after = [envs.step(each)[0] for each in actions[1:]]
    envs.set_state(state)
    np.testing.assert_array_equal([envs.step(each)[0] for each in actions[1:]], after)


def test_an_answer_for_another_strategy_is_refused(workload, make):
    def swapped(workload, strategies):
        return one_by_one(workload, strategies)[::-1]

    envs = VectorStrategyEnv([make(), make()], evaluate_many=swapped)
    envs.reset()
    with pytest.raises(ValueError, match="expected the evaluation of that strategy"):
        envs.step(np.stack([np.zeros(16, np.int64), np.ones(16, np.int64)]))


def test_at_least_one_search_is_needed():
    with pytest.raises(ValueError, match="at least one environment"):
        VectorStrategyEnv([])
