"""Certificates of exact optima as files: see `sim.optimum.certificate`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, as_strategy, read_record, strategy_dict, write_bytes
from sim.config.code import Origin
from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.optimum.bounds import Multipliers
from sim.optimum.certificate import Certificate, Leaf, certify
from sim.optimum.checker import Refused, check
from sim.optimum.spaces import space_of
from sim.workload import Workload

CountProgress = Callable[[int, int], None]


class _Leaf(BaseModel):
    """A `Leaf`; without `step_s` no choice is allowed or nothing runs."""

    part: int
    mesh: tuple[int, int, int, int]
    pp: int
    low: int
    high: int
    multipliers: tuple[float, float, float]
    step_s: float | None


class _File(BaseModel):
    question: dict[str, object]
    workload: str
    config_hash: str
    space: str
    strategy: dict[str, object] | None
    tokens_per_s_per_gpu: float
    leaves: list[_Leaf]


def write_certificate(
    path: Path, question: Question, workload: Workload, best: Evaluation | None, progress: CountProgress | None = None
) -> int:
    """Proves the best of a question's space and writes the proof; of how many ranges of batches it is made.

    Raises:
        InputError: It has choices of embedding and LM head.
    """
    space = space_of(workload)
    if space.vocabulary:
        raise InputError("no certificate of the space 'generated': leave out --out, or take --space extended")
    proof = certify(space, best, progress)
    head = {
        "question": question.record(),
        "workload": workload.name,
        "config_hash": workload.config_hash,
        "space": workload.space,
        "strategy": strategy_dict(proof.strategy) if proof.strategy else None,
        "tokens_per_s_per_gpu": proof.reached,
    }
    rows = [{**leaf._asdict(), "step_s": leaf.step_s if math.isfinite(leaf.step_s) else None} for leaf in proof.leaves]
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_bytes(path, f'{json.dumps(head)[:-1]},\n"leaves": [\n{lines}\n]}}\n'.encode())
    return len(rows)


@dataclass(frozen=True, slots=True)
class CheckedCertificate:
    """A certificate that holds.

    Attributes:
        question: Of which strategy is the best.
        workload: What the question asks about.
        proof: What was proved.
        evaluated: Strategies that were evaluated for it.
    """

    question: Question
    workload: Workload
    proof: Certificate
    evaluated: int


def check_certificate(path: Path, progress: CountProgress | None = None) -> CheckedCertificate:
    """Replays a certificate, without a search.

    Raises:
        Damaged: It cannot be read, or does not prove what it says.
        CatalogError: The model, machine or workload of its question is not here.
    """
    try:
        fields = _File.model_validate(read_record(path, _File, sealed=False))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    question = Question.of_record(fields.question)
    workload = question.load(Origin.RECORD)
    if (fields.config_hash, fields.space) != (workload.config_hash, workload.space):
        raise Damaged(
            f"{path} is for the space {fields.space!r} of {fields.workload!r} ({fields.config_hash!r}); its question "
            f"now means {workload.space!r} of {workload.name} ({workload.config_hash}): run `raysearch optimum` again"
        )
    leaves = tuple(
        Leaf(
            each.part,
            each.mesh,
            each.pp,
            each.low,
            each.high,
            Multipliers(*each.multipliers),
            math.inf if each.step_s is None else each.step_s,
        )
        for each in fields.leaves
    )
    strategy = as_strategy(fields.strategy) if fields.strategy else None
    certificate = Certificate(strategy, fields.tokens_per_s_per_gpu, leaves)
    try:
        tried = check(space_of(workload), certificate, progress)
    except Refused as error:
        raise Damaged(f"{path} proves nothing: {error}") from error
    return CheckedCertificate(question, workload, certificate, tried)
