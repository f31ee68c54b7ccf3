"""Least squares that single runs do not decide: Huber's loss (1964), by damped Gauss-Newton steps (Levenberg, 1944)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from sim.arrays import Floats

Slopes = TypeVar("Slopes")
_CUT = 1.5
"""Errors, in units of their usual size, from which the loss grows linearly. [assumed] Huber's usual value is 1.345."""
_MOST_STEPS, _MOST_DAMPING, _ENOUGH = 60, 1e6, 1e-5


def huber_loss(off: Floats) -> Floats:
    """The loss of each error, in units of its usual size.

    >>> huber_loss(np.array([0.0, 1.0, -2.5]))
    array([0.   , 0.5  , 2.625])
    """
    size = np.abs(off)
    return np.where(size < _CUT, size**2 / 2, _CUT * (size - _CUT / 2))


def huber_weights(off: Floats) -> Floats:
    """By how much the square of each error counts, at most 1: the loss has the slope of the squares so weighted."""
    return np.minimum(1, _CUT / np.maximum(np.abs(off), _CUT))


def damped_descent(
    look: Callable[[Floats], tuple[float, Floats, Slopes]],
    equations: Callable[[Floats, Floats, Slopes], tuple[Floats, Floats]],
    start: Floats,
) -> Floats:
    """[n] where a loss is least, from [n] where to start.

    Args:
        look: The loss at a place, the errors there, and what else the equations need.
        equations: Of a place, its errors and the rest: the normal matrix [n, n], and the loss's slope downhill [n].
        start: Where to begin.
    """
    place, damping = start.copy(), 1e-2
    loss, off, slopes = look(place)
    for _ in range(_MOST_STEPS):
        normal, downhill = equations(place, off, slopes)
        before = loss
        while damping < _MOST_DAMPING:
            tried = place + np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            looked = look(tried)
            if looked[0] < loss:
                place, (loss, off, slopes), damping = tried, looked, damping / 4
                break
            damping *= 5
        if before - loss < _ENOUGH * before:
            break
    return place
