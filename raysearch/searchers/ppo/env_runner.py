"""RLlib's env runner for searches: it decides every call, several of which may be under way, and steps the environment.

The environment is the product's own, see `raysearch.searchers.interface.Environment`: it charges the budget, writes
the rows, and has as many workers as there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED, NUM_ENV_STEPS_SAMPLED_LIFETIME

from envs.saved_state import SavedState
from raysearch.base.errors import InputError
from raysearch.searchers.interface import Environment, Outcome
from raysearch.searchers.ppo.module import BEHAVIOUR_LOGP, CALL, UNDER_WAY, EliteModule


@dataclass(frozen=True, eq=False)
class Proposal:
    """A call that was decided, and what led to it.

    Attributes:
        number: Of the call, from 0.
        observation: What was seen `[T, A]`.
        chosen: What the policy chose `[A]`.
        log_prob: How likely it was to.
        behaviour_log_prob: How likely the search was, which may filter what the policy draws.
    """

    number: int
    observation: np.ndarray
    chosen: np.ndarray
    log_prob: float
    behaviour_log_prob: float


class Answered(NamedTuple):
    """A call of the present round, and what the policy is rewarded with."""

    proposal: Proposal
    reward: float


def episode_of(answered: list[Answered], last: np.ndarray) -> SingleAgentEpisode:
    """RLlib's episode of the calls of a round, of which the last led to what is seen in `last`."""
    proposals = [each.proposal for each in answered]
    return SingleAgentEpisode(
        observations=[*(each.observation for each in proposals), last],
        actions=[each.chosen for each in proposals],
        rewards=[float(np.float32(each.reward)) for each in answered],
        infos=[{} for _ in range(len(answered) + 1)],
        extra_model_outputs={
            Columns.ACTION_LOGP: [np.float32(each.log_prob) for each in proposals],
            BEHAVIOUR_LOGP: [np.float32(each.behaviour_log_prob) for each in proposals],
        },
        len_lookback_buffer=0,
    ).to_numpy()


class SearchEnvRunner(EnvRunner):
    """Has the module decide calls until as many are under way as may be, and takes in what is answered first.

    Attributes:
        env: An `Environment`; `attach` sets one that somebody else owns.
        module: The policy, which is the learner's: no update has to be sent.
        next_call: Number of the next call.
    """

    config: Any  # a LearnToShardConfig
    env: Any
    module: EliteModule

    def __init__(self, *, config: Any, taken: Callable[[Outcome], None], folder: str, **kwargs: Any) -> None:
        """As RLlib's; `taken` hears of every call that was taken in, `folder` is for an environment's own files."""
        super().__init__(config=config, worker_index=0, **kwargs)
        self._folder = folder
        torch.set_num_threads(1)  # more are slower on matrices this small, and could change the order of sums
        self._heard = taken
        self._owned: Any = None
        self._under_way: list[Proposal] = []
        self._answered: list[Answered] = []
        self.next_call = 0
        self.make_env()

    def make_env(self) -> None:
        """Makes the environment that the configuration names, if it names one."""
        if self.config.env is None:
            return
        create: Any
        _, create = Algorithm._get_env_id_and_creator(self.config.env, self.config)
        context = EnvContext(self.config.env_arguments(self._folder), worker_index=0)
        made = create(context)
        if not hasattr(made, "take"):
            raise InputError(
                f"expected an environment that begins and takes calls, as raysearch.runs.search_environment."
                f"SearchEnvironment does, got {made}: gymnasium's are for RLlib's own algorithms"
            )
        self._owned = made
        self.attach(made, getattr(made, "decode", np.copy))

    def attach(self, env: Environment, decode: Callable[[np.ndarray], np.ndarray]) -> None:
        """Steps this environment from now on, whose action for one of the action space `decode` gives."""
        self.env, self._decode = env, decode

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Of the environment, or of the configuration."""
        source: Any = self.config if self._owned is None else self._owned
        both = source.observation_space, source.action_space
        return {INPUT_ENV_SPACES: both, DEFAULT_MODULE_ID: both}

    def sample(self, *, num_timesteps: int | None = None, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Takes in calls until a round is full or `num_timesteps` are made.

        Returns:
            The round, as an episode, once it is full, or where the budget is spent; until then nothing.
        """
        for _ in range(num_timesteps or self.config.round_calls):
            self._decide()
            if not self.env.under_way:
                break
            self._take()
            if len(self._answered) >= self.config.round_calls:
                break
        over = not (self.env.under_way or self.env.may_begin)
        if not self._answered or not (over or len(self._answered) >= self.config.round_calls):
            return []
        answered, self._answered = self._answered, []
        return [episode_of(answered, self.module.look(self.env.observation))]

    def _decide(self) -> None:
        while self.env.may_begin:
            seen = self.module.look(self.env.observation)
            batch = {Columns.OBS: seen[None], CALL: np.array([self.next_call])}
            out = self.module.forward_exploration({**batch, UNDER_WAY: [each.chosen for each in self._under_way]})
            log_probs = (float(out[name][0]) for name in (Columns.ACTION_LOGP, BEHAVIOUR_LOGP))
            proposal = Proposal(self.next_call, seen, out[Columns.ACTIONS][0], *log_probs)
            self.next_call += 1
            self._under_way.append(proposal)
            self.env.begin(self._decode(self.module.as_action(proposal.chosen)))

    def _take(self) -> None:
        action, outcome = self.env.take()
        decode, as_action = self._decode, self.module.as_action
        proposal = next(each for each in self._under_way if np.array_equal(decode(as_action(each.chosen)), action))
        self._under_way.remove(proposal)
        reward = self.module.note(proposal.number, as_action(proposal.chosen), outcome)
        self._answered.append(Answered(proposal, reward))
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, 1, reduce="sum")
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED_LIFETIME, 1, reduce="lifetime_sum")
        self._heard(outcome)

    def remember(self, action: np.ndarray, outcome: Outcome) -> None:
        """Takes in a call that somebody else decided."""
        self.module.note(self.next_call, action, outcome)
        self.next_call += 1
        self._heard(outcome)

    def get_metrics(self) -> Any:
        """RLlib's, since they were asked for last."""
        return self.metrics.reduce()

    def assert_healthy(self) -> None:
        """It is in the algorithm's own process."""

    def get_state(self, *_: Any, **__: Any) -> SavedState:
        """Everything but the weights: plain values and arrays. An environment that it made is part of it."""
        return {
            "memory": self.module.get_memory(),
            "next_call": self.next_call,
            "under_way": [asdict(each) for each in self._under_way],
            "answered": [[asdict(each.proposal), each.reward] for each in self._answered],
            "env": self._owned.get_state() if self._owned is not None else None,
        }

    def set_state(self, state: SavedState) -> None:
        """Goes back to where `get_state` was called."""
        self.module.set_memory(state["memory"])
        self.next_call = state["next_call"]
        self._under_way = [Proposal(**each) for each in state["under_way"]]
        self._answered = [Answered(Proposal(**proposal), reward) for proposal, reward in state["answered"]]
        if self._owned is not None:
            self._owned.set_state(state["env"])

    def stop(self) -> None:
        """Closes the environment that it made."""
        if self._owned is not None:
            self._owned.close()


class LocalRunners:
    """The one env runner of a search, as RLlib's group of those; a real group would start Ray."""

    def __init__(self, runner: SearchEnvRunner) -> None:
        self.local_env_runner = runner

    def _none(self) -> int:
        """Other processes are the environment's workers, which are not the group's."""
        return 0

    num_remote_env_runners = num_healthy_remote_workers = num_remote_worker_restarts = _none
    num_env_runners_dropped_lifetime = num_in_flight_async_reqs = _none

    def foreach_env_runner(self, func: Any, **_: Any) -> list[Any]:
        """What `func` makes of the runner."""
        return [func(self.local_env_runner)]

    def get_spaces(self) -> Any:
        """The runner's."""
        return self.local_env_runner.get_spaces()

    def sync_weights(self, **_: Any) -> None:
        """Nothing: the algorithm sees to it."""

    def sync_env_runner_states(self, **_: Any) -> None:
        """Nothing: it has no connectors."""

    def stop(self) -> None:
        """Stops the runner."""
        self.local_env_runner.stop()
