"""A sign of life in a file, for processes on other hosts too: one touches it, another looks whether it changes.

The times in it are the file system's. They are only compared with each other, so that it makes no difference what
clocks say, or that somebody sets them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from raysearch.processes.deadline import START_TIMEOUT_S

BEAT_S = 5.0
"""[assumed] Seconds between two beats."""
SILENT_S = 45.0
"""[assumed] What has not beaten for so long counts as dead: far above the few seconds a network file system stalls."""
LONGEST_START_S = 16 * START_TIMEOUT_S
"""[assumed] Longest time to start that repeated failures to do so may add up to."""
_LOOK_S = 1.0


@contextmanager
def beating(file: Path | int) -> Iterator[None]:
    """Touches a file, by its path or its open handle, now and then until the context ends."""

    def beat() -> None:
        with suppress(OSError):  # it has no name any more, or its file system does not answer
            os.utime(file)

    with _every(BEAT_S, beat):
        yield


@contextmanager
def _every(seconds: float, work: Callable[[], object]) -> Iterator[None]:
    """Does something in a thread, again and again, meanwhile."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=run, daemon=True)
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

    Attributes:
        beats: Whether it was seen to change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self._changed_s = time.monotonic()
        self.beats = False

    @property
    def silent_s(self) -> float:
        """Looks once more; for how many seconds nothing was seen to change."""
        if (seen := self._look()) != self._seen:
            self._seen, self._changed_s, self.beats = seen, time.monotonic(), True
        return time.monotonic() - self._changed_s

    def _look(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None


@final
class Hearts:
    """Watches several that beat; whichever falls silent is reported and ended, once.

    One that never beat has twice as long when it is watched again: on a busy machine its imports may take that long.
    """

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Pulse, Callable[[], None]]] = {}
        self._start_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def watch(self, name: str, path: Path, end: Callable[[], None]) -> None:
        """Begins to watch one; `end` ends it."""
        with self._lock:
            self._watched[name] = Pulse(path), end

    def leave(self, name: str) -> None:
        """Watches it no longer."""
        with self._lock:
            self._watched.pop(name, None)

    def look(self) -> None:
        """Looks at all of them."""
        with self._lock:
            for name, (pulse, end) in tuple(self._watched.items()):
                silent_s, start_s = pulse.silent_s, self._start_s.get(name, START_TIMEOUT_S)
                limit_s = SILENT_S if pulse.beats else start_s
                if silent_s > limit_s:
                    print(f"note: {name} gave no sign of life for {limit_s:g} s and is restarted", file=sys.stderr)
                    if not pulse.beats:
                        self._start_s[name] = min(2 * start_s, LONGEST_START_S)
                    del self._watched[name]
                    end()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks every second, meanwhile."""
        with _every(_LOOK_S, self.look):
            yield
