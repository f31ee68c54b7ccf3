"""Times the exact optimum against calling `evaluate` on every strategy of the same space.

    python benchmarks/optimum_against_enumeration.py --workload gpt_moe_1_2t_16k

Prints the seconds of one sweep over the whole space, the microseconds of one `evaluate`, and the
ratio: how many times longer one call per strategy would take. The second figure comes from a random
sample, because nobody waits for the whole; `cold_evaluate.py` says what its first calls cost.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from sim.config.catalog import load_workload
from sim.ops.layers import op_names
from sim.optimum.landscape import find_optimum
from sim.simulate import evaluate
from sim.strategy import CHOICES, Strategy
from sim.workload import Workload


def sample_strategies(workload: Workload, count: int, rng: np.random.Generator) -> list[Strategy]:
    """Uniformly random strategies of a workload's space."""
    degrees, ops = workload.degrees, len(op_names(workload.model))
    tables = (degrees.tp, degrees.ep, degrees.pp, degrees.batch)
    return [
        Strategy(*(int(rng.choice(table)) for table in tables), tuple(rng.integers(len(CHOICES), size=ops).tolist()))
        for _ in range(count)
    ]


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_moe_1_2t_16k", help="name or path of a TOML file")
    parser.add_argument("--calls", type=int, default=2000, help="sampled calls of evaluate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    workload = load_workload(arguments.workload)
    strategies = sample_strategies(workload, arguments.calls, np.random.default_rng(0))
    start = time.perf_counter()
    for strategy in strategies:
        evaluate(workload, strategy)
    evaluate_s = (time.perf_counter() - start) / len(strategies)
    start = time.perf_counter()
    optimum = find_optimum(workload)
    optimum_s = time.perf_counter() - start
    figures = {
        "workload": workload.name,
        "space_size": optimum.space_size,
        "optimum_s": optimum_s,
        "evaluate_us": evaluate_s * 1e6,
        "enumeration_s": evaluate_s * optimum.space_size,
        "ratio": evaluate_s * optimum.space_size / optimum_s,
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"{workload.name}: {optimum.space_size:,} strategies")
    print(f"one sweep            {optimum_s:10.1f} s  ({optimum.space_size / optimum_s:.2e} strategies/s)")
    print(f"one random evaluate  {evaluate_s * 1e6:10.0f} us")
    print(f"one call per strategy{figures['enumeration_s'] / 86400:10.1f} days, {figures['ratio']:.1e} times longer")


if __name__ == "__main__":
    main()
