"""How long a study will still take, from what its runs took so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RunProgress:
    """A run, as far as a forecast needs to know it.

    Attributes:
        searcher: Its name; runs of one searcher are taken to be equally fast per call.
        calls: Made so far.
        left: Still to be made, 0 once the run has ended.
        seconds: That the calls so far took; None where nobody knows.
    """

    searcher: str
    calls: int
    left: int
    seconds: float | None


def remaining_s(runs: Iterable[RunProgress], parallel: int) -> float | None:
    """Seconds until all runs have ended; None while nothing is known of how fast any of them is.

    The calls left, each at its searcher's pace so far, shared by the runs that go on side by side, but no less than
    the longest run alone takes. A searcher that was not seen yet gets the mean pace of the others.

    >>> to_come = [RunProgress("a", 0, 100, None), RunProgress("a", 0, 200, None)]
    >>> remaining_s([RunProgress("a", 100, 0, 2.0), *to_come], parallel=2)
    4.0

    Args:
        runs: All runs of the study.
        parallel: Runs that go on at the same time, at least 1.
    """
    runs = list(runs)
    known = [run for run in runs if run.seconds is not None and run.calls]
    paces = _paces(known)
    if not paces:
        return 0.0 if not any(run.left for run in runs) else None
    usual = sum(paces.values()) / len(paces)
    needed = [run.left * paces.get(run.searcher, usual) for run in runs]
    return max(sum(needed) / max(parallel, 1), *needed)


def _paces(known: Iterable[RunProgress]) -> dict[str, float]:
    """Seconds per call of each searcher."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for run in known:
        calls[run.searcher] += run.calls
        seconds[run.searcher] += run.seconds or 0.0
    return {searcher: seconds[searcher] / made for searcher, made in calls.items()}


def duration_text(seconds: float) -> str:
    """Rounded so that it is read at a glance: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
