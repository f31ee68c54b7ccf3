"""Microseconds of a call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_LEAST_S = 0.02
"""Least time of one sample, of as many calls as that takes: clocks and launches are much shorter. [assumed]"""
_SAMPLES = 5


def median_us(call: Callable[[int], object], device: torch.device) -> float:
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
