"""The extended space from the command line: evaluate, explain, optimum and search, as processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.rows import parse_dims_text, read_rows

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


def test_the_degrees_of_either_mesh_give_the_same_evaluation(raysearch: Command) -> None:
    by_dp, by_moe_tp = (
        json.loads(raysearch("evaluate", *LONG, "--moe-ep", "16", *rest, "--json").stdout)
        for rest in (("--dp", "16"), ("--moe-tp", "8"))
    )
    assert by_dp == by_moe_tp
    assert by_dp["strategy"] == {
        "tp": 2,
        "ep": 16,
        "pp": 1,
        "batch": 64,
        "cp": 4,
        "dp": 16,
        "dims": [2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2],
    }
    assert by_dp["gpus"] == 128
    told = raysearch("evaluate", *LONG, "--ep", "16").stdout
    assert "attention tp 2, cp 4, dp 16; experts tp 8, ep 16" in told


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            ("--ep", "16", "--dp", "8", "--moe-tp", "8"),
            "tp * dp * cp (2 * 8 * 4) must equal --moe-tp times --moe-ep (8 * 16)",
        ),
        (("--ep", "16", "--dp", "0"), "dp must be an integer from 1"),
        (("--ep", "16", "--cp", "-2"), "cp must be an integer from 1"),
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
    assert raysearch("explain", *LONG, "--ep", "16", "--svg", path).returncode == 0
    assert "attn_out[t, a_{tp,cp}]" in path.read_text(encoding="utf-8")


def test_optimum_compares_the_spaces_and_agrees_with_the_sweep_of_the_paper_s(
    raysearch: Command, tiny_workload: Path
) -> None:
    swept = json.loads(raysearch("optimum", "-w", tiny_workload, "--json").stdout)["tokens_per_s_per_gpu"]
    spaces = json.loads(raysearch("optimum", "-w", tiny_workload, "--against", "--json").stdout)["spaces"]
    values = {name: best["tokens_per_s_per_gpu"] or 0.0 for name, best in spaces.items()}
    assert values["paper"] == pytest.approx(swept, rel=1e-12)
    assert values["extended"] >= max(values.values()) * (1 - 1e-12)
    alone = json.loads(raysearch("optimum", "-w", tiny_workload, "--space", "extended", "--json").stdout)["spaces"]
    assert alone == {"extended": spaces["extended"]}  # from the cache: even its wall time is the same
    table = raysearch("optimum", "-w", tiny_workload, "--against").stdout
    assert f"{values['extended']:,.2f}" in table


def test_a_search_of_the_extended_space_is_scored_against_its_own_optimum(
    raysearch: Command, tiny_extended: Path, tmp_path: Path
) -> None:
    form = (
        "search",
        "-w",
        tiny_extended,
        "-s",
        "annealing",
        "--seed",
        "1",
        "--budget",
        "60",
        "--out",
        tmp_path / "run",
    )
    told = json.loads(raysearch(*form, "--json").stdout)
    best = json.loads(raysearch("optimum", "-w", tiny_extended, "--json").stdout)["spaces"]["extended"]
    assert told["calls"] == 60
    assert told["optimum"] == best["tokens_per_s_per_gpu"]
    rows = read_rows(tmp_path / "run")
    strategies = [parse_dims_text(text) for text in rows["dims"]]
    assert any("cp" in strategy for strategy in strategies)
    assert all(len(strategy["dims"]) == 12 for strategy in strategies)
    assert json.loads(raysearch("report", tmp_path / "run", "--json").stdout)["runs"][0]["best"] == told["best"]
