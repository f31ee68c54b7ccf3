"""How many replicas of a strategy a load takes when requests come at random: replayed, not in the steady state.

The steady state of full batches is a bound: with fewer replicas no queue ever empties. Requests that come at random
wait behind others, and steps may take longer than predicted; so replicas are added until the limits hold in replays
with the probability asked for: the one that is shown, of the same runs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from raysearch.base.errors import InputError
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import needed_replicas
from raysearch.deploy.replay.deployed_fleets import MOST_QUEUES, AggregatedFleet, DeployedFleet
from raysearch.deploy.replay.replay_report import (
    ReplayReport,
    ReplaySetup,
    kept_limits,
    replayed_traffic,
    usual_seeds,
)
from raysearch.deploy.replay.step_errors import KeptLimits
from sim.evaluation import Evaluation
from sim.workload import EVEN_ODDS

ENOUGH = 2
"""Replicas per request of a replay, on average: with more than requests none waits, and more change nothing."""


@dataclass(frozen=True)
class LoadReplay:
    """Replicas of a strategy under a load.

    Attributes:
        replicas: The fewest whose replays hold the limits with the probability asked for.
        at_even_odds: The same of one half.
        in_steady_state: The bound without queues.
        known: What their replays showed.
        report: Of these replicas; None of an alternative.
    """

    replicas: int
    at_even_odds: int
    in_steady_state: int
    known: KeptLimits = field(compare=False, repr=False)
    report: ReplayReport | None = None


def load_replay(demand: Demand, evaluation: Evaluation, most_gpus: int) -> LoadReplay | None:
    """The fewest replicas of a strategy under a demand's load; None where they take more than so many GPUs.

    Raises:
        InputError: More replicas than requests would be replayed: each request would find one idle.
    """
    replica = AggregatedFleet.of(demand.workload, evaluation.strategy)
    in_steady_state, most = needed_replicas(demand, evaluation), most_gpus // evaluation.gpus
    least = 1 if demand.unlike else in_steady_state  # hits of the prefix cache may spare more
    strategy = evaluation.strategy
    enough = min(ENOUGH * demand.requests, MOST_QUEUES // (strategy.attention_dp * strategy.pp))
    if enough < least <= most:
        raise InputError(
            f"--requests-per-s={demand.requests_per_s:g}: the load takes {least:,} replicas or more, and a replay of "
            f"{demand.requests:,} requests is of at most {enough:,}: ask for a part of the load"
        )
    runs = dict[int, KeptLimits]()

    def kept(count: int) -> KeptLimits:
        return runs.setdefault(count, kept_limits(load_setup(demand, replace(replica, replicas=count))))

    def fewest(confidence: float, counts: range) -> int | None:
        """Sought by the first seed's runs; near by, all decide."""
        if not counts or not kept(counts[-1]).reaches(confidence):
            return None
        at = bisect_left(counts[:-1], True, key=lambda count: kept(count).by_first_seed(confidence))
        while not kept(counts[at]).reaches(confidence):
            at += 1
        while at and kept(counts[at - 1]).reaches(confidence):
            at -= 1
        return counts[at]

    found = fewest(demand.confidence, range(least, min(most, enough) + 1))
    if found is None:
        return None
    even = fewest(EVEN_ODDS, range(least, found + 1)) if demand.confidence > EVEN_ODDS else found
    return LoadReplay(found, even or found, in_steady_state, kept(found))


def with_report(demand: Demand, evaluation: Evaluation, found: LoadReplay) -> LoadReplay:
    """The same with percentiles, the probability that the limits hold, and the load at which they break."""
    fleet = AggregatedFleet.of(demand.workload, evaluation.strategy, found.replicas)
    return replace(found, report=replayed_traffic(load_setup(demand, fleet), known=found.known))


def load_setup(demand: Demand, fleet: DeployedFleet) -> ReplaySetup:
    """A demand's load on a fleet."""
    sent = demand.sent
    return ReplaySetup(demand.workload, fleet, sent, demand.percentile, usual_seeds(sent), demand.confidence)
