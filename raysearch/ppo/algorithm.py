"""The paper's PPO as an RLlib algorithm: its configuration, and its training step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES

from raysearch.ppo.agent import Agent
from raysearch.ppo.env_runner import EliteEnvRunner
from raysearch.ppo.learner import EliteLearner
from raysearch.ppo.module import EliteAttention
from raysearch.ppo.options import Options, SharedOptions

# RLlib warns on every start of deprecated calls that it makes itself. Importing it sets the levels, so we go last.
for _name in ("ray.rllib", "ray._common.deprecation"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class LearnToShardConfig(PPOConfig):
    """RLlib configuration of a search; `search` sets everything but the environment or the spaces.

    Example:
        >>> from envs.strategy_env import StrategyEnv
        >>> from sim.config.catalog import load_workload
        >>> space = StrategyEnv(load_workload("gpt_moe_1_2t_16k"))
        >>> config = LearnToShardConfig().search(budget=4000, seed=1)
        >>> config = config.environment(
        ...     observation_space=space.observation_space, action_space=space.action_space
        ... )
        >>> config.build_agent().calls_left
        4000

    Attributes:
        runner_class, learner_class, module_class: What the agent is made of.
        budget: Calls of the whole search.
        search_seed: Seeds weights and actions. RLlib's own `seed` stays None: it would seed numpy and torch globally.
        chunks, confidence_threshold, normalize_advantages: See `Options`.
        patience: Calls without anything better to learn from after which the agent restarts.
        calls_per_training_step: Calls made by one `train()`.
    """

    runner_class: ClassVar[type[EliteEnvRunner]] = EliteEnvRunner
    learner_class: ClassVar[type[EliteLearner]] = EliteLearner
    module_class: ClassVar[type[RLModule]] = EliteAttention

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or LearnToShard)
        self.search_seed = 0
        self.calls_per_training_step = 100
        self.log_level = "ERROR"
        self.env_runners(env_runner_cls=self.runner_class, num_env_runners=0)
        self.learners(num_learners=0)
        self.training(minibatch_size=None, use_kl_loss=False, vf_clip_param=float("inf"))
        self._dont_auto_sync_env_runner_states = True
        self.search(budget=4000)

    def search(self, *, budget: int, seed: int = 0, options: Options | None = None) -> Self:
        """Sets the budget in calls, the seed, and every hyper-parameter of `options` (default: the paper's)."""
        options = options or Options()
        self.chunks = options.chunks
        self.confidence_threshold = options.confidence_threshold
        self.patience = math.inf
        self.normalize_advantages = options.normalize_advantages
        self.training(
            gamma=options.gamma,
            lambda_=options.gae_lambda,
            vf_loss_coeff=options.value_coefficient,
            entropy_coeff=options.entropy_coefficient,
        )
        return self.share(budget, seed, options)

    def share(self, budget: int, seed: int, options: SharedOptions, network: Mapping[str, Any] | None = None) -> Self:
        """Sets what every preset has; `network` is what its module is told besides the sizes of the layers."""
        self.budget, self.search_seed = budget, seed
        self.training(
            lr=options.learning_rate,
            clip_param=options.clip_range,
            grad_clip=options.max_gradient_norm,
            num_epochs=options.gradient_steps,
            train_batch_size_per_learner=options.rollout_calls,
        )
        sizes = options.model_dump(include={"embedding", "hidden", "feed_forward", "attention_heads"})
        return self.rl_module(model_config={**sizes, **(network or {})})

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The attention network."""
        return RLModuleSpec(module_class=self.module_class)

    def get_default_learner_class(self) -> type[EliteLearner]:
        """The learner that is updated by whole rollouts."""
        return self.learner_class

    def build_agent(self) -> Agent:
        """Builds the agent without an `Algorithm`, which would start a Ray cluster that it has no use for.

        The caller steps the environment; `environment(observation_space=..., action_space=...)` must have been called.
        """
        assert self.observation_space is not None
        assert self.action_space is not None
        spaces = (self.observation_space, self.action_space)
        runner = self.runner_class(
            config=self,
            spaces=dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID), spaces),
        )
        learner: Any = self.build_learner(spaces={DEFAULT_MODULE_ID: spaces})
        return Agent(self, runner, learner)


class LearnToShard(PPO):
    """RLlib algorithm that searches the environment of its config; `train()` makes the next calls of the budget.

    `PPOSearcher` drives the same `Agent` from outside, and both make the same calls.
    """

    config: LearnToShardConfig
    agent: Agent

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """A config with the paper's preset."""
        return LearnToShardConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds RLlib's parts, then the agent around the local env runner and the local learner."""
        super().setup(config)
        runner: Any = self.env_runner
        learner_group: Any = self.learner_group
        self.agent = Agent(self.config, runner, learner_group._learner)

    def training_step(self) -> None:
        """Makes the next `calls_per_training_step` calls, or what is left of the budget."""
        agent = self.agent
        end = min(agent.calls + self.config.calls_per_training_step, self.config.budget)
        while agent.calls < end:
            agent.runner.sample(num_timesteps=min(agent.calls_to_update, end - agent.calls))
            agent.learn_when_due()
        for name, value in agent.metrics().items():
            self.metrics.log_value(name, value, window=1)
        self.metrics.log_value("calls", agent.calls, window=1)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, and the agent's: with it a restored search goes on bit-identically.

        The environment must have `get_state` and `set_state`, as it holds the elites.
        """
        return {**super().get_state(*args, **kwargs), "agent": self.agent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from `get_state`."""
        super().set_state(state)
        self.agent.set_state(state["agent"])
