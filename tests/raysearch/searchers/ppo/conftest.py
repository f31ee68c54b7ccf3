"""A toy search that needs no simulator, and ways to drive it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.algorithm import CopyConfig, LearnToShard, LearnToShardConfig
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.ppo_options import Options
from tests.envs.fakes import toy_actions

torch.set_num_threads(1)  # as every search does; more are far slower on small matrices

SIZES = (5, 1, 4, 3, 3, 3, 3, 3)
ELITES = 3


class ToyEnv(gymnasium.Env):
    """A bandit: every head has one best choice, and the first head must not be 0."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        sizes = (config or {}).get("sizes", SIZES)
        self.action_space = toy_actions(sizes)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (ELITES, len(sizes)), np.float32)
        self.weights = [np.random.default_rng(head).uniform(0.2, 1.0, size) for head, size in enumerate(sizes)]
        self.actions: list[tuple[int, ...]] = []
        self.elites: list[tuple[float, tuple[int, ...]]] = []

    @property
    def best(self) -> float:
        return -self.elites[0][0] if self.elites else 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.elites = []
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        choices = tuple(int(c) for c in action)
        self.actions.append(choices)
        feasible = choices[0] != 0
        simulated = float(np.prod([w[c] for w, c in zip(self.weights, choices, strict=True)]))
        raw = simulated if feasible else 0.0
        best = self.best
        reward = (raw + (raw - best)) / max(best, raw) if feasible else -2.0
        if feasible and (-raw, choices) not in self.elites:
            self.elites = sorted([*self.elites, (-raw, choices)])[:ELITES]
        info = {"raw": raw, "feasible": feasible, "best": self.best}
        info |= {"excess": float(not feasible), "simulated": simulated}
        return self.observe(), reward, False, False, info

    def observe(self) -> np.ndarray:
        rows = np.full(self.observation_space.shape, -1.0, np.float32)
        for row, (_, choices) in zip(rows, self.elites, strict=False):
            row[:] = np.array(choices) / np.maximum(self.action_space.nvec - 1, 1)
        return rows

    def get_state(self) -> dict[str, Any]:
        return {"elites": [[-raw, list(choices)] for raw, choices in self.elites], "actions": list(self.actions)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.elites = [(-raw, tuple(choices)) for raw, choices in state["elites"]]
        self.actions = list(state.get("actions", self.actions))


class ToySearch:
    """An `Environment` of the toy: several calls under way, answered in their order or the last one first."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self.env = ToyEnv({"sizes": context.get("sizes", SIZES)})
        self.action_space, self.observation_space = self.env.action_space, self.env.observation_space
        self.left, self.most = context["budget"], context.get("most", 1)
        self.last_first = context.get("last_first", False)
        self.begun: list[np.ndarray] = []
        self.exhausted = False
        self.observation = self.env.reset()[0]

    @property
    def under_way(self) -> int:
        return len(self.begun)

    @property
    def may_begin(self) -> bool:
        return len(self.begun) < min(self.most, self.left)

    def begin(self, action: np.ndarray) -> None:
        self.begun.append(action)

    def take(self) -> tuple[np.ndarray, Outcome]:
        action = self.begun.pop(-1 if self.last_first else 0)
        self.observation, reward, _, _, info = self.env.step(action)
        self.left -= 1
        return action, Outcome.of(self.observation, reward, info)

    def get_state(self) -> dict[str, Any]:
        return {"env": self.env.get_state(), "left": self.left, "begun": [action.tolist() for action in self.begun]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.env.set_state(state["env"])
        self.left, self.begun = state["left"], [np.array(action) for action in state["begun"]]
        self.observation = self.env.observe()

    def close(self) -> None:
        """Holds nothing."""


class Search:
    """A search of a toy environment: the algorithm steps it as it steps a run's."""

    def __init__(self, agent: LearnToShard, environment: ToySearch) -> None:
        self.agent, self.environment, self.env = agent, environment, environment.env
        self.progress = agent.progress
        self.module: Any = agent.get_module()
        self.learner: Any = agent.learner_group._learner

    def advance(self, calls: int) -> Search:
        goal = self.progress.calls + calls
        while self.progress.calls < goal:
            self.agent.make_calls(self.environment, np.copy, goal - self.progress.calls)
        return self

    def get_state(self) -> dict[str, Any]:
        return {"agent": self.agent.get_state(), "env": self.environment.get_state()}

    def set_state(self, state: dict[str, Any]) -> Search:
        self.agent.set_state(state["agent"])
        self.environment.set_state(state["env"])
        return self

    @property
    def weights(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.module.parameters()]


def small_options(**options: Any) -> Options:
    """The paper's options with a small network, unless told otherwise."""
    small = {"embedding": 16, "hidden": 16, "feed_forward": 16, "attention_heads": 2}
    return Options(**{**small, **options})


def make_config(*, budget: int, seed: int = 0, **options: Any) -> LearnToShardConfig:
    return LearnToShardConfig().search(budget=budget, seed=seed, options=small_options(**options))


def make_search(*, budget: int, seed: int = 0, sizes: tuple[int, ...] = SIZES, **options: Any) -> Search:
    return start(make_config(budget=budget, seed=seed, **options), sizes)


def make_copy_config(*, budget: int, seed: int = 0, **options: Any) -> CopyConfig:
    small = {"rollout_calls": 8, "critic_hidden": 8, "critic_steps": 2, "critic_batch": 16}
    network = {"embedding": 16, "hidden": 16, "feed_forward": 16, "attention_heads": 2}
    return CopyConfig().search(budget=budget, seed=seed, options=CopyOptions(**{**small, **network, **options}))


def make_copy_search(*, budget: int, seed: int = 0, sizes: tuple[int, ...] = SIZES, **options: Any) -> Search:
    return start(make_copy_config(budget=budget, seed=seed, **options), sizes)


def start(config: LearnToShardConfig, sizes: tuple[int, ...] = SIZES, **asked: Any) -> Search:
    """A search in an environment that is not the algorithm's own, as a run's."""
    environment = ToySearch({"sizes": sizes, "budget": config.budget, **asked})
    config.environment(observation_space=environment.observation_space, action_space=environment.action_space)
    return Search(config.build_algo(), environment)


@pytest.fixture
def toy() -> SimpleNamespace:
    """The toy environment, the sizes of its heads, and what starts the paper's preset and ours (`copy_...`)."""
    return SimpleNamespace(
        Env=ToyEnv,
        Environment=ToySearch,
        start=start,
        sizes=SIZES,
        search=make_search,
        config=make_config,
        options=small_options,
        copy_search=make_copy_search,
        copy_config=make_copy_config,
    )
