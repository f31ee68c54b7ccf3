"""What a file that is exported must hold: an answer of `recommend`, `pools`, `tune-live` or `search`, or a strategy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raysearch.base.limits import MOST_GPUS
from raysearch.runs.records import Figure, Record, StoredStrategy
from sim.config.fields import Count
from sim.config.question import Question, RecordedQuestion
from sim.json_object import JsonFields, JsonObject
from sim.prices.dtypes import Dtype

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
    """One answer of several: a strategy, or separate prefill and decode pools."""

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


class StoredFormats(Record):
    """Formats that an answer was computed with."""

    weights: Dtype
    kv_cache: Literal["bf16", "fp8"]


class Exportable(Record):
    """Any of those files: its keys show which. The `best` of a search is a figure."""

    question: RecordedQuestion | None = None
    precisions: StoredFormats | None = None
    best: StoredChoice | Figure | None = None
    alternatives: list[StoredChoice] = Field(default_factory=list)
    points: list[JsonObject] | None = None
    longest_request: Count | None = None
    strategy: StoredStrategy | None = None
    replicas: StoredReplicas = 1


def question_of(where: Path | str, record: JsonFields) -> Question:
    """The question that an answer states, with the formats that it was computed with.

    An earlier version kept them beside the question, or not at all: then a note says which are assumed.

    Args:
        where: The answer is, for the note.
        record: The answer; see `Exportable`.

    Raises:
        CatalogError: It is none, or its model is not here.
    """
    question, formats = Question.of_record(record["question"]), record.get("precisions") or {}
    if question.model is None:
        return question
    weights, kv_cache = (getattr(question, name) or formats.get(name) for name in ("weights", "kv_cache"))
    question = replace(question, weights=weights, kv_cache=kv_cache)
    if None in (weights, kv_cache):
        assumed = question.resolved
        _log.warning(
            "note: %s does not state its formats, as earlier versions did not: weights in %s and a KV cache in %s are "
            "assumed, today's defaults; if the answer had others, repeat its command, or give its question here with "
            "--weights and --kv-cache",
            where,
            assumed.weights,
            assumed.kv_cache,
        )
    return question
