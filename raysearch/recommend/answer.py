"""The answer to a question: what to run, what else, why not more, and what the engine's limits cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raysearch.recommend.fleet import Fleet, fleet_of, needed_replicas, worth
from raysearch.recommend.limits import NearestMiss, binding_limit, nearest_miss
from raysearch.recommend.question import Question
from raysearch.recommend.variations import FrontPoint, Variation, front, variations
from sim.evaluation import Evaluation
from sim.optimum.best import Known, find_best, find_bests
from sim.optimum.spaces import space_of
from sim.workload import Workload

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
class Answer:
    """What to run.

    Attributes:
        question: What was asked.
        options: The best first; none where nothing is feasible.
        beside: The exact bests of the paper's and of the extended space, by name; None where nothing is feasible.
        variations: The best if something were different.
        front: From most throughput to most speed.
        miss: Where nothing is feasible.
    """

    question: Question
    options: tuple[Option, ...]
    beside: Mapping[str, Evaluation | None]
    variations: tuple[Variation, ...]
    front: tuple[FrontPoint, ...]
    miss: NearestMiss | None


def answer(question: Question, said: Said = lambda _: None) -> Answer:
    """Answers a question exactly: every strategy of the engine's space and every batch are accounted for."""

    def score(tokens_per_s_per_gpu: float, gpus: int) -> float:
        return worth(question, tokens_per_s_per_gpu, gpus)

    said("the engine's best")
    # The fewest GPUs for requests at once follow from the batch, not from throughput: all degrees are asked.
    count = 10**6 if question.concurrency is not None else question.top
    known: Known = {}
    found = find_bests(space_of(question.workload), count, score, known=known)
    if question.concurrency is not None:
        enough = [each for each in found if needed_replicas(question, each) * each.gpus <= question.gpus]
        found = sorted(enough, key=lambda each: needed_replicas(question, each) * each.gpus)[: question.top]
    if not found:
        said("the nearest miss")
        return Answer(question, (), {}, (), (), nearest_miss(question))
    best = found[0]
    options = tuple(
        Option(each, fleet_of(question, each), binding_limit(question.workload, each), _reason(question, each, best))
        for each in found
    )
    beside: dict[str, Evaluation | None] = {}
    for name in ("paper", "extended"):
        said(f"the best of the {name} space")
        beside[name] = _best_beside(question.workload, name, (best, *beside.values()))
    said("what if")
    varied = tuple(variations(question, best, score, known))
    said("the front")
    return Answer(question, options, beside, varied, tuple(front(question, known)), None)


def _best_beside(workload: Workload, name: str, others: tuple[Evaluation | None, ...]) -> Evaluation | None:
    """The exact best of a space over every batch; of the extended one over powers of two and the others' batches."""
    batches = workload.degrees.batch
    if name == "extended":
        powers = {1 << power for power in range(13)} & set(batches)
        batches = tuple(sorted(powers | {other.strategy.batch for other in others if other}))
    degrees = replace(workload.degrees, batch=batches)
    return find_best(space_of(replace(workload, space=name, degrees=degrees))).evaluation


def _reason(question: Question, each: Evaluation, best: Evaluation) -> str:
    """What an option has over the best one, or how little it lacks."""
    if each is best:
        if question.requests_per_s is not None or question.concurrency is not None:
            return "fewest GPUs"
        return "most tokens/s"
    gains: list[str] = []
    if needed_replicas(question, each) * each.gpus < needed_replicas(question, best) * best.gpus:
        gains.append("fewer GPUs in all")
    if each.gpus < best.gpus:
        gains.append(f"replicas of {each.gpus} GPUs, not {best.gpus}")
    for name, own, other in (("token", each.tpot_s, best.tpot_s), ("first token", each.ttft_s, best.ttft_s)):
        if own < 0.97 * other:
            gains.append(
                f"each {name} {1 - own / other:.0%} sooner"
                if name == "token"
                else f"first token {1 - own / other:.0%} sooner"
            )
    if each.memory_bytes.total < 0.9 * best.memory_bytes.total:
        gains.append(f"{(best.memory_bytes.total - each.memory_bytes.total) / 1e9:.0f} GB more memory free")
    lack = 1 - each.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
    return "; ".join([*gains, f"{lack:.1%} fewer tokens/s/GPU" if lack >= 0 else f"{-lack:.1%} more tokens/s/GPU"])
