"""Seconds and bytes of a sharded matrix product on a machine: its collectives, and the local product at its curve.

The axes of the mesh lie on the machine as they are written, the last one between neighbours. On a torus each of them
is an axis of the torus, so that a collective over several has the links of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sim.prices.collectives import at_link_peak
from sim.prices.curves import Gemm
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.hardware import Hardware
from sim.prices.priced import PricedKernel
from sim.prices.roofline import Kernel, kernel_time
from sim.prices.torus import torus_time_s
from sim.sharding.placement import PlacementError
from sim.sharding.redistribute import sent_share
from sim.sharding.routes import RouteStep
from sim.sharding.sharded_matmul import MatmulPlan, ShardedMatmul, matmul_plans
from sim.step.mesh_moves import axes_of, step_price

MatmulObjective = Literal["time", "bytes"]
MATMUL_DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")
"""Formats that both operands and the result may have."""


@dataclass(frozen=True, slots=True)
class PricedMatmul:
    """A plan and what it takes.

    Attributes:
        plan: Routes and product.
        moves: Of each step of `plan.steps`, on one device.
        product: Of the local product.
    """

    plan: MatmulPlan
    moves: tuple[PricedKernel, ...]
    product: PricedKernel

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, one after the other."""
        return math.fsum(move.time_s for move in self.moves)

    @property
    def total_s(self) -> float:
        """Seconds where nothing overlaps."""
        return self.communication_s + self.product.time_s

    @property
    def overlapped_s(self) -> float:
        """Seconds where all communication hides behind the product, or the product behind it: the least there is."""
        return max(self.communication_s, self.product.time_s)

    @property
    def interval_s(self) -> tuple[float, float]:
        """The time between which the true one lies in 90 % of cases, all parts being off to one side."""
        parts = (*self.moves, self.product)
        low, high = (math.fsum(part.time_s * part.interval[side] for part in parts) for side in (0, 1))
        return low, high


def priced_matmuls(
    hardware: Hardware, matmul: ShardedMatmul, dtype: Dtype = "bf16", objective: MatmulObjective = "time"
) -> list[PricedMatmul]:
    """Every plan that is the best for what the axes do in the product, the best of all first.

    Args:
        hardware: Whose links and kernels.
        matmul: What is multiplied.
        dtype: Format of both operands and of the result.
        objective: "time" for the least seconds where nothing overlaps, "bytes" for the fewest bytes sent.

    Raises:
        RedistributionError: The result shall be left in parts of a sum where no plan leaves any.
        PlacementError: A tensor cannot lie so, or the mesh has more axes than the torus.
    """
    torus = hardware.collectives.torus
    if torus and len(matmul.mesh) > torus.dims:
        raise PlacementError(
            f"{hardware.name} is a torus of {torus.dims} axes, the mesh has {len(matmul.mesh)}: "
            f"{', '.join(matmul.mesh)}; join some"
        )

    def microseconds(step: RouteStep) -> float:  # not seconds: costs are compared to 9 decimals
        return _move(hardware, matmul, step).time_s * 1e6

    def product_microseconds(sizes: Mapping[str, int]) -> float:
        return _product(hardware, matmul, sizes, dtype).time_s * 1e6

    each = DTYPE_BYTES[dtype]
    if objective == "bytes":
        plans = matmul_plans(matmul, each, lambda step: step.bytes_per_device)
    else:
        plans = matmul_plans(matmul, each, microseconds, product_microseconds)
    return [
        PricedMatmul(
            plan,
            tuple(_move(hardware, matmul, step) for step in plan.steps),
            _product(hardware, matmul, plan.local_sizes, dtype),
        )
        for plan in plans
    ]


def unsharded_s(hardware: Hardware, matmul: ShardedMatmul, dtype: Dtype = "bf16") -> float:
    """Seconds of the whole product on one device."""
    return _product(hardware, matmul, matmul.sizes, dtype).time_s


def _move(hardware: Hardware, matmul: ShardedMatmul, step: RouteStep) -> PricedKernel:
    lengths = matmul.degrees[step.axis : step.axis + step.span]
    if step.collective is None or math.prod(lengths) == 1:
        return PricedKernel(0.0, 0.0, (1.0, 1.0))
    torus = hardware.collectives.torus
    if torus is None:
        return step_price(hardware, axes_of(**matmul.mesh), step)
    tensor_bytes = step.bytes_per_device / sent_share(step.collective, math.prod(lengths))
    return at_link_peak(hardware, torus_time_s(torus, step.collective, lengths, tensor_bytes))


def _product(hardware: Hardware, matmul: ShardedMatmul, sizes: Mapping[str, int], dtype: Dtype) -> PricedKernel:
    """Of one device; a product with a dim that all three tensors share is priced by medians."""
    first, second, result = (*matmul.operands, matmul.result)
    elements = sum(math.prod(sizes[dim] for dim in tensor.dims) for tensor in (first, second, result))
    inner = math.prod(size for dim, size in sizes.items() if dim not in result.dims)
    columns = math.prod(size for dim, size in sizes.items() if dim not in first.dims)
    rows = math.prod(size for dim, size in sizes.items() if dim not in second.dims)
    batched = any(dim in first.dims and dim in second.dims and dim in result.dims for dim in sizes)
    flops = 2.0 * math.prod(sizes.values())
    shape = None if batched else Gemm(rows, inner, columns)
    took = kernel_time(hardware, Kernel("gemm", dtype, dtype, flops, elements * DTYPE_BYTES[dtype], shape))
    return PricedKernel(took.total_s, took.error, took.interval, took.extrapolated)
