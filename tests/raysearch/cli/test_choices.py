"""How collectives and stages run, as every command that prices a deployment takes it: one figure, or one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("every_best_alone")
ASKED = ("--model", "llama_3_1_8b", "--isl", "2000", "--osl", "100", "--gpus", "4", "--tpot-ms", "30")
BARE = ("--engine", "none", "--set", "batches=powers_of_two", "--space")
COMBINED = {
    "in parts": (*BARE, "joint", "--phase", "prefill", "--ttft-ms", "30"),
    "merged, over two dims": (*BARE, "two_dimensional", "--phase", "decode"),
    "an engine": ("--engine", "vllm", "--phase", "serve", "--ttft-ms", "4000", "--set", "batches=powers_of_two"),
}
CHOSEN = {
    "in parts": ("overlap_parts=4", "fp8_gather=yes", "all_reduce=two_shot", "stage_layers=17,15"),
    "merged, over two dims": ("merge_collectives=yes", "fp8_gather=yes", "all_reduce=ring", "tp_inner=4"),
    "an engine": ("all_reduce=ring", "stage_layers=17,15"),
}


@pytest.mark.parametrize("name", COMBINED)
def test_every_command_has_the_figure_of_the_others(raysearch, name: str, tmp_path: Path) -> None:
    question = [*ASKED, *COMBINED[name], *(word for each in CHOSEN[name] for word in ("--set", each))]

    def asked(command: str, *more: str) -> Any:
        ran = raysearch(command, *question, *more, "--json")
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    proof = tmp_path / "proof.json"
    best = asked("optimum", "--out", str(proof))
    proved = json.loads(proof.read_text())
    for each in CHOSEN[name]:
        key, _, value = each.partition("=")
        assert str(proved["question"][key]).lower() in (value, "true"), each
    strategy, reached = best["strategy"], best["tokens_per_s_per_gpu"]
    degrees = [word for key in ("tp", "ep", "pp", "batch") for word in (f"--{key}", str(strategy[key]))]
    degrees += ["--dims", ",".join(map(str, strategy["dims"]))]
    evaluated = asked("evaluate", *degrees)
    assert evaluated["tokens_per_s_per_gpu"] == reached
    idle = "stage_layers=17,15" in CHOSEN[name] and strategy["pp"] != 2  # of which whoever gave them hears
    assert [each.startswith("stage_layers=17,15 is for 2 ") for each in evaluated["warnings"]].count(True) == idle
    opened = ",".join("?" * len(strategy["dims"]))
    assert asked("complete", "--dims", opened)["best"]["tokens_per_s_per_gpu"] == reached
    shown = re.search(r"([\d,.]+) tok/s/GPU", raysearch("explain", *question, *degrees).stdout)
    assert shown is not None
    assert float(shown[1].replace(",", "")) == pytest.approx(reached, rel=1e-3)
    found = asked("search", "-s", "coordinate", "--budget", "10", "--out", str(tmp_path / "run"))
    assert found["best"] <= reached
    assert raysearch("verify", proof).returncode == 0


def test_the_pools_that_are_recommended_are_priced_as_the_engine_is_configured(raysearch) -> None:
    question = [*ASKED[:-1], "6", "--ttft-ms", "4000", *BARE[2:4], "--set", "all_reduce=ring"]
    pools = json.loads(raysearch("recommend", *question, "--json").stdout)["disaggregated"]
    tensor_parallel = False
    for phase in ("prefill", "decode"):
        strategy, figure = pools[phase]["strategy"], pools[phase]["tokens_per_s_per_gpu"]
        tensor_parallel |= strategy["tp"] > 1
        degrees = [word for key in ("tp", "ep", "pp", "batch") for word in (f"--{key}", str(strategy[key]))]
        again = raysearch("evaluate", *question, "--phase", phase, *degrees, "--json")
        assert json.loads(again.stdout)["tokens_per_s_per_gpu"] == pytest.approx(figure, rel=1e-12)
    assert tensor_parallel


@pytest.mark.parametrize("command", [("place", "bursty_qwens"), ("forecast", "announced.yaml")], ids=str)
@pytest.mark.parametrize("chosen", ["all_reduce=ring", "overlap_parts=2"])
def test_commands_whose_files_have_no_such_choice_refuse_it_in_one_line(raysearch, command, chosen: str) -> None:
    ran = raysearch(*command, "--set", chosen)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert f"this command has no setting '{chosen.partition('=')[0]}'" in ran.stderr
