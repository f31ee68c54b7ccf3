"""Fleet files: models with their requests, and the GPUs that serve them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator

from raysearch.base.limits import LARGEST_RATE_PER_S
from raysearch.deploy.place.model_placement import Cluster, Tenant
from raysearch.deploy.place.service import GroupShape, Objective, Service, best_service
from raysearch.deploy.replay.trace_files import read_trace, recorded_per_s
from sim.config.fields import Count, FileSchema, Name, Positive
from sim.config.files import CatalogError, config_path, read_config
from sim.config.question import QUESTION_FIELDS, Question, as_arguments, option_names
from sim.engines.engine_registry import engine_names
from sim.near_names import did_you_mean
from sim.replay.arrivals import Stream
from sim.replay.requests import Requests
from sim.serving.phases import PREFILL, SERVE
from sim.workload import EVEN_ODDS, OWN_SPACES, PhaseName, Workload

_OF_A_TRACE = ("cv", "isl", "osl")
_BURSTIEST = 20.0
"""[assumed] AlpaServe goes up to a CV of 8; far beyond that a run of any length is one burst."""


_OF_THE_FLEET = ("hardware", "gpus", "engine", "engine_version", "margin")
"""Fields of a question that all models of a fleet share."""
_PLANS = "of spaces that no engine has, and models are placed as their engine shards them"
_NOT_PLACED = {
    "workload": "a table [[models]] describes its model by itself",
    "phase": "models that are placed serve",
    "serving": "of phase 'traffic' alone",
    "batches": "the batch is the largest power of two on each rank that is in time",
    "any_degrees": "groups have powers of two of GPUs and of stages",
    **dict.fromkeys(("tp_inner", "overlap_parts", "fp8_gather", "merge_collectives"), _PLANS),
}
"""Fields of a question that no fleet has, and why."""


def place_in_fleet(name: str) -> str:
    """Where a fleet file has a field of a question, or why it has not."""
    if name in _NOT_PLACED:
        return f"nothing to place models by: {_NOT_PLACED[name]}"
    where = "" if name in _OF_THE_FLEET else " in the table [[models]] of a model"
    return f"stands in the fleet file: {name} = VALUE{where}"


class _Requests(FileSchema):
    """[[models]]: a model with its requests; further keys are fields of a question, and mean what they mean there.

    Attributes:
        model: Name in configs/models, or a path.
        name: Name in the answer.
        count: Number of equal models, each with this rate.
        requests_per_s: Mean request rate; without it a trace keeps its own.
        cv: Burstiness: coefficient of variation of the gaps between requests; 1 is Poisson.
        isl: Tokens of a prompt.
        osl: Tokens of an answer.
        trace: Path of a recorded trace, in place of cv, isl and osl.
        ttft_ms: Limit on the time to the first token.
        tpot_ms: Limit on the mean time per further token.
    """

    model_config = ConfigDict(strict=True)

    model: str
    name: Name | None = None  # the model's own
    count: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    requests_per_s: Annotated[Positive, Field(le=LARGEST_RATE_PER_S)] | None = None
    cv: Annotated[Positive, Field(le=_BURSTIEST)] | None = None  # 1
    isl: Count | None = None
    osl: Count | None = None
    trace: str | None = None
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _asks_what_can_be_placed(cls, content: Any) -> Any:
        for name in content if isinstance(content, dict) else ():
            if name in _OF_THE_FLEET:
                raise ValueError(f"{name}: of all models: give it above the tables [[models]]")
            if name in _NOT_PLACED:
                raise ValueError(f"{name}: {place_in_fleet(name)}")
        return content

    @property
    def asked(self) -> dict[str, Any]:
        """What the table says as a question does."""
        return {name: getattr(self, name) for name in _ASKED}

    @model_validator(mode="after")
    def _is_a_question(self) -> _Requests:
        try:
            space = Question(**self.asked).space
        except CatalogError as error:
            raise ValueError(as_arguments(str(error), option_names())) from error
        if space in OWN_SPACES:
            raise ValueError(f"space: {space!r} is {_PLANS}: name an engine, or leave it out")
        return self

    @model_validator(mode="after")
    def _has_traffic(self) -> _Requests:
        lacking = [name for name in ("requests_per_s", "isl", "osl") if getattr(self, name) is None]
        if self.trace is None and lacking:
            raise ValueError(f"{', '.join(lacking)}: missing; expected them, or a trace")
        if self.trace is not None and (beside := [name for name in _OF_A_TRACE if getattr(self, name) is not None]):
            raise ValueError(f"{', '.join(beside)}: the trace has them: leave them out")
        return self

    @model_validator(mode="after")
    def _has_an_objective(self) -> _Requests:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise ValueError("expected ttft_ms, tpot_ms or both: without them every request is in time")
        if self.tpot_ms is not None and self.osl == 1:
            raise ValueError("tpot_ms is of the tokens after the first, and osl is 1: leave it out")
        return self


_OWN = {"model", *_Requests.model_fields, *_OF_THE_FLEET, *_NOT_PLACED}
_ASKED = {
    name: (Annotated[hint, Field(ge=QUESTION_FIELDS[name].least, le=QUESTION_FIELDS[name].most)], None)
    for name, hint in get_type_hints(Question, include_extras=True).items()
    if name not in _OWN
}
"""Fields of a question that each model of a fleet has for itself, as pydantic declares them."""
if TYPE_CHECKING:
    _ModelTable = _Requests
else:
    _ModelTable = create_model("_ModelTable", __base__=_Requests, **_ASKED)


class FleetFile(FileSchema):
    """configs/fleets/*.toml: models that share a cluster.

    A model's table may stand for several alike with `count`: fine-tuned versions, each with the same rate of its own.

    Attributes:
        name: Name of the fleet.
        hardware: Name in configs/hardware, or a path.
        gpus: GPUs available.
        engine: Engine of all models: a name that `raysearch list` shows.
        engine_version: Version of the engine, or the path of a TOML file that describes one.
        margin: Share of the memory and of the limits to keep free.
        models: A table for each model.
    """

    name: Name
    hardware: str
    gpus: Annotated[int, Field(ge=1, le=256, strict=True)]
    engine: str = "vllm"
    engine_version: str | None = None  # the first in `raysearch list`
    margin: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    models: tuple[_ModelTable, ...]

    @field_validator("engine")
    @classmethod
    def _is_an_engine(cls, name: str) -> str:
        known = engine_names()
        if name not in known:
            raise ValueError(f"unknown engine {name!r}: {did_you_mean(name, known)}")
        return name

    @model_validator(mode="after")
    def _names_differ(self) -> FleetFile:
        if not self.models:
            raise ValueError("expected a table [[models]] for each model, got none")
        names = [name for name, _ in self.tenants()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are called {twice[0]!r}: give them a name each, or one of them a count")
        return self

    def tenants(self) -> list[tuple[str, _ModelTable]]:
        """Every model by the name it goes under."""
        found: list[tuple[str, _ModelTable]] = []
        for table in self.models:
            name = table.name or Path(table.model).stem
            found += [(f"{name}_{at + 1}" if table.count > 1 else name, table) for at in range(table.count)]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """A fleet file, priced.

    Attributes:
        file: What it says.
        cluster: Its models on every group of GPUs, in batches that keep the time per token with their confidence.
        bolder: The same in batches that keep it with steps as predicted.
        workloads: Of each model, in their order, serving.
    """

    file: FleetFile
    cluster: Cluster
    bolder: Cluster
    workloads: tuple[Workload, ...]

    def at(self, rate: float, cv: float | None) -> Fleet:
        """The same under so many times the load, and with random arrivals as bursty as given."""
        return replace(self, cluster=self.cluster.at(rate, cv), bolder=self.bolder.at(rate, cv))


def load_fleet(name_or_path: str, gpus: int | None = None, trace: Path | None = None, most: int = 10_000) -> Fleet:
    """A fleet of a shipped name or a file.

    Args:
        name_or_path: A name in configs/fleets, or the path of a TOML file.
        gpus: In place of the file's.
        trace: In place of cv, isl and osl of all models.
        most: Requests to read of a trace.

    Raises:
        CatalogError: An unknown name, an unusable file, or a model that has room on no group.
        InputError: A trace that cannot be read.
    """
    path = config_path("fleets", name_or_path)
    file = read_config(path, FleetFile)
    instead: dict[str, Any] = {} if gpus is None else {"gpus": gpus}
    if file.engine_version and (own := path.parent / file.engine_version).is_file():
        instead["engine_version"] = str(own)
    if trace is not None:
        sent = {**dict.fromkeys(_OF_A_TRACE), "trace": str(trace.absolute())}
        instead["models"] = tuple(table.model_copy(update=sent) for table in file.models)
    file = file.model_copy(update=instead)
    hardware = str(config_path("hardware", file.hardware, beside=path.parent))
    priced: dict[int, _Priced] = {}  # equal models once
    for name, table in file.tenants():
        if id(table) not in priced:
            model = str(config_path("models", table.model, beside=path.parent))
            recorded = None if table.trace is None else read_trace(path.parent / table.trace, most)
            try:
                priced[id(table)] = _priced(file, table, model, hardware, recorded)
            except CatalogError as error:
                raise CatalogError(f"{path}: {name}: {error}") from error
        if not priced[id(table)].services:
            raise CatalogError(f"{path}: {name} does not fit on any group of up to {file.gpus} GPUs {file.hardware}")
    models = [(name, priced[id(table)]) for name, table in file.tenants()]
    tenants = tuple(replace(each.tenant, name=name) for name, each in models)
    careful, bolder = (
        {(number, shape): of[at] for number, (_, each) in enumerate(models) for shape, of in each.services.items()}
        for at in (0, 1)
    )
    clusters = Cluster(file.gpus, tenants, careful), Cluster(file.gpus, tenants, bolder)
    return Fleet(file, *clusters, tuple(each.workload for _, each in models))


@dataclass(frozen=True, slots=True)
class _Priced:
    """A table's model: what is asked of it, and how groups serve it, in batches as of the fleet's two clusters."""

    workload: Workload
    tenant: Tenant
    services: Mapping[GroupShape, tuple[Service, Service]]


def _priced(file: FleetFile, table: _ModelTable, model: str, hardware: str, recorded: Requests | None) -> _Priced:
    isl, osl = recorded.mean_tokens if recorded else (table.isl or 0, table.osl or 0)
    ttft_s, tpot_s = ((1 - file.margin) * _seconds(each) for each in (table.ttft_ms, table.tpot_ms))
    objective = Objective(isl, osl, ttft_s, tpot_s)
    own_per_s = recorded_per_s(recorded) if recorded else 0.0  # an error where all come at once, at any rate
    rate_per_s = table.requests_per_s or own_per_s
    tenant = Tenant(table.model, Stream(rate_per_s, table.cv or 1.0), objective, recorded)
    prompts, serving = (
        _workload(file, table, (isl, osl), model, hardware, phase) for phase in (PREFILL.name, SERVE.name)
    )
    both = serving, replace(serving, confidence=EVEN_ODDS)
    services: dict[GroupShape, tuple[Service, Service]] = {}
    for shape in _shapes(file.gpus):
        careful, bolder = (best_service(prompts, each, shape, objective) for each in both)
        if careful and bolder:
            if recorded is not None:  # a request is given up once the shortest prompt's first token would be late
                careful, bolder = (replace(each, prompt_s=0.0, most_per_s=math.inf) for each in (careful, bolder))
            services[shape] = careful, bolder
    return _Priced(serving, tenant, services)


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else 1e-3 * milliseconds


def _shapes(gpus: int) -> list[GroupShape]:
    powers = [1 << power for power in range(gpus.bit_length())]
    return [GroupShape(stage, stages) for stage in powers for stages in powers if stage * stages <= gpus]


def _workload(
    file: FleetFile, table: _ModelTable, lengths: tuple[int, int], model: str, hardware: str, phase: PhaseName
) -> Workload:
    serves = phase == SERVE.name
    asked = Question(
        **{name: value for name, value in table.asked.items() if serves or name not in _OF_MIXED_STEPS},
        model=model,
        hardware=hardware,
        phase=phase,
        isl=lengths[0],
        osl=lengths[1],
        engine=file.engine,
        engine_version=file.engine_version,
        gpus=file.gpus,
        margin=file.margin,
        tpot_ms=0,  # those of the fleet's are about requests that come at random, not about a steady state
        ttft_ms=0,
        batches="powers_of_two",
    )
    return asked.load()


_OF_MIXED_STEPS = ("chunk_tokens", "prompt_wait_steps")
"""Fields of a question about steps of prompts with others' tokens, which a lone prompt has not."""
