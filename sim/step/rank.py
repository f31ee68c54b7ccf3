"""What one GPU of the tp group holds and exchanges, for given degrees and batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from sim.layers.choices import Side
from sim.layers.ops import Tensor, element_bytes, layer_ops, layer_sizes, tensor_columns
from sim.prices.collectives import Collective, collective_price, sent_share
from sim.prices.dtypes import DTYPE_BYTES
from sim.prices.mesh import ep_group, tp_group
from sim.prices.priced import Priced
from sim.workload import Workload


@lru_cache(maxsize=64)
def _widths(workload: Workload) -> Mapping[str, tuple[int, float]]:
    """(columns, bytes per element) of every tensor: what no degree changes."""
    return {
        tensor.name: (tensor_columns(workload.model, tensor), element_bytes(workload, tensor))
        for tensor in layer_ops(workload.model).tensors
    }


@lru_cache(maxsize=1024)
def _remembered_of_tokens(workload: Workload, tp: int, cp: int, tokens: int) -> dict[tuple[object, ...], object]:
    return {}


class Rank:
    """The busiest GPU under (tp, ep, batch). Pipeline stages do not change what a layer does on it.

    Attributes:
        workload, tp, ep: As given; in the extended space tp counts the whole group that shares a sequence's
            attention (tp * cp), or the one that shares an expert (moe_tp).
        cp: Degree over which the context is cut, the innermost part of the group.
        head_tp: Degree over which heads are cut, tp / cp.
        axis, experts_axis: How collectives over the group and between groups name their axis.
        layer: Ops and tensors of the model's layer.
        remembered: Costs that `sim.step.costs` has worked out for this GPU already; strategies share most of them.
        remembered_of_tokens: The same of what the experts have no part in, shared with every GPU of as many tokens.
        sizes: The layer on one ep rank, before the tp axis cuts it.
        activation_each, weight_each: Bytes per element.
    """

    def __init__(
        self,
        workload: Workload,
        tp: int,
        ep: int,
        batch: int,
        *,
        cp: int = 1,
        axis: str = "tp",
        experts_axis: str = "ep",
    ) -> None:
        self.workload = workload
        self.tp = tp
        self.ep = ep
        self.cp = cp
        self.head_tp = tp // cp
        self.axis = axis
        self.experts_axis = experts_axis
        self.layer = layer_ops(workload.model)
        self.sizes = layer_sizes(workload, ep, batch)
        self.tp_group = tp_group(tp, workload.hardware.node_gpus)
        self.ep_group = ep_group(tp, ep, workload.hardware.node_gpus)
        self.activation_each = DTYPE_BYTES[workload.precisions.activations]
        self.weight_each = DTYPE_BYTES[workload.precisions.weights]
        self._widths = _widths(workload)
        self.remembered: dict[tuple[object, ...], object] = {}
        self.remembered_of_tokens = _remembered_of_tokens(workload, tp, cp, self.sizes.tokens)

    def cut(self, size: float, *, when: bool) -> int:
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
        model = self.workload.model
        heads, group = math.ceil(model.heads / self.head_tp), model.heads // model.kv_heads
        last_offset = group - math.gcd(heads, group)
        return heads, min(model.kv_heads, (last_offset + heads - 1) // group + 1)

    def local_qkv_columns(self) -> int:
        """Columns of the queries, keys and values of a GPU's heads when heads are sharded."""
        heads, kv_heads = self.local_heads()
        return (heads + 2 * kv_heads) * self.workload.model.head_dim

    def tensor_bytes(self, tensor: Tensor) -> float:
        """Bytes of a whole tensor on one ep rank: the V of the redistribution table."""
        columns, each = self._widths[tensor.name]
        return self._rows(tensor) * columns * each

    def local_bytes(self, tensor: Tensor, side: Side) -> float:
        """Bytes of a tensor on this GPU when tp cuts that side of it."""
        columns, each = self._widths[tensor.name]
        if side == "columns":
            columns = self.local_qkv_columns() if tensor.name == "qkv" else self.cut(columns, when=True)
        if side == "rows" and tensor.name == "qkv":  # attention cuts requests as it cuts heads, over tp alone
            return math.ceil(self.sizes.tokens / self.head_tp) * columns * each
        return self.cut(self._rows(tensor), when=side == "rows") * columns * each

    def _rows(self, tensor: Tensor) -> float:
        return self.sizes.expert_tokens if tensor.by_expert else self.sizes.tokens

    def tp_collective(self, kind: str, tensor_name: str, tensor_bytes: float) -> tuple[Collective, ...]:
        """A collective over the group on a tensor of `tensor_bytes`; none at degree 1."""
        if self.tp == 1:
            return ()
        priced = self._tp_price(kind, tensor_bytes)
        return (Collective(kind, self.axis, self.tp, tensor_name, tensor_bytes * sent_share(kind, self.tp), *priced),)

    def tp_s(self, kind: str, tensor_bytes: float) -> float:
        """Seconds of that collective."""
        return self._tp_price(kind, tensor_bytes).time_s if self.tp > 1 else 0.0

    def _tp_price(self, kind: str, tensor_bytes: float) -> Priced:
        return collective_price(self.workload.hardware, kind, self.tp_group, tensor_bytes, self.axis)
