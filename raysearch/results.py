"""Reads result folders: one run or a whole study, finished, broken off or still running."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.rows import CallRow, DamagedRows, read_rows
from raysearch.checkpoint import read_checkpoint
from raysearch.errors import InputError
from raysearch.files import damaged, read_json
from raysearch.records import HEAD_FILE, STUDY_FILE, RunHead, StudyRecord
from raysearch.run import finished_summary
from raysearch.study import RUNS_FOLDER

if TYPE_CHECKING:
    import pandas as pd


_DEGREES = ("tp", "ep", "pp", "batch")


def study_frame(directory: str | Path) -> pd.DataFrame:
    """One row per run of a results folder, ready for pandas.

    Columns: run_id, workload, hardware, searcher, seed, budget, calls, unique_calls, feasible_calls, best
    (tokens/s/GPU), optimum (f*), fraction_of_optimum, wall_s, improvements ([call, wall_s] of each), strategy, digest,
    config_hash, version, complete.
    A run that is not complete has what its rows tell so far.

    Raises:
        InputError: The folder holds no results, or damaged ones.
    """
    import pandas as pd

    return pd.DataFrame(read_runs(Path(directory)))


def read_runs(directory: Path) -> list[dict[str, Any]]:
    """The same as `study_frame`, as dictionaries.

    Raises:
        InputError: The folder holds no results, or damaged ones.
    """
    return [_read_run(folder) for folder in run_folders(directory)]


def run_folders(directory: Path) -> list[Path]:
    """The run folders under a study's folder, or the folder itself if it is a run's.

    Raises:
        InputError: The folder holds no results.
    """
    folders = [directory] if os.path.isfile(directory / HEAD_FILE) else _runs_of_study(directory)
    if not folders:
        raise InputError(f"no results in {directory}: expected the folder of a study or of a search")
    return folders


def _runs_of_study(directory: Path) -> list[Path]:
    runs = directory / RUNS_FOLDER
    return sorted(path.parent for path in runs.glob(f"*/{HEAD_FILE}")) if os.path.isdir(runs) else []


def check_results(study: Path) -> None:
    """Reads all that a study's folder holds, so that damage is told before hours are spent on the rest.

    Raises:
        InputError: Something is damaged. A damaged checkpoint is only logged: its run starts again.
    """
    for folder in _runs_of_study(study):
        run, rows = _read_run(folder), run_rows(folder)
        if len(rows) != run["calls"]:
            raise damaged(f"{folder} is damaged: it holds {len(rows)} rows of {run['calls']} calls")
        read_checkpoint(folder)


def run_rows(folder: Path, columns: Sequence[str] = CallRow._fields) -> pd.DataFrame:
    """The calls of a run, one row each; see `envs.rows.read_rows`.

    Raises:
        InputError: They are damaged or gone.
    """
    try:
        return read_rows(folder, columns)
    except DamagedRows as error:
        raise damaged(str(error)) from error
    except FileNotFoundError as error:
        raise damaged(f"{folder} is damaged: {error}") from error


def planned_runs(directory: Path) -> int:
    """How many runs the folder is meant to hold when all is done."""
    study = directory / STUDY_FILE
    return len(read_json(study, StudyRecord)["runs"]) if study.is_file() else 1


def planned_budget(directory: Path, runs: Sequence[Mapping[str, Any]]) -> int:
    """Calls at which the runs of a folder are compared: the study's budget, or that of a run by itself."""
    study = directory / STUDY_FILE
    return read_json(study, StudyRecord)["study"]["budget"] if study.is_file() else runs[0]["budget"]


def read_spec(directory: Path, run_id: str) -> dict[str, Any]:
    """The fields of the `RunSpec` of one of the runs in a results folder."""
    heads = (read_json(folder / HEAD_FILE, RunHead) for folder in run_folders(directory))
    return next(head["spec"] for head in heads if head["run_id"] == run_id)


def _read_run(folder: Path) -> dict[str, Any]:
    head, finished = read_json(folder / HEAD_FILE, RunHead), finished_summary(folder)
    if finished is None:
        return {**_read_rows_so_far(folder, head), "complete": False}
    return {"improvements": None, **finished, "complete": True}  # older results hold no improvements


def _read_rows_so_far(folder: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    spec, optimum = head["spec"], head["optimum"]
    found = _tally(run_rows(folder))
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
        "digest": None,
        "config_hash": head["config_hash"],
        "version": head["version"],
    }


def _tally(rows: pd.DataFrame) -> dict[str, Any]:
    from envs.rows import parse_dims_text

    best_first = rows.loc[rows["feasible"]].sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    found = [
        {**{name: int(row[name]) for name in _DEGREES}, **parse_dims_text(row["dims"])}
        for row in best_first.head(1).to_dict("records")
    ]
    return {
        "calls": len(rows),
        "unique_calls": len(rows.drop_duplicates([*_DEGREES, "dims"])),
        "feasible_calls": len(best_first),
        "best": float(rows["best_so_far"].to_numpy().max(initial=0.0)),
        "strategy": found[0] if found else None,
    }
