"""Replays a certificate of the best strategy: knows the simulator and the bounds of ranges, nothing of what found it.

The best is evaluated. The leaves must cover each mesh and pipeline degree of the space, batch by batch. Each leaf's
bound is worked out again; where it leaves room for something better, the leaf must be a single batch, and whatever
comes within the bound is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from sim.batched import evaluate_many
from sim.optimum.bounds import SLACK, Bounds, Mesh
from sim.optimum.certificate import Certificate, Leaf
from sim.optimum.spaces import Space
from sim.serving.phases import batching
from sim.simulate import degree_violations, evaluate
from sim.strategy import Strategy

MOST_TRIED = 100_000
"""Strategies of one batch that are evaluated: a certificate that leaves more is refused."""
_BLOCK = 4096
_ROUNDED = 1e-9
"""Relative difference that is put down to rounding."""


class Refused(ValueError):
    """A certificate does not prove what it says."""


def check(space: Space, certificate: Certificate, progress: Callable[[int, int], None] | None = None) -> int:
    """Replays a certificate; how many strategies had to be evaluated.

    Args:
        space: Whose best it should prove.
        certificate: As it was read.
        progress: Called with (done, total) leaves.

    Raises:
        Refused: The best is not what it should be, a bound is not that of its leaf, or something is not covered.
    """
    _check_best(space, certificate)
    bounds = [Bounds(part) for part in space.parts()]
    _check_cover(bounds, certificate.leaves)
    tried = 0
    for done, leaf in enumerate(certificate.leaves, start=1):
        tried += _check_leaf(bounds[leaf.part], leaf, certificate.reached)
        if progress and (done % 64 == 0 or done == len(certificate.leaves)):
            progress(done, len(certificate.leaves))
    return tried


def _check_best(space: Space, certificate: Certificate) -> None:
    if certificate.strategy is None:
        if certificate.reached:
            raise Refused("a best is claimed, and no strategy that reaches it")
        return
    if outside := space.outside(certificate.strategy):
        raise Refused(f"the best is no strategy of the space: {outside[0]}")
    best = evaluate(space.workload, certificate.strategy)
    if not best.feasible:
        raise Refused(f"the best is infeasible: {best.violations[0].message}")
    if not math.isclose(best.tokens_per_s_per_gpu, certificate.reached, rel_tol=_ROUNDED):
        found = best.tokens_per_s_per_gpu
        raise Refused(f"the best is claimed to reach {certificate.reached:,.6g} tokens/s/GPU and reaches {found:,.6g}")


def _check_cover(bounds: Sequence[Bounds], leaves: Sequence[Leaf]) -> None:
    """Every batch of every mesh and pipeline degree lies in a leaf, and every leaf in the space."""
    ranges: dict[tuple[int, Mesh, int], list[tuple[int, int]]] = {
        (part, mesh, pp): []
        for part, each in enumerate(bounds)
        for mesh in each.space.layouts()
        for pp in _degrees(each.space, mesh)
    }
    for leaf in leaves:
        part, mesh, pp, low, high, *_ = leaf
        if (part, mesh, pp) not in ranges:
            raise Refused(f"no part {part} of the space has tp, cp, dp, ep {mesh}, pp {pp}")
        if not 0 <= low <= high < len(bounds[part].space.batch):
            raise Refused(f"batches {low} to {high} are no places in the space's list")
        ranges[part, mesh, pp].append((low, high))
    for (part, mesh, pp), each in ranges.items():
        covered, batches = 0, bounds[part].space.batch
        for low, high in sorted(each):
            if low > covered:
                break
            covered = max(covered, high + 1)
        if covered < len(batches):
            raise Refused(f"no leaf has tp, cp, dp, ep {mesh}, pp {pp}, batch {batches[covered]}")


def _degrees(space: Space, mesh: Mesh) -> Iterator[int]:
    """Pipeline degrees of a mesh, but those of which every strategy is beyond the budget or refused by the engine.

    Not asked of what makes certificates: a proof that forgets some must be refused.
    """
    tp, cp, dp, ep = mesh
    return (pp for pp in space.stages(mesh) if not degree_violations(space.workload, tp * cp * dp // ep, ep, pp))


def _check_leaf(bounds: Bounds, leaf: Leaf, reached: float) -> int:
    batches = bounds.space.batch
    where = f"tp, cp, dp, ep {leaf.mesh}, pp {leaf.pp}, batches {batches[leaf.low]} to {batches[leaf.high]}"
    if min(leaf.multipliers) < 0:
        raise Refused(f"{where}: a multiplier is negative")
    if not bounds.runs(leaf.mesh, batches[leaf.low]):
        return 0  # nor does a larger one run
    least = bounds.least(leaf.mesh, leaf.pp, batches[leaf.low], batches[leaf.high], leaf.multipliers)
    if not math.isclose(least.value, leaf.step_s, rel_tol=_ROUNDED):
        raise Refused(
            f"{where}: a step is claimed to take {leaf.step_s:.9g} s at least, the bound is {least.value:.9g} s"
        )
    if bounds.tokens_per_s_per_gpu(leaf.mesh, leaf.pp, batches[leaf.high], leaf.step_s) <= reached * (1 + _ROUNDED):
        return 0
    if leaf.low < leaf.high:
        raise Refused(f"{where}: the bound leaves room for something better than {reached:,.6g} tokens/s/GPU")
    return _try_all(bounds, leaf, reached, where)


def _try_all(bounds: Bounds, leaf: Leaf, reached: float, where: str) -> int:
    """Evaluates what comes within the bound of a single batch."""
    (tp, cp, dp, ep), batch, tables = leaf.mesh, bounds.space.batch[leaf.low], tuple(bounds.space.choices.values())
    least = bounds.least(leaf.mesh, leaf.pp, batch, batch, leaf.multipliers)
    tokens = batching(bounds.space.workload, batch, dp).tokens
    longest_s = tokens / (tp * cp * dp * reached * SLACK) if reached else math.inf
    near = least.up_to(longest_s)
    tried = 0
    while chosen := list(islice(near, _BLOCK)):
        dims = [tuple(table[each[place]] for place, table in enumerate(tables)) for each in chosen]
        strategies = [Strategy(tp, ep, leaf.pp, batch, each, cp, dp) for each in dims]
        every = evaluate_many(bounds.space.workload, strategies)
        better = every.feasible & (every.tokens_per_s_per_gpu > reached * (1 + _ROUNDED))
        if better.any():
            at = int(better.argmax())
            raise Refused(f"{where}: {strategies[at]} reaches {every.tokens_per_s_per_gpu[at]:,.6g} tokens/s/GPU")
        tried += len(chosen)
        if tried > MOST_TRIED:
            raise Refused(f"{where}: the bound leaves more than {MOST_TRIED:,} strategies to be tried")
    return tried
