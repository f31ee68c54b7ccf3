"""Physical terms of sparse attention and of states of constant size, as `sim.prices.terms` has those of other kernels.

Sparse attention is all between its projections: scores of the indexer, the choice, attention over what was chosen, the
cache. Every term is non-decreasing in sequences, new tokens, cached tokens and heads.
"""

from __future__ import annotations

from sim.arrays import larger, log1p_of, sqrt_of
from sim.prices.machine import Machine
from sim.prices.terms import past_cache

_TILE_HEADS = 64
"""Query heads that kernels over one shared key multiply at least. [published] FlashMLA"""
_INDEX_ROW = 128 + 4
"""Bytes of an indexer's key and its scale."""
_PAIR_BYTES = 2 * 128 * 2
"""Bytes of a key and a value of 128 in bf16."""


def sparse_attention(
    machine: Machine,
    sequences: float,
    tokens: float,
    cached: float,
    heads: float,
    row_bytes: float,
    pair_width: float,
    query_width: float,
    index_width: float,
    topk: float,
    ratio: float,
    window: float,
) -> list[float]:
    """One layer's attention without its projections.

    Args:
        machine: Whose rates.
        sequences: Sequences.
        tokens: New tokens of each.
        cached: Tokens of each that are cached before.
        heads: Query heads of the GPU.
        row_bytes: Bytes of a cached key and value.
        pair_width: Products per query, key and head.
        query_width: Width of a query.
        index_width: Products per query and key that score it; 0 where none are scored.
        topk: Keys that a query reads at most.
        ratio: Tokens of a key.
        window: Tokens read beside.
    """
    new, end = sequences * tokens, cached + tokens
    keys = ratio * (_reach(end / ratio, topk) - _reach(cached / ratio, topk))
    keys += _reach(end, window) - _reach(cached, window) if window else 0.0
    scored = tokens * (cached + tokens / 2) / ratio if index_width else 0.0
    rate, hbm = machine.flop_per_us["bf16"], machine.hbm_bytes_per_us
    flop, padded = (2 * sequences * keys * each * pair_width / rate for each in (heads, larger(heads, _TILE_HEADS)))
    byte, index_flop = (
        sequences * keys * row_bytes / hbm,
        2 * sequences * scored * index_width / machine.flop_per_us["fp8"],
    )
    index_byte = sequences * end / ratio * _INDEX_ROW / hbm if index_width else 0.0
    terms = [1.0, flop, padded, byte, index_flop, index_byte, sequences * scored * 4 / hbm]
    terms += [new * heads * query_width * 4 / hbm, new / 1e3, end / 1e4, log1p_of(end), sequences / 1e2]
    terms += [sqrt_of(byte), sqrt_of(index_flop), sqrt_of(flop), new * 4096 * ratio / hbm if window else 0.0]
    terms += [larger(0.0, new * larger(1.0, heads / _TILE_HEADS) - machine.sms) / 1e3]
    terms += [larger(0.0, flop - at) for at in (30, 100, 300, 1000)] + [
        larger(0.0, byte - at) for at in (2, 8, 30, 100, 1000)
    ]
    terms += [larger(0.0, index_flop - 100), *(larger(0.0, new - at) / 1e3 for at in (64, 512, 2048, 8192))]
    terms += [sequences * keys * heads / 1e7, scored * sequences / 1e8]
    # Keys and values of the whole context, once or copied to every head, where an engine has no sparse kernel.
    once = sequences * end * _PAIR_BYTES / hbm
    terms += [once * heads, sequences * tokens * (cached + tokens / 2) * heads * 4 / hbm]
    terms += [larger(0.0, once - at) for at in (0, 10, 100, 1000)]
    return [*terms, *past_cache(machine, byte + index_byte)]


def _reach(position: float, most: float) -> float:
    """Keys that the queries up to a position read, `most` each at most."""
    return position**2 / 2 if position <= most else most * position - most**2 / 2


def convolution(machine: Machine, sequences: float, tokens: float, width: float) -> list[float]:
    """A short convolution over `width` channels of so many tokens of each sequence."""
    rows = sequences * tokens
    byte, hbm = rows * width * 4 / machine.hbm_bytes_per_us, machine.hbm_bytes_per_us
    terms = [1.0, byte, sequences * width * 12 / hbm, rows / 1e3, sqrt_of(byte), tokens / 1e3, sequences / 1e2]
    terms += [larger(0.0, byte - at) for at in (5, 50)]
    terms += [sequences * larger(0.0, tokens - at) / 1e3 for at in (64, 512, 2048, 8192)]
    return [*terms, *past_cache(machine, byte)]


def state_scan(
    machine: Machine, sequences: float, tokens: float, heads: float, key_dim: float, value_dim: float, width: float
) -> list[float]:
    """The way of so many tokens of each sequence through its state, a matrix per head; `width` channels come in.

    Prompts go through it in chunks of 64, one after the other, side by side over sequences and heads.
    """
    rows, state, hbm = sequences * tokens, heads * key_dim * value_dim, machine.hbm_bytes_per_us
    byte, streamed = sequences * state * 8 / hbm, rows * (width + 2 * heads * value_dim) * 2 / hbm
    flop = rows * (4 * state + 128 * heads * (2 * key_dim + value_dim)) / machine.flop_per_us["bf16"]
    waves = larger(1.0, sequences * heads / machine.sms)
    terms = [1.0, byte, streamed, flop, tokens / 1e3, waves * tokens / 1e3, sequences * heads / 1e3, sqrt_of(byte)]
    terms += [sqrt_of(streamed), sqrt_of(flop), rows / 1e3, waves]
    terms += [larger(0.0, byte - at) for at in (2, 10)] + [larger(0.0, streamed - at) for at in (10, 100)]
    terms += [sequences * larger(0.0, tokens - at) / 1e3 for at in (64, 512, 2048)]
    return [*terms, *past_cache(machine, byte + streamed)]
