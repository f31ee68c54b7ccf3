"""What a study costs the driver, Ray's control service and the results folder, per run and per report.

    python benchmarks/scaling.py                         # 10, 100 and 1000 concurrent runs
    python benchmarks/scaling.py --concurrent 100 --runs 1000 --reports 5 --json

The study is a real one, through `raysearch.studies.tuning.run_study`, with Ray Tune's controller, the display, the
logs and a placement group per run. Its runs are dummies: they wait instead of searching, and report what a run
reports. So that a thousand of them fit into one machine, `--seats` of them share a process, where real ones have one
each; with `--seats 1` they do here, too. All CPU seconds are of the process named, not of the machine, so other work
on it matters little; the reports per second do not go beyond what the waiting allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune
from ray.air.execution.resources.placement_group import PlacementGroupAcquiredResources

from raysearch.base.errors import Interrupted
from raysearch.studies import tuning
from raysearch.studies.study_display import StudyBars
from raysearch.studies.study_file import StudyFile, check_study
from raysearch.studies.trial import SearchTrial

CALLS_PER_REPORT = 200
SETTINGS = ((10, 100, 1), (10, 100, 10), (100, 1000, 10), (1000, 1000, 100))
"""Concurrent runs, runs, seats per process."""


class DummyTrial(SearchTrial):
    """Reports as a search does, without one. Its number of concurrent siblings comes from the environment."""

    def setup(self, config: dict[str, Any]) -> None:
        """Takes a trial's configuration."""
        self._trial = config["run"]
        self._run = None
        self._calls = 0

    def step(self) -> dict[str, Any]:
        """The next report."""
        self._calls += CALLS_PER_REPORT
        metrics = {
            "calls": self._calls,
            "best": 386.18 - 1e4 / self._calls,
            "fraction_of_optimum": 0.6,
            "unique_calls": self._calls - 3,
            "feasible_calls": self._calls // 3,
            "wall_s": self._calls / 2500,
            "searcher/temperature": 1e3 / self._calls,
        }
        return self._report(metrics, done=self._calls >= self._trial["budget"])

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A share of the one CPU, small enough for all that are to be concurrent."""
        return tune.PlacementGroupFactory([{"CPU": 1 / int(os.environ["SCALING_CONCURRENT"])}])


class Table:
    """An actor at which many trials sit; a step of one takes `step_s`, while the others go on."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self._trials = step_s, {}

    async def call(self, seat: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What Tune asks of the trial at a seat."""
        if method == "__init__":
            self._trials[seat] = DummyTrial(*args, **kwargs)
        if method in ("__init__", "__ray_ready__", "__ray_terminate__"):
            return True
        if method == "train":
            await asyncio.sleep(self._step_s)
        return getattr(self._trials[seat], method)(*args, **kwargs)


class Seat:
    """Stands for an actor handle: what is called on it happens at its table."""

    def __init__(self, table: Any, seat: int, kwargs: dict[str, Any]) -> None:
        self._table, self._seat = table, seat
        table.call.remote(seat, "__init__", (), kwargs)

    def __getattr__(self, method: str) -> Any:
        table, seat = self._table, self._seat

        class Method:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> Any:
                return table.call.remote(seat, method, args, kwargs)

            @staticmethod
            def options(**_: Any) -> type[Method]:
                return Method

        return Method


def seat_trials(seats: int, step_s: float) -> None:
    """Has Ray Tune seat its trials at tables instead of starting an actor for each."""
    tables: list[Any] = []
    taken = 0

    class Next:
        @staticmethod
        def remote(**kwargs: Any) -> Seat:
            nonlocal taken
            if taken % seats == 0:
                tables.append(ray.remote(Table).options(num_cpus=0, max_concurrency=seats + 1).remote(step_s))
            taken += 1
            return Seat(tables[-1], taken, kwargs)

    PlacementGroupAcquiredResources.annotate_remote_entities = lambda _self, entities: [Next for _ in entities]


class Meter(StudyBars):
    """The display of a study, taking the time of every report and looking at Ray's processes now and then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: list[float] = []
        self.driver_cpu: list[float] = []
        self.peaks = dict.fromkeys(("driver_rss", "driver_files", "gcs_rss", "gcs_cpu_s", "raylet_cpu_s", "store"), 0.0)
        self._me = psutil.Process()
        self._ray = {name: self._child(name) for name in ("gcs_server", "raylet")} if ray.is_initialized() else {}

    def reported(self, run_id: str, metrics: Mapping[str, Any]) -> None:
        """Notes the time and what the driver has used."""
        super().reported(run_id, metrics)
        self.times.append(time.perf_counter())
        self.driver_cpu.append(time.process_time())
        if len(self.times) % 200 == 1:
            self.look()

    def look(self) -> None:
        """Notes what Ray's processes hold."""
        self._ray = self._ray or {name: self._child(name) for name in ("gcs_server", "raylet")}
        gcs, raylet = self._ray["gcs_server"], self._ray["raylet"]
        now = {
            "driver_rss": self._me.memory_info().rss,
            "driver_files": self._me.num_fds(),
            "gcs_rss": gcs.memory_info().rss,
            "gcs_cpu_s": sum(gcs.cpu_times()[:2]),
            "raylet_cpu_s": sum(raylet.cpu_times()[:2]),
            "store": _store_bytes(),
        }
        self.peaks = {name: max(value, now[name]) for name, value in self.peaks.items()}

    def _child(self, name: str) -> psutil.Process:
        return next(process for process in self._me.children(recursive=True) if process.name() == name)


def _store_bytes() -> int:
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.object_store_bytes_used


def measure(concurrent: int, runs: int, seats: int, reports: int, step_s: float) -> dict[str, Any]:
    """One study of dummies; what it cost."""
    os.environ["SCALING_CONCURRENT"] = str(concurrent)
    file = StudyFile(
        name="scaling",
        workloads=("gpt_moe_1_2t_16k",),
        searchers=("annealing",),
        seeds=tuple(range(runs)),
        budget=reports * CALLS_PER_REPORT,
    )
    study = check_study(file)
    tuning.SearchTrial = DummyTrial
    if seats > 1:
        seat_trials(seats, step_s)
    with tempfile.TemporaryDirectory() as folder:
        meter, out = Meter("scaling", study.specs(), {}), Path(folder)
        started = time.perf_counter()
        with suppress(Interrupted):  # it finds no summaries: dummies write none
            tuning.run_study(study, {"gpt_moe_1_2t_16k": 643.86}, out, display=meter, cpus=1)
        wall_s = time.perf_counter() - started
        return _figures(meter, out, wall_s) | {"concurrent": concurrent, "runs": runs, "seats": seats}


def _figures(meter: Meter, out: Path, wall_s: float) -> dict[str, Any]:
    files = [path for path in out.rglob("*") if path.is_file()]
    snapshots = [path.stat().st_size for path in out.glob("tune/experiment_state*.json")]
    reports, half = len(meter.times), len(meter.times) // 2
    later = meter.times[-1] - meter.times[half], meter.driver_cpu[-1] - meter.driver_cpu[half]
    return {
        "reports": reports,
        "wall_s": wall_s,
        "driver_cpu_s": meter.driver_cpu[-1] - meter.driver_cpu[0],
        "driver_cpu_ms_per_report": 1e3 * (meter.driver_cpu[-1] - meter.driver_cpu[0]) / (reports - 1),
        "driver_cpu_ms_per_report_later": 1e3 * later[1] / (reports - half - 1),
        "driver_cpu_s_before_the_first": meter.driver_cpu[0],
        "reports_per_s_later": (reports - half - 1) / later[0],
        "driver_busy_later": later[1] / later[0],
        "folder_bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "snapshot_bytes": max(snapshots, default=0),
        **meter.peaks,
    }


def main() -> None:
    """Measures each setting in a process of its own and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, help="runs at a time; without it, those of docs/evidence/scaling.md")
    parser.add_argument("--runs", type=int, help="in all; else as many as are concurrent")
    parser.add_argument("--seats", type=int, default=10, help="runs that share a process")
    parser.add_argument("--reports", type=int, default=10, help="per run")
    parser.add_argument("--step-s", type=float, default=0.5, help="between two reports of a seated run")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.concurrent:
        found = measure(asked.concurrent, asked.runs or asked.concurrent, asked.seats, asked.reports, asked.step_s)
        print(
            json.dumps(found) if asked.json else "\n".join(f"{name:32} {value:,.6g}" for name, value in found.items())
        )
        return
    for concurrent, runs, seats in SETTINGS:
        options = ("--concurrent", str(concurrent), "--runs", str(runs), "--seats", str(seats))
        subprocess.run([sys.executable, __file__, *options, "--reports", str(asked.reports)], check=True)
        print()


if __name__ == "__main__":
    main()
