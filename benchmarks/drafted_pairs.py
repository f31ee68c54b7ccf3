"""What drafts gain: published runs of one configuration with and without multi-token prediction, beside our prices.

    python benchmarks/drafted_pairs.py serving_measured/ inferencex_runs/runs.csv

A pair is two aggregated runs of one machine, engine, format, layout, lengths and load; each run with drafts has the one
without that is of its generation of the engine if there is one, and nearest in time. Prints, by engine, drafts and
lengths, how many times as fast drafts made a token: measured, at the shipped acceptance, and at 0.85 of every draft.
Takes some ten CPU seconds.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from raysearch.fidelity.calibration.deployments import ServingRun
from raysearch.fidelity.calibration.engines import engine_times, steps_of
from raysearch.fidelity.calibration.serving_fit import agg_runs, numbers_of, read_serving_runs
from sim.config.catalog import load_calibration, measured_machine
from sim.config.files import list_names

_ASSUMED = 0.85


class _Run(NamedTuple):
    run: ServingRun
    measured_ms: float
    when: pd.Timestamp

    @property
    def configuration(self) -> Hashable:
        run = self.run
        lengths = (run.prompt_tokens, run.output_tokens)
        return (run.backend, run.weights, run.model.name, run.model.expert_dtype, str(run.strategy), *lengths)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folder or file that names its machines")
    folders, gains = parser.parse_args().runs, defaultdict[tuple[str, int, int, int], list[tuple[float, ...]]](list)
    for machine in list_names("hardware"):
        pairs = _pairs([each for folder in folders for each in _runs(folder, machine)])
        drafted, plain = [with_drafts.run for with_drafts, _ in pairs], [without.run for _, without in pairs]
        if not pairs:
            continue
        ours = [_tpot_ms(runs, machine) for runs in (plain, drafted, [_accepting(run) for run in drafted])]
        for row, (with_drafts, without) in enumerate(pairs):
            run, before = with_drafts.run, ours[0][row]
            assert run.speculation is not None
            group = (run.backend, run.speculation.draft_tokens, run.prompt_tokens, run.output_tokens)
            measured = without.measured_ms / with_drafts.measured_ms
            gains[group].append((measured, before / ours[1][row], before / ours[2][row]))
    print("engine, drafts, lengths | pairs | measured | ours, error | at 0.85, error")
    for group, each in sorted(gains.items()):
        print(f"{', '.join(map(str, group))} | {_cells(each)}")
    print(f"all | {_cells([gain for each in gains.values() for gain in each])}")


def _runs(folder: Path, machine: str) -> list[_Run]:
    frame = read_serving_runs(folder, machine)
    if frame is None or frame.empty:
        return []
    found = agg_runs(frame)
    measured = found.rows["measured"] if "measured" in found.rows else pd.Series("", found.rows.index)
    dates = pd.to_datetime(measured, errors="coerce")
    return [_Run(*each) for each in zip(found.runs, numbers_of(found.rows, "silicon_tpot_ms"), dates, strict=True)]


def _pairs(runs: Sequence[_Run]) -> list[tuple[_Run, _Run]]:
    """Each different run with drafts, and the like one without."""
    plain, drafted = defaultdict[Hashable, list[_Run]](list), dict[Hashable, _Run]()
    for each in runs:
        if each.run.speculation is None:
            plain[each.configuration].append(each)
        else:
            drafted.setdefault((each.configuration, round(each.measured_ms, 2)), each)

    def apart(one: _Run, other: _Run) -> tuple[bool, float]:
        days = abs((one.when - other.when).days) if pd.notna(one.when) and pd.notna(other.when) else np.inf
        return (one.run.generation != other.run.generation, days)

    return [
        (each, min(plain[each.configuration], key=lambda other, each=each: apart(each, other)))
        for each in drafted.values()
        if plain[each.configuration]
    ]


def _accepting(run: ServingRun) -> ServingRun:
    assert run.speculation is not None
    return replace(run, speculation=replace(run.speculation, accepted=(_ASSUMED,) * run.speculation.draft_tokens))


def _tpot_ms(runs: Sequence[ServingRun], machine: str) -> list[float]:
    calibration = load_calibration(machine)
    times = [engine_times(calibration, run) for run in runs]
    return (steps_of(runs, measured_machine(machine)).tpot_of_each_s(times) * 1e3).tolist()


def _cells(gains: Sequence[tuple[float, ...]]) -> str:
    """Pairs, the geometric means, and the mean errors of single pairs."""
    of_all = np.array([gain for gain in gains if np.isfinite(gain).all()])
    means, errors = np.exp(np.log(of_all).mean(axis=0)), np.abs(of_all / of_all[:, :1] - 1).mean(axis=0)
    return f"{len(of_all)} | {means[0]:.2f} | {means[1]:.2f}, {errors[1]:.0%} | {means[2]:.2f}, {errors[2]:.0%}"


if __name__ == "__main__":
    main()
