"""Microbatches that go on in turn, against each step by itself."""

import math

import numpy as np
import pytest

from sim.replay.in_turn import in_turn


def _one_by_one(
    ends: list[float],
    free: list[float],
    stage_s: list[float],
    more_s: list[float],
    rounds: int,
    last: int,
    until: float,
) -> tuple[list[int], list[float], list[float]]:
    gone = [0] * len(ends)
    for turn in range((rounds - 1) * len(ends) + last):
        lane = turn % len(ends)
        at_s = max(ends[lane], free[0])
        if at_s >= until:
            break
        for stage in range(len(free)):
            at_s = free[stage] = max(at_s, free[stage]) + stage_s[lane] + gone[lane] * more_s[lane]
        ends[lane] = at_s
        gone[lane] += 1
    return gone, ends, free


@pytest.mark.parametrize("seed", range(60))
def test_rounds_that_are_skipped_are_as_gone_through(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, stages = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 8]))
    free_s = (100 + np.cumsum(rng.uniform(0, 0.02, stages))).tolist()
    ends_s = (free_s[0] + np.sort(rng.uniform(0, 0.1, count))).tolist()
    stage_s = rng.uniform(0.002, 0.002 * rng.choice([1.001, 1.5, 4]), count).tolist()
    # Some grow so fast that another one decides after a while.
    more_s = (rng.uniform(0, 1, count) * rng.choice([0, 1e-8, 1e-5])).tolist()
    rounds, last = int(rng.integers(1, 900)), int(rng.integers(1, count + 1))
    until_s = rng.choice([math.inf, 100 + rng.uniform(0, 10)])
    expected = _one_by_one(ends_s[:], free_s[:], stage_s, more_s, rounds, last, until_s)
    gone, _, ends, free = in_turn(ends_s, free_s, stage_s, more_s, rounds, last, until_s)
    assert gone == expected[0]
    assert ends == pytest.approx(expected[1], abs=1e-8)
    assert free == pytest.approx(expected[2], abs=1e-8)


def test_no_round_is_gone_through_where_all_go_as_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.replay import in_turn as module

    rounds = list[int]()
    plain = module._round  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(module, "_round", lambda *given: rounds.append(1) or plain(*given))
    in_turn([0.0] * 4, [0.0] * 4, [0.002] * 4, [1e-8] * 4, 10_000, 4, math.inf)
    assert len(rounds) < 30
