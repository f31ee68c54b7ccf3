"""A sign of life in a file, for processes on other hosts too: one touches it, another looks whether it changes.

The times in it are the file system's. They are only compared with each other, so that it makes no difference what
clocks say, or that somebody sets them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

BEAT_S = 5.0
"""[assumed] Seconds between two beats."""


@contextmanager
def beating(file: Path | int) -> Iterator[None]:
    """Touches a file, by its path or its open handle, now and then until the context ends."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):  # it has no name any more, or its file system does not answer
                os.utime(file)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@final
class Pulse:
    """Looks at a file that somebody touches.

    Args:
        path: Where it is, or will be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self._changed_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Looks once more; for how many seconds nothing was seen to change."""
        if (seen := self._look()) != self._seen:
            self._seen, self._changed_s = seen, time.monotonic()
        return time.monotonic() - self._changed_s

    def _look(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None
