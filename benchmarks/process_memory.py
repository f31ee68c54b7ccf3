"""Memory of one process that finds the exact optimum of many extended workloads, one after the other.

    python benchmarks/process_memory.py --workloads 200

Prints the resident memory as it goes: caches are bounded, so it must level off.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from sim.config.question import Question
from sim.engines.engine_registry import BARE_MACHINE
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import space_of

MODELS = ("mixtral_8x7b", "qwen3_235b_a22b", "llama_3_1_70b", "gpt_oss_120b", "minimax_m2_5")


def resident_mb() -> float:
    """Resident memory of this process in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=200, help="how many")
    parser.add_argument("--gpus", type=int, default=16, help="device budget of each")
    arguments = parser.parse_args()
    shapes = ((turn, *each) for turn in itertools.count(1) for each in itertools.product(MODELS, ("decode", "serve")))
    for done, (turn, model, phase) in enumerate(itertools.islice(shapes, arguments.workloads), start=1):
        lengths = {"isl": 800 * turn, "osl": 500, "tpot_ms": 50.0, "gpus": arguments.gpus}
        asked = {"model": model, "engine": BARE_MACHINE, "phase": phase, "batches": "powers_of_two"}
        find_best(space_of(Question(**asked, **lengths, space="extended").load()))
        if done % 20 == 0 or done == arguments.workloads:
            print(f"{done} workloads: {resident_mb():,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
