"""How many strategies per second `evaluate_many` gets through, beside `evaluate` one by one; the figures are the same.

    python benchmarks/many_strategies.py
    python benchmarks/many_strategies.py --workloads gpt_moe_1_2t_1m_extended --at-once 64 --strategies 2000

Strategies are drawn from the workload's space, each with as much weight. Warm: all terms of them are known, as in the
course of a search; a space of one mesh has few enough. Cold: in a process that has priced nothing yet but a strategy
of other degrees, so that curves are read; then the two do the same work. Seconds are of the CPU, of one core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable

import numpy as np

from envs.space import StrategySpace
from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WORKLOADS = ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k", "qwen3_235b_a22b_16k", "gpt_moe_1_2t_1m_extended"]
Evaluate = Callable[[StrategySpace, np.ndarray], object]


def one_by_one(space: StrategySpace, actions: np.ndarray) -> object:
    """Feasibility and throughput of each."""
    each = [evaluate(space.workload, space.decode(action)) for action in actions]
    return [(one.feasible, one.excess, one.tokens_per_s_per_gpu) for one in each]


def together(space: StrategySpace, actions: np.ndarray, at_once: int) -> object:
    """The same of `at_once` at a time."""
    batches = np.split(actions, range(at_once, len(actions), at_once))
    return [evaluate_many(space.workload, space.strategies(batch)).excess for batch in batches]


def microseconds(call: Callable[[], object], strategies: int) -> float:
    """Of the CPU, per strategy."""
    started = time.process_time()
    call()
    return (time.process_time() - started) / strategies * 1e6


def measure(task: tuple[str, int, int]) -> tuple[float, float]:
    """(cold, least of five warm) microseconds per strategy in a process of its own; `at_once` 0 is one by one."""
    name, strategies, at_once = task
    workload: Workload = load_workload(name)
    space, rng = StrategySpace(workload), np.random.default_rng(0)
    actions = np.array([space.sample(rng) for _ in range(strategies)])
    dims = space.decode(actions[0]).dims
    elsewhere = [Strategy(3, 3, 3, 9, dims) for _ in range(8)]
    for strategy in elsewhere:
        evaluate(workload, strategy)
    evaluate_many(workload, elsewhere)

    def call() -> object:
        return together(space, actions, at_once) if at_once else one_by_one(space, actions)

    cold = microseconds(call, strategies)
    return cold, min(microseconds(call, strategies) for _ in range(5))


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--strategies", type=int, default=8000, help="drawn (default: 8000)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 64, 1000, 8000], help="default: 8 64 1000 8000")
    asked = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in asked.workloads:
            counts = [0, *asked.at_once]
            tasks = [(name, asked.strategies, at_once) for at_once in counts]
            (cold, warm), *many = pool.map(measure, tasks, chunksize=1)
            print(f"{name}: one by one cold {cold:.0f} us, warm {warm:.0f} us = {1e6 / warm:,.0f} a second", flush=True)
            for at_once, (cold_many, warm_many) in zip(asked.at_once, many, strict=True):
                print(
                    f"  {at_once} at once: cold {cold_many:.0f} us ({cold / cold_many:.1f} times as fast), "
                    f"warm {warm_many:.1f} us = {1e6 / warm_many:,.0f} a second ({warm / warm_many:.1f} times)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
