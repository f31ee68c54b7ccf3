"""What is in the steps of each phase, and the latencies that follow from their times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.engines.engine_registry import engine_rules
from sim.ops.heuristics import megatron_dims
from sim.prices.engine import Engine, EngineTimes
from sim.serving.phases import Pace, PacedSteps, batching, most_sequences
from sim.simulate import evaluate, steady_state
from sim.strategy import Strategy
from sim.workload import Workload

VLLM = Engine("vllm", EngineTimes(1e-3, 1e-5, 0.5), engine_rules("vllm").memory)


def serving(**changes: object) -> Workload:
    workload = load_workload("mixtral_8x22b_8k")
    fields = {"phase": "serve", "prompt_tokens": 1024, "output_tokens": 256, "engine": VLLM, "tpot_slo_s": math.inf}
    return replace(workload, **(fields | changes))  # type: ignore[arg-type]


def strategy(workload: Workload, batch: int) -> Strategy:
    return Strategy(8, 1, 1, batch, megatron_dims(workload.model))


def test_a_request_is_replaced_once_in_its_output_and_waits_for_the_prompts_of_others() -> None:
    state = batching(serving(), 64, 1)
    assert state.pace.mixed_share == 64 / 256
    assert state.pace.others_share == 63 / 64
    assert state.mixed is not None
    assert (state.mixed.prompts, state.mixed.prompt_tokens) == (1.0, 1024)
    crowded = batching(serving(), 512, 1)
    assert crowded.pace.mixed_share == 1.0
    assert crowded.mixed is not None
    assert crowded.mixed.prompts == 2.0


def test_an_engine_adds_its_own_time_and_its_share_of_other_requests_prompts() -> None:
    workload = serving()
    state = steady_state(workload, strategy(workload, 64))
    seen = 0.5 * 64 / 256 * 63 / 64
    expected = (1 - seen) * state.decode_s + seen * state.mixed_s + 1e-3 + 64e-5
    assert evaluate(workload, strategy(workload, 64)).tpot_s == pytest.approx(expected, rel=1e-12)
    alone = serving(engine=replace(VLLM, times=replace(VLLM.times, prefill_share=0.0)))
    assert evaluate(alone, strategy(alone, 64)).tpot_s == pytest.approx(state.decode_s + 1e-3 + 64e-5, rel=1e-12)


def test_a_single_request_waits_for_nobodys_prompt() -> None:
    assert batching(serving(), 1, 1).steps(1.0, 5.0).prompt_share == 0.0


@settings(derandomize=True, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(1e-4, 1), st.floats(1, 10), st.floats(0, 1))
def test_the_share_of_prompts_is_what_they_lengthen_a_token_by(
    mixed_share: float, others: float, prefill_share: float, decode_s: float, longer: float, engine_s: float
) -> None:
    pace, times = Pace(mixed_share, others, 1, 1), EngineTimes(engine_s, 0.0, prefill_share)
    steps = PacedSteps(pace, times, decode_s, decode_s * longer)
    assert 0 <= steps.prompt_share < 1
    assert (1 - steps.prompt_share) * steps.tpot_s == pytest.approx(decode_s + engine_s)


def test_chunks_bound_the_sequences_that_keep_running() -> None:
    assert most_sequences(serving(), 1) == 1024
    assert most_sequences(serving(chunk_tokens=512), 2) == 512 * 2 * 256 // 1024
    chunked = batching(serving(chunk_tokens=512), 64, 1)
    assert chunked.pace.prompt_steps == 2
    assert chunked.pace.mixed_share == 2 * 64 / 256


def test_no_more_run_than_the_buffers_of_deepep_hold_tokens_of() -> None:
    asked = Question(
        model="deepseek_v3", hardware="h200_sxm", engine="sglang", isl=1000, osl=500, gpus=32, draft_tokens=3
    )
    sent = replace(asked.load(), expert_exchange="all_to_all")
    assert most_sequences(sent, 32) == 32 * 1024 // 4
    assert most_sequences(asked.load(), 32) == 32 * 2048
    assert most_sequences(replace(sent, deepep_mode="normal"), 32) == 32 * 2048
    assert most_sequences(replace(sent, speculation=None), 32) == 32 * 1024
    over = Strategy(1, 32, 1, 12000, megatron_dims(sent.model))
    told = [violation.message for violation in evaluate(sent, over).violations if violation.kind == "sequences"]
    assert told == [
        "12000 requests in flight, at most 8192 run at once: the buffers of DeepEP hold tokens of 256 per rank"
    ]
    assert not any(each.kind == "sequences" for each in evaluate(sent, replace(over, batch=8192)).violations)


def test_requests_without_room_wait_and_those_that_run_are_reported() -> None:
    workload = serving()
    full = evaluate(workload, strategy(workload, 1_000_000))
    assert not full.feasible
    assert 1 <= full.running <= 1024
    assert full.tpot_s == pytest.approx(evaluate(workload, strategy(workload, full.running)).tpot_s)
