"""The fewest GPUs for requests at once, beside all strategies, batches and numbers of replicas."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, fleet_of, needed_gpus, worth_asked
from raysearch.deploy.recommend.limiting_factor import binding_limit
from raysearch.deploy.recommend.requests_at_once import fewest_gpus
from sim.evaluation import Evaluation
from sim.optimum.spaces import space_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.questions import question_about


def every(demand: Demand) -> list[tuple[int, Evaluation]]:
    """All that keep the limits, with the GPUs of so many replicas as there may be, the requests shared evenly."""
    space, found = space_of(demand.workload), list[tuple[int, Evaluation]]()
    for part in space.parts():
        for tp, cp, dp, ep in part.meshes():
            for pp in part.stages((tp, cp, dp, ep)):
                size = tp * cp * dp * pp
                for count in range(1, demand.gpus // size + 1):
                    batch = math.ceil((demand.concurrency or 0) / (count * pp))
                    each = evaluate(demand.workload, Strategy(tp, ep, pp, batch, part.only_dims, cp, dp))
                    if batch <= space.batch[-1] and each.feasible:
                        found.append((count * size, each))
    return found


@pytest.mark.parametrize(
    ("model", "gpus", "at_once", "confidence"),
    [
        ("llama_3_1_70b", 8, 20, 0.9),
        ("llama_3_1_70b", 8, 70, 0.5),
        ("gpt_oss_120b", 6, 150, 0.9),
        ("gpt_oss_120b", 4, 900, 0.5),
        ("mixtral_8x7b", 4, 100, 0.9),
    ],
)
def test_no_strategy_takes_fewer_gpus_and_none_on_as_many_is_faster(
    model: str, gpus: int, at_once: int, confidence: float
) -> None:
    asked = question_about(model, isl=2000, osl=200, tpot_ms=25.0, ttft_ms=1500.0, gpus=gpus, phase="serve")
    workload = replace(asked, engine="vllm", batches="any").load()
    demand = Demand(workload, gpus, concurrency=at_once, confidence=confidence)
    best, brute = fewest_gpus(demand, {}), every(demand)
    if best is None:
        assert not brute
        return
    fewest = min(taken for taken, _ in brute)
    assert needed_gpus(demand, best) == fewest
    fastest = max(each.tokens_per_s_per_gpu for taken, each in brute if taken == fewest)
    assert best.tokens_per_s_per_gpu == pytest.approx(fastest, rel=1e-9)
    assert best_first(demand, 1) == (best,)
    assert best_first(demand, 1, least=worth_asked(demand, best)) == (best,)
    assert not best_first(demand, 1, least=1.01 * worth_asked(demand, best))


def test_some_of_those_questions_have_answers_of_several_replicas() -> None:
    asked = question_about("gpt_oss_120b", isl=2000, osl=200, tpot_ms=25.0, gpus=32, phase="serve", engine="vllm")
    demand = Demand(replace(asked, batches="any").load(), 32, concurrency=500)
    (best,) = best_first(demand, 1)
    fleet = fleet_of(demand, best)
    assert fleet.replicas > 1
    assert fleet.requests_at_once >= 500 > fleet.requests_at_once - fleet.replicas * best.strategy.pp


def test_a_batch_past_the_fastest_one_may_take_fewer_gpus() -> None:
    stated = {"isl": 1, "osl": 1, "tpot_ms": 10.0, "phase": "serve", "engine": "vllm", "batches": "any"}
    workload = question_about("llama_3_1_8b", gpus=4, weights="fp8", kv_cache="fp8", **stated).load()
    demand = Demand(workload, 4, concurrency=130, confidence=0.5)
    fastest = best_first(demand.unloaded, 1)[0]
    assert fastest.strategy.batch < 130  # of one GPU, whose larger batches are slower for some way
    (fewest,) = best_first(demand, 1)
    assert needed_gpus(demand, fewest) == fewest.gpus == 1
    assert binding_limit(demand.unloaded, fastest).startswith("TPOT: batch ")  # that of a faster one further on


def test_what_an_alternative_is_listed_for_keeps_it_from_batches_that_break_no_limit() -> None:
    stated = {"isl": 1000, "osl": 100, "tpot_ms": 20.0, "engine": "vllm", "batches": "any"}
    demand = Demand(question_about("llama_3_1_8b", gpus=1, **stated).load(), 1, confidence=0.5)
    (best,) = best_first(demand, 1)
    sooner = evaluate(demand.workload, replace(best.strategy, batch=best.strategy.batch * 3 // 5))
    assert "listed" not in binding_limit(demand, best)
    limit = binding_limit(demand, sooner)
    found = re.match(r"what it is listed for, up to batch (\d+); then TPOT: batch (\d+) takes ", limit)
    assert found
    free, broken = map(int, found.groups())
    assert sooner.strategy.batch < free <= best.strategy.batch < broken
