"""How well measured kernels can be predicted at all: repeats, and regressors that know every column.

    python benchmarks/kernel_floor.py b200_sxm=b200_sxm_measured/ h100_sxm=h100_measured/ [--families gemm mla_decode]

Prints by machine and family, mean errors: how far apart rows lie that say the same in all columns; what the shipped
curves say of shapes held out (as their calibration states it); and what extremely randomised trees say that see all
columns, logarithms of the sizes, and the bare roofline (scikit-learn), of the same shapes held out and of single rows
held out, whose shape they have seen under another engine or at another size. Takes some CPU minutes per machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from raysearch.fidelity.calibration.coefficients import LEAST_ROWS, with_projections
from raysearch.fidelity.calibration.fit import fold_numbers
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, measured_us, read_table
from raysearch.fidelity.calibration.predict import bare_roofline, series_of
from sim.arrays import Floats
from sim.config.catalog import load_calibration
from sim.prices.calibration import Calibration

_FOLDS, _TREES = 5, 60


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="MACHINE=FOLDER")
    parser.add_argument("--families", nargs="*", default=list(MEASURED_FAMILIES), choices=list(MEASURED_FAMILIES))
    arguments = parser.parse_args()
    print("machine | family | rows | repeats: pairs, mean | ours | trees, shape held out | trees, row held out")
    for text in arguments.folders:
        machine, _, folder = text.partition("=")
        calibration = load_calibration(machine)
        for family in arguments.families:
            frame = read_table(Path(folder), family)
            if frame is None or len(frame) < LEAST_ROWS:
                continue
            print(" | ".join([machine, family, *_row(family, frame, calibration)]), flush=True)


def _row(family: str, frame: pd.DataFrame, calibration: Calibration) -> list[str]:
    if family == "sparse_attention":
        frame = with_projections(frame, calibration)
    series = np.array(series_of(family, frame))
    light, measured = bare_roofline(family, frame, calibration.data), measured_us(frame)
    if "projections_us" in frame:
        light = light + np.nan_to_num(frame["projections_us"].to_numpy(dtype=float))
    known = frame[[name for name in frame.columns if not name.endswith("_us")]]
    numbers = [name for name in known.columns if known[name].dtype.kind in "iuf" and known[name].nunique() > 1]
    texts = [known[name].astype(str).to_numpy() for name in known.columns if known[name].dtype.kind not in "iuf"]
    one_hot = [cells == value for cells in (series, *texts) for value in sorted(set(cells))]
    logs = [np.log1p(known[name].to_numpy(dtype=float)) for name in numbers]
    seen, ratio = np.column_stack([*logs, np.log(light), *one_hot]).astype(float), np.log(measured / light)
    by_row = np.random.default_rng(0).permutation(len(frame)) % _FOLDS
    ours = calibration.data["families"].get(family, {}).get("mape")
    errors = [_trees(seen, ratio, fold) for fold in (fold_numbers(family, frame, _FOLDS), by_row)]
    repeats = _repeats([*known.itertuples(index=False, name=None)], measured)
    return [f"{len(frame):,}", repeats, f"{ours:.1%}" if ours else "-", *(f"{error:.1%}" for error in errors)]


def _trees(seen: Floats, ratio: Floats, fold: NDArray[np.int64]) -> float:
    """Mean error of trees on the rows of each fold."""
    found = np.zeros(len(ratio))
    for part in range(_FOLDS):
        train, test = fold != part, fold == part
        model = ExtraTreesRegressor(_TREES, min_samples_leaf=1, max_features=0.7, random_state=0)
        found[test] = model.fit(seen[train], ratio[train]).predict(seen[test])
    return float(np.abs(np.exp(found - ratio) - 1).mean())


def _repeats(rows: list[tuple[object, ...]], measured: Floats) -> str:
    """Pairs of rows that say the same in all columns, and how far apart their times are."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for row, time in zip(rows, np.log(measured).tolist(), strict=True):
        groups.setdefault(row, []).append(time)
    apart = [abs(a - b) for times in groups.values() for i, a in enumerate(times) for b in times[:i]]
    return f"{len(apart):,}, {np.mean(apart):.1%}" if apart else "none"


if __name__ == "__main__":
    main()
