"""Searches of workloads that options describe: their folders alone say all that resumes, checks and exports them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysearch.base.file_io import read_record, write_record
from raysearch.cli.app import app
from raysearch.runs.records import RunHead, RunSpec
from raysearch.studies.results import read_spec, read_study_runs, verify
from sim.config.question import Question
from tests.processes import LONGEST_S, wait_until
from tests.raysearch.cli.test_cli import Start
from tests.raysearch.deploy.export.test_engines import QWEN_CONFIG

LLAMA = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--gpus", "2")
FEW = ("--set", "batches=powers_of_two")
RUNNER = CliRunner()


def run(*words: str | Path) -> str:
    shown = RUNNER.invoke(app, [*map(str, words)], catch_exceptions=False)
    assert shown.exit_code == 0, shown.stderr
    return shown.stdout


def test_a_killed_search_by_options_goes_on_to_the_same_bits(start: Start, tmp_path: Path) -> None:
    words = ("search", *LLAMA, *FEW, "--phase", "serve", "--engine", "vllm", "-s", "annealing", "-b", "600", "--json")
    killed, rows = start(*words, "--out", tmp_path / "killed"), tmp_path / "killed" / "rows.jsonl"
    wait_until(lambda: killed.poll() is not None or (rows.is_file() and rows.stat().st_size > 10_000))
    assert killed.poll() is None, killed.communicate()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(timeout=LONGEST_S)
    assert not (tmp_path / "killed" / "summary.json").exists()
    resumed = json.loads(run(*words, "--out", tmp_path / "killed", "--resume"))
    straight = json.loads(run(*words, "--out", tmp_path / "straight"))
    assert resumed["digest"] == straight["digest"]
    assert verify(tmp_path / "killed").damaged == {}


def test_a_search_of_a_configuration_is_read_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(QWEN_CONFIG))
    (tmp_path / "mine" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    words = ("search", "--model", "mine", *LLAMA[2:-2], "--gpus", "4", "-s", "random", "-b", "50", *FEW, "--out", "run")
    run(*words)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    (found,) = read_study_runs(tmp_path / "run")
    assert (found["workload"], found["complete"]) == ("mine_serve", True)
    assert "1 of 1 runs finished" in run("status", tmp_path / "run")
    assert run("export", tmp_path / "run", "--to", "vllm").startswith(f"vllm serve {tmp_path / 'mine'} ")
    spec = RunSpec(**read_spec(tmp_path / "run", found["run_id"]))
    assert spec.question["model"] == str(tmp_path / "mine" / "config.json")
    assert spec.load().config_hash == found["config_hash"]


def test_a_search_takes_the_space_and_the_limits_that_others_take(tmp_path: Path) -> None:
    limits = ("--space", "paper", "--tpot-ms", "40", "--set", "batches=any")
    words = (*limits, "-s", "random", "-b", "5", "--out", tmp_path)
    run("search", *LLAMA, *words)
    workload = RunSpec(**json.loads((tmp_path / "run.json").read_text())["spec"]).load()
    asked = Question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=40, space="paper")
    assert workload.config_hash == asked.load().config_hash
    assert (workload.space, workload.tpot_slo_s, 3 in workload.degrees.batch) == ("paper", 0.04, True)


def test_options_beside_a_file_replace_its_keys_in_the_record_too(tiny_workload: Path, tmp_path: Path) -> None:
    run("search", "-w", tiny_workload, "--gpus", "64", "-s", "random", "-b", "5", "--out", tmp_path)
    spec = RunSpec(**json.loads((tmp_path / "run.json").read_text())["spec"])
    assert (spec.workload, spec.question, spec.load().max_gpus) == (str(tiny_workload), {"gpus": 64}, 64)


def test_records_that_call_the_question_by_its_earlier_name_are_read(tmp_path: Path) -> None:
    words = ("search", *LLAMA, *FEW, "-s", "random", "-b", "50", "--out", tmp_path)
    run(*words)
    head = read_record(tmp_path / "run.json", RunHead)
    head["spec"]["described"] = head["spec"].pop("question")
    write_record(tmp_path / "run.json", head)
    assert verify(tmp_path).damaged == {}
    assert run("export", tmp_path, "--to", "vllm").startswith("vllm serve meta-llama/")
    run(*words, "--resume")


def test_specs_of_named_workloads_keep_their_digests() -> None:
    assert RunSpec("w", "random", 0, 10).digest == "c296b72a14b89e94"
    assert RunSpec("w", "random", 0, 10, question={"isl": 1}).digest == "5d5face5ab0ef053"
    assert RunSpec("w", "random", 0, 10).digest == RunSpec("w", "random", 0, 10, question={}).digest
    assert RunSpec("w", "random", 0, 10).digest != RunSpec("w", "random", 0, 10, question={"isl": 1}).digest
