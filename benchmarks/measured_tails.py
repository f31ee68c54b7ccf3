"""Measured times to the first token and per token beside replayed ones: clients who all begin at once.

    python benchmarks/measured_tails.py DIR --hardware h100_sxm [--spread 0.8] [--rows 100] [--json]

Nothing is fitted to these: a run's clients are replayed on the step model with the engine's own times as calibrated and
its scheduler as shipped, with as many requests open as the run states. DIR holds runs of the public database (means)
or InferenceX's records (medians and 99th percentiles, aggregated and disaggregated). InferenceX's script draws lengths
evenly from 0.8 of the stated ones on (benchmark_lib.sh), which is --spread 0.8; the database's own runs send equal
ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysearch.base.progress import stepping
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet, DeployedFleet, DisaggregatedFleet
from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.inferencex_results import (
    ENGINES,
    flag,
    machine_named,
    number,
    published_records,
    published_row,
)
from raysearch.fidelity.calibration.serving_fit import agg_runs, read_serving_runs
from raysearch.fidelity.validation.disaggregated import PoolPair, pair_of
from sim.config.catalog import load_calibrated, load_machine
from sim.prices.calibration import Calibration
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.two_pools import TwoPools, handover_of
from sim.strategy import Strategy
from sim.workload import Workload

WAVES = 10
"""Requests per client. [published] InferenceX sends ten times its concurrency."""
MEASURED = {
    "silicon_ttft_ms": "replay_mean_ttft_ms",
    "silicon_tpot_ms": "replay_mean_tpot_ms",
    "median_ttft_ms": "replay_p50_ttft_ms",
    "median_tpot_ms": "replay_p50_tpot_ms",
    "p99_ttft_ms": "replay_p99_ttft_ms",
    "p99_tpot_ms": "replay_p99_tpot_ms",
}
"""What was measured -> what the replay says of it; the database has means, InferenceX percentiles."""
STATISTICS: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "p50": lambda values: np.percentile(values, 50),
    "p99": lambda values: np.percentile(values, 99),
}
Run = ServingRun | PoolPair


def main() -> None:
    """Prints the errors by form of deployment, engine and model."""
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
        raise SystemExit(f"{asked.directory}: no run of {asked.hardware} can be priced")
    if asked.json:
        print(json.dumps(found.to_dict("records"), indent=1))
        return
    print(_table(found).to_string(float_format=lambda value: f"{value:.3f}"))


def replayed_rows(directory: Path, hardware: str, published: float, most: int | None) -> Iterator[dict[str, Any]]:
    """Each run: what was measured, what `evaluate` says, and what a replay of its clients gives."""
    calibration = load_calibrated(hardware, None)
    machine = load_machine(hardware, calibration)
    frame = read_serving_runs(directory, hardware)
    if frame is None:
        return
    rows, runs, _ = agg_runs(frame)
    found: list[tuple[Any, Run]] = [(rows.iloc[at], run) for at, run in enumerate(runs)]
    found += disaggregated_rows(directory, hardware)
    with stepping(f"{hardware}: runs") as step:
        for done, place in enumerate(np.random.default_rng(0).permutation(len(found))[:most], 1):
            row, run = found[place]
            spread = 1.0 if "internal" in str(row["source"]) else published
            priced = _priced(run, machine, calibration, spread)
            step(done, min(len(found), most or len(found)))
            if priced is not None:
                one = run if isinstance(run, ServingRun) else run.decode
                yield {
                    "id": row["id"],
                    "model": one.model.name,
                    "engine": one.engine,
                    "form": "agg" if run is one else "disagg",
                    "drafts": one.speculation is not None,
                    **{name: float(row.get(name, np.nan)) for name in MEASURED},
                    **priced,
                }


def disaggregated_rows(directory: Path, hardware: str) -> list[tuple[Any, PoolPair]]:
    """Runs of InferenceX with separate workers that state how many; none of another source."""
    path = directory if directory.is_file() else directory / "runs.csv"
    if not path.is_file() or read_serving_runs(directory, hardware) is None:
        return []
    found: list[tuple[Any, PoolPair]] = []
    for line, said in enumerate(published_records(path), 1):
        engine = ENGINES.get(str(said.get("framework")))
        if not flag(said, "disagg") or engine is None or machine_named(said.get("hardware")) != hardware:
            continue
        row = published_row(said, engine, hardware, line)
        for phase in ("prefill", "decode"):
            gpus, ep = (int(number(said, f"{phase}_{each}") or 1) for each in ("tp", "ep"))
            ranks = gpus if flag(said, f"{phase}_dp_attention") else 1
            row |= {
                f"{phase}_tp_size": gpus // ranks,
                f"{phase}_attention_dp_size": ranks,
                f"{phase}_moe_tp_size": max(1, gpus // ep),
                f"{phase}_moe_ep_size": ep,
                f"{phase}_pp_size": 1,
                f"{phase}_batch_size": 0,
                f"{phase}_num_workers": int(number(said, f"{phase}_num_workers") or 0),
            }
        pair = pair_of(row) if row["decode_num_workers"] else None
        if isinstance(pair, PoolPair):
            found.append((row, pair))
    return found


def _priced(run: Run, machine: MeasuredMachine, calibration: Calibration, spread: float) -> dict[str, float] | None:
    """Milliseconds by `evaluate` and by the replay; None where a kernel is not known."""

    def served(one: ServingRun) -> tuple[Workload, Strategy]:
        workload = one.workload(lambda _: machine(one.kernels), engine_times(calibration, one))
        return workload, one.strategy

    try:
        fleet, clients = _fleet(run, served)
        ttft_s, tpot_s = fleet.latencies_s
    except (KeyError, ValueError):
        return None
    one = run if isinstance(run, ServingRun) else run.decode
    prompts, answers = (Lengths(each, spread) for each in (one.prompt_tokens, one.output_tokens))
    outcome = fleet.replayed(Requests.drawn(np.zeros(WAVES * clients), prompts, answers, 0), clients)
    return {
        "evaluate_ttft_ms": ttft_s * 1e3,
        "evaluate_tpot_ms": tpot_s * 1e3,
        **{
            f"replay_{name}_{what}_ms": float(of(values[~np.isnan(values)])) * 1e3
            for what, values in (("ttft", outcome.ttft_s), ("tpot", outcome.tpot_s))
            for name, of in STATISTICS.items()
        },
    }


def _fleet(run: Run, served: Callable[[ServingRun], tuple[Workload, Strategy]]) -> tuple[DeployedFleet, int]:
    """(what ran, its clients)."""
    if isinstance(run, ServingRun):
        return AggregatedFleet(Deployed.of(*served(run), as_shipped=True), 1), run.strategy.batch
    (into, prefill), (out_of, decode) = served(run.prefill), served(run.decode)
    one, other = (Deployed.of(*each, as_shipped=True) for each in ((into, prefill), (out_of, decode)))
    handover = handover_of(into, (prefill, decode), same_node=False)
    return DisaggregatedFleet(TwoPools(one, other, run.prefills, run.decodes, handover)), run.open_requests


def _table(found: pd.DataFrame) -> pd.DataFrame:
    """Runs and median errors, with the bias of the first token's, by form, drafts and engine."""

    def errors(group: pd.DataFrame) -> pd.Series:
        def off(measured: str, ours: str) -> np.ndarray:
            errors = group[ours].to_numpy(float) / group[measured].to_numpy(float) - 1
            return errors[~np.isnan(errors)]

        figures = {"runs": float(len(group))}
        for measured, ours in MEASURED.items():
            name = measured.removesuffix("_ms").removeprefix("silicon_")
            if len(found := off(measured, ours)):
                figures |= {name: float(np.median(np.abs(found))), f"{name} bias": float(np.median(found))}
        if len(steady := off("silicon_ttft_ms", "evaluate_ttft_ms")):
            figures["evaluate ttft"] = float(np.median(np.abs(steady)))
        return pd.Series(figures)

    tables = [errors(found).to_frame("all").T]
    for names in (["form", "drafts"], ["form", "engine", "drafts"], ["engine", "model"]):
        keys = found[names].astype(str).agg(" ".join, axis=1)
        rows = {key: errors(pd.DataFrame(found[keys == key])) for key in sorted(set(keys))}
        tables.append(pd.DataFrame(rows).T)
    return pd.concat(tables)


if __name__ == "__main__":
    main()
