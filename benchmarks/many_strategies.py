"""How many strategies a second `evaluate_many` gets through, by call size, degrees and phase; `evaluate` beside it.

    python benchmarks/many_strategies.py
    python benchmarks/many_strategies.py --cases serve --sizes 16 4096
    python benchmarks/many_strategies.py --stream 131072 --cases decode "decode, dense" --sizes 64 1024

Strategies are drawn from the workload's space, each with as much weight: of one mesh and batch alone, or of random
degrees. In calls of each size, a second of the CPU: "new" is the first thousand, or the first call, of a workload that
nothing was asked of before, in a process that has priced other degrees (curves are read once); "known" is what comes
when its tables are full, as late in a search. Between the two a search moves. The figures are the same, to the last
bit.

With `--stream`, a search's own rate: new strategies without end, of random degrees and choices, from empty tables on;
after each doubling, of all so far and of those since the last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from envs.space import StrategySpace
from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

_SERVED = Question(model="qwen3_235b_a22b", isl=1024, osl=1024, engine="vllm", gpus=64, tpot_ms=50)
CASES: dict[str, Callable[[], Workload]] = {
    "decode": lambda: load_workload("gpt_moe_1_2t_16k"),
    "decode, dense": lambda: load_workload("llama_3_1_405b_8k"),
    "decode, extended": lambda: load_workload("gpt_moe_1_2t_1m_extended"),
    "decode under vLLM": lambda: replace(_SERVED, phase="decode", space="joint").load(),
    "serve": lambda: replace(_SERVED, phase="serve", space="joint").load(),
    "serve, chunked": lambda: replace(_SERVED, phase="serve", space="joint", chunk_tokens=2048).load(),
    "serve, space of vLLM": lambda: replace(_SERVED, phase="serve").load(),
    "serve, two groups of layers": lambda: replace(_SERVED, model="deepseek_v3", phase="serve", space="joint").load(),
    "prefill": lambda: replace(_SERVED, phase="prefill", space="joint", tpot_ms=None).load(),
}
_NEW, _ALONE = 1000, 400
_MARKS = 5
"""Doublings that a stream is reported at."""


def drawn(workload: Workload, count: int, seed: int) -> np.ndarray:
    """Actions of random strategies."""
    space, rng = StrategySpace(workload), np.random.default_rng(seed)
    return np.array([space.sample(rng) for _ in range(count)])


def rate(workload: Workload, actions: np.ndarray, size: int) -> float:
    """Strategies a second of the CPU, in calls of a size; one by one by `evaluate`."""
    space = StrategySpace(workload)
    if size == 1:
        calls: list[Any] = [space.decode(each) for each in actions]
    else:
        calls = [space.strategies(each) for each in np.split(actions, range(size, len(actions), size))]
    simulate: Callable[[Workload, Any], object] = evaluate if size == 1 else evaluate_many
    started = time.process_time()
    for each in calls:
        simulate(workload, each)
    return len(actions) / (time.process_time() - started)


def measure(task: tuple[str, int, int]) -> tuple[float, float, float]:
    """New, known, and known of one mesh, in calls of a size; in a process of its own."""
    name, size, count = task
    workload = CASES[name]()
    space = StrategySpace(workload)
    dims = space.decode(drawn(workload, 1, 0)[0]).dims
    for _ in range(8):
        evaluate(workload, Strategy(3, 3, 3, 9, dims))
    actions = drawn(workload, count if size > 1 else _ALONE, 1)
    new = rate(workload, actions[: max(_NEW, size)], size)
    for _ in range(2):  # the first fills the tables
        known = rate(workload, actions, size)
    one_mesh = actions.copy()
    degrees = [at for at, each in enumerate(space.names) if each in ("tp", "ep", "pp", "batch", "cp", "dp")]
    one_mesh[:, degrees] = one_mesh[0, degrees]
    rate(workload, one_mesh, size)
    return new, max(known, rate(workload, actions, size)), rate(workload, one_mesh, size)


def stream(task: tuple[str, int, int]) -> list[tuple[int, float, float]]:
    """Strategies so far, and their rate and that of the latest half; up to some, in a process of its own."""
    name, size, most = task
    workload = CASES[name]()
    space, marks = StrategySpace(workload), [most >> halved for halved in range(_MARKS)]
    evaluate(workload, Strategy(3, 3, 3, 9, space.decode(drawn(workload, 1, 0)[0]).dims))
    found, seconds, last = list[tuple[int, float, float]](), 0.0, (0, 0.0)
    for done in range(size, most + 1, size):
        strategies = space.strategies(drawn(workload, size, done))
        started = time.process_time()
        evaluate_many(workload, strategies)
        seconds += time.process_time() - started
        if done in marks:
            found.append((done, done / seconds, (done - last[0]) / (seconds - last[1])))
            last = done, seconds
    return found


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 64, 1024, 4096, 16384], help="1: one by one")
    parser.add_argument("--strategies", type=int, default=16384, help="drawn (default: 16384)")
    parser.add_argument("--stream", type=int, metavar="N", help="this many new strategies, a power of two, instead")
    asked = parser.parse_args()
    if asked.stream:
        print("| case | call | strategies so far | all of them | the latest half |\n|---|---|---|---|---|")
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for name, size in itertools.product(asked.cases, asked.sizes):
                (rows,) = pool.map(stream, [(name, size, asked.stream)])
                for done, *rates in rows:
                    print(f"| {name} | {size:,} | {done:,} | {' | '.join(f'{each:,.0f}' for each in rates)} |")
        return
    print("| case | call | new, random degrees | known, random degrees | known, one mesh |")
    print("|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in asked.cases:
            for size in asked.sizes:
                (figures,) = pool.map(measure, [(name, size, asked.strategies)])
                print(f"| {name} | {size:,} | {' | '.join(f'{each:,.0f}' for each in figures)} |", flush=True)


if __name__ == "__main__":
    main()
