"""The search as an RLlib algorithm: its training step, its restarts, its checkpoints."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils.checkpoints import Checkpointable
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
from raysearch.searchers.interface import Environment, Outcome
from raysearch.searchers.ppo.config import CopyConfig as CopyConfig
from raysearch.searchers.ppo.config import LearnToShardConfig as LearnToShardConfig
from raysearch.searchers.ppo.env_runner import LocalRunners, SearchEnvRunner
from raysearch.searchers.ppo.module import EliteModule
from raysearch.searchers.ppo.schedule import cosine
from raysearch.searchers.ppo.search_progress import Progress
from sim.json_object import JsonObject

# RLlib warns on every start of deprecated calls that it makes itself, and Tune tells of one that takes ten seconds.
# Importing them sets the levels, so we go last.
for _name in ("ray.rllib", "ray._common.deprecation", "ray.tune.utils.util", "ray.tune.trainable.trainable"):
    logging.getLogger(_name).setLevel(logging.ERROR)

Decode = Callable[[np.ndarray], np.ndarray]


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
        """The policy that decides, with all that it knows: explored with the next numbers, it goes on as the search."""
        return self._runner.module

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raises ValueError: each call is charged, and a search is judged by the best that it finds."""
        raise ValueError("expected train(): a search is judged by the best of its calls, and has no others to evaluate")

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """None is ever lost: the environment replaces its workers itself."""
        return []

    def get_state(self, *args: Any, **kwargs: Any) -> SavedState:
        """Plain values and arrays, with which a search goes on bit-identically."""
        learner = self._learner.get_state(components=[COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER])
        learner = {name: learner[name] for name in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)}
        search = {**self.progress.get_state(), "policy_loss": self.policy_loss}
        return {"learner": copy.deepcopy(learner), "runner": self._runner.get_state(), "search": search}

    def set_state(self, state: SavedState) -> None:
        """Goes on from `get_state`, whatever happened since."""
        state = copy.deepcopy(state)  # RLlib goes on to write into the optimiser's arrays
        self._learner.set_state(state["learner"])
        self.progress.set_state(state["search"])
        self.policy_loss = state["search"]["policy_loss"]
        self._runner.set_state(state["runner"])

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """None, as the state holds everything."""
        return []

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """As RLlib, which goes on to tell env runners that are other processes."""
        Checkpointable.restore_from_path(self, path, *args, **kwargs)


class CopyLearnToShard(LearnToShard):
    """`LearnToShard` with our preset: `Tuner(CopyLearnToShard, param_space=CopyConfig()...)`.

    Tune hands a configuration on as a dictionary, which says nothing of its class; the algorithm does.
    """

    @classmethod
    def get_default_config(cls) -> CopyConfig:
        """A config with our preset."""
        return CopyConfig()
