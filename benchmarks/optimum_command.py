"""When `raysearch optimum` says what: the best strategy, and all beside it; seconds of the CPU and of the wall.

    python benchmarks/optimum_command.py
    python benchmarks/optimum_command.py gpt_moe_1_2t_1m_extended --runs 5

The command runs as a user runs it, in a process of its own with an empty cache, so that its imports are in the figures.
CPU is that of the process when its first line arrives, and at its end. Of several runs the quickest, by each figure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

WORKLOADS = (
    "gpt_moe_1_2t_16k", "llama_3_1_405b_8k", "mixtral_8x22b_8k", "qwen3_235b_a22b_16k", "gpt_moe_1_8t_12k",
    "mixtral_8x7b_32k_slo15", "gpt_moe_1_2t_1m_extended",
)  # fmt: skip


class Times(NamedTuple):
    """Seconds of the CPU and of the wall until the first line, and until the end."""

    first_cpu_s: float
    first_s: float
    cpu_s: float
    wall_s: float


def times(arguments: list[str]) -> Times:
    """Of one run of the command."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "RAYSEARCH_CACHE_DIR": empty}
        started = time.perf_counter()
        command = [sys.executable, "-m", "raysearch", "optimum", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
            assert process.stdout is not None
            process.stdout.readline()
            first_cpu_s, first_s = _cpu_s(process.pid), time.perf_counter() - started
            process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"raysearch optimum {' '.join(arguments)} ended with {process.returncode}")
        return Times(first_cpu_s, first_s, usage.ru_utime + usage.ru_stime, time.perf_counter() - started)


def _cpu_s(pid: int) -> float:
    """Of a process that runs."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Runs and prints."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("workloads", nargs="*", default=WORKLOADS)
    options.add_argument("--runs", type=int, default=3)
    asked = options.parse_args()
    for name in asked.workloads:
        runs = [times(["-w", name]) for _ in range(asked.runs)]
        first_cpu_s, first_s, cpu_s, wall_s = map(min, zip(*runs, strict=True))
        print(f"{name}: best after {first_cpu_s:.2f} CPU s ({first_s:.2f} s), all after {cpu_s:.2f} ({wall_s:.2f} s)")


if __name__ == "__main__":
    main()
