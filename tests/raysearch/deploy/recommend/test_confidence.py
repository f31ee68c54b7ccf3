"""Limits that hold with a confidence: the best under them by brute force, its price, and where nothing keeps them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import raysearch as rs
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, fleet_worth
from raysearch.deploy.recommend.recommendation import Recommendation, recommended
from sim.batched import evaluate_many
from sim.evaluation import Evaluation
from sim.optimum.exact_search import find_bests
from sim.optimum.spaces import space_of
from sim.simulate import evaluate
from tests.questions import question_about

pytestmark = pytest.mark.usefixtures("every_best_alone")
STATED = {"isl": 1000, "osl": 200, "tpot_ms": 12.0, "ttft_ms": 150.0, "phase": "serve", "engine": "vllm"}


def a_demand(confidence: float, **fields: object) -> Demand:
    workload = question_about("llama_3_1_8b", gpus=4, **{**STATED, "batches": "any", **fields}).load()
    return Demand(workload, 4, top=2, confidence=confidence)


def worth(demand: Demand, evaluation: Evaluation) -> float:
    return fleet_worth(demand, evaluation.tokens_per_s_per_gpu, evaluation.gpus)


@pytest.mark.parametrize(("engine", "confidence"), [("vllm", 0.6), ("sglang", 0.9)])
def test_the_best_is_that_of_all_batches_whose_latencies_hold_so_often(engine: str, confidence: float) -> None:
    demand = a_demand(confidence, engine=engine)
    space = space_of(demand.at_even_odds.workload)
    degrees = find_bests(space, 100)  # of each degrees one, whose larger batches break a limit as predicted
    assert 3 <= len(degrees) < 100
    brute = evaluate_many(
        demand.workload,
        [
            replace(each.strategy, batch=batch)
            for each in degrees
            for batch in space.batch
            if each.strategy.batch / 2 < batch <= each.strategy.batch + 3
        ],
    )
    surely = zip(brute.strategies, brute.tokens_per_s_per_gpu.tolist(), brute.feasible.tolist(), strict=True)
    worths = [(fleet_worth(demand, value, each.gpus), each) for each, value, feasible in surely if feasible]
    _, best = max(worths, key=lambda pair: pair[0])
    assert best_first(demand, 1)[0] == evaluate(demand.workload, best)
    several = best_first(demand, 3)
    assert [worth(demand, each) for each in several] == sorted((worth(demand, each) for each in several), reverse=True)


def test_a_quantile_of_a_latency_lies_where_its_interval_says() -> None:
    found = best_first(a_demand(0.9), 1)[0]
    low_s, high_s = found.tpot_interval_s
    assert found.tpot_at_s(0.5) == found.tpot_s
    assert (found.tpot_at_s(0.05), found.tpot_at_s(0.95)) == pytest.approx((low_s, high_s))
    places = [found.ttft_at_s(probability / 100) for probability in range(1, 100)]
    assert places == sorted(places)


def test_more_confidence_never_gives_more_and_even_odds_are_the_optimum() -> None:
    rates = [best_first(a_demand(each), 1)[0].tokens_per_s_per_gpu for each in (0.5, 0.99)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    assert rates[0] == find_bests(space_of(a_demand(0.5).workload), 1)[0].tokens_per_s_per_gpu
    unlimited = {"tpot_ms": None, "ttft_ms": None, "batches": "powers_of_two"}
    assert best_first(a_demand(0.9, **unlimited), 1) == best_first(a_demand(0.5, **unlimited), 1)


def test_what_is_recommended_holds_and_its_price_is_reported() -> None:
    question = rs.question(model="llama_3_1_8b", gpus=2, **STATED, batches="powers_of_two")
    found = rs.recommend(question, top=2, only="aggregated")
    best = found.best
    assert best is not None
    for option in found.answer.options:
        assert option.evaluation.tpot_at_s(0.9) <= 12e-3 * (1 + 1e-9)
        assert option.evaluation.ttft_at_s(0.9) <= 150e-3 * (1 + 1e-9)
    assert "at confidence 0.9" in found.answer.options[0].limit
    record = found.to_dict()
    even = rs.recommend(replace(question, confidence=0.5), top=1, only="aggregated")
    assert record["confidence"] == 0.9
    assert record["at_even_odds"]["strategy"] == even.to_dict()["best"]["strategy"]
    assert even.to_dict()["at_even_odds"] is None
    assert record["at_even_odds"]["tokens_per_s_per_gpu"] > best.tokens_per_s_per_gpu


def test_where_nothing_holds_the_answer_says_what_does_and_how_long_it_takes() -> None:
    even = best_first(a_demand(0.5), 1)[0]
    least_s = evaluate(a_demand(0.5).workload, replace(even.strategy, tp=4, batch=1)).tpot_s
    answer: Recommendation = recommended(
        a_demand(0.9, tpot_ms=least_s * 1.02e3, ttft_ms=None, batches="powers_of_two", chunk_tokens=1000)
    )
    assert not answer.options
    assert answer.even is not None
    assert answer.even.feasible
    assert answer.miss is not None
    needed_ms = math.ceil(answer.miss.evaluation.tpot_at_s(0.9) * 1e4) / 10
    assert f"a TPOT of {needed_ms:,.1f} ms" in answer.miss.would_fit
