"""What one replica of a pool can do: of all degrees and batches the fastest choices, which any pool would take.

In a step that only decodes or only computes prompts, one time decides rate and latency alike. So of equal degrees and
batch (and equal sharing of a request's cache) the fastest choices are best in all that matters, and of a number of
GPUs only those replicas can win that no other beats in both rate and latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from sim.evaluation import Evaluation
from sim.optimum.exact_search import best_of_degrees
from sim.optimum.spaces import Space, space_of
from sim.pools.handover import sharers
from sim.pools.traffic import Traffic, requests_per_s
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a pool.

    Attributes:
        evaluation: Of its strategy.
        requests_per_s: That it prefills, or decodes.
        latency_s: Of a prefill step through all stages, or the time per output token.
        sharers: GPUs that hold a part of one request's cache.
    """

    evaluation: Evaluation
    requests_per_s: float
    latency_s: float
    sharers: int

    @property
    def gpus(self) -> int:
        """Of the replica."""
        return self.evaluation.gpus


OnCount = Callable[[int, int], None]


def replicas(workload: Workload, traffic: Traffic, progress: OnCount | None = None) -> tuple[Replica, ...]:
    """All replicas that have room, of the degrees and batches of the workload's space, whatever their latency.

    Args:
        workload: Of phase prefill or decode: see `sim.pools.traffic.workload_of`.
        traffic: What is sent.
        progress: Called with (done, total) parts of the work.
    """
    return tuple(
        replica
        for part in _by_sharing(space_of(workload))
        for strategy in best_of_degrees(part, progress)
        if not _lacks_room(found := evaluate(workload, strategy))
        and (replica := replica_of(workload, traffic, found)).requests_per_s > 0
    )


def _by_sharing(space: Space) -> Iterator[Space]:
    """The space by the choice of attention, which decides how many GPUs share a request's cache."""
    for choice in space.choices["attention"]:
        yield replace(space, choices={**space.choices, "attention": (choice,)})


def _lacks_room(found: Evaluation) -> bool:
    return any(violation.kind not in ("tpot", "ttft") for violation in found.violations)


def replica_of(workload: Workload, traffic: Traffic, found: Evaluation) -> Replica:
    """A strategy as a replica of a pool of phase prefill or decode."""
    rate = requests_per_s(traffic, workload, found.tokens_per_s_per_gpu * found.gpus)
    step_s = found.strategy.pp * found.stage.total_s + found.engine_s
    latency_s = found.tpot_s if phase_of(workload).decodes else step_s
    return Replica(found, rate, latency_s, sharers(workload, found.strategy))


def unbeaten(found: Iterable[Replica], latest_s: float) -> tuple[Replica, ...]:
    """Those within a latency that no other of as many GPUs and sharers beats in rate and latency, fewest GPUs first."""
    kept: list[Replica] = []
    best: dict[tuple[int, int], float] = {}
    for each in sorted(found, key=lambda one: (one.gpus, one.sharers, one.latency_s, -one.requests_per_s)):
        key = (each.gpus, each.sharers)
        if each.latency_s <= latest_s and each.requests_per_s > best.get(key, 0.0):
            best[key] = each.requests_per_s
            kept.append(each)
    return tuple(kept)
