"""What is known to happen at a later time, and replicas that work until then."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from sim.replay.replica import LiveReplica

Happening = Callable[[float], None]
"""What is done when its time has come, which it is given."""


class Agenda:
    """Events to come, by time; of the same time, by when they were entered."""

    def __init__(self) -> None:
        self._order = itertools.count()
        self._due: list[tuple[float, int, Happening]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next_s(self) -> float:
        """When the next event is due; infinite where there is none."""
        return self._due[0][0] if self._due else math.inf

    def enter(self, time_s: float, happening: Happening) -> None:
        """Something happens at a time."""
        heapq.heappush(self._due, (time_s, next(self._order), happening))

    def pop(self) -> tuple[float, Happening]:
        """The next event and its time."""
        time_s, _, happening = heapq.heappop(self._due)
        return time_s, happening

    def run(self, fleet: Sequence[LiveReplica]) -> None:
        """Whatever comes next of events and replicas, none of which goes on beyond what others may answer meanwhile."""
        while True:
            from_s = [replica.answers_from_s for replica in fleet]
            first_s = min(from_s)
            if self.next_s == first_s == math.inf:
                return
            if self.next_s <= first_s:
                time_s, happening = self.pop()
                for replica in fleet:
                    replica.advance(time_s)
                happening(time_s)
                continue
            at = from_s.index(first_s)
            from_s[at] = math.inf
            fleet[at].advance(max(min(self.next_s, *from_s), math.nextafter(first_s, math.inf)), pause=True)
