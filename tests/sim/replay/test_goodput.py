"""Goodput under random arrivals, and the best of a space."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from envs.calls import dims_text, parse_dims_text
from envs.space import StrategySpace
from envs.strategy_env import StrategyEnv
from raysearch.base.file_io import as_strategy, strategy_dict
from sim.batched import evaluate_many
from sim.config.catalog import CatalogError, load_workload
from sim.config.question import Question
from sim.ops.heuristics import megatron_dims
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, joint_space, space_of
from sim.replay.drive import as_they_come
from sim.replay.goodput import evaluate_in_phase, goodput, served_plan
from sim.replay.goodput_search import best_goodput, goodput_bound
from sim.replay.replica import Deployed
from sim.replay.replica_sets import prefill_replicas
from sim.replay.requests import Lengths, Requests
from sim.simulate import evaluate
from sim.strategy import ReplicaSet, Strategy
from sim.workload import OpenLoop, ServingTables, Workload

ASKED = Question(
    model="qwen3_32b",
    isl=4000,
    osl=200,
    tpot_ms=30,
    ttft_ms=500,
    gpus=8,
    phase="traffic",
    confidence=0.5,
    batches="powers_of_two",
)
FEW_REQUESTS = OpenLoop(requests=50)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return dataclasses.replace(ASKED.load(), open_loop=FEW_REQUESTS)


def every(space: Space) -> list[Strategy]:
    return [
        Strategy(tp, ep, pp, batch, dims, 1, None)
        for tp, ep, pp, batch in itertools.product(space.tp, space.ep, space.pp, space.batch)
        for dims in itertools.product(*space.choices.values())
    ]


def test_branch_and_bound_finds_the_optimum_of_brute_force_in_an_engines_space(workload: Workload) -> None:
    space = dataclasses.replace(space_of(workload), batch=(16, 64))
    found = best_goodput(space)
    worth = [
        evaluation.tokens_per_s_per_gpu
        for strategy in every(space)
        if not space.outside(strategy) and (evaluation := evaluate_in_phase(workload, strategy)).feasible
    ]
    assert found.proven
    assert found.gap == 0.0
    assert found.tokens_per_s_per_gpu == max(worth)
    assert found.replayed < len(worth)


def test_branch_and_bound_finds_the_optimum_of_brute_force_among_choices_of_ops(workload: Workload) -> None:
    asked = dataclasses.replace(workload, space="joint")
    joint = joint_space(asked)
    choices = {name: table[:2] if name in ("attention", "ffn1") else table[:1] for name, table in joint.choices.items()}
    space = dataclasses.replace(joint, tp=(2, 4), pp=(1,), batch=(8, 32), choices=choices)
    worth = [found.tokens_per_s_per_gpu for each in every(space) if (found := evaluate_in_phase(asked, each)).feasible]
    assert len(worth) > 4
    assert best_goodput(space).tokens_per_s_per_gpu == max(worth)


def test_the_gap_only_closes_and_its_bound_is_first_the_steady_states_optimum(workload: Workload) -> None:
    space = space_of(workload)
    seen = []
    best_goodput(space, progress=seen.append)
    steady = find_best(space).evaluation
    assert steady is not None
    assert seen[0].bound <= steady.tokens_per_s_per_gpu
    assert all(before.bound >= after.bound for before, after in itertools.pairwise(seen))
    one = best_goodput(space, replays=1)
    assert (one.replayed, one.proven) == (1, False)
    assert one.tokens_per_s_per_gpu < seen[-1].tokens_per_s_per_gpu <= one.bound


def test_no_goodput_of_random_strategies_is_above_their_steady_state(workload: Workload) -> None:
    strategies = [each for each in every(space_of(workload)) if evaluate(workload, each).feasible]
    for strategy in strategies[:: max(1, len(strategies) // 2)]:
        found = goodput(workload, strategy)
        assert found.evaluation.tokens_per_s_per_gpu <= evaluate(workload, strategy).tokens_per_s_per_gpu
        assert found.ttft_s <= workload.ttft_slo_s
        assert found.tpot_s <= workload.tpot_slo_s


@pytest.mark.parametrize(
    ("model", "engine", "degrees"),
    [
        ("qwen3_32b", "vllm", {"tp": 2, "batch": 32}),
        ("qwen3_32b", "vllm", {"tp": 2, "pp": 2, "batch": 16}),
        ("qwen3_32b", "sglang", {"tp": 1, "pp": 4, "batch": 8}),
        ("qwen3_32b", "trtllm", {"tp": 4, "pp": 2, "batch": 16}),
        ("qwen3_235b_a22b", "vllm", {"tp": 1, "ep": 16, "dp": 16, "batch": 64}),
        ("qwen3_235b_a22b", "sglang", {"tp": 4, "ep": 4, "dp": 4, "batch": 32}),
    ],
)
def test_not_even_a_flood_is_served_faster_than_the_steady_state_at_its_best(
    model: str, engine: str, degrees: dict[str, int]
) -> None:
    asked = dataclasses.replace(ASKED, model=model, engine=engine, gpus=32, tpot_ms=None, ttft_ms=None).load()
    strategy = dataclasses.replace(Strategy(1, 1, 1, 1, space_of(asked).parts()[0].only_dims), **degrees)
    requests = Requests.drawn(np.zeros(10 * strategy.batch * strategy.pp), Lengths(4000), Lengths(200), 0)
    outcome = as_they_come(Deployed.of(dataclasses.replace(asked, phase="serve"), strategy), requests)
    served = len(requests) * 200 / outcome.end_s / strategy.gpus
    assert served <= 1.01 * evaluate(asked, strategy).tokens_per_s_per_gpu


def test_the_bound_of_a_space_with_experts_and_pipelines_is_that_of_brute_force() -> None:
    shipped = load_workload("mixtral_8x22b_8k")
    limits = {"tpot_slo_s": 0.03, "ttft_slo_s": 1.0}
    asked = dataclasses.replace(shipped, phase="traffic", prompt_tokens=2000, output_tokens=200, **limits)
    joint = joint_space(asked)
    usual = dict(zip(joint.choices, ((choice,) for choice in megatron_dims(asked.model)), strict=True))
    choices = usual | {"attention": (0, 1, 2), "attn_norm": (0, 2), "combine": (0, 2)}
    degrees = {"tp": (1, 2, 4), "ep": (1, 2, 4), "pp": (1, 2, 4), "batch": (1, 2, 3, 4, 8, 16, 33, 64)}
    space = dataclasses.replace(joint, **degrees, choices=choices)
    found = evaluate_many(asked, every(space))
    best = find_best(space).evaluation
    assert best is not None
    assert 0 < found.feasible.sum() < len(found)
    assert best.tokens_per_s_per_gpu == pytest.approx(found.tokens_per_s_per_gpu[found.feasible].max(), rel=1e-12)


def test_goodput_is_the_same_again_and_falls_with_limits_and_bursts(workload: Workload) -> None:
    strategy = dataclasses.replace(every(space_of(workload))[0], tp=4, batch=32)
    workload = dataclasses.replace(workload, open_loop=OpenLoop(requests=100))
    usual = goodput(workload, strategy)
    tighter = goodput(dataclasses.replace(workload, ttft_slo_s=0.2), strategy)
    bursty = goodput(dataclasses.replace(workload, open_loop=OpenLoop(requests=100, cv=4.0)), strategy)
    median = goodput(dataclasses.replace(workload, open_loop=OpenLoop(requests=100, percentile=50)), strategy)
    assert goodput(workload, strategy) == usual
    assert tighter.share < usual.share
    assert bursty.share < usual.share < 1
    assert median.share >= usual.share


def test_without_limits_goodput_is_the_steady_state(workload: Workload) -> None:
    loose = dataclasses.replace(workload, ttft_slo_s=math.inf, tpot_slo_s=math.inf)
    strategy = dataclasses.replace(every(space_of(workload))[0], tp=4, batch=8)
    assert goodput(loose, strategy).evaluation == evaluate(loose, strategy)


def test_a_limit_that_no_load_keeps_is_a_violation_with_its_percentile(workload: Workload) -> None:
    strategy = dataclasses.replace(every(space_of(workload))[0], tp=1, batch=1)
    steady = evaluate(workload, strategy)
    tight = dataclasses.replace(workload, ttft_slo_s=steady.ttft_s * 1.001, tpot_slo_s=math.inf)
    (violation,) = goodput(tight, strategy).violations
    assert violation.kind == "ttft"
    assert violation.needed > violation.allowed == tight.ttft_slo_s
    assert "at percentile 99" in violation.message


def test_environments_of_the_phase_answer_with_goodput(workload: Workload) -> None:
    env = StrategyEnv(workload)
    strategy = dataclasses.replace(every(space_of(workload))[0], tp=4, batch=32)
    assert env.evaluate(strategy) == goodput(workload, strategy).evaluation


def test_an_open_loop_is_of_phase_traffic_alone(tmp_path) -> None:
    text = (
        'name = "mine"\nmodel = "llama_3_1_8b"\nhardware = "h100_sxm"\nphase = "{}"\nengine = "vllm"\n'
        "prompt_tokens = 1000\noutput_tokens = 100\nmax_gpus = 4\n"
        '[precisions]\nweights = "bf16"\nkv_cache = "bf16"\nactivations = "bf16"\ndispatch = "bf16"\n'
        "[degrees]\ntp = [1, 2]\nep = [1]\npp = [1]\nbatch = [8]\n[open_loop]\npercentile = 90\ncv = 2\n"
    )
    path = tmp_path / "mine.toml"
    path.write_text(text.format("traffic"), encoding="utf-8")
    assert load_workload(str(path)).open_loop == OpenLoop(percentile=90, cv=2)
    path.write_text(text.format("serve"), encoding="utf-8")
    with pytest.raises(CatalogError, match="open_loop is of phase 'traffic'"):
        load_workload(str(path))


@pytest.fixture(scope="module")
def served_together() -> Workload:
    asked = dataclasses.replace(ASKED, gpus=4, osl=60).load()
    degrees = dataclasses.replace(asked.degrees, tp=(1, 2), pp=(1,), batch=(8,))
    tables = ServingTables(replicas=(1, 2), chunk_tokens=(0, 2048), prefills=(0, 1))
    return dataclasses.replace(asked, open_loop=OpenLoop(requests=8), degrees=degrees, serving=tables)


def every_action(space: StrategySpace) -> set[Strategy]:
    actions = itertools.product(*map(range, space.sizes))
    return {space.decode(space.folded(np.array(action))) for action in actions}


def test_branch_and_bound_over_replicas_chunks_and_pools_finds_the_optimum_of_brute_force(
    served_together: Workload,
) -> None:
    found = best_goodput(space_of(served_together))
    everything = every_action(StrategySpace(served_together))
    worth = {each: evaluate_in_phase(served_together, each) for each in everything}
    feasible = {each: one.tokens_per_s_per_gpu for each, one in worth.items() if one.feasible}
    assert found.proven
    assert found.tokens_per_s_per_gpu == max(feasible.values())
    assert {bool(each.served.prefill) for each in feasible} == {True, False}
    assert max(feasible.values()) <= goodput_bound(space_of(served_together))


def test_every_way_to_serve_survives_actions_rows_and_records(served_together: Workload) -> None:
    space = StrategySpace(served_together)
    assert set(space.names) >= {"replicas", "chunk_tokens", "prefills", "prefill"}
    for strategy in every_action(space):
        assert space.decode(space.encode(strategy)) == strategy
        assert as_strategy(json.loads(json.dumps(strategy_dict(strategy)))) == strategy
        row = {"tp": strategy.tp, "ep": strategy.ep, "pp": strategy.pp, "batch": strategy.batch}
        assert as_strategy({**row, **parse_dims_text(dims_text(strategy))}) == strategy


def test_replicas_behind_one_router_carry_no_less_each(served_together: Workload) -> None:
    one = dataclasses.replace(every(space_of(served_together))[0], tp=4, batch=8)
    limits = {"ttft_slo_s": 0.6, "tpot_slo_s": 0.06, "max_gpus": 16}
    loose = dataclasses.replace(served_together, **limits, open_loop=OpenLoop(requests=100))
    shares = [goodput(loose, dataclasses.replace(one, served=ReplicaSet(replicas=count))).share for count in (1, 2, 4)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_more_gpus_than_there_are_break_a_limit(served_together: Workload) -> None:
    strategy = dataclasses.replace(every(space_of(served_together))[0], tp=2, served=ReplicaSet(replicas=3))
    (violation,) = goodput(served_together, strategy).violations
    assert (violation.kind, violation.needed, violation.allowed) == ("gpus", 6, 4)


def test_not_even_a_flood_goes_through_two_pools_faster_than_the_slower_one(served_together: Workload) -> None:
    prefill = prefill_replicas(served_together)[0].strategy
    decode = dataclasses.replace(every(space_of(served_together))[0], tp=1, batch=16)
    for copies in ((1, 1), (2, 1), (1, 3)):
        plan = served_plan(
            served_together, dataclasses.replace(decode, served=ReplicaSet(copies[1], 0, copies[0], prefill))
        )
        requests = Requests.drawn(np.zeros(200), Lengths(4000), Lengths(60), 0)
        outcome = plan.replay(requests, lambda log, request, time_s: None)
        assert len(requests) / outcome.end_s <= 1.01 * plan.bound_per_s
