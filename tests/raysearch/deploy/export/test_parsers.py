"""Exported commands before the engines' own argument parsers, where a Python that has an engine is named.

python -m venv /tmp/engine && /tmp/engine/bin/pip install sglang==0.5.23
RAYSEARCH_SGLANG_PYTHON=/tmp/engine/bin/python pytest -m slow tests/raysearch/deploy/export/test_parsers.py
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.formats import exporter
from sim.strategy import Strategy
from tests.raysearch.deploy.export.test_engines import served, some_strategies

PARSERS = {
    "vllm": """
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
"""What makes `parser` in each engine."""

_PARSE = """
import json, sys
for words in json.load(sys.stdin):
    print("parsed:", json.dumps(vars(parser.parse_args(words)), default=str))
"""


def parsed(engine: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """The engine's own reading of each command's options."""
    python = os.environ.get(f"RAYSEARCH_{engine.upper()}_PYTHON")
    if not python:
        pytest.skip(f"RAYSEARCH_{engine.upper()}_PYTHON names no Python that has {engine}")
    ran = subprocess.run(
        [python, "-c", PARSERS[engine] + _PARSE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("parsed: ")]
    return [json.loads(line.removeprefix("parsed: ")) for line in lines]


def gpus_told(engine: str, told: Mapping[str, Any]) -> int:
    """GPUs of one replica, by the options that were read."""
    if engine == "vllm":
        return told["tensor_parallel_size"] * told["pipeline_parallel_size"] * told["data_parallel_size"]
    return told["tp_size"] * told["pp_size"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", PARSERS)
def test_the_engine_s_own_parser_reads_what_is_exported(engine: str) -> None:
    workloads = [
        served("qwen3_235b_a22b"),
        served("deepseek_v3", chunk_tokens=2048, weights="fp8_block"),
        served("qwen3_32b", phase="prefill"),
    ]
    cases: list[tuple[Strategy, list[str]]] = []
    for workload in workloads:
        for strategy in some_strategies(engine, workload, 8):
            command = exporter(engine)(Deployment(workload, strategy, "org/model")).command
            assert command is not None
            words = [word if isinstance(word, str) else f"0{word.suffix}" for word in command.words]
            start = next(at for at, word in enumerate(words) if word in ("serve", "sglang.launch_server"))
            cases.append((strategy, words[start + 1 :]))
    found = parsed(engine, [words for _, words in cases])
    assert len(found) == len(cases)
    for (strategy, words), told in zip(cases, found, strict=True):
        assert gpus_told(engine, told) == strategy.gpus, words
        assert "org/model" in (told.get("model_tag"), told.get("model_path"), told.get("model")), words
