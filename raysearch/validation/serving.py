"""Serving runs of endtoend_ttft_tpot.csv: time per output token of aggregated and disaggregated deployments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.calibration.deployments import ServingRow, as_stated, disagg_decoder
from raysearch.calibration.serving import (
    agg_runs,
    cross_validated_tpot,
    engine_for,
    engines_of,
    numbers_of,
    read_runs,
    records,
    stating_their_batch,
    works_of,
)
from raysearch.validation.figures import Comparison, figures, within_groups
from raysearch.validation.light import light_step_s
from sim.prices.calibration import Calibration
from sim.serving.batching import Work, step_alone, time_per_token

Floats = NDArray[np.float64]


def compare_serving(
    directory: Path, calibration: Calibration, hbm_bytes: float, *, held_out: bool = False
) -> Comparison | None:
    """Predicted time per output token of the aggregated runs; None if the folder has no such file.

    The disaggregated runs are figures of their own in `extra`: their decode workers see no prompts.

    Raises:
        InputError: A file that cannot be used.
    """
    frame = read_runs(directory)
    if frame is None:
        return None
    runs, rows = agg_runs(frame)
    works, measured = works_of(rows, calibration, hbm_bytes), numbers_of(runs, "silicon_tpot_ms")
    predicted = _predicted_ms(runs, rows, works, calibration, held_out=held_out)
    light, known = _light_ms(rows, works, calibration), np.isfinite(predicted)
    literal = [as_stated(row) for row in rows]
    literally = works_of(literal, calibration, hbm_bytes)
    literal_ms = _predicted_ms(runs, literal, literally, calibration, held_out=held_out)
    left_out = int(np.count_nonzero(frame["mode"] == "agg")) - len(runs)
    stating = stating_their_batch(rows)
    guessed = int((~stating).sum())
    return Comparison(
        "endtoend_ttft_tpot",
        runs,
        measured,
        predicted,
        light,
        ("model_path", "backend"),
        unit="ms",
        note="time per output token of mode agg; the time to the first token is not predicted"
        + (f"; {left_out} rows name an unknown model or no concurrency" if left_out else "")
        + (f"; {int((~known).sum())} rows need kernels that the calibration lacks" if not known.all() else "")
        + (f"; {guessed} rows state their client's concurrency, not their server's limit" if guessed else ""),
        extra={
            "rank_correlation_within_workload": _ranks(runs, rows, predicted, measured, known, stating),
            "rows_that_state_their_batch": figures(measured[stating], predicted[stating], light[stating]),
            "every_row_taken_literally": figures(measured, literal_ms, _light_ms(literal, literally, calibration)),
            "disagg": _disaggregated(frame, calibration, hbm_bytes),
        },
    )


def _predicted_ms(
    runs: pd.DataFrame,
    rows: Sequence[ServingRow],
    works: Sequence[Work | None],
    calibration: Calibration,
    *,
    held_out: bool,
) -> Floats:
    """[rows] milliseconds per output token; NaN where the kernels are not known."""
    if held_out:
        return cross_validated_tpot(runs, rows, works) * 1e3
    engines, pairs = engines_of(calibration), zip(works, rows, strict=True)
    return _milliseconds([time_per_token(w, engine_for(engines, r.engine)) if w else math.nan for w, r in pairs])


def _light_ms(rows: Sequence[ServingRow], works: Sequence[Work | None], calibration: Calibration) -> Floats:
    """[rows] milliseconds of a step at the bare roofline; NaN where the kernels are not known."""
    light: dict[str, float] = calibration.data["speed_of_light"]
    pairs = zip(works, rows, strict=True)
    return _milliseconds([light_step_s(r.deployment, w.running, light) if w else math.nan for w, r in pairs])


def _milliseconds(seconds: list[float]) -> Floats:
    return np.array(seconds, dtype=float) * 1e3


def _ranks(
    runs: pd.DataFrame,
    rows: list[ServingRow],
    predicted: Floats,
    measured: Floats,
    known: NDArray[np.bool_],
    stating: NDArray[np.bool_],
) -> dict[str, dict[str, object]]:
    """Rank correlations of tokens/s/GPU inside workloads, on all known rows and on those that state their batch.

    Tokens/s/GPU are the stated requests in flight over the time per token and the GPUs, measured and predicted alike.
    """
    kept = stating & known
    load = np.array([row.stated / row.deployment.gpus for row in rows])
    labels = {
        "model_engine_isl_osl": ["model_path", "backend", "isl", "osl"],
        "model_isl_osl": ["model_path", "isl", "osl"],
        "model_engine": ["model_path", "backend"],
    }
    result: dict[str, dict[str, object]] = {}
    for name, columns in labels.items():
        keys = np.array([" ".join(map(str, key)) for key in runs[columns].itertuples(index=False)])
        result[name] = {
            **within_groups((load / measured)[known], (load / predicted)[known], keys[known].tolist()),
            "rows_that_state_their_batch": within_groups(
                (load / measured)[kept], (load / predicted)[kept], keys[kept].tolist()
            ),
        }
    return result


def _disaggregated(frame: pd.DataFrame, calibration: Calibration, hbm_bytes: float) -> dict[str, object]:
    """Errors of the decode workers of disaggregated runs: no prompts, the engine's own time as fitted."""
    runs = pd.DataFrame(frame[frame["mode"] != "agg"])
    rows = [disagg_decoder(row) for row in records(runs)]
    kept = [row is not None for row in rows]
    known = [row for row in rows if row is not None]
    works, engines = works_of(known, calibration, hbm_bytes), engines_of(calibration)
    predicted: list[float] = []
    for work, row in zip(works, known, strict=True):
        predicted.append(step_alone(work, engine_for(engines, row.engine)) if work else math.nan)
    measured = numbers_of(runs, "silicon_tpot_ms")[kept]
    result = figures(measured, _milliseconds(predicted), _light_ms(known, works, calibration))
    return {**result, "unpredicted": result["unpredicted"] + len(runs) - len(known)}
