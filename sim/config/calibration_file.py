"""What a file of coefficients may say: curves, the grids they lie on, engines; every count checked before use."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, model_validator

from sim.config.fields import Positive, Whole, ascending
from sim.near_names import did_you_mean
from sim.prices import mixer_terms, terms
from sim.prices.calibration import grid_phi, moe_layer_terms
from sim.prices.dtypes import FORMATS
from sim.prices.machine import Machine

Coefficient = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False, strict=True)]
Vertex = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False, strict=True)]
GridAxis = Annotated[tuple[Vertex, ...], Field(min_length=1, max_length=64), AfterValidator(ascending)]
Percent = Annotated[int, Field(ge=-1000, le=1000, strict=True)]


class _SpeedOfLight(BaseModel):
    bf16_tflops: Positive
    fp8_tflops: Positive
    hbm_gb_per_s: Positive
    nvlink_gb_per_s: Positive
    network_gb_per_s: Positive


class _MachineCounts(BaseModel):
    sms: Annotated[int, Field(ge=1, le=10**5, strict=True)]
    l2_mb: Positive
    node_gpus: Annotated[int, Field(ge=1, le=10**5, strict=True)]
    host_gpus: Annotated[int, Field(ge=1, le=10**5, strict=True)] | None = None


class _Part(BaseModel):
    axes: tuple[GridAxis, ...]
    combine: tuple[tuple[Coefficient, ...], ...]


class _Grid(BaseModel):
    """A lattice and the coarser ones that its correction is a sum of."""

    axes: Annotated[tuple[GridAxis, ...], Field(min_length=1, max_length=4)]
    monotone: tuple[Whole, ...]
    slopes: tuple[Annotated[int, Field(ge=0, le=1, strict=True)], ...]
    parts: Annotated[tuple[_Part, ...], Field(min_length=1)]

    @property
    def corrections(self) -> int:
        """Vertices of all parts together."""
        return sum(math.prod(len(axis) for axis in part.axes) for part in self.parts)

    @model_validator(mode="after")
    def _fits_together(self) -> _Grid:
        axes = len(self.axes)
        if len(self.slopes) != axes or any(axis >= axes for axis in self.monotone):
            raise ValueError(f"slopes and monotone must name the {axes} axes")
        for part in self.parts:
            if len(part.combine) != len(part.axes) or any(len(row) != axes for row in part.combine):
                raise ValueError(f"combine must have a row per axis of its part, of {axes} numbers each")
        return self


class _SeriesRecord(BaseModel):
    """A curve: a sum of terms, maybe on a grid with a correction, or a departure from its parent's."""

    grid: str | None = None
    parent: str | None = None
    terms: tuple[Coefficient, ...] = ()
    floor_us: Annotated[Vertex | None, Field(lt=1e9)] = None
    g_percent: tuple[Percent, ...] = ()
    rows: Whole = 0
    mape: Coefficient | None = None
    interval: tuple[Positive, Positive] | None = None
    interval_of_few: tuple[Positive, Positive] | None = None
    range: dict[str, tuple[Coefficient, Coefficient]] = {}


class _EngineTimes(BaseModel):
    step_s: Coefficient
    sequence_s: Coefficient
    prefill_share: Annotated[Coefficient, Field(le=1)]
    layer_s: Coefficient = 0.0
    kernel_factor: Annotated[float, Field(ge=0.05, le=20, allow_inf_nan=False, strict=True)] = 1.0
    prompt_factor: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False, strict=True)] = 1.0


class _EngineRecord(_EngineTimes):
    models: tuple[str, ...] = ()
    of: dict[str, _EngineTimes] = {}


_LogWidth = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, strict=True)]


class _Widths(BaseModel):
    low: tuple[_LogWidth, _LogWidth, _LogWidth]
    high: tuple[_LogWidth, _LogWidth, _LogWidth]


class _Intervals(BaseModel):
    measured: _Widths
    unmeasured: _Widths
    bare: _Widths
    kernels: tuple[Positive, Positive]


class _Serving(BaseModel):
    mape: Coefficient | None = None
    engines: dict[str, _EngineRecord] = {}
    interval: _Intervals | None = None


class CalibrationFile(BaseModel):
    """What every file of coefficients holds; `raysearch calibrate` writes more about where they come from."""

    format: Literal[2]
    speed_of_light: _SpeedOfLight
    machine: _MachineCounts
    grids: dict[str, _Grid]
    series: dict[str, _SeriesRecord]
    serving: _Serving = _Serving()

    @model_validator(mode="after")
    def _series_fit_their_grids(self) -> CalibrationFile:
        for name, record in self.series.items():
            try:
                self._check(name, record)
            except ValueError as error:
                raise ValueError(f"series {name!r}: {error}") from None
        return self

    def _check(self, name: str, record: _SeriesRecord) -> None:
        grid = self.grids.get(record.grid) if record.grid else None
        if record.grid and grid is None:
            raise ValueError(f"unknown grid {record.grid!r}; {did_you_mean(record.grid, self.grids)}")
        parent = self.series.get(record.parent) if record.parent else record
        if parent is None or (record.parent and (parent.parent or parent.grid != record.grid or not record.grid)):
            raise ValueError(f"parent must be a series with terms on the same grid, got {record.parent!r}")
        wanted = term_count(name, len(grid.axes) if grid else 0)
        if len(parent.terms) not in (wanted, _fewer_terms(name)) or not any(parent.terms):
            raise ValueError(f"expected {wanted} terms, not all of them 0, got {len(parent.terms)}")
        if grid and len(record.g_percent) != grid.corrections:
            raise ValueError(f"expected {grid.corrections} values in g_percent, got {len(record.g_percent)}")


def term_count(series: str, axes: int = 0) -> int:
    """How many terms a series of that name sums.

    Args:
        series: Its name.
        axes: Of its grid; 0 for a plain sum.

    Raises:
        ValueError: No series of that name, or it has another number of axes.
    """
    family, *rest = series.split("/")
    known = _AXES.get(family, (0,))
    if axes not in known or len(rest) not in _PARTS.get(family, ()):
        raise ValueError(f"unknown series, or one on another number of axes than {' or '.join(map(str, known))}")
    try:
        if axes:
            return grid_phi(series, _ANY)(np.zeros((1, axes))).shape[1]
        return len(_sum_phi(family, rest, series))
    except (KeyError, ValueError) as error:
        raise ValueError(f"unknown series: {error}") from None


def _fewer_terms(series: str) -> int:
    """How many terms a sum has that was fitted without the last ones, which then count nothing; 0 if all are needed."""
    family, *_, last = series.split("/")
    return _WITHOUT_LAST.get(last if family == "state" else family, 0)


_WITHOUT_LAST = {"moe": 20, "sparse_attention": 33, "conv": 9, "scan": 16}
"""Terms of a sum before those of waves, of the L2 cache and of whole contexts."""
_AXES = {
    "gemm": (3,),
    "attention_decode": (4,),
    "attention_prefill": (4, 0),
    "mla_decode": (3, 0),
    "collectives": (2,),
}
"""Axes of a family's tables; 0 for a plain sum, which some were before they had tables."""
_PARTS = {
    "gemm": (2, 3),
    "attention_decode": (3, 4),
    "attention_prefill": (3, 4),
    "mla_decode": (1, 2),
    "moe": (3,),
    "collectives": (2, 4),
    "moe_alltoall_deepep": (4,),
    "send_recv": (1,),
    "sparse_attention": (3,),
    "state": (3,),
}
"""Parts of a series' name behind its family's."""


_ANY = Machine(dict.fromkeys(FORMATS, 1.0), 1.0, 1.0, 1.0, sms=1, l2_mb=1.0, node_gpus=1, host_gpus=1)
"""How many terms there are depends on no machine."""


def _sum_phi(family: str, rest: list[str], series: str) -> list[float]:
    """The terms of a plain sum at the smallest sizes."""
    match family:
        case "attention_prefill":
            return terms.attention_prefill(_ANY, 1, 1, 1, 1, 64, rest[1])
        case "mla_decode":
            return grid_phi(series, _ANY)(np.zeros((1, 3)))[0].tolist()
        case "moe":
            return moe_layer_terms(_ANY, series, 1, 1, 1, 1, 1, 1, skewed=False)
        case "send_recv":
            return terms.send_recv(1)
        case "sparse_attention":
            return mixer_terms.sparse_attention(_ANY, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1)
        case "state":
            scan = rest[2] == "scan"
            return mixer_terms.state_scan(_ANY, 1, 1, 1, 1, 1, 1) if scan else mixer_terms.convolution(_ANY, 1, 1, 1)
        case _:
            nodes = 1.0 if rest[3] == "intra" else 2.0
            return terms.expert_all_to_all_terms(_ANY, 1, 1, 1, 1, nodes, low_latency=rest[0] == "low_latency")
