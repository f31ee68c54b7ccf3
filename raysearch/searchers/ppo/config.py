"""How a search is configured: RLlib's PPO, and the budget, the restarts and the runners' ways of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Self

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.from_config import NotProvided

from raysearch.processes.deadline import Patience
from raysearch.searchers.ppo.copy_attention import CopyAttention
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.env_runner import SearchEnvRunner
from raysearch.searchers.ppo.learner import CopyLearner, EliteLearner
from raysearch.searchers.ppo.module import EliteAttention
from raysearch.searchers.ppo.ppo_options import Options, SharedOptions
from raysearch.searchers.ppo.refused import objections
from sim.json_object import JsonObject


class LearnToShardConfig(PPOConfig):
    """RLlib configuration of a search; docs/guides/rllib.md has every field, `search` sets what options set.

    Example:
        >>> from raysearch.runs.search_environment import SearchEnvironment
        >>> config = LearnToShardConfig().environment(SearchEnvironment, env_config={"workload": "gpt_moe_1_2t_16k"})
        >>> config = config.search(budget=4000, seed=1).env_runners(num_env_runners=8, num_cpus_per_env_runner=0.5)
        >>> config.budget, config.round_calls
        (4000, 2)

    Attributes:
        learner_class, module_class: What the algorithm is made of.
        has_critic: Whether the module's values are learned and used.
        budget: Calls of the whole search.
        search_seed: Seeds weights and actions. RLlib's own `seed` stays None: it would seed numpy and torch globally.
        chunks, confidence_threshold, normalize_advantages: See `Options`.
        patience: Calls without anything better to learn from after which the agent restarts.
        elites: Rows of the environments' observations, T.
        calls_per_training_step: Calls made by one `train()`, which also ends with a chunk.
        sample_timeout_s: RLlib's: longest call, that is a step of an environment.
        num_env_runners, num_cpus_per_env_runner, num_gpus_per_env_runner: RLlib's: workers that make the calls, which
            one env runner decides, and what each of them takes.
    """

    learner_class: ClassVar[type[EliteLearner]] = EliteLearner
    module_class: ClassVar[type[RLModule]] = EliteAttention
    has_critic: ClassVar[bool] = True

    def __init__(self, algo_class: type | None = None) -> None:
        from raysearch.searchers.ppo.algorithm import LearnToShard  # which is configured by this class

        super().__init__(algo_class=algo_class or LearnToShard)
        self.search_seed = 0
        self.elites = 3
        self.calls_per_training_step = 100
        self.log_level = "ERROR"
        self.env_runners(
            env_runner_cls=SearchEnvRunner,
            num_env_runners=0,
            sample_timeout_s=Patience.timeout_s,
            rollout_fragment_length="auto",
        )
        self.environment(normalize_actions=False, clip_actions=False)
        self.learners(num_learners=0)
        self.training(minibatch_size=None, shuffle_batch_per_epoch=False, use_kl_loss=False, vf_clip_param=float("inf"))
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
        sizes = options.model_dump(include={"embedding", "hidden", "feed_forward", "attention_heads"})
        return self.share(budget, seed, options, {**sizes, "elites": self.elites})

    def share(self, budget: int, seed: int, options: SharedOptions, network: Mapping[str, Any]) -> Self:
        """Sets what every preset has; `network` is what its module gets besides the seed and the budget."""
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
        return self.rl_module(model_config={"search_seed": seed, "budget": budget, **network})

    def rl_module(self, *, model_config: Any = NotProvided, **kwargs: Any) -> Self:
        """RLlib's, but what `model_config` leaves out of the network's sizes stays as it was."""
        if isinstance(model_config, Mapping):
            model_config = {**self.model_config, **model_config}
        return super().rl_module(model_config=model_config, **kwargs)

    def env_arguments(self, folder: str) -> JsonObject:
        """What the environment is made with: as many elites as the search keeps, and its workers.

        Args:
            folder: Where it writes its rows, unless `env_config` names another.
        """
        return {
            "folder": folder,
            "elites": self.elites,
            "seed": self.search_seed,
            "budget": self.budget,
            "workers": self.num_env_runners,
            "timeout_s": self.sample_timeout_s,
            "cpus_per_worker": self.num_cpus_per_env_runner,
            "gpus_per_worker": self.num_gpus_per_env_runner,
            **self.env_config,
        }

    @property
    def round_calls(self) -> int:
        """Calls between two updates."""
        return self.train_batch_size_per_learner

    @property
    def callback_classes(self) -> list[Any]:
        """Of RLlib's callbacks."""
        return list(self.callbacks_class) if isinstance(self.callbacks_class, list | tuple) else [self.callbacks_class]

    def validate(self) -> None:
        """Refuses what a search cannot do. Raises: ValueError."""
        if not self.in_evaluation and (refused := list(objections(self))):
            self._value_error("\n".join(refused))
        super().validate()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The attention network."""
        return RLModuleSpec(module_class=self.module_class)

    def get_default_learner_class(self) -> type[EliteLearner]:
        """PPO's learner with the search's advantages."""
        return self.learner_class


class CopyConfig(LearnToShardConfig):
    """RLlib configuration of a search with the copying policy; `search` takes `CopyOptions`."""

    learner_class = CopyLearner
    module_class = CopyAttention
    has_critic = False

    def __init__(self, algo_class: type | None = None) -> None:
        from raysearch.searchers.ppo.algorithm import CopyLearnToShard  # which is configured by this class

        super().__init__(algo_class=algo_class or CopyLearnToShard)

    def search(self, *, budget: int, seed: int = 0, options: CopyOptions | None = None) -> Self:
        """Sets the budget in calls, the seed, and every hyper-parameter of `options` (default: our preset)."""
        options = options or CopyOptions()
        # One agent after another only where the search stands still: neither chunks nor early exits.
        self.chunks, self.confidence_threshold = 1, math.inf
        self.patience = options.patience
        self.corrects_behaviour = options.behaviour_correction
        self.training(vf_loss_coeff=0.0, use_critic=False)
        return self.share(budget, seed, options, {"preset": options.model_dump(), "elites": self.elites})
