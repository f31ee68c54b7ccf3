"""Seconds of a kernel: arithmetic, traffic or launch, whichever takes longest; never a hole."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_hardware
from sim.prices.dtypes import Dtype
from sim.prices.hardware import Hardware, KernelFamily
from sim.prices.roofline import Kernel, kernel_time

H100 = load_hardware("h100_sxm")
FAMILIES = st.sampled_from(get_args(KernelFamily))
DTYPES = st.sampled_from(get_args(Dtype))
AMOUNTS = st.floats(0, 1e18)
FACTORS = st.floats(1, 1e6)


def faster(hardware: Hardware, arithmetic: float, memory: float) -> Hardware:
    return dataclasses.replace(
        hardware,
        peak_flop_per_s={dtype: peak * arithmetic for dtype, peak in hardware.peak_flop_per_s.items()},
        hbm_bandwidth_bytes_per_s=hardware.hbm_bandwidth_bytes_per_s * memory,
    )


def test_a_large_bf16_gemm_takes_its_flops_at_the_measured_share_of_the_peak() -> None:
    # [8192]^3: 2 * 8192^3 = 1.0995e12 FLOP; 3 * 8192^2 * 2 B = 403 MB. At 0.72 to 0.84 of 989 TFLOP/s.
    time = kernel_time(H100, Kernel("gemm", "bf16", "bf16", 2 * 8192**3, 3 * 8192**2 * 2))
    assert time.total_s == time.compute_s
    assert 1.0995e12 / 989e12 / 0.84 <= time.total_s <= 1.0995e12 / 989e12 / 0.72


@pytest.mark.parametrize(
    ("family", "stream", "lowest", "highest"),
    [
        ("gemm", "bf16", 0.80, 0.80),
        ("gemm", "fp8", 0.66, 0.76),
        ("attention", "bf16", 0.79, 0.82),
        ("attention", "fp8", 0.61, 0.77),
    ],
)
def test_streaming_reaches_the_measured_share_of_the_hbm_bandwidth(
    family: KernelFamily, stream: Dtype, lowest: float, highest: float
) -> None:
    time = kernel_time(H100, Kernel(family, "bf16", stream, 0.0, 3.35e12))  # one second at the peak
    assert time.total_s == time.memory_s
    assert lowest <= 1 / time.total_s <= highest


def test_a_large_fp8_gemm_reaches_the_measured_share_of_its_peak() -> None:
    time = kernel_time(H100, Kernel("gemm", "fp8", "fp8", 1979e12, 0.0))
    assert 0.50 <= 1 / time.total_s <= 0.65


@pytest.mark.parametrize(("family", "lowest", "highest"), [("gemm", 3e-6, 5e-6), ("attention", 6e-6, 13e-6)])
def test_the_smallest_launch_takes_its_measured_floor(family: KernelFamily, lowest: float, highest: float) -> None:
    assert lowest <= kernel_time(H100, Kernel(family, "bf16", "bf16", 1.0, 1.0)).total_s <= highest


@settings(derandomize=True, deadline=None)
@given(FAMILIES, DTYPES, DTYPES, AMOUNTS, AMOUNTS, FACTORS, FACTORS)
def test_time_grows_with_work_and_never_with_speed(
    family: KernelFamily, dtype: Dtype, stream: Dtype, flops: float, traffic: float, more: float, rate: float
) -> None:
    time = kernel_time(H100, Kernel(family, dtype, stream, flops, traffic))
    assert 0 < time.total_s < math.inf
    assert time.total_s == max(time.compute_s, time.memory_s, H100.efficiency[family].floor_s)
    assert kernel_time(H100, Kernel(family, dtype, stream, flops * more, traffic)).total_s >= time.total_s
    assert kernel_time(H100, Kernel(family, dtype, stream, flops, traffic * more)).total_s >= time.total_s
    assert kernel_time(faster(H100, rate, 1), Kernel(family, dtype, stream, flops, traffic)).total_s <= time.total_s
    assert kernel_time(faster(H100, 1, rate), Kernel(family, dtype, stream, flops, traffic)).total_s <= time.total_s


@settings(derandomize=True, deadline=None)
@given(FAMILIES, DTYPES, AMOUNTS)
def test_no_kernel_beats_the_speed_of_light(family: KernelFamily, dtype: Dtype, amount: float) -> None:
    time = kernel_time(H100, Kernel(family, dtype, dtype, amount, amount))
    assert time.compute_s >= amount / H100.peak_flop_per_s[dtype]
    assert time.memory_s >= amount / H100.hbm_bandwidth_bytes_per_s
