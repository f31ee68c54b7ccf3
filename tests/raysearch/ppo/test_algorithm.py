import logging

import numpy as np
import pytest
import ray

from raysearch.ppo.algorithm import LearnToShard, LearnToShardConfig
from raysearch.ppo.options import Options

pytestmark = pytest.mark.slow

BUDGET = 45


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    """RLlib's `Algorithm` insists on a cluster, though everything here is local."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path_factory.mktemp("results")))
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture
def algorithm(toy, local_ray):
    def build(**options):
        config = toy.config(budget=BUDGET, seed=3, **options).environment(env=toy.Env)
        config.calls_per_training_step = 7
        return config.build_algo()

    return build


def test_train_makes_the_calls_that_ask_and_tell_make(toy, algorithm):
    asked = toy.search(budget=BUDGET, seed=3).advance(BUDGET)
    trained = algorithm()
    results = [trained.train() for _ in range(8)]
    assert [result["calls"] for result in results] == [7, 14, 21, 28, 35, 42, 45, 45]
    assert results[-1]["restarts"] == asked.agent.restarts == 4
    env = trained.agent.runner.env.envs[0].unwrapped
    assert env.actions == asked.env.actions
    for ours, theirs in zip(asked.weights, trained.get_module().parameters(), strict=True):
        np.testing.assert_array_equal(ours, theirs.detach().numpy())
    trained.stop()


@pytest.mark.parametrize("iterations", [1, 4])
def test_restored_algorithm_goes_on_bit_identically(toy, algorithm, tmp_path, iterations):
    asked = toy.search(budget=BUDGET, seed=3).advance(BUDGET)
    saved = algorithm()
    for _ in range(iterations):
        saved.train()
    saved.save_to_path(tmp_path)
    saved.stop()
    restored = LearnToShard.from_checkpoint(tmp_path)
    while restored.agent.calls_left:
        restored.train()
    assert restored.agent.runner.env.envs[0].unwrapped.actions == asked.env.actions
    restored.stop()


def test_environments_with_episodes_are_refused(toy, algorithm, monkeypatch):
    step = toy.Env.step
    monkeypatch.setattr(toy.Env, "step", lambda self, action: (*step(self, action)[:2], True, False, {}))
    ending = algorithm()
    with pytest.raises(ValueError, match="environment without episodes, got an end at call 1"):
        ending.train()
    ending.stop()


def test_config_carries_the_papers_preset_in_rllibs_own_words():
    config = LearnToShardConfig().search(budget=1234, seed=5)
    assert (config.budget, config.search_seed, config.seed) == (1234, 5, None)
    assert (config.train_batch_size_per_learner, config.num_epochs, config.minibatch_size) == (2, 2, None)
    assert (config.lr, config.gamma, config.lambda_, config.clip_param) == (1e-3, 0.99, 0.95, 0.2)
    assert (config.vf_loss_coeff, config.entropy_coeff, config.grad_clip) == (0.5, 0.0, 0.5)
    assert (config.use_kl_loss, config.vf_clip_param) == (False, float("inf"))
    network = Options().model_dump(include={"embedding", "hidden", "feed_forward", "attention_heads"})
    assert config.model_config.items() >= network.items()
    assert config.enable_rl_module_and_learner
    assert config.enable_env_runner_and_connector_v2
