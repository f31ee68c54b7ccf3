"""Figures that someone published of a study's method, and ours beside them."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import RenderableType

from raysearch.base.file_io import Damaged, read_record
from raysearch.base.rich_tables import plain_table
from raysearch.runs.records import STUDY_FILE, RunRow, StudyRecord

_OVER_SEEDS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.mean, "best": max}


class PublishedFigures(BaseModel):
    """The section [published] of a study file: ratios of throughput.

    Attributes:
        source: Where they stand.
        statistic: Over seeds, before the ratio is taken.
        bases: Searchers that ours are divided by; the published ratios are to the first.
        ratios: Published, by name of workload and searcher; a text where the source gives no figure.
        note: What else a reader must know of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    statistic: Literal["mean", "best"]
    bases: Annotated[tuple[str, ...], Field(min_length=1)]
    ratios: dict[str, dict[str, float | str]]
    note: str = ""


class ComparedRatios(TypedDict):
    """Throughput of a searcher on a workload, its ratios to each base and their bounds, and what was published."""

    workload: str
    searcher: str
    throughput: float
    ratios: dict[str, dict[str, float | None]]
    published: float | str | None


def read_published(directory: Path) -> PublishedFigures | None:
    """What a study's folder says was published; None of a single run, or if it says nothing.

    Raises:
        InputError: The study's record is damaged.
    """
    path = directory / STUDY_FILE
    section = read_record(path, StudyRecord)["study"].get("published") if os.path.lexists(path) else None
    try:
        return PublishedFigures.model_validate_json(json.dumps(section), strict=True) if section else None
    except ValidationError as error:
        raise Damaged(f"{path} is damaged: its section published is {section}") from error


def beside_published(published: PublishedFigures, runs: Sequence[RunRow]) -> list[ComparedRatios]:
    """One row per workload and searcher, in the order of the runs.

    `throughput` is tokens/s/GPU over the seeds as the published statistic takes them; `ratios` holds, by base, ours
    and the `bound` that no searcher exceeds, f* over the base. Either is None without that base or without f*.

    Args:
        published: What to stand beside.
        runs: As `raysearch.studies.results.read_study_runs` gives them.
    """
    groups: dict[tuple[str, str], list[RunRow]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["searcher"]), []).append(run)
    over_seeds = _OVER_SEEDS[published.statistic]
    found = {key: over_seeds([run["best"] for run in group]) for key, group in groups.items()}
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    return [
        {
            "workload": workload,
            "searcher": searcher,
            "throughput": value,
            "ratios": {
                base: _ratio(value, groups[workload, searcher][0]["optimum"], found.get((workload, base)))
                for base in published.bases
            },
            "published": published.ratios.get(workload, {}).get(searcher),
        }
        for (workload, searcher), value in sorted(found.items(), key=lambda item: workloads.index(item[0][0]))
    ]


def _ratio(value: float, optimum: float | None, base: float | None) -> dict[str, float | None]:
    return {"ours": value / base if base else None, "bound": optimum / base if base and optimum else None}


def published_table(published: PublishedFigures, rows: Sequence[ComparedRatios]) -> RenderableType:
    """Ours and theirs, workload by workload."""
    lines: list[tuple[str, ...]] = []
    for workload, of_workload in groupby(rows, key=lambda row: row["workload"]):
        lines += [(workload,), *map(_line, of_workload)]
    columns = (f"{published.statistic}\ntok/s/GPU", *(f"x {base}\n(bound)" for base in published.bases))
    title = f"Beside {published.source}" + (f": {published.note}" if published.note else "")
    return plain_table(title, ("searcher", *columns, "published"), lines)


def _line(row: ComparedRatios) -> tuple[str, ...]:
    ratios = (f"{_figure(ratio['ours'])} ({_figure(ratio['bound'])})" for ratio in row["ratios"].values())
    published_value = row["published"]
    return (
        f"  {row['searcher']}",
        _figure(row["throughput"]),
        *ratios,
        published_value if isinstance(published_value, str) else _figure(published_value),
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
