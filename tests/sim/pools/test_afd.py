"""Decode pools whose attention and experts have GPUs of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.config.question import Question
from sim.pools.afd import AfdPool, best_afd, layer_period_s
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    asked = Question(model="mixtral_8x7b", isl=2000, osl=200, phase="decode", gpus=6, confidence=0.5, tpot_ms=25)
    return asked.load()


@pytest.fixture(scope="module")
def best(workload: Workload) -> AfdPool:
    found = best_afd(workload)
    assert found is not None
    return found


def test_one_microbatch_waits_for_its_whole_way_and_many_for_the_busiest_group() -> None:
    assert layer_period_s(1, 3.0, 2.0, 0.5, 0.5) == 6.0
    assert layer_period_s(3, 3.0, 2.0, 0.5, 0.5) == 9.0
    assert layer_period_s(2, 1.0, 1.0, 1.0, 1.0) == 4.0  # of four stages in a ring two microbatches fill half
    assert layer_period_s(4, 1.0, 1.0, 1.0, 1.0) == 4.0


def test_the_best_pool_keeps_its_limits_and_follows_from_its_parts(workload: Workload, best: AfdPool) -> None:
    assert best.gpus <= workload.max_gpus
    assert best.tpot_s <= workload.tpot_slo_s
    rate = best.microbatches * best.batch / best.tpot_s / best.gpus
    assert best.tokens_per_s_per_gpu == pytest.approx(rate)
    period_s = layer_period_s(best.microbatches, best.attention_s, best.experts_s, best.to_experts_s, best.back_s)
    assert best.tpot_s > workload.model.groups[0].count * period_s  # the head and the engine's own come on top
    assert 0 <= best.hidden_share <= 1


def test_both_parts_are_the_step_models_layer_and_experts_that_do_not_fit_have_no_pool(workload: Workload) -> None:
    asked = Question(
        model="mixtral_8x7b", isl=500, osl=50, phase="decode", gpus=2, confidence=0.5, weights="fp8"
    ).load()
    apart = best_afd(asked)
    assert apart is not None
    assert (apart.attention_gpus, apart.expert_gpus) == (1, 1)
    together = evaluate(asked, Strategy(1, 1, 1, apart.batch, (2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2)))
    assert apart.attention_s + apart.experts_s == pytest.approx(sum(op.kernel_time_s for op in together.ops))
    assert best_afd(replace(workload, max_gpus=2, tpot_slo_s=1.0)) is None  # 90 GB of experts in bf16


def test_a_looser_limit_never_carries_less_and_a_model_without_experts_has_none(workload: Workload) -> None:
    rates = [
        found.tokens_per_s_per_gpu if (found := best_afd(replace(workload, tpot_slo_s=limit_s))) else 0.0
        for limit_s in (0.012, 0.02, 0.05)
    ]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    dense = Question(model="llama_3_1_8b", isl=1000, osl=100, phase="decode", gpus=4).load()
    assert best_afd(dense) is None
