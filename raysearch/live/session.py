"""One tuning on a real machine: measure, believe, decide, until the best is known; each measurement is kept at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from envs.chain import Chain, DamagedRows, chained_line, follow
from raysearch.errors import InputError, RunFailed
from raysearch.files import Damaged, as_strategy, read_record, strategy_dict, write_record
from raysearch.live.belief import LIKENESS, Likeness
from raysearch.live.benchmark import Benchmark, checked
from raysearch.live.candidates import Candidates
from raysearch.live.decide import Decider, Decision, Observation
from raysearch.simulators.measurement import Measurement
from sim.strategy import Strategy

HEAD_FILE, ROWS_FILE = "tune_live.json", "measurements.jsonl"


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes a tuning: equal settings and measurements give equal decisions.

    Attributes:
        within: Relative loss that does not matter.
        confidence: Probability of being within it at which to stop.
        noise: Standard deviation of a measurement, relative.
        seed: Of the draws.
    """

    within: float = 0.02
    confidence: float = 0.9
    noise: float = 0.01
    seed: int = 0


class Head(BaseModel):
    """What stands in `HEAD_FILE`."""

    model_config = ConfigDict(extra="forbid")
    config_hash: str
    candidates: int
    settings: dict[str, float]
    sha256: str = ""


class Step(NamedTuple):
    """A measurement, and where things stand after it; before the first there is none."""

    measured: Observation | None
    decision: Decision


def tune(
    candidates: Candidates,
    settings: Settings,
    measure: Callable[[int], Measurement],
    seen: list[Observation],
    most: int,
    likeness: Likeness = LIKENESS,
) -> Iterator[Step]:
    """Goes on from what was seen until the best is known, nothing is left, or `most` were measured in all.

    Args:
        candidates: What may be run.
        settings: When to stop.
        measure: Of a candidate, by index.
        seen: Earlier measurements; new ones are added to it.
        most: Measurements in all.
        likeness: How alike errors of the simulator are.
    """
    decider = Decider(candidates, within=settings.within, noise=settings.noise, likeness=likeness)
    last = seen[-1] if seen else None
    while True:
        decision = decider.decide(seen, np.random.default_rng((settings.seed, len(seen))))
        yield Step(last, decision)
        done = decision.incumbent is not None and decision.confidence >= settings.confidence
        if done or decision.following is None or len(seen) >= most:
            return
        last = Observation(decision.following, measure(decision.following))
        seen.append(last)


class Folder:
    """The measurements of one tuning on disk: a line each, chained, written before anything is made of it.

    Args:
        path: Claimed by this process.
        candidates: What may be run.
        settings: As given.
    """

    def __init__(self, path: Path, candidates: Candidates, settings: Settings) -> None:
        self.path = path
        self._rows = path / ROWS_FILE
        self._index = {strategy: index for index, strategy in enumerate(candidates.strategies)}
        self._strategies, self._workload = candidates.strategies, candidates.workload
        self._chain = Chain()
        self._head = {
            "config_hash": candidates.workload.config_hash,
            "candidates": len(candidates),
            "settings": asdict(settings),
        }

    def begin(self) -> list[Observation]:
        """Notes what is tuned; nothing was measured yet."""
        write_record(self.path / HEAD_FILE, self._head)
        return []

    def resume(self) -> list[Observation]:
        """The measurements that an earlier part made. A last line that was not written whole is dropped.

        Raises:
            InputError: The folder holds another tuning, or none, or is damaged.
        """
        head = self.path / HEAD_FILE
        if not head.is_file():
            raise InputError(f"nothing to resume in {self.path}: it has no {HEAD_FILE}")
        begun = read_record(head, Head)
        if begun != self._head:
            differs = [key for key in self._head if begun.get(key) != self._head[key]]
            told = ", ".join(f"{key} {begun.get(key)} there, {self._head[key]} now" for key in differs)
            raise InputError(f"{self.path} holds another tuning ({told}); resume with the same options")
        text = self._rows.read_bytes() if self._rows.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        try:
            self._chain = follow(self._rows, whole)
        except DamagedRows as error:
            raise Damaged(str(error)) from error
        if whole != text:
            with self._rows.open("r+b") as file:
                file.truncate(len(whole))
        return [self._read(number, line) for number, line in enumerate(whole.splitlines(), start=1)]

    def _read(self, number: int, line: bytes) -> Observation:
        try:
            row = json.loads(line)
            strategy = as_strategy(row["strategy"])
            return Observation(self._index[strategy], checked(row["measurement"], self._workload, strategy))
        except (ValueError, KeyError, TypeError, RecursionError, RunFailed) as error:
            raise Damaged(f"{self._rows}, line {number}: not a measurement of this tuning: {error}") from error

    def keep(self, candidate: int, measurement: Measurement) -> None:
        """Adds a measurement; it is on the disk when this returns."""
        number, strategy = self._chain.lines + 1, strategy_dict(self._strategies[candidate])
        row = {"call": number, "strategy": strategy, "measurement": asdict(measurement)}
        head = json.dumps({"config_hash": self._workload.config_hash})[:-1].encode()
        line, digest = chained_line(head, json.dumps(row, allow_nan=False)[1:-1].encode(), self._chain.digest)
        handle = os.open(self._rows, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
        self._chain = Chain(number, self._chain.size_bytes + len(line), digest)


def patient(benchmark: Benchmark, retries: int, tell: Callable[[str], Any]) -> Callable[[Strategy], Measurement]:
    """The benchmark, tried again where it fails."""

    def measure(strategy: Strategy) -> Measurement:
        for attempt in range(retries + 1):
            try:
                return benchmark(strategy)
            except RunFailed as failure:
                if attempt == retries:
                    raise
                tell(f"failed, tried again: {failure}")
        raise AssertionError("unreachable")

    return measure
