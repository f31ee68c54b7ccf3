"""Processes that are known by a mark in their environment, which all that they start inherits.

So they are found whoever their parent is by now, in sessions of their own, and by a command that did not start them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "RAYSEARCH_MARK"
_AGAIN_S = 0.01


def mark_of(folder: Path) -> str:
    """The mark of what is started for a results folder, whatever its name is by now."""
    status = folder.stat()
    return f"{status.st_dev:x}-{status.st_ino:x}"


@contextmanager
def marking(mark: str) -> Iterator[None]:
    """Marks what this process starts meanwhile; ends it afterwards."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mark
    try:
        yield
    finally:
        end_marked(mark)
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def marked(mark: str) -> list[int]:
    """The ids of all living processes of this host and user that were started with a mark, but for this one."""
    entry = f"{VARIABLE}={mark}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return sorted(set(found) - {os.getpid()})


def end_marked(mark: str) -> None:
    """Kills them all, and what they start meanwhile; returns when none is left."""
    while pids := marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)
