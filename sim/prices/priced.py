"""What a kernel or a collective takes, and how far that may be off.

Intervals have floats, or arrays `[n]` of them; what is in them is then, to the last bit, what floats come to.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from sim.arrays import exp_of, hypot_of, log_of

Interval = tuple[float, float]
"""Relative factors (low, high): in 90 % of cases the true time lies within [low, high] times the time given."""
EXACT: Interval = (1.0, 1.0)
SIGNS = (-1.0, 1.0)
"""Of the logarithms of an interval's ends."""
UNSURE: tuple[float, Interval] = (math.nan, (math.nan, math.nan))
"""Error and interval of what is priced in lanes, for seconds alone."""


class PricedKernel(NamedTuple):
    """Seconds of a kernel or collective.

    Attributes:
        time_s: How long it takes.
        error: Mean relative error to expect.
        interval: Factors on `time_s` between which the true time lies in 90 % of cases.
        extrapolated: What about it no measurement covers, or "".
        algorithm: Of a collective: the library whose measured choice it is, or the algorithm of the model; else "".
        sent: Of a collective: share of its bytes that travels; less than 1 where it is compressed.
    """

    time_s: float
    error: float
    interval: Interval
    extrapolated: str = ""
    algorithm: str = ""
    sent: float = 1.0


@lru_cache(maxsize=1024)
def error_interval(error: float) -> Interval:
    """The 90 % interval that goes with a mean relative error: twice as far, by factors alike up and down.

    Source: of a normal distribution 90 % lie within 1.645 standard deviations, 2.06 mean absolute ones.

    >>> error_interval(0.25)
    (0.6666666666666666, 1.5)
    """
    return 1 / (1 + 2 * error), 1 + 2 * error


def together(first: Interval, second: Interval) -> Interval:
    """The interval of a time that errs for two reasons, [assumed] independent.

    >>> together((0.8, 1.25), (1.0, 1.0))
    (0.8, 1.25)
    """
    return together_end(0, first[0], second[0]), together_end(1, first[1], second[1])


def together_end(end: int, first: Any, second: float) -> Any:
    """The lower end of it, 0, or the upper one, 1."""
    return exp_of(SIGNS[end] * hypot_of(log_of(first), math.log(second)))


def apart(both: Interval, one: Interval) -> Interval:
    """What is left of an interval without one of its reasons: the inverse of `together`.

    >>> [round(factor, 12) for factor in apart(together((0.8, 1.25), (0.5, 3.0)), (0.5, 3.0))]
    [0.8, 1.25]
    """
    down, up = (
        math.sqrt(max(0.0, math.log(all_) ** 2 - math.log(known) ** 2)) for all_, known in zip(both, one, strict=True)
    )
    return math.exp(-down), math.exp(up)


def mean_error(interval: Interval) -> float:
    """The mean relative error that goes with a 90 % interval, of both its sides: the inverse of `error_interval`.

    >>> round(mean_error(error_interval(0.25)), 12)
    0.25
    """
    return (1 / interval[0] - 1 + interval[1] - 1) / 4


@lru_cache(maxsize=1024)
def wider(first: Interval, second: Interval) -> Interval:
    """The narrowest interval that holds both."""
    return min(first[0], second[0]), max(first[1], second[1])
