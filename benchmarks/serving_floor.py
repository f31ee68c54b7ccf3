"""How well measured serving runs can be predicted at all: repeats, neighbours, saturated regressors, ideal scalings.

    python benchmarks/serving_floor.py runs/ h100_sxm=h100_runs/ dashboards.csv

Reads folders and files of runs as `raysearch calibrate --set runs` does, prices them, and prints by machine: how far
runs of one configuration lie apart; how far off the best of all times is that never fall as a layout of a workload gets
more requests; what extremely randomised trees say of workloads that they have not seen, and of runs whose workload they
have (scikit-learn); what is left of the error on an unseen machine after five random runs of an engine and model have
corrected it as `--set anchor` does, and how many lie in the interval of a measured model; what trees that know these
five and all other machines leave, and the best scaling that there is; how wide the fifth to the ninety-fifth
percentile of what is left is; and how far decode workers of pools are off. Takes some CPU minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from sklearn.ensemble import ExtraTreesRegressor

from raysearch.fidelity.calibration.anchor import Anchor, Served
from raysearch.fidelity.calibration.intervals import inside, residuals_of
from raysearch.fidelity.calibration.pooled_fit import Bools, PooledTimes, held_out
from raysearch.fidelity.calibration.serving_fit import names_machines, rows_by
from raysearch.fidelity.calibration.serving_pool import MeasuredRuns, measured_runs
from sim.arrays import Floats, Ints
from sim.config.catalog import load_calibration, measured_machine
from sim.config.files import list_names
from sim.config.hardware_file import stored_intervals
from sim.prices.engine import EngineTimes

_FOLDS = 10
_RUNS = 5
"""Own runs that a scaling is fitted to."""
_DRAWS, _DRAWS_OF_TREES = 20, 3
_JUDGED_BY = {"": "b200_sxm", "amd": "mi355x"}
"""Machines whose calibration has the interval of a maker's, by maker."""


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folder or file, or MACHINE=FOLDER where the file names no machine")
    folders = [each for text in parser.parse_args().runs for each in _folders(text)]
    measured = measured_runs(folders, measured_machine)
    kept = measured.pool.steps.priced & (measured.pool.weights > 0) & measured.aggregated
    systems = np.array(measured.systems)
    machines = [name for name in sorted(set(measured.systems)) if (kept & (systems == name)).sum() >= _RUNS]
    in_pools = measured.pool.steps.priced & (measured.pool.weights > 0) & ~measured.aggregated
    by_workload = _predicted_s(measured, measured.workloads, _FOLDS)
    of_machine = held_out(measured.pool, measured.systems, len(measured.runs))
    by_machine = measured.pool.steps.tpot_of_each_s(of_machine)
    trees = {
        "trees, workload": _trees_s(measured, kept, measured.workloads),
        "trees, run": _trees_s(measured, kept, list(range(len(kept)))),
    }
    print(
        "machine | runs | repeats apart: pairs, median, mean | best that rises with the load | "
        "ours, workload held out | trees, workload | trees, run"
    )
    for name in machines:
        rows = kept & (systems == name)
        cells = [
            _repeats(measured, rows),
            _rising(measured, rows),
            *(_error(measured, rows, each) for each in (by_workload, *trees.values())),
        ]
        print(" | ".join([name, f"{rows.sum():,}", *cells]))
    print(
        "\nmachine held out | as it comes | five runs of a model, inside | trees that know these | best scaling | "
        "ten runs | twenty | five of a layout | best scaling"
    )
    for name in machines:
        rows = kept & (systems == name)
        models, layouts = (_groups(measured, rows, key) for key in (_engine_and_model, _layout))
        cells = [
            _error(measured, rows, by_machine),
            _anchored(measured, models, of_machine, _RUNS),
            _trees_anchored(measured, kept & (systems != name), models),
            _best_scaled(measured, models, by_machine),
            *(_anchored(measured, models, of_machine, count * _RUNS) for count in (2, 4)),
            _anchored(measured, layouts, of_machine, _RUNS),
            _best_scaled(measured, layouts, by_machine),
        ]
        print(" | ".join([name, *cells]), flush=True)
    print("\nwidth that holds 90 %, workload held out | ours | trees, workload | trees, run")
    for name in machines:
        rows = kept & (systems == name)
        widths = [_width(measured, rows, each) for each in (by_workload, *trees.values())]
        print(" | ".join([name, *widths]))
    common = PooledTimes(measured.pool[measured.pool.weights > 0])
    rows_of = zip(measured.pool.cells, measured.pool.layers.tolist(), strict=True)
    in_sample = measured.pool.steps.tpot_of_each_s([common.times(*each) for each in rows_of])
    print("\ndecode workers of pools | rows | in sample | workload held out | machine held out")
    for name in sorted({measured.systems[row] for row in measured.in_pools}):
        rows = in_pools & (systems == name)
        cells = [_error(measured, rows, each) for each in (in_sample, by_workload, by_machine)]
        print(" | ".join([name, f"{rows.sum():,}", *cells]))


def _folders(text: str) -> list[tuple[Path, str]]:
    name, _, folder = text.rpartition("=")
    path = Path(folder)
    if not path.exists():
        raise SystemExit(f"no such file or folder: {folder}")
    if not name and not names_machines(path):
        raise SystemExit(f"{folder} names no machine: expected MACHINE={folder}")
    return [(path, each) for each in ([name] if name else list_names("hardware"))]


def _predicted_s(measured: MeasuredRuns, groups: Sequence[Hashable], folds: int) -> Floats:
    """[runs] seconds per token by a fit without the run's group."""
    times = held_out(measured.pool, groups, folds)
    return measured.pool.steps.tpot_of_each_s(times)


def _columns(measured: MeasuredRuns) -> tuple[Floats, Floats]:
    """[runs, columns] all of a run, and what its kernels take; [runs] log seconds per token of kernels alone."""
    steps, pool = measured.pool.steps, measured.pool
    pace = steps.pace
    others = pace.mixed_share * pace.others_share
    base = np.log(((1 - others) * steps.decode_s + others * steps.mixed_s) / pace.gained)
    names = [tuple(cell) for cell in pool.cells]
    one_hot = [np.array([n[part] == value for n in names]) for part in range(8) for value in {n[part] for n in names}]
    strategies = [run.strategy for run in measured.runs]
    numbers = [
        np.log(steps.decode_s),
        np.log(steps.mixed_s),
        others,
        np.log(steps.running),
        base,
        *(
            np.log([float(getattr(each, part)) for each in strategies])
            for part in ("tp", "attention_dp", "ep", "batch")
        ),
        *(np.log([float(getattr(run, part)) for run in measured.runs]) for part in ("prompt_tokens", "output_tokens")),
    ]
    seen = np.column_stack([*numbers, *one_hot]).astype(float)
    return np.nan_to_num(seen, posinf=0, neginf=0), np.nan_to_num(base)


def _trees_s(measured: MeasuredRuns, kept: Bools, groups: Sequence[Hashable]) -> Floats:
    """The same by trees that see all of a run, and correct what its kernels take."""
    (seen, base), pool = _columns(measured), measured.pool
    labels = [str(group) for group in groups]
    known = sorted(set(labels))
    dealt = dict(zip(known, np.random.default_rng(0).permutation(len(known)) % _FOLDS, strict=True))
    fold, found = np.array([dealt[label] for label in labels]), np.full(len(labels), np.nan)
    for part in range(_FOLDS):
        train, test = kept & (fold != part), fold == part
        model = ExtraTreesRegressor(300, min_samples_leaf=2, random_state=0)
        model.fit(seen[train], (np.log(pool.measured_s) - base)[train])
        found[test] = np.exp(base[test] + model.predict(seen[test]))
    return found


def _error(measured: MeasuredRuns, rows: Bools, predicted_s: Floats) -> str:
    error = np.abs(predicted_s[rows] / measured.pool.measured_s[rows] - 1)
    return f"{error.mean():.1%} / {np.median(error):.1%}"


def _width(measured: MeasuredRuns, rows: Bools, predicted_s: Floats) -> str:
    """Half of the distance between the fifth and the ninety-fifth percentile, as a factor."""
    low, high = np.quantile(np.log(measured.pool.measured_s[rows] / predicted_s[rows]), (0.05, 0.95))
    return f"x{np.exp((high - low) / 2):.2f}"


def _configuration(measured: MeasuredRuns, row: int) -> Hashable:
    run = measured.runs[row]
    return (measured.pool.cells[row], run.strategy, run.prompt_tokens, run.output_tokens, str(run.speculation))


def _engine_and_model(measured: MeasuredRuns, row: int) -> Hashable:
    cell = measured.pool.cells[row]
    return (cell.family, cell.model)


def _layout(measured: MeasuredRuns, row: int) -> Hashable:
    run, cell = measured.runs[row], measured.pool.cells[row]
    strategy = run.strategy
    return (cell, strategy.tp, strategy.dp, strategy.ep)


def _repeats(measured: MeasuredRuns, rows: Bools) -> str:
    """How far runs of one configuration lie apart, whatever their dates."""
    at, apart = np.flatnonzero(rows), list[float]()
    for same in rows_by([repr(_configuration(measured, int(row))) for row in at]).values():
        logs = np.log(measured.pool.measured_s[at[same]])
        apart += [abs(float(logs[i] - logs[j])) for i in range(len(logs)) for j in range(i)]
    if not apart:
        return "none"
    return f"{len(apart)}, {np.median(apart):.1%}, {np.mean(apart):.1%}"


def _rising(measured: MeasuredRuns, rows: Bools) -> str:
    """The least mean error of times that never fall with the requests of a worker, and of how many runs.

    Of the runs of a layout at given lengths that differ in their requests: three loads or more.
    """
    keys = [
        (_layout(measured, row), measured.runs[row].prompt_tokens, measured.runs[row].output_tokens)
        for row in range(len(rows))
    ]
    errors = list[float]()
    for same in rows_by([repr(keys[row]) for row in np.flatnonzero(rows).tolist()]).values():
        at = np.flatnonzero(rows)[same]
        loads = [measured.runs[row].strategy.batch for row in at.tolist()]
        if len(set(loads)) > 2:
            errors += _least_rising(loads, measured.pool.measured_s[at]).tolist()
    return f"{np.mean(errors):.1%} of {len(errors)}" if errors else "none"


def _least_rising(loads: Sequence[int], measured_s: Floats) -> Floats:
    """[runs] errors of the times, one a load and never falling, whose mean error is the least: a linear program."""
    steps, runs = sorted(set(loads)), len(loads)
    of_load = np.array([[load == step for step in steps] for load in loads], dtype=float) / measured_s[:, None]
    falls = np.eye(len(steps))[:-1] - np.eye(len(steps))[1:]
    bounds = [
        np.hstack([of_load, -np.eye(runs)]),
        np.hstack([-of_load, -np.eye(runs)]),
        np.hstack([falls, np.zeros((len(falls), runs))]),
    ]
    most = np.concatenate([np.ones(runs), -np.ones(runs), np.zeros(len(falls))])
    found = linprog(np.repeat([0.0, 1.0], [len(steps), runs]), A_ub=np.vstack(bounds), b_ub=most)
    return np.abs(of_load @ found.x[: len(steps)] - 1)


def _groups(measured: MeasuredRuns, rows: Bools, key: Callable[[MeasuredRuns, int], Hashable]) -> list[Ints]:
    """Rows of each group."""
    at = np.flatnonzero(rows)
    return [at[same] for same in rows_by([repr(key(measured, int(row))) for row in at]).values()]


def _drawn(rows: Ints, count: int, draws: int) -> Iterator[tuple[Ints, Ints]]:
    """Of a group of runs, so many random ones and the rest; nothing of one that has no more."""
    rng = np.random.default_rng(0)
    for _ in range(draws if len(rows) > count else 0):
        drawn = rng.permutation(rows)
        yield drawn[:count], drawn[count:]


def _anchored(measured: MeasuredRuns, groups: Sequence[Ints], times: Sequence[EngineTimes], count: int) -> str:
    """Error of the rest after so many random runs of each group have corrected it, and how many lie in the interval."""
    pool, found, covered = measured.pool, list[Floats](), list[float]()
    served = [Served(cell.engine, cell.weights, cell.drafts) for cell in pool.cells]
    for own, rest in (each for rows in groups for each in _drawn(rows, count, _DRAWS)):
        known = {served[row]: times[row] for row in own.tolist()}
        anchor = Anchor([served[row] for row in own.tolist()], pool.steps[own], known, pool.measured_s[own])
        corrected = [anchor.times(served[row], times[row]) for row in rest.tolist()]
        found.append(np.abs(pool.steps[rest].tpot_of_each_s(corrected) / pool.measured_s[rest] - 1))
        if count == _RUNS:
            covered += _inside(measured, rest, corrected)
    inside = f", {np.mean(covered):.0%}" if covered else ""
    return f"{np.concatenate(found).mean():.1%}{inside}" if found else "-"


def _inside(measured: MeasuredRuns, rows: Ints, times: Sequence[EngineTimes]) -> list[float]:
    """[rows] 1 where a run lies in its maker's interval of measured models."""
    maker = measured.pool.cells[int(rows[0])].maker
    stored = stored_intervals(load_calibration(_JUDGED_BY[maker]))
    assert stored is not None
    runs, steps = [measured.runs[row] for row in rows.tolist()], measured.pool.steps[rows]
    left = residuals_of(runs, steps, measured.pool.measured_s[rows], times, rows.tolist(), few=False)
    return inside(left, [stored.measured] * len(rows)).astype(float).tolist()


def _trees_anchored(measured: MeasuredRuns, elsewhere: Bools, groups: Sequence[Ints]) -> str:
    """The same of trees that know all of the other machines, and five runs of the group ten times over."""
    (seen, base), wanted, found = _columns(measured), np.log(measured.pool.measured_s), list[Floats]()
    for own, rest in (each for rows in groups for each in _drawn(rows, _RUNS, _DRAWS_OF_TREES)):
        train = np.concatenate([np.flatnonzero(elsewhere), np.repeat(own, 10)])
        trees = ExtraTreesRegressor(100, min_samples_leaf=2, random_state=0).fit(seen[train], (wanted - base)[train])
        found.append(np.abs(np.exp(base[rest] + trees.predict(seen[rest]) - wanted[rest]) - 1))
    return f"{np.concatenate(found).mean():.1%}" if found else "-"


def _best_scaled(measured: MeasuredRuns, groups: Sequence[Ints], predicted_s: Floats) -> str:
    """Error after the factor of each group that is best of all."""
    best, logs = list[float](), np.log(measured.pool.measured_s / predicted_s)
    for own in (logs[rows] for rows in groups if len(rows) > _RUNS):
        tried = np.linspace(own.min(), own.max(), 200)
        ideal = min(tried, key=lambda shift: float(np.abs(np.exp(shift - own) - 1).mean()))
        best += np.abs(np.exp(ideal - own) - 1).tolist()
    return f"{np.mean(best):.1%} of {len(best)}" if best else "-"


if __name__ == "__main__":
    main()
