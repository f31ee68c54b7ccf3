"""Goodput: the highest load, of requests that come at random, under which a strategy keeps its SLOs at a percentile.

The load is sought up to the steady state of full batches at its best, where prompts of all attention groups meet and
stall no pipeline: above it no queue stays short, whatever a finite replay shows. So that steady state bounds a
strategy's goodput, and the exact optimum that of a space. A strategy whose full batch breaks a limit even so is
infeasible here too, since a burst fills its batch.

Source: Zhong et al., "DistServe", OSDI 2024, section 2: goodput as the highest rate per GPU that attains the SLOs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from sim.arrays import Flags, Floats
from sim.evaluation import Evaluation, Violation, told_apart
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import Replayed, as_they_come
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.step_prices import StepPrices
from sim.serving.phases import SERVE, phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WARM_UP = 0.1
"""Share of the time in which requests are served and not counted: the queues begin empty. [assumed]"""
PARTS = 128
"""Of the steady state's load, by which goodput is told apart: within 1 %."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a strategy carries.

    Attributes:
        steady_state: The strategy without queues, whose throughput is the bound.
        share: Of that bound; 0 where it is infeasible.
        bound_per_s: Requests per second of one replica in the steady state.
        ttft_s, tpot_s: At the percentile, under that load; 0 where it is infeasible.
        violations: Limits of the steady state, or those that are missed at the percentile under the lightest load.
    """

    steady_state: Evaluation
    share: float
    bound_per_s: float
    ttft_s: float
    tpot_s: float
    violations: tuple[Violation, ...]

    @property
    def requests_per_s(self) -> float:
        """Of one replica, within the SLOs."""
        return self.share * self.bound_per_s

    @property
    def evaluation(self) -> Evaluation:
        """The steady state, with goodput in place of its throughput where it is feasible."""
        if self.violations:
            return self.steady_state.breaking(self.violations)
        return self.steady_state.yielding(self.share * self.steady_state.tokens_per_s_per_gpu)


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


def goodput(workload: Workload, strategy: Strategy) -> Goodput:
    """Replays a strategy under loads up to its steady state's; deterministic by the workload's seed.

    Args:
        workload: Of a phase with prompts and answers; its SLOs hold for latencies at the percentile of `open_loop`,
            with steps as long as they are at most with the workload's confidence.
        strategy: Of one replica.
    """
    steady = evaluate(workload, strategy)
    counted = phase_of(workload).counted_tokens(workload.prompt_tokens, workload.output_tokens)
    bound_per_s = steady.tokens_per_s_per_gpu * steady.gpus / counted
    if not steady.feasible:
        return Goodput(steady, 0.0, bound_per_s, 0.0, 0.0, steady.violations)
    deployed = replace(
        Deployed.of(replace(workload, phase=SERVE.name), strategy),  # with the caps that are exported
        prices=_prices(workload, replace(strategy, batch=1)),
        slower=step_factor(steady, workload.confidence),
    )
    seen = dict[int, Replayed]()

    def keeps(parts: int) -> bool:
        seen[parts] = outcome = as_they_come(deployed, _sent(workload, parts / PARTS * bound_per_s))
        return not any(missed(workload, outcome))

    # The last below the first load that is too much.
    parts = PARTS if keeps(PARTS) else bisect_left(range(1, PARTS), True, key=lambda each: not keeps(each))
    if not parts:
        return Goodput(steady, 0.0, bound_per_s, 0.0, 0.0, tuple(missed(workload, seen[1])))
    ttft_s, tpot_s = latencies_s(seen[parts], workload.open_loop.percentile)
    return Goodput(steady, parts / PARTS, bound_per_s, ttft_s, tpot_s, ())


def step_factor(evaluation: Evaluation, probability: float) -> float:
    """Times the step model's seconds that steps take no longer than with that probability, as their latency."""
    if evaluation.tpot_s:
        return evaluation.tpot_at_s(probability) / evaluation.tpot_s
    return evaluation.ttft_at_s(probability) / evaluation.ttft_s


def settled(outcome: Replayed) -> Flags:
    """Requests that were sent after the warm-up, [n]."""
    return outcome.sent_s >= WARM_UP * outcome.sent_s[-1]


def latencies_s(outcome: Replayed, percentile: float) -> tuple[float, float]:
    """(to the first token, per token) at a percentile of the requests after the warm-up; 0 where nobody has any."""
    counted = settled(outcome)
    first_s, token_s = (at_percentile(each[counted], percentile) for each in (outcome.ttft_s, outcome.tpot_s))
    return first_s, token_s


def at_percentile(values: Floats, percentile: float) -> float:
    """Of those that are numbers; 0 where none is."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percentile)) if len(known) else 0.0


def missed(workload: Workload, outcome: Replayed) -> Iterator[Violation]:
    """SLOs that the percentile of latencies misses in a replay, and requests that never fit."""
    percentile = workload.open_loop.percentile
    whole, refused = workload.prompt_tokens + workload.output_tokens, int(np.isnan(outcome.done_s).sum())
    if refused:
        text = f"the KV cache has no room for one request of {whole:,} tokens"
        yield Violation("hbm", whole, 0.0, text)
    ttft_s, tpot_s = latencies_s(outcome, percentile)
    limits: tuple[tuple[Literal["ttft", "tpot"], float, float], ...] = (
        ("ttft", ttft_s, workload.ttft_limit_s),
        ("tpot", tpot_s, workload.tpot_limit_s),
    )
    for kind, found_s, limit_s in limits:
        if found_s > limit_s:
            needed, allowed = told_apart(found_s * 1e3, limit_s * 1e3)
            text = f"{kind.upper()} is {needed} ms at percentile {percentile:g}, allowed are {allowed} ms"
            yield Violation(kind, found_s, limit_s, f"{text}, under the lightest load that was replayed")


@lru_cache(maxsize=8)
def _prices(workload: Workload, strategy: Strategy) -> StepPrices:
    """Tables that strategies of any batch share."""
    return StepPrices(workload, strategy)


def _sent(workload: Workload, requests_per_s: float) -> Requests:
    loop = workload.open_loop
    times_s = draw_arrivals([Stream(requests_per_s, loop.cv)], loop.requests / requests_per_s, loop.seed).times_s
    return Requests.drawn(times_s, Lengths(workload.prompt_tokens), Lengths(workload.output_tokens), loop.seed)
