"""Measured serving runs replayed as their clients ran them: all begin at once, and each sends when it is answered.

InferenceX's script sends ten requests a client, of lengths drawn evenly from 0.8 of the stated ones on
(benchmark_lib.sh) [published]; the public database's own runs sent equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun
from raysearch.fidelity.calibration.disaggregated_recipes import PoolPair, pair_of
from raysearch.fidelity.calibration.engines import engine_times
from raysearch.fidelity.calibration.first_token_fit import TAIL_FIGURES
from raysearch.fidelity.calibration.inferencex_results import (
    ENGINES,
    flag,
    machine_named,
    number,
    published_records,
    published_row,
)
from raysearch.fidelity.calibration.serving_fit import agg_runs, read_serving_runs
from sim.arrays import Floats
from sim.prices.calibration import Calibration
from sim.replay.drive import Replayed, by_clients
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.two_pools import TwoPools, handover_of, through_pools
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WAVES, FEW_WAVES = 10, 4
"""Requests a client sends. [published] Ten; of many clients four are replayed, and later ones count as the rest."""
_MANY_CLIENTS = 32
SPREAD = 0.8
Run = ServingRun | PoolPair


@dataclass(frozen=True, slots=True)
class TailsOfRun:
    """What clients of a run see by a replay, in seconds.

    Attributes:
        steady_s: Time to the first token and per token in the steady state of `evaluate`.
        first_s, token_s: By figure, as `TAIL_FIGURES` names them.
    """

    steady_s: tuple[float, float]
    first_s: Mapping[str, float]
    token_s: Mapping[str, float]


def rows_with_runs(directory: Path, hardware: str) -> list[tuple[Mapping[str, Any], Run]]:
    """Each row of a folder that can be priced on a machine, and its deployment."""
    frame = read_serving_runs(directory, hardware)
    if frame is None:
        return []
    rows, runs, _ = agg_runs(frame)
    found: list[tuple[Mapping[str, Any], Run]] = [
        (dict(rows.iloc[at]), run) for at, run in enumerate(runs) if run.phase == "serve" and run.states_its_batch
    ]
    path = directory if directory.is_file() else directory / "runs.csv"
    return found + (list(_disaggregated(path, hardware)) if path.is_file() else [])


def _disaggregated(path: Path, hardware: str) -> Iterator[tuple[Mapping[str, Any], PoolPair]]:
    """Runs of InferenceX with separate workers that state how many; none of another source."""
    for line, fields in enumerate(published_records(path), 1):
        engine = ENGINES.get(str(fields.get("framework")))
        if not flag(fields, "disagg") or engine is None or machine_named(fields.get("hardware")) != hardware:
            continue
        row = published_row(fields, engine, hardware, line)
        for phase in ("prefill", "decode"):
            gpus, ep = (int(number(fields, f"{phase}_{each}") or 1) for each in ("tp", "ep"))
            ranks = gpus if flag(fields, f"{phase}_dp_attention") else 1
            row |= {
                "precision": fields["precision"],
                f"{phase}_tp_size": gpus // ranks,
                f"{phase}_attention_dp_size": ranks,
                f"{phase}_moe_tp_size": max(1, gpus // ep),
                f"{phase}_moe_ep_size": ep,
                f"{phase}_pp_size": 1,
                f"{phase}_batch_size": 0,
                f"{phase}_num_workers": int(number(fields, f"{phase}_num_workers") or 0),
            }
        pair = pair_of(row) if row["decode_num_workers"] else None
        if isinstance(pair, PoolPair):
            yield row, pair


def spread_of(row: Mapping[str, Any]) -> float:
    """Shortest of a row's lengths over the longest."""
    return 1.0 if "internal" in str(row["source"]) else SPREAD


def figures_of(row: Mapping[str, Any], latency: str) -> list[float]:
    """Measured seconds of "ttft" or "tpot" by `TAIL_FIGURES`; NaN for those that a row does not state."""
    columns = {"mean": f"silicon_{latency}_ms", "p50": f"median_{latency}_ms", "p99": f"p99_{latency}_ms"}
    return [float(row.get(columns[figure]) or np.nan) / 1e3 for figure in TAIL_FIGURES]


def tails_of_run(run: Run, machine: MeasuredMachine, calibration: Calibration, spread: float) -> TailsOfRun | None:
    """A run's clients replayed; None where a kernel is not known, or no request has room."""

    def served(one: ServingRun) -> tuple[Workload, Strategy]:
        return one.workload(machine, engine_times(calibration, one)), one.strategy

    try:
        if isinstance(run, ServingRun):
            return _aggregated(run, *served(run), spread)
        return _in_pools(run, served(run.prefill), served(run.decode), spread)
    except (KeyError, ValueError):
        return None


def _aggregated(run: ServingRun, workload: Workload, strategy: Strategy, spread: float) -> TailsOfRun:
    found, deployed = evaluate(workload, strategy), run.server.deployed(workload, strategy)
    clients = strategy.batch
    outcome = by_clients(deployed, _sent(run, clients, spread), clients)
    return _tails(outcome, clients, (found.ttft_s, found.tpot_s))


def _in_pools(
    pair: PoolPair, prefill: tuple[Workload, Strategy], decode: tuple[Workload, Strategy], spread: float
) -> TailsOfRun:
    decode = decode[0], replace(decode[1], batch=max(1, -(-pair.places // pair.decodes)))
    first, later = (evaluate(*each) for each in (prefill, decode))
    one, other = (Deployed.of(*each, as_shipped=True) for each in (prefill, decode))
    handover = handover_of(prefill[0], (prefill[1], decode[1]), same_node=False)
    pools = TwoPools(one, other, pair.prefills, pair.decodes, handover)
    outcome = through_pools(pools, _sent(pair.decode, pair.open_requests, spread), pair.open_requests)
    steady_s = first.ttft_s + handover.waits_s(pair.prefill.prompt_tokens) + later.tpot_s
    return _tails(outcome, pair.open_requests, (steady_s, later.tpot_s))


def _sent(run: ServingRun, clients: int, spread: float) -> Requests:
    waves = FEW_WAVES if clients > _MANY_CLIENTS else WAVES
    prompts, answers = (Lengths(each, spread) for each in (run.prompt_tokens, run.output_tokens))
    return Requests.drawn(np.zeros(waves * clients), prompts, answers, 0)


def _tails(outcome: Replayed, clients: int, steady_s: tuple[float, float]) -> TailsOfRun:
    weights = np.full(len(outcome.sent_s), (WAVES - 1) * clients / (len(outcome.sent_s) - clients))
    weights[:clients] = 1.0
    first_s, token_s = (
        {figure: _figure(figure, values, weights) for figure in TAIL_FIGURES}
        for values in (outcome.ttft_s, outcome.tpot_s)
    )
    return TailsOfRun(steady_s, first_s, token_s)


def _figure(figure: str, values: Floats, weights: Floats) -> float:
    known = np.isfinite(values)
    if not known.any():
        raise ValueError("no request has room")
    values, weights = values[known], weights[known]
    if figure == "mean":
        return float(np.average(values, weights=weights))
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, int(figure[1:]) / 100 - 1e-12)])


def run_of(run: Run) -> ServingRun:
    """The workers that decode."""
    return run if isinstance(run, ServingRun) else run.decode


def configuration(run: Run, spread: float) -> str:
    """What repeats of one configuration share."""
    plain = replace(run, reread=()) if isinstance(run, ServingRun) else run
    return f"{plain!r} {spread}"
