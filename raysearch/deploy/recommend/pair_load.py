"""The fewest GPUs of two pools under a load that comes at random: pairs of the steady state, each replayed.

A pair that is just fast enough in the steady state has no room for queues. So pairs are the exact best for more load
than comes, and for a first token sooner than asked for; of each, with a replica of either pool more, or fewer as long
as that holds, the fewest GPUs are taken that hold the limits in a replay with the confidence asked for. The steady
state's fewest GPUs are a bound; between it and what is found nothing is proven: other pairs on as many GPUs may hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.load_replay import ENOUGH, load_setup
from raysearch.deploy.replay.deployed_fleets import DisaggregatedFleet
from raysearch.deploy.replay.replay_report import ReplayReport, holds, replayed_traffic
from sim.pools.best_pair import PHASES, best_pair
from sim.pools.matching import Limits, Matched
from sim.pools.traffic import Traffic, workload_of

_ROOM = (1.0, 1.15, 1.35, 1.75, 2.5)
"""Times the load that a pair is laid out for. [assumed]"""
_HITS = (0.25, 0.5)
"""The same of a trace, whose prompts may be cached in part. [assumed]"""
_SOONER = (1.0, 0.5)
"""Shares of the time to the first token in which its mean is to lie. [assumed] the 99th percentile is some twice it"""


@dataclass(frozen=True)
class PairLoad:
    """Two pools under a load.

    Attributes:
        matched: Both pools; its rate is the load's.
        in_steady_state: GPUs of the fewest without queues, a bound.
        report: Their replay.
    """

    matched: Matched
    in_steady_state: int
    report: ReplayReport


def pair_load(demand: Demand, traffic: Traffic, *, hidden: float = 0.0) -> PairLoad | None:
    """The pair of pools on the fewest GPUs of those that hold; None where none does on the GPUs at hand.

    Args:
        demand: With a load.
        traffic: What is sent.
        hidden: Share of the cache's transfer that hides behind the prompt's computing.
    """
    carried: dict[tuple[object, ...], bool] = {}

    def holds_limits(pair: Matched) -> bool:
        key = pair.prefill.evaluation.strategy, pair.decode.evaluation.strategy, pair.prefills, pair.decodes
        if key not in carried:
            fleet = pair_fleet(demand, traffic, pair, hidden)
            carried[key] = holds(load_setup(demand, fleet), fleet.at(demand.confidence))
        return carried[key]

    def fewest(pairs: Iterable[Matched], most: int) -> Matched | None:
        """The one that holds on the fewest GPUs, if these are fewer than so many."""
        few = sorted((each for each in pairs if each.gpus < most), key=lambda one: one.gpus)
        return next((each for each in few if holds_limits(each)), None)

    best: Matched | None = None
    least = demand.gpus
    for room, pair in _candidates(demand, traffic, hidden):
        least = min(least, pair.gpus) if room >= 1 else least
        most = best.gpus if best else demand.gpus + 1
        found = pair if pair.gpus < most and holds_limits(pair) else fewest(_resized(pair, 1), most)
        while found:
            best, found = found, fewest(_resized(found, -1), found.gpus)
    if best is None:
        return None
    best = replace(best, requests_per_s=demand.requests_per_s or best.requests_per_s)
    return PairLoad(best, least, replayed_traffic(load_setup(demand, pair_fleet(demand, traffic, best, hidden))))


def _resized(pair: Matched, by: int) -> Iterator[Matched]:
    """The pair with so many replicas more of one pool, or of both."""
    for prefills, decodes in ((by, 0), (0, by), (by, by)):
        if pair.prefills + prefills > 0 and pair.decodes + decodes > 0:
            yield replace(pair, prefills=pair.prefills + prefills, decodes=pair.decodes + decodes)


def _candidates(demand: Demand, traffic: Traffic, hidden: float) -> Iterator[tuple[float, Matched]]:
    """(times the load for which a pair is laid out, the pair), for ever more."""
    workload, load, known = demand.asked, demand.requests_per_s or 0.0, ({}, {})
    for share in _SOONER:
        for room in _ROOM if demand.trace is None else (*_HITS, *_ROOM):
            limits = Limits(demand.gpus, workload.tpot_limit_s, share * workload.ttft_limit_s, room * load)
            found = best_pair(workload, traffic, limits, hidden=hidden, known=known)
            if found is None or found.prefills + found.decodes > ENOUGH * demand.requests:
                break
            yield room, found


def pair_fleet(demand: Demand, traffic: Traffic, pair: Matched, hidden: float = 0.0) -> DisaggregatedFleet:
    """A pair of pools as it is replayed."""
    prefill, decode = (workload_of(traffic, demand.workload, phase) for phase in PHASES)
    return DisaggregatedFleet.of(
        (prefill, pair.prefill.evaluation.strategy, pair.prefills),
        (decode, pair.decode.evaluation.strategy, pair.decodes),
        hidden=hidden,
    )
