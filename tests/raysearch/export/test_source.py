"""The export command: what it reads a strategy from, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysearch.app import app
from raysearch.errors import InputError

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
    assert "/weights/mine" in run(*QWEN, "--tp", "4", "--batch", "32", "--to", "sglang", "--serve", "/weights/mine")


def test_a_printed_strategy_is_read_and_files_are_written(tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["evaluate", *QWEN, "--tp", "2", "--batch", "8", "--json"])
    (tmp_path / "best.json").write_text(shown.stdout)
    told = json.loads(run(str(tmp_path / "best.json"), *QWEN, "--to", "trtllm", "--out", str(tmp_path / "o"), "--json"))
    assert told["strategy"]["tp"] == 2
    assert (tmp_path / "o" / "config.yaml").read_text() == told["files"]["config.yaml"]
    assert (tmp_path / "o" / "start.sh").read_text() == f"#!/bin/sh\n{told['command']}\n"
    with pytest.raises(InputError, match="says no workload"):
        run(str(tmp_path / "best.json"))


def test_some_ops_alone_are_exported_to_pytorch(tmp_path: Path) -> None:
    said = (*QWEN, "--tp", "4", "--batch", "32", "--to", "dtensor", "--ops", "qkv_proj, attention,o_proj")
    run(*said, "--out", str(tmp_path))
    written = (tmp_path / "sharding.py").read_text()
    assert '"o_proj": OpParallel(reads=[(S(0), S(1))]' in written
    assert "ffn1" not in written
    assert "all_reduce of attn_projected, 4 GPUs" in written
    assert "class OpParallel" in (tmp_path / "styles.py").read_text()


def test_the_best_of_a_search_is_exported(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    words = ("search", "-w", "llama_3_1_405b_8k", "-s", "megatron", "--out", folder)
    assert RUNNER.invoke(app, [*words], catch_exceptions=False).exit_code == 0
    assert run(folder, "--to", "megatron").startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")


def test_without_anything_to_export_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a folder or a file"):
        run("--to", "vllm")
    with pytest.raises(InputError, match="cannot read"):
        run(str(tmp_path / "none.json"))
