"""What a hardware file may say, in the units people use, and its value in SI units."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from sim.config.fields import (
    ByDtype,
    Count,
    FileSchema,
    GigabytesPerSecond,
    Microseconds,
    Name,
    NonNegative,
    Positive,
    Share,
    Switch,
)
from sim.config.files import CatalogError
from sim.json_object import JsonObject
from sim.prices import hardware
from sim.prices.calibration import Calibration
from sim.prices.curves import CARRIED_OVER, CarriedOver, Curves
from sim.prices.dtypes import ARITHMETIC, FORMATS
from sim.prices.torus import Torus


class _Compute(FileSchema):
    """[compute]: peak rates and sizes of one accelerator.

    Attributes:
        bf16_tflops: Dense, without sparsity, in 1e12 FLOP/s.
        fp8_tflops: The same in fp8.
        fp4_tflops: The same in 4-bit formats.
    """

    bf16_tflops: Annotated[Positive, Field(lt=1e6)]
    fp8_tflops: Annotated[Positive, Field(lt=1e6)] | None = None  # tensor cores without it widen to bf16
    fp4_tflops: Annotated[Positive, Field(lt=1e6)] | None = None  # the same
    sms: Count  # streaming multiprocessors or compute units
    l2_mb: Annotated[Positive, Field(lt=1e5)]  # the largest cache that all of them share


class _Hbm(FileSchema):
    """[hbm]: its memory.

    Attributes:
        capacity_gb: As the driver reports it, in 1e9 bytes.
        bandwidth_gb_per_s: Peak.
        overhead_gb: Taken by the CUDA context, NCCL's buffers and the like, in 1e9 bytes.
    """

    capacity_gb: Annotated[Positive, Field(lt=1e5)]
    bandwidth_gb_per_s: GigabytesPerSecond
    overhead_gb: NonNegative

    @model_validator(mode="after")
    def _leaves_room(self) -> _Hbm:
        if self.overhead_gb >= self.capacity_gb:
            raise ValueError(f"overhead_gb ({self.overhead_gb}) must stay below capacity_gb ({self.capacity_gb})")
        return self


class _Rack(FileSchema):
    gpus: Count
    gb_per_s: GigabytesPerSecond
    hop_us: Microseconds


class _Torus(FileSchema):
    """[links.torus]: chips that have links to their neighbours alone, two along each axis.

    Attributes:
        dims: Axes of the torus.
    """

    dims: Annotated[int, Field(ge=2, le=3, strict=True)]
    hop_us: Microseconds  # shortest time of one hop
    wraps: Count  # an axis closes to a ring where its length is a multiple of this


class _Links(FileSchema):
    """Peak rates, per direction."""

    node_gb_per_s: GigabytesPerSecond  # all links of a GPU to the others of its node
    topology: Literal["switched", "mesh", "torus"] = "switched"  # mesh: a link per pair of GPUs, all alike
    achieved_share: Share | None = None  # of large collectives; else as the machine's that scaled_from names
    network_gb_per_s: GigabytesPerSecond  # one network port
    nics: Count | None = None  # ports of a node, which its GPUs share; one per GPU
    # Taken where it is asked for alone: left out of digests.
    nvls_latency_us: Microseconds | None = Field(None, exclude=True)  # of sums inside the switch (NVLink SHARP)
    rack: _Rack | None = None  # links between nodes that are not the network
    torus: _Torus | None = None  # of topology = "torus", whose nodes have two links along each axis

    @model_validator(mode="after")
    def _describes_its_topology(self) -> _Links:
        if (self.topology == "torus") != (self.torus is not None):
            raise ValueError('topology = "torus" and the table links.torus belong together: give both or neither')
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
    shares: dict[str, float] = {str(dtype): share for dtype, share in table.items()}
    return {dtype: table.get(dtype, shares[form.arithmetic]) for dtype, form in FORMATS.items()}


class _Families(FileSchema):
    """[efficiency]: medians, which price a kernel that no fitted curve covers.

    Attributes:
        gemm: Matrix products.
        attention: Attention.
        elementwise: Norms, activations, sampling and the like.
    """

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


_Tiered = TypeVar("_Tiered", _PointToPoint, _ExpertAllToAll)


class _Protocols(FileSchema):
    """[collectives.protocols]: of NCCL.

    Attributes:
        ll: Low latency: 8-byte stores, half of them flags.
        ll128: The same with 120 of 128 bytes for data.
        simple: Full bandwidth, synchronised in large blocks.
    """

    ll: _Protocol
    ll128: _Protocol
    simple: _Protocol


class _Collectives(FileSchema):
    net_overhead_us: Microseconds
    all_reduce_gb_per_s: GigabytesPerSecond
    gather_gb_per_s: GigabytesPerSecond
    nic_gb_per_s: GigabytesPerSecond
    protocols: _Protocols
    custom_all_reduce: _CustomAllReduce | None = None  # NCCL alone when the file has no such table
    all_to_all: _PointToPoint
    dispatch: _ExpertAllToAll
    combine: _ExpertAllToAll
    send_recv: _PointToPoint

    def scaled(self, node: float, network: float) -> _Collectives:
        """The same latencies at other bandwidths inside and between nodes."""

        def both(link: _Tiered) -> _Tiered:
            rates = {"intra_gb_per_s": link.intra_gb_per_s * node, "inter_gb_per_s": link.inter_gb_per_s * network}
            return link.model_copy(update=rates)

        custom = self.custom_all_reduce
        if custom:
            custom = custom.model_copy(update={"bandwidth_gb_per_s": custom.bandwidth_gb_per_s * node})
        return self.model_copy(
            update={
                "all_reduce_gb_per_s": self.all_reduce_gb_per_s * node,
                "gather_gb_per_s": self.gather_gb_per_s * node,
                "nic_gb_per_s": self.nic_gb_per_s * network,
                "custom_all_reduce": custom,
                "all_to_all": both(self.all_to_all),
                "dispatch": both(self.dispatch),
                "combine": both(self.combine),
                "send_recv": both(self.send_recv),
            }
        )

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
    """Relative errors that no cross-validation gives. Defaults: [assumed]."""

    serving: Share | None = None  # that of the calibration's serving runs, held out; else as uncalibrated
    uncalibrated: Share = 0.35
    extrapolated: Share = 0.30
    carried_over: Annotated[tuple[Positive, Positive], Field(strict=False)] = CARRIED_OVER  # factors, of scaled_from
    bias: str = ""  # to which side what is carried over probably errs

    @model_validator(mode="after")
    def _encloses_one(self) -> _ExpectedError:
        if not self.carried_over[0] <= 1 <= self.carried_over[1]:
            raise ValueError(f"carried_over must be factors around 1 such as [0.8, 1.6], got {self.carried_over}")
        return self

    def to_si(self, calibration: Calibration | None) -> hardware.ErrorModel:
        measured = calibration.data.get("serving", {}).get("mape") if calibration else None
        serving = next(error for error in (self.serving, measured, self.uncalibrated) if error is not None)
        return hardware.ErrorModel(serving, self.uncalibrated, self.extrapolated, stored_intervals(calibration))


def stored_intervals(calibration: Calibration | None) -> hardware.ServingIntervals | None:
    """The intervals that a calibration's serving runs gave; None where there were none."""
    fitted: JsonObject = calibration.data.get("serving", {}) if calibration else {}
    record = fitted.get("interval")
    if record is None:
        return None
    kinds = [hardware.Widths(tuple(record[kind]["low"]), tuple(record[kind]["high"])) for kind in _INTERVAL_KINDS]
    models = {name: frozenset(engine.get("models", ())) for name, engine in fitted["engines"].items()}
    known = {name: frozenset(engine.get("of", ())) - models[name] for name, engine in fitted["engines"].items()}
    return hardware.ServingIntervals(*kinds, kernels=tuple(record["kernels"]), models=models, elsewhere=known)


_INTERVAL_KINDS = ("measured", "unmeasured", "bare")


class HardwareFile(FileSchema):
    """configs/hardware/*.toml: one accelerator, its node, rack and network, and how efficient they are.

    Attributes:
        kernels: Engine whose measured kernels price the ops.
        all_reduce: Whose all-reduce inside a node, or by which algorithm.
        calibration: Coefficients fitted to measurements: a name in configs/calibration, or the path of a JSON file.
        scaled_from: Machine whose efficiencies are carried over where the calibration has none.
        expected_error: Errors to expect of figures that no cross-validation covers.
        compute: The accelerator's peak rates.
        hbm: Its memory.
        links: Its links to others.
        collectives: Constants of the model of collectives.
    """

    name: Name
    vendor: str | None = Field(None, exclude=True)  # for engines that run on some alone; no figure depends on it
    node_gpus: Count
    host_gpus: Count | None = Field(None, exclude=True)
    kernels: hardware.EngineName = "trtllm"
    all_reduce: hardware.AllReduce | None = None  # the engine's own
    calibration: str | None = None  # medians alone
    scaled_from: str | None = None
    communication_overlap: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    # Neither is usual: left out of digests, as they were before they could be asked for.
    fp8_gather: Switch = False
    merge_collectives: Switch = False
    expected_error: _ExpectedError = _ExpectedError()
    compute: _Compute
    hbm: _Hbm
    links: _Links
    efficiency: _Families | None = None  # those of scaled_from
    collectives: _Collectives | None = None  # those of scaled_from, at this machine's rates

    @model_validator(mode="after")
    def _is_complete(self) -> HardwareFile:
        if self.scaled_from is None:
            for table in ("efficiency", "collectives"):
                if getattr(self, table) is None:
                    raise ValueError(f"{table}: missing, and no scaled_from names a machine to take it from")
            if self.links.achieved_share is not None:
                raise ValueError("links.achieved_share belongs to scaled_from; collectives says what is achieved")
        return self

    @model_validator(mode="after")
    def _nests_its_tiers(self) -> HardwareFile:
        rack = self.links.rack
        if rack and (rack.gpus <= self.node_gpus or rack.gpus % self.node_gpus):
            raise ValueError(
                f"links.rack.gpus ({rack.gpus}) must be several nodes of {self.node_gpus} GPUs, as node_gpus says"
            )
        if self.node_gpus % (self.host_gpus or self.node_gpus):
            raise ValueError(f"node_gpus ({self.node_gpus}) must be several hosts of host_gpus = {self.host_gpus}")
        if self.links.topology == "mesh" and self.node_gpus < 3:
            raise ValueError(f"a mesh has at least 3 GPUs, got node_gpus = {self.node_gpus}")
        return self

    def completed_by(self, measured: HardwareFile) -> HardwareFile:
        """This file with what it leaves out: a measured machine's efficiencies, its collectives at this one's rates."""
        mine, its = (file.machine_header()["speed_of_light"] for file in (self, measured))
        node, network = (mine[rate] / its[rate] for rate in ("nvlink_gb_per_s", "network_gb_per_s"))
        collectives = self.collectives or (measured.collectives and measured.collectives.scaled(node, network))
        return self.model_copy(
            update={"efficiency": self.efficiency or measured.efficiency, "collectives": collectives}
        )

    def machine_header(self) -> dict[str, dict[str, float]]:
        """What a calibration says of its machine: rates that no measured time may beat, and counts."""
        links, compute = self.links, self.compute
        fp4 = {} if compute.fp4_tflops is None else {"fp4_tflops": compute.fp4_tflops}
        host = {} if self.host_gpus in (None, self.node_gpus) else {"host_gpus": self.host_gpus}
        return {
            "speed_of_light": {
                "bf16_tflops": compute.bf16_tflops,
                "fp8_tflops": compute.fp8_tflops or compute.bf16_tflops,
                **fp4,
                "hbm_gb_per_s": self.hbm.bandwidth_gb_per_s,
                "nvlink_gb_per_s": links.node_gb_per_s * (links.achieved_share or 1.0),
                "network_gb_per_s": links.network_gb_per_s * (links.nics or self.node_gpus) / self.node_gpus,
            },
            "machine": {"sms": self.compute.sms, "l2_mb": self.compute.l2_mb, "node_gpus": self.node_gpus, **host},
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
        """The hardware, with the curves of the calibration that it names.

        A file with `scaled_from` must have been `completed_by` that machine.
        """
        assert self.efficiency is not None
        assert self.collectives is not None
        curves, errors = None, self.expected_error
        if calibration:
            curves = Curves(
                calibration,
                self.kernels,
                self.all_reduce or self.kernels,
                errors.uncalibrated,
                errors.extrapolated,
                CarriedOver(errors.carried_over, errors.bias),
            )
        light = self.machine_header()["speed_of_light"]
        rack, collectives = self.links.rack, self.collectives.to_si()
        if rack:
            tier = hardware.Rack(rack.gpus, rack.gb_per_s * 1e9, rack.hop_us * 1e-6)
            collectives = dataclasses.replace(collectives, rack=tier)
        if self.links.topology == "mesh":
            collectives = dataclasses.replace(collectives, mesh_peers=self.node_gpus - 1)
        if torus := self.links.torus:
            link = self.links.node_gb_per_s * 1e9 / (2 * torus.dims)
            joined = Torus(torus.dims, link, torus.hop_us * 1e-6, torus.wraps)
            collectives = dataclasses.replace(collectives, torus=joined)
        nvls_us = self.links.nvls_latency_us
        nvls_s = None if nvls_us is None else nvls_us * 1e-6
        collectives = dataclasses.replace(collectives, all_reduce=self.all_reduce, nvls_latency_s=nvls_s)
        if lacks := collectives.lacks:
            raise CatalogError(f"all_reduce = {self.all_reduce!r} does not run on {self.name}: {lacks}")
        if self.all_reduce in ("nccl", *hardware.NCCL_ALGORITHMS):
            collectives = dataclasses.replace(collectives, custom_all_reduce=None)
        return hardware.Hardware(
            name=self.name,
            vendor=self.vendor,
            peak_flop_per_s={dtype: form.peak(light) * 1e12 for dtype, form in FORMATS.items()},
            hbm_bytes=self.hbm.capacity_gb * 1e9,
            hbm_bandwidth_bytes_per_s=self.hbm.bandwidth_gb_per_s * 1e9,
            overhead_bytes=self.hbm.overhead_gb * 1e9,
            node_gpus=self.node_gpus,
            host_gpus=self.host_gpus or self.node_gpus,
            efficiency={
                "gemm": self.efficiency.gemm.to_si(),
                "attention": self.efficiency.attention.to_si(),
                "elementwise": self.efficiency.elementwise.to_si(),
            },
            collectives=collectives,
            curves=curves,
            communication_overlap=self.communication_overlap,
            fp8_gather=self.fp8_gather,
            merge_collectives=self.merge_collectives,
            errors=self.expected_error.to_si(calibration),
        )
