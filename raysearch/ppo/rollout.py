"""What PPO learns from: a few consecutive calls, and how much better each did than expected."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rollout:
    """`n` consecutive calls made by one policy, and where they led.

    Attributes:
        observations: What the policy saw before each call, float32 `[n, T, A]`.
        actions: What it chose, int64 `[n, A]`.
        log_probs: How likely it was to choose that, float32 `[n]`.
        rewards: What came of it `[n]`.
        values: Return expected before each call and after the last one `[n + 1]`.
    """

    observations: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray
    values: np.ndarray

    def distinct_observations(self) -> tuple[np.ndarray, np.ndarray]:
        """The observations without repetitions `[d, T, A]`, and which of them each call saw, int64 `[n]`.

        Elites change seldom, so that a policy mostly sees the same again.
        """
        places: dict[bytes, int] = {}
        seen = np.array([places.setdefault(each.tobytes(), len(places)) for each in self.observations])
        _, first = np.unique(seen, return_index=True)
        return self.observations[first], seen


def estimate_advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """Generalised advantages `[n]` of one stretch of a search that never ends.

    Args:
        rewards: `[n]`.
        values: Expected returns, `[n + 1]`; the last one stands for everything after the stretch.
        gamma: Discount, in [0, 1].
        lambda_: 0 trusts `values` after one step, 1 sums up all rewards of the stretch.

    Example:
        >>> estimate_advantages(np.array([1.0, 2.0]), np.array([0.5, 0.0, 4.0]), gamma=0.5, lambda_=1.0)
        array([2.5, 4. ])

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16.
    """
    surprises = rewards + gamma * values[1:] - values[:-1]
    advantages = np.zeros_like(surprises)
    following = 0.0
    for t in reversed(range(len(surprises))):
        advantages[t] = following = surprises[t] + gamma * lambda_ * following
    return advantages


def share_below(values: np.ndarray) -> np.ndarray:
    """Mid-rank of each value `[n]` among all of them, in (0, 1): equal values share theirs.

    Example:
        >>> share_below(np.array([3.0, 1.0, 3.0, 9.0]))
        array([0.5  , 0.125, 0.5  , 0.875])
    """
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / (2 * len(values))


def rank_advantages(rewards: np.ndarray) -> np.ndarray:
    """Advantages `[n]` by rank alone, evenly spread with mean 0 and, for many of them, deviation 1.

    A few calls that missed by far, or one that hit, weigh no more than their rank.

    Example:
        >>> rank_advantages(np.array([-900.0, 1.0, 2.0, 700.0])).round(2).tolist()
        [-1.3, -0.43, 0.43, 1.3]

    Source: rank-based fitness shaping as in Salimans et al. 2017, "Evolution strategies as a scalable alternative to
    reinforcement learning", section 2.
    """
    return (share_below(rewards) - 0.5) * math.sqrt(12)


def normalize(advantages: np.ndarray) -> np.ndarray:
    """Shifts and scales advantages `[n]` to mean 0 and sample deviation 1; a single one is left alone.

    Source: Stable-Baselines3, `PPO.train`, with its guard of 1e-8 against equal advantages.
    """
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
