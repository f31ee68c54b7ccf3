"""The environment by its name, for RLlib: importing this module registers it, and RLlib's workers find it anywhere."""

from __future__ import annotations

from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv
from ray.tune.registry import register_env

from envs.registration import ENV_ID, make_env, make_vector_env


def create(context: Any) -> Env | VectorEnv:
    """An environment by RLlib's `env_config`, the arguments of `envs.registration.make_env`; many with `num_envs`."""
    arguments = dict(context)
    return make_vector_env(**arguments) if "num_envs" in arguments else make_env(**arguments)


register_env(ENV_ID, create)
