"""A study: many runs defined in one TOML file, and the layout of their folder.

<study folder>/
  study.json         what is run: the file's content with paths made absolute, the optima, the version
  journal.jsonl      which run started and ended when, see raysearch.studies.journal
  runs/<run id>/     one folder per run, see raysearch.runs.run
  tune/              Ray Tune's own files: its snapshot for a resume, TensorBoard logs, result.json
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from raysearch.base.errors import InputError
from raysearch.base.file_io import Damaged, anchored, read_record, write_record
from raysearch.base.limits import (
    LARGEST_BUDGET,
    LARGEST_SEED,
    LONGEST_TIMEOUT_S,
    MOST_CPUS,
    MOST_RETRIES,
    MOST_WORKERS,
)
from raysearch.base.version import __version__
from raysearch.runs.records import STUDY_FILE, OnFailure, RunSpec, StudyRecord, check_code, run_name
from raysearch.searchers.registry import check_options, run_budget
from raysearch.simulators.opening import Patience, check_workers, searched_space
from raysearch.studies.published_figures import PublishedFigures
from sim.config.catalog import load_workload
from sim.config.code import source_digests
from sim.config.files import config_path, read_config
from sim.config.mistakes import LABEL_PATTERN
from sim.json_object import JsonObject
from sim.workload import SpaceName, Workload

RUNS_FOLDER = "runs"
TUNE_FOLDER = "tune"


def _some(values: Sized) -> Sized:
    if not values:
        raise ValueError("expected at least one")
    return values


# Not Field(min_length=1): beside an item that is wrong it would complain of the length, too.
Names = Annotated[tuple[str, ...], AfterValidator(_some)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED, strict=True)]
Seeds = Annotated[tuple[Seed, ...], AfterValidator(_some)]


class Tuning(BaseModel):
    """The section [tuning] of a study file: what the searchers' options were chosen on, which a study must not report.

    Attributes:
        workloads: Names in configs/workloads, or paths (tried beside the study file first).
        seeds: Seeds of those runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workloads: Names
    seeds: Seeds


class StudyFile(BaseModel):
    """The schema of configs/studies/*.toml.

    Attributes:
        name: Names the default results folder.
        workloads: Names in configs/workloads, or paths (tried beside the study file first).
        searchers: Registered names, or module:Class of your own.
        seeds: One run per workload, searcher and seed.
        budget: Calls per run; a heuristic that sweeps all degrees makes as many as there are.
        hardware: Replaces every workload's hardware.
        space: Replaces every workload's strategy space: paper, joint or extended.
        simulator: A plugged-in black box instead of our own simulator, see docs/guides/black_boxes.md.
        workers: Processes that evaluate for each run, beside the one that searches; by default 1 for a plugged-in
            black box and none for our own simulator.
        timeout_s: Longest wait for an answer of a worker.
        retries: How often a failing call is tried again before its run stops.
        cpus_per_worker, gpus_per_worker: Number that Ray reserves for each worker; fractions are allowed.
        on_failure: Whether a strategy on which a plugged-in black box fails for good stops its run or is infeasible.
        cpus_per_run: CPUs that Ray reserves for the searching part of a run, which computes on one.
        report_every: Calls between two reports to Ray Tune, and at least as many between two checkpoints.
        options: Options by searcher; those left out have the searcher's preset.
        tuning: What the presets were tuned on, if they were.
        published: Figures of others that `raysearch report` prints beside the study's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=LABEL_PATTERN)]
    workloads: Names
    searchers: Names
    seeds: Seeds
    budget: Annotated[int, Field(ge=1, strict=True)]
    hardware: str | None = None
    space: SpaceName | None = None
    simulator: str | None = None
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS, strict=True)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S)] = Patience.timeout_s
    retries: Annotated[int, Field(ge=0, le=MOST_RETRIES, strict=True)] = Patience.retries
    cpus_per_worker: Annotated[float, Field(ge=0, le=MOST_CPUS)] = Patience.cpus_per_worker
    gpus_per_worker: Annotated[float, Field(ge=0, le=MOST_CPUS)] = Patience.gpus_per_worker
    on_failure: OnFailure = "stop"
    cpus_per_run: Annotated[int, Field(ge=1, le=MOST_CPUS, strict=True)] = 1
    report_every: Annotated[int, Field(ge=1, le=LARGEST_BUDGET, strict=True)] = 500
    options: dict[str, JsonObject] = Field(default_factory=dict)
    tuning: Tuning | None = None
    published: PublishedFigures | None = None

    @property
    def workers_per_run(self) -> int:
        """Processes that evaluate for each run."""
        return int(self.simulator is not None) if self.workers is None else self.workers

    @property
    def patience(self) -> Patience:
        """With the workers."""
        return Patience(self.timeout_s, self.retries, self.cpus_per_worker, self.gpus_per_worker)


@dataclass(frozen=True)
class Study:
    """A checked study: every name in it exists and every run can be built.

    Attributes:
        file: What the user wrote, with paths made absolute.
        workloads: By the text that stands for them in `file`.
    """

    file: StudyFile
    workloads: Mapping[str, Workload]

    def specs(self) -> dict[str, RunSpec]:
        """All runs by run id, workloads in turn: whenever a study is stopped, each has had its share."""
        return {
            run_name(workload.name, searcher, seed): RunSpec(
                workload=text,
                searcher=searcher,
                seed=seed,
                budget=run_budget(searcher, searched_space(workload, self.file.simulator, searcher), self.file.budget),
                hardware=self.file.hardware,
                options=self.file.options.get(searcher, {}),
                simulator=self.file.simulator,
                workers=self.file.workers_per_run,
                space=self.file.space,
                on_failure=self.file.on_failure,
            )
            for seed in self.file.seeds
            for searcher in self.file.searchers
            for text, workload in self.workloads.items()
        }


def load_study(name_or_path: str | Path, **instead: Any) -> Study:
    """Reads and checks a study file.

    Args:
        name_or_path: A name in configs/studies or the path of a TOML file.
        instead: Values that replace the file's; None leaves it as it is.

    Raises:
        CatalogError, InputError: A name, value or option that cannot be run; the message says which and why.

    >>> load_study("quickstart").file.name
    'quickstart'
    """
    path = config_path("studies", name_or_path)
    file = read_config(path, StudyFile)
    file = file.model_copy(update={key: value for key, value in instead.items() if value is not None})
    try:
        return check_study(_with_absolute_paths(file, path.parent))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def check_study(file: StudyFile) -> Study:
    """A study whose names, values and options have been tried.

    Raises:
        CatalogError, InputError: As `load_study`.
    """
    for values, what in ((file.workloads, "workloads"), (file.searchers, "searchers"), (file.seeds, "seeds")):
        if len(set(values)) < len(values):
            raise InputError(f"{what} must not repeat, got {list(values)}")
    _check_searchers(file)
    workloads = {text: load_workload(text, file.hardware, file.space) for text in file.workloads}
    names = [workload.name for workload in workloads.values()]
    if len(set(names)) < len(names):
        raise InputError(f"two workloads of a study must not share a name, got {names}")
    _check_published(file, names)
    if file.tuning:
        _check_disjoint(file.tuning, file, workloads)
    check_workers(file.simulator, file.workers_per_run)
    for workload in workloads.values():
        searched_space(workload, file.simulator, file.searchers[0])  # the simulator is there, and fits
    return Study(file, workloads)


def write_study(study: Study, optima: Mapping[str, float | None], out: Path) -> None:
    """Creates the study's folder with the file that says what is run in it."""
    content = {
        "study": study.file.model_dump(mode="json"),
        "runs": list(study.specs()),
        "budgets": {run_id: spec.budget for run_id, spec in study.specs().items()},
        "specs": {run_id: spec.digest for run_id, spec in study.specs().items()},
        "optima": dict(optima),
        "hashes": _hashes(study),
        "version": __version__,
        "code": source_digests(
            *study.file.searchers, study.file.simulator, *(each.declarations for each in study.workloads.values())
        ),
    }
    write_record(out / STUDY_FILE, content)


def has_begun(out: Path) -> bool:
    """Whether the folder holds the beginnings of a study."""
    return os.path.lexists(out / STUDY_FILE)


def check_study_code(out: Path, *, trusted: bool) -> None:
    """See `raysearch.runs.records.check_code`. Raises: InputError."""
    if has_begun(out):
        check_code(out / STUDY_FILE, read_record(out / STUDY_FILE, StudyRecord).get("code", {}), trusted=trusted)


def check_same_study(study: Study, out: Path) -> None:
    """Makes sure that a folder holds the beginnings of this very study.

    Raises:
        InputError: There is nothing to go on with, or it is something else.
    """
    if not has_begun(out):
        raise InputError(f"nothing to resume in {out}: it has no {STUDY_FILE}")
    kept = read_record(out / STUDY_FILE, StudyRecord)
    now = study.file.model_dump(mode="json")
    changed = sorted(key for key in now if kept["study"].get(key, StudyFile.model_fields[key].default) != now[key])
    if changed:
        raise InputError(
            f"{out} was started with other values of {', '.join(changed)}: resume with the same study file"
        )
    specs = study.specs()
    planned = {run_id: (spec.digest, spec.budget) for run_id, spec in specs.items()}
    if {run_id: (kept["specs"].get(run_id), kept["budgets"].get(run_id)) for run_id in kept["runs"]} != planned:
        raise Damaged(f"{out / STUDY_FILE} is damaged: its runs are not those of its study")
    if kept["hashes"] != _hashes(study):
        raise InputError(f"a workload's configuration changed since {out} was started; bring it back, or start again")


def run_dir(out: Path, run_id: str) -> Path:
    """The folder of one run of a study."""
    return out / RUNS_FOLDER / run_id


def _hashes(study: Study) -> dict[str, str]:
    return {workload.name: workload.config_hash for workload in study.workloads.values()}


def _check_searchers(file: StudyFile) -> None:
    for name in file.searchers:
        check_options(name, file.options.get(name, {}))
    for name in file.options:
        if name not in file.searchers:
            raise InputError(f"options for {name!r}, which is not among the searchers {list(file.searchers)}")


def _check_disjoint(tuning: Tuning, file: StudyFile, workloads: Mapping[str, Workload]) -> None:
    """Refuses to report what searchers were tuned on; one workload under two names counts as one."""
    tuned = {load_workload(text, space=file.space).config_hash for text in tuning.workloads}
    names = [workload.name for workload in workloads.values() if workload.config_hash in tuned]
    names += [workload.name for workload in workloads.values() if workload.name in tuning.workloads]
    if names:
        raise InputError(f"workloads {sorted(set(names))} are named under [tuning]: report others than were tuned on")
    if seeds := sorted(set(file.seeds) & set(tuning.seeds)):
        raise InputError(f"seeds {seeds} are named under [tuning]: report others than were tuned on")


def _check_published(file: StudyFile, workloads: Sequence[str]) -> None:
    if file.published is None:
        return
    compared = {name for ratios in file.published.ratios.values() for name in ratios}
    for values, known, what in (
        (file.published.ratios, workloads, "workload"),
        ((*file.published.bases, *sorted(compared)), file.searchers, "searcher"),
    ):
        for name in values:
            if name not in known:
                raise InputError(f"published: {what} {name!r} is not among the study's, {list(known)}")


def _with_absolute_paths(file: StudyFile, folder: Path) -> StudyFile:
    hardware = anchored("hardware", file.hardware, beside=folder) if file.hardware else None
    workloads = tuple(anchored("workloads", text, beside=folder) for text in file.workloads)
    tuning = file.tuning
    if tuning:
        tuned = tuple(anchored("workloads", text, beside=folder) for text in tuning.workloads)
        tuning = tuning.model_copy(update={"workloads": tuned})
    return file.model_copy(update={"hardware": hardware, "workloads": workloads, "tuning": tuning})
