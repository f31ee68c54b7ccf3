"""Whether limits hold with the confidence asked for, and the best strategies of which they do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from raysearch.deploy.recommend.demand import Demand
from sim.evaluation import Evaluation, Violation, quantile, told_apart
from sim.optimum.spaces import space_of
from sim.prices.priced import EXACT
from sim.prices.trust import step_interval
from sim.simulate import ROUNDING, evaluate
from sim.workload import Workload


def broken_limits(demand: Demand, evaluation: Evaluation) -> tuple[Violation, ...]:
    """The limits that a strategy breaks; if none, the latencies that measured runs break more often than allowed."""
    if evaluation.violations or not demand.guarded:
        return evaluation.violations
    return tuple(_unsure(demand, evaluation))


def _unsure(demand: Demand, evaluation: Evaluation) -> Iterator[Violation]:
    workload, sure = demand.workload, demand.sure
    tpot_s, ttft_s = evaluation.tpot_at_s(sure), evaluation.ttft_at_s(sure)
    if tpot_s > workload.tpot_limit_s * (1 + ROUNDING):
        takes, slo = told_apart(tpot_s * 1e3, workload.tpot_slo_s * 1e3)
        yield Violation("tpot", tpot_s, workload.tpot_limit_s, f"TPOT at confidence {sure:g} is {takes} of {slo} ms")
    if ttft_s > workload.ttft_limit_s * (1 + ROUNDING):
        takes, slo = told_apart(ttft_s * 1e3, workload.ttft_slo_s * 1e3, 0)
        yield Violation("ttft", ttft_s, workload.ttft_limit_s, f"TTFT at confidence {sure:g} is {takes} of {slo} ms")


def loosest(demand: Demand) -> Workload:
    """The workload with limits that every strategy keeps as predicted which keeps its own with the confidence.

    An interval is least wide where kernels are as sure as usual and prompts take the share that widens it least.
    """
    workload = demand.workload
    engine, moe = workload.engine.runs if workload.engine else None, workload.model.is_moe
    none, alone = (
        quantile(demand.sure, 1.0, stated.factors)
        for stated in (
            step_interval(workload.hardware, engine, workload.model.name, moe=moe, prompt_share=share, kernels=EXACT)
            for share in (0.0, 1.0)
        )
    )
    tpot_s, ttft_s = workload.tpot_slo_s / min(none, alone), workload.ttft_slo_s / alone
    return replace(workload, tpot_slo_s=tpot_s * (1 + ROUNDING), ttft_slo_s=ttft_s * (1 + ROUNDING))


def largest_batch(demand: Demand, evaluation: Evaluation) -> Evaluation | None:
    """The same degrees and choices with the largest batch that keeps the limits; None where the least does not.

    Limits that a batch breaks, larger ones are taken to break, too.
    """
    batches, strategy = space_of(demand.workload).batch, evaluation.strategy
    found = {strategy.batch: evaluation}

    def breaks(batch: int) -> bool:
        if batch not in found:
            found[batch] = evaluate(demand.workload, replace(strategy, batch=batch))
        return bool(broken_limits(demand, found[batch]))

    at = bisect_left(batches, True, key=breaks)
    return found[batches[at - 1]] if at else None


def best_that_hold(
    demand: Demand, bests: Iterable[Evaluation], worth: Callable[[Evaluation], float]
) -> Iterator[Evaluation]:
    """Of each degrees the largest batch that holds with the confidence, the best first.

    It is worth no more than the best under the loosest limits. So the best that holds is known as soon as it is worth
    as much as the next of those, and few degrees are looked at.

    Args:
        demand: What was asked.
        bests: Of each degrees the best under the loosest limits, the best first.
        worth: What to go by.
    """
    waiting: list[Evaluation] = []
    for loose in bests:
        best = evaluate(demand.workload, loose.strategy)
        while waiting and worth(waiting[0]) >= worth(best):
            yield waiting.pop(0)
        found = largest_batch(demand, best)
        if found and worth(found) > 0:
            waiting = sorted([*waiting, found], key=worth, reverse=True)
    yield from waiting
