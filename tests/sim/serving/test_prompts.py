"""How prompts of several attention groups come into a step: conservation, limits, growth, a simulation step by step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import CatalogError
from sim.engines.engine_registry import engine_rules
from sim.ops.sizes import Load
from sim.serving.phases import batching
from sim.serving.prompts import mixed_steps, prompt_meeting
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

STATED = question_about("mixtral_8x7b", phase="serve", isl=2000, osl=150, gpus=8)


def serving(wait: int = 0, osl: int = 150) -> Workload:
    return replace(STATED, osl=osl, prompt_wait_steps=wait).load()


steady = st.tuples(
    st.sampled_from([1, 2, 3, 8, 32]), st.integers(0, 400), st.integers(2, 300), st.sampled_from([None, 700, 100])
)


WORKLOAD = serving()
"""Described once: an example replaces what of it is drawn."""


def drawn(wait: int, osl: int, chunk: int | None) -> Workload:
    return replace(WORKLOAD, prompt_wait_steps=wait, output_tokens=osl, chunk_tokens=chunk)


@settings(derandomize=True, deadline=None)
@given(steady, st.integers(1, 900))
def test_prompts_and_answers_are_equally_many(case: tuple[int, int, int, int | None], batch: int) -> None:
    dp, wait, osl, chunk = case
    workload = drawn(wait, osl, chunk)
    state = batching(workload, batch, dp)
    assert state.mixed is not None
    chunks = 1 if chunk is None else math.ceil(2000 / chunk)
    assert state.pace.mixed_share * state.mixed.prompts * osl == pytest.approx(state.tokens)
    assert state.tokens <= batch
    own = state.mixed.of_group(dp).prompts
    assert own >= (1 - 1e-12) / chunks
    assert own * (1 - 1e-12) <= state.mixed.prompts <= own * min(dp, batch) * (1 + 1e-12)


@settings(derandomize=True, deadline=None)
@given(steady, st.integers(1, 900), st.integers(1, 300))
def test_a_larger_batch_never_has_less_of_what_bounds_a_search(
    case: tuple[int, int, int, int | None], batch: int, more: int
) -> None:
    """The exact optimum takes the smallest batch's step for the least of a range, and the largest's tokens."""
    dp, wait, osl, chunk = case
    workload = drawn(wait, osl, chunk)
    few, many = (batching(workload, each, dp) for each in (batch, batch + more))
    assert few.mixed is not None
    assert many.mixed is not None

    def grow(few: float, many: float) -> None:
        assert few <= many * (1 + 1e-12)

    grow(few.tokens, many.tokens)
    grow(few.pace.mixed_share, many.pace.mixed_share)
    grow(few.pace.mixed_share * few.pace.others_share, many.pace.mixed_share * many.pace.others_share + 1e-14)
    for groups in (1, 2, dp, 4 * dp):
        if dp % groups == 0 or groups % dp == 0:
            grow(few.mixed.of_group(groups).prompts, many.mixed.of_group(groups).prompts)
            grow(few.mixed.all_tokens(groups), many.mixed.all_tokens(groups))
    for latency, stages in itertools.product(("tpot_s", "ttft_s", "step_s"), (1, 2, 7, 64)):
        least, of_more, as_is = few.at_least.through(stages), many.at_least.through(stages), many.through(stages)
        grow(getattr(least.steps(1.0, 3.0), latency), getattr(of_more.steps(1.0, 3.0), latency))
        grow(getattr(least.steps(1.0, 3.0), latency), getattr(as_is.steps(1.0, 3.0), latency))


def test_one_group_waits_for_nobody() -> None:
    for batch in (1, 7, 400):
        at_once, waiting = batching(serving(), batch, 1), batching(serving(60), batch, 1)
        assert waiting.pace == at_once.pace
        assert waiting.mixed == at_once.mixed
        assert waiting.tokens == at_once.tokens == batch


def test_prompts_that_wait_long_enough_come_one_to_each_group() -> None:
    """8 groups, 256 requests of 1024 steps: a prompt every 4 steps, so that the first waits 28 and 3.5 slots idle."""
    found = prompt_meeting(60, 256, 8, 1024)
    assert found.prompts == 8
    assert found.waits == 14
    assert 256 * (1 - found.running_share) == pytest.approx(3.5, rel=0.02)
    steps = mixed_steps(256 * found.running_share / 1024, 1, 8, found.prompts)
    assert steps.prompts == pytest.approx(8 * steps.busiest_prompts)
    assert prompt_meeting(0, 256, 8, 1024) == (1, 0, 1)
    assert prompt_meeting(12, 256, 8, 1024).prompts == 1 + 12 / 4


def test_a_crowd_of_prompts_lies_on_all_groups_whether_or_not_they_wait() -> None:
    state = batching(serving(osl=10), 400, 8)
    assert state.mixed is not None
    assert state.pace.mixed_share == 1.0
    assert (state.mixed.prompts, state.mixed.of_group(8).prompts) == (40.0, 5.0)
    assert state.mixed.of_group(4).prompts == 10.0  # two groups of attention to one of experts
    assert state.mixed.of_group(16).prompts == 2.5


def test_of_several_attention_groups_together_one_is_the_busiest_and_the_others_are_as_usual() -> None:
    load = Load(64, 100, 100, prompts=3.0, prompt_tokens=50, busiest_prompts=1.0, attention_groups=8)
    assert load.of_group(2).prompts == pytest.approx(1 + 3 * 2 / 7)
    assert load.of_group(1).prompts == pytest.approx(3.0)


def stepped(dp: int, slots: int, answer: int, wait: int, steps: int, spread: float) -> tuple[float, float, float]:
    """Share of the slots that decode, of the steps with prompts, and prompts in these, of groups that run by steps."""
    rng = np.random.default_rng(1)

    def lengths(count: int) -> np.ndarray:
        return rng.integers(round(answer * (1 - spread)), round(answer * (1 + spread)) + 1, count)

    left = rng.integers(1, answer, (dp, slots))
    queued, waited = np.zeros(dp, int), 0
    tokens = mixed = prompts = 0
    for step in range(-steps // 4, steps):
        start = np.zeros(dp, int)
        if queued.any():
            if (queued > 0).all() or waited >= wait:
                start = np.minimum(queued, 1)
                waited = 0
            else:
                waited += 1
        if step >= 0:
            tokens += int((left > 0).sum())
            mixed += int(start.any())
            prompts += int(start.sum())
        left = np.maximum(left - 1, -1)
        queued += (left == 0).sum(1)
        left[left == 0] = -1
        queued -= start
        for group in np.flatnonzero(start):
            left[group, np.flatnonzero(left[group] < 0)[0]] = lengths(1)[0]
    return tokens / steps / dp / slots, mixed / steps, prompts / max(mixed, 1)


@pytest.mark.parametrize(("wait", "near"), [(0, 0.02), (5, 0.25), (60, 0.04)])
def test_the_formulas_are_near_groups_that_run_step_by_step(wait: int, near: float) -> None:
    """Answers of 89 to 111 % of the mean, as InferenceX asks for."""
    running, share, prompts = stepped(4, 16, 128, wait, 5_000, 0.11)
    found = prompt_meeting(wait, 64, 4, 128)
    steps = mixed_steps(64 * found.running_share / 128, 1, 4, found.prompts)
    assert found.running_share == pytest.approx(running, rel=0.04)
    assert steps.share == pytest.approx(share, rel=near)
    assert steps.prompts == pytest.approx(prompts, rel=near)


def test_a_wait_for_all_groups_lies_between_equal_answers_and_such_as_differ() -> None:
    """Equal ones fall into step and lose nothing; the more they differ, the more groups wait for each other."""
    equal, unlike = (stepped(4, 16, 128, 60, 5_000, spread)[0] for spread in (0.0, 0.5))
    assert unlike < prompt_meeting(60, 64, 4, 128).running_share < equal


def test_waiting_pays_where_groups_hold_each_other_up_and_delays_the_first_token() -> None:
    deep = question_about("deepseek_v3", "h200_sxm", "serve", isl=8192, osl=1024, engine="trtllm", gpus=8)
    at_once, waiting = (replace(deep, prompt_wait_steps=wait).load() for wait in (0, 60))
    dims = engine_rules("trtllm").plans_of(at_once)[0].dims
    own, shared = Strategy(1, 8, 1, 256, dims), Strategy(8, 8, 1, 256, dims, 1, 1)
    before, after = evaluate(at_once, own), evaluate(waiting, own)
    assert after.tokens_per_s_per_gpu > 1.2 * before.tokens_per_s_per_gpu
    assert after.ttft_s > before.ttft_s
    assert evaluate(waiting, shared) == evaluate(at_once, shared)


def test_engines_that_cannot_wait_say_so() -> None:
    with pytest.raises(CatalogError, match=r"vLLM .* does not delay .* leave out prompt_wait_steps=, got 30"):
        replace(STATED, engine="vllm", prompt_wait_steps=30).load()
    assert replace(STATED, engine="sglang", prompt_wait_steps=30).load().prompt_wait_steps == 30
    assert STATED.load().config_hash == serving(0).config_hash != serving(1).config_hash
