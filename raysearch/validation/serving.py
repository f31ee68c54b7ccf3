"""Serving runs of endtoend_ttft_tpot.csv: time per output token of aggregated and disaggregated deployments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.calibration.deployments import ServingRow, disagg_decoder
from raysearch.calibration.serving import (
    agg_runs,
    cross_validated_tpot,
    engine_for,
    engines_of,
    numbers_of,
    read_runs,
    records,
    stating_their_batch,
    tpot_s,
    works_of,
)
from raysearch.validation.figures import Comparison, figures, within_groups
from raysearch.validation.light import light_step_s
from sim.calibration import Calibration
from sim.serving import Work

Floats = NDArray[np.float64]


def compare_serving(directory: Path, calibration: Calibration, *, held_out: bool = False) -> Comparison | None:
    """Predicted time per output token of the aggregated runs; None if the folder has no such file.

    The disaggregated runs are figures of their own in `extra`: their decode workers see no prompts.

    Raises:
        InputError: A file that cannot be used.
    """
    frame = read_runs(directory)
    if frame is None:
        return None
    runs, rows = agg_runs(frame)
    works, engines = works_of(rows, calibration), engines_of(calibration)
    if held_out:
        predicted = cross_validated_tpot(runs, rows, works) * 1e3
    else:
        pairs = list(zip(works, rows, strict=True))
        predicted = _milliseconds([tpot_s(w, engine_for(engines, r.engine)) if w else math.nan for w, r in pairs])
    measured = numbers_of(runs, "silicon_tpot_ms")
    light, known = _light_ms(rows, works), np.isfinite(predicted)
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
            "disagg": _disaggregated(frame, calibration),
        },
    )


def _light_ms(rows: Sequence[ServingRow], works: Sequence[Work | None]) -> Floats:
    """[rows] milliseconds of a step at the bare roofline; NaN where the kernels are not known."""
    pairs = zip(works, rows, strict=True)
    return _milliseconds([light_step_s(row.deployment, work.running) if work else math.nan for work, row in pairs])


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


def _disaggregated(frame: pd.DataFrame, calibration: Calibration) -> dict[str, object]:
    """Errors of the decode workers of disaggregated runs: no prompts, the engine's own time as fitted."""
    runs = pd.DataFrame(frame[frame["mode"] != "agg"])
    rows = [disagg_decoder(row) for row in records(runs)]
    kept = [row is not None for row in rows]
    known = [row for row in rows if row is not None]
    works, engines = works_of(known, calibration), engines_of(calibration)
    predicted: list[float] = []
    for work, row in zip(works, known, strict=True):
        engine = engine_for(engines, row.engine)
        predicted.append(work.decode_s + engine.step_s + engine.sequence_s * work.running if work else math.nan)
    measured = numbers_of(runs, "silicon_tpot_ms")[kept]
    result = figures(measured, _milliseconds(predicted), _light_ms(known, works))
    return {**result, "unpredicted": result["unpredicted"] + len(runs) - len(known)}
