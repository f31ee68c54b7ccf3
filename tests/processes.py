"""What runs below a process, for tests that look for one of Ray's processes or kill it."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LONGEST_S = 400
"""Until what a test waits for is taken for hung; far above what the busiest machine takes."""


def wait_until(true: Callable[[], object], seconds: float = LONGEST_S) -> None:
    """Waits for something that is bound to happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def descendants(pid: int) -> dict[int, str]:
    """The titles of all that a process has started, and of what those have, by process id.

    Parents are read off every process there is: the kernel's lists of children miss some while others end.
    """
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    below, found = [pid], dict[int, str]()
    while below:
        for child in children.get(below.pop(), []):
            below.append(child)
            with suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8")
    return found


def children(pid: int) -> list[int]:
    """What a process with a single thread has started itself."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    """Whether a process has, if its parent knows it or not."""
    return born(pid) is None


class Started(NamedTuple):
    """A process that was started, which another of its id is not: on a busy machine ids come round within minutes."""

    pid: int
    born: int

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return born(self.pid) != self.born


def born(pid: int) -> int | None:
    """When a process began, in ticks of the kernel; None of one that has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def started_by(pid: int) -> set[Started]:
    """What runs below a process now."""
    return {Started(each, since) for each in descendants(pid) if (since := born(each)) is not None}


def pause(pid: int, *, go_on: bool = False) -> None:
    """Stops a process, or lets it go on, and waits until the kernel has: on a busy machine that takes a while."""
    os.kill(pid, signal.SIGCONT if go_on else signal.SIGSTOP)
    while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") == go_on:
        time.sleep(0.001)


def hears(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; an interpreter that is still starting has none."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """The addresses and ports on which processes wait for connections."""
    ours: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # closed this moment
                ours.add(os.readlink(link))
    found: list[tuple[str, int]] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in ours:
                host, port = local.split(":")
                found.append((_address(host), int(port, 16)))
    return found


def _address(text: str) -> str:
    """The address that the kernel writes as 32-bit words in this machine's order."""
    packed = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)
