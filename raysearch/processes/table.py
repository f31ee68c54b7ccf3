"""The host's processes, as the kernel lists them."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import NamedTuple, final


class Process(NamedTuple):
    """A process.

    Attributes:
        parent: Its parent's id.
        name: Of its program, or what it calls itself; 15 characters.
        state: "T" if it is stopped, "Z" if it has ended and its parent does not know it yet; see proc(5).
        began: When, in the kernel's ticks since the host started: with the id it names a process for good.
    """

    parent: int
    name: str
    state: str
    began: int


def processes() -> dict[int, Process]:
    """All of them by their ids."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))):
            found[int(entry)] = process
    return found


def read_process(pid: int) -> Process | None:
    """The process of an id; None if there is none."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
        state, parent, *rest = after.split()
        return Process(int(parent), before.partition("(")[2], state, int(rest[17]))
    return None


@final
class Stopped:
    """Distinguishes processes that stay stopped from those that are stopped for a moment.

    Looks are counted, not seconds: whoever pauses us too, by Ctrl-Z or a scheduler, lets no time pass.

    Args:
        looks: In a row in which a process must be stopped.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._seen: Counter[int] = Counter()

    def among(self, seen: dict[int, Process]) -> list[int]:
        """Looks once more; those that were stopped whenever we looked."""
        self._seen = Counter({pid: self._seen[pid] + 1 for pid, process in seen.items() if process.state == "T"})
        return [pid for pid, looks in self._seen.items() if looks >= self._looks]
