"""Requests that arrive at random: renewal processes with Gamma gaps, from regular over Poisson to bursty.

Source: AlpaServe, section 3.2, which fits the same to production traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stream:
    """The requests of one model.

    Attributes:
        requests_per_s: Mean rate, > 0.
        cv: Coefficient of variation of the gaps, > 0: 1 is a Poisson process, more comes in bursts.
    """

    requests_per_s: float
    cv: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Requests of all models.

    Attributes:
        times_s: Ascending, [n].
        models: Whose request each is, [n].
        horizon_s: Until when they arrive.
    """

    times_s: NDArray[np.float64]
    models: NDArray[np.int64]
    horizon_s: float

    def __len__(self) -> int:
        return len(self.times_s)


def draw_arrivals(streams: Sequence[Stream], horizon_s: float, seed: int) -> Arrivals:
    """Independent arrivals of all streams over a time.

    Each stream has a generator of its own, so that another's rate or burstiness leaves it as it is, and its gaps at
    another rate are the same ones, scaled: common random numbers for whoever compares.

    Args:
        streams: One per model.
        horizon_s: How long.
        seed: Of all streams together.

    >>> arrivals = draw_arrivals([Stream(2.0), Stream(1.0, cv=3.0)], 1000.0, 0)
    >>> round(len(arrivals), -3)
    3000
    """
    times = [
        _renewals(stream, horizon_s, np.random.default_rng([seed, number])) for number, stream in enumerate(streams)
    ]
    models = np.repeat(np.arange(len(times)), [len(each) for each in times])
    merged = np.concatenate(times) if times else np.zeros(0)
    order = np.argsort(merged, kind="stable")
    return Arrivals(merged[order], models[order], horizon_s)


def _renewals(stream: Stream, horizon_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrivals of one stream in [0, horizon), which has run for ever before: a stationary renewal process."""
    shape = stream.cv**-2
    scale_s = 1 / (stream.requests_per_s * shape)
    # The gap that time 0 falls into is longer than others, as long ones cover more time (Gamma of shape + 1), and 0
    # lies anywhere in it. Source: Cox, "Renewal Theory", 1962, section 5.4.
    first_s = rng.random() * rng.gamma(shape + 1, scale_s)
    blocks, last_s = [np.array([first_s])], first_s
    size = max(16, int(1.2 * stream.requests_per_s * horizon_s))
    while last_s < horizon_s:
        blocks.append(last_s + np.cumsum(rng.gamma(shape, scale_s, size)))
        last_s = blocks[-1][-1]
    times = np.concatenate(blocks)
    return times[times < horizon_s]
