"""What a file that is exported must hold: an answer of `recommend`, `pools` or `tune-live`, or a printed strategy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from raysearch.base.limits import MOST_GPUS
from raysearch.runs.records import Record, StoredStrategy
from sim.config.fields import Count
from sim.config.question import Question, RecordedQuestion
from sim.json_object import JsonFields, JsonObject

_log = logging.getLogger(__name__)
StoredReplicas = Annotated[int, Field(ge=1, le=MOST_GPUS)]


class StoredOption(Record):
    """One strategy of an answer, or a printed one."""

    strategy: StoredStrategy
    replicas: StoredReplicas = 1
    chunk_tokens: Count | None = None


class StoredPair(Record):
    """Pools of their own for prompts and answers."""

    prefill: StoredOption
    decode: StoredOption


class StoredChoice(Record):
    """One answer of several: a strategy, or pools of their own for prompts and answers."""

    strategy: StoredStrategy | None = None
    replicas: StoredReplicas = 1
    chunk_tokens: Count | None = None
    prefill: StoredOption | None = None
    decode: StoredOption | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.strategy is None and (self.prefill is None or self.decode is None):
            raise ValueError("expected 'strategy', or 'prefill' and 'decode'")
        return self


class Exportable(Record):
    """Any of those files: its keys show which."""

    question: RecordedQuestion | None = None
    best: StoredChoice | None = None
    alternatives: list[StoredChoice] = Field(default_factory=list)
    points: list[JsonObject] | None = None
    strategy: StoredStrategy | None = None
    replicas: StoredReplicas = 1


def question_of(where: Path | str, content: JsonFields) -> Question:
    """The question that an answer states; of one that does not state its formats a note says which are assumed.

    Raises:
        CatalogError: It is none, or its model is not here.
    """
    question = Question.of_record(content)
    if question.model is not None and None in (question.weights, question.kv_cache):
        assumed = question.resolved
        _log.warning(
            "note: %s does not state its formats, as earlier versions did not: weights in %s and a KV cache in %s are "
            "assumed, today's defaults; if it was worked out with others, ask anew, or give its question here with "
            "--weights and --kv-cache",
            where,
            assumed.weights,
            assumed.kv_cache,
        )
    return question
