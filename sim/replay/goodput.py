"""Goodput: the highest load, of requests that come at random, under which a strategy keeps its SLOs at a percentile.

The load is sought up to the steady state of full batches at its best, where prompts of all attention groups meet and
stall no pipeline: above it no queue stays short, whatever a finite replay shows. So that steady state bounds a
strategy's goodput, and the exact optimum that of a space. A strategy whose full batch breaks a limit even so is
infeasible here too, since a burst fills its batch.

Source: Zhong et al., "DistServe", OSDI 2024, section 2: goodput as the highest rate per GPU that attains the SLOs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from sim.arrays import Flags, Floats
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation, Violation, unlike_texts
from sim.pools.traffic import requests_per_s
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import LateForSure, Replayed, Watch, as_they_come, nobody, until_late
from sim.replay.replica import Deployed
from sim.replay.replica_sets import equal_requests, in_chunks, of_pool
from sim.replay.requests import Lengths, Requests
from sim.replay.step_prices import StepPrices
from sim.replay.two_pools import TwoPools, handover_of, through_pools
from sim.serving.phases import DECODE, PREFILL, SERVE, phase_of
from sim.simulate import evaluate
from sim.strategy import ONE_REPLICA, ReplicaSet, Strategy
from sim.workload import Workload

WARM_UP = 0.1
"""Share of the time in which requests are served and not counted: the queues begin empty. [assumed]"""
FILLED = 2
"""Times the requests in flight that are counted at least: a queue that grows shows after some rounds. [assumed]"""
PARTS = 128
"""Of the steady state's load, to which goodput is found: within 1 %."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a strategy's replicas carry.

    Attributes:
        steady_state: A replica without queues; of two pools that of a decode replica.
        share: Of the load that the steady states bound; 0 where it is infeasible.
        bound_per_s: That load, requests per second of all replicas.
        bound: Tokens/s/GPU at that load.
        gpus: Of all replicas.
        ttft_s, tpot_s: At the percentile, under the load that is carried; 0 where it is infeasible.
        violations: Limits of the steady state, or those that are missed at the percentile under the lightest load.
    """

    steady_state: Evaluation
    share: float
    bound_per_s: float
    bound: float
    gpus: int
    ttft_s: float
    tpot_s: float
    violations: tuple[Violation, ...]

    @property
    def requests_per_s(self) -> float:
        """Of all replicas, within the SLOs."""
        return self.share * self.bound_per_s

    @property
    def evaluation(self) -> Evaluation:
        """The steady state, with goodput in place of its throughput where it is feasible."""
        if self.violations:
            return self.steady_state.breaking(self.violations)
        return self.steady_state.yielding(self.share * self.bound)


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """A strategy's replicas as they are replayed.

    Attributes:
        steady_state: As of `Goodput`.
        bound_per_s: Requests per second of all replicas in their steady states; of two pools the slower one's.
        bound: The same in tokens/s/GPU.
        gpus: Of all replicas.
        violations: Limits of the steady states, and of the GPUs at hand.
        replicas: Whose requests a replay has.
        in_flight: Requests that run at once in full batches, where answers are decoded.
        replay: What becomes of requests.
    """

    steady_state: Evaluation
    bound_per_s: float
    bound: float
    gpus: int
    violations: tuple[Violation, ...]
    replicas: int
    in_flight: int
    replay: Callable[[Requests, Watch], Replayed]


def evaluate_in_phase(workload: Workload, strategy: Strategy) -> Evaluation:
    """What a strategy is worth in its workload's phase: in the steady state, or its goodput under random arrivals.

    >>> from sim.config.question import Question
    >>> asked = {"model": "llama_3_1_8b", "isl": 1000, "osl": 100, "ttft_ms": 500, "tpot_ms": 20}
    >>> traffic, serve = (Question(phase=phase, **asked).load() for phase in ("traffic", "serve"))
    >>> strategy = Strategy(1, 1, 1, 16, (2, 1, 1, 0, 2, 2, 1, 1, 0, 2))
    >>> bound = evaluate_in_phase(serve, strategy).tokens_per_s_per_gpu
    >>> 0 < evaluate_in_phase(traffic, strategy).tokens_per_s_per_gpu < bound
    True
    """
    return goodput(workload, strategy).evaluation if phase_of(workload).replayed else evaluate(workload, strategy)


def goodput(workload: Workload, strategy: Strategy, seed: int | None = None) -> Goodput:
    """Replays a strategy's replicas under loads up to their steady states'; deterministic by the seed.

    Args:
        workload: Of a phase with prompts and answers; its SLOs hold for latencies at the percentile of `open_loop`,
            with steps as long as they are at most with the workload's confidence.
        strategy: Of a replica, and how many serve together.
        seed: Of arrivals, in place of the workload's.
    """
    plan = served_plan(workload, strategy)
    known = plan.steady_state, plan.bound_per_s, plan.bound, plan.gpus
    if plan.violations:
        return Goodput(known[0], 0.0, *known[1:], 0.0, 0.0, plan.violations)
    seen = dict[int, Replayed]()

    loop = workload.open_loop
    # The first that fill the batches are not counted; of the others there are enough for a queue to show.
    counted = max(loop.requests * plan.replicas, FILLED * plan.in_flight)
    warm_up = max(WARM_UP, plan.in_flight / (plan.in_flight + counted))

    def sent(parts: int) -> Requests:
        rate, number = parts / PARTS * plan.bound_per_s, loop.seed if seed is None else seed
        times_s = draw_arrivals([Stream(rate, loop.cv)], (plan.in_flight + counted) / rate, number).times_s
        return Requests.drawn(times_s, Lengths(workload.prompt_tokens), Lengths(workload.output_tokens), number)

    def keeps(parts: int) -> bool:
        requests = sent(parts)
        try:
            outcome = plan.replay(requests, _watching(workload, requests, warm_up))
        except LateForSure:
            return False
        seen[parts] = outcome
        return not any(missed(workload, outcome, warm_up))

    # The last below the first load that is too much.
    parts = PARTS if keeps(PARTS) else bisect_left(range(1, PARTS), True, key=lambda each: not keeps(each))
    if not parts:
        outcome = plan.replay(sent(1), nobody)
        return Goodput(known[0], 0.0, *known[1:], 0.0, 0.0, tuple(missed(workload, outcome, warm_up)))
    latencies = latencies_s(seen[parts], loop.percentile, warm_up)
    return Goodput(known[0], parts / PARTS, *known[1:], *latencies, ())


def other_seeds(workload: Workload, strategy: Strategy, count: int = 8) -> Floats:
    """Goodput under other arrivals of the same kind, tokens/s/GPU, [count]: how far that of one seed is chance."""
    first = workload.open_loop.seed + 1
    found = (goodput(workload, strategy, seed) for seed in range(first, first + count))
    return np.array([each.share * each.bound for each in found])


def served_plan(workload: Workload, strategy: Strategy) -> ServedPlan:
    """A strategy's replicas as they are replayed, one pool or two."""
    served = strategy.served
    gpus = served.gpus(strategy.gpus)
    counted = phase_of(workload).counted_tokens(workload.prompt_tokens, workload.output_tokens)
    too_many = (
        (Violation("gpus", gpus, workload.max_gpus, f"needs {gpus} GPUs, the budget is {workload.max_gpus}"),)
        if gpus > max(workload.max_gpus, strategy.gpus)
        else ()
    )
    if served.prefill is not None:
        return _two_pools(workload, strategy, served, gpus, counted, too_many)
    asked = in_chunks(workload, served.chunk_tokens)
    steady = evaluate(asked, strategy)
    bound_per_s = served.replicas * steady.tokens_per_s_per_gpu * steady.gpus / counted

    def replay(requests: Requests, watch: Watch) -> Replayed:
        deployed = _deployed(_as_phase(asked, SERVE.name), strategy, step_factor(steady, workload.confidence))
        return as_they_come(deployed, requests, served.replicas, watch=watch)

    violations, in_flight = steady.violations + too_many, served.replicas * strategy.batch * strategy.pp
    return ServedPlan(
        steady,
        bound_per_s,
        steady.tokens_per_s_per_gpu,
        gpus,
        violations,
        served.replicas,
        in_flight,
        replay,
    )


def _two_pools(
    workload: Workload,
    strategy: Strategy,
    served: ReplicaSet,
    gpus: int,
    counted: int,
    too_many: tuple[Violation, ...],
) -> ServedPlan:
    assert served.prefill is not None
    pools = of_pool(workload, PREFILL.name), of_pool(workload, DECODE.name)
    strategies = served.prefill, strategy
    states = tuple(evaluate(pool, each) for pool, each in zip(pools, strategies, strict=True))
    copies = served.prefills, served.replicas
    rates = [
        count * requests_per_s(equal_requests(workload), pool, state.tokens_per_s_per_gpu * state.gpus)
        for count, pool, state in zip(copies, pools, states, strict=True)
    ]

    def replay(requests: Requests, watch: Watch) -> Replayed:
        near = gpus <= workload.hardware.node_gpus
        prefill, decode = (
            _deployed(pool, each, step_factor(state, workload.confidence))
            for pool, each, state in zip(pools, strategies, states, strict=True)
        )
        handover = handover_of(pools[0], strategies, same_node=near)
        return through_pools(TwoPools(prefill, decode, *copies, handover), requests, watch=watch)

    rules = engine_rules_of(workload)
    apart = rules.pair_refusals(*strategies) if rules else []
    unjoined = (Violation("engine", 1, 0, text) for text in apart)
    violations = (*states[0].violations, *states[1].violations, *unjoined, *too_many)
    bound_per_s, in_flight = min(rates), served.replicas * strategy.batch * strategy.pp
    return ServedPlan(
        states[1],
        bound_per_s,
        bound_per_s * counted / gpus,
        gpus,
        violations,
        max(copies),
        in_flight,
        replay,
    )


@lru_cache(maxsize=16)
def _deployed(workload: Workload, strategy: Strategy, slower: float) -> Deployed:
    """A replica with the caps that are exported."""
    one = replace(strategy, batch=1, served=ONE_REPLICA)
    return replace(Deployed.of(workload, strategy), prices=_prices(workload, one), slower=slower)


def _watching(workload: Workload, requests: Requests, warm_up: float) -> Watch:
    limits_s = workload.ttft_limit_s, workload.tpot_limit_s
    return until_late(requests, settled(requests.arrival_s, warm_up), limits_s, workload.open_loop.percentile)


def step_factor(evaluation: Evaluation, probability: float) -> float:
    """Times the step model's seconds that steps take no longer than with that probability, as their latency."""
    if evaluation.tpot_s:
        return evaluation.tpot_at_s(probability) / evaluation.tpot_s
    return evaluation.ttft_at_s(probability) / evaluation.ttft_s


def settled(sent_s: Floats, warm_up: float = WARM_UP) -> Flags:
    """Requests that were sent after that share of the time, [n]."""
    return sent_s >= warm_up * sent_s[-1] if len(sent_s) else np.zeros(0, bool)


def latencies_s(outcome: Replayed, percentile: float, warm_up: float = WARM_UP) -> tuple[float, float]:
    """(to the first token, per token) at a percentile of the requests after the warm-up; 0 where nobody has any."""
    counted = settled(outcome.sent_s, warm_up)
    first_s, token_s = (at_percentile(each[counted], percentile) for each in (outcome.ttft_s, outcome.tpot_s))
    return first_s, token_s


def at_percentile(values: Floats, percentile: float, counts: Floats | None = None) -> float:
    """Of those that are numbers, between neighbours in proportion; 0 where none is.

    Args:
        values: Each once, or as often as `counts` says.
        percentile: In (0, 100].
        counts: Of each value.

    >>> at_percentile(np.array([3.0, 1.0]), 75), at_percentile(np.array([3.0, 1.0]), 75, np.array([1.0, 3.0]))
    (2.5, 1.5)
    """
    if counts is None:
        known = values[~np.isnan(values)]
        return float(np.percentile(known, percentile)) if len(known) else 0.0
    if not counts.sum():
        return 0.0
    order = np.argsort(values)
    ends = np.cumsum(counts[order])
    place = (ends[-1] - 1) * percentile / 100
    low, high = values[order][np.searchsorted(ends, (np.floor(place), np.ceil(place)), side="right")]
    return float(low + (high - low) * (place % 1))


def missed(workload: Workload, outcome: Replayed, warm_up: float = WARM_UP) -> Iterator[Violation]:
    """SLOs that the percentile of latencies misses in a replay, and requests that never fit."""
    percentile = workload.open_loop.percentile
    whole, refused = workload.prompt_tokens + workload.output_tokens, int(np.isnan(outcome.done_s).sum())
    if refused:
        text = f"the KV cache has no room for one request of {whole:,} tokens"
        yield Violation("hbm", whole, 0.0, text)
    ttft_s, tpot_s = latencies_s(outcome, percentile, warm_up)
    limits: tuple[tuple[Literal["ttft", "tpot"], float, float], ...] = (
        ("ttft", ttft_s, workload.ttft_limit_s),
        ("tpot", tpot_s, workload.tpot_limit_s),
    )
    for kind, found_s, limit_s in limits:
        if found_s > limit_s:
            needed, allowed = unlike_texts(found_s * 1e3, limit_s * 1e3)
            text = f"{kind.upper()} is {needed} ms at percentile {percentile:g}, allowed are {allowed} ms"
            yield Violation(kind, found_s, limit_s, f"{text}, under the lightest load that was replayed")


@lru_cache(maxsize=256)
def _prices(workload: Workload, strategy: Strategy) -> StepPrices:
    """Tables that strategies of any batch share."""
    return StepPrices(workload, strategy)


@lru_cache(maxsize=64)
def _as_phase(workload: Workload, phase: str) -> Workload:
    """The workload in another phase, one object for all who ask."""
    return replace(workload, phase=phase)
