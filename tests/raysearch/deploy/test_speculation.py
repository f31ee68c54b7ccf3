"""Speculative decoding from the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from raysearch.cli.app import app

PLAIN = [
    "evaluate",
    "--model",
    "deepseek_v3",
    "--engine",
    "none",
    "--isl",
    "1024",
    "--osl",
    "256",
    "--layout",
    "tep8",
    "--batch",
    "8",
]
EVALUATE = [*PLAIN, "--draft-tokens", "2"]


def test_evaluate_says_what_is_drafted() -> None:
    result = CliRunner().invoke(app, [*EVALUATE, "--acceptance", "0.9,0.5", "--json"])
    found = json.loads(result.stdout)
    assert found["speculation"] == {"draft_tokens": 2, "accepted": [0.9, 0.5], "draft": "mtp", "tokens_per_step": 2.35}
    assert found["stage"]["draft_s"] > 0
    assert found["tpot_s"] * 2.35 == pytest.approx(found["stage"]["total_s"], rel=1e-12)
    shown = CliRunner().invoke(app, [*EVALUATE, "--acceptance", "0.9,0.5"]).stdout
    assert "2 drafted per step by mtp, 2.35 tokens gained" in " ".join(shown.split())


def test_shares_without_a_draft_are_one_message() -> None:
    alone = CliRunner().invoke(app, [*PLAIN, "--acceptance", "0.9"])
    assert "--acceptance is for speculative decoding: give --draft-tokens too" in str(alone.exception)
    assert "--acceptance: expected a rate" in str(
        CliRunner().invoke(app, [*EVALUATE, "--acceptance", "high"]).exception
    )


def test_a_named_workload_drafts_too() -> None:
    options = ["optimum", "-w", "llama_3_1_405b_8k", "--space", "vllm", "--gpus", "16", "--json"]
    plain, drafted = (
        json.loads(CliRunner().invoke(app, [*options, *more]).stdout)
        for more in ([], ["--draft-tokens", "3", "--acceptance", "0.8", "--set", "draft=llama_3_1_8b"])
    )
    assert drafted["speculation"]["draft"] == "llama_3_1_8b"
    assert drafted["tokens_per_s_per_gpu"] > plain["tokens_per_s_per_gpu"]
