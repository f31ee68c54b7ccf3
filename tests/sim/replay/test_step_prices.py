"""Tables of steps against the step model."""

import numpy as np
import pytest

import raysearch as rs
from sim.replay.step_prices import Cells, RankStep, StepPrices

_DOUBLINGS = ((0, 9), (4, 15), (3, 14), (5, 15))
"""Of sequences, their context, tokens of prompts and length of a prompt: ranges of their logarithms."""


@pytest.mark.parametrize(
    ("model", "engine", "layout"),
    [
        pytest.param("qwen3_32b", "vllm", "tp2", marks=pytest.mark.slow),
        ("qwen3_235b_a22b", "trtllm", "tep8"),
        ("deepseek_v3", "sglang", "dep8"),
        pytest.param("gpt_oss_120b", "vllm", "tp2", marks=pytest.mark.slow),
    ],
)
def test_any_step_is_within_a_hundredth_of_the_step_model(model: str, engine: str, layout: str) -> None:
    asked = rs.question(model=model, isl=4000, osl=500, engine=engine, hardware="h200_sxm", gpus=16)
    found = rs.evaluate(asked, batch=64, layout=layout)
    prices, ranks = StepPrices(found.workload, found.strategy), found.strategy.attention_dp
    rng, errors = np.random.default_rng(0), []
    for _ in range(60):
        sequences, context, tokens, length = (
            int(2 ** rng.uniform(*each)) for each in ((0, 9), (4, 15), (3, 14), (5, 15))
        )
        sequences, tokens = ((sequences, 0), (0, tokens), (sequences, tokens))[rng.integers(3)]
        context = context if sequences else 1
        everywhere = int(rng.integers(tokens, tokens * ranks, endpoint=True))
        step = RankStep(sequences, sequences * context, tokens, tokens * length / 2)
        priced_s = prices.priced_s(sequences, context, tokens, length, everywhere)
        errors.append(abs(prices.step_s(step, everywhere) / priced_s - 1))
    # Kernels change at certain numbers of rows: right there, between two cells, a step may be further off.
    assert np.quantile(errors, 0.93) < 0.01
    assert np.mean(errors) < 0.003


def test_a_line_of_decode_steps_is_what_each_step_takes() -> None:
    found = rs.evaluate(rs.question(model="llama_3_1_8b", isl=1000, osl=100), batch=8, tp=1)
    prices = StepPrices(found.workload, found.strategy)
    at_zero, slope, last = prices.decode_line(8, 1000)
    assert last > 1000
    for context in (1000, (1000 + last) / 2, last - 1):
        assert prices.step_s(RankStep(8, 8 * context)) == pytest.approx(at_zero + slope * context)


def test_cells_lie_on_both_sides_of_a_value() -> None:
    for cells in (Cells(1, 1), Cells(1, 16), Cells(256, 16), Cells(32, 4)):
        for value in (0, 1, 2, 5, 33, 37.5, 255.5, 256, 257, 300.2, 1024, 99_999):
            low, high = cells.around(value)
            assert low <= value <= high
            assert (low == high) == (low == value)
            assert high - low <= max(1, value)


def test_the_cache_has_room_for_as_many_tokens_as_evaluate_lets_in() -> None:
    for model, engine, layout in (
        ("qwen3_32b", "vllm", "tp2"),
        ("qwen3_32b", "trtllm", "tp2"),
        ("deepseek_v3", "sglang", "tp8"),
    ):
        asked = rs.question(model=model, isl=4000, osl=1000, engine=engine, hardware="h200_sxm", gpus=8)
        found = rs.evaluate(asked, batch=8, layout=layout)
        room, beside = StepPrices(found.workload, found.strategy).cache_room(4000, 4500)
        fit = room / (5000 if engine == "trtllm" else 4500)  # it sets whole answers aside
        assert beside == 0
        crowded = rs.evaluate(asked, batch=round(1.05 * fit), layout=layout)
        assert crowded.evaluation.running == pytest.approx(fit, rel=0.02)


@pytest.mark.parametrize(
    ("model", "hardware", "layout", "isl"),
    [
        ("llama_3_1_8b", "h100_sxm", "tp1", 16_000),
        ("qwen3_32b", "h100_sxm", "tp2", 4000),
        ("qwen3_235b_a22b", "h200_sxm", "tep4", 8000),
        ("deepseek_v3", "h200_sxm", "dep8", 100_000),
        ("gpt_oss_120b", "b200_sxm", "tp1", 5000),
    ],
)
def test_a_pool_of_prompts_gains_nothing_by_chunks(model: str, hardware: str, layout: str, isl: int) -> None:
    """So they are computed whole there: one after the other in steps of their own, cut or not."""
    asked = rs.question(model=model, hardware=hardware, phase="prefill", isl=isl, osl=1, engine="vllm", gpus=8)
    found = rs.evaluate(asked, batch=8, layout=layout)
    prices = StepPrices(found.workload, found.strategy)
    whole_s = prices.step_s(RankStep(0, 0.0, isl, isl * isl / 2)) + prices.engine_s(0)
    for chunk in (8192, 2048, 512):
        parts = [(at, min(chunk, isl - at)) for at in range(0, isl, chunk)]
        cut_s = [prices.step_s(RankStep(0, 0.0, new, new * (old + new / 2))) + prices.engine_s(0) for old, new in parts]
        assert sum(cut_s) > 0.98 * whole_s
