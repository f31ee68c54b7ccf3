import math

import numpy as np
import pytest

from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.memory import CallMemory, penalised_merit

SIZES = (2, 1, 2, 3, 3)


def outcome(simulated: float, excess: float = 0.0) -> Outcome:
    feasible = excess == 0.0
    return Outcome(simulated * feasible, feasible, 0.0, 0.0, np.zeros((3, 5), np.float32), excess, simulated)


def filled(*calls: tuple[tuple[int, ...], float], elites: int = 3, capacity: int = 100) -> CallMemory:
    memory = CallMemory(capacity, SIZES, elites)
    for action, value in calls:
        memory.add(memory.calls, np.array(action), value)
    return memory


def test_merit_is_the_logarithm_of_throughput_less_the_penalty() -> None:
    assert penalised_merit(outcome(200.0), 4.0) == pytest.approx(math.log(200))
    assert penalised_merit(outcome(200.0, math.log(1.1)), 4.0) == pytest.approx(math.log(200 / 1.1**4))
    assert penalised_merit(outcome(0.0), 4.0) < penalised_merit(outcome(1e-9, 3.0), 4.0)


def test_a_fast_strategy_just_past_a_limit_is_worth_more_than_a_slow_one_and_one_far_past_it_is_not() -> None:
    slow, near, far = (penalised_merit(outcome(*each), 4.0) for each in [(200.0,), (300.0, 0.05), (600.0, 1.0)])
    assert near > slow > far


def test_elites_are_the_best_calls_once_each() -> None:
    a, b, c, d = (0, 0, 0, 0, 0), (0, 0, 0, 0, 2), (1, 0, 0, 0, 0), (1, 0, 0, 0, 1)
    memory = filled((a, 1.0), (c, 5.0), (b, 2.0), (c, 5.0), (d, 4.0))
    assert [tuple(elite) for elite in memory.elites] == [c, d, b]


def test_elites_do_not_depend_on_the_order_of_calls_of_different_merit() -> None:
    rng = np.random.default_rng(0)
    actions = [tuple(np.unravel_index(rank, SIZES)) for rank in rng.permutation(36)]
    merits = rng.permutation(36).astype(float)
    seen = []
    for order in (np.arange(36), rng.permutation(36)):
        seen.append(filled(*[(actions[i], merits[i]) for i in order]).elites)
    np.testing.assert_array_equal(*seen)


def test_new_draws_cover_what_is_left_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    memory = CallMemory(100, SIZES, 3)
    for _ in range(36):
        action = memory.draw_new(rng)
        assert memory.is_new(action)
        memory.add(memory.calls, action, 0.0)
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
    memory.add(memory.calls, np.array((1, 0, 1, 1, 1)), 9.0)
    other = CallMemory(100, SIZES, 3)
    other.set_state(state)
    assert (other.calls, other.best) == (2, [1, 0])
    assert not other.is_new(np.array((1, 0, 0, 0, 0)))
    assert other.is_new(np.array((1, 0, 1, 1, 1)))


def test_calls_that_were_under_way_when_the_elites_were_forgotten_are_none_either() -> None:
    memory = filled(((0, 0, 0, 0, 0), 9.0))
    memory.forget_elites(before=memory.calls + 2)
    memory.add(memory.calls, np.array((1, 0, 0, 0, 0)), 8.0)
    other = CallMemory(100, SIZES, 3)
    other.set_state(memory.get_state())
    for each in (memory, other):
        each.add(each.calls, np.array((1, 0, 1, 0, 0)), 7.0)
        assert each.best == []
        each.add(each.calls, np.array((1, 0, 1, 1, 0)), 1.0)
        assert each.best == [3]
        assert not each.is_new(np.array((1, 0, 0, 0, 0)))


def test_forgotten_elites_stay_known_calls_also_in_a_restored_memory() -> None:
    memory = filled(((0, 0, 0, 0, 0), 9.0), ((1, 0, 0, 0, 0), 5.0))
    memory.forget_elites(before=memory.calls)
    assert (memory.best, memory.stagnant_calls, len(memory.elites)) == ([], 0, 0)
    memory.add(memory.calls, np.array((1, 0, 1, 1, 1)), 2.0)
    memory.add(memory.calls, np.array((0, 0, 0, 0, 0)), 9.0)  # known: no new elite
    memory.add(memory.calls, np.array((1, 0, 1, 1, 0)), 1.0)
    other = CallMemory(100, SIZES, 3)
    other.set_state(memory.get_state())
    for each in (memory, other):
        assert (each.best, each.stagnant_calls, each.calls) == ([2, 4], 2, 5)
        assert not each.is_new(np.array((1, 0, 0, 0, 0)))


def test_what_it_says_does_not_depend_on_the_order_in_which_it_hears_of_calls() -> None:
    rng = np.random.default_rng(1)
    actions = [np.array(np.unravel_index(rank, SIZES)) for rank in rng.integers(36, size=60)]
    merits = {tuple(action): float(rng.integers(8)) for action in actions}
    memories = []
    for order in (np.arange(60), rng.permutation(60), rng.permutation(60)):
        memory = CallMemory(10, SIZES, 3)  # grows
        for number in order:
            memory.add(int(number), actions[number], merits[tuple(actions[number])])
        memories.append(memory)
    for other in memories[1:]:
        assert other.best == memories[0].best
        np.testing.assert_array_equal(other.merits, memories[0].merits)
        np.testing.assert_array_equal(
            other.draw_new(np.random.default_rng(0)), memories[0].draw_new(np.random.default_rng(0))
        )


def test_calls_that_come_late_leave_no_gap() -> None:
    memory = CallMemory(4, SIZES, 2)
    for number in (0, 3, 1):
        memory.add(number, np.array((number % 2, 0, 0, 0, 0)), float(number))
    assert (memory.settled, memory.calls) == (2, 3)
    assert memory.merits.tolist() == [0.0, 1.0, 3.0]
    memory.add(2, np.array((0, 0, 1, 0, 0)), 2.0)
    assert (memory.settled, memory.merits.tolist()) == (4, [0.0, 1.0, 2.0, 3.0])
