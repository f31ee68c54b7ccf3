"""PPO's update from the ranks of a rollout's calls, without a value network."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ray.rllib.core.columns import Columns

from raysearch.searchers.ppo.learner import EliteLearner
from raysearch.searchers.ppo.rollout import rank_advantages


class CopyLearner(EliteLearner):
    """An `EliteLearner` of a policy whose calls are judged against each other; see `rank_advantages`."""

    bootstraps = False

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """None: RLlib's PPO would ask for a value network."""
        return []

    def estimate(self, columns: Mapping[str, np.ndarray], values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]` by rank, and zeros for the targets of a value network."""
        advantages = rank_advantages(columns[Columns.REWARDS])
        return advantages, np.zeros_like(advantages)
