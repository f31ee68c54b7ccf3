"""RLlib's env runner for searches: its environments share one budget and one elite history with those of all others."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from envs.registration import ENV_ID, make_env, stepped_together
from envs.saved_state import SavedState
from envs.strategy_env import StrategyEnv
from envs.vector_env import VectorStrategyEnv
from raysearch.processes.deadline import within
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import Proposal
from raysearch.searchers.ppo.connectors import ChooseActions, ShowElites

_ASIDE = 2
"""Stream of the noise of calls that are not the search's, such as those of an evaluation."""


class Round(NamedTuple):
    """Calls of a search in which nobody hears of the others, and what must be known to make them.

    Environment k of K makes the calls k, k + K, k + 2K, ... of the search, whichever runner steps it.

    Attributes:
        first_call: Number of the first of them; a multiple of K.
        calls: How many.
        version: Calls that a runner must know of to make them of `news`; -1 if `news` has all.
        news: What the search's own actor learned since, see `EliteActor.news`.
        weights: Of the policy; None if they are as before.
        metrics: Whether RLlib's metrics are asked for, too.
    """

    first_call: int
    calls: int
    version: int
    news: SavedState
    weights: Any = None
    metrics: bool = True


class OutOfDate(RuntimeError):
    """A runner got the news since a version that it does not have: it was restarted, and needs all."""


class Brief(gym.Wrapper):
    """An environment whose episodes end with its share of a budget, and whose info leaves out the evaluation.

    Nobody looks at it in a search, and sending it along with each episode would cost as much as all else of a call.
    A call that takes too long is interrupted.

    Args:
        env: Of the search.
        share: Calls of an episode.
        timeout_s: Longest call.

    Attributes:
        calls: Of the present episode so far.
    """

    def __init__(self, env: gym.Env, share: int, timeout_s: float) -> None:
        super().__init__(env)
        self._share, self._timeout_s, self.calls = share, timeout_s, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        self.calls = 0
        return within(self._timeout_s, lambda: self.env.reset(**kwargs), lambda: "a reset")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `StrategyEnv.step`."""
        step = within(self._timeout_s, lambda: self.env.step(action), lambda: asked_about(self.env, action))
        observation, reward, terminated, truncated, info = step
        self.calls += 1
        light = {name: value for name, value in info.items() if name != "evaluation"}
        return observation, reward, terminated, truncated or self.calls >= self._share, light


def asked_about(env: gym.Env, action: Any) -> str:
    """The strategy that an action stands for, or the action where only the environment knows."""
    inner = env.unwrapped
    return str(inner.space.decode(inner.plain(action)) if isinstance(inner, StrategyEnv) else f"action {action}")


class EliteEnvRunner(SingleAgentEnvRunner):
    """RLlib's env runner with an actor per environment, which sees, chooses and is rewarded through connectors.

    `sample_round` makes calls of the search. `sample`, which RLlib's `evaluate()` asks, plays on from there in
    environments apart and leaves no trace.

    Attributes:
        actors: One per environment.
    """

    config: Any  # a LearnToShardConfig
    env: Any
    module: Any
    _ongoing_episodes: list[Any]

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        self.actors: list[Any] = []
        self._version = self._due = -1
        self._metrics_aside: Any = None
        self._shared_data: dict[str, Any] = {}
        super().__init__(config=config, **kwargs)
        self.actors = [self._new_actor() for _ in range(self.num_envs)]
        for actor in self.actors:
            actor.module, actor.stride = self.module, self.config.stride
        shown: Any = self._env_to_module
        chosen: Any = self._module_to_env
        (show,), (self._choose,) = shown[ShowElites], chosen[ChooseActions]
        show.actors = self._choose.actors = self.actors

    def _new_actor(self) -> Any:
        return self.config.actor_class(self.config, self.env.single_action_space)

    @property
    def _first_lane(self) -> int:
        """Number of its first environment among those that share a round; asynchronous ones share it with nobody."""
        if self.config.asynchronous:
            return 0
        return max((self.worker_index or 1) - 1, 0) * self.config.num_envs_per_env_runner

    def calls_of(self, calls: int) -> np.ndarray:
        """How many of the search's next `calls` each environment makes, `[num_envs]`."""
        lanes = self._first_lane + np.arange(self.config.num_envs_per_env_runner)
        return np.maximum(-(-(calls - lanes) // self.config.stride), 0)

    def make_env(self) -> None:
        """Builds the environments, whose episodes end with their share of the search's budget.

        RLlib's own would register a global name, of which gymnasium warns the second time, and has no such shares.
        """
        if self.config.env is None:
            return
        if self.env is not None:
            self.env.close()
        context: Any = EnvContext(
            self.config.env_arguments, worker_index=self.worker_index, num_workers=self.num_workers
        )
        shares = [max(int(share), 1) for share in self.calls_of(self.config.budget)]
        envs: Any
        if self.config.env == ENV_ID:  # not by RLlib's registry, which a second `ray.init` of this process empties
            envs = stepped_together([make_env(**(context | {"budget": share})) for share in shares])
        else:
            create: Any
            _, create = Algorithm._get_env_id_and_creator(self.config.env, self.config)
            limit_s = self.config.sample_timeout_s
            envs = SyncVectorEnv([lambda share=share: Brief(create(context), share, limit_s) for share in shares])
        self.env, self.num_envs = DictInfoToList(envs), len(shares)
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env.unwrapped,
                "env_context": context,
            },
        )

    def sample_round(self, round_: Round) -> tuple[list[tuple[int, SingleAgentEpisode]], Any]:
        """Makes this runner's share of a round.

        Returns:
            What its environments saw and did, each with its number among them, and RLlib's metrics or None.

        Raises:
            OutOfDate: It does not know what the round's news assume.
        """
        if round_.version not in (-1, self._version):
            raise OutOfDate(f"expected to know {round_.version} calls, know {self._version}")
        if round_.weights is not None:
            self.module.set_state(round_.weights)
            for actor in self.actors:
                actor.forget()
        self._catch_up(round_)
        # An episode of one piece is returned as it is, one that goes on is cut and goes on under the same id.
        lanes = {episode.id_: lane for lane, episode in enumerate(self._ongoing_episodes)}
        episodes = super().sample(num_timesteps=int(self.calls_of(round_.calls).sum()), explore=True)
        metrics = self.get_metrics() if round_.metrics else None
        return [(lanes[episode.id_], episode) for episode in episodes], metrics

    def make_call(self, proposal: Proposal, *, metrics: bool) -> tuple[Outcome, Any]:
        """Makes a call that the algorithm has decided. Its turns come `lanes` calls apart.

        Returns:
            What came of it, and RLlib's metrics if they are asked for.
        """
        (actor,) = self.actors
        if proposal.number != self._due or not self._ongoing_episodes[0].is_reset:
            self._reset_envs_and_episodes(explore=True)
            self._show(proposal.number // self.config.lanes)
        self._due = proposal.number + self.config.lanes
        actor.adopt(proposal)
        self._ongoing_episodes[0].set_observations(new_data=proposal.observation, at_indices=-1)
        self._cached_to_module = {
            Columns.OBS: torch.from_numpy(np.array(proposal.observation[None])),
            Columns.ACTIONS: proposal.action[None],
            Columns.ACTION_LOGP: np.array([proposal.log_prob], np.float32),
        }
        (episode,) = super().sample(num_timesteps=1, explore=True)
        outcome = Outcome.of(episode.get_observations(-1), episode.get_rewards(-1), episode.get_infos(-1))
        return outcome, self.get_metrics() if metrics else None

    def inform(self, news: SavedState) -> None:
        """Passes what the search has found to all actors; for evaluations."""
        for actor in self.actors:
            actor.hear(news)
            actor.forget()

    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Plays on from where the search is, in a runner apart: charges and changes nothing. See RLlib's."""
        aside: Any = type(self)(config=self.config, worker_index=self.worker_index, num_workers=self.num_workers)
        aside.play_on_from(self)
        episodes = SingleAgentEnvRunner.sample(aside, **kwargs)
        self._metrics_aside = aside.get_metrics()
        aside.stop()
        return episodes

    def play_on_from(self, other: EliteEnvRunner) -> None:
        """Takes over what another runner's policy and actors know, with noise that is not the search's."""
        self.module.set_state(other.module.get_state())
        for actor, known in zip(self.actors, other.actors, strict=True):
            actor.set_memory(copy.deepcopy(known.get_memory()))
            actor.stream = _ASIDE
        self._reset_envs_and_episodes(self.config.explore)
        self._show(0)

    def get_metrics(self) -> Any:
        """RLlib's, of what was sampled last: of the search, or aside from it."""
        aside, self._metrics_aside = self._metrics_aside, None
        return super().get_metrics() if aside is None else aside

    def _catch_up(self, round_: Round) -> None:
        """Brings actors, environments and what was seen last to the beginning of a round."""
        for actor in self.actors:
            actor.hear(round_.news)
        self._choose.alike, self._choose.lanes_before = True, self._first_lane
        for lane, actor in enumerate(self.actors):
            actor.next_call = round_.first_call + self._first_lane + lane
        if self._needs_initial_reset:
            self._reset_envs_and_episodes(explore=True)
        # An asynchronous environment's share of the budget is not known beforehand: its episode has no end.
        self._show(0 if self.config.asynchronous else round_.first_call // self.config.lanes)
        self._version = round_.first_call

    def _show(self, calls: int) -> None:
        """Gives the environments the search's elites and each its calls so far, and the policy what they show."""
        state = {**self.actors[0].env_state, "calls": calls}
        inner = self.env.unwrapped
        observations: Any = [None] * self.num_envs
        if isinstance(inner, VectorStrategyEnv):
            inner.set_state([state] * self.num_envs)
            observations = inner.observations
        else:
            for index, env in enumerate(inner.envs):
                env.calls = calls
                if hasattr(env.unwrapped, "set_state"):
                    env.unwrapped.set_state(state)
                    observations[index] = env.unwrapped.observation
        shown = []
        for episode, observation in zip(self._ongoing_episodes, observations, strict=True):
            if not episode.is_reset:  # over: it starts anew with the next step, and what it shows is not looked at
                episode = SingleAgentEpisode(observations=[self.env.single_observation_space.sample()], infos=[{}])
            elif observation is not None:
                episode.set_observations(new_data=observation, at_indices=-1)
            shown.append(episode)
        self._cached_to_module = self._env_to_module(
            episodes=shown,
            batch={},
            explore=True,
            rl_module=self.module,
            shared_data=self._shared_data,
            metrics=self.metrics,
        )
