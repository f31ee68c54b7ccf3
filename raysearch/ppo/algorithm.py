"""The paper's PPO as an RLlib algorithm: its configuration, its training step, and its restarts."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_OPTIMIZER,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.env.env_context import EnvContext
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

from raysearch.ppo import environment as environment  # registers it
from raysearch.ppo.actor import EliteActor
from raysearch.ppo.ahead import NOTHING_SEEN, CallsAhead, episode_of
from raysearch.ppo.asynchronous import RETRY_S, Portions, answer, handle
from raysearch.ppo.connectors import ChooseActions, ShowElites
from raysearch.ppo.env_runner import EliteEnvRunner, Round
from raysearch.ppo.learner import EliteLearner
from raysearch.ppo.module import EliteAttention
from raysearch.ppo.options import Options, SharedOptions
from raysearch.ppo.schedule import cosine
from raysearch.searcher import Outcome

# RLlib warns on every start of deprecated calls that it makes itself, and Tune tells of one that takes ten seconds.
# Importing them sets the levels, so we go last.
for _name in ("ray.rllib", "ray._common.deprecation", "ray.tune.utils.util", "ray.tune.trainable.trainable"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_log = logging.getLogger(__name__)


class LearnToShardConfig(PPOConfig):
    """RLlib configuration of a search; docs/rllib.md has every field, `search` sets what options set.

    Example:
        >>> workload = {"workload": "gpt_moe_1_2t_16k"}
        >>> config = LearnToShardConfig().environment("raysearch/Strategy-v0", env_config=workload)
        >>> config = config.search(budget=4000, seed=1).env_runners(num_env_runners=2, num_envs_per_env_runner=4)
        >>> config.lanes, config.round_calls
        (8, 8)

    Attributes:
        actor_class, learner_class, module_class: What the algorithm is made of.
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
        runner_restart_timeout_s: Longest wait for a lost env runner to come back.
    """

    actor_class: ClassVar[type[EliteActor]] = EliteActor
    learner_class: ClassVar[type[EliteLearner]] = EliteLearner
    module_class: ClassVar[type[RLModule]] = EliteAttention

    def __init__(self, algo_class: type | None = None) -> None:
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


class LearnToShard(PPO):
    """RLlib algorithm that searches: one PPO agent after another within one budget of calls.

    Every round of calls updates the policy. Then the agent restarts (fresh weights and optimiser, in place) if

    - every head's largest probability had reached the confidence threshold in the last call (early exit),
    - it has lived for a chunk: budget / chunks calls, rounded up, or
    - nothing better was found for as many calls as the configured patience.

    The next agent gets a whole chunk, or what is left of the budget, so what an early exit saves goes to further
    agents. Elites and best stay. A round cut short by the end of the budget is learned from as it is.

    The search's memory lives in one place, `actor`. Env runners are told at the beginning of a round what the others
    found in the last one, and what they found themselves comes back with their episodes. A lost runner's calls are made
    again by its successor: noise depends on the number of a call alone, so these are the same calls.

    Built `lean`, it acts itself (`ask`, `tell`) and needs neither Ray nor env runners; `train()` makes the same calls.

    Source: Learning to Shard, section 3 (Optimization and early exit).

    Attributes:
        actor: The search's memory: its elites and whatever else actors remember.
        calls: Calls made since the search began, by all agents.
        restarts: Agents that came before this one.
        policy_loss: Of the last gradient step; None before the first.
        best: Best feasible throughput that was seen, 0.0 while there is none.
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
        """Builds RLlib's parts, or on the lean path a learner alone, and the first agent."""
        torch.set_num_threads(1)
        self.calls = self.restarts = self._born = 0
        self.best = 0.0
        self._chunk_bests = [0.0]
        self._chunk_of_last_call = 1
        self._told = -1  # calls that the env runners know of; -1 before they were told anything
        self._told_learned = False  # whether they have the present weights
        self._portions: Portions | None = None
        self._ahead: CallsAhead | None = None
        self._unlearned: list[tuple[int, SingleAgentEpisode]] = []  # of portions, until they make a round
        self.policy_loss: float | None = None
        self._env: Any = None
        self._seen: Any = None
        if self.config.lean:
            self._build_lean()
        else:
            super().setup(config)
            runner: Any = self.env_runner
            self.actor = self.config.actor_class(self.config, runner.env.single_action_space)
            self.actor.module = runner.module
            remote: Any = dict(self.env_runner_group.foreach_env_runner(handle, local_env_runner=False))
            if self.config.ahead:
                self._ahead = CallsAhead(
                    runner,
                    [remote[worker] for worker in sorted(remote)],
                    round_calls=self.config.round_calls,
                    budget=self.config.budget,
                    give_up_s=self.config.runner_restart_timeout_s,
                )
            if self.config.asynchronous:
                self._portions = Portions(
                    remote,
                    size=self.config.round_calls // self.config.num_env_runners,
                    budget=self.config.budget,
                    give_up_s=self.config.runner_restart_timeout_s,
                )
        self._start_agent()

    def _build_lean(self) -> None:
        if self.config.env is not None:
            self._set_up_metrics()  # Ray's, which train() logs to
            self._env = self.env_creator(EnvContext(self.config.env_config, worker_index=0))
        spaces_of: Any = self._env or self.config
        spaces = {DEFAULT_MODULE_ID: (spaces_of.observation_space, spaces_of.action_space)}
        self.learner: Any = self.config.build_learner(spaces=spaces)
        self.learner.build()
        self.env_runner_group = self.eval_env_runner_group = None
        self.callbacks = []
        self.actor = self.config.actor_class(self.config, spaces_of.action_space)
        self.actor.module = self.learner.module[DEFAULT_MODULE_ID].unwrapped()

    def _setup_logdir(self) -> None:
        if not self.config.lean:  # which writes nothing
            super()._setup_logdir()

    @property
    def calls_left(self) -> int:
        """Calls until the budget is spent."""
        return self.config.budget - self.calls

    @property
    def confidence(self) -> float:
        """Least certain head's largest probability in the last call; 0 before the first."""
        return self.actor.opinion.confidence if self.actor.opinion else 0.0

    @property
    def learning_rate(self) -> float:
        """Rate of an update made now: a half cosine from the configured rate at call 0 to 0 at the budget's end."""
        return self.config.lr * cosine(self.calls / self.config.budget)

    def step(self) -> dict[str, Any]:
        """One `train()`: RLlib's, which is done where the budget is spent."""
        if self.config.lean:
            self.training_step()
            result: Any = {**self.metrics.compile(), NUM_ENV_STEPS_SAMPLED_LIFETIME: self.calls}
        else:
            result = super().step()
        return {**result, "done": self.calls_left == 0}

    def training_step(self) -> None:
        """Makes the next `calls_per_training_step` calls, or fewer: the end of a chunk or of the budget comes first."""
        end, chunk = min(self.calls + self.config.calls_per_training_step, self.config.budget), self.chunk
        while self.calls < end and self.chunk == chunk:
            if self.config.lean:
                self._call()
            elif self._portions:
                self._portion(self._portions)
            elif self._ahead is not None:
                self._call_of(self._ahead)
            else:
                self._round()
        progress = {"calls": self.calls, "best": self.best}
        for name, value in {**progress, **self.figures(), **self.chunk_figures()}.items():
            self.metrics.log_value(name, value, window=1)

    @property
    def chunk(self) -> int:
        """Number of the present agent, from 1."""
        return self.restarts + 1

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call: its number, its best, and whether it has ended."""
        chunk = self._chunk_of_last_call
        ended = self.chunk > chunk or self.calls_left == 0
        return {"chunk": float(chunk), "chunk_best": self._chunk_bests[chunk - 1], "chunk_done": float(ended)}

    def ask(self, observation: np.ndarray) -> np.ndarray:
        """Lean: an action `[A]` for an observation `[T, A]`; several may be asked for ahead."""
        return self.actor.act(observation)

    def tell(self, outcome: Outcome) -> None:
        """Lean: what came of the oldest action that was asked for; learns and perhaps restarts where that is due."""
        self.actor.tell(outcome)
        self._count(outcome)
        if self.actor.recorded < self.config.round_calls and self.calls_left > 0:
            return
        self.policy_loss = self.learner.update_rollout(self.actor.take(), self.calls)
        self._restart_where_due()
        self.actor.forget()

    def _call(self) -> None:
        if self._seen is None:
            self._seen = self._env.reset()[0]
        action = self.ask(self._seen)
        self._seen, reward, _, _, info = self._env.step(action)
        self.metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), 1, reduce="lifetime_sum")
        self.tell(Outcome.of(self._seen, reward, info))

    def _round(self) -> None:
        """A round as RLlib's PPO makes one: sample, learn, and send the weights with the next request."""
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            end, episodes = self.calls + min(self.config.round_calls, self.calls_left), []
            while self.calls < end:
                episodes += self._fragment(min(self.config.fragment_calls, end - self.calls), end)
        self._learn(episodes)

    def _fragment(self, calls: int, end: int) -> list[tuple[int, SingleAgentEpisode]]:
        """The next calls of a round that goes to call `end`: tells the env runners what is new, and takes them in."""
        first, learned = self.calls, not self._told_learned
        news = self.actor.news(max(self._told, 0), learned=learned)
        weights = self._weights() if learned else None
        episodes = self._sample(Round(first, calls, self._told, news, weights, metrics=first + calls == end))
        self._told, self._told_learned = first, True
        self._take_in(episodes, first)
        self.actor.next_call = self.calls
        return episodes

    def _portion(self, portions: Portions) -> None:
        """Takes in the next portion that some env runner has done, and learns once they make a round.

        An agent learns from its own calls; those of one that has ended are known and counted when they come.
        """
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            portions.hand_out(self.chunk, self.actor.settled, self.actor.news, self._weights)
            self.actor.next_call = portions.issued
            taken = portions.take()
            if taken is None:
                return
            _, portion, (episodes, metrics) = taken
            self.metrics.aggregate([metrics], key=ENV_RUNNER_RESULTS)
            self._take_in(episodes, portion.first_call)
        if portion.chunk == self.chunk:
            self._unlearned += episodes
        calls = sum(len(episode) for _, episode in self._unlearned)
        if calls >= self.config.round_calls or (calls and not self.calls_left):
            episodes, self._unlearned = self._unlearned, []
            self._learn(episodes)

    def _call_of(self, ahead: CallsAhead) -> None:
        """Decides calls until enough are under way, takes the oldest in, and learns where a round is full."""
        actor: Any = self.actor
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            if not self._told_learned:
                actor.module.set_state(self._weights())
                actor.forget()
                self._told_learned = True
            while len(ahead) < self.config.ahead and actor.next_call < self.config.budget:
                seen = actor.look(NOTHING_SEEN)
                ahead.send(actor.propose(seen, actor.judge(seen)))
            outcome, metrics = ahead.take()
            if metrics is not None:
                self.metrics.aggregate([metrics], key=ENV_RUNNER_RESULTS)
        actor.tell(outcome)
        self._count(outcome)
        if actor.recorded >= self.config.round_calls or not self.calls_left:
            self._update([episode_of(actor.take())])

    def _learn(self, episodes: list[tuple[int, SingleAgentEpisode]]) -> None:
        """Updates policy and critic, and restarts where that is due."""
        self.actor.learn()
        self._update([episode for _, episode in episodes])

    def _update(self, episodes: list[SingleAgentEpisode]) -> None:
        """Updates the policy, as RLlib's PPO does, and restarts where that is due."""
        self._told_learned = False
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
        self._restart_where_due()

    def _weights(self) -> Any:
        state = self.learner_group.get_state(
            components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}", inference_only=True
        )
        return state[COMPONENT_LEARNER][COMPONENT_RL_MODULE][DEFAULT_MODULE_ID]

    def _sample(self, round_: Round) -> list[tuple[int, SingleAgentEpisode]]:
        """The episodes of a round, each with its environment's number, in that order."""
        group = self.env_runner_group
        if not self.config.num_env_runners:
            answers = {1: group.local_env_runner.sample_round(round_)}
        else:
            answers = self._sample_remotely(group, round_)
        told = [metrics for _, metrics in answers.values() if metrics is not None]
        if told:
            self.metrics.aggregate(told, key=ENV_RUNNER_RESULTS)
        episodes = []
        for worker, (sampled, _) in sorted(answers.items()):
            first_lane = (worker - 1) * self.config.num_envs_per_env_runner
            episodes += [(first_lane + lane, episode) for lane, episode in sampled]
        return sorted(episodes, key=lambda each: each[0])

    def _sample_remotely(self, group: Any, round_: Round) -> dict[int, Any]:
        """Asks the runners until each has answered; lost ones are told all and asked anew, once they are back."""
        give_up_at = time.monotonic() + self.config.runner_restart_timeout_s
        # Weights are put where all find them; the few calls of a fragment travel with each request sooner.
        asked: Any = round_ if round_.weights is None else ray.put(round_)
        requests: dict[int, Any] = dict.fromkeys(range(1, self.config.num_env_runners + 1), asked)
        answers: dict[int, Any] = {}
        while requests:
            results = group.foreach_env_runner(
                [partial(answer, request=request) for request in requests.values()],
                kwargs=[{}] * len(requests),
                remote_worker_ids=list(requests),
                local_env_runner=False,
                healthy_only=False,
                mark_healthy=True,
            )
            answers |= {worker: answer for worker, answer in results if answer is not None}
            anew = [worker for worker in requests if worker not in answers]
            if not anew:
                break
            if time.monotonic() > give_up_at:
                raise RuntimeError(
                    f"env runners {anew} did not come back within {self.config.runner_restart_timeout_s:g} s"
                )
            _log.warning("note: env runners %s were lost; their calls are made again once they are back", anew)
            time.sleep(RETRY_S)
            all_told = ray.put(round_._replace(version=-1, news=self.actor.news(0), weights=self._weights()))
            requests = dict.fromkeys(anew, all_told)
        return answers

    def _take_in(self, episodes: list[tuple[int, SingleAgentEpisode]], first: int) -> None:
        """Notes all calls of a round, or of a portion, in the order of their numbers."""
        stride = self.config.stride
        calls: dict[int, tuple[np.ndarray, Outcome]] = {}
        for lane, episode in episodes:
            numbers = range(first + lane, first + lane + stride * len(episode), stride)
            actions, rewards, infos = episode.get_actions(), episode.get_rewards(), episode.get_infos()
            seen = episode.get_observations()
            for step, number in enumerate(numbers):
                outcome = Outcome.of(seen[step + 1], rewards[step], infos[step + 1])
                calls[number] = self.actor.as_action(np.array(actions[step])), outcome
        for number, (action, outcome) in sorted(calls.items()):
            self.actor.note(number, action, outcome)
            self._count(outcome)
        last = max(episodes, key=lambda each: (len(each[1]), each[0]))[1]
        inputs = torch.from_numpy(np.array(last.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, -1))[None])
        self.actor.opinion = self.actor.opinion_of({Columns.ACTION_DIST_INPUTS: inputs})

    def _count(self, outcome: Outcome) -> None:
        self.calls += 1
        self._chunk_of_last_call = self.chunk
        raw = float(outcome.raw) if outcome.feasible else 0.0
        self.best = max(self.best, raw)
        self._chunk_bests[-1] = max(self._chunk_bests[-1], raw)

    def _restart_where_due(self) -> None:
        chunk_calls = math.ceil(self.config.budget / self.config.chunks)
        is_done = (
            self.confidence >= self.config.confidence_threshold
            or self.calls - self._born >= chunk_calls
            or self.actor.stagnant_calls >= self.config.patience
        )
        if self.calls_left > 0 and is_done:
            self.restart()

    def restart(self) -> None:
        """Begins with a new agent."""
        self.restarts += 1
        self._born = self.calls
        self._chunk_bests.append(0.0)
        self._unlearned = []
        self.actor.start_over()
        self._start_agent()

    def _start_agent(self) -> None:
        entropy = np.random.SeedSequence([self.config.search_seed, self.restarts])
        seed = int(entropy.generate_state(1, np.uint64)[0])
        if self.config.lean:
            self.learner.reset_agent(seed)
        else:
            self.learner_group.foreach_learner(lambda learner: learner.reset_agent(seed))
        self.actor.forget()

    def figures(self) -> dict[str, float]:
        """Scalars to log; the policy's confidence, entropy (nats) and loss as of the last call, once there was one."""
        figures = {"restarts": float(self.restarts), "learning_rate": self.learning_rate}
        if self.actor.opinion is not None:
            figures |= {"confidence": self.confidence, "entropy": self.actor.opinion.entropy}
        if self.policy_loss is not None:
            figures["policy_loss"] = float(self.policy_loss)
        return figures

    def _before_evaluate(self) -> None:
        """Tells the runners that play on what the search has found."""
        news = self.actor.news(0)
        if self.eval_env_runner_group is not None:
            self.eval_env_runner_group.foreach_env_runner(lambda runner: runner.inform(news))
        else:
            self.env_runner_group.local_env_runner.inform(news)

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """RLlib's for evaluation; a search's own runners are told all they must know when they are asked again."""
        if env_runner_group is None or env_runner_group is self.env_runner_group:
            return []
        return super().restore_env_runners(env_runner_group)

    def search_state(self) -> dict[str, Any]:
        """What the search needs to go on besides weights and optimiser: plain values and arrays."""
        return {
            "actor": self.actor.get_memory(),
            "calls": self.calls,
            "restarts": self.restarts,
            "born": self._born,
            "best": self.best,
            "chunk_bests": list(self._chunk_bests),
            "chunk_of_last_call": self._chunk_of_last_call,
            "policy_loss": self.policy_loss,
            "seen": self._seen,
            "env": self._env.get_state() if self._env is not None else None,
            "portions": self._portions.get_state() if self._portions else None,
        }

    def _set_search_state(self, state: dict[str, Any]) -> None:
        self.actor.set_memory(state["actor"])
        self.calls, self.restarts, self._born = state["calls"], state["restarts"], state["born"]
        self.best, self._chunk_bests = state["best"], list(state["chunk_bests"])
        self._chunk_of_last_call = state["chunk_of_last_call"]
        self.policy_loss, self._seen = state["policy_loss"], state["seen"]
        self._told, self._told_learned, self._unlearned = -1, False, []
        if self._env is not None:
            self._env.set_state(state["env"])
        if self._portions:
            self._portions.set_state(state["portions"])
        if self._ahead is not None:
            self._ahead.begin_with(self.actor.in_flight)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, or lean the learner's, and the search's; with it a search goes on bit-identically."""
        if not self.config.lean:
            return {**super().get_state(*args, **kwargs), "search": self.search_state()}
        learner = self.learner.get_state(components=[COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER])
        kept = {name: learner[name] for name in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)}
        return {"learner": copy.deepcopy(kept), "search": self.search_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from `get_state`, whatever happened since."""
        if self.config.lean:
            # RLlib goes on to write into the optimiser's arrays, hence the copy.
            self.learner.set_state(copy.deepcopy(state["learner"]))
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
