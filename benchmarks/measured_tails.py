"""Measured times to the first token and per token beside replayed ones: clients who all begin at once.

    python benchmarks/measured_tails.py DIR ... [--hardware h200_sxm ...] [--by system engine] [--json]

A run's clients are replayed on the step model with the engine's own times as calibrated and its scheduler as published
of the run; "predicted" adds what clients measure beside it, fitted to aggregated runs of other models (--held-out). A
machine stands before a folder that does not name one (h100_sxm=DIR). Median errors of means, medians and 99th
percentiles. In place of that fit, --trees has extremely randomised trees (scikit-learn) correct the replay, which see
all that a run states and all of the replay's figures: how well any model could do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from raysearch.base.progress import stepping
from raysearch.fidelity.calibration.first_token_fit import TAIL_FIGURES
from raysearch.fidelity.calibration.inferencex_results import MACHINES
from raysearch.fidelity.validation.first_token_errors import (
    FirstTokenRuns,
    errors_by,
    first_token_runs,
    held_out_s,
    in_sample_s,
)
from sim.arrays import Floats

_FOLDS = 12
"""Groups that are held out one by one; more are dealt into ten."""


def main() -> None:
    """Prints the errors by some columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="folders with endtoend_ttft_tpot.csv or runs.csv; MACHINE=FOLDER")
    parser.add_argument("--hardware", nargs="*", default=list(MACHINES.values()), help="machines (all)")
    parser.add_argument("--by", nargs="*", default=["form", "system", "engine", "drafts"])
    ways = ("model", "workload", "configuration", "none")
    parser.add_argument("--held-out", choices=ways, default="model", help="from the fit")
    parser.add_argument("--cold", action="store_true", help="those whose servers compiled kernels meanwhile, alone")
    parser.add_argument("--trees", action="store_true", help="in place of the fit")
    parser.add_argument("--most-clients", type=int, default=10**6, help="of a run, of one pool, to be read at all")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folders: list[tuple[Path, str]] = []
    for text in asked.folders:
        name, _, folder = text.rpartition("=")
        folders += [(Path(folder), each) for each in ([name] if name else asked.hardware)]
    with stepping("runs") as step:
        runs = first_token_runs(folders, step, most_clients=asked.most_clients)
    if asked.trees:
        predicted_s = trees_s(runs, asked.held_out)
    else:
        predicted_s = in_sample_s(runs) if asked.held_out == "none" else held_out_s(runs, asked.held_out)
    found = errors_by(runs, predicted_s, asked.by, ~runs.warm if asked.cold else runs.warm)
    print(found.to_json(orient="index") if asked.json else found.to_string(float_format=lambda each: f"{each:.3f}"))


def trees_s(runs: FirstTokenRuns, by: str) -> Floats:
    """[runs, figures] what would be measured, by trees that have not seen a run's group."""
    cells = np.array([[str(part) for part in cell] for cell in runs.measured.cells])
    lengths = runs.table["workload"].str.split().str[-2:].apply(lambda pair: [float(each) for each in pair]).tolist()
    figures = runs.table.filter(regex=r"^(steady|mean|p50|p99)_t.*_s$").assign(clients=runs.table["clients"])
    seen = np.column_stack(
        [np.log(np.maximum(figures.to_numpy(float), 1e-4)), np.log(lengths), runs.table["drafts"].to_numpy(float)]
        + [cells[:, part] == value for part in range(cells.shape[1]) for value in np.unique(cells[:, part])]
    )
    groups = runs.table[by].to_numpy(str)
    names, places = np.unique(groups, return_inverse=True)
    dealt = np.arange(len(names)) if len(names) <= _FOLDS else np.random.default_rng(0).permutation(len(names)) % 10
    fold, measured_s = dealt[places], runs.measured.measured_s
    base = np.log(np.maximum(runs.measured.replayed_s, 1e-4))
    found = np.full(measured_s.shape, np.nan)
    for place in range(len(TAIL_FIGURES)):
        known = runs.warm & np.isfinite(measured_s[:, place])
        for form in (runs.aggregated, ~runs.aggregated):
            for part in np.unique(fold[form & known]):
                train, test = form & known & (fold != part), form & (fold == part)
                if not train.any():
                    continue
                model = ExtraTreesRegressor(150, min_samples_leaf=2, random_state=0)
                model.fit(np.nan_to_num(seen[train]), np.log(measured_s[train, place]) - base[train, place])
                found[test, place] = np.exp(base[test, place] + model.predict(np.nan_to_num(seen[test])))
    return found


if __name__ == "__main__":
    main()
