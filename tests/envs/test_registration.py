"""The environment by its name, as gymnasium and RLlib see it."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs
from envs.registration import ENV_ID
from envs.vector_env import VectorStrategyEnv

WORKLOAD = "gpt_moe_1_2t_16k"


def test_gymnasium_makes_it_by_name():
    env = gym.make(ENV_ID, workload=WORKLOAD, elites=2, budget=5)
    assert isinstance(env.unwrapped, envs.StrategyEnv)
    assert env.observation_space.shape == (2, 16)


def test_gymnasiums_checker_finds_nothing_wrong():
    check_env(gym.make(ENV_ID, workload=WORKLOAD, budget=5).unwrapped, skip_render_check=True)


def test_gymnasium_makes_many_that_are_stepped_together():
    many = gym.make_vec(ENV_ID, num_envs=3, workload=WORKLOAD)
    assert isinstance(many.unwrapped, VectorStrategyEnv)
    observations, _ = many.reset(seed=0)
    assert observations.shape == (3, 3, 16)


def test_reward_weights_are_set_by_name():
    env = gym.make(ENV_ID, workload=WORKLOAD, penalty=3.0)
    env.reset(seed=0)
    assert env.step(np.array(env.action_space.nvec) - 1)[1] == -3.0


def test_unknown_workloads_are_named():
    with pytest.raises(ValueError, match="gpt_moe_1_2t_16k"):
        gym.make(ENV_ID, workload="gpt_moe_1_2t_16")
