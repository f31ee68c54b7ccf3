"""What a search owns, whoever makes its calls: its memory, and the account of its calls, agents and best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import EliteActor


@final
class Search:
    """One search: `note` and `count` take its calls in, `begin_agent` begins the next agent.

    Args:
        config: A `LearnToShardConfig`.
        actor: An actor that knows of no call.

    Attributes:
        actor: The search's memory: its elites and whatever else actors remember.
        calls: Calls made since the search began, by all agents.
        restarts: Agents that came before the present one.
        best: Best feasible throughput that was seen, 0.0 while there is none.
        chunk_bests: The same of each agent's calls.
    """

    def __init__(self, config: Any, actor: EliteActor) -> None:
        self.config, self.actor = config, actor
        self.calls = self.restarts = self._born = 0
        self.best = 0.0
        self.chunk_bests = [0.0]
        self._chunk_of_last_call = 1

    @property
    def calls_left(self) -> int:
        """Calls until the budget is spent."""
        return self.config.budget - self.calls

    @property
    def chunk(self) -> int:
        """Number of the present agent, from 1."""
        return self.restarts + 1

    @property
    def confidence(self) -> float:
        """Least certain head's largest probability in the last call; 0 before the first."""
        return self.actor.output.confidence if self.actor.output else 0.0

    @property
    def agent_is_done(self) -> bool:
        """Whether the present agent is to end here; see `LearnToShard`."""
        return self.calls_left > 0 and (
            self.confidence >= self.config.confidence_threshold
            or self.calls - self._born >= math.ceil(self.config.budget / self.config.chunks)
            or self.actor.stagnant_calls >= self.config.patience
        )

    def begin_agent(self) -> None:
        """Ends the present agent; elites and best stay."""
        self.restarts += 1
        self._born = self.calls
        self.chunk_bests.append(0.0)
        self.actor.start_over()

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call: its number, its best, and whether it has ended."""
        chunk = self._chunk_of_last_call
        ended = self.chunk > chunk or self.calls_left == 0
        return {"chunk": float(chunk), "chunk_best": self.chunk_bests[chunk - 1], "chunk_done": float(ended)}

    def count(self, outcome: Outcome) -> None:
        """Counts a call that the actor knows."""
        self.calls += 1
        self._chunk_of_last_call = self.chunk
        raw = float(outcome.raw) if outcome.feasible else 0.0
        self.best = max(self.best, raw)
        self.chunk_bests[-1] = max(self.chunk_bests[-1], raw)

    def note(self, episodes: Sequence[tuple[int, SingleAgentEpisode]], first_call: int) -> None:
        """Takes in and counts what env runners sampled, in the order of the calls' numbers.

        Args:
            episodes: Each with the number of its environment among those that shared the calls.
            first_call: Number of the first call of the first environment.
        """
        stride = self.config.stride
        calls: dict[int, tuple[np.ndarray, Outcome]] = {}
        for lane, episode in episodes:
            numbers = range(first_call + lane, first_call + lane + stride * len(episode), stride)
            actions, rewards, infos = episode.get_actions(), episode.get_rewards(), episode.get_infos()
            seen = episode.get_observations()
            for step, number in enumerate(numbers):
                outcome = Outcome.of(seen[step + 1], rewards[step], infos[step + 1])
                calls[number] = self.actor.as_action(np.array(actions[step])), outcome
        for number, (action, outcome) in sorted(calls.items()):
            self.actor.note(number, action, outcome)
            self.count(outcome)
        last = max(episodes, key=lambda each: (len(each[1]), each[0]))[1]
        inputs = torch.from_numpy(np.array(last.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, -1))[None])
        self.actor.output = self.actor.policy_output({Columns.ACTION_DIST_INPUTS: inputs})

    def get_state(self) -> SavedState:
        """What `set_state` needs: plain values and arrays."""
        return {
            "actor": self.actor.get_memory(),
            "calls": self.calls,
            "restarts": self.restarts,
            "born": self._born,
            "best": self.best,
            "chunk_bests": list(self.chunk_bests),
            "chunk_of_last_call": self._chunk_of_last_call,
        }

    def set_state(self, state: SavedState) -> None:
        """Goes back to where `get_state` was called."""
        self.actor.set_memory(state["actor"])
        self.calls, self.restarts, self._born = state["calls"], state["restarts"], state["born"]
        self.best, self.chunk_bests = state["best"], list(state["chunk_bests"])
        self._chunk_of_last_call = state["chunk_of_last_call"]


Weights = Callable[[], Any]
"""The policy's present ones, as RLlib's modules take them."""
SearchFigures = Callable[[list[Any]], None]
"""Takes in RLlib's metrics of several env runners."""


class Sampling(Protocol):
    """A way of making a search's calls."""

    def sample(self) -> list[SingleAgentEpisode]:
        """Makes the next calls and notes them; what the policy is to learn from, or nothing as yet."""
        ...

    def policy_changed(self) -> None:
        """Hears that the policy was updated, or that another agent has begun."""
        ...

    def get_state(self) -> SavedState:
        """What it needs to go on besides the search itself."""
        ...

    def set_state(self, state: SavedState) -> None:
        """Goes on from there; the search has been set already, and whatever runners know is out of date."""
        ...
