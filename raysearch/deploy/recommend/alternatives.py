"""What else to run: the best of those that have what somebody may want besides throughput; what each has and lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, gain, largest_batch, needed_gpus, worth_asked
from sim.evaluation import Evaluation
from sim.optimum.exact_search import Known
from sim.serving.confidence import ROUNDING
from sim.simulate import evaluate
from sim.step.stage import needed_and_allowed_bytes

_SOONER = 0.8
"""Share of the best's time per token, or to the first one, that a faster alternative takes at most."""
_ROOMIER = 0.75
"""Share of the GPU's memory that a smaller alternative would fit into."""
_LEAST = 0.5
"""Share of the best's worth below which nothing is listed: the front has what is so much slower. [assumed]"""
_NOTABLE = 0.97
"""Share of another's time below which a strategy's counts as sooner."""


def alternatives(demand: Demand, best: Evaluation, known: Known) -> list[Evaluation]:
    """Strategies beside the best, the most worth first, each of which has something that all before it lack.

    Each is the exact best that has it: smaller replicas, no pipeline, no expert parallelism, sooner tokens, a sooner
    first token, more memory free.

    Args:
        demand: What was asked.
        best: The best.
        known: Of the search that found it.
    """
    least = _LEAST * (1 - ROUNDING) * worth_asked(demand, best)
    others = [
        evaluate(demand.workload, each.strategy)
        for wish in _wishes(demand, best)
        for near in [largest_batch(wish, evaluate(wish.workload, best.strategy))]
        for each in best_first(wish, 1, known, [near] if near else [], least)
    ]
    others.sort(key=lambda other: (-gain(demand, other, best), -other.tokens_per_s_per_gpu))
    listed = [best]
    for other in others:
        if 1 + gain(demand, other, best) < _LEAST or len(listed) == demand.top:
            break
        if all(any(_gains(demand, other, each)) for each in listed):
            listed.append(other)
    return listed[1:]


def _wishes(demand: Demand, best: Evaluation) -> Iterator[Demand]:
    """The demand of each thing that the best lacks: under which the best is the best that has it."""
    workload, strategy = demand.workload, best.strategy
    if best.gpus > 1:
        yield replace(demand, largest_replica=best.gpus // 2)
    if strategy.pp > 1:
        yield demand.under(degrees=replace(workload.degrees, pp=(1,)))
    if strategy.ep > 1:
        yield demand.under(degrees=replace(workload.degrees, ep=(1,)))
    kept = 1 - workload.margin
    if best.tpot_s:
        yield demand.under(tpot_slo_s=_SOONER * best.tpot_at_s(demand.sure) / kept)
    if best.ttft_s:
        yield demand.under(ttft_slo_s=_SOONER * best.ttft_at_s(demand.sure) / kept)
    needed, allowed = needed_and_allowed_bytes(workload, best.memory_bytes)
    if needed > _ROOMIER * allowed:
        hardware = workload.hardware
        yield demand.under(hardware=replace(hardware, hbm_bytes=_ROOMIER * hardware.hbm_bytes))


def reason(demand: Demand, each: Evaluation, best: Evaluation) -> str:
    """What an option has over the best one, and what it lacks; of the best, what it is best in."""
    if each is best:
        return "fewest GPUs" if demand.loaded else "most tokens/s"
    return "; ".join([*_gains(demand, each, best), *_lacks(demand, each, best)])


def _gains(demand: Demand, each: Evaluation, over: Evaluation) -> Iterator[str]:
    """What a strategy has over another, but for throughput."""
    if each.gpus < over.gpus:
        yield f"replicas of {gpus_text(each.gpus)}, not {over.gpus}"
    if each.strategy.pp == 1 < over.strategy.pp:
        yield "no pipeline"
    if each.strategy.ep == 1 < over.strategy.ep:
        yield "no expert parallelism"
    for name, own, other in (("each token", each.tpot_s, over.tpot_s), ("first token", each.ttft_s, over.ttft_s)):
        if own < _NOTABLE * other:
            yield f"{name} {1 - own / other:.0%} sooner"
    if each.memory_bytes.total < 0.9 * over.memory_bytes.total:
        yield f"{(over.memory_bytes.total - each.memory_bytes.total) / 1e9:.0f} GB more memory free"


def _lacks(demand: Demand, each: Evaluation, best: Evaluation) -> Iterator[str]:
    """Why it is not the best, in what recommendations go by; and its throughput, where that says something else."""
    own, other = needed_gpus(demand, each), needed_gpus(demand, best)
    if own != other:
        if demand.loaded:
            yield f"takes {own} GPUs, not {other}"
        else:
            in_all = _compared(gain(demand, each, best), "tokens/s in all")
            yield f"{in_all}, {gpus_text(demand.gpus - own)} idle"
    yield _compared(each.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu - 1, "tokens/s/GPU")


def _compared(more: float, what: str) -> str:
    return f"{more:.1%} more {what}" if more > 0 else f"{-more:.1%} fewer {what}"


def gpus_text(count: int) -> str:
    """A number of GPUs in words."""
    return "1 GPU" if count == 1 else f"{count} GPUs"
