"""Fleet files: models with their requests, and the GPUs that serve them all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raysearch.base.limits import LARGEST_RATE_PER_S
from raysearch.deploy.place.model_placement import Cluster, Tenant
from raysearch.deploy.place.service import GroupShape, Objective, Service, best_service
from sim.config.fields import Count, FileSchema, Name, Positive
from sim.config.files import CatalogError, config_path, read_config
from sim.config.question import Question
from sim.engines.engine_registry import engine_names
from sim.near_names import did_you_mean
from sim.prices.dtypes import Dtype
from sim.replay.arrivals import Stream
from sim.serving.phases import PREFILL, SERVE
from sim.workload import PhaseName, Workload

_BURSTIEST = 20.0
"""[assumed] AlpaServe goes up to a CV of 8; far beyond that a run of any length is one burst."""


class _ModelTable(FileSchema):
    """[[models]]: a model with its requests.

    Attributes:
        model: Name in configs/models, or a path.
        name: That the answer calls it.
        count: Models alike, each with the same rate of its own.
        requests_per_s: On average.
        cv: How bursty they come: coefficient of variation of the times between them; 1 is Poisson.
        isl: Tokens of a prompt.
        osl: Tokens of an answer.
        ttft_ms: Longest time to the first token of a request in time.
        tpot_ms: Longest time per further token.
        weights: Format of the weights.
        kv_cache: Format of the KV cache.
    """

    model: str
    name: Name | None = None  # the model's own
    count: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    requests_per_s: Annotated[Positive, Field(le=LARGEST_RATE_PER_S)]
    cv: Annotated[Positive, Field(le=_BURSTIEST)] = 1.0
    isl: Count
    osl: Count
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    weights: Dtype | None = None  # as of a question: the checkpoint's, else fp8
    kv_cache: Literal["bf16", "fp8"] | None = None  # the same

    @model_validator(mode="after")
    def _has_an_objective(self) -> _ModelTable:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise ValueError("expected ttft_ms, tpot_ms or both: without them every request is in time")
        if self.tpot_ms is not None and self.osl == 1:
            raise ValueError("tpot_ms is of the tokens after the first, and osl is 1: leave it out")
        return self


class FleetFile(FileSchema):
    """configs/fleets/*.toml: models that share a cluster.

    A model's table may stand for several alike with `count`: fine-tuned versions, each with the same rate of its own.

    Attributes:
        name: Of the fleet.
        hardware: Name in configs/hardware, or a path.
        gpus: At hand.
        engine: That serves all models: a name that `raysearch list` shows.
        margin: Share of the memory and of the limits to keep free.
        models: A table each.
    """

    name: Name
    hardware: str
    gpus: Annotated[int, Field(ge=1, le=256, strict=True)]
    engine: str = "vllm"
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
        cluster: Its models on every group of GPUs.
        workloads: Of each model, in their order, serving.
    """

    file: FleetFile
    cluster: Cluster
    workloads: tuple[Workload, ...]


def load_fleet(name_or_path: str, **instead: Any) -> Fleet:
    """A fleet of a shipped name or a file.

    Args:
        name_or_path: A name in configs/fleets, or the path of a TOML file.
        instead: Replaces keys of the file.

    Raises:
        CatalogError: An unknown name, an unusable file, or a model that has room on no group.
    """
    path = config_path("fleets", name_or_path)
    file = read_config(path, FleetFile).model_copy(update=instead)
    hardware = str(config_path("hardware", file.hardware, beside=path.parent))
    services: dict[tuple[int, GroupShape], Service] = {}
    tenants: list[Tenant] = []
    workloads: list[Workload] = []
    priced: dict[int, tuple[Workload, dict[GroupShape, Service]]] = {}  # equal models are priced once
    for number, (name, table) in enumerate(file.tenants()):
        objective = Objective(table.isl, table.osl, _seconds(table.ttft_ms), _seconds(table.tpot_ms))
        if id(table) not in priced:
            model = str(config_path("models", table.model, beside=path.parent))
            prompts, serving = (_workload(file, table, model, hardware, phase) for phase in (PREFILL.name, SERVE.name))
            on = {shape: best_service(prompts, serving, shape, objective) for shape in _shapes(file.gpus)}
            if not any(on.values()):
                raise CatalogError(f"{path}: {name} has room on no group of up to {file.gpus} GPUs {file.hardware}")
            priced[id(table)] = serving, {shape: each for shape, each in on.items() if each is not None}
        workload, on = priced[id(table)]
        services |= {(number, shape): service for shape, service in on.items()}
        tenants.append(Tenant(name, Stream(table.requests_per_s, table.cv), objective))
        workloads.append(workload)
    return Fleet(file, Cluster(file.gpus, tuple(tenants), services), tuple(workloads))


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else 1e-3 * milliseconds


def _shapes(gpus: int) -> list[GroupShape]:
    powers = [1 << power for power in range(gpus.bit_length())]
    return [GroupShape(stage, stages) for stage in powers for stages in powers if stage * stages <= gpus]


def _workload(file: FleetFile, table: _ModelTable, model: str, hardware: str, phase: PhaseName) -> Workload:
    asked = Question(
        model=model,
        hardware=hardware,
        phase=phase,
        isl=table.isl,
        osl=table.osl,
        engine=file.engine,
        weights=table.weights,
        kv_cache=table.kv_cache,
        gpus=file.gpus,
        margin=file.margin,
        batches="powers_of_two",
    )
    return asked.load()
