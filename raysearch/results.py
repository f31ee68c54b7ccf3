"""Reads result folders: one run or a whole study, finished, broken off or still running."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysearch.errors import InputError
from raysearch.files import read_json
from raysearch.run import HEAD_FILE, finished_summary
from raysearch.study import RUNS_FOLDER, STUDY_FILE

if TYPE_CHECKING:
    import pandas as pd


_DEGREES = ("tp", "ep", "pp", "batch")


def study_frame(directory: str | Path) -> pd.DataFrame:
    """One row per run of a results folder, ready for pandas.

    Columns: run_id, workload, hardware, searcher, seed, budget, calls, unique_calls, feasible_calls, best
    (tokens/s/GPU), optimum (f*), fraction_of_optimum, wall_s, strategy, digest, config_hash, version, complete.
    A run that is not complete has what its rows tell so far.

    Raises:
        InputError: The folder holds no results.
    """
    import pandas as pd

    return pd.DataFrame(read_runs(Path(directory)))


def read_runs(directory: Path) -> list[dict[str, Any]]:
    """The same as `study_frame`, as dictionaries.

    Raises:
        InputError: The folder holds no results.
    """
    return [_read_run(folder) for folder in run_folders(directory)]


def run_folders(directory: Path) -> list[Path]:
    """The run folders under a study's folder, or the folder itself if it is a run's.

    Raises:
        InputError: The folder holds no results.
    """
    if (directory / HEAD_FILE).is_file():
        return [directory]
    folders = sorted(path.parent for path in (directory / RUNS_FOLDER).glob(f"*/{HEAD_FILE}"))
    if not folders:
        raise InputError(f"no results in {directory}: expected the folder of a study or of a search")
    return folders


def planned_runs(directory: Path) -> int:
    """How many runs the folder is meant to hold when all is done."""
    study = directory / STUDY_FILE
    return len(read_json(study)["runs"]) if study.is_file() else 1


def read_spec(directory: Path, run_id: str) -> dict[str, Any]:
    """The fields of the `RunSpec` of one of the runs in a results folder."""
    heads = (read_json(folder / HEAD_FILE) for folder in run_folders(directory))
    return next(head["spec"] for head in heads if head["run_id"] == run_id)


def _read_run(folder: Path) -> dict[str, Any]:
    finished = finished_summary(folder)
    return {**finished, "complete": True} if finished else {**_read_rows_so_far(folder), "complete": False}


def _read_rows_so_far(folder: Path) -> dict[str, Any]:
    from envs.rows import read_rows

    head = read_json(folder / HEAD_FILE)
    spec, optimum = head["spec"], head["optimum"]
    try:
        rows = read_rows(folder)
    except FileNotFoundError:  # begun this very moment
        rows = None
    if rows is None or rows.empty:
        found: dict[str, Any] = {"calls": 0, "unique_calls": 0, "feasible_calls": 0, "best": 0.0, "strategy": None}
    else:
        found = _tally(rows)
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
        "digest": None,
        "config_hash": head["config_hash"],
        "version": head["version"],
    }


def _tally(rows: pd.DataFrame) -> dict[str, Any]:
    best_first = rows.loc[rows["feasible"]].sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    found = [
        {**{name: int(row[name]) for name in _DEGREES}, "dims": [int(choice) for choice in row["dims"].split(",")]}
        for row in best_first.head(1).to_dict("records")
    ]
    return {
        "calls": len(rows),
        "unique_calls": len(rows.drop_duplicates([*_DEGREES, "dims"])),
        "feasible_calls": len(best_first),
        "best": float(rows["best_so_far"].iloc[-1]),
        "strategy": found[0] if found else None,
    }
