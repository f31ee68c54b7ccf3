"""A model of several groups of layers is priced as the sum of its layers, each on its own terms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.batched import evaluate_many
from sim.config.catalog import load_model
from sim.config.files import CatalogError
from sim.evaluation import StageBreakdown
from sim.layers.mixers import Attention, GroupedAttention, Indexer, LatentAttention, LinearMixer
from sim.layers.model import FeedForward, LayerGroup, Model
from sim.ops.dims import dims_of
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.step.pipeline import pipeline, stage_layers
from sim.strategy import NONE, Strategy
from sim.workload import GroupChoices, PhaseName, Workload
from tests.questions import question_about

FULL = GroupedAttention(heads=8, kv_heads=2, head_dim=16)
WINDOW = dataclasses.replace(FULL, window=100)
LATENT = LatentAttention(heads=8, head_dim=16, query_rank=24, kv_rank=32, rope_dim=8, value_dim=16)
SPARSE = dataclasses.replace(LATENT, indexer=Indexer(heads=4, head_dim=8, topk=64))
DELTA = LinearMixer("gated_delta", heads=8, key_heads=4, key_dim=16, value_dim=16)
EXPERTS, DENSE = FeedForward(96, 8, 2), FeedForward(256)


def served(base: Workload, *groups: LayerGroup, order: tuple[int, ...] = (), **changes: object) -> Workload:
    """The toy workload with a model of these groups."""
    return dataclasses.replace(base, model=Model("mixed", 64, 1000, groups, order), **changes)  # type: ignore[arg-type]


def layers(attention: Attention, feed_forward: FeedForward = EXPERTS, count: int = 4, name: str = "a") -> LayerGroup:
    return LayerGroup(name, count, attention, feed_forward)


def strategies(workload: Workload, seed: int, count: int) -> list[Strategy]:
    rng, dims = np.random.default_rng(seed), len(dims_of(workload))
    return [
        Strategy(
            int(rng.choice([1, 2, 4])),
            int(rng.choice([1, 2, 4])),
            int(rng.choice([1, 2, 3, 4])),
            int(rng.choice([4, 16])),
            tuple(rng.integers(0, 3, dims).tolist()),
            cp=int(rng.choice([1, 2])),
            dp=int(rng.choice([1, 2, 4])),
        )
        for _ in range(count)
    ]


def test_layers_that_are_alike_cost_the_same_in_one_group_or_two(toy_moe: Workload) -> None:
    one = served(toy_moe, layers(FULL))
    two = served(toy_moe, layers(FULL, count=1), layers(FULL, count=3, name="b"), order=(1, 0, 1, 1))
    for strategy in strategies(one, 3, 40):
        whole, split = evaluate(one, strategy), evaluate(two, strategy)
        assert split.tpot_s == pytest.approx(whole.tpot_s, rel=1e-12)
        assert split.memory_bytes.total == pytest.approx(whole.memory_bytes.total, rel=1e-12)
        assert {each.kind for each in split.violations} == {each.kind for each in whole.violations}


@pytest.mark.parametrize("groups", ["shared", "own"])
def test_a_step_is_the_sum_of_its_layers(toy_moe: Workload, groups: str) -> None:
    window = layers(WINDOW, EXPERTS, 2, "b")
    mixed = served(toy_moe, layers(FULL, DENSE, 3), window, order=(0, 1, 0, 1, 0), groups=groups)
    dense, experts = served(toy_moe, layers(FULL, DENSE, 1)), served(toy_moe, layers(WINDOW, EXPERTS, 1))

    def stage_of(workload: Workload) -> StageBreakdown:
        choice = {"qkv_proj": 1, "attention": 1, "o_proj": 0, "ffn1": 1, "activation": 1, "ffn2": 0}
        dims = tuple(choice.get(dim.op.name, NONE) for dim in dims_of(workload))
        return evaluate(workload, Strategy(2, 1, 1, 16, dims)).stage

    stage, alone = stage_of(mixed), [stage_of(dense), stage_of(experts)]
    assert stage.group_layers == (3, 2)
    assert stage.group_layer_s == pytest.approx([each.layer_s for each in alone], rel=1e-12)
    inside_s = 3 * alone[0].layer_s + 2 * alone[1].layer_s
    assert stage.total_s == pytest.approx(inside_s + stage.embedding_s + stage.head_s, rel=1e-12)


@pytest.mark.parametrize(
    ("feed_forward", "phase", "groups"),
    [
        (EXPERTS, "decode", "shared"),
        (EXPERTS, "serve", "own"),
        (DENSE, "decode", "own"),
        (DENSE, "serve", "shared"),
    ],
)
def test_parts_that_are_layers_of_their_own_cost_what_they_cost_together(
    toy_moe: Workload, feed_forward: FeedForward, phase: PhaseName, groups: GroupChoices
) -> None:
    traffic = {"phase": phase, "prompt_tokens": 96, "output_tokens": 32}
    whole = served(toy_moe, layers(FULL, feed_forward), **traffic)
    mixer, network = LayerGroup("mixer", 4, FULL, None), LayerGroup("network", 4, None, feed_forward)
    parts = served(toy_moe, mixer, network, order=(0, 1) * 4, groups=groups, **traffic)
    assert parts.model.parameters == whole.model.parameters
    assert parts.model.active_parameters == whole.model.active_parameters
    names = [dim.name for dim in dims_of(whole)]
    for drawn in strategies(whole, 7, 60):
        if drawn.pp == 3 or (feed_forward is DENSE and drawn.ep > 1):
            continue
        # What the last layer hands on counts as if one like it followed: alike for both if both parts begin and end so.
        choices = dict(zip(names, drawn.dims, strict=True))
        choices |= {"ffn_norm": choices["attn_norm"], "attn_residual": choices["combine"]}
        strategy = dataclasses.replace(drawn, dims=tuple(choices.values()), cp=1, dp=None)
        one, two = evaluate(whole, strategy), evaluate(parts, strategy)
        assert two.tpot_s == pytest.approx(one.tpot_s, rel=1e-9)
        assert two.ttft_s == pytest.approx(one.ttft_s, rel=1e-9)
        assert two.memory_bytes.total == pytest.approx(one.memory_bytes.total, rel=1e-12)
        assert {each.kind for each in two.violations} == {each.kind for each in one.violations}


def test_a_part_that_is_not_there_costs_nothing_and_has_no_choices(toy_moe: Workload) -> None:
    mixer, network = LayerGroup("mixer", 3, FULL, None), LayerGroup("network", 1, None, EXPERTS)
    workload = served(toy_moe, mixer, network, order=(0, 0, 1, 0), groups="own")
    assert [dim.name for dim in dims_of(workload)] == [
        *("mixer." + name for name in ("attn_norm", "qkv_proj", "attention", "o_proj", "attn_residual")),
        *("network." + name for name in ("ffn_norm", "router", "dispatch", "ffn1", "activation", "ffn2", "combine")),
    ]
    evaluation = evaluate(workload, Strategy(2, 2, 1, 16, (NONE,) * 12))
    exchanges = [op for op in evaluation.group_ops("mixer") if any(c.kind == "all_to_all" for c in op.collectives)]
    assert exchanges == []
    more = dataclasses.replace(workload, model=Model("more", 64, 1000, (dataclasses.replace(mixer, count=4), network)))
    grown = evaluate(more, evaluation.strategy).memory_bytes.weights - evaluation.memory_bytes.weights
    assert grown == pytest.approx(FULL.parameters(64) * 1 + 64 * 2, rel=1e-6)  # fp8 projections, one norm in bf16


def test_where_groups_lay_the_stream_differently_its_move_is_charged(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, DENSE, 1), layers(FULL, DENSE, 1, "b"), groups="own")
    whole, tokens = (NONE,) * 10, (0,) * 10

    def tpot_s(first: tuple[int, ...], second: tuple[int, ...]) -> float:
        return evaluate(workload, Strategy(4, 1, 1, 16, first + second)).tpot_s

    # From whole to shares is a slice; from shares to whole an all-gather, once in the layers and once at the LM head.
    same, apart = tpot_s(tokens, tokens), tpot_s(whole, whole)
    assert tpot_s(whole, tokens) < same + apart
    assert tpot_s(tokens, whole) != pytest.approx(tpot_s(whole, tokens), rel=1e-9)


def test_every_op_of_every_group_is_explained(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, DENSE, 1, "dense"), layers(DELTA, EXPERTS, 3, "delta"))
    ops = evaluate(workload, Strategy(2, 1, 1, 16, (NONE,) * 12)).ops
    assert [op.group for op in ops] == ["dense"] * 10 + ["delta"] * 12


# --- caches -------------------------------------------------------------------------------------------


def kv_bytes(base: Workload, attention: Attention, context: int, tp: int = 1, cp: int = 1) -> float:
    workload = served(dataclasses.replace(base, context_tokens=context), layers(attention, count=1))
    heads = {"qkv_proj": 1, "attention": 1, "o_proj": 0}
    dims = tuple(heads.get(dim.name, NONE) for dim in dims_of(workload))
    return evaluate(workload, Strategy(tp, 1, 1, 16, dims, cp=cp, dp=1)).memory_bytes.kv_cache


def test_a_window_bounds_the_cache_and_sinks_add_to_it(toy_moe: Workload) -> None:
    token = 2 * 2 * 16  # keys and values of two heads of 16, in fp8
    assert kv_bytes(toy_moe, FULL, 1000) == 16 * 1000 * token
    assert kv_bytes(toy_moe, WINDOW, 1000) == 16 * 100 * token
    assert kv_bytes(toy_moe, WINDOW, 50) == 16 * 50 * token
    assert kv_bytes(toy_moe, dataclasses.replace(WINDOW, sinks=4), 1000) == 16 * 104 * token


def test_a_window_makes_prompts_see_its_pairs_alone_and_takes_no_longer_than_none(toy_moe: Workload) -> None:
    def attended(window: int) -> tuple[float, float]:
        model = layers(dataclasses.replace(FULL, heads=64, kv_heads=8, head_dim=128, window=window), count=1)
        workload = served(toy_moe, model, phase="prefill", prompt_tokens=8192, output_tokens=1, context_tokens=8192)
        op = evaluate(workload, Strategy(1, 1, 1, 8, (NONE,) * 12)).ops[2]
        return op.work_flops, op.kernel_time_s

    windows = (128, 512, 2048, 4096, 6144, 7500, 8191, 8192)
    flops, times = zip(*(attended(window) for window in (*windows, 0)), strict=True)
    for window, counted in zip(windows, flops, strict=False):
        assert counted == pytest.approx(flops[-1] * (8192 * window - window**2 / 2) / (8192**2 / 2))
    assert list(times) == sorted(times)
    assert times[-2] == times[-1] == pytest.approx(times[-3], rel=1e-3)


def test_a_latent_is_every_gpus_and_context_parallelism_cuts_it(toy_moe: Workload) -> None:
    whole = kv_bytes(toy_moe, LATENT, 1000)
    assert whole == 16 * 1000 * (32 + 8)
    assert kv_bytes(toy_moe, LATENT, 1000, tp=4) == whole
    assert kv_bytes(toy_moe, LATENT, 1000, cp=4) == whole / 4
    assert kv_bytes(toy_moe, SPARSE, 1000) == whole + 16 * 1000 * (8 + 4)  # the indexer's key in fp8, and its scale


def test_a_state_goes_with_its_heads_and_not_with_the_context(toy_moe: Workload) -> None:
    state, convolution = 8 * 16 * 16 * 4, 3 * (2 * 4 * 16 + 8 * 16) * 2
    assert kv_bytes(toy_moe, DELTA, 10) == kv_bytes(toy_moe, DELTA, 1000) == 16 * (state + convolution)
    assert kv_bytes(toy_moe, DELTA, 1000, tp=4) == kv_bytes(toy_moe, DELTA, 1000) / 4


def test_sparse_attention_reads_its_choice_and_the_index_of_all(toy_moe: Workload) -> None:
    def attention(mixer: Attention, context: int) -> tuple[float, tuple[str, ...]]:
        workload = served(dataclasses.replace(toy_moe, context_tokens=context), layers(mixer, count=1))
        evaluation = evaluate(workload, Strategy(1, 1, 1, 16, (NONE,) * 12))
        return evaluation.ops[2].traffic_bytes, evaluation.extrapolated

    grown = attention(SPARSE, 2000)[0] - attention(SPARSE, 1000)[0]
    assert grown == pytest.approx(16 * 1000 * (8 + 4))  # keys of the indexer alone
    assert any("sparse attention" in what for what in attention(SPARSE, 1000)[1])


def test_a_prompt_longer_than_what_an_indexer_picks_has_the_pairs_that_its_tokens_see(toy_moe: Workload) -> None:
    def flops(mixer: Attention, tokens: int) -> float:
        model = layers(mixer, count=1)
        workload = served(toy_moe, model, phase="prefill", prompt_tokens=tokens, output_tokens=1, context_tokens=tokens)
        return evaluate(workload, Strategy(1, 1, 1, 4, (NONE,) * 12)).ops[2].work_flops

    topk, pair = 64, 2 * 8 * (32 + 8 + 32)  # of 8 heads, in the latent's width: scores with the rotary key, and values
    for tokens in (65, 100, 1000):
        index = 4 * tokens**2 / 2 * 2 * 4 * 8
        seen = sum(min(token, topk) for token in range(tokens)) + tokens / 2  # itself by half, as without an indexer
        assert flops(SPARSE, tokens) - index == pytest.approx(4 * seen * pair, rel=0.01)


@pytest.mark.parametrize("attention", [FULL, WINDOW, LATENT, SPARSE, DELTA])
def test_more_tokens_never_take_less(toy_moe: Workload, attention: Attention) -> None:
    for phase in ("decode", "serve", "prefill"):
        workload = served(
            dataclasses.replace(toy_moe, phase=phase, prompt_tokens=256, output_tokens=64, context_tokens=256),
            layers(attention),
            layers(FULL, DENSE, 1, "dense"),
        )
        times = [evaluate(workload, Strategy(2, 2, 1, batch, (1,) * 12)).stage.total_s for batch in (1, 2, 7, 64, 200)]
        assert times == sorted(times)
        assert times[0] > 0


# --- pipelines ----------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(layers=st.integers(1, 130), pp=st.integers(1, 130))
def test_stages_share_all_layers_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    pp = min(pp, layers)
    shares = stage_layers(layers, pp)
    assert (sum(shares), len(shares)) == (layers, pp)
    assert max(shares) - min(shares) <= 1
    assert shares[-1] <= min(shares[:-1], default=shares[-1])  # the LM head makes up for it


def test_the_slowest_stage_sets_the_pace_of_an_uneven_pipeline(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, count=7))
    stage = evaluate(workload, Strategy(1, 1, 3, 16, (NONE,) * 12)).stage  # 2, 3 and 2 layers
    ends_s = [2 * stage.layer_s + stage.embedding_s, 3 * stage.layer_s, 2 * stage.layer_s + stage.head_s]
    assert stage.total_s == pytest.approx(max(ends_s) + stage.send_recv_s, rel=1e-12)
    assert stage.layers == [2, 3, 2][int(np.argmax(ends_s))]


def test_the_fullest_stage_sets_the_memory(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, count=7))

    def memory(pp: int) -> tuple[float, float]:
        kept = evaluate(workload, Strategy(1, 1, pp, 16, (NONE,) * 12)).memory_bytes
        return kept.weights, kept.kv_cache

    (all_weights, all_kv), vocabulary = memory(1), 1000 * 64 * 2
    layer = (all_weights - 2 * vocabulary) / 7
    fullest = max([(3 * layer, 3), (2 * layer + vocabulary, 2)], key=lambda each: each[0] + each[1] * 3 * all_kv / 7)
    assert memory(3)[0] == pytest.approx(fullest[0])
    assert memory(3)[1] == pytest.approx(fullest[1] * 3 * all_kv / 7)


def test_stages_are_looked_at_once_per_kind(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, DENSE, 2), layers(FULL, EXPERTS, 22, "b"))
    kinds = pipeline(workload, 4)
    assert {each.layers for each in kinds} == {(2, 4), (0, 6)}
    assert sum(each.last for each in kinds) == 1


# --- experts ------------------------------------------------------------------------------------------


def test_the_fullest_rank_holds_the_experts_that_do_not_divide(toy_moe: Workload) -> None:
    workload = served(toy_moe, layers(FULL, FeedForward(96, 8, 2)))

    def kept(ep: int) -> float:
        return evaluate(workload, Strategy(1, ep, 1, 16, (NONE,) * 12)).memory_bytes.weights

    expert = 4 * 3 * 64 * 96  # of four layers, gated, in fp8
    assert kept(1) - kept(3) == pytest.approx((8 - 3) * expert)
    assert kept(4) == pytest.approx(kept(3) - expert)


def test_more_stages_than_layers_are_not_counted_one_by_one(toy_dense: Workload) -> None:
    assert pipeline(toy_dense, 10**15) == pipeline(toy_dense, 10) == pipeline(toy_dense, 6)


def test_a_stage_of_the_head_alone_may_be_the_slowest_of_a_model_of_several_groups(toy_moe: Workload) -> None:
    groups = (layers(FULL, count=2), layers(WINDOW, DENSE, 2, "b"))
    workload = dataclasses.replace(toy_moe, model=Model("wide", 64, 10**7, groups))
    strategies = [Strategy(1, 1, pp, 4, (NONE,) * 12) for pp in (4, 5, 6, 9)]
    many = evaluate_many(workload, strategies)
    for index, strategy in enumerate(strategies):
        evaluation = evaluate(workload, strategy)
        assert many[index] == evaluation
        assert evaluation.stage.total_s == pytest.approx(
            evaluation.stage.head_s + evaluation.stage.send_recv_s + evaluation.stage.layers * evaluation.stage.layer_s
        )
        assert [each.kind for each in evaluation.violations if each.kind == "layers"] == ["layers"] * (strategy.pp > 4)


def test_redundant_experts_are_stored_and_even_out_the_ranks() -> None:
    """Of 256 experts over 32 GPUs, 32 copies: nine on each instead of eight, the busiest rank with fewer rows."""
    question = question_about("deepseek_v3", isl=1024, osl=256, gpus=64)
    found = [
        evaluate(
            dataclasses.replace(question, redundant_experts=copies).load(),
            Strategy(1, 32, 1, 4096, megatron_dims(load_model("deepseek_v3"))),
        )
        for copies in (0, 32, 64)
    ]
    expert = 3 * 7168 * 2048  # fp8
    weights = [each.memory_bytes.weights for each in found]
    assert weights[1] - weights[0] == weights[2] - weights[1] == 58 * expert
    ffn = [{op.name: op.kernel_time_s for op in each.group_ops("experts")} for each in found]
    assert ffn[0]["activation"] > ffn[1]["activation"] > ffn[2]["activation"]
    with pytest.raises(CatalogError, match="has no experts"):
        question_about("qwen3_32b", isl=1024, osl=256, redundant_experts=8).load()


def test_experts_and_their_copies_are_what_ranks_share() -> None:
    workload = question_about("mixtral_8x7b", isl=1024, osl=256, redundant_experts=8).load()
    assert workload.degrees.ep == (1, 2, 4, 8, 16)
    kinds = [
        {
            violation.kind
            for violation in evaluate(workload, Strategy(1, ep, 1, 256, megatron_dims(workload.model))).violations
        }
        for ep in (16, 32)
    ]
    assert ["experts" in each for each in kinds] == [False, True]
