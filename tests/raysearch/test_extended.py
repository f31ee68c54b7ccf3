"""The extended space from the command line: evaluate, explain, optimum and search, as processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raysearch as rs
from envs.calls import parse_dims_text
from envs.rows import read_rows
from raysearch.base.file_io import degrees_text
from raysearch.cli.app import app
from sim.layouts import layout_of

Command = Callable[..., "subprocess.CompletedProcess[str]"]
LONG = ("-w", "gpt_moe_1_2t_1m", "--pp", "1", "--batch", "64", "--dims", "megatron", "--tp", "2", "--cp", "4")


@pytest.fixture(scope="module")
def tiny_extended(tiny_workload: Path) -> Path:
    """The tiny workload, whose searches have the extended space."""
    text = tiny_workload.read_text(encoding="utf-8").replace(
        'name = "tiny"', 'name = "tiny_extended"\nspace = "extended"'
    )
    path = tiny_workload.with_name("tiny_extended.toml")
    path.write_text(text, encoding="utf-8")
    return path


SEARCH = ("search", "-s", "annealing", "--seed", "1", "--budget", "60", "--json")


@pytest.fixture(scope="module")
def searched(
    raysearch: Command, tiny_extended: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Folder and answer of a search of the extended space."""
    out = tmp_path_factory.mktemp("searched") / "run"
    return out, json.loads(raysearch(*SEARCH, "-w", tiny_extended, "--out", out).stdout)


def test_both_meshes_follow_from_the_degrees(raysearch: Command) -> None:
    evaluated = json.loads(raysearch("evaluate", *LONG, "--ep", "16", "--dp", "16", "--json").stdout)
    assert evaluated["strategy"] == {
        "tp": 2,
        "ep": 16,
        "pp": 1,
        "batch": 64,
        "cp": 4,
        "dp": 16,
        "dims": [2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2],
    }
    assert evaluated["gpus"] == 128
    printed = raysearch("evaluate", *LONG, "--ep", "16").stdout
    assert "attention TP2 CP4 DP16, experts TP8 EP16" in printed


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (("--ep", "16", "--dp", "0"), "dp: expected a whole number from 1"),
        (("--ep", "16", "--cp", "-2"), "cp: expected a whole number from 1"),
    ],
)
def test_degrees_that_contradict_each_other_are_one_clear_message(
    raysearch: Command, degrees: tuple[str, ...], message: str
) -> None:
    failed = raysearch("evaluate", *LONG, *degrees)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_explain_names_the_axes_of_both_meshes(raysearch: Command, tmp_path: Path) -> None:
    shown = raysearch("explain", *LONG, "--ep", "16", "--dp", "32").stdout
    for expected in (
        "qkv[t, q_tp]",
        "all_to_all over cp",
        "attn_out[t, a_{tp,cp}]",
        "all_reduce over tp x cp",
        "all_gather over dp",
        "ffn_mid[e, c, f_moe_tp]",
        "all_to_all over moe_ep",
    ):
        assert expected in shown
    path = tmp_path / "layer.svg"
    assert raysearch("explain", *LONG, "--ep", "16", "--out", path).returncode == 0
    assert "attn_out[t, a_{tp,cp}]" in path.read_text(encoding="utf-8")


def test_optimum_compares_the_spaces_and_agrees_with_the_sweep_of_the_paper_s(
    raysearch: Command, tiny_workload: Path
) -> None:
    swept = json.loads(raysearch("optimum", "-w", tiny_workload, "--json").stdout)["tokens_per_s_per_gpu"]
    spaces = json.loads(raysearch("optimum", "-w", tiny_workload, "--set", "compare_spaces", "--json").stdout)["spaces"]
    values = {name: best["tokens_per_s_per_gpu"] or 0.0 for name, best in spaces.items()}
    assert values["joint"] == pytest.approx(swept, rel=1e-12)
    assert values["megatron"] <= values["paper"] <= values["joint"] * (1 + 1e-12)
    assert values["extended"] >= max(values.values()) * (1 - 1e-12)
    assert all(0 < best["expected_error"] < 1 and isinstance(best["extrapolated"], list) for best in spaces.values())
    alone = json.loads(raysearch("optimum", "-w", tiny_workload, "--space", "extended", "--json").stdout)
    assert alone["tokens_per_s_per_gpu"] == spaces["extended"]["tokens_per_s_per_gpu"]
    assert alone["strategy"] == spaces["extended"]["strategy"]
    table = raysearch("optimum", "-w", tiny_workload, "--set", "compare_spaces").stdout
    assert "Megatron-LM refuses experts with tensor parallelism and without sequence parallelism" in " ".join(
        table.split()
    )
    assert f"{values['extended']:,.2f}" in table
    assert f"±{spaces['extended']['expected_error']:.0%}" in table


def test_the_paper_s_space_has_an_optimum_and_a_size_of_its_own(raysearch: Command, tiny_workload: Path) -> None:
    answer = json.loads(raysearch("optimum", "-w", tiny_workload, "--space", "paper", "--json").stdout)
    spaces = json.loads(raysearch("optimum", "-w", tiny_workload, "--set", "compare_spaces", "--json").stdout)["spaces"]
    assert answer["space"] == "paper"
    assert answer["space_size"] == spaces["paper"]["space_size"] == 16 * 2**8 * 3**4
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(spaces["paper"]["tokens_per_s_per_gpu"], rel=1e-12)
    assert not {0} & {answer["strategy"]["dims"][op] for op in (0, 2, 4, 5, 6, 7, 9, 11)}  # none along tokens


def test_evaluate_says_what_keeps_a_strategy_out_of_a_space(raysearch: Command) -> None:
    form = ("evaluate", *LONG[:-4], "--tp", "8", "--ep", "16")
    assert json.loads(raysearch(*form, "--space", "paper", "--json").stdout)["outside_space"] == []
    parallel = [*form]
    parallel[parallel.index("megatron")] = "megatron-sp"
    printed = raysearch(*parallel, "--space", "paper").stdout
    assert "Not in the space 'paper': attn_norm is 0, not one of 1, 2; " in printed
    assert "Not in the space" not in raysearch(*parallel).stdout
    assert json.loads(raysearch("evaluate", *LONG, "--ep", "16", "--json").stdout)["outside_space"] == [
        "cp is 4, not one of 1"
    ]


def test_a_search_of_the_extended_space_is_scored_against_its_own_optimum(
    raysearch: Command, tiny_extended: Path, searched: tuple[Path, dict[str, Any]]
) -> None:
    folder, answer = searched
    best = json.loads(raysearch("optimum", "-w", tiny_extended, "--json").stdout)
    assert answer["calls"] == 60
    assert answer["optimum"] == best["tokens_per_s_per_gpu"]
    rows = read_rows(folder)
    strategies = [parse_dims_text(text) for text in rows["dims"]]
    assert any("cp" in strategy for strategy in strategies)
    assert all(len(strategy["dims"]) == 12 for strategy in strategies)
    report = json.loads(raysearch("report", folder, "--json").stdout)
    assert report["runs"][0]["best"] == answer["best"]


def test_an_option_chooses_the_space_as_a_workload_file_does(
    raysearch: Command, tiny_workload: Path, searched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, by_file = searched
    by_option = json.loads(
        raysearch(*SEARCH, "-w", tiny_workload, "--space", "extended", "--out", tmp_path / "o").stdout
    )
    same = ("best", "strategy", "optimum", "calls", "expected_error", "extrapolated")
    assert [by_option[key] for key in same] == [by_file[key] for key in same]
    assert any("cp" in parse_dims_text(text) for text in read_rows(tmp_path / "o")["dims"])
    assert json.loads(raysearch("report", tmp_path / "o", "--json").stdout)["runs"][0]["best"] == by_option["best"]


def test_a_search_for_an_engine_is_scored_against_what_the_engine_can_run(tiny_workload: Path, tmp_path: Path) -> None:
    def answer_of(*words: object) -> dict:
        shown = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
        return json.loads(shown.stdout)

    form = ("search", "-w", tiny_workload, "-s", "random", "--budget", "30", "--engine", "vllm")
    found = answer_of(*form, "--out", tmp_path / "run")
    best = answer_of("optimum", "-w", tiny_workload, "--engine", "vllm")
    assert (found["config_hash"], found["optimum"]) == (best["config_hash"], best["tokens_per_s_per_gpu"])
    assert answer_of("report", tmp_path / "run")["runs"][0]["best"] == found["best"]


def test_a_layout_stands_for_its_degrees() -> None:
    options = ["evaluate", "-w", "gpt_moe_1_2t_16k", "--batch", "512", "--pp", "2", "--json"]
    named = CliRunner().invoke(app, [*options, "--layout", "TEP16"])
    by_degrees = CliRunner().invoke(app, [*options, "--tp", "16", "--ep", "16", "--dp", "1"])
    assert json.loads(named.stdout) == json.loads(by_degrees.stdout)
    assert json.loads(named.stdout)["layout"] == "TEP16 PP2"
    assert "--layout=tep16 already sets --tp" in str(
        CliRunner().invoke(app, [*options, "--layout", "tep16", "--tp", "8"]).exception
    )
    assert "--layout=dep8 already sets --cp" in str(
        CliRunner().invoke(app, [*options, "--layout", "dep8", "--cp", "2"]).exception
    )
    assert "such as --layout=tep8" in str(CliRunner().invoke(app, options).exception)
    assert "--layout=dep8pp2 already sets --pp" in str(
        CliRunner().invoke(app, [*options, "--layout", "dep8pp2"]).exception
    )


def test_what_an_answer_prints_as_its_strategy_is_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    for beside in ("_best_beside", "variations"):  # which take most of the time, and print no strategy
        monkeypatch.setattr(f"raysearch.deploy.recommend.recommendation.{beside}", lambda *_: ())
    asked = rs.question(model="qwen3_235b_a22b", hardware="h200_sxm", isl=4000, osl=500, gpus=8, engine="sglang")
    answer = rs.recommend(replace(asked, batches="powers_of_two"), only="aggregated").answer
    found = [each.evaluation for each in (*answer.options, *answer.front)]
    assert len({layout_of(each.strategy) for each in found}) > 2
    for each in found:
        again = rs.evaluate(asked, layout=degrees_text(each.strategy)).evaluation
        assert again.tokens_per_s_per_gpu == each.tokens_per_s_per_gpu


def test_explain_sets_two_layouts_side_by_side() -> None:
    options = ["explain", "-w", "gpt_moe_1_2t_16k", "--layout", "dep32", "--batch", "512", "--json"]
    answer = json.loads(CliRunner().invoke(app, [*options, "--set", "against=megatron layout=tep32"]).stdout)
    assert "DEP32, batch 512 (attention DP32, experts EP32) | " in answer["heading"]
    assert "| TEP32, batch 512 (attention TP32, experts EP32)" in answer["heading"]


def test_own_choices_and_degrees_that_divide_nothing_are_searched(tmp_path: Path) -> None:
    """Nothing is better than the exact optimum, which is at least that of fewer degrees and shared choices."""
    file = tmp_path / "mixed.toml"
    file.write_text(_MIXED, encoding="utf-8")
    runner = CliRunner()

    def answer_of(command: str, *options: str) -> dict[str, Any]:
        result = runner.invoke(app, [command, "-w", str(file), *options, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    wider = ("--set", "groups=own", "--set", "any_degrees=pp,ep")
    searched = ("-s", "random", "-b", "40", "--out", str(tmp_path / "run"))
    found, best, usual = answer_of("search", *searched, *wider), answer_of("optimum", *wider), answer_of("optimum")
    rows = read_rows(tmp_path / "run")
    assert all(len(parse_dims_text(dims)["dims"]) == 24 for dims in rows["dims"])
    assert set(rows["pp"]) - {1, 2}
    assert set(rows["ep"]) - {1, 2, 4}
    assert found["optimum"] == pytest.approx(best["tokens_per_s_per_gpu"])
    assert (found["best"] or 0.0) <= best["tokens_per_s_per_gpu"] * (1 + 1e-9)
    assert usual["tokens_per_s_per_gpu"] <= best["tokens_per_s_per_gpu"] * (1 + 1e-9)
    again = runner.invoke(app, ["search", "-w", str(file), *searched, "--resume", "--json"])
    assert "resume with the same options" in str(again.exception)
    refused = runner.invoke(app, ["optimum", "-w", str(file), "--set", "any_degrees=tp"])
    assert "expected pp, ep or pp,ep, got 'tp'" in str(refused.exception)


_MIXED = """
name = "mixed"
model = "gpt_oss_120b"
hardware = "h100_sxm"
phase = "decode"
context_tokens = 4000
tpot_slo_ms = 60
max_gpus = 6
precisions = { weights = "bf16", kv_cache = "fp8", activations = "bf16", dispatch = "fp8" }
degrees = { tp = [1, 2], ep = [1, 2, 4], pp = [1, 2], batch = [16, 64] }
"""
