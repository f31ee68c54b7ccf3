"""Queues as theory knows them, by hand and in the long run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from raysearch.deploy.place.attainment import over_seeds
from raysearch.deploy.place.fleet_file import load_fleet
from raysearch.deploy.place.queueing import GpuGroup, QueueOutcome, simulate
from raysearch.deploy.place.service import GroupShape, Objective, Service
from sim.replay.arrivals import Arrivals, Stream, draw_arrivals

PATIENT = Objective(1, math.inf, math.inf)


def one_pass(prompt_s: float, stages: int = 1) -> Service:
    """A model whose requests are one pass through equal stages."""
    never = (0.0,) * 10_000
    return Service(None, prompt_s, prompt_s / stages, never, never, 0.0, 0.0, 1.0)


def generating(prompt_s: float, step_s: tuple[float, ...], stages: int = 1, room: float = 1e9) -> Service:
    """A model whose step takes so long with 1, 2, ... requests, and which has room for `room` of them."""
    times = (0.0, *step_s)
    return Service(None, prompt_s, prompt_s / stages, times, times, 0.0, 1.0, room)


def at(*times_s: float, models: tuple[int, ...] | None = None) -> Arrivals:
    numbers = models or (0,) * len(times_s)
    return Arrivals(np.array(times_s), np.array(numbers), 10.0)


def waited_s(outcome: QueueOutcome, arrivals: Arrivals) -> float:
    return float(np.mean(outcome.start_s - arrivals.times_s))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_model_on_a_gpu_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    waits, busy = [], []
    for seed in range(12):
        arrivals = draw_arrivals([Stream(load)], 8000.0, seed)
        outcome = simulate([GpuGroup(1, {0: one_pass(1.0)})], [PATIENT], arrivals)
        waits.append(waited_s(outcome, arrivals))
        busy.append(outcome.busy_s[0] / outcome.end_s)
    estimate = over_seeds(waits)
    assert estimate.low is not None
    assert estimate.high is not None
    # Twice the 90 % interval: 1 in 200 correct simulations would fall outside for some seed.
    expected = load / (2 * (1 - load))
    assert abs(estimate.value - expected) <= estimate.high - estimate.low
    assert np.mean(busy) == pytest.approx(load, rel=0.02)  # the law of utilisation


def test_a_pipeline_shared_by_two_models_waits_half_as_long_as_two_gpus() -> None:
    # AlpaServe, section 3.4: with Poisson arrivals of equal rates, W = D + l D^2 / (2 (1 - l D)) on GPUs of their own;
    # with stages of D/2 and twice the rate the wait is half of that, and D the same.
    load, runs = 0.6, []
    for seed in range(8):
        arrivals = draw_arrivals([Stream(load), Stream(load)], 5000.0, seed)
        own = simulate([GpuGroup(1, {0: one_pass(1.0)}), GpuGroup(1, {1: one_pass(1.0)})], [PATIENT] * 2, arrivals)
        pipe = one_pass(1.0, stages=2)
        shared = simulate([GpuGroup(2, {0: pipe, 1: pipe})], [PATIENT] * 2, arrivals)
        runs.append((waited_s(own, arrivals), waited_s(shared, arrivals)))
    alone_s, shared_s = np.mean(runs, axis=0)
    assert alone_s == pytest.approx(load / (2 * (1 - load)), rel=0.06)
    assert shared_s == pytest.approx(alone_s / 2, rel=0.06)


def test_requests_in_the_system_are_arrivals_times_their_time_in_it() -> None:
    arrivals = draw_arrivals([Stream(3.0, cv=2.0), Stream(1.0)], 300.0, 3)
    services = {0: generating(0.05, (0.01,) * 5000), 1: generating(0.1, (0.02,) * 5000)}
    objectives = [Objective(20, math.inf, math.inf), Objective(5, math.inf, math.inf)]
    outcome = simulate([GpuGroup(1, services), GpuGroup(1, services)], objectives, arrivals)
    stay_s = outcome.done_s - arrivals.times_s
    # The number in the system, counted up and down event by event.
    moments = np.concatenate([arrivals.times_s, outcome.done_s])
    steps = np.concatenate([np.ones(len(arrivals)), -np.ones(len(arrivals))])
    order = np.argsort(moments, kind="stable")
    counts, gaps = np.cumsum(steps[order])[:-1], np.diff(moments[order])
    assert counts.min() >= 0
    assert (counts * gaps).sum() == pytest.approx(stay_s.sum(), rel=1e-9)


def test_every_request_is_answered_or_refused_once_and_in_order() -> None:
    arrivals = draw_arrivals([Stream(6.0, cv=3.0), Stream(3.0)], 200.0, 1)
    services = {0: one_pass(0.2, 2), 1: one_pass(0.1, 2)}
    objectives = [Objective(1, 1.0, math.inf), Objective(1, 0.4, math.inf)]
    outcome = simulate([GpuGroup(2, services)], objectives, arrivals)
    answered = ~np.isnan(outcome.first_s)
    assert 0 < answered.sum() < len(arrivals)
    assert (np.isnan(outcome.done_s) == ~answered).all()
    assert (np.diff(outcome.start_s[answered]) > 0).all()
    # Whoever was let in is in time, and nobody else.
    assert (outcome.in_time(arrivals, objectives) == answered).all()
    slots = np.array([services[model].slot_s for model in arrivals.models])
    assert outcome.busy_s[0] == pytest.approx(slots[answered].sum())


def test_a_stage_takes_the_next_prompt_while_the_last_one_is_in_the_stages_behind() -> None:
    arrivals = at(0.0, 0.0, 0.0)
    outcome = simulate([GpuGroup(2, {0: one_pass(1.0, 2)})], [PATIENT], arrivals)
    assert outcome.first_s.tolist() == [1.0, 1.5, 2.0]


def test_a_short_prompt_waits_in_each_stage_for_the_long_one_before_it() -> None:
    services = {0: one_pass(2.0, 2), 1: one_pass(0.2, 2)}
    outcome = simulate([GpuGroup(2, services)], [PATIENT] * 2, at(0.0, 0.5, models=(0, 1)))
    # In at 1.0, through the first stage at 1.1, and the second is taken until 2.0.
    assert outcome.first_s.tolist() == [2.0, pytest.approx(2.1)]


def test_requests_that_decode_share_rounds_and_stand_still_for_prompts() -> None:
    group = GpuGroup(1, {0: generating(1.0, (0.1, 0.15))})
    outcome = simulate([group], [Objective(11, math.inf, math.inf)], at(0.0, 1.5))
    # The first has 5 of its 10 further tokens at 1.5; nothing until 2.5; then both take turns: 5 rounds of 0.15 s end
    # the first, and the 5 of the second that are left take 0.1 s each.
    assert outcome.first_s.tolist() == [1.0, 2.5]
    assert outcome.done_s.tolist() == [pytest.approx(3.25), pytest.approx(3.75)]
    assert outcome.busy_s[0] == pytest.approx(3.75)


def test_models_on_a_group_take_turns() -> None:
    services = {0: generating(0.5, (0.1,)), 1: generating(0.5, (0.3,))}
    outcome = simulate([GpuGroup(1, services)], [Objective(2, math.inf, math.inf)] * 2, at(0.0, 0.0, models=(0, 1)))
    # The first decodes from 0.5, when the second's prompt begins: both wait until 1.0, and a round is 0.4 s.
    assert outcome.done_s.tolist() == [pytest.approx(1.4), pytest.approx(1.4)]


def test_a_request_waits_for_room_in_the_cache() -> None:
    group = GpuGroup(1, {0: generating(1.0, (0.1, 0.1), room=1.0)})
    outcome = simulate([group], [Objective(11, math.inf, math.inf)], at(0.0, 0.5))
    assert outcome.start_s.tolist() == [0.0, pytest.approx(2.0)]


def test_a_request_goes_to_the_group_with_the_least_work_and_nowhere_without_its_model() -> None:
    groups = [GpuGroup(1, {0: one_pass(1.0)}), GpuGroup(1, {0: one_pass(1.0)})]
    outcome = simulate(groups, [PATIENT] * 2, at(0.0, 0.1, 0.2, 1.05, models=(0, 0, 1, 0)))
    assert outcome.group.tolist() == [0, 1, -1, 0]
    assert outcome.start_s.tolist()[3] == 1.05


def test_a_full_group_serves_what_the_step_model_says_of_continuous_batching() -> None:
    fleet = load_fleet("bursty_qwens")
    shape = GroupShape(1, 1)
    service = fleet.cluster.services[0, shape]
    objective = replace(fleet.cluster.tenants[0].objective, ttft_s=math.inf, tpot_s=math.inf, output_tokens=200)
    arrivals = at(*np.zeros(3000))
    outcome = simulate([GpuGroup(1, {0: service})], [objective], arrivals)
    # 3000 requests that wait from the beginning: as many run as have room. Each takes a slot for its prompt and its
    # share of 199 full rounds.
    most = service.most_requests
    per_request_s = service.slot_s + 199 * service.use_s[most] / most
    assert outcome.end_s / len(arrivals) == pytest.approx(per_request_s, rel=0.05)


def test_gaps_have_the_mean_and_the_burstiness_asked_for() -> None:
    for cv in (0.5, 1.0, 4.0):
        arrivals = draw_arrivals([Stream(5.0, cv)], 40_000.0, 0)
        gaps = np.diff(arrivals.times_s)
        assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_are_as_many_in_the_first_second_as_later() -> None:
    counts = [len(draw_arrivals([Stream(2.0, cv=4.0)], 1.0, seed)) for seed in range(4000)]
    assert np.mean(counts) == pytest.approx(2.0, abs=0.25)


def test_another_models_load_leaves_arrivals_as_they_are() -> None:
    one, other = (draw_arrivals([Stream(2.0), Stream(rate, 3.0)], 100.0, 5) for rate in (1.0, 4.0))
    assert (one.times_s[one.models == 0] == other.times_s[other.models == 0]).all()
