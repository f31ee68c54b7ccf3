"""Published results of InferenceX, read as serving runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.fidelity.calibration.serving_fit import agg_runs, names_machines, read_serving_runs
from raysearch.fidelity.calibration.serving_pool import anchored_serving, measured_runs
from sim.config.catalog import cells_of, load_calibrated, measured_machine
from sim.prices.engine import times_of

RUN: dict[str, Any] = {
    "hardware": "b200",
    "framework": "trt",
    "model": "DeepSeek-R1",
    "precision": "fp4",
    "spec_method": "mtp",
    "disagg": False,
    "decode_tp": 8,
    "decode_ep": 8,
    "decode_dp_attention": True,
    "isl": 1024,
    "osl": 1024,
    "conc": 128,
    "image": "nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc6.post3",
    "date": "2026-03-01",
    "metrics": {"mean_tpot": 0.02},
}


def written(folder: Path, *runs: dict[str, Any]) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({"runs": [{**RUN, **each} for each in runs]}))
    return path


def test_a_run_has_the_degrees_formats_and_drafts_that_it_names(tmp_path: Path) -> None:
    path = written(tmp_path, {}, {"framework": "sglang", "decode_dp_attention": False, "precision": "fp8"})
    assert names_machines(path)
    frame = read_serving_runs(path, "b200_sxm")
    assert frame is not None
    dep, tep = agg_runs(frame).runs
    assert (dep.strategy.tp, dep.strategy.attention_dp, dep.strategy.ep, dep.strategy.batch) == (1, 8, 8, 128)
    assert (tep.strategy.tp, tep.strategy.attention_dp, tep.strategy.ep) == (8, 1, 8)
    assert (dep.model.expert_dtype, dep.kv_cache, tep.weights) == ("nvfp4", "fp8", "fp8_block")
    assert dep.speculation is not None
    assert tep.speculation is not None
    assert (dep.speculation.draft_tokens, tep.speculation.draft_tokens) == (1, 2)
    assert list(frame["silicon_tpot_ms"]) == [20.0, 20.0]


def test_what_is_of_another_machine_or_engine_or_of_two_kinds_of_workers_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, {}, {"hardware": "mi355x", "framework": "sglang"}, {"framework": "atom"}, {"disagg": True})
    assert [len(read_serving_runs(path, name)) for name in ("b200_sxm", "mi355x", "h200_sxm")] == [1, 1, 0]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no aggregated run"):
        read_serving_runs(written(tmp_path, {"framework": "atom"}))
    with pytest.raises(
        InputError, match=r"run 1 is none of InferenceX: conc: expected a number from 1 to .*, got None"
    ):
        read_serving_runs(written(tmp_path, {"conc": None}))
    with pytest.raises(InputError, match="run 1 is none of InferenceX: decode_tp: expected a number, got 'many'"):
        read_serving_runs(written(tmp_path, {"decode_tp": "many"}))
    path.write_text("[1, ")
    with pytest.raises(InputError, match="cannot be read"):
        read_serving_runs(path)


def test_engines_are_scaled_to_published_results(tmp_path: Path) -> None:
    """Runs twice as slow as predicted make the engine nearly so: of many runs little is drawn back to 1."""
    shapes = [{"conc": conc} for conc in (32, 64, 128, 256)] * 3
    first = measured_runs([(written(tmp_path, *shapes), "b200_sxm")], measured_machine)
    serving = load_calibrated("b200_sxm").data["serving"]
    same = first.pool.steps.tpot_s  # of the times given
    run = first.runs[0]
    cells = cells_of(run.model, run.weights, drafts=True)
    times = times_of(serving["engines"][run.generation], cells, run.model.layers)
    twice = [{**shape, "metrics": {"mean_tpot": 2 * float(s)}} for shape, s in zip(shapes, same(times), strict=True)]
    slow = measured_runs([(written(tmp_path, *twice), "b200_sxm")], measured_machine)
    scaled = anchored_serving(serving, slow, "b200_sxm")
    again = times_of(scaled["engines"][run.generation], cells, run.model.layers)
    assert np.median(slow.pool.steps.tpot_s(again) / same(times)) == pytest.approx(2, rel=0.2)


def test_a_published_file_is_validated_in_a_folders_place(tmp_path: Path) -> None:
    path = written(tmp_path, {"hardware": "mi355x", "framework": "sglang"}, {"hardware": "b200"})
    result = CliRunner().invoke(app, ["validate", str(path), "--hardware", "mi355x", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["endtoend_ttft_tpot"]["rows"] == 1
    assert report["gemm"]["note"] == "not checked: no such file"
