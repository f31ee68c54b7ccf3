"""The best degrees by AISimulate's figures, by ours, and by AISimulate's own search, each priced by both.

    pip install -e '.[aisimulate]'
    python benchmarks/beside_aisimulate.py                      # Qwen3-235B-A22B at 16k context

Every combination of degrees is evaluated through the plug-in, so its best is the best. Its own search picks a decode
worker of a disaggregated deployment; it fixes the parallel sizes that it considers by itself and prices fp8 weights by
blocks, so its pick is priced with `fp8_block` weights, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import time
import warnings

import numpy as np

from raysearch.simulators import aisimulate
from raysearch.simulators.measurement import name_in
from raysearch.simulators.opening import searched_space
from raysearch.simulators.plugin import load_plugin
from sim.config.catalog import load_workload
from sim.ops.heuristics import megatron_sp_dims
from sim.optimum.landscape import find_optimum
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Precisions, Workload

PLUGIN = "raysearch.simulators.aisimulate:measure"


def exhaustive(workload: Workload) -> Strategy:
    """The best of all degrees by AISimulate's figures."""
    space, measure = searched_space(workload, PLUGIN, "random"), load_plugin(PLUGIN)
    started, best, feasible = time.perf_counter(), None, 0
    for indices in itertools.product(*map(range, space.sizes)):
        evaluation = measure(workload, space.decode(np.array(indices)))
        feasible += evaluation.feasible
        if evaluation.feasible and (best is None or evaluation.tokens_per_s_per_gpu > best.tokens_per_s_per_gpu):
            best = evaluation
    assert best is not None, "no combination of degrees is feasible"
    print(f"{space.size:,} strategies by its figures, {feasible:,} feasible: {time.perf_counter() - started:.1f} s")
    return best.strategy


def own_search(workload: Workload, gpus: int) -> Strategy:
    """The decode worker that AISimulate's command picks for a disaggregated deployment."""
    from aisimulate.legacy_cli.api import cli_default

    started = time.perf_counter()
    found = cli_default(
        model_path=name_in("aisimulate", workload),
        total_gpus=gpus,
        system=workload.hardware.name,
        backend=aisimulate.BACKEND,
        isl=workload.context_tokens,
        osl=512,
        ttft=60_000,  # decode alone is compared
        tpot=workload.tpot_slo_s * 1e3,
        top_n=1,
    )
    pick = found.best_configs["disagg"].iloc[0]
    print(f"its own search: {time.perf_counter() - started:.1f} s, decode worker {pick['(d)parallel']}")
    # Its expert ranks need not be its data ranks; ours are. The nearest of ours has as many data ranks.
    return Strategy(int(pick["(d)tp"]), int(pick["(d)dp"]), int(pick["(d)pp"]), int(pick["(d)global_bs"]), ())


def price(workload: Workload, strategy: Strategy, label: str) -> None:
    """Prints what both say about a strategy."""
    dims = strategy.dims or megatron_sp_dims(workload.model)
    for weights in ("fp8", "fp8_block"):
        precisions = Precisions(weights, *dataclasses.astuple(workload.precisions)[1:])
        varied = dataclasses.replace(workload, precisions=precisions)
        ours = evaluate(varied, dataclasses.replace(strategy, dims=dims))
        theirs = load_plugin(PLUGIN)(varied, strategy)
        degrees = f"tp={strategy.tp} ep={strategy.ep} pp={strategy.pp} batch={strategy.batch}"
        print(
            f"{label}: {degrees}, {weights} weights: theirs {theirs.tokens_per_s_per_gpu:.0f} tokens/s/GPU, "
            f"{theirs.tpot_s * 1e3:.1f} ms; ours {ours.tokens_per_s_per_gpu:.0f}, {ours.tpot_s * 1e3:.1f} ms "
            f"+-{ours.expected_error:.0%}"
        )


def main() -> None:
    """Prints the three strategies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="qwen3_235b_a22b_16k")
    parser.add_argument("--gpus", type=int, default=64, help="Of the deployment that its own search plans.")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    workload = load_workload(asked.workload)
    optimum = find_optimum(workload).evaluation
    assert optimum is not None, "no strategy is feasible"
    price(workload, optimum.strategy, "our optimum")
    price(workload, exhaustive(workload), "best of all by its figures")
    price(workload, own_search(workload, asked.gpus), "its own search")


if __name__ == "__main__":
    main()
