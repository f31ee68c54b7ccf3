import itertools

import numpy as np

from raysearch.searchers.ppo.features import ordered_values, step_distances, value_features, value_starts

SIZES = [3, 1, 2, 4, 3, 3, 2]
ORDERED = [0, 1, 2, 3, 6]


def features_of(action) -> np.ndarray:
    return value_features(SIZES, ORDERED)[np.array(action) + value_starts(SIZES)].sum(0)


def test_features_tell_all_strategies_apart() -> None:
    rows = {features_of(action).tobytes() for action in itertools.product(*map(range, SIZES))}
    assert len(rows) == 3 * 1 * 2 * 4 * 3 * 3 * 2


def test_a_degrees_features_differ_more_the_further_its_values_are_apart_and_a_choices_all_alike() -> None:
    def distance(coordinate: int, value: int) -> float:
        other = [0] * len(SIZES)
        other[coordinate] = value
        return float(np.abs(features_of(other) - features_of([0] * len(SIZES))).sum())

    assert [distance(3, value) for value in range(4)] == [0, 3, 4, 5]
    assert [distance(5, value) for value in range(3)] == [0, 2, 2]
    assert [distance(6, value) for value in range(2)] == [0, 3]  # ordered, though behind the choices


def test_distances_count_table_steps_within_a_degree_only() -> None:
    distances = step_distances(SIZES, ORDERED)
    assert distances.shape == (5, 12, 12)
    np.testing.assert_array_equal(distances[2, 4:6, 4:6], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(distances[3, 6], [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0])
    assert distances[1].sum() == 0
    np.testing.assert_array_equal(distances[4, 10:, 10:], [[0, 1], [1, 0]])
    assert ordered_values(SIZES, ORDERED).tolist() == [*range(10), 16, 17]
