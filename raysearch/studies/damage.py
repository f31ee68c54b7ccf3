"""Sets aside what cannot be resumed, so that it is made again; nothing is deleted."""

from __future__ import annotations

import os
from pathlib import Path

from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, aside, read_record
from raysearch.runs.checkpoint import CHECKPOINT_FILE
from raysearch.runs.records import HEAD_FILE, STUDY_FILE, SUMMARY_FILE, StudyRecord
from raysearch.studies.results import (
    FILES_OF_A_RUN,
    check_regular,
    check_resumable,
    checked_head,
    checked_summary,
    strangers,
)
from raysearch.studies.study_file import run_dir
from sim.json_object import JsonFields

DAMAGED_FOLDER = "damaged"
"""In the folder of the study, beside `runs`, or in that of the search."""


def set_aside_damaged(study: Path) -> dict[str, str]:
    """Moves the damaged runs of a study into `DAMAGED_FOLDER`; returns what is wrong with them, by run id.

    Of a run under way the rows behind its checkpoint are not looked at: they are made again.
    """
    record = read_record(study / STUDY_FILE, StudyRecord)
    wrong = {path.name: f"{path} is not a run of this study" for path in strangers(study, record)}
    for run_id in sorted(set(record["runs"]) - wrong.keys()):
        folder = run_dir(study, run_id)
        try:
            _check(folder, record)
        except Damaged as damage:
            wrong[run_id] = damage.what
    for run_id in wrong:
        run_dir(study, run_id).rename(_place(study, run_id))
    return wrong


def set_aside_damaged_search(folder: Path) -> str:
    """Moves the files of a damaged search into `DAMAGED_FOLDER`; returns what is wrong, or nothing."""
    files = [path for name in FILES_OF_A_RUN if os.path.lexists(path := folder / name)]
    try:
        _check(folder)
    except Damaged as damage:
        place = _place(folder, "search")
        place.mkdir()
        for path in files:
            path.rename(place / path.name)
        return damage.what
    return ""


def _check(folder: Path, record: JsonFields | None = None) -> None:
    """Makes sure that what there is of a run can be resumed. Raises: Damaged."""
    check_regular(folder)
    if any((folder / name).exists() for name in (HEAD_FILE, SUMMARY_FILE, CHECKPOINT_FILE)):
        head = checked_head(folder, record)
        if checked_summary(folder, head) is None:
            check_resumable(folder, head)


def _place(folder: Path, name: str) -> Path:
    place = folder / DAMAGED_FOLDER
    if place.is_symlink():  # what was handed would be put where it leads, where modules are looked for, say
        raise InputError(f"{place} is a link: expected a folder; remove it")
    place.mkdir(exist_ok=True)
    return aside(place / name)
