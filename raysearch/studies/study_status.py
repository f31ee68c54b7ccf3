"""How far a study is, read from its folder by whoever may read it: running, stopped or finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from envs.chain import DamagedRows
from envs.rows import ROWS_FILE, last_row
from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, read_record
from raysearch.processes.claim import in_use
from raysearch.runs.records import HEAD_FILE, STUDY_FILE, SUMMARY_FILE, RunHead, StudyRecord, run_name
from raysearch.runs.run import finished_summary
from raysearch.studies.forecast import RunProgress, remaining_s
from raysearch.studies.journal import JOURNAL_FILE, Event, last_events
from raysearch.studies.results import check_run
from raysearch.studies.study_file import run_dir

State = Literal["running", "failed", "damaged", "interrupted", "waiting", "finished"]
_ENDED = ("finished", "failed", "damaged")


@dataclass(frozen=True)
class RunStatus:
    """One run.

    Attributes:
        run_id: Its name.
        workload: It searches.
        searcher: That searches.
        state: "waiting" is to start or go on, "interrupted" was under way when its study stopped, "failed" broke down,
            "damaged" is not what was written.
        calls: Made so far; each has its row on disk.
        budget: Calls it may make.
        best: Tokens/s/GPU so far, 0.0 if nothing feasible was found.
        fraction_of_optimum: The same over f*; None where that is not known.
        changed_s: When its files last changed, in seconds since 1970; None before there are any.
        wall_s: Seconds its calls took; None while that is not known.
        damage: What is wrong with a damaged one.
    """

    run_id: str
    workload: str
    searcher: str
    state: State
    calls: int
    budget: int
    best: float
    fraction_of_optimum: float | None
    changed_s: float | None
    wall_s: float | None
    damage: str = ""


@dataclass(frozen=True)
class StudyStatus:
    """A study or a search by itself.

    Attributes:
        state: "running" while a process has the folder; else "finished", "failed" (some runs are) or "interrupted".
        runs: In the study's order.
        remaining_s: A forecast of the seconds still to go; None unless it is running and a pace is known.
        changed_s: When a file of a run last changed, in seconds since 1970; None before there are any.
    """

    state: State
    runs: tuple[RunStatus, ...]
    remaining_s: float | None
    changed_s: float | None

    def best(self) -> list[RunStatus]:
        """The best run so far of each workload that has anything feasible."""
        ranked = sorted(self.runs, key=lambda run: run.best)
        return list({run.workload: run for run in ranked if run.best}.values())


def read_status(directory: Path) -> StudyStatus:
    """What the files in a results folder say now; nothing is written and no other process is asked.

    Raises:
        InputError: The folder holds no results, or damaged ones.
    """
    if os.path.lexists(directory / STUDY_FILE):
        waiting, folders = _planned(directory)
    elif os.path.lexists(directory / HEAD_FILE):
        waiting, folders = _alone(directory)
    else:
        raise InputError(f"no results in {directory}: expected the folder of a study or of a search")
    # Asked before the files are read: who stops in between has written them all.
    live = in_use(directory)
    events, journaled = last_events(directory), (directory / JOURNAL_FILE).exists()
    runs = tuple(
        _read_checked(run, folder, events.get(run.run_id), live, journaled)
        for run, folder in zip(waiting, folders, strict=True)
    )
    changed_s = max((run.changed_s for run in runs if run.changed_s), default=None)
    return StudyStatus(_overall(runs, live), runs, _forecast(runs) if live else None, changed_s)


def _planned(directory: Path) -> tuple[list[RunStatus], list[Path]]:
    """Every run of a study as if it were still waiting, and its folder."""
    record = read_record(directory / STUDY_FILE, StudyRecord)
    plan = record["study"]
    planned = product(record["hashes"], plan["searchers"], plan["seeds"])
    named = {run_name(workload, searcher, seed): (workload, searcher) for workload, searcher, seed in planned}
    runs: list[RunStatus] = []
    for run_id in record["runs"]:
        if run_id not in named or run_id not in record["budgets"]:
            raise Damaged(f"{directory / STUDY_FILE} is damaged: it has no run {run_id!r}")
        runs.append(_waiting(run_id, *named[run_id], record["budgets"][run_id]))
    return runs, [run_dir(directory, run.run_id) for run in runs]


def _alone(directory: Path) -> tuple[list[RunStatus], list[Path]]:
    head = read_record(directory / HEAD_FILE, RunHead)
    spec = head["spec"]
    return [_waiting(head["run_id"], head["workload"], spec["searcher"], spec["budget"])], [directory]


def _waiting(run_id: str, workload: str, searcher: str, budget: int) -> RunStatus:
    return RunStatus(run_id, workload, searcher, "waiting", 0, budget, 0.0, None, None, None)


def _read_checked(run: RunStatus, folder: Path, event: Event | None, live: bool, journaled: bool) -> RunStatus:
    try:
        check_run(folder, run.run_id)
        return _read(run, folder, event, live, journaled)
    except Damaged as damage:
        return replace(run, state="damaged", damage=damage.what)


def _read(run: RunStatus, folder: Path, event: Event | None, live: bool, journaled: bool) -> RunStatus:
    try:
        row = last_row(folder)  # before the summary: a run that ends in between has one
    except DamagedRows as error:
        raise Damaged(str(error)) from error
    summary = finished_summary(folder)
    if summary is not None:
        changed_s = (folder / SUMMARY_FILE).stat().st_mtime
        found = {name: summary[name] for name in ("calls", "best", "fraction_of_optimum", "wall_s")}
        return replace(run, **found, state="finished", changed_s=changed_s)
    head = folder / HEAD_FILE
    state = _state(event, head.is_file(), live, journaled)
    if row is None or not head.is_file():
        return replace(run, state=state)
    optimum, changed_s = read_record(head, RunHead)["optimum"], _changed_s(folder)
    return replace(
        run,
        state=state,
        calls=row.call,
        best=row.best_so_far,
        fraction_of_optimum=row.best_so_far / optimum if optimum else None,
        changed_s=changed_s,
        wall_s=changed_s - event.at_s if event and event.fresh and changed_s else None,
    )


def _state(event: Event | None, begun: bool, live: bool, journaled: bool) -> State:
    if event and event.kind == "failed":
        return "failed"
    if live:
        # Without a journal it is a search by itself.
        return "running" if event or (begun and not journaled) else "waiting"
    return "interrupted" if event or begun else "waiting"


def _changed_s(folder: Path) -> float | None:
    try:
        return (folder / ROWS_FILE).stat().st_mtime
    except FileNotFoundError:  # compacted this very moment
        return None


def _overall(runs: Sequence[RunStatus], live: bool) -> State:
    states = {run.state for run in runs}
    if live or states == {"finished"}:
        return "running" if live else "finished"
    return "failed" if states & {"failed", "damaged"} else "interrupted"


def _forecast(runs: Sequence[RunStatus]) -> float | None:
    works = [
        RunProgress(run.searcher, run.calls, 0 if run.state in _ENDED else run.budget - run.calls, run.wall_s)
        for run in runs
    ]
    return remaining_s(works, parallel=sum(run.state == "running" for run in runs))
