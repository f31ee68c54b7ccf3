"""Physical terms of the kernels whose time is a plain non-negative sum, one shape at a time.

Each function returns the terms of one kernel; a time is their product with coefficients >= 0. Every term is
continuous and non-decreasing in tokens, rows, widths and lengths, so the time is too. Microseconds at the machine's
peak rates, or counts; pure Python because a search evaluates them one by one.
"""

from __future__ import annotations

from sim.arrays import exp_of, larger, log1p_of, log2_of, smaller, sqrt_of
from sim.prices.dtypes import BYTES
from sim.prices.machine import Machine

# --- the MoE layer, piece by piece --------------------------------------------------------------------

LAUNCHES = 6
"""Launches of a measured layer: routing, permute, two grouped GEMMs, the activation between, finalize."""


def routing(tokens: float, experts: float, topk: float) -> list[float]:
    """Top-k over the router's logits and the sort by expert."""
    return [tokens * experts / 1e6, tokens * topk / 1e4, experts / 1e2, log1p_of(tokens)]


def permute(machine: Machine, tokens: float, rows: float, hidden: float) -> list[float]:
    """Copies tokens to rows in the order of their experts, or sums them back: both stream the same bytes."""
    return [(tokens + rows) * hidden * 2 / machine.hbm_bytes_per_us, rows / 1e4]


def expert_activation(machine: Machine, rows: float, width: float) -> list[float]:
    """SwiGLU or GELU between the grouped GEMMs: rows of `width`."""
    return [rows * width * 4 / machine.hbm_bytes_per_us]


ASPECT = 0.05
"""Power of inner / columns that a GEMM's time grows with at equal bytes and FLOP. [fitted] nine series of dense GEMMs:
0.00 to 0.11 at 4 to 64 rows, more for small weights than for large ones."""


def grouped_gemm(
    machine: Machine,
    rows: float,
    active: float,
    local: float,
    inner: float,
    columns: float,
    dtype: str,
    *,
    skewed: bool = False,
) -> list[float]:
    """Rows of all experts times each one's [inner, columns] weights.

    Only layers were measured, the sum of two such GEMMs, and nothing in them says what either takes. So the terms see
    the area of the weights, and their aspect as dense GEMMs show it; see `ASPECT`.

    Args:
        machine: Whose rates and multiprocessors.
        rows: Tokens summed over the experts of the GPU.
        active: Experts that got any.
        local: Experts that the GPU holds.
        inner: Contracted width.
        columns: Output width, gate and up together.
        dtype: Format of weights and arithmetic.
        skewed: Whether some experts get most of the rows.
    """
    aspect, side = (inner / columns) ** ASPECT, sqrt_of(inner * columns)
    area = inner * columns * aspect
    weight = active * area * BYTES[dtype] / machine.hbm_bytes_per_us
    flop_each = 2 * area / machine.flop_per_us[dtype]
    flop = rows * flop_each
    across = larger(1.0, columns / 128)
    terms = [weight, flop]
    terms += [larger(active * tile, rows + active * tile / 2) * flop_each for tile in (64, 128)]
    terms += [larger(1.0, active * side / 128 / machine.sms + 0.5) * side / 1e3 * aspect, side / 1e3 * aspect]
    terms += [
        rows * (inner + columns) * 2 / machine.hbm_bytes_per_us,
        sqrt_of(weight * flop),
        weight / larger(active, 1.0),
    ]
    few = local * (1 - exp_of(-0.5 * rows / local)) * area * BYTES[dtype] / machine.hbm_bytes_per_us
    terms += [few, weight, flop] if skewed else [0.0, 0.0, 0.0]
    for tile in (16, 64, 128):
        waves = larger(1.0, larger(active, rows / tile + active / 2) * across / machine.sms + 0.5)
        terms += [waves * inner * tile * 256 * machine.sms / machine.flop_per_us[dtype]]
    return [*terms, active / 1e2, local / 1e2]


_CACHE_SHARES = (0.2, 0.4, 0.8, 1.6)
"""Of the L2 cache, at which operands begin to come from memory: entirely at twice as many bytes."""


def past_cache(machine: Machine, byte_us: float) -> list[float]:
    """What memory streams of operands that a benchmark leaves in the L2 cache: all, where the cache holds nothing.

    >>> card = Machine({}, 1e6, 1.0, 1.0, sms=1, l2_mb=10.0, node_gpus=1, host_gpus=1)
    >>> past_cache(card, 2.0), past_cache(card, 8.0), past_cache(card._replace(l2_mb=0.0), 2.0)
    ([0.0, 0.0, 0.0, 0.0], [8.0, 8.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0])
    """
    if not machine.l2_mb:
        return [byte_us] * len(_CACHE_SHARES)
    cached_us = machine.l2_mb * 1e6 / machine.hbm_bytes_per_us
    over = [larger(log2_of(larger(byte_us, 1e-9) / (share * cached_us)), 0.0) for share in _CACHE_SHARES]
    return [byte_us * smaller(each, 1.0) for each in over]


# --- attention --------------------------------------------------------------------------------------


def window_as_chunks(sequences: float, tokens: float, window: float) -> tuple[float, float]:
    """Shorter sequences, and the tokens of each, that see as many pairs as prompts under a sliding window.

    A window of w makes n tokens see n*w - w*w/2 pairs instead of n*n/2. Chunks of c tokens have n*c/2 pairs, so
    c = 2w - w*w/n: n where the window is as long, 2w where it is short.
    """
    if not window or window >= tokens:
        return sequences, tokens
    chunk = 2 * window - window**2 / tokens
    return sequences * tokens / chunk, chunk


def attention_prefill(
    machine: Machine, sequences: float, tokens: float, heads: float, kv_heads: float, head_dim: float, dtype: str
) -> list[float]:
    """Causal self-attention over `tokens` new tokens of each sequence."""
    queries, shared = sequences * heads, sequences * kv_heads
    flop = 2 * queries * head_dim * tokens * tokens / machine.flop_per_us[dtype]
    byte = (queries + shared) * tokens * head_dim * 4 / machine.hbm_bytes_per_us
    waves = larger(1.0, tokens / 128 * queries / machine.sms + 0.5)
    return [
        1.0,
        flop,
        byte,
        tokens / 1e3,
        waves * tokens * head_dim / 1e6,
        sqrt_of(flop * byte),
        sqrt_of(byte),
        queries * tokens / 1e6 * 128,
        head_dim / 128 * tokens / 1e3,
        queries * tokens * tokens / 1e8,
        larger(0.0, byte - 10),
        shared * tokens * head_dim / 1e8,
    ]


# --- messages ---------------------------------------------------------------------------------------


def expert_all_to_all_terms(
    machine: Machine,
    tokens: float,
    width_bytes: float,
    experts: float,
    topk: float,
    nodes: float,
    *,
    low_latency: bool,
) -> list[float]:
    """DeepEP's dispatch or combine over `nodes` nodes.

    Args:
        machine: Whose nodes.
        tokens: Tokens of one rank.
        width_bytes: Bytes of one token's row.
        experts: Experts of the whole layer.
        topk: Experts that a token visits.
        nodes: Nodes of the group.
        low_latency: A copy per expert; otherwise one per rank that holds any of them.
    """
    ranks = machine.host_gpus * nodes
    copies = tokens * topk if low_latency else tokens * ranks * (1 - (1 - 1 / ranks) ** topk)
    sent, each = copies * width_bytes / 1e5, tokens * width_bytes / 1e5
    terms = [1.0, sent, sqrt_of(sent), smaller(sent, 20.0), smaller(sent, 100.0)]
    if nodes > 1:
        # Low latency was measured at one width, top-k and number of experts: no term may distinguish these.
        hops = log2_of(nodes)
        farther = [smaller(larger(nodes / few - 1, 0.0), 1.0) for few in (2, 4)]
        terms += [hops, hops * sqrt_of(sent), sent * (nodes - 1) / nodes, *(sent * share for share in farther)]
        return terms if low_latency else [*terms, each, tokens / 1e2, each * nodes * (1 - (1 - 1 / nodes) ** topk)]
    terms += [tokens / 1e2, each, width_bytes / 1e4, experts / 1e3, topk / 10, tokens * topk / 1e3]
    terms += [tokens * experts / 1e5, experts * width_bytes / 1e7]
    return [*terms, sent * 8 / experts, each * 8 / experts, sent * 16 / (experts + 16)]


def send_recv(message_bytes: float) -> list[float]:
    """A message between two GPUs: launch, wire, and what sets in at some size."""
    megabytes = message_bytes / 1e6
    return [1.0, megabytes, sqrt_of(megabytes), smaller(megabytes, 1.0), smaller(megabytes, 0.1)]
