"""Reads result folders: one run or a whole study, finished, broken off or still running."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np

from envs.calls import CallRow, parse_dims_text
from envs.chain import Chain, DamagedRows, Seal, follow
from envs.recording import saved_rows
from envs.rows import COMPACT_FILE, ROWS_FILE, file_digest, read_rows, rows_digest, whole_rows
from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, as_strategy, read_record
from raysearch.runs.checkpoint import CHECKPOINT_FILE, load_checkpoint, read_checkpoint
from raysearch.runs.records import HEAD_FILE, STUDY_FILE, SUMMARY_FILE, RunHead, RunRow, RunSpec, StudyRecord
from raysearch.runs.run import finished_summary
from raysearch.studies.study_file import RUNS_FOLDER, run_dir
from sim.canonical import canonical
from sim.config.reading import Unreadable
from sim.json_object import JsonFields, JsonObject
from sim.strategy import FIRST_DECLARED, Strategy

if TYPE_CHECKING:
    import pandas as pd


FILES_OF_A_RUN = (HEAD_FILE, SUMMARY_FILE, COMPACT_FILE, ROWS_FILE, CHECKPOINT_FILE)
_DEGREES = ("tp", "ep", "pp", "batch")


def study_frame(directory: str | Path) -> pd.DataFrame:
    """One row per run of a results folder, ready for pandas.

    Columns: run_id, workload, hardware, searcher, seed, budget, calls, unique_calls, feasible_calls, best
    (tokens/s/GPU), optimum (f*), fraction_of_optimum, wall_s, improvements ([call, wall_s] of each), answers_differ
    (of a plugged-in simulator, when strategies were evaluated again), strategy, digest, config_hash, version, complete;
    noise, where a plugged-in simulator declares that its answers are noisy.
    A run that is not complete has what its rows show so far.

    Raises:
        InputError: The folder holds no results, or damaged ones.
    """
    import pandas as pd

    return pd.DataFrame(read_study_runs(Path(directory)))


@dataclass(frozen=True)
class Survey:
    """What a results folder holds.

    Attributes:
        runs: Those that can be trusted, with the columns of `study_frame`.
        damaged: What is wrong with the others, by run id.
    """

    runs: list[RunRow]
    damaged: dict[str, str]


def read_study_runs(directory: Path) -> list[RunRow]:
    """The same as `study_frame`, as dictionaries.

    Raises:
        InputError: The folder holds no results, or damaged ones.
    """
    found = survey(directory)
    for what in found.damaged.values():
        raise Damaged(what)
    return found.runs


def survey(directory: Path) -> Survey:
    """Reads every run of a results folder and checks that it is what was written, and belongs there.

    Raises:
        InputError: The folder holds no results, or what says which ones is damaged.
    """
    if os.path.lexists(directory / HEAD_FILE):
        check_regular(directory)
        return Survey([_read_run(directory)], {})
    if not os.path.lexists(directory / STUDY_FILE):
        raise InputError(f"no results in {directory}: expected the folder of a study or of a search")
    record = read_record(directory / STUDY_FILE, StudyRecord)
    runs: list[RunRow] = []
    wrong = {path.name: f"{path} is not a run of this study" for path in strangers(directory, record)}
    for run_id in sorted(set(record["runs"]) - wrong.keys()):
        try:
            if _has_begun(folder := run_dir(directory, run_id)):
                runs.append(_read_run(folder, record))
        except Damaged as damage:
            wrong[run_id] = damage.what
    if not runs and not wrong:
        raise InputError(f"no results in {directory}: no run has begun")
    return Survey(runs, wrong)


def check_run(folder: Path, run_id: str) -> None:
    """Makes sure that a run is what was written, as far as its files show by themselves: fast, for a look in passing.

    Raises:
        InputError: It is not.
    """
    if not _has_begun(folder):
        return
    head = checked_head(folder)
    if head["run_id"] != run_id:
        raise Damaged(f"{folder} is damaged: it contains run {head['run_id']}")
    if checked_summary(folder, head) is None:
        seal = _saved_rows(folder)  # before the rows, which may grow meanwhile
        try:
            made = whole_rows(folder, seal)
        except DamagedRows as error:
            raise Damaged(str(error)) from error
        if made is None and not (folder / COMPACT_FILE).is_file():
            raise Damaged(f"{folder} is damaged: its rows are gone")


def verify(directory: Path) -> Survey:
    """As `survey`, and works every run out again from its rows: of a finished one the digest, counts and best.

    Where answers are noisy the best is what the simulator and all answers tell: of that, whether it was called and kept
    all limits. Of a run under way its checkpoint is looked at too.

    Raises:
        InputError: See `survey`.
    """
    found = survey(directory)
    wrong: dict[str, str] = {}
    for run in found.runs:
        try:
            _verify_run(run, run_folder(directory, run["run_id"]))
        except Damaged as damage:
            wrong[run["run_id"]] = damage.what
    return Survey([run for run in found.runs if run["run_id"] not in wrong], {**found.damaged, **wrong})


def _verify_run(run: RunRow, folder: Path) -> None:
    head = read_record(folder / HEAD_FILE, RunHead)
    if not run["complete"]:
        check_resumable(folder, head)
        return
    rows = run_rows(folder)
    best = rows["tokens_per_s_per_gpu"].where(rows["feasible"], 0.0).cummax()
    if not best.equals(rows["best_so_far"]):
        raise Damaged(f"{folder} is damaged: its rows have another best so far than they make")
    improved = (np.flatnonzero(np.diff(best, prepend=0.0) > 0) + 1).tolist()
    recorded = {
        **_tally(folder, rows),
        "digest": f"sha256-{rows_digest(folder)}",
        "optimum": head["optimum"],
        "fraction_of_optimum": run["best"] / head["optimum"] if head["optimum"] else None,
        "version": head["version"],
    }
    if run.get("noise"):  # then they are of what is believed, see `RunSummary`, which says more than the rows
        del recorded["best"], recorded["strategy"]
        if run["strategy"] and as_strategy(run["strategy"]) not in _kept_limits(rows):
            raise Damaged(f"{folder} is damaged: none of its rows within all limits is the best of its summary")
    for name, value in recorded.items():
        if run[name] != value:
            raise Damaged(f"{folder} is damaged: its rows say {name} {value}, its summary {run[name]}")
    if [call for call, _ in run["improvements"] or []] != improved:
        raise Damaged(f"{folder} is damaged: its rows improve at other calls than its summary")


def _kept_limits(rows: pd.DataFrame) -> set[Strategy]:
    """Strategies that were called and kept all limits."""
    called = rows.loc[rows["feasible"], [*_DEGREES, "dims"]].drop_duplicates().to_dict("records")
    return {
        as_strategy({**{name: int(row[name]) for name in _DEGREES}, **parse_dims_text(row["dims"])}) for row in called
    }


def run_folder(directory: Path, run_id: str) -> Path:
    """Where one of the runs in a results folder lies: that of a search by itself is the folder."""
    return directory if os.path.lexists(directory / HEAD_FILE) else run_dir(directory, run_id)


def strangers(study: Path, record: JsonFields) -> list[Path]:
    """What lies among the runs of a study and is none of them; a link is none, wherever it leads.

    Raises:
        InputError: The runs lie behind a link, so in a folder that is not the study's.
    """
    folder = study / RUNS_FOLDER
    if folder.is_symlink():
        raise InputError(f"{folder} is a link: expected a folder; put what it leads to in its place")
    known = {run_id for run_id in record["runs"] if not (folder / run_id).is_symlink()}
    return sorted(path for path in folder.iterdir() if path.name not in known) if folder.is_dir() else []


def check_regular(folder: Path) -> None:
    """Makes sure that no file of a run is something else by that name: no pipe, no link.

    Raises:
        InputError: One is.
    """
    for name in FILES_OF_A_RUN:
        path = folder / name
        if os.path.lexists(path) and (path.is_symlink() or not os.path.isfile(path)):
            raise Damaged(f"{folder} is damaged: {name} is no regular file")


def _has_begun(folder: Path) -> bool:
    """Whether there is anything to read; a process may be killed before a new run has its first file."""
    check_regular(folder)
    rows = folder / ROWS_FILE
    return any((folder / name).is_file() for name in (HEAD_FILE, SUMMARY_FILE, COMPACT_FILE)) or (
        rows.is_file() and rows.stat().st_size > 0
    )


def run_rows(folder: Path, columns: Sequence[str] = CallRow._fields, *, seal: Seal | None = None) -> pd.DataFrame:
    """The calls of a run, one row each; see `envs.rows.read_rows`.

    Raises:
        InputError: They are damaged or gone.
    """
    try:
        return read_rows(folder, columns, seal=seal)
    except DamagedRows as error:
        raise Damaged(str(error)) from error
    except FileNotFoundError as error:
        raise Damaged(f"{folder} is damaged: {error}") from error


def planned_runs(directory: Path) -> int:
    """How many runs the folder is meant to hold when all is done."""
    study = directory / STUDY_FILE
    return len(read_record(study, StudyRecord)["runs"]) if os.path.lexists(study) else 1


def planned_budget(directory: Path, runs: Sequence[RunRow]) -> int:
    """Calls at which the runs of a folder are compared: the study's budget, or that of a run by itself."""
    study = directory / STUDY_FILE
    return read_record(study, StudyRecord)["study"]["budget"] if os.path.lexists(study) else runs[0]["budget"]


def read_spec(directory: Path, run_id: str) -> JsonObject:
    """The fields of the `RunSpec` of one of the runs in a results folder."""
    return read_record(run_folder(directory, run_id) / HEAD_FILE, RunHead)["spec"]


def _read_run(folder: Path, record: JsonFields | None = None) -> RunRow:
    head = checked_head(folder, record)
    finished = checked_summary(folder, head)
    if finished is None:
        return _read_rows_so_far(folder, head)
    return cast("RunRow", {**finished, "complete": True})  # as its schema has them


def checked_head(folder: Path, record: JsonFields | None = None) -> JsonObject:
    """What a run is; of a study, by its record, the run that belongs into the folder.

    Raises:
        InputError: It is damaged, or of another folder.
    """
    if not (folder / HEAD_FILE).is_file():
        raise Damaged(f"{folder} is damaged: it has no {HEAD_FILE}")
    head = read_record(folder / HEAD_FILE, RunHead)
    if record is None:
        return head
    run_id = head["run_id"]
    spec = RunSpec.of_record(head["spec"])
    ours = record["specs"].get(folder.name) == spec.digest and record["hashes"].get(head["workload"])
    if run_id != folder.name or not ours or ours != head["config_hash"]:
        raise Damaged(f"{folder} is damaged: it contains run {run_id} of another study or folder")
    return head


def checked_summary(folder: Path, head: JsonFields) -> JsonObject | None:
    """What a finished run found, if it is of this run and of the rows that lie beside it; None of one under way.

    Raises:
        InputError: It is not.
    """
    finished = finished_summary(folder)
    if finished is None:
        return None
    own = {**head["spec"], **head}
    for name in ("run_id", "workload", "hardware", "config_hash", "searcher", "seed", "budget"):
        if finished[name] != own[name]:
            raise Damaged(f"{folder / SUMMARY_FILE} is damaged: it is of {name} {finished[name]}, not {own[name]}")
    try:
        same = file_digest(folder / COMPACT_FILE, finished["calls"]) == finished["rows_sha256"]
    except FileNotFoundError:
        raise Damaged(f"{folder} is damaged: it is finished, but has no {COMPACT_FILE}") from None
    except DamagedRows as error:
        raise Damaged(str(error)) from error
    if not same:
        raise Damaged(f"{folder / COMPACT_FILE} is damaged: it is not the file that the run ended with")
    if (recorded := _followed(folder)) and (recorded.lines, f"sha256-{recorded.digest}") != (
        finished["calls"],
        finished["digest"],
    ):
        raise Damaged(f"{folder / ROWS_FILE} is damaged: it has other calls than the run ended with")
    return finished


def check_resumable(folder: Path, head: JsonFields) -> None:
    """Makes sure that a run under way can go on from its checkpoint, or has none.

    Rows behind the checkpoint are not looked at: they are made again.

    Raises:
        InputError: The checkpoint is damaged or another run's, or the rows are not those that it was made after.
    """
    path = folder / CHECKPOINT_FILE
    try:
        state = load_checkpoint(folder)
        if state is None:
            return
        seal = saved_rows(state["gate"])
        same = RunSpec.of_record(state["spec"]).digest == RunSpec.of_record(head["spec"]).digest
    except Unreadable as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged: it is of no run: {error}") from error
    if not same or state.get("config_hash") != head["config_hash"]:
        raise Damaged(f"{path} is damaged: it is of another run")
    if not (folder / COMPACT_FILE).is_file():  # rows that were compacted are looked at as they are expanded
        made = _followed(folder, seal, seal.lines if seal else None)
        if seal and (made is None or made.lines < seal.lines):
            raise Damaged(f"{folder} is damaged: the rows are gone that it was saved after")


def _followed(folder: Path, seal: Seal | None = None, most: int | None = None) -> Chain | None:
    """The JSON Lines of a run, each of which follows from those before it; None where there are none."""
    try:
        return follow(folder / ROWS_FILE, seal=seal, most=most)
    except FileNotFoundError:
        return None
    except DamagedRows as error:
        raise Damaged(str(error)) from error


def _read_rows_so_far(folder: Path, head: JsonFields) -> RunRow:
    spec, optimum = head["spec"], head["optimum"]
    seal = _saved_rows(folder)  # before the rows, which may grow meanwhile
    rows = run_rows(folder, seal=seal)
    if set(rows["run_id"]) - {head["run_id"]}:
        raise Damaged(f"{folder} is damaged: its rows are of run {rows['run_id'].iloc[0]}")
    found = _tally(folder, rows)
    return {
        "run_id": head["run_id"],
        "workload": head["workload"],
        "hardware": head["hardware"],
        "searcher": spec["searcher"],
        "seed": spec["seed"],
        "budget": spec["budget"],
        **found,
        "optimum": optimum,
        "fraction_of_optimum": found["best"] / optimum if optimum else None,
        "wall_s": None,
        "improvements": None,
        "answers_differ": None,
        "digest": None,
        "config_hash": head["config_hash"],
        "version": head["version"],
        "complete": False,
    }


def _saved_rows(folder: Path) -> Seal | None:
    checkpoint = read_checkpoint(folder)
    try:
        return saved_rows(checkpoint["gate"]) if checkpoint else None
    except (KeyError, TypeError) as error:
        raise Damaged(f"{folder / CHECKPOINT_FILE} is damaged: it is of no run") from error


class Tally(TypedDict):
    """What a run's rows show."""

    calls: int
    unique_calls: int
    feasible_calls: int
    best: float
    strategy: JsonObject | None


def _tally(folder: Path, rows: pd.DataFrame) -> Tally:
    try:
        return _counted(rows)
    except ValueError as error:
        raise Damaged(f"{folder} is damaged: its rows have no strategies: {error}") from error


def _counted(rows: pd.DataFrame) -> Tally:
    best_first = rows.loc[rows["feasible"]].sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    found = [
        {**{name: int(row[name]) for name in _DEGREES}, **parse_dims_text(row["dims"])}
        for row in best_first.head(1).to_dict("records")
    ]
    return {
        "calls": len(rows),
        "unique_calls": _unique(rows),
        "feasible_calls": len(best_first),
        "best": float(rows["best_so_far"].to_numpy().max(initial=0.0)),
        "strategy": found[0] if found else None,
    }


def _unique(rows: pd.DataFrame) -> int:
    """Strategies that differ in what they do, which with tp = 1 not all do that differ in their dims."""
    different = rows.drop_duplicates([*_DEGREES, "dims"])
    alone = different.loc[different["tp"] == 1]
    # Of most, all of a search's where a million are read, the text alone says that the dims decide nothing.
    beyond_dims = alone["dims"].str.contains(rf";|[{FIRST_DECLARED}-9]|\d\d")
    folded = {
        canonical(as_strategy({**{name: int(row[name]) for name in _DEGREES}, **parse_dims_text(row["dims"])}))
        for row in alone.loc[beyond_dims].to_dict("records")
    }
    return len(different) - len(alone) + len(alone.loc[~beyond_dims].drop_duplicates([*_DEGREES])) + len(folded)
