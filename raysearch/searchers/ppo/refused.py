"""What a search's configuration may not say, because nothing would come of it, or because it would break it later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig

from raysearch.base.limits import LONGEST_TIMEOUT_S
from sim.near_names import nearest_name

_SEED = "search_seed, or search(seed=), seeds a search"
_RATE = "train_batch_size_per_learner, or rollout_calls of the options, is the calls of a round"
_CALLS = "calls_per_training_step is the calls of one train(), and with the budget's end there are no more"
_NOISE = "a search draws its actions, and its environments and policy take them as they are"
_WHOLE = "rounds are parts of one episode, whose elites are to be seen as they are"
_ONE = "one env runner decides every call; workers of its environment make them: num_env_runners"
_ALONE = "a search has no calls but those of its budget"

_WITHOUT_EFFECT = {
    "seed": (None, _SEED),
    "train_batch_size": (4000, _RATE),
    "min_time_s_per_iteration": (None, _CALLS),
    "min_sample_timesteps_per_iteration": (0, _CALLS),
    "min_train_timesteps_per_iteration": (0, _CALLS),
    "explore": (True, _NOISE),
    "normalize_actions": (False, _NOISE),
    "clip_actions": (False, _NOISE),
    "clip_rewards": (None, "the environment's alpha, beta and penalty shape its rewards"),
    "batch_mode": ("truncate_episodes", _WHOLE),
    "observation_filter": ("NoFilter", _WHOLE),
    "torch_skip_nan_gradients": (False, "a gradient that is no number ends the search, which could not go on"),
    "add_default_connectors_to_learner_pipeline": (True, "the learner's advantages and loss are made of them"),
    "use_kl_loss": (False, "PPO's clip keeps the policy near what it was"),
    "torch_compile_learner": (False, "compiling did not pay for networks as small"),
    "gym_env_vectorize_mode": ("sync", _ONE),
    "num_envs_per_env_runner": (1, _ONE),
    "num_learners": (0, "rounds are small, and the policy that decides is the one that learns"),
    "rollout_fragment_length": ("auto", _RATE),
    "evaluation_interval": (None, _ALONE),
}
"""Fields of RLlib's that a search takes no notice of: the value that says nothing, and what to do instead."""

_CRITIC = "this preset has no critic and takes no value from later calls; LearnToShardConfig does"
_WITHOUT_CRITIC = {
    "gamma": (PPOConfig().gamma, _CRITIC),
    "lambda_": (PPOConfig().lambda_, _CRITIC),
    "vf_loss_coeff": (0.0, _CRITIC),
    "vf_clip_param": (math.inf, _CRITIC),
    "use_critic": (False, _CRITIC),
}
"""Those of which a preset without critic takes no notice."""

_OF_ONE_PRESET = {
    "normalize_advantages": "it is of the paper's preset, LearnToShardConfig",
    "corrects_behaviour": "it is of our preset, CopyConfig, whose algorithm is CopyLearnToShard",
}
"""Fields that only one preset has, and which."""


def objections(config: Any) -> Iterator[str]:
    """What a `LearnToShardConfig` says that no search can do, one sentence each."""
    yield from _of_the_stack(config)
    unheard = _WITHOUT_EFFECT if config.has_critic else _WITHOUT_EFFECT | _WITHOUT_CRITIC
    for name, (silent, instead) in unheard.items():
        if (value := getattr(config, name)) != silent and (value or silent):
            yield f"expected {name}={silent!r}, got {value!r}: {instead}"
    for name, least in {"budget": 1, "chunks": 1, "elites": 1, "calls_per_training_step": 1, "search_seed": 0}.items():
        value = getattr(config, name)
        if not isinstance(value, Integral) or value < least:
            yield f"expected {name} to be a whole number of at least {least}, got {value!r}"
    for name in ("patience", "confidence_threshold"):
        if not isinstance(value := getattr(config, name), Real) or math.isnan(value) or value <= 0:
            yield f"expected {name} to be a number above 0, got {value!r}"
    if not isinstance(value := config.sample_timeout_s, int | float) or not 0 < value <= LONGEST_TIMEOUT_S:
        yield f"expected sample_timeout_s above 0 and at most {LONGEST_TIMEOUT_S:g}, got {value!r}: the longest call"
    if not isinstance(config.lr, Real):
        yield f"expected lr to be one number, got {config.lr!r}: the rate of the first call; it falls on a cosine"
    if not isinstance(config.num_env_runners or 0, Integral) or (config.num_env_runners or 0) < 0:
        yield f"expected num_env_runners to be a whole number of at least 0, got {config.num_env_runners!r}"
    if not config.has_critic and config.elites != type(config)().elites:
        yield f"expected elites of the options, CopyOptions(elites={config.elites}), got elites={config.elites}"
    yield from _of_typing(config)


def _of_the_stack(config: Any) -> Iterator[str]:
    if not (config.enable_rl_module_and_learner and config.enable_env_runner_and_connector_v2):
        yield "expected RLlib's new API stack, got api_stack(...=False)"
    if config.is_multi_agent:
        yield "expected one policy, got multi_agent(...): all environments share the policy of one search"


def _of_typing(config: Any) -> Iterator[str]:
    """Names that nobody reads and that look like one of ours; RLlib lets any attribute be set."""
    fields = vars(type(config)()).keys()
    ours = fields - vars(PPOConfig()).keys()
    for name in vars(config).keys() - fields:
        if name in _OF_ONE_PRESET:
            yield f"expected no {name} in a {type(config).__name__}: {_OF_ONE_PRESET[name]}"
        elif not name.startswith("_") and (near := nearest_name(name, ours, least=0.8)):
            yield f"unknown field {name!r}: {near}"
