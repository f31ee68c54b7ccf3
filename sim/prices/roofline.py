"""Seconds of one kernel. The one place where efficiency enters.

A kernel takes what the fitted curve of its family says about its shape, never less than its
arithmetic or its HBM traffic at the peak. Without a curve it takes the longest of its arithmetic at
the median achieved FLOP/s, its traffic at the median bandwidth, and its launch floor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.prices.curves import REMEMBERED, Shape
from sim.prices.dtypes import Dtype
from sim.prices.hardware import Hardware, KernelFamily

_OVERHEAD_BOUND = 2.0
"""A fitted kernel waits for its launch when it takes this often the time of its arithmetic and its traffic."""


class Kernel(NamedTuple):
    """One launch on one GPU.

    Attributes:
        family: Kernel family, which selects the median efficiency.
        math_dtype: Format of the arithmetic, which selects the peak.
        stream_dtype: Format of the bulk of the bytes (weights, KV cache, activations).
        flops: Floating-point operations.
        traffic_bytes: HBM bytes read and written.
        shape: What fitted curves price; None for a kernel that none describes.
    """

    family: KernelFamily
    math_dtype: Dtype
    stream_dtype: Dtype
    flops: float
    traffic_bytes: float
    shape: Shape | None = None


class KernelTime(NamedTuple):
    """Seconds of one launch.

    Attributes:
        compute_s: Its arithmetic at the median achieved rate.
        memory_s: Its traffic at the median achieved bandwidth.
        total_s: What it takes.
        bound: What it waits for: "compute", "memory" or "launch".
        error: Expected relative error of `total_s`.
        extrapolated: What about it no measurement covers, or "".
    """

    compute_s: float
    memory_s: float
    total_s: float
    bound: str
    error: float
    extrapolated: str


@lru_cache(maxsize=REMEMBERED)
def kernel_time(hardware: Hardware, kernel: Kernel) -> KernelTime:
    """Seconds of a kernel on one GPU of the hardware."""
    family, math_dtype, stream_dtype, flops, traffic_bytes, shape = kernel
    efficiency = hardware.efficiency[family]
    light_compute_s = flops / hardware.peak_flop_per_s[math_dtype]
    light_memory_s = traffic_bytes / hardware.hbm_bandwidth_bytes_per_s
    compute_s = light_compute_s / efficiency.compute[math_dtype]
    memory_s = light_memory_s / efficiency.memory[stream_dtype]
    busy_s = max(compute_s, memory_s)
    bound = "compute" if compute_s >= memory_s else "memory"
    curves = hardware.curves
    priced = curves.kernel(shape, math_dtype, stream_dtype) if curves and shape else None
    if priced is None:
        bound = bound if busy_s >= efficiency.floor_s else "launch"
        error = hardware.errors.uncalibrated
        return KernelTime(compute_s, memory_s, max(busy_s, efficiency.floor_s), bound, error, "")
    total_s = max(priced.time_s, light_compute_s, light_memory_s)
    error = max(priced.error, hardware.errors.extrapolated) if priced.extrapolated else priced.error
    bound = bound if total_s <= _OVERHEAD_BOUND * busy_s else "launch"
    return KernelTime(compute_s, memory_s, total_s, bound, error, priced.extrapolated)
