"""Many searches side by side: one step evaluates one strategy of each, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.strategy_env import CallFigures, Observation, StrategyEnv, checked
from sim.batched import Evaluations
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.strategy import Strategy
from sim.workload import Workload

FIGURES = ("raw", "feasible", "excess", "simulated", "best")
"""What of a step's info is passed on."""
EvaluateMany = Callable[[Workload, Sequence[Strategy]], Sequence[Evaluation]]


@final
class VectorStrategyEnv(VectorEnv[Observation, NDArray[np.integer[Any]], NDArray[Any]]):
    """`num_envs` searches of one workload, each with elites of its own, stepped together.

    It does what gymnasium's `SyncVectorEnv` of as many `StrategyEnv`s does, but evaluates all strategies of a step in
    one call. An episode that has ended restarts with the next step, which evaluates nothing (`NEXT_STEP`).

    Observations: float32 `[num_envs, T, A]`; actions: `[num_envs, A]`; infos: see `StrategyEnv.step`, an array of
    `num_envs` per name and without the evaluation itself, so that they travel lightly between processes.

    Example:
        >>> from sim.config.catalog import load_workload
        >>> envs = VectorStrategyEnv([StrategyEnv(load_workload("gpt_moe_1_2t_16k"), budget=2) for _ in range(3)])
        >>> _ = envs.reset(seed=0)
        >>> for _ in range(2):
        ...     observations, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
        >>> observations.shape, truncated.tolist(), infos["raw"].shape
        ((3, 3, 16), [True, True, True], (3,))

    Args:
        envs: Of one workload.
        evaluate_many: What evaluates all strategies of a step, such as `sim.batched.evaluate_many`; by default each
            environment its own.

    Attributes:
        envs: The searches.
    """

    def __init__(self, envs: Sequence[StrategyEnv], *, evaluate_many: EvaluateMany | None = None) -> None:
        if not envs:
            raise ValueError("expected at least one environment")
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.envs = tuple(envs)
        self.num_envs = len(envs)
        seen, chosen = envs[0].observation_space, envs[0].action_space
        self.single_observation_space, self.observation_space = seen, batch_space(seen, self.num_envs)
        self.single_action_space, self.action_space = chosen, batch_space(chosen, self.num_envs)
        self._evaluate_many = evaluate_many
        self._over = np.zeros(self.num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts every search again."""
        seeds = (
            seed if isinstance(seed, Sequence) else [None if seed is None else seed + i for i in range(self.num_envs)]
        )
        observations = [env.reset(seed=each, options=options)[0] for env, each in zip(self.envs, seeds, strict=True)]
        self._over[:] = False
        return np.stack(observations), {}

    def step(
        self, actions: NDArray[np.integer[Any]]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], JsonObject]:
        """Evaluates one strategy of every search whose episode continues, and starts the others again.

        Raises:
            SimulatorFailure, ValueError: See `StrategyEnv.step`.
        """
        going = [index for index in range(self.num_envs) if not self._over[index]]
        found = dict(zip(going, self._found(going, actions), strict=True))
        infos: dict[str, Any] = {}
        observations: list[Observation] = []
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for index, env in enumerate(self.envs):
            if index not in found:
                observations.append(env.reset()[0])
                continue
            step = env.take(actions[index], found[index])
            observation, rewards[index], terminated[index], truncated[index], info = step
            observations.append(observation)
            infos = self._add_info(infos, {name: info[name] for name in FIGURES}, index)
        self._over = terminated | truncated
        return np.stack(observations), rewards, terminated, truncated, infos

    def _found(self, going: Sequence[int], actions: NDArray[np.integer[Any]]) -> list[CallFigures]:
        """What the simulator says of the strategies of some environments."""
        if not going:
            return []
        space = self.envs[0].space
        if self._evaluate_many is None:
            asked = [(self.envs[index], actions[index]) for index in going]
            return [CallFigures.of(env.evaluate(space.decode(env.plain(action)))) for env, action in asked]
        strategies = space.strategies(self.envs[0].plain(actions[going]))
        evaluations = self._evaluate_many(space.workload, strategies)
        if isinstance(evaluations, Evaluations):  # our simulator's own, of which a search needs the figures alone
            columns = (evaluations.tokens_per_s_per_gpu, evaluations.feasible, evaluations.excess)
            return [CallFigures(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]
        return [CallFigures.of(checked(each, strategy)) for each, strategy in zip(evaluations, strategies, strict=True)]

    @property
    def observations(self) -> Observation:
        """What each search shows, `[num_envs, T, A]`, a new array."""
        return np.stack([env.observation for env in self.envs])

    def get_state(self) -> list[SavedState]:
        """JSON-able snapshot of all searches."""
        return [env.get_state() for env in self.envs]

    def set_state(self, state: Sequence[SavedState]) -> None:
        """Goes back to a snapshot."""
        for env, own in zip(self.envs, state, strict=True):
            env.set_state(own)
        self._over[:] = [env.budget is not None and env.calls >= env.budget for env in self.envs]
