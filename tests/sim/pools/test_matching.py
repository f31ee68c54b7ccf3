"""Two pools at one rate: as brute force has it, within limits, and with the known limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sim.engines.engine_registry import engine_rules
from sim.optimum.spaces import joint_space, space_of
from sim.pools.best_pair import best_pair, pair_at_once
from sim.pools.candidates import Replica, replicas
from sim.pools.handover import Link, request_cache_bytes, sharers
from sim.pools.matching import Limits, Matched, best_match
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about
from tests.sim.pools.conftest import BothPools

TRAFFIC = Traffic.of([TrafficKind(4000, 200)])
TIGHT, LOOSE = Limits(8, 0.01, 0.3), Limits(8, 0.05, 5.0)


def feasible(workload: Workload) -> list[tuple[Strategy, float, float]]:
    """(strategy, requests/s, seconds of a step) of every strategy of a small space that has room."""
    space, found = space_of(workload), []
    for part in space.parts():
        for mesh in part.meshes():
            tp, cp, dp, ep = mesh
            for pp, batch in itertools.product(part.stages(mesh), part.batch):
                each = evaluate(workload, Strategy(tp, ep, pp, batch, part.only_dims, cp, None if cp == 1 else dp))
                if each.feasible:
                    tokens = 4000 if workload.phase == "prefill" else 200
                    rate = each.tokens_per_s_per_gpu * each.gpus / tokens
                    step_s = each.ttft_s / 1.5 if workload.phase == "prefill" else each.tpot_s
                    found.append((each.strategy, rate, step_s))
    return found


def by_brute_force(workload: Workload, limits: Limits, free: bool) -> tuple[float, int]:
    """(requests/s, GPUs) of the best pair of pools, all pairs and numbers of replicas tried one by one."""
    prefills, decodes = (feasible(workload_of(TRAFFIC, workload, phase)) for phase in ("prefill", "decode"))
    cache_bytes, best = request_cache_bytes(workload, 4000), (0.0, 0)
    link = Link(workload, same_node=True, cache_bytes=cache_bytes, free=free)
    for (left, into, prompt_s), (right, out_of, step_s) in itertools.product(prefills, decodes):
        if step_s > limits.tpot_s or engine_rules(workload.space).pair_refusals(left, right):
            continue
        wait_s = link.sending_s(min(left.tp * left.cp * left.pp, right.tp * right.cp * right.pp))
        spare_s = limits.ttft_s - prompt_s - wait_s - step_s
        busiest = min(1.0, spare_s / (prompt_s / 2))
        busy_s = [link.sending_s(each.gpus) for each in (left, right)]
        into, out_of = (min(rate, 1 / s if s else math.inf) for rate, s in zip((into, out_of), busy_s, strict=True))
        for a, b in itertools.product(range(1, 9), range(1, 9)):
            gpus = a * left.gpus + b * right.gpus
            if gpus <= limits.gpus and busiest > 0:
                best = max(best, (min(a * busiest * into, b * out_of), -gpus))
    return best[0], -best[1]


def test_engines_connect_the_pools_that_are_paired(both: BothPools) -> None:
    def of_stages(side: Sequence[Replica], pp: int) -> list[Replica]:
        found = [each for each in side if each.evaluation.strategy.pp == 1]
        return [
            replace(each, evaluation=replace(each.evaluation, strategy=replace(each.evaluation.strategy, pp=pp)))
            for each in found
        ]

    link = Link(both.workload, same_node=True, cache_bytes=both.cache_bytes)

    def best(prefills: Sequence[Replica], decodes: Sequence[Replica], engine: str = "sglang") -> Matched | None:
        return best_match(prefills, decodes, LOOSE, link, link, 8, engine_rules(engine))

    one, two, four = ([of_stages(side, pp) for side in (both.prefills, both.decodes)] for pp in (1, 2, 4))
    assert best(four[0], two[1]) is None
    assert best(one[0], two[1]) is None
    assert best(four[0], two[1], "trtllm") is not None
    whole = best([*two[0], *four[0]], [*one[1], *two[1], *four[1]])
    parts = [best(two[0], [*one[1], *two[1]]), best(four[0], [*one[1], *four[1]])]
    assert whole is not None
    assert whole.requests_per_s == max(each.requests_per_s for each in parts if each)


def test_the_best_pair_of_sglang_is_that_of_brute_force_over_what_it_connects(served: Workload) -> None:
    question = question_about("llama_3_1_8b", engine="sglang", isl=4000, osl=200, phase="serve", gpus=8)
    loaded = replace(question, space="sglang").load()
    workload = replace(loaded, degrees=replace(loaded.degrees, tp=(1,), pp=(1, 2, 4), batch=(1, 8, 64)))
    for limits in (TIGHT, Limits(5, 0.05, 0.1)):
        found = best_pair(workload, TRAFFIC, limits)
        rate, _ = by_brute_force(workload, limits, False)
        assert (found.requests_per_s if found else 0.0) == pytest.approx(rate, rel=1e-9)
        assert found is None or found.decode.evaluation.strategy.pp in (1, found.prefill.evaluation.strategy.pp)


@pytest.mark.parametrize(("limits", "free"), [(TIGHT, False), (LOOSE, True), (Limits(5, 0.008, 1.5), False)])
def test_the_best_pair_is_that_of_brute_force(served: Workload, limits: Limits, free: bool) -> None:
    found = best_pair(served, TRAFFIC, limits, free_transfer=free)
    rate, gpus = by_brute_force(served, limits, free)
    assert found is not None
    assert found.requests_per_s == pytest.approx(rate, rel=1e-9)
    assert found.gpus <= gpus


@pytest.mark.parametrize("limits", [TIGHT, LOOSE], ids=["tight", "loose"])
def test_the_best_pair_is_the_same_whatever_it_begins_with(served: Workload, limits: Limits) -> None:
    best = best_pair(served, TRAFFIC, limits)
    assert best is not None
    own = best.prefill.evaluation.strategy, best.decode.evaluation.strategy
    poor = (
        feasible(workload_of(TRAFFIC, served, "prefill"))[0][0],
        feasible(workload_of(TRAFFIC, served, "decode"))[0][0],
    )
    for begin in (own, poor, tuple(replace(each, batch=3) for each in own)):  # of which the last are not in the space
        assert best_pair(served, TRAFFIC, limits, begin=begin) == best


def test_a_load_takes_the_fewest_gpus(served: Workload) -> None:
    full = best_pair(served, TRAFFIC, LOOSE)
    assert full is not None
    for share in (0.1, 1.0):
        load = share * full.requests_per_s * (1 - 1e-9)
        found = best_pair(served, TRAFFIC, replace(LOOSE, requests_per_s=load))
        assert found is not None
        assert found.gpus <= full.gpus
        assert _carries(found, load)
        fewer = best_pair(served, TRAFFIC, replace(LOOSE, gpus=found.gpus - 1)) if found.gpus > 2 else None
        assert fewer is None or fewer.requests_per_s < load
    assert best_pair(served, TRAFFIC, replace(LOOSE, requests_per_s=1.01 * full.requests_per_s)) is None


@pytest.mark.parametrize("limits", [TIGHT, LOOSE], ids=["tight", "loose"])
@pytest.mark.parametrize("requests", [4, 100])
def test_requests_at_once_take_the_fewest_gpus_by_brute_force_too(
    served: Workload, limits: Limits, requests: int
) -> None:
    found = pair_at_once(served, TRAFFIC, limits, requests)
    prefills, decodes = (feasible(workload_of(TRAFFIC, served, phase)) for phase in ("prefill", "decode"))
    link = Link(served, same_node=True, cache_bytes=request_cache_bytes(served, 4000))
    fewest = math.inf
    for (left, into, prompt_s), (right, out_of, step_s) in itertools.product(prefills, decodes):
        if step_s > limits.tpot_s:
            continue
        rest_s = link.sending_s(min(left.tp * left.cp * left.pp, right.tp * right.cp * right.pp)) + step_s
        busiest = min(1.0, (limits.ttft_s - prompt_s - rest_s) / (prompt_s / 2))
        busy_s = [link.sending_s(each.gpus) for each in (left, right)]
        into, out_of = (min(rate, 1 / s if s else math.inf) for rate, s in zip((into, out_of), busy_s, strict=True))
        stay_s = prompt_s + rest_s + 199 * step_s
        for a, b in itertools.product(range(1, 9), range(1, 9)):
            if busiest > 0 and min(a * busiest * into, b * out_of) * stay_s >= requests * (1 - 1e-9):
                fewest = min(fewest, a * left.gpus + b * right.gpus)
    if fewest > limits.gpus:
        assert found is None
        return
    assert found is not None
    assert found.gpus == fewest
    stay_s = found.prefill.latency_s + found.transfer_s + 200 * found.tpot_s
    assert found.requests_per_s * stay_s == pytest.approx(requests)
    assert _carries(found, found.requests_per_s)


def _carries(found: Matched, load: float) -> bool:
    into, out_of = found.prefills * found.prefill.requests_per_s, found.decodes * found.decode.requests_per_s
    return min(into, out_of) >= load * (1 - 1e-9)


def test_requests_go_in_and_out_at_one_rate_and_keep_the_limits(served: Workload) -> None:
    for gpus, ttft_s in itertools.product((2, 8), (0.25, 2.0)):
        found = best_pair(served, TRAFFIC, Limits(gpus, 0.02, ttft_s))
        if found is None:
            continue
        assert _carries(found, found.requests_per_s)
        assert found.gpus <= gpus
        assert found.tpot_s <= 0.02
        assert found.ttft_s <= ttft_s * (1 + 1e-6)
        parts_s = found.prefill.latency_s + found.transfer_s + found.decode.latency_s
        assert parts_s < found.ttft_s <= parts_s + found.prefill.latency_s / 2 + 1e-12


def test_more_gpus_and_more_time_never_hurt(served: Workload) -> None:
    def rate(limits: Limits) -> float:
        found = best_pair(served, TRAFFIC, limits)
        return found.requests_per_s if found else 0.0

    for tpot_s in (0.01, 0.03):
        table = [[rate(Limits(gpus, tpot_s, ttft_s)) for ttft_s in (0.1, 0.3)] for gpus in (1, 3, 8)]
        assert (np.diff(table, axis=0) >= -1e-9).all()
        assert (np.diff(table, axis=1) >= -1e-9).all()
        assert table[0] == [0.0] * 2  # one GPU is no two pools


def test_without_transfer_and_on_endless_gpus_the_rates_add_up_harmonically(served: Workload) -> None:
    prefill, decode = (
        max(rate / strategy.gpus for strategy, rate, _ in feasible(workload_of(TRAFFIC, served, phase)))
        for phase in ("prefill", "decode")
    )
    few = replace(served, max_gpus=8)
    found = best_pair(few, TRAFFIC, Limits(2000, math.inf, math.inf), free_transfer=True)
    assert found is not None
    assert found.requests_per_s / 2000 == pytest.approx(1 / (1 / prefill + 1 / decode), rel=5e-3)


def test_of_equal_degrees_no_choices_are_faster_than_a_replicas(toy_dense: Workload) -> None:
    traffic = Traffic.of([TrafficKind(64, 16)])
    small = replace(toy_dense, degrees=replace(toy_dense.degrees, tp=(2, 4), pp=(1, 2), batch=(4, 16)))
    rng = np.random.default_rng(0)
    for phase in ("prefill", "decode"):
        workload = workload_of(traffic, small, phase)
        best: dict[tuple[int, ...], float] = {}
        for each in replicas(workload, traffic):
            strategy = each.evaluation.strategy
            key = (strategy.tp, strategy.pp, strategy.batch, each.sharers)
            best[key] = max(best.get(key, 0.0), each.requests_per_s)
        space = joint_space(workload)
        for strategy in (space.sample(rng) for _ in range(150)):
            found = evaluate(workload, strategy)
            if found.feasible:
                rate = found.tokens_per_s_per_gpu * found.gpus / (64 if phase == "prefill" else 16)
                key = (strategy.tp, strategy.pp, strategy.batch, sharers(workload, strategy))
                assert rate <= best[key] * (1 + 1e-9)
