"""Decode steps of microbatches that follow each other through a pipeline, without going through each.

A step of a microbatch begins when its last one has left the last stage and the first stage is free; each takes a little
longer than the one before, as caches grow. After a few rounds the same microbatch decides every time, so that all times
are quadratic in the number of rounds: many rounds are skipped, unless the one after them goes otherwise than foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence

_FEWEST = 6
"""Rounds from which on skipping costs less than going through them. [assumed]"""
_SAME = 1e-9
"""Share of a round by which times differ that go as foreseen: rounding. [assumed]"""


def in_turn(
    ends_s: Sequence[float],
    free_s: Sequence[float],
    stage_s: Sequence[float],
    more_s: Sequence[float],
    most: int,
    last: int,
    until_s: float,
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Lets microbatches go on in turn, for so many rounds at most, until the next step would begin at a time.

    Args:
        ends_s: When the last step of each ends, ascending, [microbatches].
        free_s: When each stage is free, [stages].
        stage_s: A stage's seconds of each microbatch's next step.
        more_s: By which each takes longer there than the one before.
        most: Rounds.
        last: Microbatches that have their turn in the last one of them.
        until_s: The time, which may be infinite.

    Returns:
        Steps that each has gone, `ends_s` after the first step of each and after the last, and `free_s` then.

    >>> in_turn([0.0, 0.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0], 1000, 2, 3996.0)
    ([1000, 999], [2.0, 5.0], [3998.0, 3997.0], [3996.0, 3998.0])
    """
    count, begun_s = len(ends_s), free_s[0]
    # Reckoned from the beginning: rounding shows less.
    ends, free, until_s = [each - begun_s for each in ends_s], [each - begun_s for each in free_s], until_s - begun_s
    firsts, rounds, gone, seen = ends, 0, 0, list[list[float]]()
    while rounds < most:
        steps_s = _later(stage_s, more_s, rounds) if rounds else stage_s
        gone = _round(ends, free, steps_s if rounds + 1 < most else steps_s[:last], until_s)
        if not rounds:
            firsts = ends[:]
        if gone < count:
            break
        rounds, gone = rounds + 1, 0
        if most - rounds < _FEWEST or until_s - ends[-1] < _FEWEST * ends[-1] / rounds:
            continue  # there is little to be skipped
        seen = [*seen[-3:], [*ends, *free]]
        if len(seen) == 4 and (growths := _growths(seen)):
            ends, free, skipped = _skip(seen, growths, stage_s, more_s, rounds, most - 1 - rounds, until_s)
            rounds, seen = rounds + skipped, []
    steps = [rounds + (lane < gone) for lane in range(count)]
    firsts, ends, free = ([begun_s + each for each in times] for times in (firsts, ends, free))
    return steps, firsts, ends, free


def _later(stage_s: Sequence[float], more_s: Sequence[float], rounds: int) -> list[float]:
    """Seconds of each microbatch after so many rounds."""
    return [each + rounds * more for each, more in zip(stage_s, more_s, strict=True)]


def _round(ends: list[float], free: list[float], steps_s: Sequence[float], until_s: float) -> int:
    """One step of each that has a duration, in turn; how many began before a time."""
    for lane, step_s in enumerate(steps_s):
        now = ends[lane] if ends[lane] > free[0] else free[0]
        if now >= until_s:
            return lane
        for stage, free_s in enumerate(free):
            free[stage] = now = (now if now > free_s else free_s) + step_s
        ends[lane] = now
    return len(steps_s)


def _tolerance_s(seen: Sequence[Sequence[float]]) -> float:
    return _SAME * (seen[-1][0] - seen[-2][0])


def _growths(seen: Sequence[Sequence[float]]) -> list[float] | None:
    """By how much more each of the times grows in each round; None where the last four are not on one quadratic."""
    tolerance_s, found = _tolerance_s(seen), list[float]()
    for first, second, third, fourth in zip(*seen, strict=True):
        growth = fourth - third - third + second
        if abs(growth - (third - second - second + first)) > tolerance_s:
            return None
        found.append(growth)
    return found


def _skip(
    seen: Sequence[Sequence[float]],
    growths: Sequence[float],
    stage_s: Sequence[float],
    more_s: Sequence[float],
    rounds: int,
    most: int,
    until_s: float,
) -> tuple[list[float], list[float], int]:
    """(`ends_s`, `free_s`, how many rounds were skipped): at most so many, and all of them before a time."""
    count, times, tolerance_s = len(stage_s), seen[-1], _tolerance_s(seen)
    speeds = [now - before for now, before in zip(times, seen[-2], strict=True)]

    def after(some: int) -> list[float]:
        return [
            now + some * speed + some * (some + 1) / 2 * growth
            for now, speed, growth in zip(times, speeds, growths, strict=True)
        ]

    left_s, speed, growth = until_s - times[count - 1], speeds[count - 1], growths[count - 1]
    skipped = int(min(most, left_s / speed)) - 1
    skipped = int(min(most, left_s / max(speed, speed + growth * (skipped + 1) / 2))) - 1
    while skipped >= _FEWEST:
        found, foreseen = after(skipped), after(skipped + 1)
        ends, free = found[:count], found[count:]
        gone = _round(ends, free, _later(stage_s, more_s, rounds + skipped), until_s)
        if gone == count and all(
            abs(one - other) < tolerance_s for one, other in zip([*ends, *free], foreseen, strict=True)
        ):
            return ends, free, skipped + 1
        skipped //= 4
    return list(times[:count]), list(times[count:]), 0
