"""`raysearch measure`: what it writes is what `raysearch calibrate` reads."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raysearch
from raysearch.base.errors import InputError, RunFailed
from raysearch.cli.app import app
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, read_table
from tests.processes import descendants


@pytest.mark.slow
def test_a_process_that_stays_stopped_ends_the_measuring_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    links = pytest.importorskip("raysearch.fidelity.measuring.links")
    from raysearch.fidelity.measuring.gpu_kernels import TINY

    def stop_one() -> None:
        while not (ranks := [pid for pid, title in descendants(os.getpid()).items() if "spawn_main" in title]):
            time.sleep(0.01)
        os.kill(ranks[-1], signal.SIGSTOP)

    monkeypatch.setattr(links, "_STOPPED_S", 2.0)
    stopping = threading.Thread(target=stop_one, daemon=True)
    stopping.start()
    with pytest.raises(RunFailed, match=r"^measuring collectives among 2 failed: process \d terminated with signal"):
        links.collectives(TINY, 2, on_gpus=False)
    stopping.join()
    assert not [title for title in descendants(os.getpid()).values() if "spawn_main" in title]


@pytest.mark.slow
def test_measured_files_are_files_of_a_calibration(tmp_path: Path) -> None:
    out = tmp_path / "measured"
    result = CliRunner().invoke(
        app, ["measure", "--out", str(out), "--set", "tiny", "--set", "cpu", "--gpus", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
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
    result = CliRunner().invoke(
        app, ["measure", "--out", str(tmp_path / "new"), "--set", "framework=torch", "--set", "cpu"]
    )
    assert "expected vllm, sglang or trtllm, got 'torch'" in str(result.exception)
