"""Answers of a plugged-in black box on disk: a strategy that any run has asked about is not asked about again."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from envs.strategy_env import brief, checked, failure_text
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload

_log = logging.getLogger(__name__)
_BUSY_S = 30.0  # [assumed] longest wait for another process that writes

ASKED_TWICE = 2
"""[assumed] Strategies beside the best that a run asks its black box about once more: one may cost minutes."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (workload TEXT, strategy TEXT, answer TEXT, PRIMARY KEY (workload, strategy))"
)


class AnswerCache:
    """Answers of one black box on disk.

    Failures are not kept. One file serves any number of processes of one host; where it cannot be used (a network
    folder without locks, a full disk) the search continues without it, after one note.

    Args:
        path: SQLite file of this very simulator; made if missing.
        workload: What the strategies are for.
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        self._path = path
        self._key = workload.config_hash
        self._first: dict[Strategy, Evaluation] = {}
        self._best: Evaluation | None = None
        self._database: sqlite3.Connection | None = None

    def remember(self, answer: Evaluation) -> None:
        """Notes that a run took an answer, for `differing`."""
        if len(self._first) < ASKED_TWICE:
            self._first[answer.strategy] = answer
        best = self._best
        if answer.feasible and (best is None or answer.tokens_per_s_per_gpu > best.tokens_per_s_per_gpu):
            self._best = answer

    def differing(self, ask: Callable[[Strategy], Evaluation]) -> list[str]:
        """Asks the black box again about the best and the first few strategies; returns what it now says otherwise.

        A cache hides that a black box is not pure: a resumed or repeated run would find other figures.
        """
        best = {self._best.strategy: self._best} if self._best else {}
        return [
            f"{strategy}: {before}, asked again {now}"
            for strategy, answer in {**best, **self._first}.items()
            if (before := _figures(answer)) != (now := _figures_of(ask, strategy))
        ]

    def close(self) -> None:
        """Closes the file."""
        if self._database is not None:
            self._database.close()

    def read(self, strategy: Strategy) -> Evaluation | None:
        """The kept answer, if there is one."""
        query = "SELECT answer FROM answers WHERE workload = ? AND strategy = ?"
        try:
            row = self._open().execute(query, (self._key, repr(strategy))).fetchone()
            if row is None:
                return None
            digest, _, content = str(row[0]).partition(" ")
            if digest != self._seal(strategy, content):
                return None
            return checked(_evaluations().validate_json(content), strategy)
        except ValueError:  # of another version: it is asked for and written again
            return None
        except (sqlite3.Error, OSError) as error:
            _note_unused(self._path, str(error))
            return None

    def _seal(self, strategy: Strategy, content: str) -> str:
        """Stands before an answer, so that no damaged or misplaced one is believed."""
        return hashlib.sha256(f"{self._key}\0{strategy}\0{content}".encode()).hexdigest()

    def keep(self, answer: Evaluation) -> None:
        """Keeps an answer of the black box."""
        strategy = answer.strategy
        try:
            content = _evaluations().dump_json(answer).decode()
            row = (self._key, repr(strategy), f"{self._seal(strategy, content)} {content}")
            with self._open() as database:  # a transaction
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)
        except (sqlite3.Error, OSError) as error:
            _note_unused(self._path, str(error))

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=_BUSY_S)
            # No wait for the disk: a crash of the machine may cost the last answers, never the file.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(_SCHEMA)
        return self._database


def _figures_of(ask: Callable[[Strategy], Evaluation], strategy: Strategy) -> str:
    try:
        return _figures(ask(strategy))
    except Exception as error:
        return f"failed: {failure_text(error)}"


def _figures(answer: Evaluation) -> str:
    if not answer.feasible:
        return brief("infeasible: " + "; ".join(violation.kind for violation in answer.violations))
    return f"{answer.tokens_per_s_per_gpu:.6g} tokens/s/GPU"


@cache
def _evaluations() -> TypeAdapter[Evaluation]:
    return TypeAdapter(Evaluation)


@cache  # one note, however many answers
def _note_unused(path: Path, reason: str) -> None:
    _log.warning("note: answers of the simulator are not kept in %s (%s), so each is computed again", path, reason)
