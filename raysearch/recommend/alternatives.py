"""What else to run: the best of those that have what somebody may want besides throughput; what each has and lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raysearch.recommend.fleet import best_first, gain, needed_gpus
from raysearch.recommend.question import Question
from sim.evaluation import Evaluation
from sim.optimum.best import Known
from sim.simulate import evaluate
from sim.step.stage import needed_and_allowed_bytes

_SOONER = 0.8
"""Share of the best's time per token, or to the first one, that a faster alternative takes at most."""
_ROOMIER = 0.75
"""Share of the GPU's memory that a smaller alternative would fit into."""
_LEAST = 0.5
"""Share of the best's worth below which nothing is told: the front has what is so much slower. [assumed]"""
_NOTABLE = 0.97
"""Share of another's time below which a strategy's is told to be sooner."""


def alternatives(question: Question, bests: Sequence[Evaluation], known: Known) -> list[Evaluation]:
    """Strategies beside the best, the most worth first, each of which has something that all before it lack.

    Each is the exact best that has it: smaller replicas, no pipeline, no expert parallelism, sooner tokens (within the
    SLO at the high end of their interval, where that can be), a sooner first token, more memory free. For requests at
    once they are chosen among the best of each degrees.

    Args:
        question: What was asked.
        bests: The best; for requests at once all of different degrees, the best first.
        known: Of the search that found it.
    """
    best = bests[0]
    if question.concurrency is not None:
        others = list(bests[1:])
    else:
        found = [other for wish in _wishes(question, best) for other in best_first(wish, 1, known)]
        others = [evaluate(question.workload, other.strategy) for other in found]
        others.sort(key=lambda other: -gain(question, other, best))
    told = [best]
    for other in others:
        if 1 + gain(question, other, best) < _LEAST or len(told) == question.top:
            break
        if all(any(_gains(question, other, each)) for each in told):
            told.append(other)
    return told[1:]


def _wishes(question: Question, best: Evaluation) -> Iterator[Question]:
    """The question of each thing that the best lacks: under which the best is the best that has it."""
    workload, strategy = question.workload, best.strategy
    if best.gpus > 1:
        yield replace(question, largest_replica=best.gpus // 2)
    if strategy.pp > 1:
        yield question.under(degrees=replace(workload.degrees, pp=(1,)))
    if strategy.ep > 1:
        yield question.under(degrees=replace(workload.degrees, ep=(1,)))
    if best.tpot_s:
        surely = workload.tpot_slo_s * best.tpot_s / best.tpot_interval_s[1]
        sooner = _SOONER * best.tpot_s / (1 - workload.margin)
        yield question.under(tpot_slo_s=surely if math.isfinite(surely) else sooner)
    if best.ttft_s:
        yield question.under(ttft_slo_s=_SOONER * best.ttft_s / (1 - workload.margin))
    needed, allowed = needed_and_allowed_bytes(workload, best.memory_bytes)
    if needed > _ROOMIER * allowed:
        hardware = workload.hardware
        yield question.under(hardware=replace(hardware, hbm_bytes=_ROOMIER * hardware.hbm_bytes))


def reason(question: Question, each: Evaluation, best: Evaluation) -> str:
    """What an option has over the best one, and what it lacks; of the best, what it is best in."""
    if each is best:
        return "fewest GPUs" if question.loaded else "most tokens/s"
    return "; ".join([*_gains(question, each, best), *_lacks(question, each, best)])


def _gains(question: Question, each: Evaluation, over: Evaluation) -> Iterator[str]:
    """What a strategy has over another, but for throughput."""
    if each.gpus < over.gpus:
        yield f"replicas of {gpus_text(each.gpus)}, not {over.gpus}"
    if each.strategy.pp == 1 < over.strategy.pp:
        yield "no pipeline"
    if each.strategy.ep == 1 < over.strategy.ep:
        yield "no expert parallelism"
    if each.tpot_interval_s[1] <= question.workload.tpot_limit_s < over.tpot_interval_s[1]:
        yield "within the TPOT allowed at the high end of its interval"
    for name, own, other in (("each token", each.tpot_s, over.tpot_s), ("first token", each.ttft_s, over.ttft_s)):
        if own < _NOTABLE * other:
            yield f"{name} {1 - own / other:.0%} sooner"
    if each.memory_bytes.total < 0.9 * over.memory_bytes.total:
        yield f"{(over.memory_bytes.total - each.memory_bytes.total) / 1e9:.0f} GB more memory free"


def _lacks(question: Question, each: Evaluation, best: Evaluation) -> Iterator[str]:
    """Why it is not the best, in what recommendations go by; and its throughput, where that says something else."""
    own, other = needed_gpus(question, each), needed_gpus(question, best)
    if own != other:
        if question.loaded:
            yield f"takes {own} GPUs, not {other}"
        else:
            in_all = _compared(gain(question, each, best), "tokens/s in all")
            yield f"{in_all}, {gpus_text(question.gpus - own)} left over"
    yield _compared(each.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu - 1, "tokens/s/GPU")


def _compared(more: float, what: str) -> str:
    return f"{more:.1%} more {what}" if more > 0 else f"{-more:.1%} fewer {what}"


def gpus_text(count: int) -> str:
    """A number of GPUs in words."""
    return "1 GPU" if count == 1 else f"{count} GPUs"
