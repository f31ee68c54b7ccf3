"""The answer to a question: what to run, what else, why not more, and what the engine's limits cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raysearch.recommend.fleet import Fleet, best_first, fleet_of, gain, needed_gpus
from raysearch.recommend.limits import NearestMiss, binding_limit, nearest_miss
from raysearch.recommend.question import Question
from raysearch.recommend.variations import FrontPoint, Variation, front, variations
from sim.evaluation import Evaluation
from sim.optimum.best import Known

Said = Callable[[str], None]
"""Told what is being worked out."""


@dataclass(frozen=True)
class Option:
    """A strategy to run.

    Attributes:
        evaluation: Of one replica.
        fleet: Its replicas.
        limit: What keeps it from a larger batch.
        reason: Why it is worth a look beside the best; of the best, what it is best in.
    """

    evaluation: Evaluation
    fleet: Fleet
    limit: str
    reason: str


@dataclass(frozen=True)
class Beside:
    """What another space has.

    Attributes:
        evaluation: Of its exact best.
        reached: Share of that one's tokens/s, all GPUs at hand filled, that the engine's best reaches.
    """

    evaluation: Evaluation
    reached: float


@dataclass(frozen=True)
class Answer:
    """What to run.

    Attributes:
        question: What was asked.
        options: The best first; none where nothing is feasible.
        beside: The paper's and the extended space, by name; None where nothing is feasible.
        variations: The best if something were different.
        front: From most throughput to most speed.
        miss: Where nothing is feasible.
    """

    question: Question
    options: tuple[Option, ...]
    beside: Mapping[str, Beside | None]
    variations: tuple[Variation, ...]
    front: tuple[FrontPoint, ...]
    miss: NearestMiss | None


def answer(question: Question, said: Said = lambda _: None, found: Callable[[Answer], None] = lambda _: None) -> Answer:
    """Answers a question exactly: every strategy of the engine's space and every batch are accounted for.

    Args:
        question: What is asked.
        said: Told what is being worked out.
        found: Given what to run as soon as it is known, before what stands beside it is worked out; not called where
            nothing is feasible.
    """
    said("the engine's best")
    known: Known = {}
    bests = best_first(question, question.top, known)
    if not bests:
        said("the nearest miss")
        return Answer(question, (), {}, (), (), nearest_miss(question, known))
    best = bests[0]
    options = tuple(
        Option(each, fleet_of(question, each), binding_limit(question, each), _reason(question, each, best))
        for each in bests
    )
    found(Answer(question, options, {}, (), (), None))
    # Other spaces are compared where all GPUs are filled: under a load whole replicas would hide what limits cost.
    fill = question.unloaded
    fastest = best_first(fill, 1, known)[0] if question.loaded else best
    beside: dict[str, Beside | None] = {}
    others = [best, fastest]
    for name in ("paper", "extended"):
        said(f"the best of the {name} space")
        if other := _best_beside(fill, name, others):
            others.append(other)
        beside[name] = Beside(other, 1 / (1 + gain(fill, other, fastest))) if other else None
    said("what if")
    varied = tuple(
        variations(question, best, known) if question.concurrency is None else variations(fill, fastest, known)
    )
    said("the front")
    return Answer(question, options, beside, varied, tuple(front(question, known)), None)


def _best_beside(question: Question, name: str, others: Sequence[Evaluation]) -> Evaluation | None:
    """The exact best of a space over every batch; of the extended one over powers of two and the others' batches."""
    degrees = question.workload.degrees
    if name == "extended":
        powers = {1 << power for power in range(13)} & set(degrees.batch)
        degrees = replace(degrees, batch=tuple(sorted(powers | {other.strategy.batch for other in others})))
    return next(iter(best_first(question.under(space=name, degrees=degrees), 1, among=others)), None)


def _reason(question: Question, each: Evaluation, best: Evaluation) -> str:
    """What an option has over the best one, or how little it lacks."""
    if each is best:
        return "fewest GPUs" if question.loaded else "most tokens/s"
    gains: list[str] = []
    if each.gpus < best.gpus:
        gains.append(f"replicas of {gpus_text(each.gpus)}, not {best.gpus}")
    for name, own, other in (("each token", each.tpot_s, best.tpot_s), ("first token", each.ttft_s, best.ttft_s)):
        if own < 0.97 * other:
            gains.append(f"{name} {1 - own / other:.0%} sooner")
    if each.memory_bytes.total < 0.9 * best.memory_bytes.total:
        gains.append(f"{(best.memory_bytes.total - each.memory_bytes.total) / 1e9:.0f} GB more memory free")
    return "; ".join([*gains, *_lacks(question, each, best)])


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
