"""How much better each of a round's calls did than expected."""

from __future__ import annotations

import math

import numpy as np


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
