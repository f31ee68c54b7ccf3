"""Phase traffic through the commands: a strategy, a search and the optimum, each with bound and gap."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysearch as rs
from raysearch.deploy.export.source import served_deployments
from sim.config.catalog import load_workload
from sim.replay.replica_sets import prefill_replicas
from sim.strategy import ReplicaSet, Strategy

Command = Callable[..., subprocess.CompletedProcess[str]]
FILE = """
name = "mine"
model = "qwen3_32b"
hardware = "h100_sxm"
engine = "vllm"
phase = "traffic"
prompt_tokens = 4000
output_tokens = 60
tpot_slo_ms = 30.0
ttft_slo_ms = 500.0
max_gpus = 4
[precisions]
weights = "fp8"
kv_cache = "bf16"
activations = "bf16"
dispatch = "fp8"
[degrees]
tp = [2, 4]
ep = [1]
pp = [1]
batch = [4, 16]
[open_loop]
requests = 60
[serving]
replicas = [1, 2]
prefills = [0, 1]
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("traffic") / "mine.toml"
    path.write_text(FILE, encoding="utf-8")
    return "--workload", str(path)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificate") / "best.json"


@pytest.fixture(scope="module")
def optimum(raysearch: Command, asked: tuple[str, ...], certificate: Path) -> dict[str, object]:
    answer = json.loads(raysearch("optimum", *asked, "--json", "--out", str(certificate)).stdout)
    assert answer["goodput"]["proven"]
    assert answer["goodput"]["gap"] == 0.0
    return answer


def test_a_search_states_its_bound_and_its_gap_and_finds_no_more_than_the_optimum(
    raysearch: Command, tmp_path: Path, asked: tuple[str, ...], optimum: dict[str, float]
) -> None:
    found = json.loads(
        raysearch(
            "search", "-s", "annealing", "--budget", "12", "--seed", "1", "--out", str(tmp_path / "a"), *asked, "--json"
        ).stdout
    )
    bound = found["bound_tokens_per_s_per_gpu"]
    assert found["best"] <= optimum["tokens_per_s_per_gpu"] < bound
    assert found["gap"] == pytest.approx(1 - found["best"] / bound)


def test_the_default_searcher_finds_ways_to_serve(
    raysearch: Command, tmp_path: Path, asked: tuple[str, ...], optimum: dict[str, float]
) -> None:
    out = ("--budget", "12", "--out", str(tmp_path / "p"))
    found = json.loads(raysearch("search", "-s", "prior", *out, *asked, "--json").stdout)
    assert 0 < found["best"] <= optimum["tokens_per_s_per_gpu"]


def test_the_optimum_is_reported_with_its_goodput_and_that_of_other_seeds(optimum: dict[str, Any]) -> None:
    goodput = optimum["goodput"]
    assert goodput["requests_per_s"] * 60 / goodput["gpus"] == pytest.approx(optimum["tokens_per_s_per_gpu"])
    assert goodput["ttft_s"] <= 0.5
    assert 0.2 < min(goodput["other_seeds_tokens_per_s_per_gpu"]) / optimum["tokens_per_s_per_gpu"] < 2


def test_a_strategy_has_the_same_goodput_in_every_command_and_in_python_or_is_refused(
    raysearch: Command, asked: tuple[str, ...]
) -> None:
    degrees = ("--tp", "4", "--batch", "16")
    evaluated = json.loads(raysearch("evaluate", *asked, *degrees, "--json").stdout)
    explained = json.loads(raysearch("explain", *asked, *degrees, "--json").stdout)
    (picture, *_) = explained["pictures"]
    found = rs.evaluate(rs.question(workload=asked[1]), tp=4, batch=16)
    assert picture["tokens_per_s_per_gpu"] == evaluated["tokens_per_s_per_gpu"] == found.tokens_per_s_per_gpu
    refused = raysearch("recommend", *asked, "--isl", "4000", "--osl", "60")
    assert refused.returncode == 2
    assert "--phase=traffic" in refused.stderr


def test_a_winner_of_two_pools_or_replicas_is_exported_as_it_was_replayed(asked: tuple[str, ...]) -> None:
    workload = load_workload(asked[1])
    prefill = prefill_replicas(workload)[0].strategy
    decode = Strategy(2, 1, 1, 16, prefill.dims, 1, None, served=ReplicaSet(2, 0, 1, prefill))
    pools = served_deployments(workload, decode, "weights")
    assert {name: (each.strategy.tp, each.replicas) for name, each in pools.items()} == {
        "prefill": (prefill.tp, 1),
        "decode": (2, 2),
    }
    (one,) = served_deployments(workload, replace(decode, served=ReplicaSet(2, 1024)), "weights").values()
    assert (one.replicas, one.workload.chunk_tokens) == (2, 1024)


def test_a_certificate_proves_the_goodput_too_and_a_forged_one_is_refused(
    raysearch: Command, tmp_path: Path, optimum: dict[str, object], certificate: Path
) -> None:
    answer = json.loads(raysearch("verify", str(certificate), "--json").stdout)
    assert answer["goodput"]["proven"]
    assert answer["goodput"]["tokens_per_s_per_gpu"] == optimum["tokens_per_s_per_gpu"] < answer["tokens_per_s_per_gpu"]
    record = json.loads(certificate.read_text())
    path = tmp_path / "best.json"
    record["goodput"]["tokens_per_s_per_gpu"] *= 1.1
    path.write_text(json.dumps(record))
    assert "proves nothing" in raysearch("verify", str(path)).stderr
