"""What one GPU of a group holds, exchanges and launches, for given degrees and what is in the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

from sim.arrays import Lanes, by_distinct, picked
from sim.layers.choices import ShardedDim
from sim.layers.mixers import Attention
from sim.layers.model import FeedForward
from sim.layers.ops import Layer, Tensor
from sim.ops.sizes import GroupLoad, Load, element_bytes, layer_sizes, tensor_columns
from sim.prices.collectives import Collective, carried, collective_price, collectives_price
from sim.prices.curves import Gemm, GroupedGemm, KernelShape
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.mesh import MeshGroup, ep_group, tp_group
from sim.prices.priced import PricedKernel
from sim.prices.roofline import Kernel
from sim.sharding.grid import GridShard, sub_degrees
from sim.sharding.redistribute import sent_share
from sim.workload import Workload


class OpCost(NamedTuple):
    """One fused op under one choice on the busiest GPU, without the moves of its inputs.

    Numbers alone, because a search keeps one for every op, choice and degree that it has come by; `sim.step.breakdown`
    works out again what is behind them.

    Attributes:
        kernel_s: Its launches, one after the other.
        collective_s: Communication inside the op.
        weight_bytes: Weights of the op that the GPU holds.
        kv_bytes: KV cache of one layer and one microbatch that the GPU holds.
        activation_bytes: Its inputs and its output on one GPU.
        broken: The kind of limit that the choice breaks: "heads", "tokens" or None.
    """

    kernel_s: float
    collective_s: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    broken: str | None

    @property
    def time_s(self) -> float:
        """Launches and the op's own collectives, one after the other."""
        return self.kernel_s + self.collective_s


@dataclass(slots=True)
class Memo:
    """Costs that were computed already; strategies share most of them.

    Attributes:
        ops: By name and choice of the op.
        vocabulary: Of embedding, LM head and sampling: a `sim.step.vocabulary_layers.VocabularyCost`.
        vocabulary_work: What each of the three does, by name.
        moves: Seconds of a tensor's redistributions, by name, the other side's degree and load, and the choices.
        alike: Of many meshes' GPUs, seconds of a redistribution, by all that decides it.
    """

    ops: dict[tuple[str, int], OpCost] = field(default_factory=dict[tuple[str, int], OpCost])
    vocabulary: Any = None
    vocabulary_work: dict[str, Work] = field(default_factory=dict[str, "Work"])
    moves: dict[tuple[str, int, float, bool, tuple[int, ...]], tuple[float, ...]] = field(
        default_factory=dict[tuple[str, int, float, bool, tuple[int, ...]], tuple[float, ...]]
    )
    alike: dict[Any, Any] = field(default_factory=dict[Any, Any])


@lru_cache(maxsize=64)
def _widths(workload: Workload, layer_group: int, layer: Layer) -> Mapping[str, tuple[int, float]]:
    """(columns, bytes per element) of every tensor: what no degree changes."""
    layers = workload.model.groups[layer_group]
    return {
        tensor.name: (tensor_columns(workload.model, layers, tensor), element_bytes(workload, tensor))
        for tensor in layer.tensors
    }


@lru_cache(maxsize=1024)
def _memo_of_tokens(
    workload: Workload, layer_group: int, tp: int, cp: int, load: GroupLoad, cached_tokens: float
) -> Memo:
    """What the experts have no part in, shared by every GPU of as many tokens."""
    return Memo()


class Rank:
    """The busiest GPU of a group that shares its tokens. Pipeline stages do not change what a layer does on it.

    Attributes:
        workload: As given.
        layer_group: Index of the layers' group in the model.
        layers: That group.
        attention: How they mix tokens, for ops that only such layers have.
        feed_forward: Their feed-forward network, for ops that only layers with one have.
        load: What is in the step.
        tp: GPUs of the group: in the extended space those that share a sequence's attention (tp * cp), or those that
            share an expert (moe_tp).
        ep: Groups, each with experts of its own.
        cp: Degree over which the context is sharded, the innermost part of the group.
        head_tp: Degree over which heads are sharded, tp / cp.
        copies: Neighbouring groups that have the same tokens, where tokens do not travel to their experts' ranks.
        group_gpus: GPUs of the group, of which tp share what an op shards; more where it shards two letters.
        axis, experts_axis: How collectives over the group and between groups name their axis.
        layer: Ops and tensors of such a layer.
        in_lanes: Whether degrees and load are `sim.arrays.Lanes`: this is then a GPU of many meshes each.
        memo, memo_of_tokens: Costs of this GPU that are known, and those in which the experts have no part.
        sizes: The layer on one group, before the tp axis shards it.
        widths: Columns of every whole tensor, and bytes per element, by name.
        activation_each: Bytes per element of an activation.
        expert_dtype: Format of the experts' weights: the deployment's, or the one they are published in.
    """

    def __init__(
        self,
        workload: Workload,
        load: Load,
        tp: int,
        ep: int,
        layer: Layer,
        *,
        cp: int = 1,
        copies: int = 1,
        axis: str = "tp",
        experts_axis: str = "ep",
        layer_group: int = 0,
    ) -> None:
        self.workload = workload
        self.layer_group = layer_group
        self.layers = workload.model.groups[layer_group]
        self.attention = cast("Attention", self.layers.attention)
        self.feed_forward = cast("FeedForward", self.layers.feed_forward)
        self.load = load
        self.tp = tp
        self.ep = ep
        self.cp = cp
        self.head_tp = tp // cp
        self.copies = copies
        self.group_gpus = tp
        self.axis = axis
        self.experts_axis = experts_axis
        self.layer = layer
        self.sizes = layer_sizes(workload, load, ep, copies, layer_group)
        self.tp_group = tp_group(tp, *workload.hardware.tiers)
        self.activation_each = DTYPE_BYTES[workload.precisions.activations]
        self.expert_dtype: Dtype = workload.model.expert_dtype or workload.precisions.weights
        self.widths = _widths(workload, layer_group, layer)
        self.memo = Memo()
        self.in_lanes = isinstance(tp, Lanes)
        if self.in_lanes:
            self.memo_of_tokens = Memo()
        else:
            self.memo_of_tokens = _memo_of_tokens(workload, layer_group, tp, cp, self.sizes.load, load.cached_tokens)

    def with_workload(self, workload: Workload) -> Rank:
        """The same GPU of a workload that differs in what no layer knows, with nothing known of its costs."""
        found = copy.copy(self)
        found.workload, found.memo, found.memo_of_tokens = workload, Memo(), Memo()
        return found

    def of_lanes(self, lanes: Any) -> Rank:
        """The same GPUs in some lanes alone, with nothing known of their costs."""
        found = copy.copy(self)
        for name in ("load", "tp", "ep", "head_tp", "copies", "group_gpus", "tp_group"):
            setattr(found, name, picked(getattr(self, name), lanes))
        sizes = self.sizes
        found.sizes = replace(sizes, **{each.name: picked(getattr(sizes, each.name), lanes) for each in fields(sizes)})
        found.memo, found.memo_of_tokens = Memo(), Memo()
        return found

    @property
    def token_groups(self) -> int:
        """Groups with tokens of their own."""
        return self.ep // self.copies

    @property
    def ep_group(self) -> MeshGroup:
        """The GPUs of all groups, one of each."""
        return ep_group(self.group_gpus, self.ep, *self.workload.hardware.tiers)

    def shard(self, size: float, *, when: bool) -> int:
        """The largest of `tp` chunks of a dim when it is sharded, else the whole dim."""
        return math.ceil(size / self.tp) if when else math.ceil(size)

    def active_experts_of_a_share(self) -> float:
        """Expected local experts that one of `tp` equal shares of the tokens visits: more of them stay idle."""
        sizes = self.sizes
        return sizes.local_experts * (1 - (1 - sizes.active_experts / sizes.local_experts) ** (1 / self.tp))

    def local_heads(self) -> tuple[int, int]:
        """Query heads of a GPU when heads are sharded, and the KV heads they read, which several GPUs may hold.

        A GPU's query heads may begin inside the group that shares a KV head; the last such offset reaches
        into the most groups.
        """
        return self.heads_of(self.head_tp)

    def heads_of(self, degree: int) -> tuple[int, int]:
        """The same where so many GPUs share the heads."""
        if isinstance(degree, Lanes):
            return by_distinct(self.heads_of, degree)
        attention = self.attention
        heads, sharing = math.ceil(attention.heads / degree), attention.heads // attention.kv_heads
        last_offset = sharing - math.gcd(heads, sharing)
        return heads, min(attention.kv_heads, (last_offset + heads - 1) // sharing + 1)

    def local_qkv_columns(self) -> int:
        """Columns of the queries, keys and values of a GPU's heads when heads are sharded."""
        return self.attention.local_qkv_width(*self.local_heads())

    def columns_of(self, tensor: Tensor, degree: int) -> int:
        """Columns of a tensor on one of so many GPUs that share them; heads take the KV heads that they read along."""
        if tensor.name == "qkv" and degree > 1:
            return self.attention.local_qkv_width(*self.heads_of(degree))
        return math.ceil(self.widths[tensor.name][0] / degree)

    def tensor_bytes(self, tensor: Tensor) -> float:
        """Bytes of a whole tensor on one group: the V of the redistribution table."""
        columns, each = self.widths[tensor.name]
        return self._rows(tensor) * columns * each

    def local_bytes(self, tensor: Tensor, sharded: ShardedDim) -> float:
        """Bytes of a tensor on this GPU when tp shards that dim of it."""
        columns, each = self.widths[tensor.name]
        if isinstance(sharded, GridShard):
            rows = self._rows(tensor)
            degrees = sub_degrees(self.tp, sharded.inner_ranks)
            for dim, degree in zip((sharded.outer, sharded.inner), degrees, strict=True):
                if dim == len(tensor.letters) - 1:
                    columns = self.columns_of(tensor, degree)
                elif dim >= 0:
                    rows = math.ceil(rows / degree)
            return math.ceil(rows) * columns * each
        if sharded == "columns":
            columns = self.local_qkv_columns() if tensor.name == "qkv" else self.shard(columns, when=True)
        if sharded == "rows" and tensor.name == "qkv":  # attention shards requests as it shards heads, over tp alone
            return math.ceil(self.sizes.tokens / self.head_tp) * columns * each
        return self.shard(self._rows(tensor), when=sharded == "rows") * columns * each

    def _rows(self, tensor: Tensor) -> float:
        return self.sizes.expert_tokens if tensor.by_expert else self.sizes.tokens

    def tp_collective(
        self, kind: str, tensor_name: str, tensor_bytes: float, activation_each: float = 0.0
    ) -> tuple[Collective, ...]:
        """A collective over the group on a tensor of `tensor_bytes`; none at degree 1."""
        return self.collective(kind, self.axis, self.tp_group, tensor_name, tensor_bytes, activation_each)

    def tp_s(self, kind: str, tensor_bytes: float, activation_each: float = 0.0) -> float:
        """Seconds of that collective."""
        if self.tp == 1:
            return 0.0
        return self._price(kind, self.axis, self.tp_group, tensor_bytes, activation_each).time_s

    def collective(
        self,
        kind: str,
        axis: str,
        members: MeshGroup,
        tensor_name: str,
        tensor_bytes: float,
        activation_each: float = 0.0,
    ) -> tuple[Collective, ...]:
        """A collective over some GPUs on a tensor of `tensor_bytes`, see `collective_price`; none over one."""
        if members.degree == 1:
            return ()
        priced = self._price(kind, axis, members, tensor_bytes, activation_each)
        sent_bytes = math.nan if self.in_lanes else tensor_bytes * sent_share(kind, members.degree)
        return (carried(kind, axis, members.degree, tensor_name, sent_bytes, priced),)

    def _price(
        self, kind: str, axis: str, members: MeshGroup, tensor_bytes: float, activation_each: float
    ) -> PricedKernel:
        price = collectives_price if self.in_lanes else collective_price
        return price(self.workload.hardware, kind, members, tensor_bytes, axis, activation_each)


# --- kernels that it launches -----------------------------------------------------------------------


class Work(NamedTuple):
    """One op under one choice, before it is priced.

    Attributes:
        kernels: Its launches, in order.
        collectives: Communication inside the op: all-to-all over ep, a norm's statistic, ...
        weight_bytes: Weights of the op that the GPU holds.
        kv_bytes: KV cache of one layer and one microbatch that the GPU holds, or state of constant size.
        buffer_bytes: What the op holds besides its inputs, its output and its weight at rest.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...] = ()
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    buffer_bytes: float = 0.0


def elementwise(rank: Rank, flops: float, traffic_bytes: float, shape: KernelShape | str | None = None) -> Kernel:
    """A kernel that streams activations; those around the experts' GEMMs have a measured shape."""
    dtype = rank.workload.precisions.activations
    return Kernel("elementwise", dtype, dtype, flops, traffic_bytes, shape)


def gemm(rank: Rank, dtype: Dtype, shape: Gemm | GroupedGemm, input_each: float) -> Kernel:
    """A GEMM [rows, inner] x [inner, columns], or one per active expert that share the rows.

    Args:
        rank: Whose activations it reads and writes.
        dtype: Format of the weights and of the arithmetic.
        shape: Rows summed over the experts, widths, experts.
        input_each: Bytes per input element.
    """
    rows, inner, columns = shape[:3]
    matrices = shape.active if isinstance(shape, GroupedGemm) else 1.0
    weights = matrices * inner * columns * DTYPE_BYTES[dtype]
    traffic = rows * inner * input_each + weights + rows * columns * rank.activation_each
    return Kernel("gemm", dtype, dtype, 2.0 * rows * inner * columns, traffic, shape)
