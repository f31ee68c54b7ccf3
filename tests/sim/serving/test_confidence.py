"""What a confidence asks of steps of which only the least is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.serving.confidence import slower
from sim.serving.phases import batching
from tests.questions import question_about


@pytest.mark.parametrize(("model", "engine", "osl"), [("qwen3_32b", "vllm", 500), ("deepseek_v3", "sglang", 200)])
def test_steps_that_take_no_less_never_keep_a_limit_that_shorter_ones_cannot(model: str, engine: str, osl: int) -> None:
    workload = question_about(model, "h200_sxm", phase="serve", engine=engine, isl=4000, osl=osl, tpot_ms=50).load()
    longer, rng = slower(workload), np.random.default_rng(3)
    refused, proven = 0, 0
    for _ in range(300):
        dp, stages = int(rng.choice([1, 2, 8])), int(rng.choice([1, 2, 4]))
        fewer = int(rng.integers(1, 200))
        least = batching(workload, fewer, dp).at_least.through(stages)
        state = batching(workload, fewer + int(rng.integers(0, 400)), dp).through(stages)
        least_s = rng.uniform(0.001, 0.05) + np.array([0.0, rng.uniform(0, 0.3)])
        decode_s, mixed_s = least_s * rng.uniform(1, 3, 2)
        steps_s = decode_s, max(decode_s, mixed_s)
        steps, shortest = state.steps(*steps_s), least.steps(*least_s)
        surely_s = steps.tpot_s * longer.token(float(steps.prompt_share))
        known = shortest.tpot_s, shortest.prompt_share, least.pace.seen(least.times)
        just = replace(longer, workload=replace(workload, tpot_slo_s=surely_s * (1 + 1e-9)))
        assert just.may_keep(*map(float, known))
        proven += longer.growth <= 1 - known[2]
        shorter = replace(longer, workload=replace(workload, tpot_slo_s=0.999 * known[0] * longer.token(known[1])))
        refused += not shorter.may_keep(*map(float, known))
    assert 100 < proven == refused
