"""How a search is configured: RLlib's PPO, and the budget, the restarts and the runners' ways of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Self

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.from_config import NotProvided

from envs.registration import ENV_ID
from raysearch.processes.deadline import Patience
from raysearch.searchers.ppo.actor import EliteActor
from raysearch.searchers.ppo.connectors import ChooseActions, ShowElites
from raysearch.searchers.ppo.env_runner import EliteEnvRunner
from raysearch.searchers.ppo.learner import EliteLearner
from raysearch.searchers.ppo.module import EliteAttention
from raysearch.searchers.ppo.ppo_options import Options, SharedOptions
from raysearch.searchers.ppo.refused import objections
from sim.json_object import JsonObject


class LearnToShardConfig(PPOConfig):
    """RLlib configuration of a search; docs/guides/rllib.md has every field, `search` sets what options set.

    Example:
        >>> workload = {"workload": "gpt_moe_1_2t_16k"}
        >>> config = LearnToShardConfig().environment("raysearch/Strategy-v0", env_config=workload)
        >>> config = config.search(budget=4000, seed=1).env_runners(num_env_runners=2, num_envs_per_env_runner=4)
        >>> config.lanes, config.round_calls
        (8, 8)

    Attributes:
        actor_class, learner_class, module_class: What the algorithm is made of.
        has_critic: Whether the module's values are learned and used.
        budget: Calls of the whole search.
        search_seed: Seeds weights and actions. RLlib's own `seed` stays None: it would seed numpy and torch globally.
        chunks, confidence_threshold, normalize_advantages: See `Options`.
        patience: Calls without anything better to learn from after which the agent restarts.
        elites: Rows of the environments' observations, T.
        calls_per_training_step: Calls made by one `train()`, which also ends with a chunk.
        lean: Whether to go around RLlib's env runners, episodes and connectors: the same calls, bit by bit, in a
            fraction of the time. Needs `num_env_runners`, `num_learners` 0 and one environment.
        asynchronous: Whether remote env runners go on without waiting for each other, their results being taken in as
            they come: faster where calls take unequally long, but no longer the same search each time.
        ahead: Calls that the algorithm itself decides before it hears of the first of them, env runners only stepping;
            0: env runners decide. What is found depends on this number, however many runners there are.
        sample_timeout_s: RLlib's: longest call, that is a step of an environment; of one that takes longer the env
            runner is begun anew, and where that happens again the search stops and says what it was asked.
        runner_restart_timeout_s: Longest wait for a lost env runner to come back.
    """

    actor_class: ClassVar[type[EliteActor]] = EliteActor
    learner_class: ClassVar[type[EliteLearner]] = EliteLearner
    module_class: ClassVar[type[RLModule]] = EliteAttention
    has_critic: ClassVar[bool] = True

    def __init__(self, algo_class: type | None = None) -> None:
        from raysearch.searchers.ppo.algorithm import LearnToShard  # which is configured by this class

        super().__init__(algo_class=algo_class or LearnToShard)
        self.search_seed = 0
        self.elites = 3
        self.calls_per_training_step = 100
        self.lean = False
        self.asynchronous = False
        self.ahead = 0
        self.runner_restart_timeout_s = 120.0
        self.log_level = "ERROR"
        self.env_runners(
            env_runner_cls=EliteEnvRunner,
            num_env_runners=0,
            create_env_on_local_worker=True,  # for evaluate()
            sample_timeout_s=Patience.timeout_s,
            rollout_fragment_length="auto",
            # Ours make the whole batches; RLlib's would go through the episodes once more for the same.
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
        )
        self.environment(normalize_actions=False, clip_actions=False)
        self.learners(num_learners=0)
        self.training(minibatch_size=None, shuffle_batch_per_epoch=False, use_kl_loss=False, vf_clip_param=float("inf"))
        self.evaluation(evaluation_duration=10, evaluation_duration_unit="timesteps")
        self.fault_tolerance(restart_failed_env_runners=True)
        self._dont_auto_sync_env_runner_states = True
        self.search(budget=4000)

    def search(
        self,
        *,
        budget: int,
        seed: int = 0,
        options: Options | None = None,
        asynchronous: bool = False,
        ahead: int = 0,
    ) -> Self:
        """Sets the budget in calls, the seed, and every hyper-parameter of `options` (default: the paper's).

        Args:
            budget: Calls.
            seed: Of weights and actions.
            options: Hyper-parameters.
            asynchronous: See the class.
            ahead: See the class.
        """
        options, self.asynchronous, self.ahead = options or Options(), asynchronous, ahead
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
        """Sets what every preset has; `network` is what its module gets besides the sizes of the layers."""
        # RLlib takes -1 for "as by default" when it copies a configuration, so that `validate` would not see it.
        # What Tune is to choose is looked at once it has.
        if any(isinstance(given, Real) and given < least for given, least in ((budget, 1), (seed, 0))):
            raise ValueError(f"expected a budget of at least 1 and a seed of at least 0, got {budget} and {seed}")
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

    def rl_module(self, *, model_config: Any = NotProvided, **kwargs: Any) -> Self:
        """RLlib's, but what `model_config` leaves out of the network's sizes stays as it was."""
        if isinstance(model_config, Mapping):
            model_config = {**self.model_config, **model_config}
        return super().rl_module(model_config=model_config, **kwargs)

    @property
    def env_arguments(self) -> JsonObject:
        """What environments are made with: ours show as many elites as the search shares."""
        rows = {"elites": self.elites} if self.env == ENV_ID else {}
        return {**rows, **self.env_config}

    @property
    def runner_patience(self) -> dict[str, float]:
        """How long a call may take, and the wait for a lost env runner: none where RLlib is not to restart it."""
        give_up_s = self.runner_restart_timeout_s if self.restart_failed_env_runners else 0.0
        return {"timeout_s": self.sample_timeout_s or Patience.timeout_s, "give_up_s": give_up_s}

    @property
    def lanes(self) -> int:
        """Environments that share the search, K."""
        return max(self.num_env_runners or 0, 1) * (self.num_envs_per_env_runner or 1)

    @property
    def fragment_calls(self) -> int:
        """Calls of a round that are made before environments hear of each other again.

        As RLlib has it, `rollout_fragment_length` steps of each environment. "auto" is one step where actors look at
        each other's calls between two updates, and otherwise, as for a single environment, all of the round.
        """
        if self.rollout_fragment_length != "auto":
            return min(int(self.rollout_fragment_length) * self.lanes, self.round_calls)
        return self.lanes if self.lanes > 1 and self.actor_class.listens else self.round_calls

    @property
    def stride(self) -> int:
        """How far apart the calls of one environment lie: asynchronous runners number theirs by themselves."""
        return (self.num_envs_per_env_runner or 1) if self.asynchronous else self.lanes

    @property
    def round_calls(self) -> int:
        """Calls between two updates: as configured, rounded up to as many for each environment that decides."""
        if self.ahead:
            return self.train_batch_size_per_learner
        return -(-self.train_batch_size_per_learner // self.lanes) * self.lanes

    def validate(self) -> None:
        """Refuses what a search cannot do. Raises: ValueError."""
        if not self.in_evaluation and (refused := list(objections(self))):
            self._value_error("\n".join(refused))
        super().validate()
        if (self.num_learners or 0) > 1:
            self._value_error(
                f"expected num_learners 0 or 1, got {self.num_learners}: rollouts are small and not split"
            )
        if self.lean and (self.lanes > 1 or self.num_env_runners or self.num_learners):
            self._value_error("lean needs num_env_runners=0, num_learners=0 and num_envs_per_env_runner=1")
        if self.asynchronous and not self.num_env_runners and not self.in_evaluation:
            self._value_error("asynchronous needs num_env_runners of at least 1: there is nobody else to wait for")
        if self.asynchronous and self.budget % self.stride:
            self._value_error(f"asynchronous needs a budget that {self.stride} environments share, got {self.budget}")
        if self.ahead and not self.in_evaluation:
            self._validate_ahead()
        if self.budget < self.lanes and not self.in_evaluation:
            self._value_error(
                f"expected a budget of at least a call for each of {self.lanes} environments, got {self.budget}"
            )

    def _validate_ahead(self) -> None:
        runners = self.num_env_runners or 0
        if not self.actor_class.listens:
            self._value_error("ahead needs an actor that remembers all calls, such as that of CopyConfig")
        if self.lean or self.asynchronous or (self.num_envs_per_env_runner or 1) > 1:
            self._value_error("ahead needs lean=False, asynchronous=False and num_envs_per_env_runner=1")
        if self.ahead < max(runners, 1):
            self._value_error(f"expected ahead >= {max(runners, 1)}, a call for each env runner, got {self.ahead}")

    def build_env_to_module_connector(self, env: Any = None, spaces: Any = None, device: Any = None) -> Any:
        """RLlib's, after which the policy sees the elites."""
        pipeline: Any = super().build_env_to_module_connector(env, spaces, device)
        pipeline.prepend(ShowElites())
        return pipeline

    def build_module_to_env_connector(self, env: Any = None, spaces: Any = None) -> Any:
        """RLlib's, after each environment's actor has chosen."""
        pipeline: Any = super().build_module_to_env_connector(env, spaces)
        pipeline.prepend(ChooseActions())
        return pipeline

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The attention network."""
        return RLModuleSpec(module_class=self.module_class)

    def get_default_learner_class(self) -> type[EliteLearner]:
        """PPO's learner with the search's advantages."""
        return self.learner_class
