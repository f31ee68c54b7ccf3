"""The head of an EAGLE-3 draft: one layer that reads the hidden states of the model that it drafts for.

Source: Li et al., arXiv 2503.01840, section 3: three hidden states of the model are projected into one, and a decoder
layer makes the next token of it and of the one before. Public heads have one dense layer of the model's width and a
vocabulary of the 32,000 most frequent tokens.
"""

from __future__ import annotations

from dataclasses import replace

from sim.layers.mixers import GroupedAttention
from sim.layers.model import Model, Published, uniform_model

_VOCAB = 32_000
"""[published] draft_vocab_size of SpecForge's and AngelSlim's heads."""
_WIDENING = 6
"""Columns of the feed-forward over the width, where the model's own is no dense one. [assumed]"""
_HEAD_DIM, _PER_KV_HEAD = 128, 8
"""Of a model whose attention is of another kind. [assumed]"""


def eagle3_head(model: Model) -> Model:
    """A head for a model, whose repository is the published one.

    The projection of three hidden states has as many weights as `hidden` more columns of a gated feed-forward.

    >>> from sim.config.catalog import load_model
    >>> head = eagle3_head(load_model("qwen3_32b"))
    >>> head.layers, head.vocab, round(head.parameters / 1e9, 1)
    (1, 32000, 0.9)
    """
    hidden, dense = model.hidden, not model.is_moe
    grouped = next((group.attention for group in model.groups if isinstance(group.attention, GroupedAttention)), None)
    heads = (
        (grouped.heads, grouped.kv_heads, grouped.head_dim)
        if grouped
        else (hidden // _HEAD_DIM, max(1, hidden // _HEAD_DIM // _PER_KV_HEAD), _HEAD_DIM)
    )
    own = next((group.feed_forward.ffn_hidden for group in model.groups if dense and group.feed_forward), None)
    columns = (own or _WIDENING * hidden) + hidden
    found = uniform_model(f"{model.name}_eagle3", 1, hidden, columns, *heads, _VOCAB)
    public = model.published.eagle3_repository
    return replace(found, published=Published(repositories={"bf16": public} if public else {}))
