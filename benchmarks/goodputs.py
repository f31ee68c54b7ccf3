"""The best known goodput of the shipped workloads of phase traffic, its bound, and how far searchers come.

    python benchmarks/goodputs.py                       # all of them, 1,000 calls of each searcher
    python benchmarks/goodputs.py traffic_qwen3_32b --searchers random,annealing,prior:100:1 --seeds 3 --keep runs/

The first line of a workload is branch and bound's: tokens/s/GPU of its best, the bound it proves, and the gap after so
many replays. The others are the best of a searcher after so many calls: mean [lowest, highest] of its seeds;
`prior:100:1` makes 100 calls with one seed, whatever --calls and --seeds say. The last
one is the best known under arrivals of eight other seeds, and of longer replays (--requests): mean and standard
deviation of one seed's goodput. Searches that were stopped go on from the folder in which they are kept. --picture
draws the curves as shares of the best known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import raysearch as rs
from raysearch.base.file_io import degrees_text, served_text
from sim.arrays import Floats
from sim.config.catalog import load_workload
from sim.config.files import list_names
from sim.config.question import Question
from sim.optimum.spaces import space_of
from sim.replay.goodput import other_seeds
from sim.replay.goodput_search import best_goodput
from sim.strategy import Strategy
from sim.workload import Workload

CALLS = (10, 30, 100, 300, 1000)
SEARCHERS = ("random", "annealing", "prior")
Curves = Mapping[str, Floats]
"""By searcher, [seeds, calls]."""


def curve(name: str, searcher: str, calls: int, seed: int, kept: Path) -> tuple[Floats, Strategy | None, float]:
    """The best after each call, the strategy, and CPU seconds; goes on with what a folder has of it."""
    folder = kept / f"{name}-{searcher}-{seed}-{calls}"
    started_s = time.process_time()
    asked = Question(workload=name)
    found = rs.search(asked, searcher, budget=calls, seed=seed, workers=0, out=folder, resume=folder.exists())
    took_s = time.process_time() - started_s
    best = found.to_frame()["best_so_far"].to_numpy(float)
    return np.pad(best, (0, calls - len(best)), mode="edge"), found.strategy, took_s


def lines(workload: Workload, asked: argparse.Namespace, kept: Path) -> Curves:
    """Prints what is known of a workload; its curves as shares of the best known."""
    started_s = time.process_time()
    exact = best_goodput(space_of(workload), asked.replays)
    known = exact.tokens_per_s_per_gpu
    strategy = exact.best.steady_state.strategy if exact.best else None
    proven = "proven" if exact.proven else f"gap {exact.gap:.1%}"
    took_s = time.process_time() - started_s
    print(
        f"{workload.name}: {known:,.1f}, bound {exact.bound:,.1f}, {proven} after {exact.replayed} replays, "
        f"{took_s:.0f} CPU s",
        flush=True,
    )
    curves = dict[str, Floats]()
    for each in asked.searchers.split(","):
        searcher, *own = each.split(":")
        calls, seeds = (int(own[at]) if at < len(own) else usual for at, usual in enumerate((asked.calls, asked.seeds)))
        found = [curve(workload.name, searcher, calls, seed, kept) for seed in range(seeds)]
        for values, best, _ in found:
            if values[-1] > known:
                known, strategy = float(values[-1]), best
        curves[searcher] = np.array([values for values, _, _ in found])
        text = ", ".join(
            f"{count}: {each.mean():,.1f} [{each.min():,.1f}, {each.max():,.1f}]"
            for count in CALLS
            if count <= calls
            for each in [curves[searcher][:, count - 1]]
        )
        print(f"  {searcher}: {text}; {np.mean([took for _, _, took in found]):.0f} CPU s a run", flush=True)
    if strategy:
        print(
            f"  best known {known:,.1f}, at most {max(known, exact.bound):,.1f}, gap {1 - known / exact.bound:.1%}: "
            f"{degrees_text(strategy)}; {served_text(strategy.served)}",
            flush=True,
        )
        for requests in (workload.open_loop.requests, *asked.requests):
            longer = replace(workload, open_loop=replace(workload.open_loop, requests=requests))
            others = other_seeds(longer, strategy)
            print(f"  other seeds of {requests:,}: {others.mean():,.1f} +- {others.std(ddof=1):,.1f}", flush=True)
    return {searcher: each / known if known else each for searcher, each in curves.items()}


def draw(curves: Mapping[str, Curves], path: Path) -> None:
    """A panel per workload: mean, lowest and highest of the seeds after each call."""
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, (name, each) in zip(panels, curves.items(), strict=False):
        panel.set_title(name.removeprefix("traffic_"), fontsize=9)
        for searcher, shares in each.items():
            calls = np.arange(1, shares.shape[1] + 1)
            panel.plot(calls, shares.mean(0), label=searcher)
            panel.fill_between(calls, shares.min(0), shares.max(0), alpha=0.2)
        panel.set_xscale("log")
        panel.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.supxlabel("calls")
    figure.supylabel("share of the best known goodput")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints some lines per workload."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("workloads", nargs="*", help="instead of all")
    options.add_argument("--calls", type=int, default=CALLS[-1])
    options.add_argument("--replays", type=int, default=300, help="of branch and bound")
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--searchers", default=",".join(SEARCHERS))
    options.add_argument("--requests", nargs="*", type=int, default=[], help="of a longer replay of the best known")
    options.add_argument("--keep", type=Path, help="folder of the searches (none: they are forgotten)")
    options.add_argument("--picture", type=Path, help="of the curves")
    chosen = options.parse_args()
    curves = dict[str, Curves]()
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.workloads or list_names("workloads"):
            workload = load_workload(name)
            if workload.phase == "traffic":
                curves[name] = lines(workload, chosen, chosen.keep or Path(folder))
    if chosen.picture:
        draw(curves, chosen.picture)


if __name__ == "__main__":
    main()
