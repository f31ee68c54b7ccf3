"""PPO's update from the best calls of a rollout, without a value network."""

from __future__ import annotations

import numpy as np

from raysearch.ppo.learner import EliteLearner
from raysearch.ppo.rollout import Rollout, top_advantages


class CopyLearner(EliteLearner):
    """An `EliteLearner` of a policy that is judged by its best calls; see `top_advantages`."""

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """None: RLlib's PPO would ask for a value network."""
        return []

    def estimate(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]` by rank, and zeros for the targets of a value network."""
        advantages = top_advantages(rollout.rewards, self.config.preset.top_share)
        return advantages, np.zeros_like(advantages)
