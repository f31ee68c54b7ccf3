"""Whether limits hold with steps of every length and under the arrivals of every seed, by the fewest replays that tell.

The step model's error is one of equally likely parts of its interval. Longer steps are taken never to keep limits that
shorter ones miss under the same arrivals: so a seed has a number of parts up to which they are kept, found by halving,
the next seed's near the one before. Sizes and the probability that is shown rest on these same runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

STEP_ERRORS = tuple((part + 0.5) / 10 for part in range(10))
"""Probabilities of the step model's error whose steps are replayed: the middles of equally likely parts."""
_PARTS = len(STEP_ERRORS)


class KeptLimits:
    """What is known of the limits of one deployment under one load.

    Attributes:
        seeds: Runs with steps of each length.
    """

    def __init__(self, kept: Callable[[float, int], bool], seeds: int) -> None:
        """Nothing yet.

        Args:
            kept: Whether limits are kept with steps as long as they are at most with a probability, under a seed.
            seeds: How many, from 0 on.
        """
        self.seeds = seeds
        self._kept = kept
        self._least, self._most = [0] * seeds, [_PARTS] * seeds  # parts in which they are kept, of each seed
        self._beyond = dict[tuple[float, int], bool]()

    def learn(self, other: KeptLimits, *, heavier: bool) -> None:
        """Takes over what is known of another load: a lighter one is taken to keep what a heavier one keeps."""
        for seed in range(self.seeds):
            if heavier:
                self._least[seed] = min(self._most[seed], max(self._least[seed], other._least[seed]))
            else:
                self._most[seed] = max(self._least[seed], min(self._most[seed], other._most[seed]))

    def by_first_seed(self, confidence: float) -> bool:
        """Whether they are kept with steps about as long as that confidence takes, under the first seed's arrivals."""
        return self._in_part(0, self._part_of(confidence))

    def reaches(self, confidence: float) -> bool:
        """Whether the probability is that confidence at least; the first seed alone shows what misses it by far."""
        part = self._part_of(confidence)
        needed = min(self.seeds * _PARTS, math.ceil(confidence * self.seeds * _PARTS - 1e-9))  # parts of all seeds
        enough = needed - (self.seeds - 1) * _PARTS  # of the first seed, if the others kept all
        if not self._in_part(0, part) and enough > 0 and not self._in_part(0, enough - 1):
            return False
        for seed in range(self.seeds):
            if sum(self._most) >= needed > sum(self._least):
                self._in_part(seed, part)
        while sum(self._most) >= needed > sum(self._least):
            seed = max(range(self.seeds), key=lambda each: self._most[each] - self._least[each])
            self._in_part(seed, (self._least[seed] + self._most[seed]) // 2)
        return sum(self._least) >= needed and (confidence <= STEP_ERRORS[-1] or self._hold_beyond(confidence))

    @property
    def counts(self) -> list[int]:
        """Seeds under which they are kept, with each of `STEP_ERRORS`."""
        guess = self._most[0]
        for seed in range(self.seeds):
            while (low := self._least[seed]) < (high := self._most[seed]):
                self._in_part(seed, guess - 1 if low < guess <= high else low if guess == low else (low + high) // 2)
            guess = self._most[seed]
        return [sum(parts > part for parts in self._most) for part in range(_PARTS)]

    def _in_part(self, seed: int, part: int) -> bool:
        """Whether they are kept with steps of that length."""
        if self._least[seed] <= part < self._most[seed]:
            if self._kept(STEP_ERRORS[part], seed):
                self._least[seed] = part + 1
            else:
                self._most[seed] = part
        return part < self._least[seed]

    def _part_of(self, confidence: float) -> int:
        """The last part that must be kept where all seeds are alike."""
        return max(0, math.ceil(confidence * _PARTS - 1e-9) - 1) if confidence < 1 else _PARTS - 1

    def _hold_beyond(self, confidence: float) -> bool:
        """The same with steps longer than the last part's."""
        for seed in range(self.seeds):
            if (confidence, seed) not in self._beyond:
                self._beyond[confidence, seed] = self._kept(confidence, seed)
            if not self._beyond[confidence, seed]:
                return False
        return True
