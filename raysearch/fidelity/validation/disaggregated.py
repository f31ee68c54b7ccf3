"""Measured runs with separate prefill and decode workers: time per token and to the first, queues included.

Clients keep so many requests open. A worker's steps are priced by `sim.simulate.evaluate`; how many requests decode at
once follows from what the prefill workers deliver, from the places that the decode workers have, and from the requests
that there are. The others wait before their first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun, Skipped
from raysearch.fidelity.calibration.disaggregated_recipes import PoolPair, pair_of, recipes_by_time
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.serving_fit import numbers_of, records
from raysearch.fidelity.validation.error_figures import DisaggregatedErrors, PredictedRun, figures
from raysearch.fidelity.validation.light import light_tpot_s
from sim.evaluation import Evaluation
from sim.pools.handover import Link, request_cache_bytes, sharers
from sim.prices.calibration import Calibration
from sim.prices.roofline import PRICED_BY_MEDIANS
from sim.simulate import evaluate, steady_state
from sim.workload import Workload


@dataclass(frozen=True)
class PairPrediction:
    """Seconds per token and to the first, and the decode step at the bare roofline."""

    tpot_s: float
    ttft_s: float
    light_s: float


def predict_pair(pair: PoolPair, calibration: Calibration, machine: MeasuredMachine) -> PairPrediction | Skipped:
    """The closed loop of a row's clients and workers."""

    def priced(run: ServingRun) -> tuple[Workload, Callable[[int], Evaluation]]:
        workload = run.workload(machine, engine_times(calibration, run))
        return workload, lambda batch: evaluate(workload, replace(run.strategy, batch=max(1, batch)))

    (into, prefill_at), (out_of, decode_at) = priced(pair.prefill), priced(pair.decode)
    prompt = prefill_at(pair.prefill.strategy.batch)
    if any(PRICED_BY_MEDIANS in each for found in (prompt, decode_at(1)) for each in found.extrapolated):
        return Skipped("it needs kernels that the calibration lacks")
    step_s = prompt.stage.total_s + prompt.engine_s
    link = Link(into, same_node=False, cache_bytes=request_cache_bytes(into, pair.prefill.prompt_tokens))
    transfer_s = link.request_s(sharers(into, pair.prefill.strategy), sharers(out_of, pair.decode.strategy))

    def answer_s(running: float) -> float:
        return pair.decode.output_tokens * decode_at(round(running / pair.decodes)).tpot_s

    fits = pair.decodes * _room(decode_at, -(-pair.places // pair.decodes))
    running, ttft_s = closed_loop(
        pair.open_requests,
        min(pair.places, fits),
        pair.prefills * pair.prefill.strategy.batch / step_s,
        1.5 * step_s + transfer_s,
        answer_s,
    )
    strategy = replace(pair.decode.strategy, batch=max(1, round(running / pair.decodes)))
    light_s = light_tpot_s(out_of, strategy, steady_state(out_of, strategy).batching)
    return PairPrediction(answer_s(running) / pair.decode.output_tokens, ttft_s, light_s)


def closed_loop(
    open_requests: float,
    places: float,
    prompts_per_s: float,
    first_s: float,
    answer_s: Callable[[float], float],
) -> tuple[float, float]:
    """(requests that decode at once, mean seconds to the first token) where clients keep so many requests open.

    The most that decode at once such that no more are needed: of Little's law, with throughput bounded by the prefill
    workers, and by the time that a request takes at least.

    Args:
        open_requests: Kept open; a new one is sent when one ends.
        places: Requests that may decode at once.
        prompts_per_s: Of all prefill workers.
        first_s: To the first token without any queue.
        answer_s: Seconds of an answer, by the requests that decode at once; it never falls with them.

    >>> closed_loop(6, 3, 100.0, 0.1, lambda running: 10.0)  # three places: half of the requests wait
    (3, 10.0)
    """
    running = places
    for _ in range(60):
        seconds = answer_s(running)
        needed = min(prompts_per_s, open_requests / (first_s + seconds)) * seconds
        if needed >= running:
            break
        running = needed
    seconds = answer_s(running)
    return running, max(first_s, open_requests * seconds / running - seconds)


def _room(at: Callable[[int], Evaluation], most: int) -> int:
    """Requests of a worker that have room, at most so many."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        crowded = any(limit.kind in ("hbm", "sequences") for limit in at(middle).violations)
        low, high = (low, middle - 1) if crowded else (middle, high)
    return low


def compare_disaggregated(
    frame: pd.DataFrame, calibration: Calibration, machine: MeasuredMachine
) -> DisaggregatedErrors:
    """Errors of the time per token, in "ttft" of that to the first; each row, and what was not predicted and why."""
    rows = pd.DataFrame(frame[frame["mode"] != "agg"]).reset_index(drop=True)
    columns, predictions = np.full((len(rows), 3), np.nan), list[PredictedRun]()
    skipped: dict[str, list[str]] = {}
    reread: dict[str, list[str]] = {}
    every = records(rows)
    for number, (row, recipe) in enumerate(zip(every, recipes_by_time(every), strict=True)):
        pair, name = pair_of(row, recipe), str(row["id"])
        found = pair if isinstance(pair, Skipped) else predict_pair(pair, calibration, machine)
        if isinstance(found, Skipped):
            skipped.setdefault(found.reason, []).append(name)
            continue
        assert isinstance(pair, PoolPair)
        for how in dict.fromkeys((*pair.decode.reread, *pair.prefill.reread)):
            reread.setdefault(how, []).append(name)
        columns[number] = np.array([found.tpot_s, found.ttft_s, found.light_s]) * 1e3
        predictions.append({"id": name, "tpot_ms": found.tpot_s * 1e3, "ttft_ms": found.ttft_s * 1e3})
    first = np.full(len(rows), np.nan)
    if "silicon_ttft_ms" in rows.columns:
        first = numbers_of(rows, "silicon_ttft_ms")
    return {
        **figures(numbers_of(rows, "silicon_tpot_ms"), columns[:, 0], columns[:, 2]),
        "skipped": skipped,
        "reread": reread,
        "each": predictions,
        "ttft": figures(first, columns[:, 1], np.full(len(rows), np.nan)),
        "by_engine": {
            name: figures(
                *(values[own] for values in (numbers_of(rows, "silicon_tpot_ms"), columns[:, 0], columns[:, 2]))
            )
            for name, own in _by_engine(rows).items()
        },
    }


def _by_engine(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    names = [f"{model}, {backend}" for model, backend in zip(rows["model_path"], rows["backend"], strict=True)]
    return {name: np.array([each == name for each in names]) for name in sorted(set(names))}
