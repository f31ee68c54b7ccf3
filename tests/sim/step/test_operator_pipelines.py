"""Operators in parts: the communication of one part behind the work on another."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.batched import evaluate_many
from sim.config.catalog import CatalogError
from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space
from sim.simulate import evaluate
from sim.step.operator_pipelines import CONTENTION, WorkAndSending, pipelined_s
from sim.strategy import Strategy
from sim.workload import Workload

PROMPTS = Question(model="llama_3_1_70b", phase="prefill", isl=8000, osl=1, engine="none", gpus=8)
DECODING = Question(model="deepseek_v3", phase="decode", isl=4000, osl=500, engine="none", gpus=64)
DECODING = dataclasses.replace(DECODING, expert_exchange="all_to_all", space="extended")


def in_parts(asked: Question, parts: int) -> Workload:
    return dataclasses.replace(asked, overlap_parts=parts).load()


def sequence_parallel(asked: Question, parts: int) -> Evaluation:
    workload = in_parts(asked, parts)
    return evaluate(workload, Strategy(8, 1, 1, 2, megatron_sp_dims(workload.model)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 1e3), min_size=4, max_size=4), st.integers(1, 16))
def test_a_pipeline_takes_no_less_than_its_work_or_its_communication(seconds: list[float], parts: int) -> None:
    whole, part = WorkAndSending(*seconds[:2]), WorkAndSending(*seconds[2:])
    assert pipelined_s(whole, part, parts) >= max(whole)


def test_two_even_stages_in_four_parts_take_five_turns() -> None:
    assert pipelined_s(WorkAndSending(4.0, 4.0), WorkAndSending(1.0, 1.0), 4) == 1 + 3 * CONTENTION + 1
    assert pipelined_s(WorkAndSending(4.0, 4.0), WorkAndSending(1.0, 1.0), 1) == 8.0


def test_what_is_much_longer_is_slowed_down_only_as_long_as_the_other_is_at_it() -> None:
    """Both at 1 / c of their pace until the shorter one is done, the rest alone: by hand, 100 and 1 in two parts."""
    c = CONTENTION
    assert pipelined_s(WorkAndSending(200.0, 2.0), WorkAndSending(100.0, 1.0), 2) == pytest.approx(
        100 + (c * 1 + 100 - 1) + 1
    )


def test_products_hide_a_gather_before_and_a_reduction_behind_but_never_both() -> None:
    apart, together = sequence_parallel(PROMPTS, 1), sequence_parallel(PROMPTS, 8)
    shorter = {
        (op.name, sent.kind): sent.parts
        for op, before in zip(together.ops, apart.ops, strict=True)
        for sent, alone in zip(op.collectives, before.collectives, strict=True)
        if sent.time_s < alone.time_s
    }
    assert {"qkv_proj", "ffn1", "combine"} <= {name for name, _ in shorter}
    assert all(2 <= parts <= 8 for parts in shorter.values())
    products = {"attn_residual": "o_proj", "combine": "ffn2"}
    hiding = [products.get(name, name) for name, _ in shorter]
    assert len(set(hiding)) == len(hiding)
    kernels_s = sum(op.kernel_time_s for op in together.ops)
    sent_s = sum(op.communication_time_s for op in apart.ops)
    assert max(kernels_s, sent_s) <= together.stage.layer_s < apart.stage.layer_s == pytest.approx(kernels_s + sent_s)
    assert together.memory_bytes == apart.memory_bytes


def test_each_operator_has_the_best_of_every_number_of_parts() -> None:
    """More parts that are allowed are never slower, and the best number stays once it is among them."""
    found = [sequence_parallel(PROMPTS, parts) for parts in range(1, 9)]
    taken_s = [each.ttft_s for each in found]
    assert taken_s == sorted(taken_s, reverse=True)
    best = {sent.parts for op in found[-1].ops for sent in op.collectives}
    assert len(best) > 1
    enough = max(best)
    assert taken_s[enough - 1 :] == [taken_s[-1]] * (len(taken_s) - enough + 1)
    assert taken_s[enough - 2] > taken_s[-1]


def test_one_gpu_sends_nothing_and_gains_nothing() -> None:
    strategy = Strategy(1, 1, 1, 4, megatron_dims(PROMPTS.load().model))
    alone, parts = (evaluate(in_parts(PROMPTS, most), strategy) for most in (1, 8))
    assert alone.ttft_s == parts.ttft_s > 0


def test_attention_over_a_shared_context_hides_its_own_exchange() -> None:
    """Helix HOP-B: the parts of some requests travel while others attend; the exchange is never below its last part."""
    asked = Question(model="llama_3_1_405b", phase="decode", isl=8000, osl=500, engine="none", gpus=64, kv_cache="fp8")
    strategy = Strategy(8, 1, 1, 2048, megatron_dims(asked.load().model), 8, 1)
    found = [evaluate(in_parts(asked, most), strategy).ops for most in (1, 8)]
    apart, together = (next(op for op in ops if op.name == "attention") for ops in found)
    assert 0 < together.communication_time_s < apart.communication_time_s
    assert together.kernel_time_s == apart.kernel_time_s
    assert max(sent.parts for sent in together.collectives) > 1


def test_tokens_travel_to_their_experts_behind_the_product_that_takes_them() -> None:
    """Where the exchange hides, dispatch sends nothing by itself; where experts are all here, nothing is exchanged."""
    strategy = Strategy(1, 16, 1, 16 * 128, megatron_dims(in_parts(DECODING, 1).model), dp=16)
    apart, together = (evaluate(in_parts(DECODING, most), strategy).group_ops("experts") for most in (1, 4))
    sent = [{op.name: [each.kind for each in op.collectives] for op in ops} for ops in (apart, together)]
    assert (sent[0]["dispatch"], sent[0]["ffn1"]) == (["all_to_all"], [])
    assert (sent[1]["dispatch"], sent[1]["ffn1"], sent[1]["combine"]) == ([], ["all_to_all"], ["all_to_all"])
    layers_s = [sum(op.time_s for op in ops) for ops in (apart, together)]
    assert layers_s[1] <= layers_s[0]


SMALL = {
    "prompts": dataclasses.replace(PROMPTS, ttft_ms=2000.0),
    "serving": Question(model="qwen3_32b", phase="serve", isl=4000, osl=50, engine="none", gpus=8, tpot_ms=60.0),
    "experts": DECODING,
}


def small(workload: Workload, whole: Space) -> Space:
    """Both ends of every product, with and without a move, and batches around where a part more pays."""
    pinned = {name: table[:1] for name, table in whole.choices.items()}
    free = {name: (0, 1) for name in whole.choices if name in ("qkv_proj", "attn_norm", "ffn1", "ffn2", "o_proj")}
    ep = (8,) if workload.model.is_moe else (1,)
    degrees = {"tp": (2, 8), "ep": ep, "pp": (1,), "cp": (1, 2) if whole.cp != (1,) else (1,)}
    dp = (4,) if workload.model.is_moe else (1,)
    batch = tuple(range(37, 45)) if workload.model.is_moe else (1, 2, 3, 5, 8, 13, 21)
    return dataclasses.replace(whole, **degrees, dp=dp, batch=batch, choices=pinned | free)


@pytest.mark.parametrize("name", SMALL)
def test_the_optimum_is_that_of_brute_force(name: str) -> None:
    workload = in_parts(dataclasses.replace(SMALL[name], space="extended"), 5)
    space = small(workload, extended_space(workload))
    several = [
        Strategy(tp, ep, 1, batch, dims, cp, dp)
        for tp, cp, dp, ep in space.meshes()
        for batch in space.batch
        for dims in itertools.product(*space.choices.values())
    ]
    many = evaluate_many(workload, several)
    best = find_best(space)
    assert best.evaluation is not None
    rates = many.tokens_per_s_per_gpu * many.feasible
    assert best.evaluation.tokens_per_s_per_gpu == rates.max()
    assert best.swept_tokens_per_s_per_gpu == pytest.approx(rates.max(), rel=1e-9)
    for at in range(0, len(several), max(1, len(several) // 10)):
        one = evaluate(workload, several[at])
        assert (one.tpot_s, one.tokens_per_s_per_gpu) == (many.tpot_s[at], many.tokens_per_s_per_gpu[at])


def test_what_no_engine_runs_in_parts_is_refused() -> None:
    with pytest.raises(CatalogError, match="no plan of an engine pipelines operators, and 'vllm' is an engine's space"):
        dataclasses.replace(PROMPTS, engine="vllm", overlap_parts=2).load()
