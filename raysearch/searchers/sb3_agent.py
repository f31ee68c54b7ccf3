"""Stable-Baselines3's PPO behind ask and tell; see `raysearch.searchers.sb3_ppo`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.machine_state import check_moments, checked_mersenne
from raysearch.searchers.ppo.ppo_options import SB3Options

Sb3Observation = NDArray[np.float32]

_HEADS = 4  # [assumed] the paper names no number


class EliteExtractor(BaseFeaturesExtractor):
    """The paper's network up to the pooled features, as a user of Stable-Baselines3 would write it."""

    def __init__(self, observation_space: gymnasium.Space[Any], width: int) -> None:
        super().__init__(observation_space, width)
        assert observation_space.shape is not None
        self.embedding = nn.Linear(observation_space.shape[-1], width)
        self.encoder = nn.TransformerEncoderLayer(width, _HEADS, dim_feedforward=width, dropout=0.0, batch_first=True)

    def forward(self, observations: Tensor) -> Tensor:
        """`[N, T, A]` to `[N, width]`."""
        return self.encoder(self.embedding(observations)).mean(1)


class _Spaces(gymnasium.Env[Any, Any]):
    """The environment that Stable-Baselines3 asks for its spaces; nobody steps it."""

    def __init__(self, space: StrategySpace) -> None:
        # One row stands for any number T of elites: the network does not depend on it.
        self.observation_space = Box(-1.0, 1.0, (1, len(space.sizes)), np.float32)
        self.action_space = space.factored.actions


class SB3Agent:
    """One agent of Stable-Baselines3 after another within one budget.

    The library draws from the global generators of torch and numpy. Those are put aside while it works and found
    again as they were: the agent's own stand in their place.

    Attributes:
        restarts: Agents that came before this one.
        confidence: Least certain head's largest probability at the last call of the last full rollout.
    """

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: SB3Options) -> None:
        torch.set_num_threads(1)  # the networks are small, and the order of sums must not depend on the machine
        self.restarts, self.confidence = 0, 0.0
        self._space, self._budget, self._options = space, budget, options
        self._calls = self._born = 0
        self._acted: list[
            tuple[Sb3Observation, Action, Tensor, Tensor]
        ] = []  # not answered yet: also value, log-probability
        self._rollout: list[tuple[Sb3Observation, Action, float, Tensor, Tensor]] = []
        self._torch_state = torch.Generator().manual_seed(seed).get_state()
        self._numpy_state: Any = np.random.RandomState(seed % 2**32).get_state()
        self._initialise()

    def _initialise(self) -> None:
        with self._own_generators():
            self._model = PPO(
                "MlpPolicy",
                _Spaces(self._space),
                learning_rate=self._learning_rate,
                n_steps=self._options.rollout_calls,
                batch_size=self._options.rollout_calls,
                n_epochs=self._options.gradient_steps,
                policy_kwargs={
                    "features_extractor_class": EliteExtractor,
                    "features_extractor_kwargs": {"width": self._options.embedding},
                    "net_arch": [self._options.embedding],
                },
                device="cpu",
            )
        self._model.set_logger(Logger(folder=None, output_formats=[]))

    def _learning_rate(self, budget_left: float) -> float:
        """Half a cosine; `budget_left` falls from 1 to 0."""
        return self._options.learning_rate * 0.5 * (1 - math.cos(math.pi * budget_left))

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
        torch.set_rng_state(self._torch_state)
        np.random.set_state(self._numpy_state)  # noqa: NPY002
        try:
            yield
        finally:
            self._torch_state, self._numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)  # noqa: NPY002

    def act(self, observation: Sb3Observation) -> Action:
        """Samples an action [A] for the elites [T, A]."""
        self._model.policy.set_training_mode(False)
        with self._own_generators(), torch.no_grad():
            actions, values, log_probs = self._model.policy(torch.from_numpy(observation)[None])
        if len(self._rollout) + 1 == self._options.rollout_calls:
            heads: Any = self._model.policy.action_dist.distribution  # one categorical per head
            self.confidence = min(float(head.probs.max()) for head in heads)
        action = actions[0].numpy().astype(np.int64)
        self._acted.append((observation.copy(), action.copy(), values, log_probs))
        return action

    @property
    def under_way(self) -> list[Action]:
        """Actions [A] whose rewards are not known yet, in the order of their calls."""
        return [action for _, action, _, _ in self._acted]

    def record(self, place: int, reward: float, observation: Sb3Observation) -> None:
        """Takes the reward of a call by its place in `under_way`; learns and perhaps restarts with a full rollout."""
        elites, action, values, log_probs = self._acted.pop(place)
        self._rollout.append((elites, action, reward, values, log_probs))
        self._calls += 1
        if len(self._rollout) < self._options.rollout_calls:
            return
        with self._own_generators():
            self._learn(observation)
        self._rollout = []
        if self._calls < self._budget and self._is_done():
            self.restarts, self._born = self.restarts + 1, self._calls
            self._initialise()

    def _learn(self, observation: Sb3Observation) -> None:
        model = self._model
        space = Box(-1.0, 1.0, observation.shape, np.float32)
        buffer = RolloutBuffer(
            len(self._rollout), space, model.action_space, "cpu", gae_lambda=model.gae_lambda, gamma=model.gamma
        )
        for elites, action, reward, values, log_probs in self._rollout:
            buffer.add(elites[None], action[None], np.array([reward]), np.zeros(1), values, log_probs)
        with torch.no_grad():
            last = model.policy.predict_values(torch.from_numpy(observation)[None])
        buffer.compute_returns_and_advantage(last_values=last, dones=np.zeros(1))
        model.rollout_buffer = buffer
        model._update_current_progress_remaining(self._calls, self._budget)
        model.train()

    def _is_done(self) -> bool:
        chunk = math.ceil(self._budget / self._options.chunks)
        return self.confidence >= self._options.confidence_threshold or self._calls - self._born >= chunk

    def get_state(self) -> SavedState:
        """All that `set_state` needs to go on bit-identically, also mid-rollout; arrays are copies."""
        policy = self._model.policy
        state = {
            "policy": policy.state_dict(),
            "optimizer": policy.optimizer.state_dict(),
            "generators": (self._torch_state, self._numpy_state),
            "open": (self._acted, self._rollout),
            "counters": (self._calls, self._born, self.restarts, self.confidence),
        }
        return _mapped(state, _array)

    def set_state(self, state: SavedState) -> None:
        """Goes back to where `get_state` was called, whatever happened since."""
        policy, optimizer = (_mapped(state[name], _tensor) for name in ("policy", "optimizer"))
        self._model.policy.load_state_dict(policy)
        self._model.policy.optimizer.load_state_dict(optimizer)
        check_moments(self._model.policy.optimizer)
        torch_state, numpy_state = copy.deepcopy(state["generators"])
        self._numpy_state = checked_mersenne(numpy_state)
        self._torch_state = torch.from_numpy(torch_state)
        acted, rollout = copy.deepcopy(state["open"])
        self._acted = [(*call, torch.from_numpy(value), torch.from_numpy(log)) for *call, value, log in acted]
        self._rollout = [(*call, torch.from_numpy(value), torch.from_numpy(log)) for *call, value, log in rollout]
        self._calls, self._born, self.restarts, self.confidence = state["counters"]


def _mapped(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """The same dictionaries, lists and tuples, with every leaf converted."""
    if isinstance(tree, dict):
        return {key: _mapped(value, convert) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, convert) for value in tree)
    return convert(tree)


def _array(leaf: Any) -> Any:
    return leaf.numpy().copy() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _tensor(leaf: Any) -> Any:
    return torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
