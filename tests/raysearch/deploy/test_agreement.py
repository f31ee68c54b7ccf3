"""Answers on one question rest on one model: `recommend`, `pools` and `replay` say the same of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import raysearch as rs
from raysearch.answers.compared_pools import PoolsResult
from raysearch.answers.recommended import RecommendationResult
from sim.pools.best_pools import OnePool
from sim.pools.matching import Matched

pytestmark = pytest.mark.usefixtures("every_best_alone")
ASKED = rs.question(
    model="llama_3_1_8b", isl=2000, osl=100, tpot_ms=15, ttft_ms=300, engine="vllm", gpus=4, batches="powers_of_two"
)
LOAD = 10.0
FEW = 60
"""Requests of a replay."""


@pytest.fixture(scope="module")
def both() -> tuple[RecommendationResult, PoolsResult]:
    return rs.recommend(ASKED, requests_per_s=LOAD, top=2, requests=FEW), rs.pools(
        ASKED, requests_per_s=LOAD, requests=FEW
    )


def test_recommend_and_pools_size_both_forms_alike_under_a_load(
    both: tuple[RecommendationResult, PoolsResult],
) -> None:
    answer, point = both[0].answer, both[1].points[0]
    one, apart = point.ways["one"], point.ways["apart"]
    assert isinstance(one, OnePool)
    assert isinstance(apart, Matched)
    assert answer.pair is not None
    assert one.gpus == answer.options[0].fleet.gpus
    assert one.evaluation.strategy == answer.options[0].evaluation.strategy
    assert apart == answer.pair.matched
    assert {"one": "aggregated", "apart": "disaggregated"}[str(point.winner)] == answer.winner


def test_replay_says_of_the_winner_what_recommend_rests_on(
    both: tuple[RecommendationResult, PoolsResult], tmp_path: Path
) -> None:
    answer = both[0].answer
    both[0].write(tmp_path)
    winner = answer.options[0].load if answer.winner == "aggregated" else answer.pair and answer.pair.load
    assert winner is not None
    assert winner.report is not None
    again = rs.replay(path=tmp_path, requests_per_s=LOAD, seeds=2, requests=FEW)
    assert again.report.runs == winner.report.runs
    assert again.probability == winner.report.probability
    assert again.report.gpus == winner.report.gpus


def test_no_pool_holds_on_fewer_gpus_than_the_steady_state_takes(
    both: tuple[RecommendationResult, PoolsResult],
) -> None:
    load, answer = both[0].answer.options[0].load, both[0].answer
    assert load is not None
    assert load.in_steady_state <= load.replicas
    assert answer.pair is not None
    assert answer.pair.load is not None
    assert answer.pair.load.in_steady_state <= answer.pair.matched.gpus
