"""An accelerator, its node, its network, and the software that runs on it, in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sim.arrays import exp_of
from sim.prices.curves import Curves
from sim.prices.dtypes import Dtype
from sim.prices.priced import SIGNS, Interval, PricedKernel, error_interval
from sim.prices.torus import Torus

EngineName = Literal["trtllm", "vllm", "sglang"]
AllReduce = Literal["trtllm", "vllm", "sglang", "nccl", "fastest", "ring", "tree", "nvls", "one_shot", "two_shot"]
"""Whose all-reduce runs inside a node; "fastest": of each message that of whichever measured library is; or one
algorithm, wherever it can run: see `NCCL_ALGORITHMS` and `KERNEL_ALGORITHMS`."""
NCCL_ALGORITHMS = ("ring", "tree", "nvls")
"""Algorithms that NCCL has an option for (NCCL_ALGO)."""
KERNEL_ALGORITHMS = ("one_shot", "two_shot")
"""Of the engines' own kernels: every GPU reads all that the others have, or reduces a part and gathers the parts."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One NCCL protocol (LL, LL128 or Simple): what a step costs and how much of a link it moves.

    Attributes:
        ring_base_s, tree_base_s: Launch latency of either algorithm.
        ring_intra_step_s, ring_inter_step_s: One hop of a ring over NVLink and over the network.
        tree_intra_step_s, tree_inter_step_s: One hop of a tree over NVLink and over the network.
        bandwidth_share: Share of the achieved bandwidth that the protocol moves, in (0, 1].
    """

    ring_base_s: float
    tree_base_s: float
    ring_intra_step_s: float
    ring_inter_step_s: float
    tree_intra_step_s: float
    tree_inter_step_s: float
    bandwidth_share: float


@dataclass(frozen=True, slots=True)
class CustomAllReduce:
    """An inference engine's all-reduce inside a node, in a CUDA graph: one-shot or two-shot.

    Attributes:
        one_shot_latency_s: Of the algorithm in which every GPU reads all that the others have.
        two_shot_latency_s: Of the algorithm that reduces a part on each GPU, then gathers the parts.
        bandwidth_bytes_per_s: Achieved per GPU by both.
    """

    one_shot_latency_s: float
    two_shot_latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExpertAllToAll:
    """DeepEP dispatch or combine.

    Attributes:
        latency_s: At 1, 2, 4, ... nodes.
        intra_bandwidth_bytes_per_s: Achieved per GPU inside a node.
        inter_bandwidth_bytes_per_s: Achieved per GPU between nodes.
    """

    latency_s: tuple[float, ...]
    intra_bandwidth_bytes_per_s: float
    inter_bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Messages between two GPUs.

    Attributes:
        intra_latency_s: Inside a node.
        intra_bandwidth_bytes_per_s: Achieved inside a node.
        inter_latency_s: Between nodes.
        inter_bandwidth_bytes_per_s: Achieved between nodes.
    """

    intra_latency_s: float
    intra_bandwidth_bytes_per_s: float
    inter_latency_s: float
    inter_bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rack:
    """Links between the nodes of a rack, where they are faster than the network: PCIe around bridged pairs, say.

    Attributes:
        gpus: GPUs of a rack, whole nodes.
        bandwidth_bytes_per_s: Achieved per GPU and direction.
        hop_s: Latency of one hop beyond that of one inside a node.
    """

    gpus: int
    bandwidth_bytes_per_s: float
    hop_s: float


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveModel:
    """Constants of the collective libraries; `sim.prices.collectives` turns them into seconds.

    Attributes:
        protocols: NCCL's protocols, of which it takes the fastest.
        net_overhead_s: Least time of any step of a ring that spans nodes.
        all_reduce_bandwidth_bytes_per_s: NVLink bandwidth per GPU of a large all-reduce.
        gather_bandwidth_bytes_per_s: The same of a large all-gather or reduce-scatter.
        nic_bandwidth_bytes_per_s: Achieved network bandwidth per GPU.
        custom_all_reduce: The engine's own all-reduce inside a node, or None to use NCCL alone.
        all_to_all: NCCL's all-to-all, as grouped sends and receives.
        dispatch, combine: The experts' all-to-all.
        send_recv: Point to point between pipeline stages.
        mesh_peers: Peers of a node that each GPU has a link of its own to, all alike; 0 for a switch, over which one
            GPU's whole bandwidth reaches any peer.
        rack: Links between the node's and the network, or None where there are none.
        torus: How the chips of a node are joined where each has links to its neighbours alone; None for other nodes.
        nvls_latency_s: Of an all-reduce inside the switch (NVLink SHARP), or None where there is none.
        all_reduce: Whose all-reduce or which algorithm was asked for; None takes what runs by default.
    """

    protocols: tuple[Protocol, ...]
    net_overhead_s: float
    all_reduce_bandwidth_bytes_per_s: float
    gather_bandwidth_bytes_per_s: float
    nic_bandwidth_bytes_per_s: float
    custom_all_reduce: CustomAllReduce | None
    all_to_all: PointToPoint
    dispatch: ExpertAllToAll
    combine: ExpertAllToAll
    send_recv: PointToPoint
    mesh_peers: int = 0
    rack: Rack | None = None
    torus: Torus | None = None
    nvls_latency_s: float | None = None
    all_reduce: AllReduce | None = None

    @property
    def algorithm(self) -> str:
        """The one algorithm of all all-reduces that it can run, as `Collective.algorithm` calls it; "" for any."""
        asked = self.all_reduce or ""
        return asked.replace("_", "-") if asked in (*NCCL_ALGORITHMS, *KERNEL_ALGORITHMS) else ""

    @property
    def lacks(self) -> str:
        """Why what was asked for of all-reduces cannot run, or ""."""
        if self.algorithm and self.torus:
            return "a torus has the rings of its links alone"
        if self.all_reduce == "nvls" and self.nvls_latency_s is None:
            return "no switch of its adds up (links.nvls_latency_us)"
        if self.all_reduce in KERNEL_ALGORITHMS and self.custom_all_reduce is None:
            return "no engine's own kernel is known there (no collectives.custom_all_reduce)"
        return ""

    @property
    def topology(self) -> str:
        """How the GPUs of a node are joined: "switched", "mesh" or "torus"."""
        return "torus" if self.torus else "mesh" if self.mesh_peers else "switched"

    def links_used(self, per_node: int) -> float:
        """Share of a GPU's links inside a node that a collective among `per_node` of its GPUs can use.

        A switch lends all of them to any group. In a full mesh n GPUs have n - 1 links to one another, and the others
        carry nothing of theirs: between two of eight MI300X one link of seven.

        Source: a direct exchange, in which each pair of a group shares one link and all are busy at once.
        """
        return (per_node - 1) / self.mesh_peers if self.mesh_peers and per_node > 1 else 1.0


KernelFamily = Literal["gemm", "attention", "elementwise"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Achieved shares of the roofline, in (0, 1], and the launch floor of one kernel family.

    Attributes:
        compute: Share of peak FLOP/s, by dtype of the arithmetic.
        memory: Share of HBM bandwidth, by dtype of the streamed weights or KV cache.
        floor_s: Shortest time any launch takes.
    """

    compute: Mapping[Dtype, float]
    memory: Mapping[Dtype, float]
    floor_s: float


@dataclass(frozen=True, slots=True)
class Widths:
    """A 90 % interval of measured over predicted time per token. [fitted] to serving runs that the engine had not seen.

    Attributes:
        low, high: Of log(predicted / measured) and log(measured / predicted) what stands always, what comes per share
            of the time that prompts take, and what with experts; all >= 0.
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def at(self, prompt_share: Any, *, moe: bool) -> Interval:
        """The factors at a share of prompts, or at each of an array of shares."""
        return self.end(0, prompt_share, moe=moe), self.end(1, prompt_share, moe=moe)

    def end(self, end: int, prompt_share: Any, *, moe: bool) -> Any:
        """The lower factor, 0, or the upper one, 1."""
        always, by_prompts, by_experts = (self.low, self.high)[end]
        return exp_of(SIGNS[end] * (always + by_prompts * prompt_share + by_experts * moe))


@dataclass(frozen=True, slots=True)
class ServingIntervals:
    """How far serving runs lay beside predictions.

    Attributes:
        measured: Of a model that was measured under the engine, at lengths that were not.
        unmeasured: Of a model that was not.
        bare: The same without an engine's own times.
        kernels: What the kernels and collectives of those runs put into it, as factors.
        models: Names of the models that were measured under each engine.
        elsewhere: The same of those whose engine times are those of their runs on other machines.
    """

    measured: Widths
    unmeasured: Widths
    bare: Widths
    kernels: Interval
    models: Mapping[str, frozenset[str]]
    elsewhere: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """Relative errors of what no cross-validation covers.

    Attributes:
        serving: Of a step's time against measured serving runs, beside the errors of its kernels.
        uncalibrated: Of a kernel or collective priced by medians or by a latency model.
        extrapolated: Of one beyond what was measured.
        runs: Intervals from measured serving runs; None without any.
    """

    serving: float
    uncalibrated: float
    extrapolated: float
    runs: ServingIntervals | None = None

    def by_medians(self, time_s: float, what: str = "") -> PricedKernel:
        """Seconds by medians or by a latency model; `what` no measurement covers, or ""."""
        return PricedKernel(time_s, self.uncalibrated, error_interval(self.uncalibrated), what)

    def extrapolating(self, time_s: float, what: str) -> PricedKernel:
        """Seconds beyond what was measured; `what` names it."""
        return PricedKernel(time_s, self.extrapolated, error_interval(self.extrapolated), what)


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """One accelerator, its node and its network, and the software that runs on it.

    Attributes:
        name: For people, and in the names of results.
        node_gpus: GPUs behind the same fast links, which may be several hosts.
        host_gpus: GPUs of a host, what engines call a node; node_gpus unless fast links join several hosts.
        efficiency: Medians that price a kernel without a fitted curve.
        curves: Fitted curves of the engine, or None to price everything by medians.
        communication_overlap: Share of every collective that hides behind other work.
        fp8_gather: Whether all-gathers of 16-bit activations may travel in fp8, where that is faster.
        merge_collectives: Whether neighbouring collectives may be one call, where that is legal and faster.
        errors: What to expect of figures that no cross-validation covers.
        vendor: Who makes it, in lower case; None if unknown.
    """

    name: str
    peak_flop_per_s: Mapping[Dtype, float]
    hbm_bytes: float
    hbm_bandwidth_bytes_per_s: float
    overhead_bytes: float
    node_gpus: int
    host_gpus: int
    efficiency: Mapping[KernelFamily, Efficiency]
    collectives: CollectiveModel
    curves: Curves | None = None
    communication_overlap: float = 0.0
    fp8_gather: bool = False
    merge_collectives: bool = False
    errors: ErrorModel = ErrorModel(0.12, 0.35, 0.3)
    vendor: str | None = None

    @property
    def tiers(self) -> tuple[int, int, bool]:
        """The last arguments of `sim.prices.mesh.group`.

        GPUs of a node, of a rack of nodes or 0 without racks, and whether hosts of a node may stay idle.
        """
        rack_gpus = self.collectives.rack.gpus if self.collectives.rack else 0
        return self.node_gpus, rack_gpus, self.host_gpus < self.node_gpus
