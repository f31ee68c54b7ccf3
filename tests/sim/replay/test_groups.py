"""Several models on groups of GPUs: queues as theory knows them, AlpaServe's results, and hand arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import GroupOutcome, on_groups
from sim.replay.replica import Deployed
from sim.replay.requests import Requests
from tests.one_pass import stated


def _run(
    groups: Sequence[Mapping[int, Deployed]], times: Sequence[float], models: Sequence[int], answers: int = 1
) -> GroupOutcome:
    count = len(times)
    sent = Requests(np.array(times), np.ones(count, dtype=np.int64), np.full(count, answers))
    return on_groups(groups, sent, models, [1.0] * (max(models) + 1))


def _drawn(
    groups: Sequence[Mapping[int, Deployed]], streams: list[Stream], horizon_s: float, seed: int
) -> GroupOutcome:
    arrivals = draw_arrivals(streams, horizon_s, seed)
    return _run(groups, arrivals.times_s.tolist(), arrivals.models.tolist())


def test_a_pipeline_shared_by_two_models_waits_half_as_long_as_two_gpus() -> None:
    # AlpaServe, section 3.4: with Poisson arrivals of equal rates, W = D + l D^2 / (2 (1 - l D)) on GPUs of their own;
    # with stages of D/2 and twice the rate the wait is half of that, and D the same.
    load, runs = 0.6, []
    one, pipe = stated(1.0), stated(1.0, stages=2)
    for seed in range(2):
        ways = ([{0: one}, {1: one}], [{0: pipe, 1: pipe}])
        done = [_drawn(groups, [Stream(load), Stream(load)], 4000.0, seed) for groups in ways]
        runs.append([each.replayed.ttft_s.mean() - 1.0 for each in done])
    alone_s, shared_s = np.mean(runs, axis=0)
    assert alone_s == pytest.approx(load / (2 * (1 - load)), rel=0.06)
    assert shared_s == pytest.approx(alone_s / 2, rel=0.1)


def test_the_first_stage_works_as_long_as_prompts_take_it() -> None:
    done = _drawn([{0: stated(1.0, 2), 1: stated(1.0, 2)}], [Stream(0.6), Stream(0.6)], 2000.0, 0)
    assert done.busy_s[0] == pytest.approx(0.5 * len(done.group))
    assert done.busy_s[0] / done.replayed.end_s == pytest.approx(0.6, rel=0.05)


def test_a_stage_takes_the_next_prompt_while_the_last_one_is_in_the_stages_behind() -> None:
    done = _run([{0: stated(1.0, stages=2)}], [0.0, 0.0, 0.0], [0, 0, 0])
    assert done.replayed.first_s.tolist() == [1.0, 1.5, 2.0]


def test_a_short_prompt_waits_in_each_stage_for_the_long_one_before_it() -> None:
    done = _run([{0: stated(2.0, 2), 1: stated(0.2, 2)}], [0.0, 0.5], [0, 1])
    # In at 1.0, through the first stage at 1.1, and the second is taken until 2.0.
    assert done.replayed.first_s.tolist() == [2.0, pytest.approx(2.1)]


def test_models_on_a_gpu_take_turns() -> None:
    one, other = stated(0.5, decode_s=(0.1,)), stated(0.5, decode_s=(0.3,))
    done = _run([{0: one, 1: other}], [0.0, 0.0], [0, 1], answers=3).replayed
    # Prompts until 1.0, then steps of 0.1 and 0.3 in turn.
    assert done.first_s.tolist() == [0.5, 1.0]
    assert done.done_s.tolist() == [pytest.approx(1.5), pytest.approx(1.8)]


def test_requests_that_decode_share_steps_and_stand_still_for_prompts() -> None:
    done = _run([{0: stated(1.0, decode_s=(0.1, 0.15))}], [0.0, 1.5], [0, 0], answers=11).replayed
    # The first has 5 of its 10 further tokens at 1.5; nothing until 2.5; 5 steps of 0.15 s end it, and the 5 tokens of
    # the second that are left take 0.1 s each.
    assert done.first_s.tolist() == [1.0, 2.5]
    assert done.done_s.tolist() == [pytest.approx(3.25), pytest.approx(3.75)]


def test_who_cannot_be_in_time_any_more_is_refused_at_no_cost() -> None:
    hurried = replace(stated(1.0), patience_s=0.5)
    done = _run([{0: hurried}], [0.0, 0.1, 0.6], [0, 0, 0])
    assert np.isnan(done.replayed.first_s).tolist() == [False, True, False]
    assert done.replayed.first_s[2] == 2.0
    assert done.busy_s[0] == 2.0


def test_every_request_is_answered_or_refused_and_those_answered_are_in_time() -> None:
    group = {0: replace(stated(0.2, 2), patience_s=0.8), 1: replace(stated(0.1, 2), patience_s=0.3)}
    arrivals = draw_arrivals([Stream(6.0, cv=3.0), Stream(3.0)], 200.0, 1)
    done = _run([group], arrivals.times_s.tolist(), arrivals.models.tolist()).replayed
    answered = ~np.isnan(done.first_s)
    assert 0 < answered.sum() < len(arrivals)
    assert (np.isnan(done.done_s) == ~answered).all()
    # A stage may yet be taken by the other model's prompt when one begins.
    assert (done.ttft_s[answered] <= np.where(arrivals.models == 0, 1.0, 0.4)[answered] + 0.11).all()


def test_a_request_goes_to_the_group_with_the_least_work_and_nowhere_without_its_model() -> None:
    done = _run([{0: stated(1.0)}, {0: stated(1.0)}, {}], [0.0, 0.1, 0.2, 1.05], [0, 0, 1, 0])
    assert done.group.tolist() == [0, 1, -1, 0]
    assert done.replayed.first_s[3] == 2.05
    assert np.isnan(done.replayed.first_s[2])
