"""`--model PATH` with a Hugging Face configuration, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from raysearch.cli.app import app

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def test_the_command_says_what_it_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hc_mult": 4}), encoding="utf-8")
    options = [
        "evaluate",
        "--model",
        str(tmp_path),
        "--isl",
        "100",
        "--osl",
        "50",
        "--tp",
        "2",
        "--batch",
        "4",
        "--json",
    ]
    result = CliRunner().invoke(app, options)
    found = json.loads(result.stdout)
    assert found["model_import"]["family"] == "llama"
    assert found["model_import"]["not_understood"] == ["hc_mult"]
    assert found["precisions"]["weights"] == "bf16"
    assert "not understood: hc_mult" in result.stderr
    named = CliRunner().invoke(app, [*options[:2], "llama_3_1_8b", *options[3:]])
    assert "model_import" not in json.loads(named.stdout)


def test_what_cannot_be_imported_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "qwen3_mo"}), encoding="utf-8")
    result = CliRunner().invoke(app, ["evaluate", "--model", str(tmp_path), "--isl", "9", "--tp", "2", "--batch", "4"])
    assert "unknown model_type 'qwen3_mo': did you mean 'qwen3_moe'?" in str(result.exception)
