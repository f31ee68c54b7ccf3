"""What happened to the runs of a study, and when: a line of JSON per event, so that others can look on.

Nothing is computed from it; without it, or with a part of it, a study continues all the same.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from raysearch.base.progress import RunMetrics
from raysearch.studies.study_display import StudyDisplay
from sim.config.reading import Unreadable, lines, parse_object

JOURNAL_FILE = "journal.jsonl"
_LONGEST_LINE = 4096
"""[assumed] Bytes; an event has a hundred and the name of its run."""

EventKind = Literal["begun", "started", "finished", "failed"]


class Event(NamedTuple):
    """One line of the journal.

    Attributes:
        at_s: When, in seconds since 1970.
        kind: "begun" is the study, also when it continues after a stop; the others are of a run.
        run_id: Which run; empty for the study.
        fresh: Whether the run had never started before.
    """

    at_s: float
    kind: EventKind
    run_id: str
    fresh: bool = True


class Journal(StudyDisplay):
    """Writes the journal of a running study into its folder. The file is made with the first run's start."""

    def __init__(self, folder: Path) -> None:
        """Notes that a study continues, if the folder holds the journal of an earlier part."""
        self._path = folder / JOURNAL_FILE
        self._begun = False
        if self._path.exists():
            self._begin()

    def started(self, run_id: str) -> None:
        """A run begins, or continues after a failure."""
        self._begin()
        self._write("started", run_id)

    def reported(self, run_id: str, metrics: RunMetrics) -> None:
        """Nothing: the run's rows show how far it is."""

    def finished(self, run_id: str) -> None:
        """A run is done."""
        self._write("finished", run_id)

    def failed(self, run_id: str) -> None:
        """A run broke down for good."""
        self._write("failed", run_id)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            _make_ours(self._path)
            self._write("begun", "")

    def _write(self, kind: EventKind, run_id: str) -> None:
        now = datetime.now(UTC)
        line = {"at": now.isoformat(timespec="milliseconds"), "event": kind, "run": run_id}
        with self._path.open("ab") as file:  # one write of one line, which no reader sees in part
            file.write(json.dumps(line).encode() + b"\n")


def _make_ours(path: Path) -> None:
    """Takes away what is no file, or a file by another name too: lines at its end would be written into that."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            path.unlink()


def last_events(folder: Path) -> dict[str, Event]:
    """The last event of each run since the study was begun or resumed; empty without a journal.

    A line that cannot be read is passed over: the journal informs, it decides nothing.
    """
    events: dict[str, Event] = {}
    started: set[str] = set()
    for event in _read(folder / JOURNAL_FILE):
        if event.kind == "begun":
            # Runs that failed are tried again, and none of the others has started yet.
            events.clear()
        else:
            events[event.run_id] = event._replace(fresh=event.run_id not in started)
            started.add(event.run_id)
    return events


def _read(path: Path) -> Iterator[Event]:
    with suppress(FileNotFoundError, Unreadable):
        for line in lines(path, _LONGEST_LINE):
            if event := _parse(line):
                yield event


def _parse(line: bytes) -> Event | None:
    try:
        fields = parse_object(line)
        return Event(datetime.fromisoformat(fields["at"]).timestamp(), fields["event"], _named(fields["run"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _named(run_id: object) -> str:
    if not isinstance(run_id, str):
        raise TypeError(f"expected the name of a run, got {run_id!r}")
    return run_id
