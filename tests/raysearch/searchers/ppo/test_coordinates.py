import itertools
from dataclasses import replace

import numpy as np
from gymnasium.spaces import MultiDiscrete

from envs import StrategySpace
from raysearch.searchers.ppo.coordinates import Coordinates
from raysearch.testing.landscapes import MOE
from sim.config.catalog import load_workload
from tests.envs.fakes import toy_actions

SIZES = (3, 2, 2, 4, 3)
COORDINATES = Coordinates(toy_actions(SIZES))
ACTIONS = np.array(list(itertools.product(*map(range, SIZES))))
CHOSEN = np.array(list(itertools.product(*map(range, COORDINATES.sizes))))


def test_every_action_is_written_once_and_comes_back() -> None:
    written = COORDINATES.encode(ACTIONS)
    assert (written >= 0).all()
    assert (written < COORDINATES.sizes).all()
    assert COORDINATES.inside(written).all()
    np.testing.assert_array_equal(COORDINATES.decode(written), ACTIONS)


def test_inside_are_the_actions_and_no_others() -> None:
    inside = CHOSEN[COORDINATES.inside(CHOSEN)]
    np.testing.assert_array_equal(np.unique(COORDINATES.decode(inside), axis=0), ACTIONS)
    assert len(inside) == len(ACTIONS)


def test_uniform_choices_inside_are_uniform_actions_for_every_degree() -> None:
    inside = COORDINATES.inside(CHOSEN)
    shares = [inside[(CHOSEN[:, 0] == tp) & (CHOSEN[:, 1] == ep)].mean() for tp in range(3) for ep in range(2)]
    assert len(set(shares)) == 1


def test_the_batch_follows_the_degrees_where_its_coordinate_is_kept() -> None:
    chosen = COORDINATES.encode(np.array([0, 0, 1, 1, 2]))
    for tp, ep in ((1, 0), (0, 1), (1, 1)):
        moved = chosen + np.array([tp, ep, 0, 0, 0])
        np.testing.assert_array_equal(COORDINATES.decode(moved), [tp, ep, 1, 1 + tp + ep, 2])


def test_what_it_is_given_stays_as_it_is() -> None:
    action = np.array([1, 1, 0, 2, 0])
    COORDINATES.decode(COORDINATES.encode(action))
    np.testing.assert_array_equal(action, [1, 1, 0, 2, 0])


def test_actions_that_do_the_same_come_back_as_one() -> None:
    space = StrategySpace(load_workload(MOE))
    coordinates, rng = Coordinates(space.action_space), np.random.default_rng(0)
    actions = np.stack([space.sample(rng) for _ in range(200)])
    actions[:100, 0] = 0
    assert (space.folded(actions) != actions).any()
    np.testing.assert_array_equal(coordinates.decode(coordinates.encode(actions)), space.folded(actions))


def test_a_space_that_does_not_name_its_coordinates_is_taken_as_it_is() -> None:
    coordinates = Coordinates(MultiDiscrete(SIZES))
    assert coordinates.sizes == SIZES
    assert coordinates.ordered == ()
    np.testing.assert_array_equal(coordinates.decode(coordinates.encode(ACTIONS)), ACTIONS)


def test_a_long_batch_moves_with_the_degrees_by_its_doublings() -> None:
    workload = load_workload(MOE)
    long = StrategySpace(replace(workload, degrees=replace(workload.degrees, batch=tuple(range(1, 4097)))))
    coordinates = Coordinates(long.factored.actions)
    chosen = coordinates.encode(long.factored.encode(np.array([1, 1, 0, 699, *[1] * 12])))  # batch 700
    chosen[0] += 1
    assert long.decode(long.factored.decode(coordinates.decode(chosen))).batch == 1400
    assert Coordinates(long.action_space).sizes == long.sizes  # a table of 4096 does not double
