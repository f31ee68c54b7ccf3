"""One tuning on a real machine: measure, believe, decide, until the best is known; each measurement is kept at once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from envs.chain import Chain, DamagedRows, chained_line, follow, links
from envs.strategy_env import brief
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import Damaged, as_strategy, aside, read_record, strategy_dict, write_record
from raysearch.deploy.live.belief import ERROR_CORRELATION, ErrorCorrelation
from raysearch.deploy.live.benchmark import Benchmark, checked_benchmark
from raysearch.deploy.live.decide import Decider, Decision, Measured
from raysearch.deploy.live.deployment_candidates import Candidates
from raysearch.simulators.measurement import Measurement
from sim.config.reading import Unreadable, opened, parse_object
from sim.config.writing import write_atomically
from sim.json_object import JsonObject
from sim.strategy import Strategy

_log = logging.getLogger(__name__)
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


class MeasuringStep(NamedTuple):
    """A measurement, and where things stand after it; before the first there is none."""

    measured: Measured | None
    decision: Decision


def tune(
    candidates: Candidates,
    settings: Settings,
    measure: Callable[[int], Measurement],
    seen: list[Measured],
    most: int,
    error_correlation: ErrorCorrelation = ERROR_CORRELATION,
) -> Iterator[MeasuringStep]:
    """Continues from what was seen until the best is known, nothing is left, or `most` were measured in all.

    Args:
        candidates: What may be run.
        settings: When to stop.
        measure: Of a candidate, by index.
        seen: Earlier measurements; new ones are added to it.
        most: Measurements in all.
        error_correlation: How alike errors of the simulator are.
    """
    decider = Decider(candidates, within=settings.within, noise=settings.noise, error_correlation=error_correlation)
    last = seen[-1] if seen else None
    while True:
        decision = decider.decide(seen, np.random.default_rng((settings.seed, len(seen))))
        yield MeasuringStep(last, decision)
        done = decision.incumbent is not None and decision.confidence >= settings.confidence
        if done or decision.following is None or len(seen) >= most:
            return
        last = Measured(decision.following, measure(decision.following))
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

    def begin(self) -> list[Measured]:
        """Notes what is tuned; nothing was measured yet."""
        write_record(self.path / HEAD_FILE, self._head)
        return []

    def resume(self) -> list[Measured]:
        """The measurements that an earlier part made, as far as they can be trusted; the others are made again.

        A last line that was not written whole is dropped. Where one is damaged, the file is put aside as it is.

        Raises:
            InputError: The folder holds another tuning, or none, or what says which one is damaged.
        """
        begun = _begun(self.path)
        if begun != self._head:
            differs = [key for key in self._head if begun.get(key) != self._head[key]]
            differences = ", ".join(
                f"{key} {brief(str(begun.get(key)))} there, {self._head[key]} now" for key in differs
            )
            raise InputError(f"{self.path} contains another tuning ({differences}); resume with the same options")
        kept_lines: list[bytes] = []
        seen: list[Measured] = []
        try:
            for line, chain in links(self._rows):
                seen.append(self._read(line))
                kept_lines.append(line)
                self._chain = chain
        except FileNotFoundError:
            pass
        except (DamagedRows, ValueError, KeyError, TypeError, RunFailed) as error:
            kept = self._rows.rename(aside(self._rows))
            why = error if isinstance(error, DamagedRows) else f"line {len(seen) + 1} is no measurement of this tuning"
            _log.warning("note: %s; put aside as %s, %d measurements before it are kept", why, kept, len(seen))
        write_atomically(self._rows, lambda temporary: temporary.write_bytes(b"".join(kept_lines)))
        return seen

    def _read(self, line: bytes) -> Measured:
        row = parse_object(line)
        strategy = as_strategy(row["strategy"])
        return Measured(self._index[strategy], checked_benchmark(row["measurement"], self._workload, strategy))

    def keep(self, candidate: int, measurement: Measurement) -> None:
        """Adds a measurement; it is on the disk when this returns."""
        number, strategy = self._chain.lines + 1, strategy_dict(self._strategies[candidate])
        row = {"call": number, "strategy": strategy, "measurement": asdict(measurement)}
        head = json.dumps({"config_hash": self._workload.config_hash})[:-1].encode()
        line, digest = chained_line(head, json.dumps(row, allow_nan=False)[1:-1].encode(), self._chain.digest)
        with open(self._rows, "ab", buffering=0) as file:
            rest = line
            while rest:  # a disk that gets full takes a part
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        self._chain = Chain(number, self._chain.size_bytes + len(line), digest)


def is_tuning(path: Path) -> bool:
    """Whether a folder holds a tuning."""
    return os.path.lexists(path / HEAD_FILE)


def verify_tuning(path: Path) -> int:
    """How many measurements a tuning has, each of which follows from those before it.

    Raises:
        InputError: What was written is no longer what stands there.
    """
    _begun(path)
    try:
        found = follow(path / ROWS_FILE)
        with opened(path / ROWS_FILE) as rows:
            for number, line in enumerate(rows, start=1):
                try:
                    parse_object(line)
                except Unreadable as error:
                    raise Damaged(f"{path / ROWS_FILE} is damaged: line {number} is no measurement: {error}") from error
        return found.lines
    except FileNotFoundError:
        return 0
    except DamagedRows as error:
        raise Damaged(str(error)) from error


def _begun(path: Path) -> JsonObject:
    if not is_tuning(path):
        raise InputError(f"nothing to resume in {path}: it has no {HEAD_FILE}")
    try:
        return read_record(path / HEAD_FILE, Head)
    except Damaged as damage:  # nothing else says what the measurements are of
        raise InputError(f"{damage.what}; bring it back from a copy, or use another folder") from damage


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
        raise ValueError(f"expected at least 0 retries, got {retries}")

    return measure
