"""Measured times to the first token and per token beside replayed ones: clients who all begin at once.

    python benchmarks/measured_tails.py DIR ... [--hardware h200_sxm ...] [--by system engine] [--json]

A run's clients are replayed on the step model with the engine's own times as calibrated and its scheduler as published
of the run; "predicted" adds what clients measure beside it, fitted to aggregated runs of other models (--held-out). A
machine stands before a folder that does not name one (h100_sxm=DIR). Median errors of means, medians and 99th
percentiles.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from raysearch.base.progress import stepping
from raysearch.fidelity.calibration.inferencex_results import MACHINES
from raysearch.fidelity.validation.first_token_errors import errors_by, first_token_runs, held_out_s, in_sample_s


def main() -> None:
    """Prints the errors by some columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="folders with endtoend_ttft_tpot.csv or runs.csv; MACHINE=FOLDER")
    parser.add_argument("--hardware", nargs="*", default=list(MACHINES.values()), help="machines (all)")
    parser.add_argument("--by", nargs="*", default=["form", "system", "engine", "drafts"])
    ways = ("model", "workload", "configuration", "none")
    parser.add_argument("--held-out", choices=ways, default="model", help="from the fit")
    parser.add_argument("--cold", action="store_true", help="those whose servers compiled kernels meanwhile, alone")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folders: list[tuple[Path, str]] = []
    for text in asked.folders:
        name, _, folder = text.rpartition("=")
        folders += [(Path(folder), each) for each in ([name] if name else asked.hardware)]
    with stepping("runs") as step:
        runs = first_token_runs(folders, step)
    predicted_s = in_sample_s(runs) if asked.held_out == "none" else held_out_s(runs, asked.held_out)
    found = errors_by(runs, predicted_s, asked.by, ~runs.warm if asked.cold else runs.warm)
    print(found.to_json(orient="index") if asked.json else found.to_string(float_format=lambda each: f"{each:.3f}"))


if __name__ == "__main__":
    main()
