"""The best of each way to serve a mix of requests, and the same along limits, loads and prompt lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first
from raysearch.deploy.recommend.load_replay import with_report
from raysearch.deploy.recommend.load_search import carrying, gpus_of
from raysearch.deploy.recommend.pair_load import pair_load
from raysearch.deploy.replay.replay_report import ReplayReport
from sim.pools.best_pair import best_pair
from sim.pools.best_pools import CHUNKS, OnePool, best_in_turns, best_one_pool
from sim.pools.matching import Limits, Matched
from sim.pools.resharding import Host, Resharded
from sim.pools.traffic import Traffic, workload_of
from sim.replay.requests import Requests
from sim.serving.phases import SERVE
from sim.workload import Workload, coarse_steps

Way = OnePool | Matched | Resharded
AGGREGATED, DISAGGREGATED, RESHARDED = "aggregated", "disaggregated", "resharded"
WAYS: Mapping[str, str] = {
    AGGREGATED: "one pool, continuous batching",
    DISAGGREGATED: "prefill and decode pools",
    RESHARDED: "one pool, re-sharded between prompts and answers",
}
"""Name of a way -> in words."""


@dataclass(frozen=True)
class Case:
    """A workload under a mix of requests, limits and what moves between pools.

    Attributes:
        workload: Model, hardware, engine, degrees and space.
        traffic: What is sent.
        limits: To be kept.
        hidden: Share of the cache's transfer that hides behind computing prompts.
        host: Memory of the hosts, where a pool that re-shards keeps caches; None leaves that way out.
        cv, percentile, requests, trace: Of a load, as of a `Demand`.
        chunks: Prompt tokens of a step that one pool may choose, None for whole prompts.
    """

    workload: Workload
    traffic: Traffic
    limits: Limits
    hidden: float = 0.0
    host: Host | None = None
    cv: float = 1.0
    percentile: float = 99.0
    requests: int = 2000
    trace: Requests | None = None
    chunks: Sequence[int | None] = CHUNKS


@dataclass(frozen=True)
class PoolComparison:
    """The best of each way that was looked at, None where it is not feasible.

    Attributes:
        case: What was asked.
        ways: By name.
        replays: Of those that were sized by a replay of requests that come at random: under a load.
    """

    case: Case
    ways: Mapping[str, Way | None]
    replays: Mapping[str, ReplayReport] = field(default_factory=dict[str, ReplayReport])

    def goodput_per_gpu(self, name: str) -> float:
        """Requests a second within the limits, per GPU: of those at hand, or of those that the load takes."""
        way, limits = self.ways[name], self.case.limits
        if way is None:
            return 0.0
        return way.requests_per_s / (limits.gpus if limits.requests_per_s is None else way.gpus)

    @property
    def winner(self) -> str | None:
        """The way with the highest goodput per GPU, the simpler of equal ones; None if none is feasible."""
        best = max(self.ways, key=self.goodput_per_gpu)
        return best if self.ways[best] is not None else None


def compare_pools(
    case: Case, limits: Sequence[Limits], progress: Callable[[str], None] = lambda _: None
) -> list[PoolComparison]:
    """The best of each way under each of some limits."""
    found: list[PoolComparison] = []
    for number, each in enumerate(limits, 1):
        progress(f"limits {number} of {len(limits)}")
        here = replace(case.workload, max_gpus=each.gpus)
        replays: dict[str, ReplayReport] = {}
        ways: dict[str, Way | None] = {}
        if each.requests_per_s is not None:
            for name, (way, report) in _under_load(here, case, each).items():
                ways[name] = way
                if report:
                    replays[name] = report
        else:
            ways[AGGREGATED] = best_one_pool(here, case.traffic, each, case.chunks)
            ways[DISAGGREGATED] = best_pair(here, case.traffic, each, hidden=case.hidden)
        if case.host:
            few = replace(here, degrees=replace(here.degrees, batch=BATCHES))
            ways[RESHARDED] = best_in_turns(few, case.traffic, each, case.host)
        found.append(PoolComparison(replace(case, limits=each), ways, replays))
    return found


def _under_load(workload: Workload, case: Case, limits: Limits) -> dict[str, tuple[Way | None, ReplayReport | None]]:
    """One pool and two on the fewest GPUs on which requests that come at random are in time, as `recommend` has it."""
    kept, traffic = 1 - workload.margin, case.traffic
    limited = replace(workload, tpot_slo_s=limits.tpot_s / kept, ttft_slo_s=limits.ttft_s / kept)
    served = workload_of(traffic, limited, SERVE.name)
    mix = traffic if len(traffic.kinds) > 1 else None
    demand = Demand(
        served,
        limits.gpus,
        requests_per_s=limits.requests_per_s,
        cv=case.cv,
        percentile=case.percentile,
        requests=case.requests,
        trace=case.trace,
        mix=mix,
        chunks=case.chunks,
    )
    found: dict[str, tuple[Way | None, ReplayReport | None]] = {
        AGGREGATED: (None, None),
        DISAGGREGATED: (None, None),
    }
    chunks = demand.in_chunks
    for at, each in enumerate(chunks):
        if not (bests := best_first(each, each.top)):
            continue
        chosen, tried, _ = carrying(each, bests, chunks[at + 1 :])
        if carried := [(evaluation, load) for evaluation, load in tried if load]:
            best, load = min(carried, key=lambda one: gpus_of(*one))
            one = OnePool(best, chosen.workload, load.replicas, limits.requests_per_s or 0.0)
            found[AGGREGATED] = one, with_report(chosen, best, load).report
        break
    if pair := pair_load(demand, traffic, hidden=case.hidden):
        found[DISAGGREGATED] = pair.matched, pair.report
    return found


BATCHES = coarse_steps(4096)
"""Of a pool that re-shards: powers of two and the middle between them. [assumed] the next finer grid, for seconds."""


def along_traffic(
    case: Case, mixes: Iterable[tuple[Traffic, Sequence[Limits]]], progress: Callable[[str], None] = lambda _: None
) -> list[PoolComparison]:
    """The same for each of some mixes in place of the case's own, under limits of their own."""
    return [
        each
        for mix, limits in mixes
        for each in compare_pools(replace(case, traffic=mix), limits, lambda what, mix=mix: progress(_named(mix, what)))
    ]


def _named(mix: Traffic, what: str) -> str:
    return f"prompts of {mix.prompt_tokens:,.0f} tokens, {what}"
