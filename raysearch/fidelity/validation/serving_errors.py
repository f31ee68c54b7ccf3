"""Serving runs of endtoend_ttft_tpot.csv: time per output token of aggregated and disaggregated deployments.

Every row is priced by `sim.simulate.evaluate`, as a searched strategy is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun, as_stated
from raysearch.fidelity.calibration.engines import (
    Steps,
    engine_times,
    held_out_times,
    shapes_of,
    stating_their_batch,
    steps_of,
)
from raysearch.fidelity.calibration.intervals import (
    Coverage,
    coverage,
    held_out_coverage,
    held_out_residuals,
    residuals_of,
)
from raysearch.fidelity.calibration.serving_fit import LEAST_JUDGED, Runs, agg_runs, numbers_of, read_serving_runs
from raysearch.fidelity.validation.disaggregated import compare_disaggregated
from raysearch.fidelity.validation.error_figures import Comparison, ErrorFigures, WorkloadRanks, figures, within_groups
from raysearch.fidelity.validation.light import light_tpot_s
from sim.arrays import Floats
from sim.evaluation import Evaluation
from sim.prices.calibration import Calibration
from sim.prices.engine import EngineTimes
from sim.simulate import evaluate, steady_state


def compare_serving(
    directory: Path, calibration: Calibration, machine: MeasuredMachine, *, held_out: bool = False
) -> Comparison | None:
    """Predicted time per output token of the aggregated runs; None if the folder has no such file.

    The disaggregated runs are figures of their own in `extra`: see `raysearch.fidelity.validation.disaggregated`.

    Raises:
        InputError: A file that cannot be used.
    """
    frame = read_serving_runs(directory, machine("vllm").name)
    if frame is None:
        return None
    found = agg_runs(frame)
    rows, runs = found.rows, found.runs
    steps, measured = steps_of(runs, machine), numbers_of(rows, "silicon_tpot_ms")
    if held_out:
        times = held_out_times(runs, steps, measured / 1e3, shapes_of(runs))
    else:
        times = [engine_times(calibration, run) for run in runs]
    evaluations = evaluated(runs, times, machine)
    predicted = _tpot_ms(evaluations, steps.priced)
    light, stating = _light_ms(runs, machine, steps.priced), stating_their_batch(runs)
    literal_ms, literal_light_ms = predicted.copy(), light.copy()
    if guessed := np.flatnonzero(~stating).tolist():
        literal, known = [as_stated(runs[row]) for row in guessed], steps.priced[guessed]
        literal_ms[guessed] = _tpot_ms(evaluated(literal, [times[row] for row in guessed], machine), known)
        literal_light_ms[guessed] = _light_ms(literal, machine, known)
    unpriced = {"it needs kernels that the calibration lacks": [str(name) for name in rows["id"][~steps.priced]]}
    return Comparison(
        "endtoend_ttft_tpot",
        rows,
        measured,
        predicted,
        light,
        ("model_path", "backend"),
        unit="ms",
        note="time per output token of mode agg",
        skipped=found.skipped | (unpriced if not steps.priced.all() else {}),
        reread=found.reread,
        extra={
            "rank_correlation_within_workload": _ranks(rows, runs, predicted, measured, steps.priced, stating),
            "rows_that_state_their_batch": figures(measured[stating], predicted[stating], light[stating]),
            "every_row_taken_literally": figures(measured, literal_ms, literal_light_ms),
            "interval": _intervals(found, steps, measured / 1e3, times, evaluations, held_out=held_out),
            "ttft": _ttft(rows, steps.ttft_of_each_s(times) * 1e3),
            "disagg": compare_disaggregated(frame, calibration, machine),
        },
    )


def evaluated(runs: Sequence[ServingRun], times: Sequence[EngineTimes], machine: MeasuredMachine) -> list[Evaluation]:
    """[runs] what a search sees of each, under an engine's own times."""
    return [evaluate(run.workload(machine, each), run.strategy) for run, each in zip(runs, times, strict=True)]


def _tpot_ms(evaluations: Sequence[Evaluation], priced: NDArray[np.bool_]) -> Floats:
    """[runs] milliseconds per output token; NaN where the kernels are not known."""
    return np.where(priced, _milliseconds([evaluation.tpot_s for evaluation in evaluations]), np.nan)


def _intervals(
    found: Runs,
    steps: Steps,
    measured_s: Floats,
    times: Sequence[EngineTimes],
    evaluations: Sequence[Evaluation],
    *,
    held_out: bool,
) -> dict[str, Coverage]:
    """How many runs lie in their 90 % interval: in the one that `evaluate` states, or in one that has not seen them."""
    rows = np.flatnonzero(steps.priced).tolist()
    if len(rows) < (LEAST_JUDGED if held_out else 1):
        return {}
    runs, priced, own_times = (
        [found.runs[row] for row in rows],
        steps[np.array(rows, dtype=int)],
        [times[r] for r in rows],
    )
    if not held_out:
        stated = np.array([evaluations[row].tpot_interval_s for row in rows]).reshape(-1, 2)
        residuals = residuals_of(runs, priced, measured_s[rows], own_times, rows, few=False)
        return {"stated": coverage(residuals, (stated[:, 0] <= measured_s[rows]) & (measured_s[rows] <= stated[:, 1]))}
    kinds = held_out_residuals(runs, priced, measured_s[rows], own_times)
    return {name: held_out_coverage(residuals) for name, residuals in kinds.items()}


def _light_ms(runs: Sequence[ServingRun], machine: MeasuredMachine, priced: NDArray[np.bool_]) -> Floats:
    """[runs] the same at the bare roofline."""
    found: list[float] = []
    for run, known in zip(runs, priced, strict=True):
        workload = run.workload(machine)
        state = steady_state(workload, run.strategy).batching
        found.append(light_tpot_s(workload, run.strategy, state) if known else np.nan)
    return _milliseconds(found)


def _milliseconds(seconds: Sequence[float]) -> Floats:
    return np.array(seconds, dtype=float) * 1e3


def _ttft(rows: pd.DataFrame, predicted: Floats) -> ErrorFigures:
    """Errors of the time to the first token, which a measured run also spends in queues: for information."""
    measured = numbers_of(rows, "silicon_ttft_ms") if "silicon_ttft_ms" in rows.columns else np.full(len(rows), np.nan)
    return figures(measured, predicted, np.full(len(rows), np.nan))


def _ranks(
    rows: pd.DataFrame,
    runs: Sequence[ServingRun],
    predicted: Floats,
    measured: Floats,
    known: NDArray[np.bool_],
    stating: NDArray[np.bool_],
) -> dict[str, WorkloadRanks]:
    """Rank correlations of tokens/s/GPU inside workloads, on all known rows and on those that state their batch.

    Tokens/s/GPU are the stated requests in flight over the time per token and the GPUs, measured and predicted alike.
    """
    kept = stating & known
    load = np.array([run.stated / run.gpus for run in runs])
    labels = {
        "model_engine_isl_osl": ["model_path", "backend", "isl", "osl"],
        "model_isl_osl": ["model_path", "isl", "osl"],
        "model_engine": ["model_path", "backend"],
    }
    result: dict[str, WorkloadRanks] = {}
    for name, columns in labels.items():
        keys = np.array([" ".join(map(str, key)) for key in rows[columns].itertuples(index=False)])
        result[name] = {
            **within_groups((load / measured)[known], (load / predicted)[known], keys[known].tolist()),
            "rows_that_state_their_batch": within_groups(
                (load / measured)[kept], (load / predicted)[kept], keys[kept].tolist()
            ),
        }
    return result
