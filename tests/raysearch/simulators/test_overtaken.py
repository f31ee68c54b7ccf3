"""Every kind of searcher repeats a run whose calls overtook each other; the PPO ones where RLlib is, with theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.raysearch.simulators.overtaken import assert_order_repeats_run


@pytest.mark.slow
@pytest.mark.parametrize(("searcher", "cut"), [("random", 0), ("annealing", 23), ("coordinate", 0), ("genetic", 0)])
def test_the_recorded_order_of_answers_repeats_a_run_bit_by_bit(searcher: str, cut: int, tmp_path: Path) -> None:
    assert_order_repeats_run(searcher, cut, tmp_path)
