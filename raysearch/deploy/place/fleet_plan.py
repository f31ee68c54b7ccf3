"""The answer to a fleet: where to place its models, what that attains, and what else would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from raysearch.base.file_io import strategy_dict
from raysearch.base.priced_heading import priced_dict
from raysearch.deploy.place.attainment import Trial, tried
from raysearch.deploy.place.fleet_file import Fleet
from raysearch.deploy.place.fleet_traffic import FleetRequests, SampledTraffic
from raysearch.deploy.place.model_placement import Cluster, ModelPlacement, Placed
from raysearch.deploy.place.placement_search import Found, best_placements, dedicated, replicated, shared
from raysearch.deploy.replay.seed_estimates import AttainmentEstimate, over_seeds
from raysearch.deploy.replay.step_errors import STEP_ERRORS, KeptLimits
from sim.json_object import JsonObject

SLOWER = 1.1
"""Steps that take 10 % longer than the step model says: their cost stands beside each attainment."""
_SEARCH_SEEDS, _FINAL_SEEDS = 2, 4
"""Seeds that placements are searched by, and those that the last few are compared on. [assumed]"""
RATES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
CVS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Of the curves: times the file's rates, and burstiness of all models. [assumed] AlpaServe's range"""

PlanProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementOption:
    """The best placement of a kind.

    Attributes:
        name: shared, replicated or dedicated: see `raysearch.deploy.place.placement_search`.
        found: It, and how sure that it is the best.
        cluster: With the batches of the fleet's two with which more requests are in time.
        trials: One per seed, none of which the search has seen.
        slower: Share in time if all steps took `SLOWER` times as long, per seed.
        kept: Seeds under which the plan's percentile of every model is within its limits, with steps of each of
            `STEP_ERRORS`.
    """

    name: str
    found: Found
    cluster: Cluster
    trials: tuple[Trial, ...]
    slower: tuple[float, ...]
    kept: tuple[int, ...]

    @property
    def probability(self) -> float:
        """That the percentile of every model is within its limits."""
        return sum(self.kept) / (len(self.kept) * len(self.trials))

    @property
    def attained(self) -> AttainmentEstimate:
        """Share of all requests that were in time."""
        return over_seeds([trial.attained for trial in self.trials], 0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class FleetPlan:
    """Placements of a fleet.

    Attributes:
        fleet: What was asked.
        traffic: What the trials saw.
        options: shared, replicated, dedicated.
        percentile: Of the latencies that the limits are about.
    """

    fleet: Fleet
    traffic: SampledTraffic
    options: tuple[PlacementOption, ...]
    percentile: float

    @property
    def best(self) -> PlacementOption:
        """The best placement of all."""
        return self.options[0]

    def gain(self, over: PlacementOption) -> AttainmentEstimate:
        """By how much larger the best one's share in time is than another's, seed by seed."""
        pairs = zip(self.best.trials, over.trials, strict=True)
        return over_seeds([ours.attained - theirs.attained for ours, theirs in pairs], -1.0, 1.0)


def plan_fleet(fleet: Fleet, requests: int, seeds: int, percentile: float, progress: PlanProgress) -> FleetPlan:
    """Searches placements and measures them on arrivals that the search has not seen.

    Args:
        fleet: Models and GPUs.
        requests: Of all models, in each run.
        seeds: Runs that the figures rest on.
        percentile: Of the latencies that the limits are about.
        progress: Called with what is being done.
    """
    cluster = fleet.cluster
    own, final, last = _SEARCH_SEEDS, _SEARCH_SEEDS + _FINAL_SEEDS, _SEARCH_SEEDS + _FINAL_SEEDS + seeds
    search, finals, traffic = (
        SampledTraffic(requests, tuple(range(*each))) for each in ((own,), (own, final), (final, last))
    )
    # The narrower kinds first: what they find counts for the wider one too.
    kinds = (dedicated(cluster), replicated(cluster), shared(cluster))
    last_few = finals.draw(cluster)
    found = best_placements(cluster, search.draw(cluster), last_few, kinds, progress=progress)
    arrivals = traffic.draw(cluster)
    options: dict[ModelPlacement, PlacementOption] = {}
    for done, (kind, each) in enumerate(zip(kinds, found, strict=True)):
        progress("other arrivals", done, len(kinds))
        if each.placement not in options:
            options[each.placement] = _option(fleet, kind.name, each, last_few, arrivals, percentile)
    named = (
        replace(options[each.placement], name=kind.name, found=each) for kind, each in zip(kinds, found, strict=True)
    )
    return FleetPlan(fleet, traffic, tuple(named)[::-1], percentile)


def _option(
    fleet: Fleet,
    name: str,
    found: Found,
    last_few: Sequence[FleetRequests],
    arrivals: Sequence[FleetRequests],
    percentile: float,
) -> PlacementOption:
    """A placement in the better of two batches, by some arrivals, and what it attains under others."""

    def in_time(of: Cluster) -> float:
        return sum(tried(of, found.placement, run).attained for run in last_few)

    cluster = max((fleet.cluster, fleet.bolder), key=in_time)
    slower, uncertain = cluster.slower(SLOWER), dict(zip(STEP_ERRORS, cluster.with_steps_at(STEP_ERRORS), strict=True))

    def kept(sure: float, seed: int) -> bool:
        return tried(uncertain[sure], found.placement, arrivals[seed]).holds(percentile)

    return PlacementOption(
        name,
        found,
        cluster,
        tuple(tried(cluster, found.placement, run) for run in arrivals),
        tuple(tried(slower, found.placement, run).attained for run in arrivals),
        tuple(KeptLimits(kept, len(arrivals)).counts),
    )


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a placement attains under another load.

    Attributes:
        option: Name of the placement.
        varied: "rate", in times the file's, or "cv", of all models whose requests come at random.
        at: Its value.
        attained: Share in time.
    """

    option: str
    varied: str
    at: float
    attained: AttainmentEstimate


def curves(plan: FleetPlan, progress: PlanProgress) -> list[CurvePoint]:
    """The placements, as they are, under other rates and burstiness."""
    loads = [("rate", rate, rate, None) for rate in RATES]
    loads += [("cv", cv, 1.0, cv) for cv in (CVS if plan.fleet.cluster.at_random else ())]
    points: list[CurvePoint] = []
    distinct = {option.found.placement: option.cluster for option in plan.options}
    for done, (varied, at, rate, cv) in enumerate(loads):
        arrivals = plan.traffic.draw(plan.fleet.cluster.at(rate, cv))
        shares = {
            placement: [tried(of.at(rate, cv), placement, run).attained for run in arrivals]
            for placement, of in distinct.items()
        }
        for option in plan.options:
            attained = over_seeds(shares[option.found.placement], 0.0, 1.0)
            points.append(CurvePoint(option.name, varied, at, attained))
        progress("other loads", done + 1, len(loads))
    return points


def fleet_plan_dict(plan: FleetPlan) -> JsonObject:
    """Everything in JSON."""
    file, workloads = plan.fleet.file, plan.fleet.workloads
    return {
        "fleet": file.name,
        **priced_dict(workloads[0]),
        "gpus": file.gpus,
        "precisions": [asdict(each.precisions) for each in workloads],
        "config_hashes": [each.config_hash for each in workloads],
        "requests_per_seed": plan.traffic.requests,
        "seeds": list(plan.traffic.seeds),
        "confidence": 0.9,
        "percentile": plan.percentile,
        "best": _option_dict(plan, plan.best),
        "alternatives": [
            {**_option_dict(plan, option), "best_attains_more": _interval(plan.gain(option))}
            for option in plan.options[1:]
        ],
    }


def _option_dict(plan: FleetPlan, option: PlacementOption) -> JsonObject:
    cluster, trials = option.cluster, option.trials
    busy = np.mean([trial.busy for trial in trials], axis=0)
    placement = option.found.placement
    return {
        "kind": option.name,
        "exact": option.found.exact,
        "attained": _interval(option.attained),
        "attained_if_slower": _interval(over_seeds(option.slower, 0.0, 1.0)),
        "slower": SLOWER,
        "probability": option.probability,
        "ttft_s": {
            "mean": _mean(trial.ttft_s[0] for trial in trials),
            "p99": _mean(trial.ttft_s[1] for trial in trials),
        },
        "idle_gpus": plan.fleet.file.gpus - sum(placed.shape.gpus for placed in placement if placed.models),
        "groups": [_group_dict(cluster, placed, share) for placed, share in zip(placement, busy, strict=True)],
        "models": [_model_dict(plan, number, trials, placement) for number in range(len(cluster.tenants))],
    }


def _group_dict(cluster: Cluster, placed: Placed, busy: float) -> JsonObject:
    strategies = {
        cluster.tenants[model].name: service.strategy
        for model in placed.models
        if (service := cluster.services[model, placed.shape])
    }
    return {
        "gpus": placed.shape.gpus,
        "stages": placed.shape.stages,
        "busy": float(busy),
        "models": {name: strategy_dict(strategy) if strategy else None for name, strategy in strategies.items()},
    }


def _model_dict(plan: FleetPlan, number: int, trials: Sequence[Trial], placement: ModelPlacement) -> JsonObject:
    tenant = plan.fleet.cluster.tenants[number]
    shares = [float(trial.of_models[number]) for trial in trials if trial.counts[number]]
    return {
        "name": tenant.name,
        "requests_per_s": tenant.stream.requests_per_s,
        "cv": tenant.stream.cv if tenant.recorded is None else None,
        "replicas": sum(number in placed.models for placed in placement),
        "attained": _interval(over_seeds(shares, 0.0, 1.0)) if shares else None,
    }


def _interval(estimate: AttainmentEstimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _mean(values: Any) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None
