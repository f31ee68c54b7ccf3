"""One fit of engines' times over machines: what runs say is found, what they do not is as what is like it."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from raysearch.fidelity.calibration.deployments import ServingRun, strategy_of_run
from raysearch.fidelity.calibration.engines import Steps, engine_times, steps_of
from raysearch.fidelity.calibration.pooled_fit import JUDGED_BY, Cell, Pool, PooledTimes, cell_of_run, held_out
from raysearch.fidelity.calibration.serving_pool import MeasuredRuns, anchored_serving, told_once
from sim.config.calibration_file import CalibrationFile
from sim.config.catalog import cells_of, load_calibration, load_engine, load_model, measured_machine
from sim.prices.engine import EngineTimes, times_of
from sim.serving.phases import Pace

VLLM = Cell("vllm", "vllm", "one", "small", "dense", "bf16", "")
CELLS = [VLLM, VLLM._replace(model="large"), VLLM._replace(system="other"), VLLM._replace(family="x", engine="x")]


def pool_of(cells: list[Cell], truth: list[EngineTimes], runs: int = 40) -> Pool:
    """So many runs of each cell, made with its times."""
    rng = np.random.default_rng(0)
    count = len(cells) * runs
    ones, batch = np.ones(count), rng.integers(1, 256, count).astype(float)
    none = 0 * ones
    pace = Pace(rng.uniform(0, 0.5, count), ones, ones, batch, ones, none, none, none, ones, ones, none)
    decode_s = rng.uniform(3e-3, 3e-2, count)
    steps = Steps(pace, decode_s, decode_s * rng.uniform(1.5, 5, count), batch, np.ones((count, 2)))
    each = [times for times in truth for _ in range(runs)]
    measured_s = steps.tpot_of_each_s(each)
    return Pool([cell for cell in cells for _ in range(runs)], 32 * ones, steps, measured_s, ones)


def test_a_fit_finds_the_times_that_runs_were_made_with() -> None:
    truth = [EngineTimes(1e-3, 1e-5, 0.8, factor) for factor in (0.8, 1.0, 1.1, 1.3)]
    pool = pool_of(CELLS, truth)
    fitted = PooledTimes(pool)
    times = [fitted.times(cell, 32) for cell in pool.cells]
    assert np.abs(np.log(pool.steps.tpot_of_each_s(times) / pool.measured_s)).mean() < 0.02


def test_what_no_run_shows_is_as_what_is_like_it() -> None:
    pool = pool_of(CELLS[:2], [EngineTimes(1e-3, 1e-5, 0.8, 1.3)] * 2)
    fitted = PooledTimes(pool)
    known, alike, unknown = (
        fitted.times(cell, 32).kernel_factor
        for cell in (VLLM, VLLM._replace(system="new"), VLLM._replace(family="y", engine="y", model="new"))
    )
    assert 1 < unknown < alike < known
    assert fitted.times(VLLM._replace(model="", weights=""), 32).kernel_factor < known


def test_runs_held_out_move_nothing_of_their_own() -> None:
    truth = [EngineTimes(1e-3, 1e-5, 0.8, factor) for factor in (1.0, 1.0, 1.0, 2.0)]
    pool = pool_of(CELLS, truth)
    times = held_out(pool, [cell.family for cell in pool.cells], folds=9)
    assert times[-1].kernel_factor < 1.2  # x was never seen
    assert len({astuple(each) for each in times[-40:]}) == 1


def test_a_calibration_stores_the_times_of_models_and_of_any_like_them() -> None:
    pool = pool_of(CELLS, [EngineTimes(1e-3, 1e-5, 0.8, factor) for factor in (0.8, 1.0, 1.1, 1.3)])
    fitted = PooledTimes(pool)
    record = fitted.record("one", CELLS * JUDGED_BY)["vllm"]
    assert record["models"] == ["large", "small"]
    for names, cell in (
        (["small/bf16"], VLLM),
        (["small/fp8", "small"], VLLM._replace(weights="")),
        (["nobody", "dense"], VLLM._replace(model="", weights="")),
        (["nobody", "moe"], VLLM._replace(model="", weights="", kind="moe")),
    ):
        assert astuple(times_of(record, names, 32)) == pytest.approx(astuple(fitted.times(cell, 32)), rel=1e-3)
    few = fitted.record("one", CELLS)["vllm"]  # a run of each: the times of a machine that never ran
    unseen = fitted.times(VLLM._replace(system="elsewhere"), 32)
    assert astuple(times_of(few, ["small/bf16"], 32)) == pytest.approx(astuple(unseen), rel=1e-3)


def test_a_few_runs_of_ones_own_correct_the_times_of_their_model_alone() -> None:
    serving = load_calibration("b200_sxm").data["serving"]
    pool = _own_runs(5, slower=1.5)
    found = anchored_serving(serving, pool, "b200_sxm")
    left = found["anchored_to"]
    assert left["runs"] == 5
    assert left["before"] == left["held_out"] == pytest.approx(1 / 3, abs=1e-4), "all are of one configuration"
    others = anchored_serving(serving, _own_runs(5, slower=1.5, apart=4), "b200_sxm")["anchored_to"]
    assert left["after"] < others["held_out"] < 0.04
    before, after = (each["engines"]["vllm"]["of"] for each in (serving, found))
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {name for name in before if name.split("/")[0] == "llama_3_1_70b"}
    steps = pool.pool.steps
    slower, elsewhere = (
        steps.tpot_s(times_of(after[key], (), 80))[0] / steps.tpot_s(times_of(before[key], (), 80))[0]
        for key in ("llama_3_1_70b/fp8", "llama_3_1_70b/nvfp4")
    )
    assert 1.05 < elsewhere < 1.4 < slower < 1.5  # nearly all of it, after five; of another format less
    CalibrationFile.model_validate({**load_calibration("b200_sxm").data, "serving": found})


def test_what_an_export_rounds_is_no_second_run() -> None:
    runs = _own_runs(4, slower=1.5)
    measured_s = np.array([8.4116, 8.41, 8.42, 8.42]) / 1e3
    assert told_once(runs.systems, runs.runs, measured_s).tolist() == [True, False, True, False]


def _own_runs(count: int, slower: float, apart: int = 0) -> MeasuredRuns:
    """Runs so many times as slow as predicted, each with so many tokens more in its prompts than the one before."""
    model = load_model("llama_3_1_70b")
    strategy, _ = strategy_of_run(model, 8, 4, 1, 1)
    runs = [
        ServingRun(model, 1000 + apart * row, 100, "fp8", "fp8", strategy, "vllm", "vllm", 8, generation="vllm")
        for row in range(count)
    ]
    cell, machine = cell_of_run(runs[0], "b200_sxm"), measured_machine("b200_sxm")
    steps = steps_of(runs, machine)
    times = engine_times(load_calibration("b200_sxm"), runs[0])
    layers, measured_s = np.full(count, float(model.layers)), slower * steps.tpot_s(times)
    return MeasuredRuns(runs, ["b200_sxm"] * count, Pool([cell] * count, layers, steps, measured_s, np.ones(count)))


@pytest.mark.parametrize("machine", ["h200_sxm", "b200_sxm", "b300_sxm", "gb200_nvl72", "gb300_nvl72"])
def test_the_measured_machines_charge_an_engine_as_its_cell_says(machine: str) -> None:
    calibration = load_calibration(machine)
    CalibrationFile.model_validate(calibration.data)
    model = load_model("deepseek_v3")
    record = calibration.data["serving"]["engines"]["trtllm"]
    plain, speculative = (
        load_engine("trtllm", calibration, model, "fp8_block", drafts=drafts).times for drafts in (False, True)
    )
    assert plain == times_of(record, ["deepseek_v3/fp8_block"], model.layers) != speculative
    assert speculative == times_of(record, cells_of(model, "fp8_block", drafts=True), model.layers)
    newer, older = (load_engine(name, calibration, model, "fp8_block").times for name in ("trtllm", "trtllm<1.2"))
    assert newer.kernel_factor < older.kernel_factor
