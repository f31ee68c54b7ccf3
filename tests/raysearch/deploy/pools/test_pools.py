"""`raysearch pools`: which way wins from where, its files, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raysearch.base.errors import InputError
from raysearch.cli.app import app

RUNNER = CliRunner()
FEW = ("--set", "batches=powers_of_two")
"""What is tested does not rest on the batches in between."""
ASKED = ("--model", "llama_3_1_70b", "--osl", "500", "--tpot-ms", "30", "--weights", "fp8", "--kv-cache", "fp8")


def ask(*words: str, code: int = 0) -> dict[str, Any]:
    shown = RUNNER.invoke(app, ["pools", *words, "--json"], catch_exceptions=False)
    assert shown.exit_code == code, shown.output
    return json.loads(shown.stdout)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pools")
    asked = ("--gpus", "16", "--isl", "8000", "--set", "sweep=ttft-ms=20,700,2000", "--out", str(folder), *FEW)
    return folder, ask(*ASKED, *asked)


def test_pools_apart_win_at_a_tight_ttft_with_long_prompts(answer: tuple[Path, dict[str, Any]]) -> None:
    # Published: DistServe (OSDI 2024), Splitwise (ISCA 2024): prompts no longer lengthen the others' tokens.
    _, tight, loose = answer[1]["points"]
    for point in (tight, loose):
        assert point["winner"] == "disaggregated"
        ways = point["ways"]
        assert ways["disaggregated"]["goodput_per_gpu"] > 1.2 * ways["aggregated"]["goodput_per_gpu"]


def test_in_turns_a_pool_gains_where_nobody_waits_for_a_token() -> None:
    # Published: Seesaw (arXiv 2503.06433): offline, pipelines for prompts and tensor parallelism for answers.
    offline, online = (
        ask(
            "--model",
            "llama_3_1_70b",
            "--gpus",
            "4",
            "--isl",
            "3000",
            "--osl",
            "300",
            "--set",
            "resharded",
            *FEW,
            *limits,
        )["points"][0]["ways"]
        for limits in ((), ("--tpot-ms", "30", "--ttft-ms", "1500"))
    )
    assert offline["resharded"]["goodput_per_gpu"] > max(
        offline[name]["goodput_per_gpu"] for name in ("aggregated", "disaggregated")
    )
    assert offline["resharded"]["prefill"]["strategy"]["pp"] > offline["resharded"]["decode"]["strategy"]["pp"]
    assert (
        online["resharded"] is None or online["resharded"]["goodput_per_gpu"] < online["aggregated"]["goodput_per_gpu"]
    )


@pytest.mark.usefixtures("breaking_load_unsought")
def test_one_pool_wins_at_low_load() -> None:
    # Published: DistServe, section 2: few GPUs or requests cannot fill two pools.
    low, high = ask(
        *(*ASKED, "--gpus", "8", "--isl", "8000", "--ttft-ms", "2000", "--set", "requests=40"),
        *("--chunk-tokens", "8192"),
        *("--set", "sweep=requests-per-s=0.2,2", *FEW),
    )["points"]
    assert low["winner"] == "aggregated"
    assert low["ways"]["aggregated"]["gpus"] <= low["ways"]["disaggregated"]["gpus"]
    assert high["winner"] == "disaggregated"


def test_a_way_that_keeps_no_limit_is_null_and_without_any_the_exit_code_is_3(
    answer: tuple[Path, dict[str, Any]],
) -> None:
    hopeless = answer[1]["points"][0]
    assert hopeless["winner"] is None
    assert set(hopeless["ways"].values()) == {None}
    small = ("--model", "llama_3_1_8b", "--gpus", "2", "--isl", "8000", "--osl", "500", "--ttft-ms", "20")
    assert ask(*small, code=3)["points"][0]["winner"] is None


def test_figures_add_up(answer: tuple[Path, dict[str, Any]]) -> None:
    for point in answer[1]["points"][1:]:
        for way in filter(None, point["ways"].values()):
            assert way["gpus"] + way["left_over"] == 16
            assert way["goodput_per_gpu"] == pytest.approx(way["requests_per_s"] / 16)
            assert way["tpot_s"] <= 0.030
            assert way["ttft_s"] <= point["limits"]["ttft_s"]
        apart = point["ways"]["disaggregated"]
        for pool in ("prefill", "decode"):
            assert apart[pool]["replicas"] * apart[pool]["requests_per_s_of_each"] >= apart["requests_per_s"] * 0.999999
        assert apart["gpus"] == sum(apart[p]["replicas"] * apart[p]["gpus_per_replica"] for p in ("prefill", "decode"))


def test_the_folder_has_the_answers_a_table_and_a_picture(answer: tuple[Path, dict[str, Any]]) -> None:
    folder, answers = answer
    kept = json.loads((folder / "pools.json").read_text())
    assert kept.pop("sha256")
    assert kept == answers
    rows = list(csv.DictReader((folder / "pools.csv").read_text().splitlines()))
    assert [row["winner"] for row in rows] == ["", "disaggregated", "disaggregated"]
    assert (
        float(rows[1]["disaggregated_goodput_per_gpu"])
        == answers["points"][1]["ways"]["disaggregated"]["goodput_per_gpu"]
    )
    assert (folder / "pools.png").read_bytes().startswith(b"\x89PNG")


def test_the_terminal_says_what_runs_and_which_way_wins() -> None:
    asked = [
        "pools",
        "--model",
        "llama_3_1_8b",
        "--gpus",
        "4",
        "--set",
        "mix=500:50:3,4000:100:1",
        "--tpot-ms",
        "20",
        "--ttft-ms",
        "0",
        *FEW,
    ]
    shown = RUNNER.invoke(app, asked, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "500 in and 50 out (75%), 4,000 in and 100 out (25%)" in shown.stdout
    assert "Aggregated: one pool, continuous batching" in shown.stdout
    assert "<- highest requests/s per GPU" in shown.stdout
    assert "round trip" not in shown.stdout  # there is no limit on the first token


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--isl", "100"), "--isl and --osl, or --set mix"),
        (("--isl", "100", "--osl", "10", "--set", "mix=1:1:1"), "not both"),
        (("--set", "mix=100:10"), "ISL:OSL:SHARE"),
        (("--set", "mix=100:10:-1"), "ISL:OSL:SHARE"),
        (("--set", "sweep=isl=100,x", "--osl", "10"), "--set sweep: isl: expected whole numbers above 0"),
        (("--isl", "100", "--osl", "10", "--set", "sweep=tpot=1"), "--set sweep: expected NAME=VALUE"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_was_expected(words: tuple[str, ...], message: str) -> None:
    shown = RUNNER.invoke(app, ["pools", "--model", "llama_3_1_8b", "--gpus", "4", *words])
    assert isinstance(shown.exception, InputError)
    assert message in str(shown.exception)


def test_what_experts_apart_give_is_in_the_file_and_export_says_that_no_engine_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--model", "mixtral_8x7b", "--isl", "2000", "--osl", "200", "--gpus", "4", "--tpot-ms", "60")
    answer = ask(*words, "--set", "batches=powers_of_two", "--set", "afd", "--out", str(tmp_path))
    assert answer["afd"]["together"]
    assert json.loads((tmp_path / "pools.json").read_text())["afd"] == answer["afd"]
    shown = RUNNER.invoke(app, ["export", str(tmp_path), "--to", "vllm"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "no release of an engine serves them on GPUs of their own" in caplog.text
