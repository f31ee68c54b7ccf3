"""First tokens of measured runs: replayed, fitted to what is left, and how sure the result is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.first_token_fit import (
    TAIL_FIGURES,
    MeasuredFirstTokens,
    PooledFirstTokens,
)
from raysearch.fidelity.calibration.fit import OUTSIDE, interval
from raysearch.fidelity.calibration.pooled_fit import Bools, Cell, cell_of_run
from raysearch.fidelity.validation.replayed_runs import (
    WAVES,
    Run,
    TailsOfRun,
    configuration,
    figures_of,
    rows_with_runs,
    run_of,
    spread_of,
    tails_of_run,
)
from sim.arrays import Floats
from sim.config.catalog import load_calibrated, load_machine
from sim.json_object import JsonObject

COLD_S = 50.0
"""A 99th percentile beyond it, or a tenth of it in the mean, that no replay has: kernels are compiled while the first
requests wait. [fitted: SGLang before 0.5.7 on B200, 71 to 79 s from 16 clients on]"""
_OUTSIDES = (OUTSIDE, 0.04, 0.03, 0.02, 0.01)
"""Shares of runs on either side of an interval, of which the first is taken that holds enough of those held out."""
_FOLDS = 10
"""Parts that configurations are dealt into, of which one at a time is held out."""
_STEADY = 1.5
"""Replayed medians over the steady state's time to the first token up to which no queue counts. [assumed]"""


@dataclass(frozen=True, slots=True)
class FirstTokenRuns:
    """Measured runs beside their replays.

    Attributes:
        table: [runs] machine, engine, model, clients and the like, measured and replayed figures in seconds.
        measured: The same for a fit.
        aggregated: [runs] whether prompts and answers share their GPUs.
        warm: [runs] whether nothing was compiled while clients waited, as far as a row says.
    """

    table: pd.DataFrame
    measured: MeasuredFirstTokens
    aggregated: Bools
    warm: Bools


def first_token_runs(
    folders: Sequence[tuple[Path, str]],
    tell: Callable[[int, int], None] = lambda done, of: None,
    most_clients: float = math.inf,
) -> FirstTokenRuns:
    """Replays the runs of some folders, each with the machine that is meant; of one pool those of so many clients.

    Raises:
        InputError: No run states a time to the first token and can be priced.
    """
    found = [
        (name, row, run)
        for folder, name in folders
        for row, run in rows_with_runs(folder, name)
        if run_of(run) is not run or run_of(run).strategy.batch <= most_clients
    ]
    replays: dict[tuple[str, str], TailsOfRun | None] = {}
    kept: list[tuple[str, Mapping[str, Any], Run, TailsOfRun]] = []
    machines = {name: (load_machine(name, cal := load_calibrated(name)), cal) for name in {n for n, _, _ in found}}
    for done, (name, row, run) in enumerate(found):
        key = name, configuration(run, spread_of(row))
        if key not in replays:
            replays[key] = tails_of_run(run, *machines[name], spread_of(row))
        if (tails := replays[key]) is not None and np.isfinite(figures_of(row, "ttft")).any():
            kept.append((name, row, run, tails))
        tell(done + 1, len(found))
    if not kept:
        raise InputError("no run states a time to the first token and can be priced")
    return beside_replays(kept)


def beside_replays(kept: Sequence[tuple[str, Mapping[str, Any], Run, TailsOfRun]]) -> FirstTokenRuns:
    """Runs on their machines, with their rows and replays."""
    counted = Counter((name, configuration(run, spread_of(row))) for name, row, run, _ in kept)
    lines: list[JsonObject] = []
    cells: list[Cell] = []
    for name, row, run, tails in kept:
        one = run_of(run)
        cells.append(cell_of_run(one, name))
        lines.append(
            {
                "id": row["id"],
                "system": name,
                "engine": one.backend,
                "generation": one.generation or one.engine,
                "model": one.model.name,
                "workload": f"{one.model.name} {one.backend} {one.prompt_tokens} {one.output_tokens}",
                "form": "one pool" if run is one else "two pools",
                "configuration": f"{name} {configuration(run, spread_of(row))}",
                "drafts": one.speculation is not None,
                "clients": one.strategy.batch if run is one else getattr(run, "open_requests", 0),
                "repeats": counted[name, configuration(run, spread_of(row))],
                "steady_ttft_s": tails.steady_s[0],
                "steady_tpot_s": tails.steady_s[1],
                **{f"{figure}_{what}_s": each[figure] for figure in TAIL_FIGURES for what, each in _of(tails)},
                **dict(
                    zip([f"measured_{figure}_ttft_s" for figure in TAIL_FIGURES], figures_of(row, "ttft"), strict=True)
                ),
                **dict(
                    zip([f"measured_{figure}_tpot_s" for figure in TAIL_FIGURES], figures_of(row, "tpot"), strict=True)
                ),
            }
        )
    table = pd.DataFrame(lines)
    replayed_s, measured_s = (
        table[[f"{before}{figure}_ttft_s" for figure in TAIL_FIGURES]].to_numpy(float) for before in ("", "measured_")
    )
    late = (measured_s[:, 2] > COLD_S) & (replayed_s[:, 2] < COLD_S / 2)
    late |= (measured_s[:, 0] > COLD_S / WAVES) & (replayed_s[:, 0] < COLD_S / WAVES / 2)
    weights = 1 / np.sqrt(table["repeats"].to_numpy(float))
    measured = MeasuredFirstTokens(cells, table["mean_tpot_s"].to_numpy(float), replayed_s, measured_s, weights)
    return FirstTokenRuns(table, measured, (table["form"] == "one pool").to_numpy(), ~late)


def _of(tails: TailsOfRun) -> tuple[tuple[str, Mapping[str, float]], ...]:
    return ("ttft", tails.first_s), ("tpot", tails.token_s)


def in_sample_s(runs: FirstTokenRuns) -> Floats:
    """[runs, figures] what would be measured, by a fit to all warm runs of one pool, and by one to those of two."""
    found = np.full(runs.measured.replayed_s.shape, np.nan)
    for form in _forms(runs):
        found[form] = PooledFirstTokens(runs.measured[form & runs.warm]).predicted_s(runs.measured[form])
    return found


def held_out_s(runs: FirstTokenRuns, by: str = "model", replayed_s: Floats | None = None) -> Floats:
    """[runs, figures] what would be measured, by fits to others of their form, one pool or two.

    Args:
        runs: Measured and replayed.
        by: What is held out whole: "model", "workload" (model, engine and lengths, on all machines), or
            "configuration" (all repeats of one, with a tenth of the others), as in fresh runs of campaigns that are
            known. Of a form with which one model ran alone, machines are held out in place of models.
        replayed_s: [runs, figures] what is predicted from in place of the replays.
    """
    asked = runs.measured if replayed_s is None else replace(runs.measured, replayed_s=replayed_s)
    found = np.full(asked.replayed_s.shape, np.nan)
    for form in _forms(runs):
        alone = by == "model" and runs.table.loc[form, by].nunique() == 1
        groups = runs.table["system" if alone else by].to_numpy(str)
        if by == "configuration":
            known = np.unique(groups)
            dealt = np.random.default_rng(0).permutation(len(known)) % _FOLDS
            groups = dealt[np.searchsorted(known, groups)]
        for group in np.unique(groups[form]):
            out = form & (groups == group)
            found[out] = PooledFirstTokens(runs.measured[form & runs.warm & ~out]).predicted_s(asked[out])
    return found


def _forms(runs: FirstTokenRuns) -> list[Bools]:
    """[runs] those of one pool, and those of two, where there are any."""
    return [form for form in (runs.aggregated, ~runs.aggregated) if form.any()]


def first_token_record(runs: FirstTokenRuns) -> JsonObject:
    """What configs/first_tokens.json holds: times of every engine on every machine, and intervals around them.

    The intervals are conformal: quantiles of measured over predicted on runs of models that the fit has not seen; their
    coverage is that of each model's runs by the others' quantiles, or of each machine's where one model ran.
    """
    own, blind_s, measured_s = runs.aggregated & runs.warm, held_out_s(runs), runs.measured.measured_s
    record = _times_and_intervals(runs, own, blind_s)
    steady_s = runs.table["steady_ttft_s"].to_numpy(float)
    without_queue_s = held_out_s(runs, "workload", np.column_stack([steady_s] * len(TAIL_FIGURES)))[:, 1]
    rows = own & np.isfinite(measured_s[:, 1]) & (runs.measured.replayed_s[:, 1] < _STEADY * steady_s)
    record["intervals"]["steady"] = _conformal(measured_s[rows, 1] / without_queue_s[rows], runs, rows)
    pools = ~runs.aggregated & runs.warm
    return record | ({"pools": _times_and_intervals(runs, pools, blind_s)} if pools.any() else {})


def _times_and_intervals(runs: FirstTokenRuns, own: Bools, blind_s: Floats) -> JsonObject:
    """Of one form: its `own` runs."""
    fitted, measured_s = runs.measured[own], runs.measured.measured_s
    fit = PooledFirstTokens(fitted)
    intervals: JsonObject = {}
    for place, figure in enumerate(TAIL_FIGURES):
        rows = own & np.isfinite(measured_s[:, place])
        intervals[figure] = _conformal(measured_s[rows, place] / blind_s[rows, place], runs, rows)
    engines: JsonObject = {}
    for family, engine in sorted({(cell.family, cell.engine) for cell in fitted.cells}):
        plain = Cell(family, engine, "", "", "", "", "")
        of = {
            system: _rounded(fit, plain._replace(system=system))
            for system in sorted({cell.system for cell in fitted.cells if cell.family == family})
        }
        engines[engine or family] = {**_rounded(fit, plain), "of": of}
    form = "aggregated" if runs.aggregated[own].all() else "disaggregated"
    systems = ", ".join(sorted({cell.system for cell in fitted.cells}))
    source = f"{len(fitted.cells)} {form} runs of {systems}"
    return {"source": source, "engines": engines, "intervals": intervals}


_TIMES = ("factor", "request_s", "steps", "burst_s")


def _rounded(fit: PooledFirstTokens, cell: Cell) -> JsonObject:
    times = fit.times(cell)
    return {name: float(f"{getattr(times, name):.3g}") for name in _TIMES}


def _conformal(ratio: Floats, runs: FirstTokenRuns, rows: Bools) -> JsonObject:
    """Factors around a prediction, and the share inside by the runs of other models, or of other machines.

    Runs of one model, or of one machine, err alike, and there are few of them: quantiles of all runs are too near.
    So those are taken by which 89 % of the runs or more are inside whose model or machine they have not seen.

    Args:
        ratio: [kept] measured over predicted.
        runs: All.
        rows: [runs] which of them are kept.
    """
    cells = [cell for cell, kept in zip(runs.measured.cells, rows, strict=True) if kept]
    by = "model" if len({cell.model for cell in cells}) > 1 else "system"
    groups, ones = np.array([getattr(cell, by) for cell in cells]), np.ones(len(ratio))
    inside = 0.0
    for outside in _OUTSIDES:
        inside = float(_inside(ratio, groups, outside).mean())
        if round(inside, 2) >= 1 - 2 * OUTSIDE - 0.01:
            break
    low, high = interval(ones, ratio, outside)
    return {"low": low, "high": high, "held_out": {"runs": len(ratio), "by": by, "inside": round(inside, 3)}}


def _inside(ratio: Floats, groups: NDArray[np.str_], outside: float) -> Bools:
    """[runs] whether a ratio lies between the quantiles of the other groups' runs."""
    ones, inside = np.ones(len(ratio)), np.zeros(len(ratio), dtype=bool)
    for group in np.unique(groups):
        out = groups == group
        if not out.all():
            low, high = interval(ones[~out], ratio[~out], outside)
            inside[out] = (low <= ratio[out]) & (ratio[out] <= high)
    return inside


def errors_by(runs: FirstTokenRuns, predicted_s: Floats, by: Sequence[str], rows: Bools | None = None) -> pd.DataFrame:
    """Median errors and biases of first tokens as replayed and as predicted, by some columns of the table."""
    kept = np.ones(len(runs.table), dtype=bool) if rows is None else rows
    key = runs.table.loc[kept, list(by)].astype(str).agg(", ".join, axis=1)
    groups: dict[Hashable, Bools] = {"all": kept}
    for name in sorted(set(key)):
        own = np.zeros(len(kept), dtype=bool)
        own[np.flatnonzero(kept)[(key == name).to_numpy()]] = True
        groups[name] = own
    return pd.DataFrame({name: _errors(runs, predicted_s, own) for name, own in groups.items()}).T


def _errors(runs: FirstTokenRuns, predicted_s: Floats, rows: Bools) -> dict[str, float]:
    found: dict[str, float] = {"runs": float(rows.sum())}
    for place, figure in enumerate(TAIL_FIGURES):
        off = partial(_off, runs.measured.measured_s[rows, place])
        for name, values_s in (("replayed", runs.measured.replayed_s), ("predicted", predicted_s)):
            error = off(values_s[rows, place])
            if len(error):
                found[f"{figure} {name}"] = float(np.median(np.abs(error)))
                found[f"{figure} {name} bias"] = float(np.median(error))
        error = _off(*(runs.table.loc[rows, f"{of}{figure}_tpot_s"].to_numpy(float) for of in ("measured_", "")))
        if len(error):
            found[f"{figure} per token"] = float(np.median(np.abs(error)))
    return found


def _off(measured_s: Floats, values_s: Floats) -> Floats:
    error = values_s / measured_s - 1
    return error[np.isfinite(error)]
