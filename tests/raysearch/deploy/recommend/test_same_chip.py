"""What a machine of the same chip says, where its serving runs know a model and ours do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.same_chip import where_measured
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.questions import question_about

ASKED = question_about("deepseek_v3", "h100_sxm", phase="serve", engine="sglang", isl=4000, osl=1000, gpus=16)


def test_a_strategy_is_priced_where_its_model_was_measured_and_nowhere_else() -> None:
    workload = replace(ASKED.load(), chunk_tokens=512)
    strategy = Strategy(1, 8, 2, 384, megatron_dims(workload.model))
    best, demand = evaluate(workload, strategy), Demand(workload, 16, ASKED)
    found = where_measured(demand, replace(best, tokens_per_s_per_gpu=9e3))
    assert found is not None
    assert found.machine == "h200_sxm"
    there = replace(replace(ASKED, hardware="h200_sxm").load(), chunk_tokens=512)
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(evaluate(there, strategy).tokens_per_s_per_gpu)
    assert where_measured(demand, replace(best, tokens_per_s_per_gpu=found.evaluation.tokens_per_s_per_gpu)) is None
    assert where_measured(demand, replace(best, interval_because="")) is None  # measured here
    assert where_measured(replace(demand, question=None), best) is None
