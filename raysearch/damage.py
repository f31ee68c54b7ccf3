"""Sets aside what cannot be gone on with, so that it is made again; nothing is deleted."""

from __future__ import annotations

from pathlib import Path

from raysearch.files import Damaged, aside, read_record
from raysearch.records import HEAD_FILE, STUDY_FILE, SUMMARY_FILE, StudyRecord
from raysearch.results import FILES_OF_A_RUN, check_regular, checked_head, checked_summary, strangers
from raysearch.study import run_dir

DAMAGED_FOLDER = "damaged"
"""In the folder of the study, beside `runs`, or in that of the search."""


def set_aside_damaged(study: Path) -> dict[str, str]:
    """Moves the damaged runs of a study into `DAMAGED_FOLDER`; returns what is wrong with them, by run id.

    Of a run under way the rows are not looked at: it goes on from its checkpoint, which knows what they must be.
    """
    record = read_record(study / STUDY_FILE, StudyRecord)
    wrong = {path.name: f"{path} is not a run of this study" for path in strangers(study, record)}
    for run_id in record["runs"]:
        folder = run_dir(study, run_id)
        try:
            check_regular(folder)
            if (folder / HEAD_FILE).is_file() or (folder / SUMMARY_FILE).is_file():
                checked_summary(folder, checked_head(folder, record))
        except Damaged as damage:
            wrong[run_id] = damage.what
    for run_id in wrong:
        run_dir(study, run_id).rename(_place(study, run_id))
    return wrong


def set_aside_damaged_search(folder: Path) -> str:
    """Moves the files of a damaged search into `DAMAGED_FOLDER`; returns what is wrong, or nothing."""
    files = [path for name in FILES_OF_A_RUN if (path := folder / name).exists()]
    try:
        check_regular(folder)
        if files:
            checked_summary(folder, checked_head(folder))
    except Damaged as damage:
        place = _place(folder, "search")
        place.mkdir()
        for path in files:
            path.rename(place / path.name)
        return damage.what
    return ""


def _place(folder: Path, name: str) -> Path:
    (folder / DAMAGED_FOLDER).mkdir(exist_ok=True)
    return aside(folder / DAMAGED_FOLDER / name)
