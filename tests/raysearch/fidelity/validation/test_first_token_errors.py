"""First tokens as clients measure them: what a fit finds, what it says of models it has not seen, and its intervals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import raysearch as rs
from raysearch.base.measured_first_tokens import replayed_first_token_s, steady_first_token_s
from raysearch.fidelity.calibration.first_token_fit import TAIL_FIGURES, MeasuredFirstTokens, PooledFirstTokens
from raysearch.fidelity.calibration.pooled_fit import Cell
from raysearch.fidelity.calibration.server_settings import ServerSettings
from raysearch.fidelity.calibration.serving_fit import agg_runs, read_serving_runs
from raysearch.fidelity.validation.first_token_errors import (
    FirstTokenRuns,
    errors_by,
    first_token_record,
    first_token_runs,
    held_out_s,
    in_sample_s,
)
from sim.config.files import configs_root
from sim.config.first_tokens import first_token_error
from sim.replay.first_token_times import FirstTokenTimes

TRUE = {"vllm": FirstTokenTimes(1.0, 0.03, 1.0, 0.2), "sglang": FirstTokenTimes(1.0, 0.1, 1.0, 1.0)}


def _runs(noise: float = 0.1, models: int = 6, each: int = 30) -> FirstTokenRuns:
    """Runs of two engines whose clients measure what is known."""
    rng = np.random.default_rng(0)
    engines = [name for name in TRUE for _ in range(models * each)]
    cells = [
        Cell(engine, engine, "h200_sxm", f"model{number // each % models}", "dense", "bf16", "")
        for number, engine in enumerate(engines)
    ]
    token_s = rng.uniform(0.005, 0.03, len(cells))
    median_s = rng.uniform(0.02, 0.5, len(cells))
    replayed_s = np.column_stack([1.5 * median_s, median_s, 10 * median_s])
    bursts = list(TAIL_FIGURES.values())
    measured_s = np.array(
        [
            [TRUE[name].measured_s(value, each_s, bursts=share) for value, share in zip(row, bursts, strict=True)]
            for name, row, each_s in zip(engines, replayed_s, token_s, strict=True)
        ]
    ) * np.exp(noise * rng.standard_normal(replayed_s.shape))
    table = pd.DataFrame(
        {
            "model": [cell.model for cell in cells],
            "system": "h200_sxm",
            "workload": [f"{cell.model} {cell.family}" for cell in cells],
            "engine": engines,
            "steady_ttft_s": median_s,
        }
        | {f"{of}{figure}_tpot_s": token_s for of in ("", "measured_") for figure in TAIL_FIGURES}
    )
    all_of_them = np.ones(len(cells), dtype=bool)
    measured = MeasuredFirstTokens(cells, token_s, replayed_s, measured_s, np.ones(len(cells)))
    return FirstTokenRuns(table, measured, all_of_them, all_of_them)


def test_the_fit_finds_what_clients_measure_beside_the_replay() -> None:
    runs = _runs()
    fit = PooledFirstTokens(runs.measured)
    for name, true in TRUE.items():
        found = fit.times(Cell(name, name, "h200_sxm", "another", "dense", "bf16", ""))
        assert found.request_s + found.steps * 0.015 == pytest.approx(true.request_s + true.steps * 0.015, rel=0.15)
        assert found.burst_s == pytest.approx(true.burst_s, rel=0.35)
        assert found.factor == pytest.approx(1.0, abs=0.07)


def test_models_held_out_lie_within_intervals_that_have_not_seen_them() -> None:
    runs = _runs()
    error = np.abs(held_out_s(runs) / runs.measured.measured_s - 1)
    assert np.median(error, axis=0).max() < 0.12
    for each in first_token_record(runs)["intervals"].values():
        assert 0.85 <= each["held_out"]["inside"] <= 0.95
        assert each["low"] < 1 < each["high"]


def test_two_pools_have_times_of_their_own() -> None:
    runs = _runs(models=4, each=20)
    runs = replace(runs, aggregated=np.arange(len(runs.table)) % 2 == 1)
    runs.measured.measured_s[::2] += 0.5  # their requests wait for something that no replay has
    for predicted_s in (in_sample_s(runs), held_out_s(runs)):
        error = np.abs(predicted_s / runs.measured.measured_s - 1)
        assert max(np.median(error[::2], axis=0).max(), np.median(error[1::2], axis=0).max()) < 0.15
    record = first_token_record(runs)
    assert record["pools"]["engines"]["vllm"]["request_s"] > record["engines"]["vllm"]["request_s"] + 0.2
    assert record["pools"]["source"].startswith("80 disaggregated runs")


def test_a_fit_that_has_not_seen_an_engine_is_as_all_engines_are() -> None:
    runs = _runs()
    vllm = np.array([cell.family == "vllm" for cell in runs.measured.cells])
    fit = PooledFirstTokens(runs.measured[vllm])
    known, unknown = (fit.times(Cell(name, name, "b200_sxm", "", "", "", "")) for name in ("vllm", "sglang"))
    assert known.request_s < unknown.request_s < 0.06


def test_errors_are_reported_for_each_figure_and_group() -> None:
    runs = _runs(noise=1e-6, each=4)
    found = errors_by(runs, runs.measured.measured_s, ["engine"])
    assert list(found.index) == ["all", "sglang", "vllm"]
    assert found.loc["all", "p99 predicted"] == 0
    assert found.loc["sglang", "p50 replayed bias"] < -0.2


def test_shipped_intervals_hold_nine_of_ten_runs_of_models_and_machines_that_they_have_not_seen() -> None:
    record = json.loads((configs_root() / "first_tokens.json").read_text())
    for figure in ("mean", "p50", "p99", "steady"):
        assert 0.85 <= record["intervals"][figure]["held_out"]["inside"] <= 0.95
    for each in record["pools"]["intervals"].values():
        assert 0.85 <= each["held_out"]["inside"] <= 0.95


def test_two_pools_are_predicted_by_their_own_times() -> None:
    workload = rs.question(model="deepseek_v3", hardware="h200_sxm", isl=1000, osl=100, engine="trtllm", gpus=16).load()
    one, two = first_token_error(workload), first_token_error(workload, pools=True)
    assert one is not None
    assert two is not None
    assert two.times.request_s > one.times.request_s  # a second server and the way to it
    figures = {"mean": 0.1, "p50": 0.05, "p99": 0.4}
    assert replayed_first_token_s(workload, figures, 0.01, 0.1, pools=True)["p50"][0] == pytest.approx(
        two.times.measured_s(0.05, 0.01)
    )


def test_answers_say_what_clients_measure_where_a_first_token_was_measured() -> None:
    found = rs.evaluate(rs.question(model="llama_3_1_8b", isl=1000, osl=100), tp=1, batch=16)
    measured = steady_first_token_s(found.workload, found.evaluation)
    assert measured is not None
    expected_s, low_s, high_s = measured
    assert low_s < expected_s < high_s
    assert expected_s > found.evaluation.ttft_s
    assert found.to_dict()["measured_ttft_s"] == pytest.approx(measured)
    error = first_token_error(found.workload)
    assert error is not None
    replayed = replayed_first_token_s(found.workload, {"mean": 0.1, "p50": 0.05, "p99": 0.4}, 0.01, 0.1)
    assert replayed["p50"][0] == pytest.approx(error.times.measured_s(0.05, 0.01))
    assert replayed["p99"][0] == pytest.approx(error.times.measured_s(0.4, 0.01, bursts=1.0))
    assert replayed["mean"][0] == pytest.approx(error.times.measured_s(0.1, 0.01, bursts=0.1))


_RUN = {
    "hardware": "h200", "model": "DeepSeek-R1", "framework": "sglang", "precision": "fp8", "spec_method": "none",
    "disagg": "False", "decode_tp": "8", "decode_ep": "1", "decode_dp_attention": "False", "isl": "1024",
    "osl": "64", "conc": "4", "date": "2026-03-25", "image": "lmsysorg/sglang:v0.5.9-cu130", "mean_tpot": "0.0103",
    "median_tpot": "0.0103", "p99_tpot": "0.011", "mean_ttft": "0.26", "median_ttft": "0.156", "p99_ttft": "1.05",
}  # fmt: skip


def test_runs_are_replayed_as_their_servers_were_configured(tmp_path: Path) -> None:
    speculative = _RUN | {
        "framework": "trt",
        "spec_method": "mtp",
        "image": "nvcr.io/nvidia/tensorrt-llm/release:1.1.0rc2",
    }
    lines = [",".join(_RUN), *(",".join(each.values()) for each in (_RUN, speculative))]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    frame = read_serving_runs(tmp_path / "runs.csv", "h200_sxm")
    assert frame is not None
    settings = [run.server for run in agg_runs(frame).runs]
    assert settings == [ServerSettings(32_768, 1), ServerSettings(1152, 1)]  # chunks; room for one prompt and 16 rows
    found = first_token_runs([(tmp_path / "runs.csv", "h200_sxm")])
    assert found.measured.measured_s[0] == pytest.approx([0.26, 0.156, 1.05])
    assert (found.measured.replayed_s[:, 1] < 0.156).all()  # a client measures more than the prompt's steps
    assert found.warm.all()
    assert found.aggregated.all()
