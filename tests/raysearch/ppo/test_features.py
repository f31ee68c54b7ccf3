import itertools

import numpy as np

from raysearch.ppo.features import degree_distances, value_features, value_starts

SIZES = [3, 1, 2, 4, 3, 3]


def features_of(action) -> np.ndarray:
    return value_features(SIZES)[np.array(action) + value_starts(SIZES)].sum(0)


def test_features_tell_all_strategies_apart() -> None:
    rows = {features_of(action).tobytes() for action in itertools.product(*map(range, SIZES))}
    assert len(rows) == 3 * 1 * 2 * 4 * 3 * 3


def test_a_degrees_features_differ_more_the_further_its_values_are_apart_and_a_choices_all_alike() -> None:
    def distance(coordinate: int, value: int) -> float:
        other = [0] * len(SIZES)
        other[coordinate] = value
        return float(np.abs(features_of(other) - features_of([0] * len(SIZES))).sum())

    assert [distance(3, value) for value in range(4)] == [0, 3, 4, 5]
    assert [distance(5, value) for value in range(3)] == [0, 2, 2]


def test_distances_count_table_steps_within_a_degree_only() -> None:
    distances = degree_distances(SIZES)
    assert distances.shape == (4, 10, 10)
    np.testing.assert_array_equal(distances[2, 4:6, 4:6], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(distances[3, 6], [0, 0, 0, 0, 0, 0, 0, 1, 2, 3])
    assert distances[1].sum() == 0
