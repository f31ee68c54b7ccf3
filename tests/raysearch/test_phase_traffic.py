"""Phase traffic through the commands: a strategy, a search and the optimum, each with bound and gap."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
ASKED = (
    *("--model", "qwen3_32b", "--isl", "4000", "--osl", "100", "--tpot-ms", "30", "--ttft-ms", "500", "--gpus", "4"),
    *("--phase", "traffic", "--set", "batches=powers_of_two", "--set", "confidence=0.5"),
)


@pytest.fixture(scope="module")
def optimum(raysearch: Command) -> dict[str, object]:
    told = json.loads(raysearch("optimum", *ASKED, "--json").stdout)
    assert told["goodput"]["proven"]
    assert told["goodput"]["gap"] == 0.0
    return told


def test_a_search_states_its_bound_and_its_gap_and_finds_no_more_than_the_optimum(
    raysearch: Command, tmp_path: Path, optimum: dict[str, float]
) -> None:
    found = json.loads(
        raysearch(
            "search", "-s", "annealing", "--budget", "10", "--seed", "1", "--out", str(tmp_path / "a"), *ASKED, "--json"
        ).stdout
    )
    bound = found["bound_tokens_per_s_per_gpu"]
    assert found["best"] <= optimum["tokens_per_s_per_gpu"] < bound
    assert found["gap"] == pytest.approx(1 - found["best"] / bound)


def test_evaluating_the_optimum_gives_its_goodput(raysearch: Command, optimum: dict[str, object]) -> None:
    strategy = optimum["strategy"]
    assert isinstance(strategy, dict)
    degrees = [text for name in ("tp", "pp", "batch") for text in (f"--{name}", str(strategy[name]))]
    dims = ",".join(map(str, strategy["dims"]))
    told = json.loads(raysearch("evaluate", *ASKED, *degrees, "--dims", dims, "--json").stdout)
    assert told["tokens_per_s_per_gpu"] == optimum["tokens_per_s_per_gpu"]
    assert told["goodput"]["requests_per_s"] * 100 / told["gpus"] == pytest.approx(told["tokens_per_s_per_gpu"])
    assert told["goodput"]["ttft_s"] <= 0.5
