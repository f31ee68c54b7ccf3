"""How replicas fill the GPUs at hand, and how few carry a load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raysearch.recommend.question import Question
from sim.evaluation import Evaluation


@dataclass(frozen=True)
class Fleet:
    """Replicas of one strategy.

    Attributes:
        replicas: Copies that share nothing.
        gpus: Of all of them.
        left_over: Of the GPUs at hand, those that run nothing.
        tokens_per_s: Output tokens of all replicas (in phase prefill, prompt tokens).
        requests_per_s: Requests that end each second; None where the output length is not known.
        requests_at_once: In flight over all replicas.
    """

    replicas: int
    gpus: int
    left_over: int
    tokens_per_s: float
    requests_per_s: float | None
    requests_at_once: int


def fleet_of(question: Question, evaluation: Evaluation) -> Fleet:
    """The replicas that a question asks for: all that the GPUs hold, or the fewest that carry the load."""
    replicas = needed_replicas(question, evaluation)
    gpus, workload = replicas * evaluation.gpus, question.workload
    tokens_per_s = evaluation.tokens_per_s_per_gpu * gpus
    each = workload.prompt_tokens if workload.phase == "prefill" else workload.output_tokens
    return Fleet(
        replicas,
        gpus,
        question.gpus - gpus,
        tokens_per_s,
        tokens_per_s / each if each else None,
        replicas * evaluation.running * evaluation.strategy.pp,
    )


def needed_replicas(question: Question, evaluation: Evaluation) -> int:
    """Replicas of a strategy: the fewest for the load, or as many as the GPUs hold."""
    if question.requests_per_s is not None:
        tokens_per_s = question.requests_per_s * max(1, question.workload.output_tokens)
        return math.ceil(tokens_per_s / (evaluation.tokens_per_s_per_gpu * evaluation.gpus) * (1 - 1e-12))
    if question.concurrency is not None:
        return math.ceil(question.concurrency / (evaluation.running * evaluation.strategy.pp))
    return question.gpus // evaluation.gpus


_TIE = 1e-6
"""Share by which throughput beyond the load's decides between strategies that take as many GPUs."""


def worth(question: Question, tokens_per_s_per_gpu: float, gpus: int) -> float:
    """What a strategy is worth: tokens/s of the GPUs at hand, or of the GPUs that the load takes, per GPU.

    It never falls with the throughput, so that the exact search can go by it.
    """
    if tokens_per_s_per_gpu <= 0 or gpus > question.gpus:
        return 0.0
    if question.requests_per_s is None:
        return tokens_per_s_per_gpu * (question.gpus // gpus) * gpus / question.gpus
    tokens_per_s = question.requests_per_s * max(1, question.workload.output_tokens)
    taken = gpus * math.ceil(tokens_per_s / (tokens_per_s_per_gpu * gpus) * (1 - 1e-12))
    if taken > question.gpus:
        return 0.0
    return tokens_per_s / taken * (1 - _TIE) + _TIE * min(tokens_per_s_per_gpu, tokens_per_s)
