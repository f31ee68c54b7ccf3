"""Certificates of exact optima as files: see `sim.optimum.certificate`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, as_strategy, read_record, strategy_dict, write_bytes
from sim.config.code import Origin
from sim.config.question import Question, load_question
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.optimum.bounds import Multipliers
from sim.optimum.certificate import Certificate, Leaf, certify
from sim.optimum.checker import Refused, check
from sim.optimum.spaces import Space, space_of
from sim.replay.goodput_search import BestGoodput, best_goodput
from sim.serving.phases import phase_of
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


class _Goodput(BaseModel):
    """The best goodput that was found, and the bound of the rest after so many replays."""

    strategy: dict[str, object] | None
    tokens_per_s_per_gpu: float
    bound_tokens_per_s_per_gpu: float
    replayed: Annotated[int, Field(ge=0, le=100_000)]


class _File(BaseModel):
    question: dict[str, object]
    workload: str
    config_hash: str
    space: str
    strategy: dict[str, object] | None
    tokens_per_s_per_gpu: float
    goodput: _Goodput | None = None
    leaves: list[_Leaf]


def certified_space(workload: Workload) -> Space:
    """The space of a workload whose best can be certified. Raises: InputError."""
    space = space_of(workload)
    if space.vocabulary:
        raise InputError("the space 'generated' has no certificate; the space 'extended' has one")
    return space


def write_certificate(
    path: Path,
    question: Question,
    workload: Workload,
    best: Evaluation | None,
    progress: CountProgress | None = None,
    traffic: BestGoodput | None = None,
) -> int:
    """Proves the best of a question's space and writes the proof; of how many ranges of batches it is made.

    In phase traffic that is the best steady state, a bound; beside it stands what branch and bound found under it.

    Raises:
        InputError: It has choices of embedding and LM head.
    """
    proof = certify(certified_space(workload), best, progress)
    head = {
        "question": question.record(),
        "workload": workload.name,
        "config_hash": workload.config_hash,
        "space": workload.space,
        "strategy": strategy_dict(proof.strategy) if proof.strategy else None,
        "tokens_per_s_per_gpu": proof.reached,
        **({"goodput": _goodput_dict(traffic)} if traffic else {}),
    }
    rows = [{**leaf._asdict(), "step_s": leaf.step_s if math.isfinite(leaf.step_s) else None} for leaf in proof.leaves]
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_bytes(path, f'{json.dumps(head)[:-1]},\n"leaves": [\n{lines}\n]}}\n'.encode())
    return len(rows)


def _goodput_dict(traffic: BestGoodput) -> JsonObject:
    return {
        "strategy": strategy_dict(traffic.best.steady_state.strategy) if traffic.best else None,
        "tokens_per_s_per_gpu": traffic.tokens_per_s_per_gpu,
        "bound_tokens_per_s_per_gpu": traffic.bound,
        "replayed": traffic.replayed,
    }


@dataclass(frozen=True, slots=True)
class CheckedCertificate:
    """A certificate that holds.

    Attributes:
        question: Of which strategy is the best.
        workload: What the question asks about.
        proof: What was proved.
        evaluated: Strategies that were evaluated for it.
        traffic: In phase traffic, the best goodput and the bound of the rest, replayed and found again.
    """

    question: Question
    workload: Workload
    proof: Certificate
    evaluated: int
    traffic: BestGoodput | None = None


def check_certificate(
    path: Path, progress: CountProgress | None = None, *, named: str | None = None
) -> CheckedCertificate:
    """Replays a certificate: the optimum of steps without a search, a goodput by the branch and bound that found it.

    Args:
        path: The file.
        progress: Called with how many ranges of batches were checked, of how many.
        named: The workload, where the user names it, too: what its file declares by code is then declared.

    Raises:
        Damaged: It cannot be read, or does not prove what it says.
        CatalogError: The model, machine or workload of its question is not here.
    """
    try:
        fields = _File.model_validate(read_record(path, _File, sealed=False))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    question = Question.of_record(fields.question)
    workload = load_question(replace(question, workload=named)) if named else load_question(question, Origin.RECORD)
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
    return CheckedCertificate(question, workload, certificate, tried, _checked_goodput(path, workload, fields.goodput))


def _checked_goodput(path: Path, workload: Workload, stated: _Goodput | None) -> BestGoodput | None:
    """The goodput that a certificate states, computed once more. Raises: Damaged: It is another one."""
    if not phase_of(workload).replayed:
        return None
    if stated is None:
        raise Damaged(f"{path} proves nothing of goodput: it lacks `goodput`; run `raysearch optimum` again")
    found = best_goodput(space_of(workload), stated.replayed)
    now, then = _goodput_dict(found), stated.model_dump()
    for name in ("tokens_per_s_per_gpu", "bound_tokens_per_s_per_gpu"):
        if not math.isclose(now[name], then[name], rel_tol=1e-9):
            raise Damaged(f"{path} proves nothing: it states a goodput with {name} {then[name]:g}, found {now[name]:g}")
    if now["strategy"] != then["strategy"]:
        raise Damaged(f"{path} proves nothing: the best goodput is of {now['strategy']}, not of {then['strategy']}")
    return found
