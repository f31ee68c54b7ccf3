"""What a configuration is refused for, and fields that once did nothing."""

import re

import numpy as np
import pytest
import torch
from ray import tune
from ray.rllib.callbacks.callbacks import RLlibCallback

from envs.registration import ENV_ID
from raysearch.searchers.ppo.algorithm import LearnToShard, LearnToShardConfig
from raysearch.searchers.ppo.copy_actor import CopyActor
from raysearch.searchers.ppo.copy_algorithm import CopyConfig, CopyLearnToShard
from raysearch.searchers.ppo.copy_options import CopyOptions

WORKLOAD = {"workload": "gpt_moe_1_2t_16k"}


def test_an_untouched_configuration_is_not_refused():
    for preset in (LearnToShardConfig, CopyConfig):
        preset().search(budget=20).environment(ENV_ID, env_config=WORKLOAD).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.reporting(min_train_timesteps_per_iteration=40), "min_train_timesteps_per_iteration=0"),
        (lambda config: config.reporting(min_sample_timesteps_per_iteration=40), "calls_per_training_step"),
        (lambda config: config.training(lr=[[0, 1e-3], [10, 0.0]]), "expected lr to be one number"),
        (lambda config: config.training(train_batch_size=2), "train_batch_size_per_learner"),
        (lambda config: config.debugging(seed=5), "search_seed"),
        (lambda config: config.env_runners(explore=False), "expected explore=True, got False"),
        (lambda config: config.env_runners(observation_filter="MeanStdFilter"), "expected observation_filter="),
        (lambda config: config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *_: "a"), "one policy"),
        (
            lambda config: config.api_stack(
                enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
            ),
            "new API stack",
        ),
        (lambda config: setattr(config, "chunks", 0), "chunks to be a whole number of at least 1, got 0"),
        (lambda config: config.search(budget=10.5), "budget to be a whole number"),
        (lambda config: setattr(config, "patience", 0), "patience to be a number above 0"),
        (lambda config: config.search(budget=20, seed=1.5), "search_seed to be a whole number of at least 0"),
        (lambda config: config.evaluation(evaluation_config={"explore": False}), "explore=True in evaluation_config"),
        (lambda config: config.learners(add_default_connectors_to_learner_pipeline=False), "advantages and loss"),
        (lambda config: setattr(config, "patiance", 3), "unknown field 'patiance': did you mean 'patience'?"),
        (
            lambda config: config.environment(ENV_ID, env_config={**WORKLOAD, "elite": 5}),
            "unknown key 'elite' in env_config of raysearch/Strategy-v0: did you mean 'elites'?",
        ),
        (lambda config: config.environment(ENV_ID, env_config={**WORKLOAD, "elites": 5}), "got 5 and 3"),
        (lambda config: config.environment(ENV_ID, env_config={**WORKLOAD, "budget": 5}), "share of search"),
        (lambda config: config.env_runners(gym_env_vectorize_mode="async"), "more runners are more processes"),
        (lambda config: setattr(config.evaluation(evaluation_interval=1), "lean", True), "evaluation_interval=None"),
    ],
)
def test_what_would_do_nothing_or_break_later_is_refused_with_what_to_do(change, message):
    config = LearnToShardConfig().search(budget=20)
    change(config)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        config.validate()


@pytest.mark.parametrize(
    "field",
    [{"gamma": 0.5}, {"lambda_": 0.9}, {"vf_loss_coeff": 0.5}, {"vf_clip_param": 10.0}, {"use_critic": True}],
)
def test_what_a_critic_needs_is_refused_by_the_preset_without_one(field):
    LearnToShardConfig().search(budget=20).environment(ENV_ID, env_config=WORKLOAD).training(**field).validate()
    with pytest.raises(ValueError, match=f"expected {next(iter(field))}=.*: this preset has no critic"):
        CopyConfig().search(budget=20).environment(ENV_ID, env_config=WORKLOAD).training(**field).validate()


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.training(minibatch_size=1),
        lambda config: config.training(use_kl_loss=True),
        lambda config: config.training(vf_clip_param=1e-4),
        lambda config: config.training(entropy_coeff=[[0, 0.3], [40, 0.0]]),
        lambda config: config.callbacks(type("Heard", (RLlibCallback,), {})),
        lambda config: config.callbacks(on_episode_step=print),
    ],
)
def test_what_the_lean_path_leaves_out_is_refused_there_alone(change):
    config = LearnToShardConfig().search(budget=20).environment(ENV_ID, env_config=WORKLOAD)
    change(config)
    config.copy(copy_frozen=False).validate()
    config.lean = True
    with pytest.raises(ValueError, match="where lean=True"):
        config.validate()


@pytest.mark.parametrize("arguments", [{"budget": -1}, {"budget": 0}, {"budget": 9, "seed": -1}])
def test_negative_budgets_and_seeds_are_refused_before_rllib_takes_them_for_defaults(arguments):
    with pytest.raises(ValueError, match="expected a budget of at least 1 and a seed of at least 0"):
        CopyConfig().search(**arguments)


def test_an_environment_shows_as_many_elites_as_the_search_shares():
    config = LearnToShardConfig().search(budget=2).environment(ENV_ID, env_config=WORKLOAD)
    config.elites, config.lean = 5, True
    lean = config.build_algo()
    assert lean._lean.look().shape[0] == 5
    lean.stop()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("elites", 5, "CopyOptions(elites=5)"), ("normalize_advantages", False, "LearnToShardConfig")],
)
def test_what_only_the_papers_preset_takes_is_refused_by_ours(field, value, message):
    config = CopyConfig().search(budget=20).environment(ENV_ID, env_config=WORKLOAD)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate()


def test_a_preset_stays_itself_as_the_dictionary_that_tune_hands_on():
    asked = CopyConfig().search(budget=20, options=CopyOptions(patience=7)).to_dict()
    told = CopyLearnToShard.get_default_config().update_from_dict(asked)
    assert (told.actor_class, told.preset, told.patience) == (CopyActor, CopyOptions(patience=7), 7)
    with pytest.raises(ValueError, match=r"expected no preset in a LearnToShardConfig: .*CopyLearnToShard"):
        LearnToShard.get_default_config().update_from_dict(asked).validate()


def test_tune_may_choose_seed_and_budget():
    config = LearnToShardConfig().search(budget=tune.choice([20, 40]), seed=tune.grid_search([0, 1]))
    assert config.search_seed == {"grid_search": [0, 1]}


@pytest.mark.parametrize("lean", [False, True])
def test_a_search_of_no_environment_says_how_one_is_named(lean):
    config = LearnToShardConfig().search(budget=20)
    config.lean = lean
    with pytest.raises(ValueError, match=r"expected \.environment\('raysearch/Strategy-v0'"):
        config.build_algo()


def test_a_lean_search_says_that_it_cannot_evaluate(toy):
    with pytest.raises(ValueError, match=r"evaluate\(\) needs lean=False"):
        toy.search(budget=10).agent.evaluate()


def test_what_a_model_config_leaves_out_stays_as_it_was():
    config = CopyConfig().search(budget=20).rl_module(model_config={"embedding": 32})
    assert config.model_config["embedding"] == 32
    assert config.model_config.keys() >= {"copy_choice", "hidden", "attention_heads"}


@pytest.mark.parametrize(
    ("by", "limit", "expected"),
    [
        ("global_norm", 2.5, [[1.5, 0.0], [2.0]]),
        ("norm", 2.0, [[2.0, 0.0], [2.0]]),
        ("value", 3.5, [[3.0, 0.0], [3.5]]),
        ("global_norm", None, [[3.0, 0.0], [4.0]]),
    ],
)
def test_gradients_are_clipped_in_place_as_the_configuration_says(toy, by, limit, expected):
    learner = toy.search(budget=10).agent.learner
    learner.config = learner.config.copy(copy_frozen=False).training(grad_clip=limit, grad_clip_by=by)
    gradients = {"one": torch.tensor([3.0, 0.0]), "other": torch.tensor([4.0])}
    learner.postprocess_gradients(gradients)
    for gradient, values in zip(gradients.values(), expected, strict=True):
        np.testing.assert_allclose(gradient, values, rtol=1e-5)
