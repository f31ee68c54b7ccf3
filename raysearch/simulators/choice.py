"""How many workers a black box is worth, by measurement, and Ray for as long as they are needed."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout

import numpy as np

from envs.strategy_env import SimulatorFailure, StrategyEnv
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.extras import check_installed
from raysearch.simulators.opening import Patience, searched_space
from sim.strategy import Strategy
from sim.workload import Workload

WORTH_WORKERS_S = 0.005
"""[assumed] Well above what a call through a worker costs the searcher: benchmarks/rollout_workers.py prints that."""
TRIED_CALLS = 3
"""[assumed] The first call of a black box often loads something; the median leaves it out."""


@contextmanager
def evaluating(
    simulator: str | None, workload: Workload, patience: Patience, workers: int | None, *, forgiving: bool = False
) -> Iterator[int]:
    """The number of workers for one run, and Ray for as long as it needs them.

    Args:
        simulator: Name of a plugged-in black box; None for our own.
        workload: What is searched.
        patience: With the simulator.
        workers: As the user chose. None: none for our own simulator, which answers faster than a worker is reached;
            for a plugged-in one as `choose_workers` measures.
        forgiving: Whether the search continues where the simulator fails on a strategy.

    Raises:
        InputError, RunFailed: The simulator cannot be used.
    """
    if simulator is None and not workers:
        yield 0
        return
    check_installed("search", "a search with workers", "the built-in simulator, with no workers")
    from raysearch.processes.connection import connected

    asked = math.ceil((workers or 0) * patience.cpus_per_worker)
    cpus = max(asked, os.cpu_count() or 1)  # of a Ray of our own; whoever asks for more workers gets them
    with redirect_stdout(sys.stderr), connected(cpus=cpus):  # Ray's threads print of workers that die
        available = _room_for(patience)
        if workers is None:
            assert simulator is not None
            workers = choose_workers(simulator, workload, patience, available, forgiving=forgiving)
        elif 0 < available < workers:  # where there are none yet, some are to be started
            raise InputError(
                f"{workers} workers do not fit, the cluster has room for {available}: "
                f"run with --set workers={available}"
            )
        yield workers


def _room_for(patience: Patience) -> int:
    """Workers that the cluster has room for; 0 where nodes are still to be started."""
    import ray

    there = ray.cluster_resources()
    needs = (("CPU", patience.cpus_per_worker), ("GPU", patience.gpus_per_worker))
    return min((int(there.get(kind, 0) / need) for kind, need in needs if need), default=os.cpu_count() or 1)


def choose_workers(
    simulator: str, workload: Workload, patience: Patience, available: int, *, forgiving: bool = False
) -> int:
    """Workers for a run without a stated number: all that are available if the black box is slow, else one.

    It is tried on a few strategies before, in a worker, so that one that cannot work at all is found out here. The
    choice decides how far ahead searchers are asked and so what they call; it is printed, to be given again.

    Args:
        simulator: Name of a plugged-in black box.
        workload: What is searched.
        patience: With the simulator.
        available: Most workers. Ray must be connected.
        forgiving: Whether it may fail on some strategies, but not on all.

    Raises:
        RunFailed: It raised, hung, died, or gave no measurement.
    """
    call_s = _measured_call_s(simulator, workload, patience, forgiving)
    workers = max(1, available) if call_s >= WORTH_WORKERS_S else 1
    print(f"note: a call of {simulator} takes {call_s * 1e3:.3g} ms: --set workers={workers}", file=sys.stderr)
    return workers


def _measured_call_s(simulator: str, workload: Workload, patience: Patience, forgiving: bool) -> float:
    from raysearch.simulators.workers import Workers

    space = searched_space(workload, simulator, "random")
    strategies = [space.decode(space.sample(np.random.default_rng(seed))) for seed in range(TRIED_CALLS)]
    times: list[float] = []
    with closing(Workers(simulator, workload, workers=1, patience=patience)) as pool:
        env = StrategyEnv(workload, evaluate=pool, space=space, retries=patience.retries)
        for strategy in strategies:
            try:
                times.append(_timed(env, strategy))
            except SimulatorFailure as failure:
                if not forgiving or (strategy == strategies[-1] and not times):
                    raise RunFailed(f"{failure}; this was a trial before the search, which has not begun") from failure
    return statistics.median(times)


def _timed(env: StrategyEnv, strategy: Strategy) -> float:
    started = time.perf_counter()
    env.evaluate(strategy)
    return time.perf_counter() - started
