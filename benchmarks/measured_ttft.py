"""Measured times to the first token beside replayed ones: clients who all begin at once, as benchmarks send them.

    python benchmarks/measured_ttft.py DIR --hardware h100_sxm [--spread 0.8] [--rows 100] [--json]

Nothing is fitted to these: a run's clients are replayed on the step model with the engine's own times as calibrated, in
phase serve with as many requests open as the run states. InferenceX's script draws lengths evenly from 0.8 of the
stated ones on (benchmark_lib.sh), which is --spread 0.8 of its rows; most of them look as if lengths were equal. The
database's own runs send equal ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysearch.base.progress import stepping
from raysearch.fidelity.calibration.deployments import ServingRun
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.serving_fit import agg_runs, numbers_of, read_serving_runs
from sim.config.catalog import load_calibrated, load_machine
from sim.prices.engine import EngineTimes
from sim.prices.hardware import Hardware
from sim.replay.drive import by_clients
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.simulate import evaluate

WAVES = 10
"""Requests per client. [published] InferenceX sends ten times its concurrency."""


def main() -> None:
    """Prints the errors of both by engine and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder with endtoend_ttft_tpot.csv or runs.csv")
    parser.add_argument("--hardware", default="h100_sxm")
    parser.add_argument(
        "--spread", type=float, default=1.0, help="shortest of InferenceX's lengths over the longest (1)"
    )
    parser.add_argument("--rows", type=int, default=None, help="as many, drawn at random (all)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = pd.DataFrame(list(replayed_rows(asked.directory, asked.hardware, asked.spread, asked.rows)))
    if found.empty:
        raise SystemExit(f"{asked.directory}: no aggregated run of {asked.hardware} can be priced")
    if asked.json:
        print(json.dumps(found.to_dict("records"), indent=1))
        return
    print(_table(found).to_string(float_format=lambda value: f"{value:.3f}"))


def replayed_rows(directory: Path, hardware: str, published: float, most: int | None) -> Iterator[dict[str, Any]]:
    """Each aggregated run: what was measured, what `evaluate` says, and what a replay of its clients gives."""
    calibration = load_calibrated(hardware, None)
    machine = load_machine(hardware, calibration)
    frame = read_serving_runs(directory, hardware)
    if frame is None:
        return
    rows, runs, _ = agg_runs(frame)
    places = np.random.default_rng(0).permutation(len(runs))[:most]
    ttft_ms, tpot_ms = (numbers_of(rows, f"silicon_{name}_ms") for name in ("ttft", "tpot"))
    with stepping(f"{hardware}: runs") as step:
        for done, place in enumerate(places, 1):
            run, source = runs[place], str(rows["source"].iloc[place])
            spread = 1.0 if "internal" in source else published
            priced = _priced(run, machine(run.kernels), engine_times(calibration, run), spread)
            step(done, len(places))
            if priced is not None:
                measured = {"ttft_ms": ttft_ms[place], "tpot_ms": tpot_ms[place]}
                names = {"id": rows["id"].iloc[place], "model": run.model.name, "engine": run.engine, "spread": spread}
                yield names | {"concurrency": run.strategy.batch} | measured | priced


def _priced(run: ServingRun, hardware: Hardware, times: EngineTimes, spread: float) -> dict[str, float] | None:
    """Milliseconds by `evaluate` and by the replay; None where a kernel is not known."""
    workload = run.workload(lambda _: hardware, times)
    try:
        steady = evaluate(workload, run.strategy)
    except (KeyError, ValueError):
        return None
    count = WAVES * run.strategy.batch
    lengths = [Lengths(each, spread) for each in (run.prompt_tokens, run.output_tokens)]
    sent = Requests.drawn(np.zeros(count), *lengths, 0)
    outcome = by_clients(Deployed.of(workload, run.strategy), sent, run.strategy.batch)
    return {
        "evaluate_ttft_ms": steady.ttft_s * 1e3,
        "evaluate_tpot_ms": steady.tpot_s * 1e3,
        "replay_ttft_ms": float(np.nanmean(outcome.ttft_s)) * 1e3,
        "replay_tpot_ms": float(np.nanmean(outcome.tpot_s)) * 1e3,
    }


def _table(found: pd.DataFrame) -> pd.DataFrame:
    """Rows, median error of the first token, its bias, and mean error of the time per token, by engine and model."""

    def errors(group: pd.DataFrame) -> pd.Series:
        def off(way: str, what: str) -> pd.Series:
            return group[f"{way}_{what}_ms"] / group[f"{what}_ms"] - 1

        return pd.Series(
            {
                "runs": len(group),
                "ttft evaluate": off("evaluate", "ttft").abs().median(),
                "ttft replay": off("replay", "ttft").abs().median(),
                "bias": off("replay", "ttft").median(),
                "tpot evaluate": off("evaluate", "tpot").abs().mean(),
                "tpot replay": off("replay", "tpot").abs().mean(),
            }
        )

    of_engines = found.groupby("engine").apply(errors, include_groups=False)
    of_models = found.groupby(["engine", "model"]).apply(errors, include_groups=False)
    of_models.index = [f"  {engine} {model}" for engine, model in of_models.index]
    everything = errors(found).to_frame("all").T
    return pd.concat([everything, of_engines, of_models])


if __name__ == "__main__":
    main()
