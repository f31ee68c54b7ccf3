"""What each extension of the strategy space gains, as the tables of docs/concepts/strategy_spaces.md.

    python benchmarks/extensions.py                       # ten workloads under their own objective
    python benchmarks/extensions.py --tight               # long contexts under ever tighter objectives
    python benchmarks/extensions.py --medians             # priced by medians: nothing beyond a fitted range
    python benchmarks/extensions.py --fine                # batches between the powers of two as well

Each cell is the exact best over all degrees in tokens/s/GPU, and in brackets its ratio to the joint space. A star
marks strategies of which more than a tenth of a layer's time is a collective beyond one node other than the
experts' all-to-all: no measurement covers those.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

from raysearch.optima.named_spaces import SPACES
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.optimum.exact_search import find_best
from sim.workload import Workload

SHORT = [f"gpt_moe_{model}_{context}" for model in ("1_2t", "1_6t") for context in ("16k", "32k", "64k")]
LONG = [f"gpt_moe_{model}_{context}" for model in ("1_2t", "1_6t") for context in ("256k", "1m")]
OBJECTIVES_MS = {
    "gpt_moe_1_2t_256k": (100, 50, 30, 20, 15, 12, 10),
    "gpt_moe_1_2t_1m": (200, 50, 35, 25, 20, 15, 12, 10),
}


def best_evaluations(workload: Workload) -> dict[str, Evaluation | None]:
    """The best of every space."""
    return {name: find_best(space(workload)).evaluation for name, space in SPACES.items()}


def cell(found: Evaluation | None, joint: Evaluation | None) -> str:
    """Throughput and its ratio to the joint space."""
    if found is None:
        return "none fits"
    ratio = f" ({found.tokens_per_s_per_gpu / joint.tokens_per_s_per_gpu:.3f})" if joint else ""
    return f"{found.tokens_per_s_per_gpu:.2f}{ratio}{'*' if beyond_a_node(found) > 0.1 else ''}"


def beyond_a_node(found: Evaluation) -> float:
    """Share of a layer's time in collectives across nodes that were never measured."""
    unmeasured = [c.time_s for op in found.ops for c in op.collectives if "across nodes" in c.extrapolated]
    return sum(unmeasured) / found.stage.layer_s


def row(label: str, workload: Workload) -> None:
    """Prints one line of the table, and the best extended strategy behind it."""
    started = time.perf_counter()
    found = best_evaluations(workload)
    cells = " | ".join(cell(one, found["joint"]) for one in found.values())
    best = found["extended"]
    strategy = best.strategy if best else None
    what = "-"
    if strategy:
        dims = "".join(map(str, strategy.dims))
        what = f"tp {strategy.tp} cp {strategy.cp} dp {strategy.attention_dp} / tp {strategy.moe_tp} ep {strategy.ep}"
        what += f", pp {strategy.pp}, batch {strategy.batch}, {dims}"
    print(f"| {label} | {cells} | {what} | {time.perf_counter() - started:.0f} |", flush=True)


def main() -> None:
    """Prints one table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--tight", "--medians", "--fine"):
        options.add_argument(flag, action="store_true")
    options.add_argument("workloads", nargs="*", help="instead of the ten")
    chosen = options.parse_args()
    names = chosen.workloads or (list(OBJECTIVES_MS) if chosen.tight else SHORT + LONG)
    print(f"| workload, SLO | {' | '.join(SPACES)} | best extended: attention / experts | s |")
    print(f"|---|{'---|' * (len(SPACES) + 2)}")
    for name in names:
        workload = load_workload(name)
        if chosen.medians:
            hardware = dataclasses.replace(workload.hardware, curves=None)
            workload = dataclasses.replace(workload, hardware=hardware)
        if chosen.fine:
            between = {3 * size // 2 for size in workload.degrees.batch if size % 2 == 0}
            batch = tuple(sorted({*workload.degrees.batch, *between}))
            workload = dataclasses.replace(workload, degrees=dataclasses.replace(workload.degrees, batch=batch))
        objectives = OBJECTIVES_MS[name] if chosen.tight else (workload.tpot_slo_s * 1e3,)
        for slo_ms in objectives:
            row(f"{name}, {slo_ms:g} ms", dataclasses.replace(workload, tpot_slo_s=slo_ms * 1e-3))


if __name__ == "__main__":
    main()
