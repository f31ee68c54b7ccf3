"""Physical terms under the tables of `sim.prices.tables`, over arrays of shapes.

A kernel's base time is `terms @ coefficients` with coefficients >= 0. Every term is non-decreasing in every size, so
the base is too. The machine's rates only fix units and where a cache ends; no term claims that they are reached.
Ceilings may step here: a table sees them at its vertices alone and runs straight in between.
"""

from __future__ import annotations

import numpy as np

from sim.arrays import Floats
from sim.prices.dtypes import BYTES
from sim.prices.machine import Machine

_L2_SHARES = (0.12, 0.3, 0.5, 0.7, 0.9, 1.2)
"""KV cache over the L2 cache at which streaming may begin to cost more."""
_L2_KINKS = (0.08, 0.2, 0.4, 0.6, 0.8, 1.0)


def _ramp(x: Floats, at: float) -> Floats:
    """X once it is past `at`, smoothly nothing before; non-decreasing."""
    return x * _step(x, at, 8.0)


def _step(x: Floats, at: float, width: float = 3.0) -> Floats:
    return 1 / (1 + np.exp(-np.clip((np.log(x) - np.log(at)) * width, -40, 40)))


def gemm_s(machine: Machine, m: Floats, n: Floats, k: Floats, dtype: str) -> Floats:
    """[points, terms] of C[m, n] = A[m, k] B[k, n]: launch, FLOP, bytes, the K loop, waves of four tile sizes."""
    each = BYTES[dtype]
    flop = 2 * m * n * k / machine.flop_per_us[dtype]
    byte = (each * (m * k + n * k) + 2 * m * n) / machine.hbm_bytes_per_us
    terms = [np.ones_like(flop), flop, byte, np.sqrt(flop * byte), k / 1e3, m * k / 1e6]
    for rows, columns in ((64, 64), (64, 128), (128, 128), (128, 256)):
        waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / machine.sms)
        terms += [waves * k * 2 * rows * columns * machine.sms / machine.flop_per_us[dtype], waves]
    return np.stack(terms, 1)


def attention_decode_s(
    machine: Machine, streams: Floats, kv_len: Floats, group: Floats, head_dim: Floats, dtype: str
) -> Floats:
    """[points, terms] of one new token per sequence.

    Args:
        machine: Whose rates and cache.
        streams: Sequences times KV heads.
        kv_len: Cached tokens.
        group: Query heads per KV head.
        head_dim: Width of a head.
        dtype: Format of the KV cache.
    """
    byte = 2 * streams * kv_len * head_dim * BYTES[dtype] / machine.hbm_bytes_per_us
    flop = 4 * streams * group * head_dim * kv_len / machine.flop_per_us["bf16"]
    query = streams * group * head_dim * 4 / machine.hbm_bytes_per_us
    tile = 4 * streams * np.ceil(group / 16) * 16 * head_dim * kv_len / machine.flop_per_us["bf16"]
    cached_us = machine.l2_mb * 1e6 / machine.hbm_bytes_per_us
    cached = streams * kv_len * head_dim / 1e6
    terms = [np.ones_like(byte), byte, flop, query, kv_len / 1e3, tile, (group > 16) * flop, np.sqrt(byte)]
    terms += [head_dim / 128, np.sqrt(byte * flop), streams * kv_len / 1e6, streams / 1e3, np.log(kv_len)]
    terms += [np.log1p(streams / 16)]
    terms += [_ramp(byte, share * cached_us) for share in _L2_SHARES]
    terms += [np.maximum(0, byte - share * cached_us) for share in _L2_KINKS]
    terms += [np.maximum(0, streams - machine.sms * waves) / 1e3 for waves in (1, 4)]
    terms += [np.maximum(0, streams * group - 2**i) / 1e3 for i in (9, 12)]
    terms += [_step(cached, at) for at in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)]
    terms += [_step(kv_len, at) for at in (64, 256, 1024, 4096)]
    terms += [np.sqrt(streams) / 10, np.maximum(0, streams * np.ceil(group / 8) - machine.sms) / 1e3]
    terms += [streams * kv_len * group * head_dim / 1e8, group / 16, group * head_dim * kv_len / 1e6]
    return np.stack(terms, 1)


def attention_prefill_s(
    machine: Machine, queries: Floats, tokens: Floats, group: Floats, head_dim: Floats, dtype: str
) -> Floats:
    """[points, terms] of causal self-attention over new tokens.

    Args:
        machine: Whose rates and multiprocessors.
        queries: Sequences times query heads.
        tokens: New tokens of each sequence.
        group: Query heads per KV head.
        head_dim: Width of a head.
        dtype: Format of the arithmetic.
    """
    shared = queries / group
    flop = 2 * queries * head_dim * tokens * tokens / machine.flop_per_us[dtype]
    byte = (queries + shared) * tokens * head_dim * 4 / machine.hbm_bytes_per_us
    wave = np.maximum(1.0, tokens / 128 * queries / machine.sms + 0.5)
    long = tokens * head_dim / 1e6
    # Tiles of 128 rows: of one head's queries, or of all that share a KV head.
    apart, packed = np.ceil(tokens / 128) * queries, np.ceil(tokens * group / 128) * shared
    pairs = np.ceil(np.ceil(tokens / 256) * queries / machine.sms)
    terms = [np.ones_like(flop), flop, byte, tokens / 1e3, wave * long, np.sqrt(flop * byte), np.sqrt(byte)]
    terms += [queries * tokens / 1e6 * 128, head_dim / 128 * tokens / 1e3, queries * tokens * tokens / 1e8]
    terms += [np.maximum(0, byte - 10), shared * tokens * head_dim / 1e8, head_dim / 128, np.log1p(tokens)]
    terms += [shared / 1e3, queries / 1e3, shared * head_dim / 1e5, queries * head_dim / 1e5, pairs * long]
    for tiles in (packed, apart):
        terms += [np.ceil(tiles / machine.sms), np.ceil(tiles / machine.sms) * long]
    terms += [np.maximum(0, packed - machine.sms) / 1e3, np.maximum(0, apart - machine.sms) * head_dim / 1e5]
    return np.stack(terms, 1)


def latent_decode_s(machine: Machine, sequences: Floats, kv_len: Floats, heads: Floats, dtype: str) -> Floats:
    """[points, terms] of one new token per sequence over latents: 512 + 64 per cached token, read by every head."""
    byte = sequences * kv_len * 576 * BYTES[dtype] / machine.hbm_bytes_per_us
    flop, padded = (
        2 * sequences * each * kv_len * 1088 / machine.flop_per_us["bf16"] for each in (heads, np.maximum(heads, 64.0))
    )
    terms = [np.ones_like(byte), byte, flop, padded, sequences * heads * 1088 * 2 / machine.hbm_bytes_per_us]
    terms += [kv_len / 1e3, np.log(np.maximum(kv_len, 1.0)), sequences / 1e2, sequences * kv_len / 1e6]
    cached_us = machine.l2_mb * 1e6 / machine.hbm_bytes_per_us
    terms += [np.sqrt(byte), np.sqrt(flop), *(_ramp(byte, share * cached_us) for share in _L2_SHARES)]
    return np.stack(terms, 1)


def collective(machine: Machine, message_bytes: Floats, degree: Floats, kind: str) -> Floats:
    """[points, terms] of a collective inside a node: launch, hops, wire time, and what sets in at some size."""
    v, others = message_bytes, degree - 1
    share = 2 * others / degree if kind == "all_reduce" else others / degree
    wire, one = v * share / machine.nvlink_bytes_per_us, np.ones_like(v)
    terms = [one, one * (degree - 2), wire, wire * (degree > 2), wire * (degree > 4), np.sqrt(wire)]
    terms += [np.minimum(wire, 3), np.minimum(wire, 10) * others, np.minimum(wire, 30)]
    terms += [np.log1p(v / 4096), np.log1p(v / 65536), np.log1p(v / 1e6)]
    terms += [v / 1e6 * others, np.minimum(v / 1e6, 1) * others]
    return np.stack(terms, 1)
