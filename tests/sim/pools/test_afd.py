"""Decode pools whose attention and experts have GPUs of their own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.pools.afd import MOST_MICROBATCHES, AfdPool, best_afd, layer_period_s
from sim.prices.collectives import stage_send_s
from sim.prices.mesh import MeshGroup
from sim.serving.phases import in_step_s
from sim.simulate import evaluate
from sim.step.stage import needed_and_allowed_bytes
from sim.strategy import Strategy
from sim.workload import Workload, coarse_steps


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


HEADS_AND_EXPERTS = (2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2)


def test_no_pool_of_its_grid_is_better_by_brute_force(workload: Workload, best: AfdPool) -> None:
    """Every size, batch and number of microbatches, each worked out by hand from the step model's own parts."""

    def state(*degrees: int) -> Evaluation:
        return evaluate(workload, Strategy(*degrees[:4], HEADS_AND_EXPERTS, 1, degrees[4]))

    assert workload.engine is not None
    model, most, times = workload.model, workload.max_gpus, workload.engine.times
    layers = model.groups[0].count
    one, two = (state(1, ep, 1, 2, ep).memory_bytes.weights for ep in (1, 2))
    experts_bytes = 2 * (one - two)
    rates: dict[tuple[int, ...], float] = {}
    sizes = [size for size in coarse_steps(most) if size < most]
    batches = coarse_steps(2048)  # more sequences do not fit
    for gpus, tp, batch in itertools.product(sizes, workload.degrees.tp, batches):
        if gpus % tp or batch * tp < gpus:
            continue
        own = state(tp, gpus, 1, batch, gpus // tp)
        names = [op.name for op in own.ops]
        first, last = names.index("dispatch"), names.index("combine")
        own_s = sum(op.kernel_time_s for op in [*own.ops[: first + 1], *own.ops[last:]])
        own_s += sum(op.communication_time_s for op in own.ops if op.name not in ("dispatch", "combine"))
        weights = state(tp, tp, 1, 1, 1).memory_bytes.weights - experts_bytes / tp
        for expert_gpus, count in itertools.product(range(1, most - gpus + 1), range(1, MOST_MICROBATCHES + 1)):
            if model.experts % expert_gpus:
                continue
            theirs = state(1, expert_gpus, 1, batch, expert_gpus)
            memories = (
                replace(own.memory_bytes, weights=weights, kv_cache=count * own.memory_bytes.kv_cache),
                replace(theirs.memory_bytes, weights=experts_bytes / expert_gpus, kv_cache=0.0),
            )
            if any(needed > allowed for needed, allowed in (needed_and_allowed_bytes(workload, m) for m in memories)):
                continue
            theirs_s = sum(op.kernel_time_s for op in theirs.ops[first + 1 : last])
            copies = expert_gpus * (1 - (1 - 1 / expert_gpus) ** 2) * batch * model.hidden  # each token has two experts
            busiest = max(copies / gpus, copies * workload.load_imbalance / expert_gpus)
            way_s = [stage_send_s(workload.hardware, MeshGroup(2, 2), size * busiest) for size in (1, 2)]  # sent in fp8
            period_s = layer_period_s(count, own_s, theirs_s, *way_s)
            tpot_s = in_step_s(times, layers * period_s + count * (own.stage.embedding_s + own.stage.head_s))
            tpot_s += times.step_s + times.sequence_s * math.ceil(count * batch * tp / gpus)
            if tpot_s <= workload.tpot_limit_s:
                rates[gpus, expert_gpus, tp, batch, count] = count * batch / tpot_s / (gpus + expert_gpus)
    found = (best.attention_gpus, best.expert_gpus, best.attention_tp, best.batch, best.microbatches)
    assert len(rates) > 100
    assert best.tokens_per_s_per_gpu == pytest.approx(max(rates.values()), rel=1e-9)
    assert rates[found] == pytest.approx(max(rates.values()), rel=1e-9)


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
        for limit_s in (0.012, 0.05)
    ]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    dense = Question(model="llama_3_1_8b", isl=1000, osl=100, phase="decode", gpus=4).load()
    assert best_afd(dense) is None
