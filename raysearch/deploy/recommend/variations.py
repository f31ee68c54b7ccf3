"""What the recommendation would be if something were a little different, and the front between throughput and speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, gain, needed_gpus
from sim.evaluation import Evaluation, Violation
from sim.optimum.exact_search import Known, find_best
from sim.optimum.spaces import space_of
from sim.prices.hardware import Hardware
from sim.simulate import evaluate
from sim.workload import Workload

MORE = 1.1
"""By how much each thing is varied: 10 % more."""


@dataclass(frozen=True)
class Variation:
    """The recommendation under a change.

    Attributes:
        change: In words.
        evaluation: Of the best under it, None if nothing is feasible; with another batch, of the same degrees.
        gpus: Of all its replicas.
        gain: What it has over the recommended one; see `raysearch.deploy.recommend.fleet.gain`.
        broken: Limits that it breaks.
    """

    change: str
    evaluation: Evaluation | None
    gpus: int | None
    gain: float | None
    broken: tuple[Violation, ...] = ()


def variations(demand: Demand, best: Evaluation, known: Known) -> Iterator[Variation]:
    """The exact best with 10 % more of each thing, and the recommended degrees with other batches.

    Args:
        demand: What was asked.
        best: The recommended strategy.
        known: Of the search that found it.
    """
    guarded = demand.guarded_as(best)  # of other machines the intervals may be wider, which is not the question
    workload = guarded.workload
    faster = replace(workload, hardware=_with_bandwidth(workload.hardware))
    changes: list[tuple[str, Workload]] = [
        ("10 % more HBM", replace(workload, hardware=_with_memory(workload.hardware))),
        ("10 % more HBM bandwidth", faster),
    ]
    if workload.tpot_slo_s < float("inf"):
        changes.append(("a TPOT 10 % longer", replace(workload, tpot_slo_s=MORE * workload.tpot_slo_s)))
    if workload.ttft_slo_s < float("inf"):
        changes.append(("a TTFT 10 % longer", replace(workload, ttft_slo_s=MORE * workload.ttft_slo_s)))
    for change, changed in changes:
        same_costs = None if changed is faster else known
        same = evaluate(changed, best.strategy)
        found = best_first(replace(guarded, workload=changed), 1, same_costs, [same])
        yield _variation(demand, change, found[0] if found else None, best)
    twice = [] if demand.concurrency is not None else [(2.0, "twice the batch")]
    for share, name in ((0.5, "half the batch"), *twice):
        batch = max(1, round(share * best.strategy.batch))
        other = evaluate(demand.workload, replace(best.strategy, batch=batch))
        yield replace(_variation(demand, name, other, best), broken=other.violations)


def _variation(demand: Demand, change: str, found: Evaluation | None, best: Evaluation) -> Variation:
    if found is None or found.tokens_per_s_per_gpu <= 0:
        return Variation(change, found, None, None)
    return Variation(change, found, needed_gpus(demand, found), gain(demand, found, best))


def _with_memory(hardware: Hardware) -> Hardware:
    return replace(hardware, hbm_bytes=MORE * hardware.hbm_bytes)


def _with_bandwidth(hardware: Hardware) -> Hardware:
    """A machine whose memory is faster: measured kernels move with it as far as they stream."""
    faster = replace(hardware, hbm_bandwidth_bytes_per_s=MORE * hardware.hbm_bandwidth_bytes_per_s)
    curves = hardware.curves
    if curves is None:
        return faster
    header = {part: dict(curves.calibration.data[part]) for part in ("speed_of_light", "machine")}
    header["speed_of_light"]["hbm_gb_per_s"] *= MORE
    return replace(faster, curves=curves.under(curves.calibration.scaled_to(header)))


@dataclass(frozen=True)
class FrontPoint:
    """A strategy that none beats in both tokens/s/GPU and tokens/s of a user."""

    evaluation: Evaluation

    @property
    def tokens_per_s_per_user(self) -> float:
        """What a user sees: one over the time per token."""
        return 1 / self.evaluation.tpot_s


_STEP = 1.25
"""How much faster each further point of the front is, at least."""
_MOST_POINTS = 16


def front(demand: Demand, known: Known) -> list[FrontPoint]:
    """The most tokens/s/GPU for each speed, from the slowest that is any good to the fastest there is.

    Each point is the exact best, over batches that are powers of two, of all that are so much faster than the point
    before; the TTFT stays limited, as predicted.
    """
    workload = demand.at_even_odds.workload
    powers = tuple(1 << power for power in range(13) if 1 << power <= workload.degrees.batch[-1])
    limited = replace(workload, degrees=replace(workload.degrees, batch=powers), tpot_slo_s=float("inf"))
    points: list[FrontPoint] = []
    while len(points) < _MOST_POINTS:
        found = find_best(space_of(limited), known=known).evaluation
        if found is None or found.tpot_s <= 0:
            break
        points.append(FrontPoint(found))
        limited = replace(limited, tpot_slo_s=found.tpot_s / _STEP / (1 - workload.margin))
    return points
