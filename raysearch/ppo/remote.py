"""What a search asks of env runners that are other processes, and how long it waits for those that are lost."""

from __future__ import annotations

from typing import Any

import ray

from raysearch.ppo.env_runner import EliteEnvRunner, OutOfDate, Round

RETRY_S = 0.5
"""[assumed] Between two attempts to reach a lost env runner; a process takes seconds to start."""


def answer(runner: EliteEnvRunner, request: Round | ray.ObjectRef) -> tuple[int, Any]:
    """Runs on an env runner: what it sampled, or None if it has to be told more."""
    try:
        round_: Any = request if isinstance(request, Round) else ray.get(request)
        return runner.worker_index, runner.sample_round(round_)
    except OutOfDate:
        return runner.worker_index, None


def handles(group: Any) -> dict[int, Any]:
    """The remote env runners of RLlib's group by their number; a handle outlives its runner's restarts."""
    return dict(group.foreach_env_runner(_handle, local_env_runner=False))


def _handle(runner: EliteEnvRunner) -> tuple[int, Any]:
    return runner.worker_index, ray.get_runtime_context().current_actor
