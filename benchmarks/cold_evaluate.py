"""Times `evaluate` on degrees that it has never seen, and the same call again.

    python benchmarks/cold_evaluate.py --workload gpt_moe_1_2t_16k

A call is cold when no earlier call had its (tp, ep, batch): each such tuple of the workload's tables comes up once, in
random order, with a random pp and random choices. What a process does once is left out and printed beside it: it reads
the curves of the hardware and learns which moves each choice means, here on degrees that no table has. The same call
again is warm, and the peer of both is one explanation, the full breakdown per op that a search never asks for. Seconds
are of the CPU. The garbage of the imports is collected first; from then on its collector runs as ever, and its pauses
are in the means.

Of the last few, it prints how far a cold call wanders: modules and functions of `sim` that it visits, its calls,
and how often a call is in another module than the one before it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

from sim.config.catalog import load_workload
from sim.ops.layers import op_names
from sim.simulate import evaluate
from sim.strategy import CHOICES, Strategy
from sim.workload import Workload

_LAST = 100


def cold_strategies(workload: Workload, rng: np.random.Generator) -> list[Strategy]:
    """One strategy per (tp, ep, batch) of the tables, in random order."""
    tables, ops = workload.degrees, len(op_names(workload.model))
    degrees = list(itertools.product(tables.tp, tables.ep, tables.batch))
    return [
        Strategy(tp, ep, int(rng.choice(tables.pp)), batch, tuple(rng.integers(len(CHOICES), size=ops).tolist()))
        for tp, ep, batch in (degrees[index] for index in rng.permutation(len(degrees)))
    ]


def degrees_off_the_tables(workload: Workload, count: int, rng: np.random.Generator) -> list[Strategy]:
    """Strategies that share no tp and no number of tokens with `cold_strategies`."""
    ops = len(op_names(workload.model))
    return [Strategy(3, 3, 3, 9, tuple(rng.integers(len(CHOICES), size=ops).tolist())) for _ in range(count)]


def microseconds(call: Callable[[Workload, Strategy], object], workload: Workload, strategy: Strategy) -> float:
    """How long one call takes on this CPU, whatever else runs on it."""
    start = time.process_time()
    call(workload, strategy)
    return (time.process_time() - start) * 1e6


def explained(workload: Workload, strategy: Strategy) -> object:
    """An evaluation whose explanation is read."""
    return evaluate(workload, strategy).ops


def wandering(workload: Workload, strategy: Strategy) -> tuple[int, int, int, int]:
    """Modules, functions, calls and switches between modules of one call."""
    seen: list[tuple[str, str, int]] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("sim."):
            seen.append((module, frame.f_code.co_name, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    evaluate(workload, strategy)
    sys.setprofile(None)
    modules = [module for module, _, _ in seen]
    switches = sum(before != after for before, after in itertools.pairwise(modules))
    return len(set(modules)), len(set(seen)), len(seen), switches


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_moe_1_2t_16k", help="name or path of a TOML file")
    parser.add_argument("--seed", type=int, default=0, help="of the order, pp and choices")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    workload = load_workload(arguments.workload)
    rng = np.random.default_rng(arguments.seed)
    gc.collect()
    once_us = [microseconds(evaluate, workload, strategy) for strategy in degrees_off_the_tables(workload, 100, rng)]
    drawn = cold_strategies(workload, rng)
    strategies, last = drawn[:-_LAST], drawn[-_LAST:]
    cold_us, warm_us, explained_us = (
        [microseconds(call, workload, strategy) for strategy in strategies] for call in (evaluate, evaluate, explained)
    )
    modules, functions, calls, switches = np.median([wandering(workload, each) for each in last], axis=0).tolist()
    figures = {
        "workload": workload.name,
        "calls": len(strategies),
        "modules_visited": modules,
        "functions_visited": functions,
        "functions_called": calls,
        "switches": switches,
        "once_us": sum(once_us),
        "cold_us": float(np.mean(cold_us)),
        "cold_median_us": float(np.median(cold_us)),
        "warm_us": float(np.mean(warm_us)),
        "explain_us": float(np.mean(explained_us)),
        "cold_over_explain": float(np.median(cold_us) / np.median(explained_us)),
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"{workload.name}: {len(strategies)} calls, each with a (tp, ep, batch) of its own")
    print(f"one cold evaluate    {figures['cold_us']:8.0f} us mean, {figures['cold_median_us']:.0f} us median")
    print(f"the same again, warm {figures['warm_us']:8.0f} us mean")
    print(f"one explanation      {figures['explain_us']:8.0f} us mean")
    print(f"what a process learns{figures['once_us']:8.0f} us, once")
    print(f"cold over explanation {figures['cold_over_explain']:7.2f}  (medians)")
    print(f"a cold call visits {modules:g} modules and {functions:g} functions in {calls:g} calls,")
    print(f"and switches between modules {switches:g} times  (medians of {_LAST})")


if __name__ == "__main__":
    main()
