"""The exact optima of the shipped workloads in each space, as the tables of docs/evidence/optima.md.

    python benchmarks/optima.py                  # all workloads that decode, on calibrated curves
    python benchmarks/optima.py --all-reduce nccl   # by NCCL, as all-gather is, not by an engine's graph kernel
    python benchmarks/optima.py --medians        # priced by medians and NCCL's latency model, without fitted curves

Figures are tokens/s/GPU. "ffn2 on hidden" is the best strategy of the joint space whose ffn2 is sharded on hidden with
more than one GPU per expert: an all-gather in the place of an all-reduce.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import replace

from sim.config.catalog import load_workload
from sim.config.files import list_names
from sim.ops.layers import layer_ops
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, heuristic_space, joint_space, paper_space
from sim.prices.curves import Curves
from sim.workload import Workload

SPACES = (
    "workload",
    "Megatron-LM",
    "with sequence parallelism",
    "`paper`",
    "over Megatron-LM",
    "`joint`",
    "over the better Megatron-LM",
)
BEYOND = ("workload", "ffn2 on hidden", "of `joint`", "any batch", "over `joint`", "best of any batch")


def priced_otherwise(workload: Workload, *, medians: bool, all_reduce: str | None) -> Workload:
    """The workload on hardware without curves, or with another library's all-reduce."""
    hardware = workload.hardware
    if all_reduce == "nccl" or medians:
        collectives = replace(hardware.collectives, custom_all_reduce=None)
        hardware = replace(hardware, collectives=collectives)
    if medians:
        hardware = replace(hardware, curves=None)
    elif all_reduce and hardware.curves:
        curves = hardware.curves
        hardware = replace(hardware, curves=Curves(curves.calibration, curves.engine, all_reduce))
    return replace(workload, hardware=hardware)


def value(space: Space) -> float:
    """The best of a space; 0 where nothing is feasible."""
    found = find_best(space).evaluation
    return found.tokens_per_s_per_gpu if found else 0.0


def on_hidden(space: Space) -> Space:
    """The strategies whose ffn2 is sharded on hidden over several GPUs."""
    several = tuple(tp for tp in space.tp if tp > 1)
    return replace(space, tp=several, choices={**space.choices, "ffn2": (1,)})


def ratio(of: float, to: float) -> str:
    """Three digits of a quotient; "-" where one of both is nothing."""
    return f"{of / to:.3f}" if of and to else "-"


def rows(workload: Workload) -> tuple[str, str]:
    """A line of each table."""
    joint = joint_space(workload)
    megatron = value(heuristic_space(workload, sequence_parallel=False))
    megatron_sp = value(heuristic_space(workload, sequence_parallel=True))
    paper, best, hidden = value(paper_space(workload)), value(joint), value(on_hidden(joint))
    every = find_best(replace(joint, batch=tuple(range(1, max(joint.batch) + 1)))).evaluation
    fine = every.tokens_per_s_per_gpu if every else 0.0
    what = "none fits"
    if every:
        strategy = every.strategy
        dims = "".join(map(str, strategy.dims))
        what = f"tp {strategy.tp} ep {strategy.ep} pp {strategy.pp} batch {strategy.batch}, {dims}"
    spaces = (megatron, megatron_sp, paper, ratio(paper, megatron), best, ratio(best, max(megatron, megatron_sp)))
    beyond = (hidden, ratio(hidden, best), fine, ratio(fine, best), what)
    return line(workload.name, *spaces), line(workload.name, *beyond)


def line(*cells: str | float) -> str:
    """Cells as a line of a table."""
    return f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:.1f}' for cell in cells)} |"


def main() -> None:
    """Prints both tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--medians", action="store_true")
    options.add_argument("--all-reduce", choices=("nccl", "trtllm", "vllm", "sglang"))
    options.add_argument("workloads", nargs="*", help="instead of all")
    chosen = options.parse_args()
    print(line(*SPACES), f"|{'---|' * len(SPACES)}", sep="\n")
    second = [line(*BEYOND), f"|{'---|' * len(BEYOND)}"]
    for name in chosen.workloads or list_names("workloads"):
        workload = load_workload(name)
        if "ffn2" in layer_ops(workload.model).op_by_name and workload.phase == "decode":
            workload = dataclasses.replace(workload, space="joint")
            first, beyond = rows(priced_otherwise(workload, medians=chosen.medians, all_reduce=chosen.all_reduce))
            print(first, flush=True)
            second.append(beyond)
    print("", *second, sep="\n")


if __name__ == "__main__":
    main()
