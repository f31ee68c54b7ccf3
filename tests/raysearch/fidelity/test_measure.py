"""`raysearch measure`: what it writes is what `raysearch calibrate` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raysearch
from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, read_table


@pytest.mark.slow
def test_measured_files_are_files_of_a_calibration(tmp_path: Path) -> None:
    out = tmp_path / "measured"
    told = CliRunner().invoke(
        app, ["measure", "--out", str(out), "--set", "tiny", "--set", "cpu", "--gpus", "2", "--json"]
    )
    assert told.exit_code == 0, told.output
    rows = json.loads(told.stdout)["rows"]
    assert set(rows) == {MEASURED_FAMILIES[family].file for family in _MEASURED}
    for family in _MEASURED:
        frame = read_table(out, family)
        assert frame is not None
        assert len(frame) == rows[MEASURED_FAMILIES[family].file]
        assert (frame["latency_us"] > 0).all()
    decode = read_table(out, "attention_decode")
    assert decode is not None
    assert set(decode["kv_len"]) == {16, 32}
    collectives = read_table(out, "collectives")
    assert collectives is not None
    assert {"all_reduce", "all_gather"} <= set(collectives["op"])
    again = CliRunner().invoke(app, ["measure", "--out", str(out), "--set", "cpu"])
    assert isinstance(again.exception, InputError)
    assert "is not empty" in str(again.exception)


_MEASURED = ("gemm", "attention_decode", "attention_prefill", "collectives", "send_recv")


def test_the_page_on_calibrating_names_every_column() -> None:
    page = (Path(raysearch.__file__).parents[1] / "docs" / "guides" / "calibrating.md").read_text(encoding="utf-8")
    for family in MEASURED_FAMILIES.values():
        line = next(line for line in page.splitlines() if line.startswith(f"| `{family.file}`"))
        assert [name for name in family.schema.model_fields if f"`{name}`" not in line] == []


def test_a_framework_that_no_engine_is_called_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(
        app, ["measure", "--out", str(tmp_path / "new"), "--set", "framework=torch", "--set", "cpu"]
    )
    assert "expected vllm, sglang or trtllm, got 'torch'" in str(told.exception)
