"""The searcher `prior`: what every searcher must do, and truths of its parts."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs import StrategyEnv, StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import Outcome
from raysearch.searchers.prior.black_box_belief import Answer, BlackBoxBelief
from raysearch.searchers.prior.candidate_pool import CandidatePool, first_pool
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.gaussian_process import ResidualProcess, reproportioned
from raysearch.searchers.prior.network import (
    FACTOR_COUNT,
    OUTPUTS,
    SHIPPED_PRIOR,
    ResidualKernel,
    corrected,
    network_outputs,
    read_prior,
    write_prior,
)
from raysearch.searchers.prior.prior_searcher import PriorOptions, PriorSearcher
from raysearch.searchers.prior.simulated_terms import carried_over
from raysearch.searchers.prior.strategy_features import CHOICE_PLACES, FEATURE_TERMS, OPS, SHARES, WorkloadFeatures
from raysearch.searchers.registry import make_searcher
from raysearch.testing.searcher_suite import SearcherSuite
from sim.batched import Strategies, evaluate_many, step_seconds
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.layers.choices import declare_choice, withdraw_choice
from sim.ops.heuristics import megatron_sp_dims
from sim.ops.layers import MOE_LAYER
from sim.optimum.spaces import space_of
from sim.prices.calibration import Calibration
from sim.simulate import degree_limits, evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.raysearch.forging import WRONG, places, replaced
from tests.raysearch.fuzzing import INPUTS, forged_arrays, now_and_then, tried

MOE = load_workload("qwen3_235b_a22b_16k")
KERNEL = ResidualKernel(shared=0.01, terms=0.0, degrees=0.01, choices=0.01, length=2.0, ops=5.0, own=0.0)


class TestPrior(SearcherSuite):
    searcher = "prior"
    budget = 12  # five by the policy, then by what the answers say


def first_calls(workload: Workload, calls: int, simulator=evaluate, **options) -> float:
    """Best tokens/s/GPU of a run."""
    env = StrategyEnv(workload, evaluate=simulator)
    searcher = make_searcher("prior", env.space, seed=0, budget=calls, **options)
    observation, _ = env.reset()
    for _ in range(calls):
        action = searcher.ask(observation)
        assert action is not None
        observation, reward, _, _, info = env.step(action)
        searcher.tell(action, Outcome.of(observation, reward, info))
    return env.best


# --- features -----------------------------------------------------------------------------------------


def columns(workload: Workload, *strategies: Strategy):
    space = StrategySpace(workload)
    return WorkloadFeatures(workload).of(space.strategies(np.stack([space.encode(each) for each in strategies])))


def test_a_strategy_means_the_same_in_every_space() -> None:
    strategy = Strategy(4, 8, 2, 256, megatron_sp_dims(MOE.model))
    joint, extended = (columns(replace(MOE, space=space), strategy) for space in ("joint", "extended"))
    for one, other in zip(joint, extended, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(joint.inputs[0, CHOICE_PLACES], [2, 3, 1, 8, 0, 3])


def test_groups_that_choose_alike_mean_what_shared_choices_mean() -> None:
    shared = load_workload("qwen3_235b_a22b_16k", model="deepseek_v3")
    own = replace(shared, groups="own")
    dims = megatron_sp_dims(shared.model)
    by_op = dict(zip((op.name for op in MOE_LAYER.ops), dims, strict=True))
    spread = tuple(by_op[dim.partition(".")[2]] for dim in space_of(own).choices)
    one, other = columns(shared, Strategy(4, 8, 1, 256, dims)), columns(own, Strategy(4, 8, 1, 256, spread))
    np.testing.assert_allclose(one.inputs, other.inputs, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
def test_the_roofline_is_below_the_simulators_time_and_near_its_memory(name: str) -> None:
    workload = load_workload(name)
    space, rng = StrategySpace(workload), np.random.default_rng(0)
    strategies = space.strategies(np.array([space.sample(rng) for _ in range(200)]))
    features, predicted = WorkloadFeatures(workload).of(strategies), evaluate_many(workload, strategies)
    step = features.log_tokens - np.log(predicted.tokens_per_s_per_gpu)
    assert np.median(step - features.log_step_s) > 0
    near = predicted.excess < 1
    assert (
        np.quantile(np.abs(np.log(predicted.memory_bytes / workload.hbm_limit_bytes) - features.log_memory)[near], 0.9)
        < 0.15
    )


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        ("llama_3_1_405b", 126 * 4 * 128 * 128 * 1000),  # scores and values of 128 heads of 128
        ("deepseek_v3", 61 * 2 * 128 * (576 + 512) * 1000),  # as absorbed: 576 cached, 512 of them values
    ],
)
def test_a_token_attends_to_the_context_with_so_many_flops(model: str, flops: float) -> None:
    workload = replace(load_workload("qwen3_235b_a22b_16k", model=model), context_tokens=1000)
    features = WorkloadFeatures(workload)
    assert features._mixer_flops == flops


def test_all_reduces_by_nccl_are_distinguished() -> None:
    by_nccl = load_workload("qwen3_235b_a22b_40k_nccl")
    curves = by_nccl.hardware.curves
    assert curves is not None
    hardware = replace(by_nccl.hardware, curves=curves.under(all_reduce=curves.engine))
    strategy = Strategy(4, 8, 1, 256, megatron_sp_dims(by_nccl.model))
    one, other = (columns(workload, strategy).inputs for workload in (by_nccl, replace(by_nccl, hardware=hardware)))
    assert np.abs(one - other).max() == 1


def test_a_choice_that_somebody_declared_is_searched_by_the_simulators_terms_and_refused_by_the_networks() -> None:
    norm = MOE_LAYER.op("attn_norm")  # a process has few numbers for declared choices of an op
    declare_choice(norm, MOE_LAYER, "striped", "SS(0,2) -> SS(0,2)")
    workload = replace(MOE, space="extended")
    try:
        with pytest.raises(InputError, match=r"no choices that somebody declared.*terms=simulator.*genetic"):
            make_searcher("prior", StrategySpace(workload), seed=0, budget=1, terms="network")
        space = StrategySpace(workload)
        belief, dims = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space), list(megatron_sp_dims(MOE.model))
        dims[0] = norm.choices[-1]
        striped = Strategy(4, 8, 2, 256, tuple(dims))
        _, expected = belief.predict(space.encode(striped)[None])
        np.testing.assert_allclose(expected.log_tpot_s, math.log(evaluate(workload, striped).tpot_s))
        assert first_calls(workload, 1) > 0
    finally:
        withdraw_choice(norm, "striped")


# --- the simulator's terms ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt_moe_1_2t_16k", {}),
        ("llama_3_1_405b_8k", {"space": "extended"}),
        ("qwen3_235b_a22b_16k", {"phase": "serve", "prompt_tokens": 4000, "output_tokens": 500, "engine": "vllm"}),
        ("qwen3_235b_a22b_16k", {"phase": "prefill", "prompt_tokens": 4000, "output_tokens": 1, "engine": "vllm"}),
    ],
)
def test_what_the_simulator_expects_is_what_it_says(name: str, options) -> None:
    workload = load_workload(name, **options)
    space, rng = StrategySpace(workload), np.random.default_rng(0)
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space)
    actions = CandidateStrategies(space, ()).spread(40, rng)
    features, expected = belief.predict(actions)
    evaluated = evaluate_many(workload, space.strategies(actions))
    np.testing.assert_allclose(np.exp(features.log_tokens - expected.log_step_s), evaluated.tokens_per_s_per_gpu)
    if evaluated.tpot_s.any():
        np.testing.assert_allclose(np.exp(expected.log_tpot_s), evaluated.tpot_s)
    late = np.maximum(
        expected.log_tpot_s - math.log(workload.tpot_limit_s), expected.log_ttft_s - belief._log_ttft_limit
    )
    kept = (expected.kept > 0) & (expected.log_memory <= 0) & (late <= 0)
    assert (kept == evaluated.feasible).mean() > 0.97  # limits are kept with a confidence, which no mean says
    np.testing.assert_allclose(np.exp(features.inputs[:, SHARES]).sum(1), 1, atol=0.01)


def test_of_a_machine_as_if_nobody_had_measured_it_only_its_rates_are_known() -> None:
    one = load_workload("qwen3_235b_a22b_16k", "h200_sxm")
    curves = one.hardware.curves
    assert curves is not None
    slower = {
        name: {**record, "terms": [2 * each for each in record["terms"]]} if "terms" in record else record
        for name, record in curves.calibration.data["series"].items()
    }
    other = Calibration("slower", {**curves.calibration.data, "series": slower}, "slower", curves.calibration.rest)
    measured_anew = replace(one, hardware=replace(one.hardware, curves=curves.under(other)), config_hash="anew")
    strategy = Strategy(4, 8, 1, 256, megatron_sp_dims(MOE.model))
    assert evaluate(measured_anew, strategy).tpot_s > 1.1 * evaluate(one, strategy).tpot_s
    blind = [evaluate(carried_over(each), strategy).tpot_s for each in (one, measured_anew)]
    assert blind[0] == blind[1] != evaluate(one, strategy).tpot_s
    assert evaluate(carried_over(MOE), strategy).tpot_s == evaluate(MOE, strategy).tpot_s  # measured on the H100


def test_of_an_engine_as_if_nobody_had_measured_it_only_its_rules_are_known() -> None:
    served = {"phase": "serve", "prompt_tokens": 4000, "output_tokens": 500}
    vllm, sglang = (load_workload("qwen3_235b_a22b_16k", engine=engine, **served) for engine in ("vllm", "sglang"))
    blind, strategy = carried_over(sglang), Strategy(4, 8, 1, 64, megatron_sp_dims(MOE.model))
    assert blind.engine is not None
    assert vllm.engine is not None
    assert sglang.engine is not None
    assert blind.engine.times == vllm.engine.times != sglang.engine.times
    assert blind.engine.memory == sglang.engine.memory
    parts = [step_seconds(each, Strategies.of([strategy])) for each in (blind, vllm, sglang)]
    attention_s = [each.kernels["attention"].item() for each in parts]
    assert attention_s[0] == attention_s[1] != attention_s[2]


def test_where_the_simulator_is_right_its_optimum_is_the_first_call(tiny_workload: Path) -> None:
    from raysearch.optima.named_spaces import optimum_value

    workload = load_workload(str(tiny_workload))
    assert first_calls(workload, 1, policy="none") == pytest.approx(optimum_value(workload))


# --- the file -----------------------------------------------------------------------------------------


def test_candidates_begin_with_the_best_strategies_of_several_degrees() -> None:
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space := StrategySpace(MOE))
    found = [space.decode(action) for action in belief.best_of_meshes()]
    assert len({(each.tp, each.ep, each.pp) for each in found}) == len(found) > 8
    assert first_calls(MOE, 1) > 0.99 * max(evaluate(MOE, each).tokens_per_s_per_gpu for each in found)


def test_a_prior_is_read_as_it_was_written(tmp_path: Path) -> None:
    shipped = read_prior(SHIPPED_PRIOR)
    write_prior(tmp_path / "again.safetensors", shipped.header, shipped.arrays)
    again = read_prior(tmp_path / "again.safetensors")
    inputs = np.random.default_rng(0).normal(size=(5, len(shipped.mean))).astype(np.float32)
    np.testing.assert_array_equal(network_outputs(again.arrays, inputs), network_outputs(shipped.arrays, inputs))
    assert again.header == shipped.header


def test_the_shipped_prior_says_what_made_it() -> None:
    header = read_prior(SHIPPED_PRIOR).header
    assert header.command == "raysearch pretrain default"
    assert header.figures["workloads"] >= 1000
    assert all(set(choices) <= set(OPS) for choices in header.pool)
    assert SHIPPED_PRIOR.stat().st_size < 20_000_000


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"pickle", b"\xff" * 64])
def test_what_is_no_prior_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="no prior that `raysearch pretrain` wrote"):
        read_prior(path)


NOTHING = np.zeros(0, np.float32)
PARTS = {"mean": np.zeros(3), "scale": np.ones(3), "weight0": np.ones((3, OUTPUTS)), "bias0": np.zeros(OUTPUTS)}


def test_a_forged_prior_is_searched_with_or_refused(tmp_path: Path) -> None:
    shipped, path = read_prior(SHIPPED_PRIOR), tmp_path / "prior.safetensors"
    header = shipped.header.model_dump(mode="json")
    header["pool"] = header["pool"][:3]
    for seed in range(INPUTS):
        rng = random.Random(seed)
        searched = now_and_then(rng)
        arrays = dict(shipped.arrays if searched else PARTS)
        name = rng.choice([*arrays, "weight7"])
        known = np.asarray(arrays.get(name, [0.0]))
        for_it = [*(known * factor for factor in (0, -1, 1e5, 1e30, np.nan)), known[..., :1], known.T, np.zeros((0, 0))]
        arrays[name] = rng.choice([known, *for_it])
        made = replaced(header, rng.choice(list(places(header))), rng.choice(WRONG)) if seed % 2 else header
        forged_arrays(path, made, arrays, rng)
        read_prior.cache_clear()
        tried(lambda: read_prior(path))
        if searched:
            tried(lambda: make_searcher("prior", StrategySpace(MOE), seed=0, budget=9, weights=str(path)).ask(NOTHING))


@pytest.mark.parametrize("name", ["pipe", "zero"])
def test_what_is_no_file_is_no_prior(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="no regular file"):
        read_prior(tmp_path / name)


def test_a_prior_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the prior"):
        make_searcher("prior", StrategySpace(MOE), seed=0, budget=1, weights=str(tmp_path / "none.safetensors"))


# --- residuals ----------------------------------------------------------------------------------------


def strategies_of(count: int, seed: int = 0) -> np.ndarray:
    space, rng = StrategySpace(MOE), np.random.default_rng(seed)
    return WorkloadFeatures(MOE).of(space.strategies(np.array([space.sample(rng) for _ in range(count)]))).inputs


def test_without_answers_nothing_is_expected_to_be_missed() -> None:
    residuals = ResidualProcess(KERNEL)
    mean, sd = residuals.expected(strategies_of(4))
    np.testing.assert_array_equal(mean, np.zeros(4))
    variance = sum(weight * (0.01 * each.machine**2 + 0.02 * each.own**2) for weight, each in residuals.weighed)
    np.testing.assert_allclose(sd, np.sqrt(variance))
    assert sum(weight for weight, _ in residuals.weighed) == pytest.approx(1)
    assert residuals.scales.machine == residuals.scales.own == 1


def test_an_answer_is_believed_where_it_was_given_and_doubted_less_far_away() -> None:
    inputs, residuals = strategies_of(6), ResidualProcess(KERNEL)
    residuals.learn(inputs[:3], np.array([0.1, 0.12, 0.08]))
    mean, sd = residuals.expected(inputs)
    np.testing.assert_allclose(mean[:3], [0.1, 0.12, 0.08], atol=0.01)
    assert (sd[:3] < 0.02).all()
    assert (sd[3:] > 0.02).all()


def test_a_machine_that_is_slower_throughout_is_found_to_be() -> None:
    residuals = ResidualProcess(KERNEL)
    residuals.learn(strategies_of(6), np.full(6, 0.5))
    mean, _ = residuals.expected(strategies_of(20, seed=1))
    np.testing.assert_allclose(mean, 0.5, atol=0.15)
    assert residuals.scales.machine > 1


def test_two_odd_answers_leave_room_for_the_black_box_being_as_expected() -> None:
    inputs, residuals = strategies_of(8), ResidualProcess(KERNEL)
    residuals.learn(inputs[:2], np.array([0.3, -0.2]))
    assert len({scales.own for _, scales in residuals.weighed}) > 1
    each = residuals.under_each(inputs[2:])
    mean, sd = residuals.expected(inputs[2:])
    np.testing.assert_allclose(mean, sum(weight * own for weight, own, _ in each))
    lowest, highest = (pick([own_sd for _, _, own_sd in each], axis=0) for pick in (np.min, np.max))
    assert (lowest <= sd).all()
    assert (lowest < highest).all()


def test_answers_that_differ_by_chance_alone_are_found_to_be_noisy() -> None:
    residuals, rng = ResidualProcess(KERNEL), np.random.default_rng(0)
    residuals.learn(np.repeat(strategies_of(10), 4, axis=0), rng.normal(0, 0.05, 40))
    assert residuals.scales.noise > 0.01


def test_a_step_is_the_sum_of_its_terms_each_by_its_factor() -> None:
    inputs, out = strategies_of(5), np.zeros((5, OUTPUTS))
    np.testing.assert_allclose(corrected(inputs, out)[0], 0, atol=0.01)  # shares are rounded up to a least one
    out[:, :FACTOR_COUNT] = np.log(np.arange(FACTOR_COUNT) + 1)
    step, shares = corrected(inputs, out)
    np.testing.assert_allclose(
        np.exp(step), (np.exp(inputs[:, SHARES]) * (np.arange(FACTOR_COUNT) + 1)).sum(1), rtol=1e-6
    )
    np.testing.assert_allclose(np.exp(shares).sum(1), 1, atol=0.01)


def test_slow_links_are_inferred_from_strategies_that_send_less_than_those_that_they_tell_of() -> None:
    inputs, sent = strategies_of(12), np.linspace(0.05, 0.7, 12)
    terms, place = np.exp(inputs[:, SHARES]), FEATURE_TERMS.index("tensor_messages")
    terms[:, place] = 0
    terms *= ((1 - sent) / terms.sum(1))[:, None]
    terms[:, place] = sent
    inputs[:, SHARES] = np.log(np.maximum(terms, 1e-3))
    slower = np.log(1 - sent + 10 * sent)  # ten times as slow
    residuals = ResidualProcess(KERNEL.model_copy(update={"terms": 0.08, "choices": 1e-4, "degrees": 1e-4}))
    residuals.learn(inputs[:4], slower[:4])
    mean, _ = residuals.expected(inputs)
    assert slower[3] < 0.6 * slower[-1]
    np.testing.assert_allclose(mean, slower, atol=0.45)
    assert mean[-1] > slower[3] + 0.3
    assert residuals.factors.argmax() == place


def test_a_machine_that_is_as_expected_leaves_strategies_as_they_are() -> None:
    inputs = strategies_of(5)
    there, beyond = reproportioned(inputs, np.zeros(FACTOR_COUNT))
    np.testing.assert_allclose(there, inputs, atol=0.01)
    np.testing.assert_allclose(beyond, 0, atol=0.01)


def test_expected_improvement_is_the_mean_of_what_the_root_of_tokens_gains_over_errors_drawn_at_random() -> None:
    space, rng = StrategySpace(MOE), np.random.default_rng(0)
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space, "network")
    pool = first_pool(belief, space, CandidateStrategies(space, ()), rng).best(30)
    step = float(np.exp(pool.features.log_tokens[20] - pool.predicted.log_step_s[20]))
    belief.note(pool.actions[20], Answer(step / 2, 0.0, step / 2))  # a step takes twice as long as expected
    belief.learn()
    posterior = pool.posterior()
    features, predicted = pool.features, pool.predicted
    gained, kept = np.zeros(30), np.zeros(30)
    for weight, error, sd in belief._time.under_each(features.inputs):
        drawn = error[:, None] + sd[:, None] * rng.standard_normal((30, 20_000))
        there = np.exp(features.log_tokens[:, None] - predicted.log_step_s[:, None] - drawn) / (step / 2)
        in_time = predicted.log_tpot_s[:, None] + drawn <= math.log(MOE.tpot_limit_s)
        gained += weight * (np.maximum(np.sqrt(there) - 1, 0) * in_time).mean(1)
        kept += weight * in_time.mean(1)
    np.testing.assert_allclose(posterior.in_time, kept, atol=0.02)
    np.testing.assert_allclose(posterior.improvement, gained * posterior.kept, rtol=0.1, atol=0.01 * gained.max())


def test_before_anything_is_in_time_many_tokens_that_are_surely_late_are_worth_less_than_few_that_may_not_be() -> None:
    space, rng = StrategySpace(MOE), np.random.default_rng(0)
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space)
    pool = CandidatePool(belief, CandidateStrategies(space, ()).spread(1500, rng))
    late = pool.predicted.log_tpot_s - math.log(MOE.tpot_limit_s)
    fits = pool.posterior().kept > 0.5
    surely, perhaps = fits & (late > 0.6) & (late < 1), fits & (late > -0.4) & (late < -0.2)
    assert pool.posterior().log_tokens[surely].max() > pool.posterior().log_tokens[perhaps].min()
    for row in np.argsort(late)[:: len(late) // 8]:  # all is a tenth slower than expected, without doubt
        simulated = float(np.exp(pool.features.log_tokens[row] - pool.predicted.log_step_s[row] - 0.1))
        belief.note(pool.actions[row], Answer(0.0, max(float(late[row]) + 0.1, 0.01), simulated))
    belief.learn()
    improvement = pool.posterior().improvement
    assert improvement[surely].max() < improvement[perhaps].min()


def test_while_no_call_was_in_time_the_next_has_the_most_expected_tokens_of_what_is_more_likely_than_not() -> None:
    space = StrategySpace(MOE)
    searcher = PriorSearcher(space, seed=0, budget=9, options=PriorOptions())
    pool = CandidatePool(searcher.belief, CandidateStrategies(space, ()).spread(600, np.random.default_rng(0)))
    row = int(pool.posterior().improvement.argmax())
    searcher.belief.note(pool.actions[row], Answer(0.0, 1.0, float(np.exp(pool.posterior().log_tokens[row] - 1.5))))
    searcher.belief.learn()
    believed = pool.posterior()
    likely = np.flatnonzero(believed.in_time * believed.kept >= 0.5)
    best = int(likely[believed.improvement[likely].argmax()])
    np.testing.assert_array_equal(searcher._chosen(pool), pool.actions[best])
    assert best != believed.improvement.argmax()  # which bets
    nearby = searcher._candidates.neighbours(pool.actions[row])  # of the call that was late
    looked_at = {action.tobytes() for action in searcher._around()}
    assert len(nearby) > 20
    assert {action.tobytes() for action in nearby} <= looked_at


# --- candidates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"space": "extended"}, {"space": "vllm"}, {"batch": "any"}], ids=str)
def test_candidates_break_no_limit_of_the_degrees_and_nothing_that_an_engine_refuses(options) -> None:
    workload = load_workload("qwen3_235b_a22b_16k", **options)
    space, rng = StrategySpace(workload), np.random.default_rng(0)
    candidates = CandidateStrategies(space, ())
    drawn = candidates.with_dims(candidates.spread(40, rng))
    drawn = np.concatenate([drawn, candidates.mutated(drawn, 100, rng), candidates.elsewhere(drawn, 30, rng)])
    assert len(drawn) > 60
    for action in drawn[:: max(1, len(drawn) // 60)]:
        assert not degree_limits(workload, space.decode(action))


def test_no_candidate_takes_more_gpus_than_there_are_with_all_its_replicas() -> None:
    workload, rng = load_workload("traffic_gpt_oss_120b"), np.random.default_rng(0)
    space = StrategySpace(workload)
    candidates = CandidateStrategies(space, ())
    drawn = candidates.spread(200, rng)
    drawn = np.concatenate([drawn, candidates.mutated(drawn, 200, rng), candidates.neighbours(drawn[0])])
    needed = [each.served.gpus(each.gpus) for each in map(space.decode, drawn)]
    assert max(needed) == workload.max_gpus
    assert {1, 2, 4} == {space.decode(action).served.replicas for action in drawn}


# --- the search ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_near_the_optimum_of_a_model_that_it_never_saw_after_thirty_calls() -> None:
    from raysearch.optima.named_spaces import optimum_value

    assert first_calls(MOE, 30) > 0.9 * (optimum_value(MOE) or 0.0)


def half_as_fast(workload: Workload, strategy: Strategy) -> Evaluation:
    """Our simulator on a machine whose every answer comes at half the speed."""
    faster = replace(workload, tpot_slo_s=workload.tpot_slo_s / 2, config_hash="faster")
    found = evaluate(faster, strategy)
    return replace(found, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu / 2, tpot_s=found.tpot_s * 2)


@pytest.mark.slow
def test_a_black_box_that_is_half_as_fast_costs_a_few_calls_and_no_optimum() -> None:
    from raysearch.optima.named_spaces import optimum_value

    harder = replace(MOE, tpot_slo_s=MOE.tpot_slo_s / 2, config_hash=f"{MOE.config_hash}-half")
    assert first_calls(MOE, 40, half_as_fast) > 0.95 * (optimum_value(harder) or 0.0) / 2
