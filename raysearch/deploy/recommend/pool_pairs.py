"""The deployment with separate prefill and decode pools, and which form of deployment serves more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysearch.base.file_io import degrees_text
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import Replicas, Searched, best_first, needed_gpus
from raysearch.deploy.recommend.pair_load import PairLoad, pair_load
from sim.pools.best_pair import PHASES, best_pair, pair_at_once
from sim.pools.candidates import Replica
from sim.pools.matching import Limits, Matched
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.strategy import Strategy
from sim.workload import Workload

FAR = 1.5
"""Times what replicas serve, or the other way round, that no form makes up for. [assumed]"""
_NEARBY = 1.5
"""Times the fewest GPUs of replicas up to which pools are looked at for requests at once. [assumed]"""


@dataclass(frozen=True)
class Disaggregated:
    """The best prefill and decode pool.

    Attributes:
        matched: Both pools at one rate.
        workloads: What each serves, by phase.
        tokens_per_s: Output tokens of the whole; under a load what the pools could make, as of replicas of one kind.
        gpus_at_hand: Of which the pools take some.
        load: Under a load, the replay in which they hold; None otherwise.
        at_once: Requests that are to be in flight together on the fewest GPUs; None otherwise.
    """

    matched: Matched
    workloads: dict[str, Workload]
    tokens_per_s: float
    gpus_at_hand: int
    load: PairLoad | None = None
    at_once: int | None = None

    @property
    def pools(self) -> dict[str, tuple[Replica, int]]:
        """By phase: a replica, and how many."""
        matched = self.matched
        return {"prefill": (matched.prefill, matched.prefills), "decode": (matched.decode, matched.decodes)}

    @property
    def strategies(self) -> tuple[Strategy, Strategy]:
        """Of a prefill and of a decode replica."""
        return self.matched.prefill.evaluation.strategy, self.matched.decode.evaluation.strategy

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of the GPUs that it takes."""
        return self.tokens_per_s / self.matched.gpus

    @property
    def tokens_per_s_interval(self) -> tuple[float, float]:
        """Of the whole, where each pool is as slow, or as fast, as the end of its own 90 % interval says."""
        slow, fast = zip(*(_rates_per_s(*pool) for pool in self.pools.values()), strict=True)
        tokens = self.tokens_per_s / _capacity_per_s(self.matched)
        return tokens * min(slow), tokens * min(fast)


def _capacity_per_s(pair: Matched) -> float:
    """Requests a second that both pools compute."""
    return min(pair.prefills * pair.prefill.requests_per_s, pair.decodes * pair.decode.requests_per_s)


def _rates_per_s(replica: Replica, count: int) -> tuple[float, float]:
    """Lowest and highest rate of a pool: rates err as the time does that they are made of."""
    found, rate = replica.evaluation, count * replica.requests_per_s
    time_s, interval_s = (
        (found.tpot_s, found.tpot_interval_s) if found.tpot_s else (found.ttft_s, found.ttft_interval_s)
    )
    low_s, high_s = interval_s
    return rate * time_s / high_s, rate * time_s / low_s


def best_disaggregated(
    demand: Demand, begin: Sequence[Strategy] = (), searched: Searched | None = None
) -> Disaggregated | None:
    """The exact best pair of pools, or the fewest GPUs found for a load; None where none keeps the limits.

    Args:
        demand: What is asked.
        begin: As of `sim.pools.best_pair.best_pair`, which no load takes.
        searched: Of the same demand with other limits or batches; what is computed is added.
    """
    workload, searched = demand.workload, searched or Searched()
    traffic = traffic_of(workload)
    if demand.under_traffic:
        load = pair_load(demand, traffic)
        pair = load and paired(demand, load.matched)
        return pair and replace(pair, load=load, tokens_per_s=_capacity_per_s(pair.matched) * traffic.output_tokens)
    limits = Limits(demand.gpus, workload.tpot_limit_s, workload.ttft_limit_s)
    if demand.concurrency is not None:
        replicas = best_first(demand, 1, searched.of(workload))
        gpus = min(demand.gpus, math.ceil(_NEARBY * needed_gpus(demand, replicas[0]))) if replicas else demand.gpus
        few, near = demand.over_batches_at_once.workload, replace(limits, gpus=gpus)
        found = pair_at_once(few, traffic, near, demand.concurrency, searched.pools)
    else:
        found = best_pair(workload, traffic, limits, begin=begin, known=searched.pools)
    return found and paired(demand, found)


def paired(demand: Demand, found: Matched) -> Disaggregated:
    """A pair of pools as a deployment under a demand."""
    pair = disaggregated(demand.workload, found, demand.gpus, traffic_of(demand.workload))
    return replace(pair, at_once=demand.concurrency)


def disaggregated(workload: Workload, found: Matched, gpus: int, traffic: Traffic) -> Disaggregated:
    """A pair of pools as a deployment, with so many GPUs at hand."""
    workloads = {phase: workload_of(traffic, workload, phase) for phase in PHASES}
    return Disaggregated(found, workloads, found.requests_per_s * traffic.output_tokens, gpus)


def traffic_of(workload: Workload) -> Traffic:
    """The equal requests of a workload."""
    return Traffic.of([TrafficKind(workload.prompt_tokens, workload.output_tokens)])


def ahead_by(pair: Disaggregated, fleet: Replicas) -> float:
    """Tokens a second that two pools make more than replicas of one kind on the same GPUs at hand, as a share.

    Under a load, and for requests at once, the GPUs that these take more.
    """
    if pair.load or pair.at_once:
        return fleet.gpus / pair.matched.gpus - 1
    return pair.tokens_per_s / fleet.tokens_per_s - 1


def pools_text(matched: Matched) -> str:
    """Both pools in words."""
    prefill, decode = (degrees_text(each.evaluation.strategy) for each in (matched.prefill, matched.decode))
    return f"prefill {matched.prefills} x ({prefill}); decode {matched.decodes} x ({decode})"
