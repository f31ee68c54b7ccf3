"""Many strategies at once are one by one, to the last bit."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import batched
from sim.arrays import add_up
from sim.batched import Strategies, evaluate_many, step_seconds
from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.engines.engine_registry import in_space
from sim.layers.mixers import GroupedAttention, LinearMixer
from sim.layers.model import FeedForward, LayerGroup, Model
from sim.ops.dims import dims_of
from sim.ops.heuristics import megatron_dims
from sim.optimum.spaces import extended_space, space_of
from sim.serving.phases import SERVE, batching, register_phase, withdraw_phase
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import Speculation
from tests.questions import question_about
from tests.sim.drawn import drawn_strategy, drawn_workload

WORKLOADS, FIRST = int(os.environ.get("RAYSEARCH_FUZZ", "3")), int(os.environ.get("RAYSEARCH_FUZZ_FROM", "0"))
EACH = int(os.environ.get("RAYSEARCH_FUZZ_EACH", "24"))
FIGURES = ("tokens_per_s_per_gpu", "tpot_s", "ttft_s", "running", "feasible", "excess")
UNLIMITED = {"tpot_ms": 0, "ttft_ms": 0}
SERVED = question_about(
    "qwen3_235b_a22b", phase="serve", isl=1024, osl=1024, engine="vllm", kv_cache="fp8", weights="fp8", **UNLIMITED
)
LATENT = question_about("deepseek_v3", phase="serve", isl=4096, osl=512, engine="sglang", kv_cache="fp8", **UNLIMITED)
PROMPTS = question_about("deepseek_v3", phase="prefill", isl=4096, osl=512)


@pytest.fixture(autouse=True)
def few_meshes_are_priced_together(monkeypatch):
    monkeypatch.setattr(batched, "_LEAST_MESHES", 2)
    monkeypatch.setattr(batched, "_LEAST_LANES", 1)


def agree(workload, strategies):
    many, each = evaluate_many(workload, strategies), [evaluate(workload, strategy) for strategy in strategies]
    for name in FIGURES:
        np.testing.assert_array_equal(getattr(many, name), [getattr(one, name) for one in each], name)
    np.testing.assert_array_equal(many.memory_bytes, [one.memory_bytes.total for one in each])
    return each


@pytest.mark.parametrize("workload", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k", SERVED, LATENT, PROMPTS], ids=str)
@pytest.mark.parametrize("space", ["extended", "vllm"])
def test_it_gives_the_figures_of_one_by_one_to_the_last_bit(workload, space):
    known = workload.load() if isinstance(workload, Question) else load_workload(workload)
    known = in_space(known, space)
    rng = np.random.default_rng(0)
    each = agree(known, [space_of(known).sample(rng) for _ in range(4)])
    assert not all(one.feasible for one in each)


@pytest.mark.parametrize("workload", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k", LATENT, PROMPTS], ids=str)
def test_the_parts_of_a_step_add_up_to_it(workload):
    known = workload.load() if isinstance(workload, Question) else load_workload(workload)
    known = replace(known, prompt_wait_steps=0)
    rng = np.random.default_rng(0)
    drawn = Strategies.of([space_of(known).sample(rng) for _ in range(20)])
    many, parts = evaluate_many(known, drawn), step_seconds(known, drawn)
    fits = np.flatnonzero(many.running == drawn.batch)  # else fewer run at once
    whole_s = (
        sum([*parts.kernels.values(), *parts.collectives.values()]) + parts.moves + parts.vocabulary + parts.engine
    )
    states = [batching(known, each.batch, each.attention_dp) for each in drawn]
    made = np.array([state.tokens for state in states]) * drawn.pp
    gpus = drawn.tp * drawn.cp * drawn.dp * drawn.pp
    assert len(fits) > 3
    np.testing.assert_allclose((made / gpus / whole_s)[fits], many.tokens_per_s_per_gpu[fits])


def test_so_it_is_of_any_workload_in_every_phase_and_under_every_engine(monkeypatch):
    """`RAYSEARCH_FUZZ` says how many workloads are drawn, `RAYSEARCH_FUZZ_FROM` the first of them.

    `RAYSEARCH_FUZZ_EACH` says how many strategies of each, a multiple of 4.

    Strategies are of few degrees and many choices, or each of degrees of its own; meshes are priced each alone, several
    at once, or as many as branch alike.
    """
    for seed in range(FIRST, FIRST + WORKLOADS):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(batched, "_LEAST_MESHES", (1, 3, 96)[seed % 3])
        monkeypatch.setattr(batched, "_LEAST_LANES", (1, 2, 6)[seed % 3])
        known, many = drawn_workload(rng), 4 if seed % 2 else EACH
        dims = np.array([drawn_strategy(known, rng, fits=False).dims for _ in range(8)])
        degrees = [drawn_strategy(known, rng, fits=False) for _ in range(many)]
        drawn = [each for each in degrees for _ in range(EACH // many)]
        mixed = [np.choose(rng.integers(8, size=dims.shape[1]), dims).tolist() for _ in drawn]
        agree(known, [replace(each, dims=tuple(row)) for each, row in zip(drawn, mixed, strict=True)])


@pytest.mark.parametrize("hardware", ["h100_sxm", "l40s"])
def test_so_it_is_of_limits_that_are_kept_with_a_confidence(hardware):
    """Of strategies that keep them as predicted some do not surely, on L40S for what their kernels may be off."""
    asked = replace(SERVED, hardware=hardware, isl=4000, gpus=16, batches="any", tpot_ms=60.0, ttft_ms=4000.0)
    even, rng = asked.load(), np.random.default_rng(7)
    space = space_of(even)
    meshes = [(part.only_dims, mesh) for part in space.parts() for mesh in part.meshes() if math.prod(mesh[:3]) <= 16]
    drawn = [meshes[at] for at in rng.integers(len(meshes), size=60)]
    several = [
        Strategy(tp, ep, 1, int(rng.integers(1, 60)), dims, cp, None if (cp, dp) == (1, ep) else dp)
        for dims, (tp, cp, dp, ep) in drawn
    ]
    kept = list(itertools.compress(several, evaluate_many(even, several).feasible))[:8]
    each = agree(replace(even, confidence=0.9), kept + several[::12])
    assert 0 < sum(one.feasible for one in each[: len(kept)]) < len(kept)


@pytest.mark.parametrize("wait", [0, 25])
def test_so_it_is_where_prompts_wait_for_each_other(wait):
    question = replace(LATENT, isl=2048, osl=64)
    known = replace(replace(question, prompt_wait_steps=wait).load(), space="extended")
    rng = np.random.default_rng(3)
    each = agree(known, [space_of(known).sample(rng) for _ in range(6)])
    assert len({one.strategy.attention_dp for one in each}) > 3


def test_so_it_is_where_half_batches_overlap():
    known = replace(LATENT, phase="decode", expert_exchange="all_to_all", two_batch_overlap=True, gpus=32).load()
    dims, rng = megatron_dims(known.model), np.random.default_rng(4)
    meshes = [(1, 8, 8, 256), (1, 8, 8, 9000), (2, 16, 8, 512), (1, 16, 16, 4000), (4, 8, 2, 100)]
    each = agree(known, [Strategy(tp, ep, 1, int(rng.integers(1, most)), dims, dp=dp) for tp, ep, dp, most in meshes])
    apart = replace(known, two_batch_overlap=False)
    assert all(one.tpot_s != evaluate(apart, one.strategy).tpot_s for one in each)


def test_so_it_is_of_a_phase_whose_own_time_grows_with_the_batch():
    def steady_state(known, batch, dp):
        state = SERVE.steady_state(known, batch, dp)
        return replace(state, times=replace(state.times, step_s=1e-3 + 1e-5 * batch, sequence_s=1e-6 * dp))

    register_phase(replace(SERVE, name="slow", steady_state=steady_state))
    try:
        known = replace(SERVED.load(), phase="slow", space="extended")
        rng = np.random.default_rng(5)
        each = agree(known, [space_of(known).sample(rng) for _ in range(12)])
    finally:
        withdraw_phase("slow")
    assert any(one.running < one.strategy.batch for one in each)


DENSE_FIRST = question_about("deepseek_v3", phase="serve", isl=4096, osl=512)
WINDOWS = question_about("gpt_oss_120b", isl=4096, osl=512)


@pytest.mark.parametrize("workload", [DENSE_FIRST, WINDOWS], ids=str)
@pytest.mark.parametrize("groups", ["shared", "own"])
def test_so_it_is_of_layers_that_differ(workload, groups):
    known = replace(in_space(workload.load(), "extended"), groups=groups)
    rng = np.random.default_rng(2)
    agree(known, [space_of(known).sample(rng) for _ in range(4)])


@pytest.mark.parametrize("groups", ["shared", "own"])
def test_so_it_is_of_layers_of_one_part_in_stages_of_many_kinds(toy_moe, groups):
    full = GroupedAttention(heads=8, kv_heads=2, head_dim=16)
    parts = (
        LayerGroup("state", 4, LinearMixer("mamba2", 8, 4, 16, 16), None),
        LayerGroup("dense", 2, None, FeedForward(96)),
        LayerGroup("experts", 3, None, FeedForward(96, 4, 2)),
        LayerGroup("full", 2, full, None),
    )
    order = (0, 2, 0, 3, 1, 0, 2, 2, 3, 0, 1)
    model = Model("parts", 64, 1000, parts, order, mtp_layers=1)
    known = replace(
        toy_moe, model=model, groups=groups, space="extended", speculation=Speculation(2, (0.8, 0.6), "mtp")
    )
    rng = np.random.default_rng(3)
    drawn = [space_of(known).sample(rng) for _ in range(20)]
    agree(known, [replace(each, pp=int(rng.integers(1, 12)), tp=min(each.tp, 8)) for each in drawn])


@pytest.mark.parametrize(
    ("workload", "feasible", "rate", "excess"),
    [
        ("gpt_moe_1_2t_16k", 37, 19293.01131087843, 380.3536240740525),
        ("llama_3_1_405b_8k", 0, 15850.013978700425, 869.9890905391072),
        (SERVED, 0, 11358.163043090653, 931.0604131080418),
        (LATENT, 0, 2773.1815595899807, 1322.7196581313299),
    ],
    ids=str,
)
def test_figures_of_many_strategies_stay_as_they_were(workload, feasible, rate, excess):
    """Sums over strategies that no space bounds; one strategy and many give them alike."""
    known = workload.load() if isinstance(workload, Question) else load_workload(workload)
    rng = np.random.default_rng(4)
    strategies = [
        Strategy(
            2 ** int(rng.integers(1, 6)),
            2 ** int(rng.integers(0, 5)),
            int(rng.integers(1, 9)),
            int(2 ** rng.uniform(0, 11)),
            tuple(rng.integers(0, 3, len(dims_of(known))).tolist()),
        )
        for _ in range(250)
    ]
    many = evaluate_many(known, strategies)
    found = many.feasible.sum(), math.fsum(many.tokens_per_s_per_gpu), math.fsum(many.excess)
    assert found == (feasible, pytest.approx(rate, rel=1e-12), pytest.approx(excess, rel=1e-12))


def test_the_largest_meshes_of_shipped_spaces_agree_and_are_strategies():
    known = load_workload("gpt_moe_1_2t_1m_extended")
    space, dims = space_of(known), (2,) * 12
    largest = [Strategy(max(space.tp), ep, 1, 64, dims, max(space.cp), max(space.dp)) for ep in (1, 2, 4, 8, 16)]
    for strategy in largest:
        check_strategy(known, strategy)
    agree(known, largest)


def test_feasible_strategies_agree_as_well(moe):
    dims = megatron_dims(moe.model)
    each = agree(
        moe, [Strategy(8, ep, pp, batch, dims) for ep in (4, 16) for pp in (1, 2, 4) for batch in (8, 64, 512)]
    )
    assert sum(one.feasible for one in each) > 5


def test_requests_that_wait_for_room_agree(moe):
    served = SERVED.load()
    each = agree(served, [Strategy(4, 1, 1, 2**k, megatron_dims(served.model)) for k in range(4, 13)])
    assert any(one.running < one.strategy.batch for one in each)


def test_degrees_that_divide_nothing_agree(toy_moe, toy_dense):
    """With three experts' groups of five, seven stages: every degree's limit is broken, and heads and tokens too."""
    for workload in (toy_moe, toy_dense):
        ops = len(extended_space(workload).choices)
        strategies = [
            Strategy(tp, ep, pp, batch, (dim,) * ops, cp, dp)
            for tp in (3, 5)
            for ep in (1, 3)
            for pp in (1, 7)
            for batch in (1, 5)
            for dim in (0, 1, 2)
            for cp, dp in ((1, None), (3, 2), (1, 3))
        ]
        kinds = {violation.kind for one in agree(workload, strategies) for violation in one.violations}
        assert {"gpus", "layers", "heads", "tokens", "meshes", "context"} <= kinds


def test_a_batch_agrees_whatever_was_asked_before(moe, monkeypatch):
    """Where tables have no room for all, some are made anew."""
    monkeypatch.setattr(batched, "_TABLE_BYTES", 1)
    moe = replace(moe)  # whose tables nobody has made yet
    rng = np.random.default_rng(1)
    strategies = [space_of(moe).sample(rng) for _ in range(40)]
    agree(moe, strategies)
    agree(moe, [space_of(moe).sample(rng) for _ in range(12)] + strategies[:5])
    agree(moe, strategies)


def test_a_few_are_many_too(toy_moe):
    strategies = [Strategy(2, 2, 1, 4, (1,) * 12), Strategy(8, 4, 4, 16, (0,) * 12)]
    agree(toy_moe, strategies)
    assert evaluate_many(toy_moe, strategies)[1] == evaluate(toy_moe, strategies[1])


def test_one_is_the_whole_evaluation(toy_moe):
    strategies = [Strategy(2, 2, 1, batch, (1,) * 12) for batch in range(1, 9)]
    many = evaluate_many(toy_moe, strategies)
    assert many[3] == evaluate(toy_moe, strategies[3])
    assert [one.strategy for one in many[2:4]] == strategies[2:4]
    assert len(many) == 8


def test_columns_are_the_strategies(toy_moe):
    rng = np.random.default_rng(2)
    strategies = [extended_space(toy_moe).sample(rng) for _ in range(20)]
    columns = Strategies.of(strategies)
    assert [(one, one.attention_dp) for one in columns] == [
        (replace(one, dp=None if not one.extended else one.dp), one.attention_dp) for one in strategies
    ]
    np.testing.assert_array_equal(evaluate_many(toy_moe, columns).tpot_s, evaluate_many(toy_moe, strategies).tpot_s)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(0, 1, 1, 1, (0,) * 12), "tp: expected a whole number from 1"),
        (Strategy(1, 1, 1, 1, (0,) * 11), "expected 12 dims"),
        (Strategy(1, 1, 1, 1, (0,) * 11 + (3,)), "the dim of combine must be 0"),
        (Strategy(1, 1, 1, 1, (0,) * 11 + (99,)), "the dim of combine must be 0"),
    ],
)
def test_what_is_no_strategy_is_refused(toy_moe, strategy, message):
    right = Strategy(1, 1, 1, 1, (0,) * 12)
    with pytest.raises(StrategyError, match=message):
        evaluate_many(toy_moe, [right] * 6 + [strategy])


def test_none_at_all_is_refused(toy_moe):
    with pytest.raises(ValueError, match="expected at least one strategy"):
        evaluate_many(toy_moe, [])


@given(st.lists(st.lists(st.floats(-1e15, 1e15), min_size=12, max_size=12), min_size=1, max_size=5))
def test_rows_add_up_as_python_adds_them(rows):
    assert add_up(list(np.array(rows).T)).tolist() == [sum(row) for row in rows]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1e-17, math.log(3), 2e16]), min_size=9, max_size=9), min_size=1))
def test_excesses_add_up_as_fsum_adds_them(rows):
    assert batched._total(np.array(rows).T).tolist() == [math.fsum(row) for row in rows]


def test_what_was_interrupted_is_worked_out_again(monkeypatch):
    known = load_workload("gpt_moe_1_2t_16k")
    rng = np.random.default_rng(11)
    several = [space_of(known).sample(rng) for _ in range(30)]
    evaluate_many(replace(known, name="another"), several)  # what is known of this workload begins anew

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(batched, "stream_to_s", interrupt)
        with pytest.raises(KeyboardInterrupt):
            evaluate_many(known, several)
    agree(known, several)
