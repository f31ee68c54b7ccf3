"""How many replicas of a strategy a load takes when requests come at random: replayed, not in the steady state.

The steady state of full batches is a bound: with fewer replicas no queue ever empties. Requests that come at random
wait behind others, and steps may take longer than predicted; so replicas are added until the limits hold in a replay
whose steps take as long as the asked-for confidence says.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from raysearch.base.errors import InputError
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import needed_replicas
from raysearch.deploy.replay.deployed_fleets import MOST_QUEUES, AggregatedFleet, DeployedFleet
from raysearch.deploy.replay.replay_report import ReplayReport, ReplaySetup, holds, replayed_traffic, usual_seeds
from sim.evaluation import Evaluation

ENOUGH = 2
"""Replicas per request of a replay, on average: with more than requests none waits, and more change nothing."""


@dataclass(frozen=True)
class LoadReplay:
    """Replicas of a strategy under a load.

    Attributes:
        replicas: The fewest whose replay holds the limits with the confidence asked for.
        at_even_odds: The same with steps as predicted, as often longer as shorter.
        in_steady_state: The bound without queues.
        report: Of these replicas; None of an alternative.
    """

    replicas: int
    at_even_odds: int
    in_steady_state: int
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
    counts = range(least, min(most, enough) + 1)

    def fewest(replica: AggregatedFleet, among: range) -> int | None:
        setup = load_setup(demand, replica)
        if not among or not holds(setup, replace(replica, replicas=among[-1])):
            return None
        at = bisect_left(among[:-1], True, key=lambda count: holds(setup, replace(replica, replicas=count)))
        return among[at]

    found = fewest(replica.at(demand.confidence), counts)
    if found is None:
        return None
    even = fewest(replica, range(counts[0], found + 1)) if demand.confidence > 0.5 else found
    return LoadReplay(found, even or found, in_steady_state)


def with_report(demand: Demand, evaluation: Evaluation, found: LoadReplay) -> LoadReplay:
    """The same with percentiles, the probability that the limits hold, and the load at which they break."""
    fleet = AggregatedFleet.of(demand.workload, evaluation.strategy, found.replicas)
    return replace(found, report=replayed_traffic(load_setup(demand, fleet)))


def load_setup(demand: Demand, fleet: DeployedFleet) -> ReplaySetup:
    """A demand's load on a fleet."""
    sent = demand.sent
    return ReplaySetup(demand.workload, fleet, sent, demand.percentile, usual_seeds(sent))
