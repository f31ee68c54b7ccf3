"""GEMMs and attention of one GPU, as rows of `gemm.csv`, `attention_decode.csv` and `attention_prefill.csv`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MeasuredRow = dict[str, Any]
_ROTATED_BYTES = 512e6
"""Weights that calls go through in turn: more than any cache holds. [assumed]"""
_MEMORY_SHARE = 0.5
"""Of a GPU's free memory that one shape may take. [assumed]"""
_LEAST_S = 0.02
"""Least time of one sample, of as many calls as that takes: clocks and launches are much shorter. [assumed]"""
_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """Which shapes to measure.

    Attributes:
        rows: M of GEMMs.
        weights: (N, K) of GEMMs.
        batches, lengths: Sequences, and cached tokens or tokens of prompts.
        heads: (query heads, KV heads, width) of one GPU.
        most_tokens: Most tokens of all sequences together.
        messages: Bytes of collectives and messages.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
    weights: tuple[tuple[int, int], ...] = tuple(
        (n, k) for n, k in product((256, 1024, 2560, 4096, 7168, 14336, 28672), repeat=2) if n * k <= 14336 * 8192
    )
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    lengths: tuple[int, ...] = (128, 512, 2048, 8192, 32768, 131072)
    heads: tuple[tuple[int, int, int], ...] = (
        *((8, 1, 128), (16, 2, 128), (32, 8, 128), (64, 8, 128)),
        *((8, 8, 128), (32, 32, 128), (8, 1, 64), (64, 8, 64), (32, 2, 256), (64, 1, 128)),
    )
    most_tokens: int = 2**20
    messages: tuple[int, ...] = field(default=tuple(1 << power for power in range(10, 30)))


TINY = MeasuringPlan((1, 8, 32), ((64, 64), (64, 128), (128, 64)), (1, 2), (16, 32), ((4, 2, 16),), 128, (1024, 65536))
"""A look at whether everything runs, in seconds and on a CPU too."""


def gemms(plan: MeasuringPlan, device: torch.device, framework: str) -> Iterator[MeasuredRow]:
    """C[m, n] = A[m, k] B[k, n] in bf16 and, where the device multiplies it, fp8 with one scale per tensor."""
    dtypes = ["bfloat16", *(["fp8"] if _multiplies_fp8(device) else [])]
    for dtype, (n, k), m in product(dtypes, plan.weights, plan.rows):
        each = 2 if dtype == "bfloat16" else 1
        if not _fits(device, each * (n * k + m * k) + 2 * m * n):
            continue
        copies = 1 if device.type == "cpu" else max(1, min(64, int(_ROTATED_BYTES / (each * n * k))))
        a = torch.randn(m, k, device=device).to(torch.bfloat16)
        weights = [torch.randn(n, k, device=device).to(torch.bfloat16) for _ in range(copies)]
        if dtype == "fp8":
            call = _fp8_call(a, weights)
        else:

            def call(index: int, a: torch.Tensor = a, weights: Sequence[torch.Tensor] = weights) -> torch.Tensor:
                return a @ weights[index % len(weights)].T

        yield {"framework": framework, "dtype": dtype, "m": m, "n": n, "k": k, "latency_us": _median_us(call, device)}


def _fp8_call(a: torch.Tensor, weights: Sequence[torch.Tensor]) -> Any:
    narrow, one = torch.float8_e4m3fn, torch.ones((), device=a.device)
    left, right = a.to(narrow), [weight.to(narrow) for weight in weights]

    def call(index: int) -> torch.Tensor:
        weight = right[index % len(right)].T
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return multiply(left, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return call


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def measure_attention_decode(plan: MeasuringPlan, device: torch.device, framework: str) -> Iterator[MeasuredRow]:
    """One new token per sequence over a bf16 cache."""
    for (heads, kv_heads, width), batch, length in product(plan.heads, plan.batches, plan.lengths):
        if batch * length > plan.most_tokens or not _fits(device, 4.0 * batch * length * kv_heads * width):
            continue
        latency_us = _attention_us(device, batch, 1, length, heads, kv_heads, width, causal=False)
        yield {
            "framework": framework,
            "kv_cache_dtype": "bfloat16",
            "batch_size": batch,
            "kv_len": length,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "latency_us": latency_us,
        }


def measure_attention_prefill(plan: MeasuringPlan, device: torch.device, framework: str) -> Iterator[MeasuredRow]:
    """Causal attention over the tokens of prompts."""
    for (heads, kv_heads, width), batch, length in product(plan.heads, plan.batches, plan.lengths):
        if batch * length > plan.most_tokens // 8 or not _fits(device, 8.0 * batch * length * heads * width):
            continue
        latency_us = _attention_us(device, batch, length, length, heads, kv_heads, width, causal=True)
        yield {
            "framework": framework,
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "batch_size": batch,
            "isl": length,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "latency_us": latency_us,
        }


def _attention_us(
    device: torch.device, batch: int, queries: int, length: int, heads: int, kv_heads: int, width: int, *, causal: bool
) -> float:
    shapes = ((heads, queries), (kv_heads, length), (kv_heads, length))
    query, key, value = (torch.randn(batch, *shape, width, device=device).to(torch.bfloat16) for shape in shapes)

    def call(_: int) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=heads != kv_heads)

    return _median_us(call, device)


def _fits(device: torch.device, size_bytes: float) -> bool:
    return device.type != "cuda" or size_bytes <= _MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def _median_us(call: Callable[[int], object], device: torch.device) -> float:
    """Median time of a call.

    On a GPU, calls are replayed from a CUDA graph, as engines do, so that no launch of the host's counts.

    Args:
        call: Takes a running number, by which it may choose among inputs so that none stays in a cache.
        device: Where it runs.
    """
    found = _on_gpu(call) if device.type == "cuda" else _sampled(lambda calls: _on_cpu(call, calls))
    return round(found, 4)


def _sampled(seconds_of: Callable[[int], float]) -> float:
    once_s = max(seconds_of(1), 1e-7)
    calls = max(1, min(1000, round(_LEAST_S / once_s)))
    return 1e6 * statistics.median(seconds_of(calls) / calls for _ in range(_SAMPLES))


def _on_cpu(call: Callable[[int], object], calls: int) -> float:
    start_s = time.perf_counter()
    for index in range(calls):
        call(index)
    return time.perf_counter() - start_s


def _on_gpu(call: Callable[[int], object]) -> float:
    """Source: the warm-up on a side stream that PyTorch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(3):
            call(index)
    torch.cuda.current_stream().wait_stream(side)
    graph, calls = torch.cuda.CUDAGraph(), 16
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)

    def seconds_of(replays: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3

    graph.replay()
    return _sampled(seconds_of) / calls
