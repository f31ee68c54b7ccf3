"""Seconds of one kernel. The one place where efficiency enters.

A kernel takes what the fitted curve of its family says about its shape, never less than its
arithmetic or its HBM traffic at the peak. Without a curve it takes the longest of its arithmetic at
the median achieved FLOP/s, its traffic at the median bandwidth, and its launch floor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.arrays import larger
from sim.prices.curves import MEMOISED, KernelShape
from sim.prices.dtypes import Dtype
from sim.prices.hardware import Hardware, KernelFamily
from sim.prices.kernel_fallbacks import leaning, slower_by
from sim.prices.priced import Interval

_OVERHEAD_BOUND = 2.0
"""A fitted kernel waits for its launch when it takes this often the time of its arithmetic and its traffic."""

PRICED_BY_MEDIANS = "kernels without a fitted curve"
"""What no measurement covers where a calibration lacks a kind of kernel."""


class Kernel(NamedTuple):
    """One launch on one GPU.

    Attributes:
        family: Kernel family, which selects the median efficiency.
        math_dtype: Format of the arithmetic, which selects the peak.
        stream_dtype: Format of the bulk of the bytes (weights, KV cache, activations).
        flops: Floating-point operations.
        traffic_bytes: HBM bytes read and written.
        shape: What fitted curves price; a text for a kernel that none describes and that a reader should hear of; None
            for one that the medians price well enough.
        fused: Whether it runs inside a neighbour's launch: it has its work, and no launch floor.
        unlike: What about its use was not measured although its shape was, or "".
    """

    family: KernelFamily
    math_dtype: Dtype
    stream_dtype: Dtype
    flops: float
    traffic_bytes: float
    shape: KernelShape | str | None = None
    fused: bool = False
    unlike: str = ""


class KernelTime(NamedTuple):
    """Seconds of one launch.

    Attributes:
        compute_s: Its arithmetic at the median achieved rate.
        memory_s: Its traffic at the median achieved bandwidth.
        total_s: What it takes.
        launch_s: It waits for its launch where arithmetic and traffic both take less.
        error: Mean relative error to expect of `total_s`.
        interval: Factors on `total_s` between which the true time lies in 90 % of cases.
        extrapolated: What about it no measurement covers, or "".
    """

    compute_s: float
    memory_s: float
    total_s: float
    launch_s: float
    error: float
    interval: Interval
    extrapolated: str

    @property
    def bound(self) -> str:
        """What it waits for: "compute", "memory" or "launch"."""
        if max(self.compute_s, self.memory_s) < self.launch_s:
            return "launch"
        return "compute" if self.compute_s >= self.memory_s else "memory"


@lru_cache(maxsize=MEMOISED)
def kernel_time(hardware: Hardware, kernel: Kernel) -> KernelTime:
    """Seconds of a kernel on one GPU of the hardware."""
    family, math_dtype, stream_dtype, flops, traffic_bytes, shape, fused, unlike = kernel
    efficiency = hardware.efficiency[family]
    light_compute_s = flops / hardware.peak_flop_per_s[math_dtype]
    light_memory_s = traffic_bytes / hardware.hbm_bandwidth_bytes_per_s
    compute_s = light_compute_s / efficiency.compute[math_dtype]
    memory_s = light_memory_s / efficiency.memory[stream_dtype]
    curves = hardware.curves
    named = shape if isinstance(shape, str) else ""
    priced = curves.kernel(shape, math_dtype, stream_dtype) if curves and shape and not isinstance(shape, str) else None
    if priced is None:
        floor_s = 0.0 if fused else efficiency.floor_s
        unsure = hardware.errors.by_medians(larger(compute_s, memory_s, floor_s))
        unmeasured = named or unlike or (PRICED_BY_MEDIANS + leaning(stream_dtype) if curves and shape else "")
        interval = (unsure.interval[0], unsure.interval[1] * slower_by(stream_dtype))
        return KernelTime(compute_s, memory_s, unsure.time_s, floor_s, unsure.error, interval, unmeasured)
    if curves and unlike and not priced.extrapolated:
        priced = curves.beyond(priced, unlike)
    total_s = larger(priced.time_s, light_compute_s, light_memory_s)
    least_s = total_s / _OVERHEAD_BOUND
    return KernelTime(compute_s, memory_s, total_s, least_s, priced.error, priced.interval, priced.extrapolated)
