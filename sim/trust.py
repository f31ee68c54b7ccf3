"""How far a figure may be off, and what in it no measurement covers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from sim.costs import OpCost
from sim.types import Collective, Hardware

_LEAST_SHARE = 0.01
"""What takes less of a layer's time than this is not worth a warning."""


def expected_error(
    hardware: Hardware, costs: Collection[OpCost], incoming: Collection[Iterable[Collective]]
) -> float:
    """Mean relative error to expect of a step.

    Errors of one layer's kernels and collectives, weighted by time as if all erred to the same side, and the residual
    of measured serving runs on top, as if independent. [assumed]

    Args:
        hardware: Whose residual.
        costs: Of the layer's ops.
        incoming: The moves of their inputs.
    """
    total_s = off_s = 0.0
    for time_s, error, _ in _parts(costs, incoming):
        total_s += time_s
        off_s += error * time_s
    return math.hypot(off_s / total_s, hardware.errors.serving)


def extrapolated(costs: Collection[OpCost], incoming: Collection[Iterable[Collective]]) -> tuple[str, ...]:
    """What a layer's time rests on that no measurement covers, the largest share first."""
    total_s = 0.0
    shares: dict[str, float] = {}
    for time_s, _, what in _parts(costs, incoming):
        total_s += time_s
        if what:
            shares[what] = shares.get(what, 0.0) + time_s
    return tuple(
        f"{what} ({share / total_s:.0%} of a layer)"
        for what, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= _LEAST_SHARE * total_s
    )


def _parts(
    costs: Collection[OpCost], incoming: Collection[Iterable[Collective]]
) -> Iterator[tuple[float, float, str]]:
    for cost in costs:
        for kernel in cost.kernels:
            yield kernel.total_s, kernel.error, kernel.extrapolated
        for collective in cost.work.collectives:
            yield collective.time_s, collective.error, collective.extrapolated
    for collectives in incoming:
        for collective in collectives:
            yield collective.time_s, collective.error, collective.extrapolated
