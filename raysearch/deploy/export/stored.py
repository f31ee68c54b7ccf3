"""What a file that is exported must hold: an answer of `recommend`, `pools` or `tune-live`, or a printed strategy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raysearch.base.limits import MOST_GPUS
from raysearch.runs.records import Record, StoredStrategy
from sim.config.fields import Count
from sim.config.question import RecordedQuestion
from sim.json_object import JsonObject

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


class Exportable(Record):
    """Any of those files: its keys show which."""

    question: RecordedQuestion | None = None
    best: StoredOption | StoredPair | None = None
    alternatives: list[StoredOption | StoredPair] = Field(default_factory=list)
    points: list[JsonObject] | None = None
    strategy: StoredStrategy | None = None
    replicas: StoredReplicas = 1
