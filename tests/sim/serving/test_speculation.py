"""Speculative decoding: its limits, its cost by hand, and what it does to a steady state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.config.files import CatalogError
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims
from sim.optimum.exact_search import find_best
from sim.optimum.landscape import find_optimum
from sim.optimum.spaces import extended_space, joint_space
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables, Speculation, Workload
from tests.questions import question_about


def speculating(workload: Workload, count: int, share: float, draft: object = None) -> Workload:
    return replace(workload, speculation=Speculation(count, (share,) * count, draft))  # type: ignore[arg-type]


def with_mtp(workload: Workload, layers: int = 1) -> Workload:
    return replace(workload, model=replace(workload.model, mtp_layers=layers))


def run(workload: Workload, tp: int = 2, pp: int = 1, batch: int = 8) -> Evaluation:
    return evaluate(workload, Strategy(tp, 1, pp, batch, megatron_dims(workload.model)))


def test_a_free_draft_that_is_always_right_gains_nearly_all_its_tokens() -> None:
    """Of a step that waits for weights; and one that is never right costs what verifying costs."""
    workload = load_workload("llama_3_1_405b_8k")
    plain, right, wrong = (
        run(each, 8, 2) for each in (workload, speculating(workload, 1, 1.0), speculating(workload, 1, 0.0))
    )
    assert 1.8 < right.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu <= 2
    assert 0.9 < wrong.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu <= 1
    assert wrong.tpot_s == pytest.approx(2 * right.tpot_s, rel=1e-12)
    assert wrong.tpot_s == pytest.approx(2 * wrong.stage.total_s, rel=1e-12)
    assert any(what.startswith("several tokens of a sequence") for what in right.extrapolated)


def test_tokens_gained_are_those_up_to_the_first_wrong_one(toy_dense: Workload) -> None:
    per_place = Speculation(3, (0.9, 0.5, 0.2))
    assert per_place.tokens_per_step == pytest.approx(1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.2)
    rates = [run(speculating(toy_dense, 3, share)).tokens_per_s_per_gpu for share in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert rates == sorted(rates)


def test_verifying_reads_the_cache_once(toy_dense: Workload) -> None:
    plain, verifying = run(toy_dense, 1), run(speculating(toy_dense, 3, 0.5), 1)
    for one, four in zip(plain.ops, verifying.ops, strict=True):
        if one.name in ("qkv_proj", "ffn1"):
            assert four.work_flops == 4 * one.work_flops
    (one,), (four,) = ([op for op in each.ops if op.name == "attention"] for each in (plain, verifying))
    cache = 8 * 1000 * 2 * 32  # sequences, tokens, KV heads, a key and a value in fp8
    assert four.work_flops == 4 * one.work_flops
    assert four.traffic_bytes - cache == pytest.approx(4 * (one.traffic_bytes - cache), rel=1e-9)
    assert verifying.memory_bytes.kv_cache == plain.memory_bytes.kv_cache * 1003 / 1000


def test_mtp_is_one_more_layer_and_a_head_per_token(toy_dense: Workload) -> None:
    workload = with_mtp(toy_dense)
    free, own = run(speculating(workload, 1, 0.5), 1), run(speculating(workload, 1, 0.5, "mtp"), 1)
    plain, vocabulary = run(workload, 1), 1000 * 64 * 2
    layer = (plain.memory_bytes.weights - 2 * vocabulary) / 4
    assert own.memory_bytes.weights - plain.memory_bytes.weights == layer + 2 * 64 * 64
    assert own.memory_bytes.kv_cache == free.memory_bytes.kv_cache * 5 / 4
    assert own.stage.total_s - free.stage.total_s == pytest.approx(own.stage.draft_s, rel=1e-9)
    joined_s = 2 * 16 * 128 * 64 / 2.4e12  # 16 tokens through a projection from 2 * 64 to 64, bound by FLOPs
    joined_s = max(joined_s, (16 * 128 * 2 + 128 * 64 + 16 * 64 * 2) / 0.5e12)
    head_s = run(workload, 1).stage.head_s  # one token per sequence
    assert own.stage.draft_s == pytest.approx(own.stage.layer_s + own.stage.embedding_s + head_s + joined_s, rel=1e-6)


def test_more_layers_of_mtp_are_stored_but_no_more_than_drafted_tokens(toy_dense: Workload) -> None:
    def weights(layers: int, count: int) -> float:
        return run(speculating(with_mtp(toy_dense, layers), count, 0.5, "mtp"), 1).memory_bytes.weights

    assert weights(3, 3) - weights(2, 3) == weights(2, 3) - weights(1, 3)
    assert weights(3, 1) == weights(1, 1) == weights(1, 3)


def test_a_draft_model_takes_its_own_decode_steps(toy_dense: Workload) -> None:
    (group,) = toy_dense.model.groups
    small = replace(toy_dense.model, name="small", groups=(replace(group, count=1),), order=())
    alone = run(replace(toy_dense, model=small, context_tokens=1000))
    drafted = run(speculating(toy_dense, 3, 0.5, small))
    assert drafted.stage.draft_s == pytest.approx(3 * alone.stage.total_s, rel=1e-12)
    assert drafted.memory_bytes.weights == run(toy_dense).memory_bytes.weights + alone.memory_bytes.weights


def test_the_last_stage_drafts(toy_dense: Workload) -> None:
    """Memory of the fullest stage, of two that have a vocabulary and two layers each."""
    workload = speculating(with_mtp(toy_dense), 1, 0.5, "mtp")
    stage, vocabulary = run(workload, 1, 2).stage, 1000 * 64 * 2
    assert stage.total_s == pytest.approx(
        2 * stage.layer_s + stage.head_s + stage.send_recv_s + stage.draft_s, rel=1e-12
    )
    one = run(toy_dense, 1).memory_bytes.weights
    assert run(workload, 1, 2).memory_bytes.weights == (one - 2 * vocabulary) * 3 / 4 + vocabulary + 2 * 64 * 64


def test_requests_are_replaced_as_fast_as_they_gain_tokens(toy_dense: Workload) -> None:
    serving = speculating(replace(toy_dense, phase="serve", prompt_tokens=96, output_tokens=32), 1, 0.8)
    state = batching(serving, 8, 1)
    assert state.mixed is not None
    assert state.pace.mixed_share * state.mixed.prompts * 32 == pytest.approx(8 * 1.8)
    assert state.tokens == pytest.approx(8 * 1.8)
    prefill = replace(serving, phase="prefill")
    drafted, free = (run(speculating(with_mtp(prefill), 1, 0.8, draft)) for draft in ("mtp", None))
    assert drafted.ttft_s > free.ttft_s == run(replace(prefill, speculation=None)).ttft_s


@pytest.mark.parametrize("phase", ["decode", "serve", "prefill"])
@pytest.mark.parametrize("draft", ["mtp", None, "model"])
def test_many_at_once_are_one_by_one(toy_moe: Workload, phase: str, draft: str | None) -> None:
    traffic = {"phase": phase, "prompt_tokens": 96, "output_tokens": 32} if phase != "decode" else {}
    own = with_mtp(replace(toy_moe, space="extended", **traffic), 2)
    workload = speculating(own, 2, 0.7, toy_moe.model if draft == "model" else draft)
    rng, space = np.random.default_rng(0), extended_space(workload)
    strategies = [space.sample(rng) for _ in range(12)]
    many, each = evaluate_many(workload, strategies), [evaluate(workload, one) for one in strategies]
    assert many.tokens_per_s_per_gpu.tolist() == [one.tokens_per_s_per_gpu for one in each]
    assert many.memory_bytes.tolist() == [one.memory_bytes.total for one in each]
    assert many.tpot_s.tolist() == [one.tpot_s for one in each]
    assert many.excess.tolist() == [one.excess for one in each]


def test_the_sweep_and_the_search_find_the_same_best(toy_dense: Workload) -> None:
    workload = speculating(with_mtp(toy_dense), 2, 0.7, "mtp")
    workload = replace(workload, degrees=DegreeTables((2,), (1,), (1, 2), (4, 16)), tpot_slo_s=1e-4)
    swept, found = find_optimum(workload), find_best(joint_space(workload))
    assert found.evaluation is not None
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(swept.fastest, rel=5e-4)


def declared(**fields: object) -> Workload:
    return load_workload("gpt_moe_1_2t_16k", model="deepseek_v3", speculation=fields)


def test_a_file_says_what_is_drafted() -> None:
    by_place = declared(draft_tokens=2, accepted=(0.9, 0.7)).speculation
    assert by_place == Speculation(2, (0.9, 0.7), "mtp")
    assert declared(draft_tokens=3, acceptance=0.5, draft="ngram").speculation == Speculation(3, (0.5,) * 3, None)
    asked = question_about("llama_3_1_70b", isl=1024, osl=256, draft_tokens=3, acceptance="0.5", draft="llama_3_1_8b")
    small = asked.load().speculation
    assert small is not None
    assert getattr(small.draft, "name", None) == "llama_3_1_8b"
    assert declared(draft_tokens=0).speculation is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_tokens": 1, "draft": "ngram"}, "acceptance is missing"),
        ({"draft_tokens": 1, "acceptance": 0.5, "accepted": (0.5,)}, "give acceptance"),
        ({"draft_tokens": 2, "accepted": (0.5,)}, "expected 2 rates, one per drafted token, got 1"),
        ({"draft_tokens": 1, "acceptance": 1.5}, "at most 1"),
        ({"draft_tokens": 1, "acceptance": 0.5, "draft": "lama_3_1_8b"}, "did you mean 'llama_3_1_8b'"),
        (
            {"draft_tokens": 1, "acceptance": 0.5, "draft": "llama_3_1_8b"},
            "llama_3_1_8b has a vocabulary of 128,256 tokens, deepseek_v3 one of 129,280",
        ),
    ],
)
def test_what_says_nothing_of_a_draft_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CatalogError, match=message.replace("(", r"\(")):
        declared(**fields)


def test_a_model_without_mtp_needs_a_draft() -> None:
    def drafted(**more: object) -> Workload:
        return question_about("llama_3_1_70b", isl=1024, osl=256, draft_tokens=1, acceptance="0.5", **more).load()

    with pytest.raises(CatalogError, match="name a model, or"):
        drafted()
    with pytest.raises(CatalogError, match="has no layers of multi-token prediction"):
        drafted(draft="mtp")
    assert drafted(draft="ngram").speculation is not None
