"""The export command: what it reads a strategy from, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raysearch as rs
from raysearch.base.errors import NOTHING_FEASIBLE, InputError
from raysearch.base.file_io import write_record
from raysearch.cli.app import app
from raysearch.deploy.export.source import RECOMMENDATION_FILE
from sim.config.files import CatalogError
from sim.config.question import Question
from sim.strategy_checks import StrategyError
from tests.raysearch.deploy.export.test_engines import QWEN_CONFIG

RUNNER = CliRunner()
QWEN = ("--model", "qwen3_32b", "--isl", "4000", "--osl", "500", "--phase", "serve")


def run(*words: str) -> str:
    shown = RUNNER.invoke(app, ["export", *words], catch_exceptions=False)
    assert shown.exit_code == 0
    return shown.stdout


def test_a_strategy_by_options_is_a_command() -> None:
    assert run(*QWEN, "--tp", "4", "--batch", "32").startswith(
        "vllm serve Qwen/Qwen3-32B-FP8 \\\n  --tensor-parallel-size 4"
    )
    assert "/weights/mine" in run(*QWEN, "--tp", "4", "--batch", "32", "--to", "sglang", "--set", "serve=/weights/mine")


@pytest.mark.parametrize(("to", "degrees", "rule"), [("vllm", ("8",), "vLLM"), ("sglang", ("16",), "SGLang")])
def test_a_named_strategy_that_the_engine_does_not_run_is_no_other_one(
    to: str, degrees: tuple[str], rule: str, tmp_path: Path
) -> None:
    asked = ("export", "--model", "qwen3_235b_a22b", "--engine", "vllm", "--isl", "4000", "--osl", "500")
    words = (
        *asked,
        "--tp",
        *degrees,
        "--batch",
        "64",
        "--to",
        to,
        "--benchmark",
        "aiperf",
        "--out",
        str(tmp_path / "o"),
    )
    shown = RUNNER.invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == NOTHING_FEASIBLE
    assert shown.stderr.startswith(f"infeasible: {rule}")
    assert f"moe_tp {degrees[0]} cuts 1536" in shown.stderr
    assert shown.stdout == ""
    assert not (tmp_path / "o").exists()
    printed = json.loads(RUNNER.invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert "moe_tp" in printed["violations"][0]
    assert printed["command"] == ""
    answer = {"question": {"model": "qwen3_235b_a22b", "isl": 4000, "osl": 500}, "best": {"strategy": CUT}}
    write_record(tmp_path / RECOMMENDATION_FILE, answer)
    assert "--enable-expert-parallel" in run(str(tmp_path), "--to", "vllm")  # what an answer has is replaced


def test_what_is_said_beside_a_command_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = RUNNER.invoke(
        app, ["export", *QWEN, "--tp", "4", "--batch", "32", "--to", "sglang"], catch_exceptions=False
    )
    lines = shown.stderr.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("note: ") for line in lines)


def test_a_printed_strategy_is_read_and_files_are_written(tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["evaluate", *QWEN, "--tp", "2", "--batch", "8", "--json"])
    (tmp_path / "best.json").write_text(shown.stdout)
    answer = json.loads(
        run(str(tmp_path / "best.json"), *QWEN, "--to", "trtllm", "--out", str(tmp_path / "o"), "--json")
    )
    assert answer["strategy"]["tp"] == 2
    assert (tmp_path / "o" / "config.yaml").read_text() == answer["files"]["config.yaml"]
    assert (tmp_path / "o" / "start.sh").read_text() == f"#!/bin/sh\n{answer['command']}\n"
    (tmp_path / "bare.json").write_text(json.dumps({"strategy": answer["strategy"]}))
    with pytest.raises(InputError, match="names no workload"):
        run(str(tmp_path / "bare.json"))


COARSE = ("--set", "batches=powers_of_two")
SMALL = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--gpus", "2", "--tpot-ms", "20", *COARSE)
ONE = ("--tp", "2", "--batch", "8")
LOAD = ("--requests-per-s", "1", "--set", "requests=20", "--set", "seeds=1")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evaluate", ONE),
        ("optimum", ()),
        ("explain", ONE),
        ("complete", (*ONE, "--dims", ",".join("?" * 10))),
        ("replay", (*ONE, *LOAD)),
        ("search", ("--budget", "3", "--out", "OUT")),
    ],
)
def test_what_any_command_prints_states_its_question_and_is_exported_and_replayed(
    command: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "printed.json"
    words = tuple(word.replace("OUT", str(tmp_path / "out")) for word in words)
    file.write_text(RUNNER.invoke(app, [command, *SMALL, *words, "--json"], catch_exceptions=False).stdout)
    printed = json.loads(file.read_text())
    asked = Question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20, batches="powers_of_two")
    assert Question.of_record(printed["question"]).load().config_hash == asked.load().config_hash
    strategy = printed.get("strategy") or printed["best"]["strategy"]
    assert json.loads(run(str(file), "--json"))["strategy"] == strategy
    again = json.loads(RUNNER.invoke(app, ["replay", str(file), *LOAD, "--json"], catch_exceptions=False).stdout)
    assert (again["strategy"], again["question"]) == (strategy, printed["question"])


def test_a_strategy_that_was_evaluated_is_not_replaced(tmp_path: Path) -> None:
    """As one that is named beside `export`: its user meant this one."""
    file, words = tmp_path / "printed.json", ("--tp", "8", "--batch", "32", "--json")
    asked = ("evaluate", "--model", "qwen3_235b_a22b", "--gpus", "8", "--isl", "4000", "--osl", "500")
    file.write_text(RUNNER.invoke(app, [*asked, *words], catch_exceptions=False).stdout)
    found = RUNNER.invoke(app, ["export", str(file), "--to", "vllm"], catch_exceptions=False)
    assert found.exit_code == 3
    assert not found.stdout
    assert "infeasible: vLLM 0.33.0: moe_tp 8 cuts 1536" in found.stderr


def test_the_strategy_of_a_certificate_is_exported(tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    found = json.loads(
        RUNNER.invoke(app, ["optimum", *SMALL, "--out", str(file), "--json"], catch_exceptions=False).stdout
    )
    assert json.loads(run(str(file), "--json"))["strategy"] == found["strategy"]


def test_what_is_stated_beside_a_file_that_has_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    file.write_text(RUNNER.invoke(app, ["evaluate", *SMALL, *ONE, "--json"], catch_exceptions=False).stdout)
    for command, own in (("export", ()), ("replay", LOAD)):
        for words, told in (
            (("--layout", "tp2"), "has the strategy: leave out --layout, or the path"),
            (("--tp", "2", "--dims", "megatron-sp"), "leave out --tp, --dims"),
            (("--isl", "4000"), "states the question: leave out --isl"),
        ):
            with pytest.raises(InputError, match=told):
                RUNNER.invoke(app, [command, str(file), *own, *words], catch_exceptions=False)
    with pytest.raises(InputError, match="leave out"):
        rs.replay(path=file, requests_per_s=1, tp=2)


def test_some_ops_alone_are_exported_to_pytorch(tmp_path: Path) -> None:
    words = (*QWEN, "--tp", "4", "--batch", "32", "--to", "dtensor", "--set", "ops=qkv_proj, attention,o_proj")
    run(*words, "--out", str(tmp_path))
    written = (tmp_path / "sharding.py").read_text()
    assert "'o_proj': OpParallel(reads=[(S(0), S(1))]" in written
    assert "ffn1" not in written
    assert "all_reduce of attn_projected, 4 GPUs" in written
    assert "class OpParallel" in (tmp_path / "styles.py").read_text()


def test_the_best_of_a_search_is_exported(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    words = ("search", "-w", "llama_3_1_405b_8k", "-s", "megatron", "--out", folder)
    assert RUNNER.invoke(app, [*words], catch_exceptions=False).exit_code == 0
    shown = RUNNER.invoke(app, ["export", folder, "--to", "megatron"], catch_exceptions=False)
    assert shown.stdout.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")
    assert "infeasible: needs 1" in shown.stderr  # it runs bf16 alone, the strategy is one of fp8
    assert shown.exit_code == NOTHING_FEASIBLE


def test_without_anything_to_export_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a folder or file"):
        run("--to", "vllm")
    with pytest.raises(InputError, match="cannot read"):
        run(str(tmp_path / "none.json"))


@pytest.mark.usefixtures("best_alone")
def test_weights_beside_a_configuration_are_served_from_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_CONFIG))
    words = ("--model", str(folder), "--isl", "4000", "--osl", "500", "--tp", "4", "--batch", "32")
    shown = RUNNER.invoke(app, ["export", *words], catch_exceptions=False)
    assert shown.stdout.startswith(f"vllm serve {folder} ")
    assert "no weights are in" in shown.stderr
    spaced = tmp_path / "of mine"
    spaced.mkdir()
    (spaced / "config.json").write_text(json.dumps(QWEN_CONFIG))
    assert run("--model", str(spaced), *words[2:]).startswith(f"vllm serve '{spaced}' ")
    (folder / "model.safetensors").touch()
    assert "no weights" not in RUNNER.invoke(app, ["export", *words], catch_exceptions=False).stderr
    assert run(*words).startswith(f"vllm serve {folder} ")
    assert run(*words, "--to", "dynamo").count(f"- {folder}\n") == 1

    asked = (
        "--isl",
        "4000",
        "--osl",
        "500",
        "--gpus",
        "1",
        "--tpot-ms",
        "32",
        "--out",
        str(tmp_path / "answer"),
        *COARSE,
    )
    result = RUNNER.invoke(app, ["recommend", "--model", str(folder), *asked], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"vllm serve {folder} " in (tmp_path / "answer" / "best" / "start.sh").read_text()
    assert run(str(tmp_path / "answer")).startswith(f"vllm serve {folder} ")


def test_an_answer_states_its_formats_and_of_one_that_does_not_a_note_says_what_is_assumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Question(model="qwen3_32b", isl=4000, osl=500).record()
    assert (asked["weights"], asked["kv_cache"]) == ("fp8_block", "bf16")
    for stated in (asked, {**asked, "weights": "bf16", "kv_cache": "fp8"}):
        write_record(tmp_path / RECOMMENDATION_FILE, {"question": stated, "best": {"strategy": STRATEGY}})
        assert ("--kv-cache-dtype fp8" in run(str(tmp_path))) == (stated["kv_cache"] == "fp8")
        assert not caplog.text
    before = {name: value for name, value in asked.items() if name not in ("weights", "kv_cache")}
    beside = {"weights": "bf16", "kv_cache": "fp8", "activations": "bf16", "dispatch": "fp8"}
    answer = {"question": before, "precisions": beside, "best": {"strategy": STRATEGY}}
    write_record(tmp_path / RECOMMENDATION_FILE, answer)
    assert "vllm serve Qwen/Qwen3-32B " in (shown := run(str(tmp_path)))
    assert "--kv-cache-dtype fp8" in shown
    assert not caplog.text
    older = {name: value for name, value in asked.items() if name != "kv_cache"}
    write_record(tmp_path / RECOMMENDATION_FILE, {"question": older, "best": {"strategy": STRATEGY}})
    run(str(tmp_path))
    assert f"{RECOMMENDATION_FILE} does not state its formats" in caplog.text
    assert "weights in fp8_block and a KV cache in bf16 are assumed" in caplog.text


def test_where_nothing_was_feasible_there_is_nothing_to_export(tmp_path: Path) -> None:
    asked = ("--model", "llama_3_1_8b", "--gpus", "1", "--isl", "1000", "--osl", "100", "--tpot-ms", "0.01")
    RUNNER.invoke(app, ["recommend", *asked, "--out", str(tmp_path)])
    with pytest.raises(InputError, match="nothing was feasible"):
        run(str(tmp_path))


@pytest.mark.usefixtures("best_alone")
def test_both_pools_of_an_answer_are_exported(tmp_path: Path) -> None:
    asked = ("--model", "llama_3_1_8b", "--set", "mix=3000:100:1,9000:300:1", "--gpus", "4", "--tpot-ms", "10", *COARSE)
    shown = RUNNER.invoke(app, ["pools", *asked, "--set", "sweep=ttft-ms=1,500", "--out", str(tmp_path), "--json"])
    nothing, answer = json.loads(shown.stdout)["points"]
    assert nothing["winner"] is None
    assert answer["winner"] == "disaggregated"
    with pytest.raises(InputError, match="nothing was feasible"):
        run(str(tmp_path))
    with pytest.raises(InputError, match="no point 2: it has 2"):
        run(str(tmp_path), "--alternative", "2")
    with pytest.raises(InputError, match="a number of at least 0, got -1"):
        rs.export(tmp_path, alternative=-1)
    pools = json.loads(run(str(tmp_path), "--alternative", "1", "--out", str(tmp_path / "o"), "--json"))["pools"]
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        way = answer["ways"]["disaggregated"][name]
        assert (tmp_path / "o" / name / "start.sh").read_text() == f"#!/bin/sh\n{pools[name]['command']}\n"
        assert pools[name]["strategy"] == way["strategy"]
        assert pools[name]["replicas"] == way["replicas"]
        assert role in pools[name]["command"]
        assert "--max-model-len 9300" in pools[name]["command"]  # the longest, not the typical
    together = json.loads(run(str(tmp_path), "--alternative", "1", "--to", "dynamo", "--json"))
    assert {name: each["replicas"] for name, each in together["pools"].items()} == {
        name: answer["ways"]["disaggregated"][name]["replicas"] for name in ("prefill", "decode")
    }
    assert together["files"]["dynamo.yaml"].count("type: frontend") == 1


CUT = {"tp": 8, "ep": 1, "pp": 1, "batch": 64, "dims": [2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2]}
STRATEGY = {"tp": 1, "ep": 1, "pp": 1, "batch": 8, "dims": [2, 1, 1, 0, 2, 2, 1, 1, 0, 2]}
APART = {
    "winner": "disaggregated",
    "kinds": [{"prompt_tokens": 4000, "output_tokens": 500, "share": 1.0}],
    "ways": {"disaggregated": {pool: {"replicas": 2, "strategy": STRATEGY} for pool in ("prefill", "decode")}},
}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("ways.disaggregated.decode.replicas", -3, "replicas: .* at least 1, got -3"),
        ("ways.disaggregated.decode.replicas", "many", "replicas: .*whole number.*'many'"),
        ("ways.disaggregated.decode.strategy.tp", [], "tp: .*whole number"),
        ("ways.disaggregated.decode.strategy.dims", [2, 1], "expected 10 choices|dims"),
        ("ways.disaggregated.decode.strategy", None, "strategy"),
        ("ways.disaggregated", None, "says that 'disaggregated' wins, but has no strategy for it"),
        ("ways", 5, "ways"),
        ("winner", 5, "winner"),
        ("kinds", [], "at least one kind"),
        ("kinds", [{"prompt_tokens": -1, "output_tokens": 5}], "prompt_tokens: .* at least 1, got -1"),
        ("kinds", "x", "kinds"),
    ],
)
def test_an_answer_of_pools_that_is_none_is_one_message(tmp_path: Path, place: str, value: object, says: str) -> None:
    point = json.loads(json.dumps(APART))
    *way, last = place.split(".")
    inner = point
    for key in way:
        inner = inner[key]
    options = {"model": "llama_3_1_8b", "isl": 4000, "osl": 500}
    (tmp_path / "pools.json").write_text(json.dumps({"question": options, "points": [point]}))
    assert "kv_consumer" in run(str(tmp_path))
    inner[last] = value
    (tmp_path / "pools.json").write_text(json.dumps({"question": options, "points": [point]}))
    with pytest.raises((InputError, StrategyError), match=says):
        run(str(tmp_path))
    (tmp_path / "pools.json").write_text(json.dumps({"points": value}))
    with pytest.raises(InputError):
        run(str(tmp_path))


def test_no_copies_and_no_engine_are_one_message(tmp_path: Path) -> None:
    options = {"model": "llama_3_1_8b", "isl": 4000, "osl": 500, "phase": "serve"}
    answer = {"question": options, "best": {"strategy": STRATEGY, "replicas": -3}}
    (tmp_path / "recommendation.json").write_text(json.dumps(answer))
    with pytest.raises(InputError, match="replicas"):
        run(str(tmp_path), "--to", "dynamo")
    answer = {"question": {**options, "engine": 5}, "best": {"strategy": STRATEGY}}
    (tmp_path / "recommendation.json").write_text(json.dumps(answer))
    with pytest.raises((InputError, CatalogError), match="engine"):
        run(str(tmp_path))
