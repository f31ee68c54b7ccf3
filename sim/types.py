"""The values that flow through the simulator: frozen, in SI units, validated before they get here.

`sim.catalog` builds `Hardware`, `Model` and `Workload` from TOML; `sim.simulate` turns a
`Workload` and a `Strategy` into an `Evaluation`. Nothing here computes a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from sim.pricing import Curves

Dtype = Literal["bf16", "fp8", "fp8_block"]
"""fp8 has one scale per tensor, fp8_block one per 128 x 128 block of weights (for weights alone)."""
DTYPE_BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp8": 1, "fp8_block": 1}

Engine = Literal["trtllm", "vllm", "sglang"]
AllReduce = Literal["trtllm", "vllm", "sglang", "nccl"]

Choice = Literal[0, 1, 2]
"""What one fused op is sharded over on the tp axis: its dim 0, its dim 1, or nothing."""
NONE: Choice = 2
CHOICES: tuple[Choice, ...] = (0, 1, 2)

TOKENS, GATHERED_TOKENS, GATHERED = 3, 4, 5
"""Choices of the extended space that GEMMs alone have: sharded over tokens with the whole weight on every GPU; the
same with weights that are sharded at rest and gathered at use; replicated, with weights gathered at use."""
GEMM_CHOICES: tuple[int, ...] = (*CHOICES, TOKENS, GATHERED_TOKENS, GATHERED)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One point of the search space.

    Attributes:
        tp: Tensor-parallel degree, >= 1.
        ep: Expert-parallel degree (attention is data-parallel over it), >= 1.
        pp: Pipeline-parallel degree, >= 1.
        batch: Sequences of one in-flight microbatch over the whole ep group, >= 1.
        dims: One `Choice` per fused op of the model, in the order of `sim.ops.layer_ops`.
        cp: Degree over which the context is cut, and with it each sequence's KV cache.
        dp: Degree over which attention is data-parallel; None for the paper's meaning, that of ep.

    The last two span the extended space: attention lies on a mesh (dp, tp, cp) and the experts on one
    (ep, moe_tp) of the same GPUs, so `moe_tp` follows.
    """

    tp: int
    ep: int
    pp: int
    batch: int
    dims: tuple[int, ...]
    cp: int = 1
    dp: int | None = None

    @property
    def attention_dp(self) -> int:
        """Groups of GPUs that share a sequence's attention, whichever way dp was given."""
        return self.ep if self.dp is None else self.dp

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage: tp * dp * cp, which is moe_tp * ep."""
        return self.tp * self.attention_dp * self.cp

    @property
    def moe_tp(self) -> int:
        """GPUs that share an expert, rounded up where ep does not divide the stage's GPUs."""
        return -(-self.stage_gpus // self.ep)

    @property
    def gpus(self) -> int:
        """GPUs of one replica: those of a stage times pp."""
        return self.stage_gpus * self.pp

    @property
    def extended(self) -> bool:
        """Whether the degrees lie outside the paper's space, so that attention has a mesh of its own."""
        return self.cp != 1 or self.attention_dp != self.ep


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
    """An inference engine's all-reduce inside a node, in a CUDA graph: one-shot or two-shot."""

    one_shot_latency_s: float
    two_shot_latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExpertAllToAll:
    """DeepEP dispatch or combine: latency at 1, 2, 4, ... nodes, bandwidth per GPU and tier."""

    latency_s: tuple[float, ...]
    intra_bandwidth_bytes_per_s: float
    inter_bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Latency and bandwidth of messages between two GPUs, in one node and across nodes."""

    intra_latency_s: float
    intra_bandwidth_bytes_per_s: float
    inter_latency_s: float
    inter_bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveModel:
    """Constants of the collective libraries; `sim.collectives` turns them into seconds.

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
class ErrorModel:
    """Relative errors of what no cross-validation covers.

    Attributes:
        serving: Of a step's time against measured serving runs, beside the errors of its kernels.
        uncalibrated: Of a kernel or collective priced by medians or by a latency model.
        extrapolated: Of one beyond what was measured.
    """

    serving: float
    uncalibrated: float
    extrapolated: float


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """One accelerator, its node and its network, and the software that runs on it.

    Attributes:
        efficiency: Medians that price a kernel without a fitted curve.
        curves: Fitted curves of the engine, or None to price everything by medians.
        communication_overlap: Share of every collective that hides behind other work.
        errors: What to expect of figures that no cross-validation covers.
    """

    name: str
    peak_flop_per_s: Mapping[Dtype, float]
    hbm_bytes: float
    hbm_bandwidth_bytes_per_s: float
    overhead_bytes: float
    node_gpus: int
    efficiency: Mapping[KernelFamily, Efficiency]
    collectives: CollectiveModel
    curves: Curves | None = None
    communication_overlap: float = 0.0
    errors: ErrorModel = ErrorModel(0.12, 0.35, 0.3)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low-rank latents.

    The cache holds one latent and one rotary key per token, shared by all heads.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Attributes:
        query_rank: Width of the query latent.
        kv_rank: Width of the cached key/value latent.
        rope_dim: Width of the cached rotary key, and of each head's rotary query.
        value_dim: Width of each head's value; `Model.head_dim` is that of its non-rotary query and key.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int

    @property
    def cached_width(self) -> int:
        """Cached elements per token and layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    The search prices models whose layers are all alike; the fields below `gated` describe what
    public models add to that, and `sim.serving` prices it (see `beyond_search`).

    Attributes:
        ffn_hidden: Width of one expert, or of the feed-forward network of a dense model.
        experts: Experts per layer; 1 means a dense feed-forward network.
        experts_per_token: Distinct experts each token visits (top-k).
        gated: Whether the activation multiplies two projections (SwiGLU) or one (GELU).
        shared_experts: Experts beside those, of the same width, that every token visits.
        dense_layers: Layers with a dense feed-forward network of `dense_ffn_hidden` instead of experts.
        sliding_window: Tokens that attention sees in `sliding_layers` of the layers; 0 for no window.
        expert_bits: Stored bits per expert weight if the model is published quantised; 0 leaves it to the deployment.
        latent_attention: Multi-head latent attention, or None for grouped-query attention.
    """

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    experts_per_token: int
    gated: bool
    shared_experts: int = 0
    dense_layers: int = 0
    dense_ffn_hidden: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0
    expert_bits: float = 0.0
    latent_attention: LatentAttention | None = None

    @property
    def is_moe(self) -> bool:
        """Whether the layer has a router, a dispatch and several experts."""
        return self.experts > 1

    @property
    def beyond_search(self) -> tuple[str, ...]:
        """What this model has that the twelve fused ops of the search do not describe."""
        features = {
            "multi-head latent attention": self.latent_attention is not None,
            "shared experts": self.shared_experts > 0,
            "dense layers among the experts": self.dense_layers > 0,
            "sliding windows": self.sliding_layers > 0,
            "experts published quantised": self.expert_bits > 0,
        }
        return tuple(name for name, present in features.items() if present)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def ffn_in_width(self) -> int:
        """Columns of ffn1: gate and up projections side by side when gated."""
        return self.ffn_hidden * (2 if self.gated else 1)

    @property
    def attention_width(self) -> int:
        """Columns of the attention output, heads * head_dim."""
        return self.heads * (self.latent_attention.value_dim if self.latent_attention else self.head_dim)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Projection weights of one layer's attention."""
        output = self.hidden * self.attention_width
        latent = self.latent_attention
        if latent is None:
            return self.hidden * self.qkv_width + output
        query = latent.query_rank * (self.hidden + self.heads * (self.head_dim + latent.rope_dim))
        key_value = self.hidden * latent.cached_width + latent.kv_rank * self.heads * (self.head_dim + latent.value_dim)
        return query + key_value + output

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert (or of the one dense feed-forward network) of one layer."""
        return self.hidden * (self.ffn_in_width + self.ffn_hidden)

    @property
    def dense_ffn_parameters(self) -> int:
        """Weights of the feed-forward network of one of `dense_layers`."""
        return self.hidden * self.dense_ffn_hidden * (3 if self.gated else 2)

    @property
    def _small_parameters(self) -> int:
        router = self.hidden * self.experts if self.is_moe else 0
        return router + 2 * self.hidden

    def _layer_parameters(self, experts: int) -> int:
        """Weights of all layers when `experts` of each layer's count."""
        with_experts = (experts + self.shared_experts) * self.expert_parameters + self._small_parameters
        dense = self.dense_ffn_parameters + 2 * self.hidden
        return (
            self.layers * self.attention_parameters
            + (self.layers - self.dense_layers) * with_experts
            + self.dense_layers * dense
        )

    @property
    def parameters(self) -> int:
        """All weights: layers, token embedding, final norm and an untied LM head."""
        return self._layer_parameters(self.experts) + 2 * self.vocab * self.hidden + self.hidden

    @property
    def active_parameters(self) -> int:
        """Weights one token is multiplied with (the embedding is a look-up and does not count)."""
        return self._layer_parameters(self.experts_per_token) + self.vocab * self.hidden + self.hidden


@dataclass(frozen=True, slots=True)
class Precisions:
    """Storage formats. GEMMs run at the peak of `weights`, attention at that of `activations`."""

    weights: Dtype
    kv_cache: Dtype
    activations: Dtype
    dispatch: Dtype


@dataclass(frozen=True, slots=True)
class DegreeTables:
    """The values a search may choose for each degree, ascending."""

    tp: tuple[int, ...]
    ep: tuple[int, ...]
    pp: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model on a hardware under a service-level objective: everything but the strategy.

    Attributes:
        phase: "decode": one new token per sequence and step, `context_tokens` cached.
        context_tokens: Cached tokens every sequence attends to.
        tpot_slo_s: Longest allowed time per output token.
        max_gpus: Device budget.
        load_imbalance: Tokens of the busiest ep rank over the mean, >= 1.
        degrees: The searched degree tables.
        config_hash: Digest of everything above, of the model and of the hardware.
        space: Which strategies a search may choose; see `sim.spaces`.
    """

    name: str
    model: Model
    hardware: Hardware
    phase: Literal["decode"]
    context_tokens: int
    tpot_slo_s: float
    max_gpus: int
    precisions: Precisions
    load_imbalance: float
    degrees: DegreeTables
    config_hash: str
    space: Literal["paper", "extended"] = "paper"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken limit: what was needed and what is allowed, in the unit the kind implies."""

    kind: Literal["hbm", "tpot", "gpus", "layers", "heads", "experts", "tokens", "context", "meshes", "unsupported"]
    needed: float
    allowed: float
    message: str

    @property
    def excess(self) -> float:
        """How far the limit is missed, > 0: log(needed / allowed), or 1 where that says nothing (no divisor)."""
        if 0 < self.allowed < self.needed < math.inf:
            return math.log(self.needed / self.allowed)
        return 1.0


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of one GPU.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send_recv".
        axis: Mesh axis it runs over.
        degree: GPUs taking part.
        tensor: What is moved.
        bytes_per_device: Bytes each GPU sends.
        time_s: How long it takes, less what overlaps with other work.
        error: Expected relative error of that.
        extrapolated: What about it no measurement covers, or "".
    """

    kind: str
    axis: str
    degree: int
    tensor: str
    bytes_per_device: float
    time_s: float
    error: float = 0.0
    extrapolated: str = ""


@dataclass(frozen=True, slots=True)
class OpBreakdown:
    """One fused op of one layer on the busiest GPU.

    Attributes:
        choice: The strategy's choice; `label` names the dim it stands for ("none" for 2).
        placements_in: Placement over tp of each input, by tensor name, as text.
        placement_out: Placement over tp of the output, as text.
        collectives: Redistributions of its inputs and collectives inside the op.
        work_flops: Floating-point operations.
        traffic_bytes: HBM bytes read and written.
        compute_time_s: FLOPs at the median achieved rate.
        memory_time_s: Bytes at the median achieved bandwidth.
        kernel_time_s: By the fitted curve; without one the larger of both, or the launch floor.
        communication_time_s: Sum over `collectives`.
        bound: What the op's time is spent on: "compute", "memory", "launch" or "communication".
    """

    name: str
    choice: int
    label: str
    placements_in: Mapping[str, str]
    placement_out: str
    collectives: tuple[Collective, ...]
    work_flops: float
    traffic_bytes: float
    compute_time_s: float
    memory_time_s: float
    kernel_time_s: float
    communication_time_s: float
    bound: str

    @property
    def time_s(self) -> float:
        """Kernel and communication time; they do not overlap."""
        return self.kernel_time_s + self.communication_time_s


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """Where the slowest pipeline stage's time goes, seconds."""

    layers: int
    layer_s: float
    embedding_s: float
    head_s: float
    send_recv_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU of the fullest stage, by kind."""

    weights: float
    kv_cache: float
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return math.fsum((self.weights, self.kv_cache, self.activations, self.overhead))


class Explanation(NamedTuple):
    """The part of an `Evaluation` that a reader wants and a search does not."""

    ops: tuple[OpBreakdown, ...]
    expected_error: float
    extrapolated: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """How fast a strategy would run, why, and whether it is allowed.

    The figures are given for infeasible strategies too; `violations` says what is broken. What `Explanation` names may
    be left out until someone reads it, compares the evaluation, pickles it or prints it: see `explained_by`.

    Attributes:
        ops: Per fused op of one layer, in the order of `Strategy.dims`.
        expected_error: Mean relative error to expect of the time and so of the throughput: errors of its kernels
            and collectives on rows held out from their fit, by their share of the time, and of measured serving.
        extrapolated: What the figure rests on that no measurement covers, largest share of the time first.
    """

    strategy: Strategy
    tokens_per_s_per_gpu: float
    tpot_s: float
    gpus: int
    memory_bytes: Memory
    violations: tuple[Violation, ...]
    stage: StageBreakdown
    # Defaults come from factories: a default in the class would be found before an explanation that is yet to come.
    ops: tuple[OpBreakdown, ...] = field(default_factory=tuple[OpBreakdown, ...])
    expected_error: float = field(default_factory=float)
    extrapolated: tuple[str, ...] = field(default_factory=tuple[str, ...])

    @property
    def feasible(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations

    @property
    def excess(self) -> float:
        """By how much limits are missed, all of them together, in factors of e; 0 if feasible."""
        return math.fsum(violation.excess for violation in self.violations)

    def explained_by(self, explain: Callable[[], Explanation]) -> Evaluation:
        """The same figures, with an explanation that is worked out when it is first asked for.

        Args:
            explain: Pure: whoever asks, and whenever, gets the same.
        """
        evaluation = object.__new__(Evaluation)
        figures = {name: value for name, value in vars(self).items() if name not in Explanation._fields}
        vars(evaluation).update(figures, _explain=explain)
        return evaluation

    if not TYPE_CHECKING:  # a type checker would take it for any attribute at all

        def __getattr__(self, name: str) -> Any:
            if name not in Explanation._fields or "_explain" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            vars(self).update(vars(self)["_explain"]()._asdict())
            return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
