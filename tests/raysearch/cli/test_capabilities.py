"""What `raysearch list` says of machines and models, and of all else that has a name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from raysearch.cli.app import app
from sim.config.files import list_names


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["list", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_all_that_has_a_name_is_listed(listed: dict[str, Any]) -> None:
    assert "gpt_moe_1_6t_64k" in listed["workloads"]
    assert {"smoke", "quickstart"} <= set(listed["studies"])
    searchers = {"random", "random_walk", "annealing", "coordinate", "megatron", "megatron_sp", "ppo_paper"}
    assert searchers <= set(listed["searchers"])
    assert {"vllm", "sglang", "trtllm", "megatron", "dynamo", "llm-d", "dtensor", "jax"} <= set(listed["exports"])


def test_every_machine_and_model_is_listed_with_what_is_known_of_it(listed: dict[str, Any]) -> None:
    facts = listed["facts"]
    assert (listed["hardware"], listed["models"]) == (list_names("hardware"), list_names("models"))
    assert sorted(facts["hardware"]) == list_names("hardware")
    assert sorted(facts["models"]) == list_names("models")
    machines, models = facts["hardware"], facts["models"]
    assert (machines["h100_sxm"]["efficiencies"], machines["h100_sxm"]["interval"]) == ("measured", [1, 1])
    assert (machines["l40s"]["efficiencies"], machines["l40s"]["serving"]) == ("measured", "carried over from h100_sxm")
    assert machines["h100_sxm"]["serving"] == machines["b200_sxm"]["serving"] == "measured"
    assert machines["gb300_nvl72"]["serving"] == "carried over from several machines"
    assert machines["h20_sxm"]["efficiencies"] == "carried over from h100_sxm"
    assert machines["mi355x"]["efficiencies"] == "GEMMs and experts measured, the rest carried over from h100_sxm"
    assert machines["mi355x"]["serving"] == "measured"
    assert (machines["mi300x"]["topology"], machines["h100_nvl"]["rack_gpus"]) == ("mesh", 8)
    assert all(facts["bias"] for facts in machines.values() if facts["efficiencies"] != "measured")
    assert machines["a100_40_sxm"]["formats"] == ["bf16"]
    assert machines["h100_sxm"]["formats"] == ["bf16", "fp8"]
    assert machines["b200_sxm"]["formats"] == ["bf16", "fp8", "mxfp4", "nvfp4"]
    assert "trtllm" in models["qwen3_32b"]["serving_measured_under"]
    assert models["deepseek_v3"]["assumed"]
    assert all(
        {"evaluate", "optimum", "search"} <= set(each["can"]) for kind in facts.values() for each in kind.values()
    )


def test_the_list_is_a_table_for_people() -> None:
    result = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"})
    assert "carried over from h100_sxm" in result.stdout
    assert "72 switched" in result.stdout
    assert "ppo_paper" in result.stdout
    assert "`vllm serve`" in result.stdout
