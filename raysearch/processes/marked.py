"""Processes that are known by a mark, which all that they start inherits.

So they are found whoever their parent is by now, in sessions of their own, with an empty environment and no open file,
and by a command that did not start them. The mark is a limit that Linux keeps for each process and heeds no more.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RLIMIT_LOCKS = 10
"""[spec] Number of the limit of file locks, without effect since Linux 2.4.25 (getrlimit(2))."""
_LINE = b"Max file locks"
"""[spec] How its line in /proc/PID/limits begins; the soft limit follows."""
_MARK_BYTES = 6
"""Of a digest: chance makes no two alike, and it stays below any limit."""
_AGAIN_S = 0.01


def mark_of(folder: Path) -> int:
    """The mark of what is started for a results folder, whatever its name is by now."""
    status = folder.stat()
    digest = hashlib.sha256(f"{status.st_dev:x}-{status.st_ino:x}".encode()).digest()
    return int.from_bytes(digest[:_MARK_BYTES])


@contextmanager
def marking(mark: int) -> Iterator[None]:
    """Marks what this process starts meanwhile; ends it afterwards."""
    soft, hard = resource.getrlimit(_RLIMIT_LOCKS)
    resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))
    try:
        yield
    finally:
        end_marked(mark)
        resource.setrlimit(_RLIMIT_LOCKS, (soft, hard))


def marked(mark: int) -> list[int]:
    """The ids of all living processes of this host that were started with a mark, but for this one."""
    text, found = str(mark).encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*/limits"):
        with suppress(OSError):  # it has ended
            if any(line.removeprefix(_LINE).split()[:1] == [text] for line in path.read_bytes().splitlines()):
                found.append(int(path.parent.name))
    return sorted(set(found) - {os.getpid()})


def end_marked(mark: int) -> None:
    """Kills them all, and what they start meanwhile; returns when none is left but another user's."""
    others = set[int]()
    while pids := set(marked(mark)) - others:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:  # sudo started it
                others.add(pid)
        time.sleep(_AGAIN_S)
