"""The fewest GPUs of two pools under a load that comes at random: pairs of the steady state, each replayed.

A pair that is just fast enough in the steady state has no room for queues. So pairs are the exact best for more load
than comes, and for a first token sooner than asked for; of each, with a replica of either pool more, or fewer as long
as that holds, the fewest GPUs are taken that hold the limits in replays with the confidence asked for. One seed's runs
lead the way, those of all decide. The steady state's fewest GPUs are a bound; between it and what is found nothing is
proven: other pairs on as many GPUs may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.load_replay import ENOUGH, load_setup
from raysearch.deploy.replay.deployed_fleets import DisaggregatedFleet
from raysearch.deploy.replay.replay_report import ReplayReport, ReplaySetup, kept_limits, replayed_traffic
from raysearch.deploy.replay.step_errors import KeptLimits
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
    runs = dict[tuple[object, ...], tuple[Matched, KeptLimits]]()
    prefill, decode = (workload_of(traffic, demand.workload, phase) for phase in PHASES)

    def setup_of(pair: Matched) -> ReplaySetup:
        first = prefill, pair.prefill.evaluation.strategy, pair.prefills
        second = decode, pair.decode.evaluation.strategy, pair.decodes
        return load_setup(demand, DisaggregatedFleet.of(first, second, hidden=hidden))

    def kept(pair: Matched) -> KeptLimits:
        key = pair.prefill.evaluation.strategy, pair.decode.evaluation.strategy, pair.prefills, pair.decodes
        if key not in runs:
            runs[key] = pair, kept_limits(setup_of(pair))
        return runs[key][1]

    def by_first_seed(pair: Matched) -> bool:
        return kept(pair).by_first_seed(demand.confidence)

    def reaches(pair: Matched) -> bool:
        return kept(pair).reaches(demand.confidence)

    best, least = None, demand.gpus
    for room, pair in _candidates(demand, traffic, hidden):
        least = min(least, pair.gpus) if room >= 1 else least
        most = best.gpus if best else demand.gpus + 1
        found = pair if pair.gpus < most and by_first_seed(pair) else _fewest(_resized(pair, 1), most, by_first_seed)
        while found:
            best, found = found, _fewest(_resized(found, -1), found.gpus, by_first_seed)
    held = [pair for pair, _ in runs.values() if by_first_seed(pair)]
    best = _fewest((*held, *(more for each in held for more in _resized(each, 1))), demand.gpus + 1, reaches)
    while best and (found := _fewest(_resized(best, -1), best.gpus, reaches)):
        best = found
    if best is None:
        return None
    best = replace(best, requests_per_s=demand.requests_per_s or best.requests_per_s)
    return PairLoad(best, least, replayed_traffic(setup_of(best), known=kept(best)))


def _fewest(pairs: Iterable[Matched], most: int, holds: Callable[[Matched], bool]) -> Matched | None:
    """The one that holds on the fewest GPUs, if these are fewer than so many."""
    few = sorted((each for each in pairs if each.gpus < most), key=lambda one: one.gpus)
    return next((each for each in few if holds(each)), None)


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
