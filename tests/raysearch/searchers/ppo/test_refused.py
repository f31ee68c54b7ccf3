"""What a configuration is refused for, and fields that once did nothing."""

import re
from contextlib import closing

import numpy as np
import pytest
import torch
from ray import tune

from raysearch.base.errors import InputError
from raysearch.runs.search_environment import SearchEnvironment
from raysearch.searchers.ppo.algorithm import CopyConfig, CopyLearnToShard, LearnToShard, LearnToShardConfig
from raysearch.searchers.ppo.copy_options import CopyOptions

WORKLOAD = {"workload": "gpt_moe_1_2t_16k"}


def test_an_untouched_configuration_is_not_refused():
    for preset in (LearnToShardConfig, CopyConfig):
        preset().search(budget=20).environment(SearchEnvironment, env_config=WORKLOAD).validate()


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
        (lambda config: config.evaluation(evaluation_interval=1), "no calls but those of its budget"),
        (lambda config: config.learners(num_learners=1), "expected num_learners=0, got 1"),
        (lambda config: config.training(use_kl_loss=True), "expected use_kl_loss=False"),
        (lambda config: config.learners(add_default_connectors_to_learner_pipeline=False), "advantages and loss"),
        (lambda config: setattr(config, "patiance", 3), "unknown field 'patiance': did you mean 'patience'?"),
        (lambda config: config.env_runners(gym_env_vectorize_mode="async"), "one env runner decides every call"),
        (lambda config: config.env_runners(num_envs_per_env_runner=2), "num_env_runners"),
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
    LearnToShardConfig().search(budget=20).environment(SearchEnvironment).training(**field).validate()
    with pytest.raises(ValueError, match=f"expected {next(iter(field))}=.*: this preset has no critic"):
        CopyConfig().search(budget=20).environment(SearchEnvironment, env_config=WORKLOAD).training(**field).validate()


@pytest.mark.parametrize("arguments", [{"budget": -1}, {"budget": 0}, {"budget": 9, "seed": -1}])
def test_negative_budgets_and_seeds_are_refused_before_rllib_takes_them_for_defaults(arguments):
    with pytest.raises(ValueError, match="expected a budget of at least 1 and a seed of at least 0"):
        CopyConfig().search(**arguments)


def test_an_environment_shows_as_many_elites_as_the_search_keeps(tmp_path):
    config = LearnToShardConfig().search(budget=2)
    config.elites = 5
    arguments = config.environment(SearchEnvironment, env_config=WORKLOAD).env_arguments(str(tmp_path))
    with closing(SearchEnvironment(arguments)) as environment:
        assert environment.observation.shape[0] == 5


def test_a_key_that_no_environment_knows_is_refused_with_the_one_that_was_meant(tmp_path):
    with pytest.raises(InputError, match=r"unknown key 'worklaod' .*: did you mean 'workload'\?"):
        SearchEnvironment({"worklaod": "gpt_moe_1_2t_16k", "folder": tmp_path})


def test_an_environment_that_only_steps_is_refused(toy):
    with pytest.raises(InputError, match="expected an environment that begins and takes calls"):
        LearnToShardConfig().search(budget=20).environment(toy.Env).build_algo()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("elites", 5, "CopyOptions(elites=5)"), ("normalize_advantages", False, "LearnToShardConfig")],
)
def test_what_only_the_papers_preset_takes_is_refused_by_ours(field, value, message):
    config = CopyConfig().search(budget=20).environment(SearchEnvironment, env_config=WORKLOAD)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate()


def test_a_preset_stays_itself_as_the_dictionary_that_tune_hands_on():
    asked = CopyConfig().search(budget=20, options=CopyOptions(patience=7)).to_dict()
    config = CopyLearnToShard.get_default_config().update_from_dict(asked)
    assert (config.has_critic, config.patience) == (False, 7)
    with pytest.raises(ValueError, match=r"expected no corrects_behaviour in a LearnToShardConfig: .*CopyConfig"):
        LearnToShard.get_default_config().update_from_dict(asked).validate()


def test_tune_may_choose_seed_and_budget():
    config = LearnToShardConfig().search(budget=tune.choice([20, 40]), seed=tune.grid_search([0, 1]))
    assert config.search_seed == {"grid_search": [0, 1]}


def test_a_search_of_no_environment_says_how_one_is_named():
    with pytest.raises(ValueError, match=r"expected \.environment\(SearchEnvironment"):
        LearnToShardConfig().search(budget=20).build_algo()


def test_a_search_says_that_it_cannot_evaluate(toy):
    with pytest.raises(ValueError, match="judged by the best of its calls"):
        toy.search(budget=10).agent.evaluate()


def test_what_a_model_config_leaves_out_stays_as_it_was():
    config = CopyConfig().search(budget=20).rl_module(model_config={"embedding": 32})
    assert config.model_config["embedding"] == 32
    assert config.model_config.keys() >= {"preset", "search_seed", "budget"}


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
    learner = toy.search(budget=10).learner
    learner.config = learner.config.copy(copy_frozen=False).training(grad_clip=limit, grad_clip_by=by)
    gradients = {"one": torch.tensor([3.0, 0.0]), "other": torch.tensor([4.0])}
    learner.postprocess_gradients(gradients)
    for gradient, values in zip(gradients.values(), expected, strict=True):
        np.testing.assert_allclose(gradient, values, rtol=1e-5)
