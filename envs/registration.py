"""The environment by its name, for gymnasium and whoever makes environments through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from envs.reward import ImprovementReward
from envs.strategy_env import StrategyEnv
from envs.vector_env import VectorStrategyEnv
from sim.batched import FEW, evaluate_many
from sim.config.catalog import load_workload
from sim.serving.phases import phase_of

ENV_ID = "raysearch/Strategy-v0"
_PAPER_REWARD = ImprovementReward()


def make_env(
    workload: str,
    *,
    hardware: str | None = None,
    space: Any = None,
    elites: int = 3,
    budget: int | None = None,
    alpha: float = _PAPER_REWARD.alpha,
    beta: float = _PAPER_REWARD.beta,
    penalty: float = _PAPER_REWARD.penalty,
    factored: bool = True,
    render_mode: None = None,
) -> StrategyEnv:
    """A search of a workload; `gymnasium.make(ENV_ID, workload=...)` returns it.

    Args:
        workload: Name in configs/workloads or the path of a TOML file.
        hardware: Replaces the workload's hardware: a name or a path.
        space: Replaces the workload's strategy space, by name.
        elites: Rows of the observation, T.
        budget: Calls of an episode; None: an episode has no end.
        alpha: Weight of the throughput in the reward; see `ImprovementReward`, also for the others.
        beta: Weight of the improvement.
        penalty: What an infeasible call costs.
        factored: Whether long coordinates, such as any batch up to 4096, are written in digits; see `StrategyEnv`.
        render_mode: There is nothing to render.

    Raises:
        CatalogError: There is no such workload or hardware.
    """
    reward = ImprovementReward(alpha, beta, penalty)
    known = load_workload(workload, hardware, space)
    return StrategyEnv(known, elites=elites, reward=reward, budget=budget, factored=factored)


def make_vector_env(num_envs: int, **kwargs: Any) -> VectorStrategyEnv:
    """`num_envs` of them, stepped together; `gymnasium.make_vec(ENV_ID, num_envs=..., workload=...)` returns it."""
    return stepped_together([make_env(**kwargs) for _ in range(num_envs)])


def stepped_together(envs: Sequence[StrategyEnv]) -> VectorStrategyEnv:
    """Environments of our simulator, whose steps are evaluated in one call; a few go by their own caches instead."""
    at_once = len(envs) >= FEW and not phase_of(envs[0].space.workload).replayed
    return VectorStrategyEnv(envs, evaluate_many=evaluate_many if at_once else None)


if ENV_ID not in gym.registry:
    gym.register(  # pyright: ignore[reportUnknownMemberType]
        ENV_ID, entry_point="envs.registration:make_env", vector_entry_point="envs.registration:make_vector_env"
    )
