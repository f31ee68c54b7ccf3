"""How the learning rate falls."""

from __future__ import annotations

import math


def cosine(spent: float) -> float:
    """Half a cosine from 1 at the start to 0 where all of the budget is `spent`, a share of it.

    >>> cosine(0.0), round(cosine(0.5), 9), cosine(1.0)
    (1.0, 0.5, 0.0)
    """
    return 0.5 * (1 + math.cos(math.pi * spent))
