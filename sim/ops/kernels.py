"""The work of a fused op before it is priced, and the kernels that it is made of."""

from __future__ import annotations

from typing import NamedTuple

from sim.ops.rank import Rank
from sim.prices.collectives import Collective
from sim.prices.curves import Gemm, GroupedGemm, KernelShape
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.roofline import Kernel


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
