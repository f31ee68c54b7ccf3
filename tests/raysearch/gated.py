"""Studies whose black box waits at a gate, so that whatever happens comes in the middle of a known call."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from envs.rows import read_rows
from raysearch.optima.optimum_cache import CACHE_VARIABLE
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators.plugin import load_plugin
from raysearch.simulators.protocol import InProcess
from raysearch.studies.results import read_study_runs
from tests.processes import LONGEST_S, descendants
from tests.raysearch.simulators.boxes import LOG, gate

BOXES = "tests.raysearch.simulators.boxes:"
SEARCHERS = ["annealing", "random"]
BUDGET = 60


def write_study(folder: Path, workload: Path, **changes: Any) -> Path:
    keys = {"name": "test", "workloads": [str(workload)], "seeds": [0], "searchers": SEARCHERS, "budget": BUDGET}
    keys |= {"simulator": f"{BOXES}gated", "timeout_s": 1000.0, "report_every": 5, **changes}
    path = folder / "study.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


def undisturbed(workload: Path, folder: Path) -> dict[str, str]:
    """The digests of the same runs made one by one, in this process and by a box without a gate."""
    found: dict[str, str] = {}
    for searcher in SEARCHERS:
        spec = RunSpec(str(workload), searcher, seed=0, budget=BUDGET, simulator=f"{BOXES}hilly", workers=1)
        run = SearchRun(spec, folder / searcher, simulator=InProcess(load_plugin(f"{BOXES}hilly")))
        run.advance(BUDGET)
        found[searcher] = run.finish()["digest"]
    return found


def digests(out: Path) -> dict[str, str]:
    """Of the runs of a finished study, whose rows are counted too: each call once."""
    runs = read_study_runs(out)
    for run in runs:
        assert run["complete"]
        assert list(read_rows(out / "runs" / run["run_id"])["call"]) == list(range(1, run["budget"] + 1))
    return {run["searcher"]: run["digest"] for run in runs}


@pytest.fixture
def let_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the black box answer about so many strategies in all."""
    log = tmp_path / "asked.txt"
    log.touch()
    monkeypatch.setenv(LOG, str(log))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))  # or what another test was told would be known

    def passing(calls: int) -> None:
        (waiting := gate(log).with_suffix(".new")).write_text(str(calls))
        waiting.replace(gate(log))

    passing(0)
    return passing


def rows_of(out: Path) -> int:
    """Rows on disk so far, in all runs."""
    rows = [path.read_bytes().count(b"\n") for path in out.glob("runs/*/rows.jsonl")]
    return sum(rows) + sum(len(read_rows(path.parent)) for path in out.glob("runs/*/rows.parquet"))


def wait_for_rows(process: subprocess.Popen[str], out: Path, rows: int) -> None:
    deadline = time.monotonic() + LONGEST_S
    while rows_of(out) < rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{rows_of(out)} of {rows} rows after {LONGEST_S} s"
        time.sleep(0.05)


def process_of(process: subprocess.Popen[str], name: str) -> int:
    return next(pid for pid, title in descendants(process.pid).items() if f"/{name}\0" in title)


def holds_rows(pid: int, out: Path) -> bool:
    """Whether a process has the rows of a run open."""
    kept: list[str] = []
    with suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # it has ended, or closed this one meanwhile
                kept.append(os.readlink(path))
    return any(text.startswith(f"{out}/") and text.endswith("rows.jsonl") for text in kept)
