"""What a study costs beyond the work of its runs: runs per minute, use of the slots, overhead and bytes per run.

    python benchmarks/study_overhead.py                            # 6 workloads x 3 searchers x 10 seeds x 4000 calls
    python benchmarks/study_overhead.py --seeds 2 --searchers random_walk annealing
    python benchmarks/study_overhead.py --cpus 8 --json

The runs are those of the paper's table 1. A slot is a CPU; its time goes to runs (the wall time that each notes for its
own calls) or is overhead: Ray's start and end, Ray Tune, checkpoints, Parquet files. The optima are found, and cached,
before the clock starts. Before and after, one run of each searcher is timed by itself: a machine that others share may
be twice as slow an hour later, and what the runs took is then to be read beside that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raysearch.optima.named_spaces import optimum_value
from raysearch.runs.records import STUDY_FILE, RunSpec
from raysearch.runs.run import SearchRun
from raysearch.studies.results import read_study_runs
from sim.config.catalog import load_workload

WORKLOADS = [f"gpt_moe_{size}_{context}" for size in ("1_2t", "1_6t") for context in ("16k", "32k", "64k")]


def main() -> None:
    """Runs the study and prints what it cost."""
    options = _parser().parse_args()
    for name in WORKLOADS:
        optimum_value(load_workload(name))
    with tempfile.TemporaryDirectory() as folder:
        measured = _measure(options, Path(folder))
    if options.json:
        print(json.dumps(measured, indent=2))
    else:
        print("\n".join(f"{name:28} {value:10,.2f}" for name, value in measured.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--searchers", nargs="+", default=["random_walk", "annealing", "ppo_paper"])
    parser.add_argument("--budget", type=int, default=4000)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    keys = {
        "name": "overhead",
        "workloads": WORKLOADS,
        "searchers": options.searchers,
        "seeds": list(range(options.seeds)),
        "budget": options.budget,
    }
    study, out = folder / "study.toml", folder / "out"
    study.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    command = [
        sys.executable,
        "-m",
        "raysearch",
        "study",
        str(study),
        "--out",
        str(out),
        "--set",
        f"cpus={options.cpus}",
    ]
    alone_s = _alone_s(options, folder / "before")
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - started
    alone_s = (alone_s + _alone_s(options, folder / "after")) / 2
    runs = read_study_runs(out)
    work_s = sum(run["wall_s"] for run in runs)
    # study.json is written once Ray is there, the last summary when the last run ends.
    span_s = max(path.stat().st_mtime for path in out.glob("runs/*/summary.json")) - (out / STUDY_FILE).stat().st_mtime
    size_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "runs": len(runs),
        "wall_s": wall_s,
        "work_s": work_s,
        "work of runs alone, s": alone_s * len(runs) / len(options.searchers),
        "wall / work": wall_s / work_s,
        "runs per minute": 60 * len(runs) / wall_s,
        "slot use, %": 100 * work_s / (options.cpus * wall_s),
        "start and end, s": wall_s - span_s,
        "overhead per run, slot s": (options.cpus * wall_s - work_s) / len(runs),
        "  without start and end": (options.cpus * span_s - work_s) / len(runs),
        "size per run, KB": size_bytes / len(runs) / 1e3,
        "size of 180 runs, MB": 180 * size_bytes / len(runs) / 1e6,
    }


def _alone_s(options: argparse.Namespace, folder: Path) -> float:
    """Wall time of one run of each searcher, one after another, with the machine to itself."""
    runs = [
        SearchRun(RunSpec(WORKLOADS[0], name, seed=0, budget=options.budget), folder / name)
        for name in options.searchers
    ]
    started = time.perf_counter()
    for run in runs:
        run.advance(options.budget)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
