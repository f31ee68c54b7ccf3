"""What stands between the parts of a layer where the residual stream is more than one sum.

Hyper-connections carry several streams: each part of a layer reads a mix of them and adds what it leaves to each,
by weights that a small fp32 product of all streams says. Attention residuals keep the stream every few layers, and each
part reads a mix of what was kept. Sources: DeepSeek-V4 (DeepSeek-AI, 2026), section 2.2; vLLM's models of Kimi K3.
No public table has these kernels: they stream what they read and write. [assumed]
"""

from __future__ import annotations

from sim.ops.rank import Rank, elementwise
from sim.prices.roofline import Kernel

_UNMEASURED_STREAMS, _UNMEASURED_BLOCKS = "hyper-connections without measured kernels", "attention residuals likewise"
_MIX_BYTES = 4
"""A mix's weights are fp32. [published] vLLM's and SGLang's models of DeepSeek V4."""


def mix_before(rank: Rank, rows: int, columns: int) -> tuple[tuple[Kernel, ...], float]:
    """Kernels in front of a part's norm on a shard of a hidden state that is mixed, and bytes of their weights."""
    model, each = rank.workload.model, rank.activation_each
    if model.residual_streams > 1:
        read, mixes = model.residual_streams * columns, model.stream_mix_columns
        weight_bytes = 1.0 * read * mixes * _MIX_BYTES
        flops, traffic = 2.0 * rows * read * (mixes + 1), rows * (read + columns) * each + weight_bytes
        return (elementwise(rank, flops, traffic, _UNMEASURED_STREAMS),), weight_bytes
    read = model.kept_residuals * columns
    return (elementwise(rank, 4.0 * rows * read, rows * (read + columns) * each, _UNMEASURED_BLOCKS),), 0.0


def mix_after(rank: Rank, rows: int, columns: int) -> tuple[Kernel, ...]:
    """Adds what a part left to every one of several streams; to one alone other kernels do."""
    streams = rank.workload.model.residual_streams
    flops, traffic = 2.0 * rows * columns * streams * (streams + 1), rows * (2 * streams + 1) * columns
    return (elementwise(rank, flops, traffic * rank.activation_each, _UNMEASURED_STREAMS),)
