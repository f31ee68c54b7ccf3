"""Coordinates with and without an order, long ones and their digits, and actions that do the same."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import StrategySpace
from envs.actions import LONG_LABEL, Actions, Factored, doublings, is_long
from raysearch.testing.landscapes import MOE
from sim.canonical import canonical
from sim.config.catalog import load_workload
from sim.optimum.spaces import Coordinate

WORKLOAD = load_workload(MOE)


def with_batches(batches: tuple[int, ...]) -> StrategySpace:
    return StrategySpace(replace(WORKLOAD, degrees=replace(WORKLOAD.degrees, batch=batches)))


ANY = with_batches(tuple(range(1, 4097)))
EXTENDED = StrategySpace(replace(WORKLOAD, space="extended"))


def test_degrees_have_an_order_and_choices_have_none() -> None:
    names = [EXTENDED.names[place] for place in EXTENDED.action_space.ordered]
    assert names == ["tp", "ep", "pp", "batch", "cp", "dp"]


@pytest.mark.parametrize(("count", "long"), [(LONG_LABEL, False), (LONG_LABEL + 1, True)])
def test_a_coordinate_is_long_beyond_a_number_of_ordered_values(count: int, long: bool) -> None:
    assert is_long(Coordinate("batch", tuple(range(1, count + 1)), ordered=True)) == long
    assert not is_long(Coordinate("op", tuple(range(count)), ordered=False))


def test_a_space_without_long_coordinates_is_its_own_factored_one() -> None:
    action = EXTENDED.sample(np.random.default_rng(0))
    assert EXTENDED.factored.actions.sizes == EXTENDED.sizes
    np.testing.assert_array_equal(EXTENDED.factored.encode(action), action)
    np.testing.assert_array_equal(EXTENDED.factored.decode(action), action)


@given(values=st.sets(st.integers(1, 10**6), min_size=LONG_LABEL + 1, max_size=300).map(sorted).map(tuple))
def test_every_value_of_a_long_coordinate_is_written_once_and_comes_back(values: tuple[int, ...]) -> None:
    factored = Factored([Coordinate("tp", (1, 2), ordered=True), Coordinate("batch", values, ordered=True)])
    plain = np.stack([np.ones(len(values), np.int64), np.arange(len(values))], 1)
    written = factored.encode(plain)
    assert max(factored.actions.sizes) < LONG_LABEL
    assert (written >= 0).all()
    assert (written < np.array(factored.actions.sizes)).all()
    assert len(np.unique(written, axis=0)) == len(values)
    np.testing.assert_array_equal(factored.decode(written), plain)
    np.testing.assert_array_equal(factored.actions.folded(written), written)


def test_whatever_the_digits_say_is_an_action_and_folds_to_the_code_of_its_value() -> None:
    factored, rng = ANY.factored, np.random.default_rng(0)
    written = rng.integers(factored.actions.sizes, size=(500, len(factored.actions.sizes)))
    plain = factored.decode(written)
    assert ((plain >= 0) & (plain < ANY.nvec)).all()
    np.testing.assert_array_equal(factored.actions.folded(written), factored.encode(ANY.folded(plain)))
    # Doublings are those of the value, and digits go on where they end.
    assert factored.actions.sizes[3] == 13
    assert [ANY.factored.decode(row)[3] + 1 for row in factored.encode(np.array([[0, 0, 0, 63] + [0] * 12]))] == [64]


def test_a_folded_action_stands_for_the_canonical_strategy() -> None:
    rng = np.random.default_rng(0)
    for space in (ANY, EXTENDED):
        for _ in range(200):
            action = space.sample(rng)
            action[0] = rng.integers(2)
            if space is EXTENDED:
                action[-2] = rng.integers(2)
            assert space.decode(space.folded(action)) == canonical(space.decode(action))
    alone = ANY.encode(replace(ANY.decode(ANY.sample(rng)), tp=1))
    other = alone.copy()
    other[4] = (alone[4] + 1) % 3
    assert ANY.rank(alone) != ANY.rank(other)
    assert ANY.key(alone) == ANY.key(other)


def test_an_action_space_survives_pickling() -> None:
    action = ANY.factored.actions.sample()
    again: Actions = pickle.loads(pickle.dumps(ANY.factored.actions))
    assert again == ANY.factored.actions
    np.testing.assert_array_equal(again.folded(action), ANY.factored.actions.folded(action))


def test_doublings_leave_out_those_without_a_value() -> None:
    assert doublings((3, 64, 65, 127, 1000)) == (range(1), range(1, 4), range(4, 5))


def test_moves_along_a_long_coordinate_are_steps_of_powers_of_two() -> None:
    steps = {100 + sign * 2**k for k in range(12) for sign in (-1, 1)}
    assert sorted(ANY.moves(3, 100)) == sorted(steps & set(range(4096)))
    assert ANY.moves(0, 2) == [0, 1, 3, 4, 5, 6, 7]
    rng = np.random.default_rng(0)
    start = ANY.encode(replace(ANY.decode(ANY.sample(rng)), batch=101))
    moved = {int(step[3]) for _ in range(5000) if (step := ANY.neighbour(start, rng))[3] != start[3]}
    assert moved == set(ANY.moves(3, 100))


def test_samples_of_a_long_coordinate_favour_no_doubling() -> None:
    rng = np.random.default_rng(0)
    batches = np.array([ANY.decode(ANY.sample(rng)).batch for _ in range(2000)])
    counts = np.bincount(np.floor(np.log2(batches)).astype(int), minlength=13)
    assert counts.min() > 100
