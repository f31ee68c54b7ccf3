"""Shapes of sparse attention and of states of constant size, as they were measured and as layers have them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sim.prices.dtypes import DTYPE_BYTES

LATENT_WIDTH, INDEX_WIDTH, KEY_WIDTH = 576, 128, 512
"""Widths of all that was measured: a cached latent, an index head and MiniMax's heads, a compressed key."""
LATENT_ROW_BYTES, KEY_ROW_BYTES = 656, 584
"""Bytes of a latent and of a compressed key in fp8, rotary parts in bf16, with scales. [published] FlashMLA's caches"""
SparseKind = Literal["dsa", "dsa_shared", "csa", "hca", "msa"]
"""DeepSeek's sparse attention, with a choice of its own or another layer's; DeepSeek V4's compressed sparse and heavily
compressed attention, MiniMax's by blocks."""


class SparseAttention(NamedTuple):
    """All of sparse attention between its projections; see `sim.prices.mixer_terms.sparse_attention` for the sizes."""

    kind: SparseKind
    prompts: bool
    sequences: float
    tokens: float
    cached: float
    heads: float
    row_bytes: float
    pair_width: float
    query_width: float
    index_width: float
    topk: float
    ratio: float
    window: float

    @property
    def series(self) -> str:
        """The part of a series' name that says what was measured."""
        return f"{self.kind}_{'context' if self.prompts else 'generation'}"


StateKind = Literal["gdn", "kda", "mamba2"]


class Convolution(NamedTuple):
    """The short convolution in front of a state of constant size."""

    kind: StateKind
    prompts: bool
    sequences: float
    tokens: float
    width: float


class StateScan(NamedTuple):
    """The way through a state of constant size; see `sim.prices.mixer_terms.state_scan` for the sizes."""

    kind: StateKind
    prompts: bool
    sequences: float
    tokens: float
    heads: float
    key_dim: float
    value_dim: float
    width: float


def sparse_shape(
    kind: SparseKind, sizes: tuple[float, float, float, float], *, fp8: bool, prompts: bool, topk: int, index: int
) -> SparseAttention:
    """The shape of a kind of measured sparse attention: sequences, new and cached tokens, heads; index heads."""
    if kind in ("dsa", "dsa_shared"):
        widths = (
            float(LATENT_ROW_BYTES) if fp8 else 2.0 * LATENT_WIDTH,
            2.0 * LATENT_WIDTH - 64,
            LATENT_WIDTH,
            index * INDEX_WIDTH * (kind == "dsa"),
        )
        return SparseAttention(kind, prompts, *sizes, *widths, topk, 1.0, 0.0)
    if kind == "msa":
        kv_bytes = max(1.0, sizes[3] / 16) * 2 * INDEX_WIDTH * DTYPE_BYTES["fp8" if fp8 else "bf16"]
        return SparseAttention(
            kind, prompts, *sizes, kv_bytes, 2 * INDEX_WIDTH, INDEX_WIDTH, index * INDEX_WIDTH, topk, 1.0, 0.0
        )
    ratio, picked, scored = (4.0, topk, 64 * INDEX_WIDTH) if kind == "csa" else (128.0, 10**9, 0)
    return SparseAttention(
        kind, prompts, *sizes, float(KEY_ROW_BYTES), 2 * KEY_WIDTH, KEY_WIDTH, scored, picked, ratio, INDEX_WIDTH
    )
