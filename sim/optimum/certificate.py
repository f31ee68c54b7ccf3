"""A proof that a strategy is the best of its space: ranges of batches that cover it, and why none of each is better.

It is found by halving ranges until the bound of each (`sim.optimum.bounds`) lies below the best, which must be known:
no part of the search that found it is asked. `sim.optimum.checker` replays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sim.evaluation import Evaluation
from sim.optimum.bounds import Bounds, Mesh, Multipliers
from sim.optimum.spaces import Space
from sim.serving.confidence import slower
from sim.simulate import degree_violations
from sim.strategy import Strategy

_ROUNDED = 1e-9
"""Relative excess of a bound over the best that is put down to rounding."""
_STEPS = 10
"""Multipliers that are tried of a limit, by golden section over their logarithm."""
_PROHIBITIVE = 1e4
"""Times the seconds of a step as a multiplier of what exceeds a limit by all of it."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Leaf(NamedTuple):
    """Batches of one mesh and pipeline degree of which none is better.

    Attributes:
        part: Of `Space.parts`, its place.
        mesh: tp, cp, dp, ep.
        pp: Pipeline stages.
        low, high: Places of the smallest and the largest batch in the space's list.
        multipliers: See `Bounds.least`.
        step_s: Seconds of a step at least, of those that keep within the limits. Of a single batch it may still let
            some strategies be better: each of them must be tried.
    """

    part: int
    mesh: Mesh
    pp: int
    low: int
    high: int
    multipliers: Multipliers
    step_s: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """What proves the best of a space.

    Attributes:
        strategy: The best; None where nothing is feasible.
        reached: Its tokens/s/GPU, 0.0 where there is none.
        leaves: Cover the space.
    """

    strategy: Strategy | None
    reached: float
    leaves: tuple[Leaf, ...]


def certify(space: Space, best: Evaluation | None, progress: Callable[[int, int], None] | None = None) -> Certificate:
    """Proves that a strategy is the best of a space, or that nothing in it is feasible.

    Args:
        space: What was searched.
        best: What the search found.
        progress: Called with (done, total) meshes.
    """
    strategy, reached = (best.strategy, best.tokens_per_s_per_gpu) if best else (None, 0.0)
    work = [(at, Bounds(part), mesh) for at, part in enumerate(space.parts()) for mesh in part.layouts()]
    leaves: list[Leaf] = []
    for done, (at, bounds, mesh) in enumerate(work, start=1):
        for pp in _degrees(bounds.space, mesh):
            leaves += _halved(bounds, at, mesh, pp, reached)
        if progress:
            progress(done, len(work))
    return Certificate(strategy, reached, tuple(leaves))


def _degrees(space: Space, mesh: Mesh) -> Iterator[int]:
    """Pipeline degrees of a mesh that keep to the budget and that the engine runs."""
    tp, cp, dp, ep = mesh
    return (pp for pp in space.stages(mesh) if not degree_violations(space.workload, tp * cp * dp // ep, ep, pp))


def _halved(bounds: Bounds, part: int, mesh: Mesh, pp: int, reached: float) -> Iterator[Leaf]:
    batches = bounds.space.batch
    ranges = [(0, len(batches) - 1)]
    while ranges:
        low, high = ranges.pop()
        # halved until the scheduler's limit lies between two ranges
        if low == high or not bounds.runs(mesh, batches[low]) or bounds.runs(mesh, batches[high]):
            leaf = _bounded(bounds, Leaf(part, mesh, pp, low, high, Multipliers(), math.inf), reached)
            if low == high or _ruled_out(bounds, leaf, reached):
                yield leaf
                continue
        middle = (low + high) // 2
        ranges += [(middle + 1, high), (low, middle)]


def _ruled_out(bounds: Bounds, leaf: Leaf, reached: float) -> bool:
    """Whether the bound of a leaf alone says that nothing in it is better."""
    value = bounds.tokens_per_s_per_gpu(leaf.mesh, leaf.pp, bounds.space.batch[leaf.high], leaf.step_s)
    return value <= reached * (1 + _ROUNDED)


def _bounded(bounds: Bounds, leaf: Leaf, reached: float) -> Leaf:
    """The leaf with multipliers that rule it out, if some are found, else the best of them."""
    low, high = (bounds.space.batch[at] for at in (leaf.low, leaf.high))
    if not bounds.runs(leaf.mesh, low):
        return leaf

    def under(multipliers: Multipliers) -> Leaf:
        least = bounds.least(leaf.mesh, leaf.pp, low, high, multipliers)
        return leaf._replace(multipliers=multipliers, step_s=least.value)

    found = under(Multipliers())
    if _ruled_out(bounds, found, reached) or not math.isfinite(found.step_s):
        return found
    workload, factors = bounds.space.workload, slower(bounds.space.workload)
    scales = Multipliers(
        found.step_s / factors.tpot_limit_s,
        found.step_s / factors.ttft_limit_s,
        found.step_s / workload.hbm_limit_bytes,
    )
    for at, scale in enumerate(scales):  # nothing keeps within the limit, whatever else
        tried = under(Multipliers()._replace(**{Multipliers._fields[at]: scale * _PROHIBITIVE}))
        if _ruled_out(bounds, tried, reached):
            return tried
    if low == high:
        for at, scale in enumerate(scales):
            found = max(found, _searched(found, at, scale, under), key=lambda each: each.step_s)
            if _ruled_out(bounds, found, reached):
                break
    return found


def _searched(leaf: Leaf, at: int, scale: float, under: Callable[[Multipliers], Leaf]) -> Leaf:
    """The leaf under the best multiplier of one limit that golden section finds: the bound is concave in it."""

    def tried(power: float) -> Leaf:
        return under(leaf.multipliers._replace(**{Multipliers._fields[at]: scale * math.exp(power)}))

    low, high = -6.0, 6.0
    inner = [tried(high - _GOLDEN * (high - low)), tried(low + _GOLDEN * (high - low))]
    for _ in range(_STEPS):
        if inner[0].step_s > inner[1].step_s:
            high = low + _GOLDEN * (high - low)
            inner = [tried(high - _GOLDEN * (high - low)), inner[0]]
        else:
            low = high - _GOLDEN * (high - low)
            inner = [inner[1], tried(low + _GOLDEN * (high - low))]
    return max(inner, key=lambda each: each.step_s)
