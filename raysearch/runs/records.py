"""The JSON files of a results folder: what stands in them, checked whenever they are read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from envs.strategy_env import brief
from raysearch.base.errors import InputError
from raysearch.base.limits import LARGEST_BUDGET, LARGEST_SEED, MOST_WORKERS
from sim.config.code import Origin, source_digests
from sim.config.question import Question, RecordedQuestion, Text, load_question
from sim.json_object import JsonFields, JsonObject
from sim.strategy import MOST_CHOICES
from sim.strategy_checks import LARGEST
from sim.workload import GroupChoices, SpaceName, Workload

HEAD_FILE = "run.json"
SUMMARY_FILE = "summary.json"
STUDY_FILE = "study.json"
SAVE_EVERY_S = 2.0
"""[assumed] Work that a run may lose with its process; so often, PPO's 6.6 MB take 1 % of its time."""
OnFailure = Literal["stop", "infeasible"]

CALLS_PER_WORKER = 4
"""Calls under way per worker."""

WORKLOAD_OPTIONS = ("hardware", "space", "margin", "engine", "groups", "any_degrees")
"""Options of a workload for which a spec has fields, since studies have them too; the others are in `question`."""

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
_SEARCHER = re.compile(rf"{_LABEL.pattern}(:{_LABEL.pattern})?")


def run_name(workload: str, searcher: str, seed: int) -> str:
    """What names a run and its folder.

    >>> run_name("gpt_moe_1_2t_16k", "examples.cross_entropy:CrossEntropy", 0)
    'gpt_moe_1_2t_16k-examples.cross_entropy.CrossEntropy-s0'
    """
    return f"{workload}-{searcher.replace(':', '.')}-s{seed}"


_NOTHING_ELSE = ConfigDict(extra="forbid")
"""Of specs: what a newer version's says beside could not be left out without making another run of it."""


@dataclass(frozen=True)
class RunSpec:
    """What makes a run: equal specs give equal calls.

    Attributes:
        workload: Name in configs/workloads or the path of a TOML file; a mere name where `question` has a model.
        searcher: Registered name, or "module:Class" of a user's own.
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
        question: Further fields of a `sim.config.question.Question`: with a model among them they define the
            workload, else they replace keys of its file. Earlier records call it `described`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _NOTHING_ELSE

    workload: str
    searcher: str
    seed: int
    budget: int
    hardware: str | None = None
    options: JsonFields = field(default_factory=dict)
    simulator: str | None = None
    workers: int = 0
    space: SpaceName | None = None
    margin: float | None = None
    on_failure: OnFailure = "stop"
    engine: str | None = None
    groups: GroupChoices | None = None
    any_degrees: str | None = None
    question: JsonFields = field(default_factory=dict)

    @classmethod
    def of_record(cls, content: JsonFields) -> RunSpec:
        """The spec of a record, of an earlier version too. Raises: InputError, TypeError (a field that is none)."""
        return cls(**renamed_fields(content))

    def load(self, origin: Origin = Origin.USER) -> Workload:
        """The workload, with what the spec replaces.

        Args:
            origin: Who named it; code that its file names is run for a user alone.

        Raises:
            CatalogError: An unknown name or an unusable file.
        """
        options = {name: getattr(self, name) for name in WORKLOAD_OPTIONS}
        named = {} if "model" in self.question else {"workload": self.workload}
        return load_question(Question.of_record({**named, **options, **self.question}), origin)

    @property
    def in_flight(self) -> int:
        """Most calls decided and not answered yet, so that no worker waits for a searcher that learns."""
        return CALLS_PER_WORKER * self.workers or 1

    @property
    def digest(self) -> str:
        """Identifies a spec; one that uses no newer option has the digest that it had before."""
        fields = asdict(self)
        fields["described"] = fields.pop("question")  # as it was called when the first digests were made
        usual = {"on_failure": "stop", "engine": None, "groups": None, "any_degrees": None, "described": {}}
        for name, value in usual.items():
            if fields[name] == value:
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def __post_init__(self) -> None:
        if not _SEARCHER.fullmatch(self.searcher):
            raise InputError(
                "expected a searcher's name, or module:Class, of letters, digits and _ . + -, got "
                f"{brief(self.searcher)!r}"
            )
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


def renamed_fields(spec: JsonFields) -> JsonObject:
    """The fields of a spec under their present names: earlier versions called `question` `described`."""
    return {"question" if name == "described" and "question" not in spec else name: spec[name] for name in spec}


Label = Annotated[str, Field(pattern=rf"^{_LABEL.pattern}$")]
"""A name that may stand in paths, tables and pictures."""
SearcherName = Annotated[str, Field(pattern=rf"^{_SEARCHER.pattern}$")]
Calls = Annotated[int, Field(ge=0, le=LARGEST_BUDGET)]
Budget = Annotated[int, Field(ge=1, le=LARGEST_BUDGET)]
RecordedSeed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Degree = Annotated[int, Field(ge=1, le=LARGEST)]
Figure = Annotated[float, Field(ge=0, le=1e15)]
"""[assumed] Tokens/s/GPU and the like; beyond it, sums and ratios might not be numbers any more."""
RecordedOptimum = Annotated[float, Field(ge=1e-9, le=1e15)]
RecordedSeconds = Annotated[float, Field(ge=0, le=1e12)]


class Record(BaseModel):
    """What records share: figures are finite. What a newer version has beside these keys does not matter."""

    model_config = ConfigDict(allow_inf_nan=False)


class StoredStrategy(Record):
    """A strategy as `raysearch.base.file_io.strategy_dict` has it."""

    model_config = ConfigDict(extra="forbid")

    tp: Degree
    ep: Degree
    pp: Degree
    batch: Degree
    dims: Annotated[list[Annotated[int, Field(ge=0, lt=MOST_CHOICES)]], Field(max_length=4096)]
    cp: Degree = 1
    dp: Degree | None = None
    vocabulary: Annotated[list[Annotated[int, Field(ge=0, lt=MOST_CHOICES)]], Field(max_length=3)] = []
    served: _StoredReplicas | None = None


class _StoredReplicas(Record):
    """How replicas serve together, as `raysearch.base.file_io.strategy_dict` has it.

    Attributes:
        replicas: Behind one router; of the decode pool, where there are two.
        chunk_tokens: Prompt tokens of a step at most; 0 computes prompts as the workload says.
        prefills: Replicas of a pool for prompts alone; 0 is none.
        prefill: The strategy of one of them.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: Degree
    chunk_tokens: Annotated[int, Field(ge=0, le=LARGEST)]
    prefills: Annotated[int, Field(ge=0, le=LARGEST)]
    prefill: StoredStrategy | None = None


class RunHead(Record):
    """run.json: what the run is, from its first moment on.

    Attributes:
        run_id: Names the run and its folder.
        spec: What makes the run; see below.
        workload: Its name.
        hardware: Its machine's name.
        config_hash: Digest of the workload, of its model and of its machine.
        optimum: The exact optimum, tokens/s/GPU; null where it is not known.
        version: Version of raysearch that began it.
        code: Digests of the source of what users named, by module:attribute.
    """

    run_id: Label
    spec: RunSpec
    workload: Label
    hardware: Label
    config_hash: Label
    optimum: RecordedOptimum | None
    version: Label
    code: dict[Text, Label] = Field(default_factory=dict)

    @field_validator("spec", mode="before")
    @classmethod
    def _has_a_question(cls, spec: Any) -> Any:
        return renamed_fields(cast("JsonObject", spec)) if isinstance(spec, dict) else spec

    @model_validator(mode="after")
    def _says_what_options_can(self) -> RunHead:
        RecordedQuestion.model_validate(dict(self.spec.question))
        return self


def check_code(path: Path, recorded: Mapping[str, str], *, trusted: bool) -> None:
    """Makes sure that a run continues with the code that it was begun with, as far as modules' files show.

    Args:
        path: The record, for the message.
        recorded: Digests by the names of functions, as its `code` has them.
        trusted: Whether a user vouches for other code.

    Raises:
        InputError: A file is another one.
    """
    for name, digest in {} if trusted else source_digests(*recorded).items():
        if digest != recorded[name]:
            raise InputError(
                f"the code of {name} has changed since {path} was begun (digest {digest}, then {recorded[name]}): "
                "restore it, or add --set trust_code if its answers are the same"
            )


class RunSummary(Record):
    """summary.json: what a finished run found.

    Attributes:
        run_id: Names the run and its folder.
        workload: Its name.
        hardware: Its machine's name.
        searcher: Registered name, or module:Class.
        seed: Random seed of the run.
        budget: Calls that it might make.
        calls: Calls that it made.
        unique_calls: Calls of different strategies.
        feasible_calls: Calls of strategies within the limits.
        best: Tokens/s/GPU of the best feasible strategy; 0 without one.
        strategy: The best feasible strategy; null without one.
        noise: Standard deviation of the log of an answer, as the black box declares it. Above 0, `strategy` and `best`
            are not those of the luckiest answer but of the evaluated strategy that is best given all answers.
        digest: Digest of the calls: equal runs have equal digests.
        rows_sha256: SHA-256 of the Parquet file of the calls.
        config_hash: Digest of the workload, of its model and of its machine.
        version: Version of raysearch that finished it.
        optimum: The exact optimum, tokens/s/GPU; null where it is not known.
        fraction_of_optimum: The best as a share of it.
        wall_s: Seconds that the run took, summed over stops and resumptions.
        improvements: Calls that raised the best, each with the run's seconds when it was made.
        answers_differ: Differences of a black box's answers when strategies were evaluated again.
        metrics: Figures that the searcher reports.
    """

    run_id: Label
    workload: Label
    hardware: Label
    searcher: SearcherName
    seed: RecordedSeed
    budget: Budget
    calls: Calls
    unique_calls: Calls
    feasible_calls: Calls
    best: Figure
    strategy: StoredStrategy | None
    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    digest: Label
    rows_sha256: Label
    config_hash: Label
    version: Label
    optimum: RecordedOptimum | None
    fraction_of_optimum: Figure | None
    wall_s: RecordedSeconds
    improvements: list[tuple[Calls, RecordedSeconds]]
    answers_differ: list[str] = Field(default_factory=list)
    metrics: JsonObject

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> RunSummary:
        if not max(self.unique_calls, self.feasible_calls) <= self.calls <= self.budget:
            raise ValueError(f"expected counts of calls within each other and the budget of {self.budget}")
        if self.strategy is None and self.best:
            raise ValueError(f"expected the strategy of the best, {self.best:g}")
        numbers = [call for call, _ in self.improvements]
        if numbers != sorted({*numbers}) or (numbers and not 1 <= numbers[0] <= numbers[-1] <= self.calls):
            raise ValueError(f"expected improvements at ascending calls from 1 to {self.calls}")
        return self


class RunRow(TypedDict):
    """A run, by the columns of `raysearch.studies.results.study_frame`."""

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
    optimum: float | None
    fraction_of_optimum: float | None
    wall_s: float | None
    improvements: list[tuple[int, float]] | None
    answers_differ: list[str] | None
    strategy: JsonObject | None
    noise: NotRequired[float]
    digest: str | None
    config_hash: str
    version: str
    complete: bool


class StudyPlan(Record):
    """What is read again of a study's file; study.json holds all of it.

    Attributes:
        searchers: Names, or module:Class.
        seeds: Of each searcher on each workload.
        budget: Calls of a run.
    """

    searchers: list[SearcherName]
    seeds: list[RecordedSeed]
    budget: Budget


class StudyRecord(Record):
    """study.json: what is run in the folder.

    Attributes:
        study: The file's content, paths made absolute.
        runs: Their ids, in the order in which they start.
        budgets: Calls of each run, by its id.
        specs: Digest of the spec of each run, by its id.
        optima: Exact optimum of each workload, tokens/s/GPU; null where it is not known.
        hashes: Digest of each workload, of its model and of its machine.
        version: Version of raysearch that began it.
        code: Digests of the source of what users named, by module:attribute.
    """

    study: StudyPlan
    runs: list[str]
    budgets: dict[Label, Budget]
    specs: dict[Label, Label]
    optima: dict[Text, RecordedOptimum | None]
    hashes: dict[Label, Label]
    version: Label
    code: dict[Text, Label] = Field(default_factory=dict)

    @field_validator("runs")
    @classmethod
    def _are_names_of_folders(cls, runs: list[str]) -> list[str]:
        if len(set(runs)) < len(runs):
            raise ValueError("a run's name stands twice")
        for run_id in runs:
            if not _LABEL.fullmatch(run_id):
                raise ValueError(f"a run's name names its folder, {brief(repr(run_id))} cannot")
        return runs
