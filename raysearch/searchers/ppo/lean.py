"""The lean path: a search without Ray's env runners, episodes and connectors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import numpy as np
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env.env_context import EnvContext

from envs.saved_state import SavedState
from raysearch.processes.deadline import within
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.env_runner import asked_about


@final
class LeanPath:
    """A learner alone, whose module acts, and the one environment if the configuration has one.

    Args:
        config: A `LearnToShardConfig`.
        create_env: Makes the environment that it names.

    Attributes:
        learner: Not built by anybody else.
        module: The policy, shared with the learner: no update has to be sent.
        action_space: Of the environment, or of the configuration.
        env: None where another one asks and tells.
    """

    def __init__(self, config: Any, create_env: Callable[[EnvContext], Any]) -> None:
        self.env = create_env(EnvContext(config.env_arguments, worker_index=0)) if config.env is not None else None
        spaces_of = self.env or config
        self.action_space = spaces_of.action_space
        self.learner: Any = config.build_learner(
            spaces={DEFAULT_MODULE_ID: (spaces_of.observation_space, self.action_space)}
        )
        self.learner.build()
        self.module: Any = self.learner.module[DEFAULT_MODULE_ID].unwrapped()
        self._seen: Any = None
        self._timeout_s = config.sample_timeout_s

    def look(self) -> np.ndarray:
        """What the environment shows, `[T, A]`."""
        assert self.env is not None
        if self._seen is None:
            self._seen = self.env.reset()[0]
        return self._seen

    def step(self, action: np.ndarray) -> Outcome:
        """Makes a call in the environment."""
        assert self.env is not None
        env = self.env
        step = within(self._timeout_s, lambda: env.step(action), lambda: asked_about(env, action))
        self._seen, reward, _, _, info = step
        return Outcome.of(self._seen, reward, info)

    def get_state(self) -> SavedState:
        """Of the environment: plain values and arrays."""
        return {"seen": self._seen, "env": self.env.get_state() if self.env is not None else None}

    def set_state(self, state: SavedState) -> None:
        """Goes back to where `get_state` was called."""
        self._seen = state["seen"]
        if self.env is not None:
            self.env.set_state(state["env"])

    def get_learner_state(self) -> SavedState:
        """Weights and optimiser, copied."""
        learner = self.learner.get_state(components=[COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER])
        return copy.deepcopy({name: learner[name] for name in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)})

    def set_learner_state(self, state: SavedState) -> None:
        """Takes them over; RLlib goes on to write into the optimiser's arrays, hence the copy."""
        self.learner.set_state(copy.deepcopy(state))
