"""Several models on one cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.deploy.place.fleet_file import load_fleet
from raysearch.deploy.place.fleet_plan import (
    CurvePoint,
    FleetPlan,
    PlanProgress,
    curves,
    fleet_plan_dict,
    plan_fleet,
)
from raysearch.deploy.replay.trace_files import trace_file
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True, repr=False)
class PlacementResult(Result):
    """Which of several models share which GPUs, and how many requests are in time then.

    Attributes:
        plan: The best placement, and the best of other kinds.
        progress: Called with (what, done, total) while curves are computed.
    """

    plan: FleetPlan
    progress: PlanProgress = field(default=no_progress, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        fleet: str | Path,
        *,
        gpus: int | None,
        rate: float,
        cv: float | None,
        trace: str | Path | None,
        percentile: float,
        requests: int,
        seeds: int,
        progress: PlanProgress,
    ) -> PlacementResult:
        """Places a fleet; see `raysearch.api.place`.

        Raises:
            InputError: A burstiness is given where all requests come as in a trace, or a trace cannot be read.
        """
        loaded = load_fleet(str(fleet), gpus, trace_file(trace), requests * seeds)
        if cv is not None and not loaded.cluster.at_random:
            raise InputError(f"--set cv={cv:g}: only for requests that come at random; here all come as in a trace")
        return cls(plan_fleet(loaded.at(rate, cv), requests, seeds, percentile, progress), progress)

    @property
    def feasible(self) -> bool:
        """Whether any request can be in time."""
        return self.plan.best.attained.value > 0

    @cached_property
    def curves(self) -> list[CurvePoint]:
        """The share in time of each placement at other rates and burstiness."""
        return curves(self.plan, self.progress)

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch place --json` prints it."""
        return fleet_plan_dict(self.plan)

    def to_rows(self) -> list[JsonObject]:
        """A row per kind of placement, the best first: the share of requests in time, with its interval."""
        found = [(option.name, option.attained) for option in self.plan.options]
        return [{"placement": name, "attained": at.value, "low": at.low, "high": at.high} for name, at in found]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch place` prints."""
        from raysearch.deploy.place.fleet_plan_text import fleet_plan_blocks

        return fleet_plan_blocks(self.plan)

    def figure(self) -> Figure:
        """The share in time of each placement against the rate and against burstiness."""
        from raysearch.deploy.place.fleet_plan_text import curves_figure

        return curves_figure(self.plan, self.curves)

    def write(self, folder: str | Path) -> None:
        """Writes placement.json, curves.csv and curves.png."""
        from raysearch.deploy.place.fleet_plan_text import write_fleet_plan
        from raysearch.processes.claim import check_folder

        check_folder(Path(folder), "placement.json")
        write_fleet_plan(self.plan, self.curves, Path(folder))
