import math

import numpy as np
import pytest

from raysearch.ppo.memory import CallMemory, merit
from raysearch.searcher import Outcome

SIZES = (2, 1, 2, 3, 3)


def outcome(raw: float, excess: float = 0.0) -> Outcome:
    return Outcome(raw, excess == 0.0, 0.0, 0.0, np.zeros((3, 5), np.float32), excess)


def filled(*calls: tuple[tuple[int, ...], float], elites: int = 3, capacity: int = 100) -> CallMemory:
    memory = CallMemory(capacity, SIZES, elites)
    for action, value in calls:
        memory.add(np.array(action), value)
    return memory


def test_feasible_strategies_rank_by_throughput_and_others_below_by_what_they_miss() -> None:
    merits = [merit(outcome(*each)) for each in [(200.0,), (1e-6,), (0.0, 0.1), (0.0, 3.0)]]
    assert merits == sorted(merits, reverse=True)
    assert merits[0] - merit(outcome(100.0)) == pytest.approx(math.log(2))
    assert merits[2] - merits[3] == pytest.approx(2.9)


def test_elites_are_the_best_calls_with_different_degrees() -> None:
    near, better, far, worse = (0, 0, 0, 0, 0), (0, 0, 0, 0, 2), (1, 0, 0, 0, 0), (1, 0, 0, 0, 1)
    memory = filled((near, 1.0), (far, 5.0), (better, 2.0), (worse, 4.0))
    assert [tuple(memory.actions[call]) for call in memory.elites] == [far, better]


def test_elites_do_not_depend_on_the_order_of_calls_of_different_merit() -> None:
    rng = np.random.default_rng(0)
    actions = [np.array(np.unravel_index(rank, SIZES)) for rank in rng.permutation(36)]
    merits = rng.permutation(36).astype(float)
    seen = []
    for order in (np.arange(36), rng.permutation(36)):
        memory = filled(*[(tuple(actions[i]), merits[i]) for i in order])
        seen.append(memory.observe())
    np.testing.assert_array_equal(*seen)
    best = {}
    for action, value in zip(actions, merits, strict=True):
        best[tuple(action[:4])] = max(value, best.get(tuple(action[:4]), -1.0))
    assert sorted(memory.merits[memory.elites], reverse=True) == sorted(best.values(), reverse=True)[:3]


def test_an_observation_shows_scaled_indices_and_padding() -> None:
    memory = filled(((1, 0, 1, 1, 2), 1.0))
    np.testing.assert_allclose(memory.observe(), [[1, 0, 1, 0.5, 1]] + [[-1] * 5] * 2)
    assert memory.observe().dtype == np.float32


def test_new_draws_cover_what_is_left_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    memory = CallMemory(100, SIZES, 3)
    for _ in range(36):
        action = memory.draw_new(rng)
        assert memory.is_new(action)
        memory.add(action, 0.0)
    assert len({tuple(action) for action in memory.actions}) == 36
    assert not memory.is_new(memory.draw_new(rng))


def test_new_draws_are_uniform_over_what_is_left() -> None:
    memory = filled(*[(tuple(np.unravel_index(rank, SIZES)), 0.0) for rank in (0, 1, 5, 6, 7, 30, 35)])
    rng = np.random.default_rng(0)
    drawn = [int(np.ravel_multi_index(tuple(memory.draw_new(rng)), SIZES)) for _ in range(2900)]
    ranks, counts = np.unique(drawn, return_counts=True)
    assert set(ranks) == set(range(36)) - {0, 1, 5, 6, 7, 30, 35}
    assert (np.abs(counts - 100) < 5 * 10).all()


def test_a_restored_memory_knows_the_same() -> None:
    memory = filled(((0, 0, 0, 0, 0), 1.0), ((1, 0, 0, 0, 0), 5.0))
    state = memory.get_state()
    memory.add(np.array((1, 0, 1, 1, 1)), 9.0)
    other = CallMemory(100, SIZES, 3)
    other.set_state(state)
    assert (other.calls, other.elites) == (2, [1, 0])
    assert not other.is_new(np.array((1, 0, 0, 0, 0)))
    assert other.is_new(np.array((1, 0, 1, 1, 1)))
