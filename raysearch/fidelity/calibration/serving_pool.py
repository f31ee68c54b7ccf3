"""Serving runs of several machines, read and priced, and what a fit of all of them says of one machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.anchor import Anchor, Served
from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun, Skipped
from raysearch.fidelity.calibration.disaggregated_recipes import pair_of, recipes_by_time
from raysearch.fidelity.calibration.engines import FOLDS, Steps, fitted_to, steps_of
from raysearch.fidelity.calibration.intervals import (
    Residuals,
    fit_widths,
    held_out_coverage,
    residuals_of,
    usual_kernels,
)
from raysearch.fidelity.calibration.pooled_fit import JUDGED_BY, Bools, Pool, PooledTimes, cell_of_run, held_out
from raysearch.fidelity.calibration.serving_fit import agg_runs, numbers_of, read_serving_runs, records, rows_by
from sim.arrays import Floats
from sim.json_object import JsonFields, JsonObject
from sim.prices.engine import BARE, EngineTimes, cell_of, times_of
from sim.prices.hardware import Hardware
from sim.serving.phases import Pace

_PARTS = 20
"""That workloads, models or machines are dealt into, to be held out in turn."""
_FEW_MODELS = 3
"""Models of a maker's machines below which whole machines are held out in their place."""


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """Runs of several machines: aggregated ones, and the decode workers of those with pools.

    Attributes:
        runs: The deployments.
        systems: [runs] their machines.
        pool: What a fit takes of them; rows that repeat another weigh nothing, nor do those that are scored alone.
        in_pools: Rows of decode workers: fitted to like the others, but no interval of a server is judged by them.
    """

    runs: Sequence[ServingRun]
    systems: Sequence[str]
    pool: Pool
    in_pools: frozenset[int] = frozenset()

    @property
    def aggregated(self) -> Bools:
        """[runs] whether a server ran prompts, too."""
        return np.array([row not in self.in_pools for row in range(len(self.runs))], dtype=bool)

    @property
    def models(self) -> list[str]:
        """[runs] names of their models."""
        return [run.model.name for run in self.runs]

    @property
    def workloads(self) -> list[Hashable]:
        """[runs] model, lengths and engine: whole ones are held out together, on all machines."""
        return [(run.model.name, run.prompt_tokens, run.output_tokens, run.backend) for run in self.runs]

    @property
    def elsewhere(self) -> Bools:
        """[runs] whether the model was run under the engine at other lengths, too."""
        lengths: dict[tuple[str, str], set[tuple[int, int]]] = {}
        for run in self.runs:
            lengths.setdefault((run.model.name, run.backend), set()).add((run.prompt_tokens, run.output_tokens))
        return np.array([len(lengths[run.model.name, run.backend]) > 1 for run in self.runs], dtype=bool)


def measured_runs(folders: Sequence[tuple[Path, str]], machine: Callable[[str], MeasuredMachine]) -> MeasuredRuns:
    """The runs in some folders, priced on their machines; of pools their decode workers.

    Args:
        folders: Each with the machine whose runs are meant.
        machine: A machine by its name, with the kernels that its calibration has.

    Raises:
        InputError: See `read_serving_runs`; or no folder has a run that can be priced.
    """
    runs: list[ServingRun] = []
    systems: list[str] = []
    parts: list[tuple[Steps, Floats]] = []
    in_pools = set[int]()
    refused: list[str] = []
    for folder, name in folders:
        frame = read_serving_runs(folder, name)
        if frame is None:
            refused.append(f"{folder}: expected endtoend_ttft_tpot.csv or runs.csv in a folder, or InferenceX's JSON")
            continue
        found = agg_runs(frame)
        refused += [f"{folder}: {why} ({', '.join(ids[:_SHOWN])})" for why, ids in found.skipped.items()]
        for some, measured in (
            (found.runs, numbers_of(found.rows, "silicon_tpot_ms") / 1e3),
            decode_workers(pd.DataFrame(frame[frame["mode"] != "agg"])),
        ):
            if not some:
                continue
            if some is not found.runs:
                in_pools |= set(range(len(runs), len(runs) + len(some)))
            runs += some
            systems += [name] * len(some)
            parts.append((steps_of(some, machine(name)), measured))
    if len(in_pools) == len(runs):
        none = "none is aggregated and on " + ", ".join(dict.fromkeys(name for _, name in folders))
        raise InputError(f"no serving run can be priced: {'; '.join(refused[:_SHOWN]) or none}")
    steps, measured_s = _joined([each for each, _ in parts]), np.concatenate([each for _, each in parts])
    weights = (told_once(systems, runs, measured_s) & fitted_to(runs) & steps.priced).astype(float)
    cells = [
        cell_of_run(run, system, *_made_by(machine(system)(run.kernels)))
        for run, system in zip(runs, systems, strict=True)
    ]
    layers = np.array([run.model.layers for run in runs], dtype=float)
    return MeasuredRuns(runs, systems, Pool(cells, layers, steps, measured_s, weights), frozenset(in_pools))


def decode_workers(rows: pd.DataFrame) -> tuple[list[ServingRun], Floats]:
    """A decode worker of each run with pools, with as many requests as decode at once, and its seconds per token.

    Of the requests that clients keep open, those decode that are not on their way to a first token: the share of their
    time after it, as measured (Little's law). Their engines count as of the newest release, as pools are priced.
    """
    found: list[tuple[ServingRun, float]] = []
    every = records(rows.reset_index(drop=True))
    for row, recipe in zip(every, recipes_by_time(every), strict=True):
        pair = pair_of(row, recipe)
        ttft_s, tpot_s = (float(row.get(name) or math.nan) / 1e3 for name in ("silicon_ttft_ms", "silicon_tpot_ms"))
        if isinstance(pair, Skipped) or not ttft_s > 0:
            continue
        answer_s = pair.decode.output_tokens * tpot_s
        running = min(pair.places, pair.open_requests * answer_s / (ttft_s + answer_s))
        strategy = replace(pair.decode.strategy, batch=max(1, round(running / pair.decodes)))
        found.append((replace(pair.decode, strategy=strategy, generation=pair.decode.backend), tpot_s))
    return [run for run, _ in found], np.array([tpot_s for _, tpot_s in found])


_DECIMALS = 2
"""Of a millisecond, to which some exports round what others state in full."""


def told_once(systems: Sequence[str], runs: Sequence[ServingRun], measured_s: Floats) -> Bools:
    """[runs] whether a run repeats none before it, nor is the rounded copy of any."""
    measured_ms = measured_s * 1e3
    rounded_ms = np.round(measured_ms, _DECIMALS)
    cut = np.isclose(measured_ms, rounded_ms, rtol=1e-12, atol=0)
    where = [
        repr((system, run.model.name, run.backend, run.strategy)) for system, run in zip(systems, runs, strict=True)
    ]
    whole = {key for key, is_cut in zip(zip(where, rounded_ms.tolist(), strict=True), cut, strict=True) if not is_cut}
    known: set[tuple[str, float]] = set()
    new = np.zeros(len(runs), dtype=bool)
    for row, key in enumerate(zip(where, measured_ms.tolist(), strict=True)):
        copied = bool(cut[row]) and (where[row], float(rounded_ms[row])) in whole
        new[row] = not copied and key not in known
        known.add(key)
    return new


def _made_by(hardware: Hardware) -> tuple[str, str]:
    """A machine's maker and its chip; "" where its file names no maker."""
    if not hardware.vendor:
        return "", ""
    return hardware.vendor, f"{hardware.vendor} {hardware.curves.calibration.machine.sms}" if hardware.curves else ""


def _joined(parts: Sequence[Steps]) -> Steps:
    def joined(of: Callable[[Steps], Floats]) -> Floats:
        return np.concatenate([of(part) for part in parts])

    names = [field.name for field in fields(Pace)]
    pace = Pace(**{name: joined(lambda steps, name=name: getattr(steps.pace, name)) for name in names})
    return Steps(
        pace,
        joined(lambda steps: steps.decode_s),
        joined(lambda steps: steps.mixed_s),
        joined(lambda steps: steps.running),
        joined(lambda steps: steps.kernels),
    )


def pooled_serving(measured: MeasuredRuns, system: str) -> JsonObject:
    """Engines' times of a machine and the intervals around them, as the key "serving" of its calibration.

    The intervals are conformal: by whole workloads held out where the model is known, by whole models where it is not
    (by whole machines where too few models ran), of the machines of its chip if several, else maker, and some runs
    together; of a machine of few runs by whole machines held out. The kernels that are usual are those of its maker's.

    Args:
        measured: Runs of this machine and of others, or of others alone.
        system: Its name.
    """
    pool, aggregated = measured.pool, measured.aggregated
    servers = [name for name, kept in zip(measured.systems, aggregated, strict=True) if kept]
    rows = {name: servers.count(name) for name in set(measured.systems)}
    own = np.array([name == system for name in measured.systems], dtype=bool) & aggregated
    maker, chip = next(((cell.maker, cell.chip) for cell in pool.cells if cell.system == system), ("", ""))
    alike = np.array([rows[c.system] >= JUDGED_BY and c.maker == maker for c in pool.cells], dtype=bool)
    judged, own = alike & aggregated & pool.steps.priced, own & pool.steps.priced
    of_chip = judged & np.array([cell.chip == chip for cell in pool.cells], dtype=bool)
    if len({name for name, kept in zip(measured.systems, of_chip, strict=True) if kept}) == 1:
        of_chip = judged  # its few workloads, held out of each other, would leave next to nothing
    models = {cell.model for cell, kept in zip(pool.cells, judged, strict=True) if kept}
    groups, labels = measured.models, measured.workloads
    if len(models) < _FEW_MODELS:
        groups, labels = measured.systems, list(zip(measured.workloads, measured.systems, strict=True))
    if rows.get(system, 0) >= JUDGED_BY:
        by_workload = held_out(pool, measured.workloads, _PARTS)
        by_group = held_out(pool, groups, _PARTS)
        kinds = {
            "measured": _residuals(measured, by_workload, of_chip & measured.elsewhere, _dealt(labels, of_chip)),
            "unmeasured": _residuals(measured, by_group, judged, groups, few=True),
        }
        scored = own
    else:
        by_workload = held_out(pool, measured.systems, _PARTS)
        unseen = _residuals(measured, by_workload, judged, measured.systems, few=True)
        kinds, scored = {"measured": unseen, "unmeasured": unseen}, judged
    kinds["bare"] = _residuals(measured, [BARE] * len(measured.runs), judged, groups, few=True)
    intervals: JsonObject = {}
    for kind, residuals in kinds.items():
        widths = fit_widths(residuals)
        intervals[kind] = {"low": list(widths.low), "high": list(widths.high), "held_out": held_out_coverage(residuals)}
    at = np.flatnonzero(scored)
    blind_s = pool.steps[at].tpot_of_each_s([by_workload[row] for row in at.tolist()])
    error = np.abs(blind_s / pool.measured_s[at] - 1)
    return {
        "source": f"{len(servers)} aggregated runs and {len(measured.in_pools)} decode workers of "
        f"{', '.join(sorted(rows))}, fitted together",
        "rows": int(own.sum()),
        "mape": round(float(error.mean()), 4),
        "median_ape": round(float(np.median(error)), 4),
        "engines": PooledTimes(pool[pool.weights > 0]).record(system, pool.cells),
        "interval": intervals | {"kernels": usual_kernels(pool.steps[np.flatnonzero(judged)]).tolist()},
    }


_SHOWN = 5


def anchored_serving(serving: JsonObject, measured: MeasuredRuns, system: str) -> JsonObject:
    """The key "serving" of a machine, with the times of each engine and model corrected by a few runs of its own.

    `anchored_to` states their number and mean errors: as predicted before, corrected by all, and by all of other
    configurations.

    Args:
        serving: As its calibration has it.
        measured: The runs.
        system: Its name.
    """
    engines: JsonObject = {name: {**each, "of": dict(each.get("of", {}))} for name, each in serving["engines"].items()}
    own: dict[tuple[str, str], list[tuple[int, Served]]] = {}
    pool = measured.pool
    for row, (run, cell) in enumerate(zip(measured.runs, pool.cells, strict=True)):
        name = next((name for name in (run.generation, run.engine, run.backend) if name in engines), None)
        if name is None or measured.systems[row] != system or not pool.weights[row] or row in measured.in_pools:
            continue
        own.setdefault((cell.family, cell.model), []).append((row, Served(name, cell.weights, cell.drafts)))
    errors: list[Floats] = []
    for (family, model), found in own.items():
        rows, served = np.array([row for row, _ in found]), [each for _, each in found]
        kind, layers = pool.cells[found[0][0]].kind, measured.runs[found[0][0]].model.layers
        stored = {name: each for name, each in serving["engines"].items() if name.partition("<")[0] == family}
        times = {each: times_of(_served_by(stored[each.engine], model, kind, each), (), layers) for each in served}
        steps, measured_s = pool.steps[rows], pool.measured_s[rows]
        anchor = Anchor(served, steps, times, measured_s)
        predicted_s = steps.tpot_of_each_s([times[each] for each in served])
        corrected_s = steps.tpot_of_each_s([anchor.times(each, times[each]) for each in served])
        blind_s = _without_itself_s([measured.runs[row] for row in rows.tolist()], served, steps, times, measured_s)
        errors.append(np.abs(np.array([predicted_s, corrected_s, blind_s]) / measured_s - 1))
        for name, record in stored.items():
            of = engines[name]["of"]
            known = [Served(name, *_way(key)) for key in of if key.partition("/")[0] == model]
            for each in dict.fromkeys((Served(name, "", ""), *known, *(one._replace(engine=name) for one in served))):
                key = cell_of(model, each.weights, drafts=bool(each.drafts)) if each.weights else model
                of[key] = _corrected(_served_by(record, model, kind, each), anchor, each)
        for name in {each.engine for each in served}:
            engines[name]["models"] = sorted({*engines[name].get("models", ()), model})
    of_each = np.concatenate(errors, axis=1) if errors else np.empty((3, 0))
    left = dict(zip(("before", "after", "held_out"), of_each.mean(axis=1).round(4).tolist(), strict=True))
    return {**serving, "engines": engines, "anchored_to": {"runs": of_each.shape[1], **(left if errors else {})}}


def _without_itself_s(
    runs: Sequence[ServingRun],
    served: Sequence[Served],
    steps: Steps,
    times: Mapping[Served, EngineTimes],
    measured_s: Floats,
) -> Floats:
    """[runs] seconds per token, each corrected by the runs of other configurations; by none where it has no other."""
    same = [
        repr((*each, run.strategy, run.prompt_tokens, run.output_tokens))
        for run, each in zip(runs, served, strict=True)
    ]
    found = np.empty(len(runs))
    for rows in rows_by(same).values():
        rest = np.setdiff1d(np.arange(len(runs)), rows)
        some = {served[row]: times[served[row]] for row in rest.tolist()}
        anchor = Anchor([served[row] for row in rest.tolist()], steps[rest], some, measured_s[rest])
        found[rows] = steps[rows].tpot_s(anchor.times(served[rows[0]], times[served[rows[0]]]))
    return found


def _way(key: str) -> tuple[str, str]:
    """(weights, drafts) of a key as `cell_of` makes it; "" of what it leaves open."""
    _, weights, drafts = (*key.split("/"), "", "")[:3]
    return weights, drafts


def _served_by(engine: JsonFields, model: str, kind: str, served: Served) -> JsonFields:
    """What an engine's record has of a model served so."""
    of = engine.get("of", {})
    ways = (cell_of(model, served.weights, drafts=drafts) for drafts in (bool(served.drafts), False))
    return next((of[key] for key in (*ways, model, kind) if key in of), {"layer_s": 0.0, **engine, "of": {}})


def _corrected(record: JsonFields, anchor: Anchor, served: Served) -> JsonObject:
    """A record of times, by what an anchor says of something served so."""
    found = asdict(anchor.times(served, times_of(record, (), 0)))
    found["layer_s"] = record.get("layer_s", 0.0) * anchor.factors(served).step
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _residuals(
    measured: MeasuredRuns, times: Sequence[EngineTimes], rows: Bools, groups: Sequence[Hashable], *, few: bool = False
) -> Residuals:
    at = np.flatnonzero(rows).tolist()
    runs, steps, chosen = [measured.runs[i] for i in at], measured.pool.steps[np.array(at)], [times[i] for i in at]
    return residuals_of(runs, steps, measured.pool.measured_s[at], chosen, [groups[i] for i in at], few=few)


def _dealt(workloads: Sequence[Hashable], judged: Bools) -> list[Hashable]:
    """[runs] one of a few parts that each workload of the judged runs is dealt into; -1 for those of others alone."""
    known = sorted({str(workload) for workload, kept in zip(workloads, judged, strict=True) if kept})
    dealt = dict(zip(known, np.random.default_rng(1).permutation(len(known)) % FOLDS, strict=True))
    return [int(dealt.get(str(workload), -1)) for workload in workloads]
