"""Seconds of one kernel from its FLOPs and bytes. The one place where efficiency enters.

A kernel takes the longest of its arithmetic at the achieved FLOP/s, its HBM traffic at the
achieved bandwidth, and its launch floor. The achieved shares are medians per kernel family and
dtype; fitted curves over the kernel's shape belong here, in `kernel_time`, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.types import Dtype, Hardware, KernelFamily


class Kernel(NamedTuple):
    """One launch on one GPU.

    Attributes:
        family: Kernel family, which selects the efficiency.
        math_dtype: Format of the arithmetic, which selects the peak.
        stream_dtype: Format of the bulk of the bytes (weights, KV cache, activations).
        flops: Floating-point operations.
        traffic_bytes: HBM bytes read and written.
    """

    family: KernelFamily
    math_dtype: Dtype
    stream_dtype: Dtype
    flops: float
    traffic_bytes: float


class KernelTime(NamedTuple):
    """Seconds of one launch; `total_s` is the largest of the other two and of the launch floor."""

    compute_s: float
    memory_s: float
    total_s: float


def kernel_time(hardware: Hardware, kernel: Kernel) -> KernelTime:
    """Seconds of a kernel on one GPU of the hardware."""
    efficiency = hardware.efficiency[kernel.family]
    compute_s = kernel.flops / (hardware.peak_flop_per_s[kernel.math_dtype] * efficiency.compute[kernel.math_dtype])
    memory_s = kernel.traffic_bytes / (hardware.hbm_bandwidth_bytes_per_s * efficiency.memory[kernel.stream_dtype])
    return KernelTime(compute_s, memory_s, max(compute_s, memory_s, efficiency.floor_s))
