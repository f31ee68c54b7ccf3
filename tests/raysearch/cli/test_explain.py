"""`raysearch explain` and `raysearch verify-rules`, as processes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]
EXPLAIN = ("explain", "-w", "gpt_moe_1_2t_16k", "--tp", "8", "--ep", "16", "--pp", "2", "--batch", "512")


def test_explain_prints_two_strategies_side_by_side(raysearch: Command) -> None:
    shown = raysearch(*EXPLAIN, "--dims", "megatron-sp", "--set", "against=megatron")
    assert shown.returncode == 0, shown.stderr
    assert "reduce_scatter over tp" in shown.stdout
    assert "all_reduce over tp" in shown.stdout
    assert "► attn_norm tokens" in shown.stdout
    assert "…" not in shown.stdout
    assert re.search(r"tok/s/GPU ±\d+%, layer", shown.stdout)
    assert "extrapolated in megatron (2,1,1,0,2,2,2,2,1,1,0,2): expert all-to-all beyond" in shown.stdout


def test_explain_takes_a_second_strategy_of_other_degrees(raysearch: Command) -> None:
    context = ("--tp", "1", "--cp", "8", "--dp", "16", "--ep", "16", "--pp", "1", "--batch", "64")
    options = ("explain", "-w", "gpt_moe_1_2t_1m", *context, "--dims", "201022210102", "--json")
    answer = json.loads(raysearch(*options, "--set", "against=megatron tp=8 cp=1").stdout)
    assert answer["heading"].endswith(
        "attention CP8 DP16, experts TP8 EP16, batch 64 | attention TP8 DP16, experts TP8 EP16, batch 64"
    )
    first, second = answer["pictures"]
    assert [edge["kind"] for edge in first["nodes"][2]["inside"]] == ["all_to_all"]
    assert second["nodes"][2]["inside"] == []
    alone = ("evaluate", "-w", "gpt_moe_1_2t_1m", "--tp", "8", "--ep", "16", "--pp", "1", "--batch", "64")
    answer = json.loads(raysearch(*alone, "--dims", "2,1,1,0,2,2,2,2,1,1,0,2", "--json").stdout)
    assert answer["tokens_per_s_per_gpu"] == second["tokens_per_s_per_gpu"]


def test_explain_takes_a_workload_by_flags_and_draws_each_group_of_layers(raysearch: Command) -> None:
    model = ("--model", "gpt_oss_120b", "--phase", "serve", "--isl", "2000", "--osl", "500", "--engine", "vllm")
    answer = json.loads(raysearch("explain", *model, "--tp", "4", "--batch", "8", "--json").stdout)
    assert len(answer["pictures"]) == 2  # layers with a sliding window, and those without


def test_explain_writes_a_picture_and_tells_programs_the_same(raysearch: Command, tmp_path: Path) -> None:
    path = tmp_path / "layer.svg"
    answer = json.loads(raysearch(*EXPLAIN, "--dims", "megatron", "--out", path, "--json").stdout)
    assert answer["svg"] == str(path)
    assert path.read_text(encoding="utf-8").startswith("<svg ")
    (picture,) = answer["pictures"]
    assert len(picture["nodes"]) == 12
    assert 0 < picture["expected_error"] < 1
    for what in picture["extrapolated"]:
        assert f"extrapolated: {what}" in path.read_text(encoding="utf-8")
    assert picture["extrapolated"]
    assert picture["nodes"][4]["edges"][0]["collectives"][0]["kind"] == "all_reduce"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dims", "megatron", "--set", "against=megatorn"), "dims: expected numbers"),
        (("--dims", "megatron", "--set", "against=tp=4"), "against takes dims, and degrees"),
        (
            ("--dims", "megatron", "--set", "against=megatron tq=4"),
            "against takes degrees such as tp=8, of tp, ep",
        ),
        (("--dims", "megatron", "--set", "against=megatron tp=four"), "got tp='four'"),
        (("--dims", "megatron", "--out", "/proc/x/y.svg"), "cannot put results into /proc/x"),
        (("--dims", "megatron", "--out", "layer.png"), "--out: expected the name of the .svg file to write"),
        (("--dims", "megatron", "--out", "/dev/null"), "--out: expected the name of the .svg file to write"),
        (("--dims", "1,2"), "12"),
    ],
)
def test_explain_refuses_a_mistake_in_one_line(raysearch: Command, options: tuple[str, ...], message: str) -> None:
    failed = raysearch(*EXPLAIN, *options)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_verify_rules_proves_one_operation(raysearch: Command) -> None:
    answer = json.loads(raysearch("verify-rules", "--set", "op=matmul", "--json").stdout)
    assert answer["proved"]
    (op,) = answer["ops"]
    assert "S(1), S(0) -> P(sum)" in op["rules"]
    assert op["combinations"] == 15**3
    assert "S(0) -> S(0)" in raysearch("verify-rules", "--set", "op=relu").stdout


def test_verify_rules_says_where_a_shard_lies_after_a_view(raysearch: Command) -> None:
    """Batch stays batch, a sharded sequence becomes a striped one, and columns that no view touches stay as uneven."""
    found = json.loads(raysearch("verify-rules", "--set", "view=4,8,6->32,6", "--json").stdout)
    assert (found["executed"], found["placements"]) == (True, {"S(0)": "S(0)", "S(1)": "SS(0,4)", "S(2)": "S(1)"})
    assert "gathered first" in raysearch("verify-rules", "--set", "view=6,8->48").stdout
    for wrong, message in (
        ("4,8", "expected two shapes"),
        ("4,8->31", "as many elements"),
        ("0->0", "as many elements"),
    ):
        failed = raysearch("verify-rules", "--set", f"view={wrong}")
        assert failed.returncode == 2
        assert message in failed.stderr
    failed = raysearch("verify-rules", "--set", "view=6->2,3", "--set", "op=matmul")
    assert failed.returncode == 2
    assert "leave out --set op" in failed.stderr


@pytest.mark.slow
def test_verify_rules_prints_the_counter_example_of_an_outsiders_wrong_rule(
    raysearch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outsider.py").write_text(
        "import sim.sharding.operations\nfrom sim.sharding.rules import add_rules, written\n"
        'add_rules("relu", written("P(sum) -> P(sum)"))\n'
    )
    monkeypatch.chdir(tmp_path)
    checked = raysearch("verify-rules", "--set", "op=relu", "--set", "module=outsider", cwd=tmp_path)
    assert checked.returncode == 1
    assert "P(sum) -> P(sum) is wrong (seed 0, sign +1, 4 ranks)" in " ".join(checked.stdout.split())
    assert checked.stderr.startswith("error: wrong or missing rules: relu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "op=matmull"), "unknown operation 'matmull': did you mean 'matmul'?"),
        (("--set", "module=no_such_module"), "cannot import the module no_such_module"),
    ],
)
def test_verify_rules_refuses_what_it_does_not_know(raysearch: Command, options: tuple[str, ...], message: str) -> None:
    failed = raysearch("verify-rules", *options)
    assert failed.returncode == 2
    assert message in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("body", ["raise ValueError('mine')", "import sys; sys.exit(3)", "def broken(:"])
def test_a_module_that_cannot_be_imported_is_one_line(raysearch: Command, tmp_path: Path, body: str) -> None:
    (tmp_path / "outsider.py").write_text(body + "\n")
    refused = raysearch("verify-rules", "--set", "op=relu", "--set", "module=outsider", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: cannot import the module outsider: ")
    assert len(refused.stderr.splitlines()) == 1
