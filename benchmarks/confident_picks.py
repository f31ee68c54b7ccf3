"""How often the deployment that would be picked under a TPOT misses it in measured runs, at several confidences.

    python benchmarks/confident_picks.py h100_sxm=DIR h200_sxm=DIR ... [--tpot-ms 15 20 30 50] [--margin 0.05]

The measured runs of one model, engine and lengths on a machine are the strategies to choose from. Of those whose
predicted time per token stays below the SLO with the confidence, as `recommend` asks, the one with the most predicted
tokens/s/GPU is picked; it misses where the measured time is above. Beside it, the measured tokens/s/GPU of picks that
keep the SLO over those of the best measured run that does. A group counts where some run keeps the SLO and some does
not. With a margin, the predicted time and this share of it stay below the SLO, whatever the confidence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from raysearch.base.progress import stepping
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.serving_fit import agg_runs, numbers_of, read_serving_runs
from sim.config.catalog import load_calibrated, load_machine
from sim.simulate import evaluate

CONFIDENCES = (0.5, 0.8, 0.9, 0.95)


def main() -> None:
    """Prints a row per machine and confidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="+", help="MACHINE=DIR, a folder with endtoend_ttft_tpot.csv or runs.csv")
    parser.add_argument("--tpot-ms", type=float, nargs="+", default=(15.0, 20.0, 30.0, 50.0))
    parser.add_argument("--margin", type=float, help="the share of the predicted time, in place of a confidence")
    asked = parser.parse_args()
    rules = [f"at {each:g}" for each in CONFIDENCES]
    if asked.margin is not None:
        rules = ["with margin"]
    rows = [
        {"machine": machine, "rule": rule} | figures
        for machine, _, folder in (each.partition("=") for each in asked.machines)
        for found in [priced_runs(Path(folder), machine, asked.margin or 0.0)]
        for rule in rules
        if (figures := picks(found, rule, asked.tpot_ms))
    ]
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3f}"))


def priced_runs(directory: Path, hardware: str, margin: float) -> pd.DataFrame:
    """Of each aggregated run of a machine: measured and predicted times per token by each rule, and throughput."""
    calibration = load_calibrated(hardware, None)
    machine, frame = load_machine(hardware, calibration), read_serving_runs(directory, hardware)
    if frame is None:
        raise SystemExit(f"{directory}: no file of serving runs")
    rows, runs, _ = agg_runs(frame)
    measured_s = numbers_of(rows, "silicon_tpot_ms") / 1e3
    found: list[dict[str, object]] = []
    with stepping(f"{hardware}: runs") as step:
        for done, (run, tpot_s) in enumerate(zip(runs, measured_s, strict=True), 1):
            step(done, len(runs))
            try:
                each = evaluate(run.workload(machine, engine_times(calibration, run)), run.strategy)
            except (KeyError, ValueError):  # a kernel that was not measured
                continue
            group = f"{run.model.name} {run.weights} {run.backend} {run.prompt_tokens} {run.output_tokens}"
            own = {"group": group, "measured_s": tpot_s, "per_gpu": each.tokens_per_s_per_gpu}
            # What the run gave a GPU falls as its tokens took longer than predicted.
            own["measured_per_gpu"] = each.tokens_per_s_per_gpu * each.tpot_s / tpot_s
            own["with margin"] = each.tpot_s * (1 + margin)
            found.append(own | {f"at {probability:g}": each.tpot_at_s(probability) for probability in CONFIDENCES})
    if not found:
        raise SystemExit(f"{directory}: no aggregated run of {hardware} that can be priced")
    return pd.DataFrame(found)


def picks(found: pd.DataFrame, rule: str, tpots_ms: list[float]) -> dict[str, float]:
    """Picks, how many of them miss, how many groups have none, and what the others reach; empty without a group."""
    picked, missed, none, reached = 0, 0, 0, list[float]()
    for limit_s in (each / 1e3 for each in tpots_ms):
        for _, group in found.groupby("group"):
            keeps = group["measured_s"] <= limit_s
            if keeps.all() or not keeps.any():
                continue
            kept = group[group[rule] <= limit_s]
            if kept.empty:
                none += 1
                continue
            pick = kept.iloc[int(kept["per_gpu"].argmax())]
            picked += 1
            missed += bool(pick["measured_s"] > limit_s)
            if pick["measured_s"] <= limit_s:
                reached.append(pick["measured_per_gpu"] / group.loc[keeps, "measured_per_gpu"].max())
    if not picked:
        return {}
    share = {"missed": missed / picked, "of the best": float(np.mean(reached)) if reached else float("nan")}
    return {"picks": picked, "no pick": none} | share


if __name__ == "__main__":
    main()
