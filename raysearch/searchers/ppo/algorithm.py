"""The paper's PPO as an RLlib algorithm: its training step, its restarts, its checkpoints."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
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

from envs.registration import ENV_ID
from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo import environment as environment  # registers it
from raysearch.searchers.ppo.actor import EliteActor
from raysearch.searchers.ppo.ahead import Ahead
from raysearch.searchers.ppo.asynchronous import Unwaiting
from raysearch.searchers.ppo.config import LearnToShardConfig as LearnToShardConfig
from raysearch.searchers.ppo.lean import LeanPath
from raysearch.searchers.ppo.remote import handles
from raysearch.searchers.ppo.rounds import Rounds
from raysearch.searchers.ppo.schedule import cosine
from raysearch.searchers.ppo.search_results import Sampling, Search
from sim.json_object import JsonObject

# RLlib warns on every start of deprecated calls that it makes itself, and Tune tells of one that takes ten seconds.
# Importing them sets the levels, so we go last.
for _name in ("ray.rllib", "ray._common.deprecation", "ray.tune.utils.util", "ray.tune.trainable.trainable"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class LearnToShard(PPO):
    """RLlib algorithm that searches: one PPO agent after another within one budget of calls.

    Every round of calls updates the policy. Then the agent restarts (fresh weights and optimiser, in place) if

    - every head's largest probability had reached the confidence threshold in the last call (early exit),
    - it has lived for a chunk: budget / chunks calls, rounded up, or
    - nothing better was found for as many calls as the configured patience.

    The next agent gets a whole chunk, or what is left of the budget, so what an early exit saves goes to further
    agents. Elites and best stay. A round cut short by the end of the budget is learned from as it is.

    The search's memory lives in one place, `actor`. Env runners get at the beginning of a round what the others
    found in the last one, and what they found themselves comes back with their episodes. A lost runner's calls are made
    again by its successor: noise depends on the number of a call alone, so these are the same calls.

    How the calls between two updates are made is a module each: `Rounds`, `Unwaiting` (asynchronous), `Ahead`. Built
    `lean`, it acts itself (`ask`, `tell`) and needs neither Ray nor env runners; `train()` makes the same calls.

    Source: Learning to Shard, section 3 (Optimization and early exit).

    Attributes:
        policy_loss: Of the last gradient step; None before the first.
    """

    config: Any  # a LearnToShardConfig
    env_runner_group: Any
    eval_env_runner_group: Any
    learner_group: Any
    _search: Search
    _sampling: Sampling

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """A config with the paper's preset."""
        return LearnToShardConfig()

    def setup(self, config: Any) -> None:
        """Builds RLlib's parts, or on the lean path a learner alone, and the first agent. Raises: ValueError."""
        if self.config.env is None and self.config.observation_space is None:
            raise ValueError(f"expected .environment({ENV_ID!r}, env_config={{'workload': NAME or PATH}}), got none")
        torch.set_num_threads(1)
        self.policy_loss: float | None = None
        self._lean: LeanPath | None = None
        if self.config.lean:
            self._build_lean()
        else:
            super().setup(config)
            self._build_sampling()
        self._start_agent()

    def _build_lean(self) -> None:
        if self.config.env is not None:
            self._set_up_metrics()  # Ray's, which train() logs to
        self._lean = LeanPath(self.config, self.env_creator)
        self.learner = self._lean.learner
        self.env_runner_group = self.eval_env_runner_group = None
        self.callbacks = []
        self._remember(self._lean.action_space, self._lean.module)

    def _build_sampling(self) -> None:
        runner: Any = self.env_runner
        search = self._remember(runner.env.single_action_space, runner.module)
        if self.config.ahead:
            remote = handles(self.env_runner_group)
            self._sampling = Ahead(search, runner, remote, self._weights, self._report)
        elif self.config.asynchronous:
            self._sampling = Unwaiting(search, handles(self.env_runner_group), self._weights, self._report)
        else:
            self._sampling = Rounds(search, self.env_runner_group, self._weights, self._report)

    def _remember(self, action_space: Any, module: Any) -> Search:
        """Begins a search whose own actor decides by `module`."""
        self._search = Search(self.config, self.config.actor_class(self.config, action_space))
        self.actor.module = module
        return self._search

    def _setup_logdir(self) -> None:
        if not self.config.lean:  # which writes nothing
            super()._setup_logdir()

    @property
    def actor(self) -> EliteActor:
        """The search's memory: its elites and whatever else actors remember."""
        return self._search.actor

    @property
    def calls(self) -> int:
        """Calls made since the search began, by all agents."""
        return self._search.calls

    @property
    def calls_left(self) -> int:
        """Calls until the budget is spent."""
        return self._search.calls_left

    @property
    def restarts(self) -> int:
        """Agents that came before this one."""
        return self._search.restarts

    @property
    def chunk(self) -> int:
        """Number of the present agent, from 1."""
        return self._search.chunk

    @property
    def best(self) -> float:
        """Best feasible throughput that was seen, 0.0 while there is none."""
        return self._search.best

    @property
    def confidence(self) -> float:
        """Least certain head's largest probability in the last call; 0 before the first."""
        return self._search.confidence

    @property
    def learning_rate(self) -> float:
        """Rate of an update made now: a half cosine from the configured rate at call 0 to 0 at the budget's end."""
        return self.config.lr * cosine(self.calls / self.config.budget)

    def step(self) -> JsonObject:
        """One `train()`: RLlib's, which is done where the budget is spent. Tune saves it where a chunk has ended."""
        if self._lean:
            self.training_step()
            result: Any = {**self.metrics.compile(), NUM_ENV_STEPS_SAMPLED_LIFETIME: self.calls}
        else:
            result = super().step()
        return {**result, "done": self.calls_left == 0, SHOULD_CHECKPOINT: bool(self.chunk_figures()["chunk_done"])}

    def training_step(self) -> None:
        """Makes the next `calls_per_training_step` calls, or fewer: the end of a chunk or of the budget comes first."""
        end, chunk = min(self.calls + self.config.calls_per_training_step, self.config.budget), self.chunk
        while self.calls < end and self.chunk == chunk:
            if self._lean:
                self._call(self._lean)
            else:
                self._sample()
        progress = {"calls": self.calls, "best": self.best}
        for name, value in {**progress, **self.figures(), **self.chunk_figures()}.items():
            self.metrics.log_value(name, value, window=1)

    def _sample(self) -> None:
        """As RLlib's PPO: samples, and learns from it."""
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            episodes = self._sampling.sample()
        if episodes:
            self._learn(episodes)

    def _learn(self, episodes: list[SingleAgentEpisode]) -> None:
        """Updates the policy, as RLlib's PPO does, and restarts where that is due."""
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update(
                episodes=episodes,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.calls},
                num_epochs=self.config.num_epochs,
                minibatch_size=self.config.minibatch_size,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
            )
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
            self.policy_loss = self.metrics.peek((LEARNER_RESULTS, DEFAULT_MODULE_ID, "policy_loss"))
        self._sampling.policy_changed()
        self._restart_where_due()

    def _weights(self) -> Any:
        state = self.learner_group.get_state(
            components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}", inference_only=True
        )
        return state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]

    def _report(self, metrics: list[Any]) -> None:
        self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS)

    def ask(self, observation: np.ndarray) -> np.ndarray:
        """Lean: an action `[A]` for an observation `[T, A]`; several may be asked for ahead."""
        return self.actor.act(observation)

    def tell(self, outcome: Outcome, place: int = 0) -> None:
        """Lean: what came of an action that was asked for, by its place; learns and restarts where that is due."""
        self.actor.tell(outcome, place)
        self._search.count(outcome)
        if self.actor.recorded < self.config.round_calls and self.calls_left > 0:
            return
        self.policy_loss = self.learner.update_rollout(self.actor.take(), self.calls)
        self._restart_where_due()
        self.actor.forget()

    def _call(self, lean: LeanPath) -> None:
        outcome = lean.step(self.ask(lean.look()))
        self.metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), 1, reduce="lifetime_sum")
        self.tell(outcome)

    def _restart_where_due(self) -> None:
        if self._search.agent_is_done:
            self.restart()

    def restart(self) -> None:
        """Begins with a new agent."""
        self._search.begin_agent()
        self._start_agent()

    def _start_agent(self) -> None:
        entropy = np.random.SeedSequence([self.config.search_seed, self.restarts])
        seed = int(entropy.generate_state(1, np.uint64)[0])
        if self._lean:
            self.learner.reset_agent(seed)
        else:
            self.learner_group.foreach_learner(lambda learner: learner.reset_agent(seed))
            self._sampling.policy_changed()
        self.actor.forget()

    def figures(self) -> dict[str, float]:
        """Scalars to log; the policy's confidence, entropy (nats) and loss as of the last call, once there was one."""
        figures = {"restarts": float(self.restarts), "learning_rate": self.learning_rate}
        if self.actor.output is not None:
            figures |= {"confidence": self.confidence, "entropy": self.actor.output.entropy}
        if self.policy_loss is not None:
            figures["policy_loss"] = float(self.policy_loss)
        return figures

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call: its number, its best, and whether it has ended."""
        return self._search.chunk_figures()

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> Any:
        """The policy as it is now: env runners hear of an update with their next round only."""
        if self._lean:
            return self._lean.module
        runner: Any = self.env_runner
        runner.module.set_state(self._weights())
        return super().get_module(module_id)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's: plays on from where the search is, in environments apart. Raises: ValueError: on the lean path."""
        if self._lean:
            raise ValueError("expected env runners to play on, got lean=True: evaluate() needs lean=False")
        return super().evaluate(*args, **kwargs)

    def _before_evaluate(self) -> None:
        """Passes what the search has found to the runners that play on."""
        news = self.actor.news(0)
        if self.eval_env_runner_group is not None:
            self.eval_env_runner_group.foreach_env_runner(lambda runner: runner.inform(news))
        else:
            self.env_runner_group.local_env_runner.inform(news)

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """RLlib's for evaluation; a search's own runners get all they need when they are asked again."""
        if env_runner_group is None or env_runner_group is self.env_runner_group:
            return []
        return super().restore_env_runners(env_runner_group)

    def search_state(self) -> SavedState:
        """What the search needs to go on besides weights and optimiser: plain values and arrays."""
        made_by = self._lean or self._sampling
        return {**self._search.get_state(), "policy_loss": self.policy_loss, **made_by.get_state()}

    def _set_search_state(self, state: SavedState) -> None:
        self._search.set_state(state)
        self.policy_loss = state["policy_loss"]
        (self._lean or self._sampling).set_state(state)

    def get_state(self, *args: Any, **kwargs: Any) -> SavedState:
        """RLlib's state, or lean the learner's, and the search's; with it a search goes on bit-identically."""
        if self._lean:
            counted = {"metrics": self.metrics.get_state(), "iteration": self.iteration} if self._lean.env else {}
            return {"learner": self._lean.get_learner_state(), "search": self.search_state(), **counted}
        return {**super().get_state(*args, **kwargs), "search": self.search_state()}

    def set_state(self, state: SavedState) -> None:
        """Goes on from `get_state`, whatever happened since."""
        if self._lean:
            self._lean.set_learner_state(state["learner"])
            if "metrics" in state:
                self.metrics.set_state(state["metrics"])
                self._iteration = state["iteration"]
        else:
            super().set_state(state)
        if "search" in state:
            self._set_search_state(copy.deepcopy(state["search"]))

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """RLlib's; on the lean path none, as the state holds everything."""
        return [] if self.config.lean else super().get_checkpointable_components()

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """As RLlib, which goes on to tell its env runners; on the lean path there are none."""
        if self.config.lean:
            Checkpointable.restore_from_path(self, path, *args, **kwargs)
        else:
            super().restore_from_path(path, *args, **kwargs)
