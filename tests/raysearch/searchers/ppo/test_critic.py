import pickle

import numpy as np
import pytest

from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.critic import Critic
from raysearch.searchers.ppo.memory import CallMemory
from tests.envs.fakes import toy_actions

SIZES = (4, 3, 3, 4, 3, 3, 3, 3)
OPTIONS = CopyOptions(critic_hidden=16, critic_batch=64, critic_steps=8, critic_members=2)


def landscape(action: np.ndarray) -> float:
    """Separable, but for infeasible strategies far below."""
    return float(action.sum()) if action[0] else -100.0 - float(action[1])


@pytest.fixture
def memory() -> CallMemory:
    memory, rng = CallMemory(300, SIZES, 3), np.random.default_rng(0)
    for _ in range(300):
        action = rng.integers(SIZES)
        memory.add(memory.calls, action, landscape(action))
    return memory


def trained(memory: CallMemory, rounds: int, seed: int = 0, options: CopyOptions = OPTIONS) -> Critic:
    critic = Critic(toy_actions(SIZES), seed, options)
    for _ in range(rounds):
        critic.learn(memory)
    return critic


def test_a_trained_critic_picks_better_strategies_than_chance_among_ones_it_never_saw(memory: CallMemory) -> None:
    critic, rng = trained(memory, 40), np.random.default_rng(1)
    better = 0
    for _ in range(200):
        pair = rng.integers(SIZES, size=(2, len(SIZES)))
        picked = pair[critic.hopes(pair).argmax()]
        better += landscape(picked) >= max(map(landscape, pair))
    assert better > 180


def test_it_prefers_what_is_closer_to_feasible(memory: CallMemory) -> None:
    near, far = np.array([0, 0, 1, 1, 1, 1, 1, 1]), np.array([0, 2, 1, 1, 1, 1, 1, 1])
    hopes = trained(memory, 60).hopes(np.stack([far, near]))
    assert hopes[1] > hopes[0]


def test_it_learns_the_same_from_the_same_calls_and_seed(memory: CallMemory) -> None:
    a, b, other = (pickle.dumps(trained(memory, 2, seed=seed).get_state()) for seed in (1, 1, 2))
    assert a == b != other


def test_a_restored_critic_goes_on_as_if_nothing_had_happened(memory: CallMemory) -> None:
    whole, copied = trained(memory, 3), Critic(toy_actions(SIZES), 0, OPTIONS)
    state = whole.get_state()
    frozen = pickle.dumps(state)
    copied.set_state(state)
    for critic in (whole, copied):
        critic.learn(memory)
    assert pickle.dumps(whole.get_state()) == pickle.dumps(copied.get_state())
    assert pickle.dumps(state) == frozen
