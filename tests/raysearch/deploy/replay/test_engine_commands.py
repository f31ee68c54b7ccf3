"""Commands that start servers, replayed: what an export says comes back, and an engine's own defaults fill the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysearch as rs
from raysearch.answers.replayed import deployed_in
from raysearch.base.errors import InputError
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet
from sim.replay.replica import Deployed

ASKED = {"isl": 2000, "osl": 100, "tpot_ms": 40, "ttft_ms": 600}


def _replica(path: Path, **asked: Any) -> tuple[Deployed, int]:
    fleet = deployed_in(path, rs.question(**{**ASKED, **asked}), 0).fleet(None, "least_loaded")
    assert isinstance(fleet, AggregatedFleet)
    return fleet.deployed, fleet.replicas


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("llama_3_1_8b", {"tp": 2, "pp": 2}),
        ("qwen3_235b_a22b", {"layout": "tep4"}),
        ("qwen3_235b_a22b", {"layout": "dep8"}),
        ("qwen3_235b_a22b", {"layout": "tp4"}),
    ],
)
def test_an_exported_command_is_replayed_as_what_was_exported(
    model: str, degrees: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    asked = rs.question(model=model, engine=engine, gpus=16, kv_cache="fp8", **ASKED)
    found = rs.evaluate(asked, batch=32, **degrees)
    exported = rs.export(found, engine)
    (tmp_path / "serve.sh").write_text(f"# mine\n{exported.command}\n")
    for name, text in exported.files.items():
        (tmp_path / name).write_text(text)
    replica, copies = _replica(tmp_path / "serve.sh", gpus=16)
    own = Deployed.of(found.workload, found.strategy)
    assert (replica.strategy.attention_dp, copies) == (found.strategy.attention_dp, 1)
    assert replace(replica.strategy, dp=None) == replace(found.strategy, dp=None)
    assert replica.scheduler == own.scheduler
    assert replica.room_tokens == pytest.approx(own.room_tokens, rel=0.01)
    served = replica.prices.workload
    assert (served.model, served.precisions) == (found.workload.model, found.workload.precisions)


def test_what_a_command_leaves_open_is_as_the_engine_ships_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("exec vllm serve Qwen/Qwen3-32B-FP8 -tp 2 \\\n  -dp=3 --port 8000 --enforce-eager\n")
    replica, copies = _replica(path)
    assert (replica.strategy.tp, copies) == (2, 3)  # ranks of a dense model share nothing
    assert replica.scheduler.max_sequences == 1024
    assert (replica.scheduler.policy.step_tokens, replica.scheduler.policy.chunks) == (8192, True)
    path.write_text("python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 4 --chunked-prefill-size 2048")
    replica, copies = _replica(path, model="qwen3_32b")
    assert (replica.strategy.tp, copies, replica.scheduler.policy.step_tokens) == (4, 1, 2048)
    assert not replica.scheduler.policy.mixes
    path.write_text("trtllm-serve Qwen/Qwen3-32B --tp_size 2 --max_num_tokens=4096 --config mine.yaml --port 80")
    (tmp_path / "mine.yaml").write_text("max_batch_size: 96\nenable_chunked_prefill: true\nenable_attention_dp: no")
    replica, copies = _replica(path)
    assert (replica.strategy.tp, replica.strategy.attention_dp, copies) == (2, 1, 1)
    assert replica.scheduler.max_sequences == 96
    assert (replica.scheduler.policy.step_tokens, replica.scheduler.policy.chunks) == (4096, True)
    (tmp_path / "mine.yaml").write_text("kv_cache_config: {free_gpu_memory_fraction: 0.8, dtype: fp8}\n")
    replica, _ = _replica(path)
    assert (replica.scheduler.max_sequences, replica.scheduler.policy.chunks) == (2048, False)
    assert replica.prices.workload.precisions.kv_cache == "fp8"
    found = rs.replay(rs.question(**ASKED), path=path, requests_per_s=1.0, requests=50, seeds=1)
    assert found.feasible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve nobody/knows -tp 2", "name the model by"),
        ("vllm serve Qwen/Qwen3-32B -tp two", "-tp: expected a number, got 'two'"),
        ("vllm serve Qwen/Qwen3-32B\nvllm serve Qwen/Qwen3-32B", "has 2 commands"),
        ("vllm serve 'Qwen/Qwen3-32B", "No closing quotation"),
        ("trtllm-serve disaggregated -c pools.yaml", "expected a JSON file that raysearch wrote, or a command"),
        ("trtllm-serve Qwen/Qwen3-32B --config none.yaml", "none.yaml: No such file or directory"),
        ("trtllm-serve Qwen/Qwen3-32B --config serve.sh", "serve.sh: expected keys with values"),
    ],
)
def test_a_command_that_cannot_be_read_is_one_clear_error(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(text)
    with pytest.raises(InputError, match=expected):
        deployed_in(path, rs.question(**ASKED), 0)
    path.write_text("vllm serve Qwen/Qwen3-32B")
    with pytest.raises(InputError, match="the command starts vllm"):
        deployed_in(path, rs.question(engine="sglang", **ASKED), 0)
