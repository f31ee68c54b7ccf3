"""A deployment under traffic: percentiles over seeds, the chance that its service level holds, and where it breaks.

The step model is uncertain by an interval that measured runs fill. Steps that take longer by some per cent can turn a
queue that empties into one that grows, so the error is carried through: the traffic is replayed with steps as long as
equally likely parts of that interval say, under the arrivals of every seed, and the service level holds with the
probability of those where it does. The verdict, sizes and the load at which it breaks are judged by these same runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from raysearch.base.measured_first_tokens import MEASURED_WORDS, MeasuredTime, replayed_first_token_s
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet, DeployedFleet
from raysearch.deploy.replay.seed_estimates import AttainmentEstimate, over_seeds
from raysearch.deploy.replay.sent_traffic import SentTraffic
from raysearch.deploy.replay.step_errors import STEP_ERRORS, KeptLimits
from raysearch.deploy.replay.trace_files import recorded_per_s
from sim.arrays import Floats
from sim.json_object import JsonObject
from sim.replay.drive import LateForSure, Replayed, nobody, until_late
from sim.replay.goodput import at_percentile, settled, step_factor
from sim.replay.requests import Requests
from sim.workload import EVEN_ODDS, Workload

PERCENTILES = (50, 90, 99)
_LOADS = 128
"""Parts of the range in which the load is sought at which a service level breaks: within 1 %."""
Metric = Literal["ttft_s", "tpot_s", "itl_s", "latency_s"]
METRICS: Mapping[Metric, str] = {
    "ttft_s": "time to the first token",
    "tpot_s": "time per output token",
    "itl_s": "between two tokens",
    "latency_s": "whole request",
}
_SEEDS = 5
"""Runs behind each figure, unless a number is given."""
OnReplay = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """What is replayed.

    Attributes:
        workload: Model, machine, engine and limits.
        fleet: What serves.
        sent: What is sent to all of it.
        percentile: Of the latencies that the limits are about.
        seeds: Runs behind each figure.
        confidence: Probability with which the limits are to hold.
    """

    workload: Workload
    fleet: DeployedFleet
    sent: SentTraffic
    percentile: float = 99.0
    seeds: int = _SEEDS
    confidence: float = EVEN_ODDS


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Of one run, latencies and shares of requests after the warm-up alone.

    Attributes:
        seconds: Of each metric: its mean and its percentiles, by name ("mean", "p50", ...).
        served_per_s: Requests that were answered per second until the last one was.
        goodput_per_s: Those that were in time.
        in_time: Share of all that met both limits.
        utilisation: Share of the time in which replicas worked.
        waiting: Requests that wait, on average over the run and on all replicas.
        in_system: Those that wait or run: the rate served times the mean time of a whole request.
        most_waiting: Requests that waited at once on one microbatch of a replica, at most.
        hit_share: Of the prompts' tokens, those found in a prefix cache.
        preempted: Requests computed anew, each time counted.
        refused: That never fit, those of the warm-up among them.
        holds: Whether the percentile of both latencies is within the limits, and none was refused.
    """

    seconds: Mapping[Metric, Mapping[str, float]]
    served_per_s: float
    goodput_per_s: float
    in_time: float
    utilisation: float
    waiting: float
    in_system: float
    most_waiting: int
    hit_share: float
    preempted: int
    refused: int
    holds: bool


@dataclass(frozen=True)
class ReplayReport:
    """What becomes of traffic on a deployment.

    Attributes:
        setup: What was replayed.
        runs: By the step model as it is, one per seed.
        first: Of the first seed, every request and step.
        sure: Probabilities of the step model's error whose steps were replayed, ascending.
        kept: Seeds under which the limits were kept with each.
        met: Whether that makes the setup's confidence; without limits, whether every request fits.
        breaks_at_per_s: The rate of all replicas up to which they hold with the setup's confidence; None of clients,
            and without limits.
        most_per_s: The rate at which they serve at most, above which that is not sought; None of clients, and of
            requests that all come at once.
    """

    setup: ReplaySetup
    runs: Sequence[RunFigures]
    first: Replayed
    sure: Sequence[float]
    kept: Sequence[int]
    met: bool
    breaks_at_per_s: float | None = None
    most_per_s: float | None = None

    @property
    def probability(self) -> float | None:
        """That the limits hold at the percentile; None without limits."""
        return sum(self.kept) / self.replays if self.kept else None

    @property
    def replays(self) -> int:
        """With steps of every length under every seed."""
        return len(self.kept) * self.setup.seeds

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.setup.fleet.gpus

    @property
    def bound_per_s(self) -> float:
        """Requests per second of all replicas in the steady state of a full batch, without queues.

        Of prompts that may be cached, what is served at most: that steady state computes them all.
        """
        if self.setup.sent.cached and self.most_per_s is not None:
            return self.most_per_s
        return self.setup.fleet.bound_per_s(*self.setup.sent.mean_tokens)

    @property
    def load(self) -> float | None:
        """The rate at which requests are sent as a share of that bound; None of clients and of all at once."""
        rate_per_s = self.setup.sent.rate_per_s
        return rate_per_s / self.bound_per_s if rate_per_s is not None else None

    @property
    def measured_first_s(self) -> Mapping[str, MeasuredTime]:
        """Times to the first token as clients measure them, by figure; empty where none was measured."""
        sent = self.setup.sent
        share = min(1.0, sent.clients / len(self.first.sent_s)) if sent.clients is not None else 0.0
        replayed_s = {name: self.seconds_of("ttft_s", name).value for name in MEASURED_WORDS}
        token_s, pools = self.seconds_of("tpot_s", "mean").value, not isinstance(self.setup.fleet, AggregatedFleet)
        return replayed_first_token_s(self.setup.workload, replayed_s, token_s, share, pools=pools)

    @property
    def names(self) -> Sequence[str]:
        """Of the figures of each metric: "mean", "p50" and so on, the percentile of the limits among them."""
        return tuple(self.runs[0].seconds["ttft_s"])

    def figure_of(self, value: Callable[[RunFigures], float]) -> AttainmentEstimate:
        """A figure's mean over seeds, with its interval."""
        return over_seeds([value(run) for run in self.runs], 0.0)

    def seconds_of(self, metric: Metric, name: str) -> AttainmentEstimate:
        """The same of a latency."""
        return self.figure_of(lambda run: run.seconds[metric][name])


def usual_seeds(sent: SentTraffic) -> int:
    """Runs of a replay: one of a trace, of which all are the same."""
    return _SEEDS if sent.trace is None else 1


def kept_limits(setup: ReplaySetup) -> KeptLimits:
    """Whether the limits hold with steps of every length: asked as far as it is needed."""
    return KeptLimits(lambda sure, seed: holds(setup, setup.fleet.at(sure), seed), setup.seeds)


def replayed_traffic(
    setup: ReplaySetup, progress: OnReplay = lambda _: None, known: KeptLimits | None = None
) -> ReplayReport:
    """Replays traffic on a deployment.

    Args:
        setup: Deployment and traffic.
        progress: Called with what is being replayed.
        known: Of the same, from replays before.
    """
    progress("traffic")
    outcomes = [setup.fleet.replayed(setup.sent.draw(seed), setup.sent.clients) for seed in range(setup.seeds)]
    runs = [_figures(setup, outcome) for outcome in outcomes]
    limited = min(setup.workload.ttft_slo_s, setup.workload.tpot_slo_s) < math.inf
    sure = STEP_ERRORS if limited else ()
    progress("slower and faster steps")
    known = known or kept_limits(setup)
    kept = known.counts if limited else ()
    met = known.reaches(setup.confidence) if limited else all(run.holds for run in runs)
    report = ReplayReport(setup, runs, outcomes[0], sure, kept, met)
    if setup.sent.rate_per_s is None:
        return report
    progress("the load at which it breaks")
    most_per_s = _most_per_s(setup)
    breaks_at_per_s = _breaks_at(setup, most_per_s, known) if limited else None
    return replace(report, breaks_at_per_s=breaks_at_per_s, most_per_s=most_per_s)


def holds(setup: ReplaySetup, fleet: DeployedFleet, seed: int = 0) -> bool:
    """Whether the limits hold at the percentile in one run of a fleet in place of the setup's."""
    requests, workload, watch = setup.sent.draw(seed), setup.workload, nobody
    if setup.sent.clients is None:
        limits_s = workload.ttft_limit_s, workload.tpot_limit_s
        watch = until_late(requests, settled(requests.arrival_s), limits_s, setup.percentile)
    try:
        return _figures(setup, fleet.replayed(requests, setup.sent.clients, watch)).holds
    except LateForSure:
        return False


def _figures(setup: ReplaySetup, outcome: Replayed) -> RunFigures:
    workload, clients = setup.workload, setup.sent.clients is not None
    # Replicas begin empty; clients of a benchmark do, and their first requests are in its figures.
    counted = np.full(len(outcome.sent_s), True) if clients else settled(outcome.sent_s)
    gaps = outcome.gap_at_s >= min(outcome.sent_s[counted], default=0.0)
    ttft_s, tpot_s, latency_s = (each[counted] for each in (outcome.ttft_s, outcome.tpot_s, outcome.latency_s))
    in_time = (ttft_s <= workload.ttft_limit_s) & ~(tpot_s > workload.tpot_limit_s)
    refused = int(np.isnan(outcome.done_s).sum())  # whenever it was sent
    share = float(in_time.mean()) if len(in_time) else 1.0
    served_per_s = _served_per_s(outcome)
    each = sorted({*PERCENTILES, setup.percentile})
    seconds: dict[Metric, Mapping[str, float]] = {
        "ttft_s": _spread_of(ttft_s, each),
        "tpot_s": _spread_of(tpot_s, each),
        "itl_s": _spread_of(outcome.gap_s[gaps], each, outcome.gap_counts[gaps]),
        "latency_s": _spread_of(latency_s, each),
    }
    begins, ends = outcome.steps[:, 0], outcome.steps[:, 1]
    running, waiting = (
        float(((ends - begins) * outcome.steps[:, column]).sum()) / outcome.end_s if outcome.end_s else 0.0
        for column in (2, 3)
    )
    late = [
        at_percentile(values, setup.percentile) > limit
        for values, limit in ((ttft_s, workload.ttft_limit_s), (tpot_s, workload.tpot_limit_s))
    ]
    return RunFigures(
        seconds,
        served_per_s,
        served_per_s * share,
        share,
        outcome.busy_s / outcome.end_s / outcome.replicas if outcome.end_s else 0.0,
        waiting,
        running + waiting,
        int(outcome.steps[:, 3].max(initial=0)),
        outcome.hit_share,
        outcome.preempted,
        refused,
        not refused and not any(late),
    )


def _spread_of(values: Floats, percentiles: Sequence[float], counts: Floats | None = None) -> Mapping[str, float]:
    """Mean and percentiles, of values that stand for so many each."""
    known = values[~np.isnan(values)]
    mean = float(np.average(known, weights=counts)) if len(known) else 0.0
    return {"mean": mean, **{f"p{each:g}": at_percentile(values, each, counts) for each in percentiles}}


def _breaks_at(setup: ReplaySetup, most_per_s: float, known: KeptLimits) -> float:
    """The highest rate at which the limits hold with the confidence, on the same requests at other distances.

    None is higher than the most that is served, whatever a finite replay shows. It is sought by the first seed's runs;
    near by, all decide.

    Args:
        setup: Of requests at a rate.
        most_per_s: What is served.
        known: At that rate; what holds there is taken to hold at lower ones.
    """
    part_per_s = 1.05 * most_per_s / _LOADS
    runs = {(setup.sent.rate_per_s or 0.0) / part_per_s: known}

    def kept(parts: int) -> KeptLimits:
        if parts not in runs:
            found = kept_limits(replace(setup, sent=setup.sent.at(parts * part_per_s)))
            for other, theirs in runs.items():
                found.learn(theirs, heavier=other > parts)
            runs[parts] = found
        return runs[parts]

    def missed(parts: int) -> bool:
        return not kept(parts).reaches(setup.confidence)

    loads = range(1, _LOADS)
    carried = bisect_left(loads, True, key=lambda parts: not kept(parts).by_first_seed(setup.confidence))
    above, step = carried + 1, 1
    while above < _LOADS and not missed(above):
        carried, above, step = above, min(_LOADS, above + step), 2 * step
    while carried and missed(carried):
        above, carried, step = carried, max(0, carried - step), 2 * step
    carried += bisect_left(range(carried + 1, above), True, key=missed)
    return min(carried * part_per_s, most_per_s)


def _most_per_s(setup: ReplaySetup) -> float:
    """What is served at most: the steady state at its best, or more where prompts are cached and all come at once."""
    steady_per_s = setup.fleet.most_per_s(*setup.sent.mean_tokens)
    if not setup.sent.cached:
        return steady_per_s
    requests = setup.sent.draw(0)
    flood = setup.fleet.replayed(replace(requests, arrival_s=np.zeros(len(requests))), None)
    return max(steady_per_s, _served_per_s(flood))


def _trace_dict(trace: Requests) -> JsonObject:
    """A trace's own rate, burstiness and lengths, whatever rate it is stretched to."""
    gaps_s, span_s = np.diff(trace.arrival_s), float(trace.arrival_s[-1])
    return {
        "requests": len(trace),
        "span_s": span_s,
        "requests_per_s": recorded_per_s(trace) if span_s else None,
        "cv": float(gaps_s.std() / gaps_s.mean()) if span_s else None,
        "isl": {**_spread_of(trace.prompt_tokens.astype(float), PERCENTILES), "most": int(trace.prompt_tokens.max())},
        "osl": {**_spread_of(trace.output_tokens.astype(float), PERCENTILES), "most": int(trace.output_tokens.max())},
    }


def _served_per_s(outcome: Replayed) -> float:
    return float(np.isfinite(outcome.done_s).sum()) / outcome.end_s if outcome.end_s else 0.0


def replay_dict(report: ReplayReport) -> JsonObject:
    """The answer in JSON."""
    setup, fleet = report.setup, report.setup.fleet
    (ttft_s, tpot_s), lengths = fleet.latencies_s, setup.sent.mean_tokens

    def estimate(value: Callable[[RunFigures], float]) -> JsonObject:
        return asdict(report.figure_of(value))

    return {
        "replicas": fleet.copies,
        "gpus": report.gpus,
        "router": fleet.router if isinstance(fleet, AggregatedFleet) else "least_loaded",
        "percentile": setup.percentile,
        "requests_per_s": setup.sent.rate_per_s,
        "concurrency": setup.sent.clients,
        "cv": setup.sent.cv if setup.sent.trace is None and setup.sent.clients is None else None,
        "trace": _trace_dict(setup.sent.trace) if setup.sent.trace is not None else None,
        "requests": len(report.first.sent_s),
        "seeds": setup.seeds,
        "seconds": {
            metric: {name: asdict(report.seconds_of(metric, name)) for name in report.runs[0].seconds[metric]}
            for metric in METRICS
        },
        "measured_ttft_s": dict(report.measured_first_s),
        "served_per_s": estimate(lambda run: run.served_per_s),
        "goodput_per_s": estimate(lambda run: run.goodput_per_s),
        "in_time": estimate(lambda run: run.in_time),
        "utilisation": estimate(lambda run: run.utilisation),
        "waiting": estimate(lambda run: run.waiting),
        "in_system": estimate(lambda run: run.in_system),
        "load": report.load,
        "most_waiting": max(run.most_waiting for run in report.runs),
        "hit_share": estimate(lambda run: run.hit_share),
        "preempted": estimate(lambda run: run.preempted),
        "refused": max(run.refused for run in report.runs),
        "probability": report.probability,
        "step_factors": [[step_factor(each, part) for part in report.sure] for each in fleet.evaluations],
        "held": [count / setup.seeds for count in report.kept],
        "held_as_predicted": sum(run.holds for run in report.runs) / setup.seeds,
        "confidence": setup.confidence,
        "breaks_at_per_s": report.breaks_at_per_s,
        "most_per_s": report.most_per_s,
        "bound_per_s": report.bound_per_s,
        "steady_state": {
            "tpot_s": tpot_s,
            "ttft_s": ttft_s,
            "tokens_per_s_per_gpu": fleet.tokens_per_s_per_gpu(*lengths),
        },
    }
