"""How much faster a search on a slow black box gets with workers, and what asking ahead costs in quality.

    python benchmarks/rollout_workers.py                   # wall time against the calls' own, 50 ms a call
    python benchmarks/rollout_workers.py --call-s 0.4 --spread 1    # log-normal times
    python benchmarks/rollout_workers.py --quality         # f/f* against calls in flight, on our own simulator and
                                                           # workloads that searchers were tuned on
    python benchmarks/rollout_workers.py --overhead        # a call in this process against one through a worker

A worker of the first table sleeps, so that it needs no core of its own; what is left over is the searcher's time and
Ray's. Start-up of Ray and of the workers is not counted. The second table needs neither clock nor workers: what a
searcher sees depends on how far ahead it is asked, so its calls are answered here, in their order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from envs.calls import parse_dims_text
from envs.rows import read_rows
from envs.space import StrategySpace
from raysearch.optima.named_spaces import optimum_value
from raysearch.processes.connection import connected
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators.opening import Patience, open_simulator
from raysearch.simulators.protocol import InProcess
from sim import simulate
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload

SLOW = "rollout_workers:slow"
CALL_S, SPREAD = "RAYSEARCH_BENCHMARK_CALL_S", "RAYSEARCH_BENCHMARK_SPREAD"
"""Of the environment, which Ray's workers inherit."""
WORKLOAD = "gpt_moe_1_2t_16k"
QUALITY_WORKLOADS = ["gpt_moe_1_8t_24k_slo30", "qwen3_235b_a22b_16k", "mixtral_8x22b_8k"]


def call_s(degrees: tuple[int, ...], dims: tuple[int, ...]) -> float:
    """What a strategy's call takes: the mean, or log-normal about it, the same whenever it is asked."""
    mean_s, sigma = float(os.environ[CALL_S]), float(os.environ[SPREAD])
    key = int.from_bytes(hashlib.sha256(repr((degrees, dims)).encode()).digest()[:8], "little")
    return mean_s * math.exp(sigma * np.random.default_rng(key).standard_normal() - sigma**2 / 2)


def slow(workload: Workload, strategy: Strategy) -> Evaluation:
    """Our simulator, as slow as a measurement of a real engine's kernels."""
    time.sleep(call_s((strategy.tp, strategy.ep, strategy.pp, strategy.batch), strategy.dims))
    return simulate.evaluate(workload, strategy)


slow.fingerprint = str(time.time_ns())  # never answered from an earlier benchmark's cache


def wall_and_work_s(searcher: str, workers: int, calls: int, seed: int) -> tuple[float, float]:
    """Seconds for `calls` calls in the middle of a run, and those that the calls themselves took."""
    with tempfile.TemporaryDirectory() as folder:
        slow.fingerprint = str(time.time_ns())
        budget = calls + 12 * workers
        spec = RunSpec(WORKLOAD, searcher, seed=seed, budget=budget, simulator=SLOW, workers=workers)
        with contextlib.closing(SearchRun(spec, Path(folder))) as run:
            run.advance(4 * workers)
            started = time.perf_counter()
            run.advance(calls)
            wall_s = time.perf_counter() - started
        rows = read_rows(Path(folder)).tail(calls).itertuples()
        degrees = ((row.tp, row.ep, row.pp, row.batch, row.dims) for row in rows)
        return wall_s, sum(call_s(tuple(each), tuple(parse_dims_text(dims)["dims"])) for *each, dims in degrees)


def fractions_of_optimum(workload: str, searcher: str, workers: int, seed: int, after: list[int]) -> list[float]:
    """f/f* of one run after so many calls, the last of which are its budget."""
    optimum = optimum_value(load_workload(workload))
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec(workload, searcher, seed=seed, budget=after[-1], workers=workers)
        here = InProcess(simulate.evaluate)
        with contextlib.closing(SearchRun(spec, Path(folder), optimum=optimum, simulator=here)) as run:
            found = []
            for calls in after:
                run.advance(calls - run.calls)
                found.append(run.metrics()["fraction_of_optimum"])
            return found


def show_speed(searcher: str, counts: list[int], calls: int) -> None:
    """Prints how many times as fast as the calls themselves a search is."""
    for workers in counts:
        wall_s, work_s = wall_and_work_s(searcher, workers, calls, seed=0)
        each = f"{calls} calls of {work_s / calls * 1e3:.0f} ms"
        print(f"{searcher}: {workers} workers, {each}: {wall_s:.2f} s, {work_s / wall_s:.2f} at a time")
        sys.stdout.flush()


def show_quality(searcher: str, counts: list[int], workloads: list[str], seeds: int, after: list[int]) -> None:
    """Prints f/f* per number of calls in flight: over all runs, and of the worst of them."""
    print(f"{searcher}, {len(workloads)} workloads x {seeds} seeds, f/f* after {after} calls: mean (worst)")
    for workers in counts:
        runs = [
            fractions_of_optimum(workload, searcher, workers, seed, after)
            for workload in workloads
            for seed in range(seeds)
        ]
        reported = [f"{statistics.mean(found):.3f} ({min(found):.3f})" for found in zip(*runs, strict=True)]
        print(f"{4 * workers or 1} in flight: {', '.join(reported)}")
        sys.stdout.flush()


def show_overhead(calls: int) -> None:
    """Prints what a call costs here and through a worker, one at a time."""
    workload = load_workload(WORKLOAD)
    rng = np.random.default_rng(0)
    space = StrategySpace(workload)
    strategies = [space.decode(space.sample(rng)) for _ in range(calls)]
    per_call: dict[int, float] = {}
    for workers in (0, 1):
        with contextlib.closing(open_simulator(None, workload, Patience(), workers=workers)) as simulator:
            simulator(workload, strategies[0])
            started = time.perf_counter()
            for strategy in strategies:
                simulator(workload, strategy)
            per_call[workers] = (time.perf_counter() - started) / calls
    here, there = per_call[0], per_call[1]
    print(f"a call here {here * 1e3:.2f} ms, through a worker {there * 1e3:.2f} ms: {there / here:.1f}x")


def main() -> None:
    """Prints the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searcher", default="ppo")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--workloads", nargs="+", default=QUALITY_WORKLOADS, help="of --quality")
    parser.add_argument("--after", type=int, nargs="+", default=[250, 500, 1000], help="calls, of --quality")
    parser.add_argument("--seeds", type=int, default=10, help="of --quality")
    parser.add_argument("--call-s", type=float, default=0.05, help="mean time of a call, s")
    parser.add_argument("--spread", type=float, default=0.0, help="deviation of the logarithm of its time")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    asked = parser.parse_args()
    counts = asked.workers or ([0, 1, 2, 4, 8] if asked.quality else [1, 2, 4, 8])
    if asked.quality:
        show_quality(asked.searcher, counts, asked.workloads, asked.seeds, asked.after)
        return
    os.environ |= {CALL_S: str(asked.call_s), SPREAD: str(asked.spread)}
    with connected(cpus=max(counts) + 1):
        if asked.overhead:
            show_overhead(asked.calls)
        else:
            show_speed(asked.searcher, counts, asked.calls)


if __name__ == "__main__":
    main()
