"""The JSON files of a results folder: what stands in them, checked whenever they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, field_validator

from envs.strategy_env import brief
from raysearch.described import workload_of
from raysearch.errors import InputError
from raysearch.limits import LARGEST_BUDGET, LARGEST_SEED, MOST_WORKERS
from sim.strategy import Strategy
from sim.workload import GroupChoices, SpaceName, Workload

HEAD_FILE = "run.json"
SUMMARY_FILE = "summary.json"
STUDY_FILE = "study.json"
SAVE_EVERY_S = 2.0
"""[assumed] Work that a run may lose with its process; so often, PPO's 6.6 MB take 1 % of its time."""
OnFailure = Literal["stop", "infeasible"]

WORKLOAD_OPTIONS = ("hardware", "space", "margin", "engine", "groups", "any_degrees")
"""Options of a workload for which a spec has fields, since studies have them too; the others are in `described`."""


@dataclass(frozen=True)
class RunSpec:
    """What makes a run: equal specs give equal calls.

    Attributes:
        workload: Name in configs/workloads or the path of a TOML file; a mere name where `described` has a model.
        searcher: Registered name.
        seed: From 0 to `LARGEST_SEED`.
        budget: Calls, at least 1.
        hardware: Replaces the workload's hardware: a name or a path.
        options: Of the searcher; what is left out takes its preset.
        simulator: Name of a plugged-in black box, see `raysearch.simulators.plugin`; None for our own.
        workers: Processes that evaluate; 0 evaluates where the searcher runs. It decides how far ahead the searcher
            is asked, and so what it calls.
        space: Replaces the workload's strategy space.
        margin: Replaces the share of SLO and memory that the workload keeps free.
        on_failure: Whether a strategy on which a plugged-in black box fails for good stops the run or is infeasible.
        engine: Replaces the workload's inference engine, and its space unless one is given.
        groups: Replaces whether kinds of layers share the choices of their ops.
        any_degrees: Degrees of which every number is searched: "pp", "ep" or "ep,pp".
        described: What other options of the command line say of the workload, see `raysearch.described.workload_of`:
            with a model among them all that a file would say, else they replace keys of the file.
    """

    workload: str
    searcher: str
    seed: int
    budget: int
    hardware: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    simulator: str | None = None
    workers: int = 0
    space: SpaceName | None = None
    margin: float | None = None
    on_failure: OnFailure = "stop"
    engine: str | None = None
    groups: GroupChoices | None = None
    any_degrees: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Workload:
        """The workload, with what the spec replaces.

        Raises:
            CatalogError: An unknown name or an unusable file.
        """
        options = {name: getattr(self, name) for name in WORKLOAD_OPTIONS}
        named = {} if "model" in self.described else {"workload": self.workload}
        return workload_of({**named, **options, **self.described})

    @property
    def in_flight(self) -> int:
        """Most calls asked for and not told yet: one more than workers, so that none waits for the searcher."""
        return self.workers + 1

    @property
    def digest(self) -> str:
        """Tells specs apart; those that choose nothing new as they were before it could be chosen."""
        fields = asdict(self)
        usual = {"on_failure": "stop", "engine": None, "groups": None, "any_degrees": None, "described": {}}
        for name, value in usual.items():
            if fields[name] == value:
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise InputError(f"budget must be at least 1 call, got {self.budget}")
        if self.budget > LARGEST_BUDGET:
            raise InputError(
                f"budget must be at most {LARGEST_BUDGET:,} calls, got {brief(str(self.budget))}: their rows alone "
                f"would take {LARGEST_BUDGET * 300 / 1e9:,.0f} GB and the fastest searcher days"
            )
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed must be at least 0 and below 2**63, got {self.seed}")
        if not 0 <= self.workers <= MOST_WORKERS:
            raise InputError(f"workers must be 0 to {MOST_WORKERS:,}, got {brief(str(self.workers))}")
        if self.on_failure != "stop" and self.simulator is None:
            raise InputError(
                f"on_failure = {self.on_failure!r} is for plugged-in simulators: our own fails by a bug, "
                "which is never an infeasible strategy; leave it out, or give a simulator"
            )


class RunHead(BaseModel):
    """run.json: what the run is, from its first moment on."""

    run_id: str
    spec: RunSpec
    workload: str
    hardware: str
    config_hash: str
    optimum: float | None
    version: str


class RunSummary(BaseModel):
    """summary.json: what a finished run found.

    `improvements` are the calls that raised the best, each with the run's seconds when it was made; `digest` is of the
    calls, `rows_sha256` of the Parquet file that holds them; `answers_differ` is what a plugged-in black box said
    otherwise when it was asked anew.
    """

    run_id: str
    workload: str
    hardware: str
    searcher: str
    seed: int
    budget: int
    calls: int
    unique_calls: int
    feasible_calls: int
    best: float
    strategy: Strategy | None
    digest: str
    rows_sha256: str
    config_hash: str
    version: str
    optimum: float | None
    fraction_of_optimum: float | None
    wall_s: float
    improvements: list[tuple[int, float]]
    answers_differ: list[str] = []
    metrics: dict[str, Any]


class StudyPlan(BaseModel):
    """What is read again of a study's file; study.json holds all of it."""

    searchers: list[str]
    seeds: list[int]
    budget: int


class StudyRecord(BaseModel):
    """study.json: what is run in the folder; `budgets` and the specs' digests are by run id, `hashes` by workload."""

    study: StudyPlan
    runs: list[str]
    budgets: dict[str, int]
    specs: dict[str, str]
    optima: dict[str, float | None]
    hashes: dict[str, str]
    version: str

    @field_validator("runs")
    @classmethod
    def _are_names_of_folders(cls, runs: list[str]) -> list[str]:
        for run_id in runs:
            if run_id in ("", ".", "..") or "/" in run_id or "\0" in run_id:
                raise ValueError(f"a run's name names its folder, {run_id!r} cannot")
        return runs
