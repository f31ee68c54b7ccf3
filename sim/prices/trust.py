"""How far a figure may be off, and what in it no measurement covers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from sim.prices.hardware import Hardware

_LEAST_SHARE = 0.01
"""What takes less of a layer's time than this is not worth a warning."""


class Trust(NamedTuple):
    """Mean relative error to expect, and what rests on extrapolation, the largest share of the time first."""

    expected_error: float
    extrapolated: tuple[str, ...]


def judge(hardware: Hardware, parts: Iterable[tuple[float, float, str]]) -> Trust:
    """How far to trust the time of a step.

    Errors of one layer's kernels and collectives, weighted by time as if all erred to the same side, and the residual
    of measured serving runs on top, as if independent. [assumed]

    Args:
        hardware: Whose residual.
        parts: Of a layer: seconds, expected relative error and what no measurement covers, or "".
    """
    total_s = off_s = 0.0
    beyond_s: dict[str, float] = {}
    for time_s, error, what in parts:
        total_s += time_s
        off_s += error * time_s
        if what:
            beyond_s[what] = beyond_s.get(what, 0.0) + time_s
    named = tuple(
        f"{what} ({part_s / total_s:.0%} of a layer)"
        for what, part_s in sorted(beyond_s.items(), key=lambda item: -item[1])
        if part_s >= _LEAST_SHARE * total_s
    )
    return Trust(math.hypot(off_s / total_s, hardware.errors.serving), named)
