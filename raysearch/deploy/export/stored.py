"""What a file that is exported must hold: an answer of `recommend`, `pools` or `tune-live`, or a printed strategy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raysearch.base.limits import MOST_GPUS
from raysearch.runs.records import Record, StoredStrategy
from sim.config.question import RecordedQuestion
from sim.json_object import JsonObject

StoredReplicas = Annotated[int, Field(ge=1, le=MOST_GPUS)]


class StoredOption(Record):
    """One strategy of an answer, or a printed one."""

    strategy: StoredStrategy
    replicas: StoredReplicas = 1


class Exportable(Record):
    """Any of those files: its keys show which."""

    question: RecordedQuestion | None = None
    best: StoredOption | None = None
    alternatives: list[StoredOption] = Field(default_factory=list)
    points: list[JsonObject] | None = None
    strategy: StoredStrategy | None = None
    replicas: StoredReplicas = 1
