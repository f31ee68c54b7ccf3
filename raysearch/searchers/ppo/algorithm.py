"""The search as an RLlib algorithm with its configuration: training step, restarts, checkpoints."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.from_config import NotProvided
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)
from ray.tune.result import SHOULD_CHECKPOINT

from envs.saved_state import SavedState
from raysearch.base.file_io import strategy_dict
from raysearch.processes.deadline import Patience
from raysearch.searchers.interface import Environment, Outcome
from raysearch.searchers.ppo.copy_attention import CopyAttention
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.env_runner import LocalRunners, SearchEnvRunner
from raysearch.searchers.ppo.learner import CopyLearner, EliteLearner
from raysearch.searchers.ppo.module import EliteAttention, EliteModule
from raysearch.searchers.ppo.ppo_options import Options, SharedOptions
from raysearch.searchers.ppo.refused import objections
from raysearch.searchers.ppo.schedule import cosine
from raysearch.searchers.ppo.search_progress import Progress
from sim.json_object import JsonObject

# RLlib warns on every start of deprecated calls that it makes itself, and Tune tells of one that takes ten seconds.
# Importing them sets the levels, so we go last.
for _name in ("ray.rllib", "ray._common.deprecation", "ray.tune.utils.util", "ray.tune.trainable.trainable"):
    logging.getLogger(_name).setLevel(logging.ERROR)

Decode = Callable[[np.ndarray], np.ndarray]


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


class LearnToShard(PPO):
    """RLlib algorithm that searches: one PPO agent after another within one budget of calls.

    The env runner, one in this process, decides every call and steps the environment, whose workers make them. Every
    round of calls updates the policy. Then the agent restarts (fresh weights and optimiser, in place) if

    - every head's largest probability had reached the confidence threshold in the last decision (early exit),
    - it has lived for a chunk: budget / chunks calls, rounded up, or
    - nothing better was found for as many calls as the configured patience.

    The next agent gets a whole chunk, or what is left of the budget, so what an early exit saves goes to further
    agents. Elites and best stay. A round cut short by the end of the budget is learned from as it is.

    Source: Learning to Shard, section 3 (Optimization and early exit).

    Attributes:
        progress: The account of its calls.
        policy_loss: Of the last gradient step; None before the first.
    """

    config: Any  # a LearnToShardConfig
    env_runner_group: Any
    eval_env_runner_group: Any
    learner_group: Any

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """A config with the paper's preset."""
        return LearnToShardConfig()

    def setup(self, config: Any) -> None:
        """Builds env runner, learner and the first agent; unlike RLlib's it starts no Ray. Raises: ValueError."""
        if self.config.env is None and self.config.observation_space is None:
            raise ValueError(
                "expected .environment(SearchEnvironment, env_config={'workload': NAME or PATH}), got none"
            )
        torch.set_num_threads(1)
        self._set_up_metrics()
        self.policy_loss: float | None = None
        self.progress, self._most_calls = Progress(self.config.budget), self.config.calls_per_training_step
        self.callbacks = [made() for made in self.config.callback_classes]
        self.eval_env_runner_group = self.offline_data = None
        self.local_replay_buffer = self._aggregator_actor_manager = None
        runner = SearchEnvRunner(config=self.config, taken=self.progress.count, folder=self.logdir or ".")
        self.env_runner_group, self.spaces = LocalRunners(runner), runner.get_spaces()
        spec = self.config.get_multi_rl_module_spec(spaces=self.spaces, inference_only=False)
        self.learner_group = self.config.build_learner_group(rl_module_spec=spec)
        runner.module = self._learner.module[DEFAULT_MODULE_ID].unwrapped()
        self._start_agent()

    def _setup_logdir(self) -> None:
        if self.config.env is not None:  # else nothing is written
            super()._setup_logdir()

    @property
    def _runner(self) -> SearchEnvRunner:
        return self.env_runner_group.local_env_runner

    @property
    def _learner(self) -> Any:
        return self.learner_group._learner  # it is in this process

    @property
    def learning_rate(self) -> float:
        """Rate of an update made now: a half cosine from the configured rate at call 0 to 0 at the budget's end."""
        return self.config.lr * cosine(self.progress.calls / self.config.budget)

    def make_calls(self, environment: Environment, decode: Decode, calls: int) -> None:
        """A training step of at most so many calls in an environment that somebody else owns; see `attach`."""
        self._runner.attach(environment, decode)
        self._most_calls = calls
        self.training_step()

    def remember(self, action: np.ndarray, outcome: Outcome) -> None:
        """Takes in a call of an action `[A]` of the action space that somebody else decided; nothing is learned yet."""
        self._runner.remember(action, outcome)

    def step(self) -> JsonObject:
        """One `train()`: RLlib's, with the best strategy, and done where the budget is spent or nothing is left.

        Tune saves it where a chunk has ended.
        """
        result: Any = super().step()
        env = self._runner.env
        over = not (env.under_way or env.may_begin)
        best = getattr(env, "best_strategy", None)
        return {
            **result,
            "best_strategy": strategy_dict(best) if best else {},
            "done": over,
            SHOULD_CHECKPOINT: bool(self.progress.chunk_figures()["chunk_done"]),
        }

    def training_step(self) -> None:
        """Makes the next `calls_per_training_step` calls, or fewer: the end of a chunk or of the budget comes first."""
        progress = self.progress
        end, chunk = min(progress.calls + self._most_calls, self.config.budget), progress.chunk
        while progress.calls < end and progress.chunk == chunk:
            before = progress.calls
            with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
                episodes = self._runner.sample(num_timesteps=end - progress.calls)
            if episodes:
                self._learn(episodes)
            if progress.calls == before:
                break
        self.metrics.aggregate([self._runner.get_metrics()], key=ENV_RUNNER_RESULTS)
        self.metrics.aggregate([self._learner.metrics.reduce()], key=LEARNER_RESULTS)
        known = {"calls": progress.calls, "best": progress.best}
        for name, value in {**known, **self.figures(), **progress.chunk_figures()}.items():
            self.metrics.log_value(name, value, window=1)

    def _learn(self, episodes: list[Any]) -> None:
        """Updates the policy, as RLlib's PPO does, and restarts where that is due."""
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            self.learner_group.update(
                episodes=episodes,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.progress.calls},
                num_epochs=self.config.num_epochs,
                minibatch_size=self.config.minibatch_size,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
                _no_metrics_reduce=True,  # once a training step: there may be fifty rounds in one
            )
            loss: Any = self._learner.metrics.peek((DEFAULT_MODULE_ID, "policy_loss"))
            self.policy_loss = float(torch.as_tensor(loss).detach())
        if self._agent_is_done:
            self.progress.begin_agent()
            self._runner.module.start_over(self._runner.next_call)
            self._start_agent()
        self._runner.module.forget()

    @property
    def _agent_is_done(self) -> bool:
        progress, config, module = self.progress, self.config, self._runner.module
        return progress.calls_left > 0 and (
            (module.output is not None and module.output.confidence >= config.confidence_threshold)
            or progress.calls - progress.born >= math.ceil(config.budget / config.chunks)
            or module.stagnant_calls >= config.patience
        )

    def _start_agent(self) -> None:
        entropy = np.random.SeedSequence([self.config.search_seed, self.progress.restarts])
        seed = int(entropy.generate_state(1, np.uint64)[0])
        self._learner.reset_agent(seed)
        self._runner.module.forget()

    def figures(self) -> dict[str, float]:
        """Scalars to log; the policy's confidence, entropy (nats) and loss as of the last call, once there was one."""
        figures = {"restarts": float(self.progress.restarts), "learning_rate": self.learning_rate}
        if (output := self._runner.module.output) is not None:
            figures |= {"confidence": output.confidence, "entropy": output.entropy}
        if self.policy_loss is not None:
            figures["policy_loss"] = float(self.policy_loss)
        return figures

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> EliteModule:
        """The policy that decides, with its whole state: explored with the next numbers, it continues the search."""
        return self._runner.module

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raises ValueError: each call is charged, and a search is judged by the best that it finds."""
        raise ValueError("expected train(): a search is judged by the best of its calls, and has no others to evaluate")

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """None is ever lost: the environment replaces its workers itself."""
        return []

    def get_state(self, *args: Any, **kwargs: Any) -> SavedState:
        """Plain values and arrays, with which a search continues bit-identically."""
        learner = self._learner.get_state(components=[COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER])
        learner = {name: learner[name] for name in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)}
        search = {**self.progress.get_state(), "policy_loss": self.policy_loss}
        return {"learner": copy.deepcopy(learner), "runner": self._runner.get_state(), "search": search}

    def set_state(self, state: SavedState) -> None:
        """Continues from `get_state`, whatever happened since."""
        state = copy.deepcopy(state)  # RLlib continues to write into the optimiser's arrays
        self._learner.set_state(state["learner"])
        self.progress.set_state(state["search"])
        self.policy_loss = state["search"]["policy_loss"]
        self._runner.set_state(state["runner"])

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """None, as the state holds everything."""
        return []

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """As RLlib, which continues to tell env runners that are other processes."""
        Checkpointable.restore_from_path(self, path, *args, **kwargs)


class CopyLearnToShard(LearnToShard):
    """`LearnToShard` with our preset: `Tuner(CopyLearnToShard, param_space=CopyConfig()...)`.

    Tune hands a configuration on as a dictionary, which says nothing of its class; the algorithm does.
    """

    @classmethod
    def get_default_config(cls) -> CopyConfig:
        """A config with our preset."""
        return CopyConfig()
