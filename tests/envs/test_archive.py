import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import AddStatus, Elite, EliteArchive

candidates = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 1.5, 2.0]), st.tuples(st.integers(0, 2), st.integers(0, 2))), max_size=20
).map(lambda pairs: list({action: (raw, action) for raw, action in pairs}.values()))
"""Distinct actions, many of them equally good."""


def filled(capacity: int, offered: list[tuple[float, tuple[int, ...]]]) -> EliteArchive:
    archive = EliteArchive(capacity)
    for raw, action in offered:
        archive.add(raw, action)
    return archive


@given(offered=candidates, capacity=st.integers(1, 5))
def test_entries_are_the_best_distinct_actions_sorted(offered: list, capacity: int) -> None:
    archive = filled(capacity, offered + offered)
    expected = sorted(offered, key=lambda candidate: (-candidate[0], candidate[1]))[:capacity]
    assert [tuple(elite) for elite in archive.entries] == expected


@given(offered=candidates, data=st.data(), capacity=st.integers(1, 5))
def test_the_order_of_arrival_does_not_matter(offered: list, data: st.DataObject, capacity: int) -> None:
    shuffled = data.draw(st.permutations(offered))
    assert filled(capacity, offered).entries == filled(capacity, shuffled).entries


def test_add_says_what_became_of_the_candidate() -> None:
    archive = EliteArchive(2)
    assert archive.add(1.0, (0,)) is AddStatus.ADDED
    assert archive.add(1.0, (0,)) is AddStatus.DUPLICATE
    assert archive.add(3.0, (1,)) is AddStatus.ADDED
    assert archive.add(0.5, (2,)) is AddStatus.REJECTED
    assert archive.add(2.0, (3,)) is AddStatus.ADDED
    assert archive.entries == (Elite(3.0, (1,)), Elite(2.0, (3,)))


def test_the_best_is_the_first_entry_and_none_when_empty() -> None:
    archive = EliteArchive(2)
    assert archive.best is None
    archive.add(1.0, (0,))
    archive.add(2.0, (1,))
    assert archive.best == Elite(2.0, (1,))
    archive.clear()
    assert archive.best is None


@given(offered=candidates)
def test_a_snapshot_goes_through_json_and_back(offered: list) -> None:
    archive, restored = filled(3, offered), EliteArchive(3)
    restored.set_state(json.loads(json.dumps(archive.get_state())))
    assert restored.entries == archive.entries


def test_a_snapshot_is_independent_of_what_happens_later() -> None:
    archive = filled(3, [(1.0, (0,))])
    state = archive.get_state()
    archive.add(2.0, (1,))
    assert len(state) == 1


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EliteArchive(0)
