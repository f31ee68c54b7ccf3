"""What binds a strategy, in words, and what would make an impossible question possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raysearch.recommend.question import Question
from sim.evaluation import Evaluation, Violation
from sim.optimum.best import find_best
from sim.optimum.spaces import Space, space_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload


def binding_limit(workload: Workload, evaluation: Evaluation) -> str:
    """What keeps a strategy from a larger batch: the first limit that one more request on each rank breaks."""
    strategy = evaluation.strategy
    for batch in (strategy.batch + strategy.attention_dp, 2 * strategy.batch):
        larger = evaluate(workload, replace(strategy, batch=batch))
        if larger.violations:
            return f"{_NAMES.get(larger.violations[0].kind, 'limit')}: {_lacking(batch, larger.violations[0])}"
    return "none: twice as many requests break no limit, and are no faster per GPU"


_NAMES = {"hbm": "HBM", "tpot": "TPOT", "ttft": "TTFT", "sequences": "requests at once"}


def _lacking(batch: int, violation: Violation) -> str:
    if violation.kind == "hbm":
        return f"batch {batch} lacks {(violation.needed - violation.allowed) / 1e9:.1f} GB"
    if violation.kind in ("tpot", "ttft"):
        needed, allowed = violation.needed * 1e3, violation.allowed * 1e3
        return f"batch {batch} takes {needed:.1f} ms, {allowed:.1f} ms are allowed"
    return f"batch {batch}: {violation.message}"


@dataclass(frozen=True)
class NearestMiss:
    """The strategy that misses its limits least, all together.

    Attributes:
        evaluation: Of it.
        would_fit: Changes, each of which alone makes something feasible.
    """

    evaluation: Evaluation
    would_fit: tuple[str, ...]


_PER_RANK = (1, 2, 4, 8, 16, 32)
"""Requests per attention rank among which a miss is looked for: it lies where few requests run."""


def nearest_miss(question: Question) -> NearestMiss | None:
    """The nearest miss, or None where the engine runs nothing at all on so many GPUs."""
    misses = [evaluate(question.workload, strategy) for strategy in _few_requests(space_of(question.workload))]
    nearest = min(misses, key=lambda each: (each.excess, -each.tokens_per_s_per_gpu), default=None)
    return None if nearest is None else NearestMiss(nearest, tuple(_remedies(question, nearest)))


def _few_requests(space: Space) -> Iterator[Strategy]:
    budget = space.workload.max_gpus
    for part in space.parts():
        for mesh in part.meshes():
            tp, cp, dp, ep = mesh
            for pp, per_rank in itertools.product(part.stages(mesh), _PER_RANK):
                if tp * cp * dp * pp <= budget and space.workload.model.layers % pp == 0:
                    yield Strategy(tp, ep, pp, per_rank * dp, part.only_dims, cp, None if (cp, dp) == (1, ep) else dp)


def _remedies(question: Question, nearest: Evaluation) -> Iterator[str]:
    """Single changes under which the exact search finds something."""
    workload = question.workload

    def fits(**changes: object) -> Evaluation | None:
        return find_best(space_of(replace(workload, **changes))).evaluation  # type: ignore[arg-type]

    for kind, field in (("TPOT", "tpot_slo_s"), ("TTFT", "ttft_slo_s")):
        reached = nearest.tpot_s if kind == "TPOT" else nearest.ttft_s
        if reached > getattr(workload, field) and fits(**{field: reached / (1 - workload.margin) * (1 + 1e-6)}):
            yield f"a {kind} of {reached * 1e3:.1f} ms"
    for violation in nearest.violations:
        if violation.kind == "hbm":
            more = (violation.needed - violation.allowed) / 1e9
            yield f"{more:.1f} GB more memory on each GPU, or a smaller format of weights or KV cache"
    for factor in (2, 4):
        degrees = workload.degrees
        wider = replace(degrees, **{name: _doubled(getattr(degrees, name), factor) for name in ("tp", "ep")})
        if fits(max_gpus=factor * workload.max_gpus, degrees=wider):
            yield f"{factor * question.gpus} GPUs"
            return


def _doubled(table: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return tuple(sorted({*table, *(factor * degree for degree in table)}))
