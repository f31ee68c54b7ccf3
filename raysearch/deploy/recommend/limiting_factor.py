"""What binds a strategy, in words, and what would make an impossible demand possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, needed_gpus
from sim.evaluation import Evaluation, Violation, unlike_texts
from sim.json_object import JsonObject
from sim.optimum.exact_search import Known
from sim.optimum.spaces import Space, space_of
from sim.serving.confidence import ROUNDING
from sim.simulate import evaluate
from sim.strategy import Strategy


def binding_limit(demand: Demand, evaluation: Evaluation) -> str:
    """What keeps a strategy from a larger batch: the limit that one more request on each rank breaks.

    Where that breaks none, the limit of the first batch that is faster, of some up to twice the batch; if a faster one
    before it breaks none, what an alternative is listed for keeps it from that.
    """
    strategy, searched = evaluation.strategy, space_of(demand.workload).batch
    more = [strategy.attention_dp << power for power in range((strategy.batch // strategy.attention_dp).bit_length())]
    free = 0
    for added in more or [strategy.attention_dp]:
        batch = strategy.batch + added
        larger = evaluate(demand.workload, replace(strategy, batch=batch))
        faster, broken = larger.tokens_per_s_per_gpu > evaluation.tokens_per_s_per_gpu, larger.violations
        if broken and (added == strategy.attention_dp or faster):
            at = f" at confidence {demand.sure:g}" if demand.guarded else ""
            wished = f"what it is listed for, up to batch {free}; then " if free else ""
            return f"{wished}{_NAMES.get(broken[0].kind, 'limit')}: {_lacking(batch, broken[0], at)}"
        if demand.loaded and faster:
            return f"none: batch {batch} breaks none, but the load takes as many GPUs with it"
        free = batch if faster and not broken and batch in searched else free
    if free:
        return f"what it is listed for: batch {free} is faster within every limit"
    return f"none: batch {strategy.batch + strategy.attention_dp} breaks none, but no larger one is faster per GPU"


_NAMES = {"hbm": "HBM", "tpot": "TPOT", "ttft": "TTFT", "sequences": "requests at once"}


def _lacking(batch: int, violation: Violation, at: str) -> str:
    if violation.kind == "hbm":
        lacks = violation.needed - violation.allowed
        return f"batch {batch} lacks " + (f"{lacks / 1e9:.1f} GB" if lacks >= 1e8 else f"{math.ceil(lacks / 1e6)} MB")
    if violation.kind in ("tpot", "ttft"):
        needed, allowed = unlike_texts(violation.needed * 1e3, violation.allowed * 1e3)
        return f"batch {batch} takes {needed} ms{at}, the limit is {allowed} ms"
    return f"batch {batch}: {violation.message}"


@dataclass(frozen=True)
class NearestMiss:
    """The strategy that misses its limits least, all together.

    Attributes:
        evaluation: Of it.
        would_fit: Changes, each of which alone makes something feasible.
        gpus_needed: Of its replicas, where they cannot carry the load on the GPUs at hand.
    """

    evaluation: Evaluation
    would_fit: tuple[str, ...]
    gpus_needed: int | None = None


_PER_RANK = (1, 2, 4, 8, 16, 32)
"""Requests per attention rank among which a miss is looked for: it lies where few requests run."""


def nearest_miss(demand: Demand, known: Known) -> NearestMiss | None:
    """The nearest miss, or None where the engine runs nothing at all on so many GPUs.

    Args:
        demand: What was asked.
        known: Of the search that found nothing.
    """
    if demand.loaded and (fewest := best_first(replace(demand, gpus=_NO_END), 1, known)):
        needed = needed_gpus(demand, fewest[0])
        return NearestMiss(fewest[0], (f"{needed:,} GPUs",), needed)
    misses = [evaluate(demand.workload, strategy) for strategy in _few_requests(space_of(demand.workload))]

    nearest = min(misses, key=lambda each: (each.excess, -each.tokens_per_s_per_gpu), default=None)
    return None if nearest is None else NearestMiss(nearest, tuple(_remedies(demand, nearest)))


_NO_END = 10**12
"""GPUs, for replicas that are as large as those at hand but as many as need be."""


def _few_requests(space: Space) -> Iterator[Strategy]:
    budget = space.workload.max_gpus
    for part in space.parts():
        for mesh in part.meshes():
            tp, cp, dp, ep = mesh
            for pp, per_rank in itertools.product(part.stages(mesh), _PER_RANK):
                if tp * cp * dp * pp <= budget and space.workload.model.layers % pp == 0:
                    yield Strategy(tp, ep, pp, per_rank * dp, part.only_dims, cp, None if (cp, dp) == (1, ep) else dp)


def _remedies(demand: Demand, nearest: Evaluation) -> Iterator[str]:
    """Single changes under which the exact search finds something; where none does, what the nearest miss lacks."""

    def fits(gpus: int = demand.gpus, **changes: Any) -> bool:
        return bool(best_first(replace(demand.under(**changes), gpus=gpus), 1))

    lacks = list(_lacks(demand, nearest))
    alone = [text for text, changes in lacks if fits(**changes)]
    yield from alone
    together = {name: value for _, changes in lacks for name, value in changes.items()}
    if not alone and len(lacks) > 1 and fits(**together):
        yield " and ".join(text for text, _ in lacks)
    for factor in (2, 4):
        degrees, gpus = demand.workload.degrees, factor * demand.gpus
        wider = replace(degrees, **{name: _doubled(getattr(degrees, name), factor) for name in ("tp", "ep")})
        if fits(gpus, max_gpus=gpus, degrees=wider):
            yield f"{gpus} GPUs"
            return


def _lacks(demand: Demand, nearest: Evaluation) -> Iterator[tuple[str, JsonObject]]:
    """Fields of the workload that would keep a strategy within a limit that it breaks, each in words, rounded up."""
    workload = demand.workload
    tpot_s, ttft_s = nearest.tpot_at_s(demand.sure), nearest.ttft_at_s(demand.sure)
    for kind, field, reached in (("TPOT", "tpot_slo_s", tpot_s), ("TTFT", "ttft_slo_s", ttft_s)):
        if reached > getattr(workload, field) * (1 - workload.margin) * (1 + ROUNDING):
            milliseconds = math.ceil(reached / (1 - workload.margin) * 1e4) / 10
            yield f"a {kind} of {milliseconds:,.1f} ms", {field: milliseconds / 1e3}
    for violation in nearest.violations:
        if violation.kind == "hbm":
            hardware = workload.hardware
            # The engine may use a share of the memory alone, so that more must be there than is lacking.
            more = math.ceil((violation.needed / violation.allowed - 1) * hardware.hbm_bytes / 1e8) / 10
            larger = replace(hardware, hbm_bytes=hardware.hbm_bytes + more * 1e9)
            yield f"{more:,.1f} GB more memory on each GPU", {"hardware": larger}


def _doubled(table: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return tuple(sorted({*table, *(factor * degree for degree in table)}))
