"""Means over independent seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ATTAINMENT_CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class AttainmentEstimate:
    """A mean over seeds.

    Attributes:
        value: The mean.
        low, high: Its 90 % interval; None of a single seed.
    """

    value: float
    low: float | None
    high: float | None


def over_seeds(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> AttainmentEstimate:
    """The mean of independent values and Student's interval, cut to what is possible.

    >>> estimate = over_seeds([0.5, 0.7, 0.6], 0.0, 1.0)
    >>> round(estimate.value, 3), round(estimate.low, 3), round(estimate.high, 3)
    (0.6, 0.431, 0.769)
    """
    from scipy.stats import t

    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return AttainmentEstimate(mean, None, None)
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(t.ppf((1 + ATTAINMENT_CONFIDENCE) / 2, len(values) - 1)) * spread
    return AttainmentEstimate(mean, max(least, mean - half), min(most, mean + half))
