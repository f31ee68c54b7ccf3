"""What runs below a process, for tests that look for one of Ray's processes or kill it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """The titles of all that a process has started, and of what those have, by process id."""
    found: dict[int, str] = {}
    for child in _children(pid):
        with suppress(OSError):  # it has just ended
            found[child] = Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8")
            found |= descendants(child)
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]
    except OSError:
        return []


def ended(pid: int) -> bool:
    """Whether a process has, if its parent knows it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
