"""What stands for a model's layer, and what of it does not."""

from __future__ import annotations

import pytest

from raysearch.base.errors import InputError
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.layers.sharded_layer import check_runs
from sim.config.catalog import load_model
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from tests.questions import question_about


def test_a_model_whose_layer_would_run_without_a_part_is_refused_by_that_part() -> None:
    for name in ("qwen3_235b_a22b", "deepseek_v3", "llama_4_maverick"):
        check_runs(load_model(name))
    with pytest.raises(InputError, match=r"no a gate or an indexer beside latents .* one of glm_5_2 has"):
        check_runs(load_model("glm_5_2"))


@pytest.mark.parametrize("target", ["dtensor", "jax"])
def test_the_file_says_what_it_leaves_out(target: str) -> None:
    for name, lacks in (("glm_5_2", True), ("qwen3_235b_a22b", False)):
        workload = question_about(name, isl=1000, osl=100).load()
        strategy = Strategy(4, 4, 1, 8, megatron_dims(workload.model))
        export = exporter(target)(Deployment(workload, strategy, name))
        compile(export.files["sharding.py"], "sharding.py", "exec")
        assert ("'no spec and no layer that runs: a gate or an indexer" in export.files["sharding.py"]) == lacks
        assert any("indexer" in text for text in export.dropped) == lacks
