"""What a hardware, model or workload file may say, in the units people use, and its value in SI units."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from sim.config.files import CatalogError, did_you_mean
from sim.engines.registry import engine_names
from sim.layers import model as layers_model
from sim.prices import hardware
from sim.prices.calibration import Calibration
from sim.prices.curves import Curves
from sim.prices.dtypes import ARITHMETIC, FORMATS, Dtype
from sim.workload import BatchGrid, DegreeTables, ExpertExchange, Phase, Routing, SpaceName


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


Numeric = TypeVar("Numeric", int, float)


def ascending(values: tuple[Numeric, ...]) -> tuple[Numeric, ...]:
    """The values, if they ascend without repeats. Raises: ValueError."""
    if sorted(set(values)) != list(values):
        raise ValueError("expected ascending values without repeats")
    return values


# Strict: a quoted figure or a boolean is a mistake, not a number.
Positive = Annotated[float, Field(ge=1e-6, strict=True), AfterValidator(_finite)]
NonNegative = Annotated[float, Field(ge=0, strict=True), AfterValidator(_finite)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Whole = Annotated[int, Field(ge=0, le=10**9, strict=True)]
Microseconds = Annotated[NonNegative, Field(lt=1e6)]
GigabytesPerSecond = Annotated[Positive, Field(lt=1e6)]
Degrees = Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(ascending)]
# Names become file names and parts of run ids.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
ByDtype = dict[Dtype, Share]


class FileSchema(BaseModel):
    """What every configuration file shares: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Compute(FileSchema):
    bf16_tflops: Annotated[Positive, Field(lt=1e6)]
    fp8_tflops: Annotated[Positive, Field(lt=1e6)]
    sms: Count  # streaming multiprocessors or compute units
    l2_mb: Annotated[Positive, Field(lt=1e5)]  # the largest cache that all of them share


class _Hbm(FileSchema):
    capacity_gb: Annotated[Positive, Field(lt=1e5)]
    bandwidth_gb_per_s: GigabytesPerSecond
    overhead_gb: NonNegative

    @model_validator(mode="after")
    def _leaves_room(self) -> _Hbm:
        if self.overhead_gb >= self.capacity_gb:
            raise ValueError(f"overhead_gb ({self.overhead_gb}) must stay below capacity_gb ({self.capacity_gb})")
        return self


class _Efficiency(FileSchema):
    compute: ByDtype
    memory: ByDtype
    floor_us: Microseconds

    @model_validator(mode="after")
    def _covers_every_dtype(self) -> _Efficiency:
        for table in ("compute", "memory"):
            missing = set(ARITHMETIC) - set(getattr(self, table))
            if missing:
                raise ValueError(f"{table} lacks a value for {', '.join(sorted(missing))}")
        return self

    def to_si(self) -> hardware.Efficiency:
        compute, memory = _every_dtype(self.compute), _every_dtype(self.memory)
        return hardware.Efficiency(compute, memory, self.floor_us * 1e-6)


def _every_dtype(table: ByDtype) -> ByDtype:
    """The table with formats that a file may leave out, each as the arithmetic on it."""
    return {dtype: table.get(dtype, table[form.arithmetic]) for dtype, form in FORMATS.items()}


class _Families(FileSchema):
    gemm: _Efficiency
    attention: _Efficiency
    elementwise: _Efficiency


class _Protocol(FileSchema):
    ring_base_us: Microseconds
    tree_base_us: Microseconds
    ring_intra_step_us: Microseconds
    ring_inter_step_us: Microseconds
    tree_intra_step_us: Microseconds
    tree_inter_step_us: Microseconds
    bandwidth_share: Share

    def to_si(self) -> hardware.Protocol:
        return hardware.Protocol(
            self.ring_base_us * 1e-6,
            self.tree_base_us * 1e-6,
            self.ring_intra_step_us * 1e-6,
            self.ring_inter_step_us * 1e-6,
            self.tree_intra_step_us * 1e-6,
            self.tree_inter_step_us * 1e-6,
            self.bandwidth_share,
        )


class _CustomAllReduce(FileSchema):
    one_shot_latency_us: Microseconds
    two_shot_latency_us: Microseconds
    bandwidth_gb_per_s: GigabytesPerSecond

    def to_si(self) -> hardware.CustomAllReduce:
        return hardware.CustomAllReduce(
            self.one_shot_latency_us * 1e-6, self.two_shot_latency_us * 1e-6, self.bandwidth_gb_per_s * 1e9
        )


class _ExpertAllToAll(FileSchema):
    latency_us: Annotated[tuple[Microseconds, ...], Field(min_length=1)]
    intra_gb_per_s: GigabytesPerSecond
    inter_gb_per_s: GigabytesPerSecond

    @model_validator(mode="after")
    def _grows_with_nodes(self) -> _ExpertAllToAll:
        if list(self.latency_us) != sorted(self.latency_us):
            raise ValueError("latency_us must not fall with the number of nodes (1, 2, 4, ...)")
        return self

    def to_si(self) -> hardware.ExpertAllToAll:
        return hardware.ExpertAllToAll(
            tuple(latency * 1e-6 for latency in self.latency_us), self.intra_gb_per_s * 1e9, self.inter_gb_per_s * 1e9
        )


class _PointToPoint(FileSchema):
    intra_latency_us: Microseconds
    intra_gb_per_s: GigabytesPerSecond
    inter_latency_us: Microseconds
    inter_gb_per_s: GigabytesPerSecond

    def to_si(self) -> hardware.PointToPoint:
        return hardware.PointToPoint(
            self.intra_latency_us * 1e-6,
            self.intra_gb_per_s * 1e9,
            self.inter_latency_us * 1e-6,
            self.inter_gb_per_s * 1e9,
        )


class _Protocols(FileSchema):
    ll: _Protocol
    ll128: _Protocol
    simple: _Protocol


class _Collectives(FileSchema):
    net_overhead_us: Microseconds
    all_reduce_gb_per_s: GigabytesPerSecond
    gather_gb_per_s: GigabytesPerSecond
    nic_gb_per_s: GigabytesPerSecond
    nvlink_peak_gb_per_s: GigabytesPerSecond | None = None  # what was achieved, when left out
    network_peak_gb_per_s: GigabytesPerSecond | None = None
    protocols: _Protocols
    custom_all_reduce: _CustomAllReduce | None = None  # NCCL alone when the file has no such table
    all_to_all: _PointToPoint
    dispatch: _ExpertAllToAll
    combine: _ExpertAllToAll
    send_recv: _PointToPoint

    def to_si(self) -> hardware.CollectiveModel:
        protocols = (self.protocols.ll, self.protocols.ll128, self.protocols.simple)
        return hardware.CollectiveModel(
            protocols=tuple(protocol.to_si() for protocol in protocols),
            net_overhead_s=self.net_overhead_us * 1e-6,
            all_reduce_bandwidth_bytes_per_s=self.all_reduce_gb_per_s * 1e9,
            gather_bandwidth_bytes_per_s=self.gather_gb_per_s * 1e9,
            nic_bandwidth_bytes_per_s=self.nic_gb_per_s * 1e9,
            custom_all_reduce=self.custom_all_reduce.to_si() if self.custom_all_reduce else None,
            all_to_all=self.all_to_all.to_si(),
            dispatch=self.dispatch.to_si(),
            combine=self.combine.to_si(),
            send_recv=self.send_recv.to_si(),
        )


class _ExpectedError(FileSchema):
    """Relative errors that no cross-validation gives; defaults as in the shipped H100 file."""

    serving: Share | None = None  # that of the calibration's serving runs, held out; else as uncalibrated
    uncalibrated: Share = 0.35
    extrapolated: Share = 0.30

    def to_si(self, calibration: Calibration | None) -> hardware.ErrorModel:
        measured = calibration.data.get("serving", {}).get("mape") if calibration else None
        serving = next(error for error in (self.serving, measured, self.uncalibrated) if error is not None)
        return hardware.ErrorModel(serving, self.uncalibrated, self.extrapolated, serving_intervals(calibration))


def serving_intervals(calibration: Calibration | None) -> hardware.ServingIntervals | None:
    """The intervals that a calibration's serving runs gave; None where there were none."""
    fitted: dict[str, Any] = calibration.data.get("serving", {}) if calibration else {}
    record = fitted.get("interval")
    if record is None:
        return None
    kinds = [hardware.Widths(tuple(record[kind]["low"]), tuple(record[kind]["high"])) for kind in _INTERVAL_KINDS]
    models = {name: frozenset(engine.get("models", ())) for name, engine in fitted["engines"].items()}
    return hardware.ServingIntervals(*kinds, kernels=tuple(record["kernels"]), models=models)


_INTERVAL_KINDS = ("measured", "unmeasured", "bare")


class HardwareFile(FileSchema):
    """configs/hardware/*.toml: one accelerator, its node, its network and how efficient they are."""

    name: Name
    node_gpus: Count
    kernels: hardware.EngineName = "trtllm"  # whose kernels run
    all_reduce: hardware.AllReduce | None = None  # the engine's own
    calibration: str | None = None  # medians alone
    scaled_from: str | None = None  # hardware whose calibration's efficiencies are carried over to this machine
    communication_overlap: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    expected_error: _ExpectedError = _ExpectedError()
    compute: _Compute
    hbm: _Hbm
    efficiency: _Families
    collectives: _Collectives

    @model_validator(mode="after")
    def _has_one_calibration(self) -> HardwareFile:
        if self.calibration and self.scaled_from:
            raise ValueError("give calibration (fitted on this machine) or scaled_from (on another), not both")
        return self

    def machine_header(self) -> dict[str, dict[str, float]]:
        """What a calibration says of its machine: rates that no measured time may beat, and counts."""
        links = self.collectives
        return {
            "speed_of_light": {
                "bf16_tflops": self.compute.bf16_tflops,
                "fp8_tflops": self.compute.fp8_tflops,
                "hbm_gb_per_s": self.hbm.bandwidth_gb_per_s,
                "nvlink_gb_per_s": links.nvlink_peak_gb_per_s or max(links.all_reduce_gb_per_s, links.gather_gb_per_s),
                "network_gb_per_s": links.network_peak_gb_per_s or links.nic_gb_per_s,
            },
            "machine": {"sms": self.compute.sms, "l2_mb": self.compute.l2_mb, "node_gpus": self.node_gpus},
        }

    def check_same_machine(self, calibration: Calibration) -> None:
        """Raises CatalogError where a calibration was fitted on another machine."""
        for part, values in self.machine_header().items():
            for name, value in values.items():
                fitted = calibration.data[part].get(name)
                if fitted != value:
                    raise CatalogError(
                        f"calibration {calibration.name!r} was fitted where {name} = {fitted}, hardware "
                        f"{self.name!r} has {value}: scale it to this machine with `scaled_from` in place of "
                        f"`calibration`, or make one for this machine with `raysearch calibrate`"
                    )

    def to_si(self, calibration: Calibration | None) -> hardware.Hardware:
        """The hardware, with the curves of the calibration that it names."""
        curves, errors = None, self.expected_error
        if calibration:
            curves = Curves(
                calibration,
                self.kernels,
                self.all_reduce or self.kernels,
                errors.uncalibrated,
                errors.extrapolated,
            )
        peaks = {"bf16": self.compute.bf16_tflops * 1e12, "fp8": self.compute.fp8_tflops * 1e12}
        collectives = self.collectives.to_si()
        if self.all_reduce == "nccl":
            collectives = dataclasses.replace(collectives, custom_all_reduce=None)
        return hardware.Hardware(
            name=self.name,
            peak_flop_per_s={dtype: peaks[form.arithmetic] for dtype, form in FORMATS.items()},
            hbm_bytes=self.hbm.capacity_gb * 1e9,
            hbm_bandwidth_bytes_per_s=self.hbm.bandwidth_gb_per_s * 1e9,
            overhead_bytes=self.hbm.overhead_gb * 1e9,
            node_gpus=self.node_gpus,
            efficiency={
                "gemm": self.efficiency.gemm.to_si(),
                "attention": self.efficiency.attention.to_si(),
                "elementwise": self.efficiency.elementwise.to_si(),
            },
            collectives=collectives,
            curves=curves,
            communication_overlap=self.communication_overlap,
            errors=self.expected_error.to_si(calibration),
        )


class _LatentAttention(FileSchema):
    query_rank: Count
    kv_rank: Count
    rope_dim: Count
    value_dim: Count


class ModelFile(FileSchema):
    """configs/models/*.toml: dimensions of a decoder-only transformer."""

    name: Name
    layers: Count
    hidden: Count
    ffn_hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    experts: Count
    experts_per_token: Count
    gated: Annotated[bool, Field(strict=True)]
    shared_experts: Whole = 0
    dense_layers: Whole = 0
    dense_ffn_hidden: Whole = 0
    sliding_window: Whole = 0
    sliding_layers: Whole = 0
    expert_dtype: Dtype | None = None
    latent_attention: _LatentAttention | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelFile:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        for key in ("dense_layers", "sliding_layers"):
            if getattr(self, key) > self.layers:
                raise ValueError(f"{key} ({getattr(self, key)}) exceeds layers ({self.layers})")
        for count, size in (("dense_layers", "dense_ffn_hidden"), ("sliding_layers", "sliding_window")):
            if bool(getattr(self, count)) != bool(getattr(self, size)):
                raise ValueError(f"{count} and {size} belong together: give both or neither")
        return self

    def to_si(self) -> layers_model.Model:
        """The model; nothing in it has a unit."""
        latent = self.latent_attention
        return layers_model.Model(
            **self.model_dump(exclude={"latent_attention"}),
            latent_attention=layers_model.LatentAttention(**latent.model_dump()) if latent else None,
        )


class _PrecisionsTable(FileSchema):
    weights: Literal["bf16", "fp8", "fp8_block"]
    kv_cache: Literal["bf16", "fp8"]
    activations: Literal["bf16", "fp8"]
    dispatch: Literal["bf16", "fp8"]


def check_space(name: str) -> None:
    """Accepts the name of a strategy space.

    Raises:
        ValueError: There is none of that name.
    """
    known = ("paper", "joint", "extended", *engine_names())
    if name not in known:
        raise ValueError(f"unknown space {name!r}: {did_you_mean(name, known)}")


LARGEST_BATCH = 4096
"""Largest batch of a named list. [assumed] as in the paper's table 1."""


class _DegreesTable(FileSchema):
    tp: Degrees
    ep: Degrees
    pp: Degrees
    batch: Degrees | BatchGrid

    def to_si(self) -> DegreeTables:
        batch = self.batch
        if batch == "any":
            batch = tuple(range(1, LARGEST_BATCH + 1))
        elif batch == "powers_of_two":
            batch = tuple(1 << power for power in range(LARGEST_BATCH.bit_length()))
        return DegreeTables(self.tp, self.ep, self.pp, batch)


class WorkloadFile(FileSchema):
    """configs/workloads/*.toml: a model on a hardware under an objective, and the degrees to search."""

    name: Name
    model: str
    hardware: str
    engine: str | None = None  # the bare machine
    kernels: hardware.EngineName | None = None  # the engine's, or the hardware file's
    all_reduce: hardware.AllReduce | None = None  # the kernels', or the hardware file's
    phase: Phase
    context_tokens: Count | None = None  # half way through the answer
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    tpot_slo_ms: Positive | None = None
    ttft_slo_ms: Positive | None = None
    max_gpus: Count
    load_imbalance: Annotated[Positive, Field(ge=1)] = 1.0
    routing: Routing = "balanced"
    expert_exchange: ExpertExchange | None = None  # what the engine does; all_to_all on the bare machine
    chunk_tokens: Count | None = None  # prompts are computed whole
    precisions: _PrecisionsTable
    space: SpaceName = "joint"  # the engine's, where one is named
    declared_choices: str | None = None  # "module:function" that declares them; in the extended space only
    margin: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    degrees: _DegreesTable

    @model_validator(mode="before")
    @classmethod
    def _searches_what_its_engine_runs(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        said = cast("dict[str, Any]", content)
        if said.get("engine") and said.get("space") is None:
            return {**said, "space": str(said["engine"]).partition("<")[0]}
        return said

    @field_validator("space")
    @classmethod
    def _is_a_space(cls, name: str) -> str:
        check_space(name)
        return name

    @model_validator(mode="after")
    def _says_its_traffic(self) -> WorkloadFile:
        if self.phase != "decode":
            for key in ("prompt_tokens", "output_tokens"):
                if getattr(self, key) is None:
                    raise ValueError(f"phase {self.phase!r} needs {key}")
            if self.context_tokens is not None:
                raise ValueError(f"context_tokens is of phase 'decode'; phase {self.phase!r} takes it from the prompt")
        elif self.context_tokens is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("phase 'decode' needs context_tokens, or prompt_tokens and output_tokens")
        return self

    @property
    def context(self) -> int:
        """Cached tokens of a decoding sequence, on average."""
        return self.context_tokens or (self.prompt_tokens or 0) + (self.output_tokens or 0) // 2
