"""How a layer mixes tokens: softmax attention over keys of its own or over latents, or a state of constant size.

Each kind says how wide its fused projection and its output are, how many weights it has, and what it keeps per
sequence. `heads` is what tensor parallelism shares out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Indexer:
    """The scorer of sparse attention: it looks at every cached token and picks those that attention reads.

    Source: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), section 2.1, "lightning indexer".

    Attributes:
        heads: Its query heads; every GPU has all of them.
        head_dim: Width of each, and of the one key that it caches per token and layer.
        topk: Tokens that attention reads.
    """

    heads: int
    head_dim: int
    topk: int

    def parameters(self, hidden: int, query_width: int) -> int:
        """Weights: queries from a row of `query_width`, one key and one weight per head from the hidden state."""
        return query_width * self.heads * self.head_dim + hidden * (self.head_dim + self.heads)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Softmax attention whose query heads share KV heads; multi-head and multi-query attention are its ends.

    Attributes:
        heads, kv_heads: Of queries, and of keys and values.
        head_dim: Width of a query and a key.
        value_width: Width of a value if it differs; 0 for `head_dim`.
        window: Tokens that a token sees, itself the last; 0 for all.
        chunked: Whether the window is a chunk instead: a token sees its own chunk of `window` tokens so far.
        sinks: Tokens at the beginning that every token sees beside its window.
        output_gate: Whether a gate as wide as the queries is projected with them.
        indexer: Of sparse attention; None reads every cached token.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_width: int = 0
    window: int = 0
    chunked: bool = False
    sinks: int = 0
    output_gate: bool = False
    indexer: Indexer | None = None

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.value_width or self.head_dim

    @property
    def token_width(self) -> int:
        """Elements of one token's key and value in one KV head."""
        return self.head_dim + self.value_dim

    @property
    def query_width(self) -> int:
        """Columns that one head adds to the projection: its query, and its gate if it has one."""
        return self.head_dim * (2 if self.output_gate else 1)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection."""
        return self.local_qkv_width(self.heads, self.kv_heads)

    def local_qkv_width(self, heads: int, kv_heads: int) -> int:
        """The same of some heads."""
        return heads * self.query_width + kv_heads * self.token_width

    @property
    def output_width(self) -> int:
        """Columns of the output."""
        return self.heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Projection weights of one layer."""
        own = hidden * self.qkv_width + hidden * self.output_width
        return own + (self.indexer.parameters(hidden, hidden) if self.indexer else 0)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low-rank latents.

    The cache holds one latent and one rotary key per token, shared by all heads.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Attributes:
        heads: Query heads.
        head_dim: Width of each head's non-rotary query and key.
        query_rank: Width of the query latent; 0 projects queries straight from the hidden state.
        kv_rank: Width of the cached key/value latent.
        rope_dim: Width of the cached rotary key, and of each head's rotary query.
        value_dim: Width of each head's value.
        indexer: Of sparse attention; None reads every cached token.
    """

    heads: int
    head_dim: int
    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values as they come out of the latent."""
        return self.heads

    @property
    def cached_width(self) -> int:
        """Cached elements per token and layer, without the indexer's."""
        return self.kv_rank + self.rope_dim

    @property
    def query_width(self) -> int:
        """Columns of one head's query."""
        return self.head_dim + self.rope_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the projections' result: the queries and the one latent row."""
        return self.local_qkv_width(self.heads, self.heads)

    def local_qkv_width(self, heads: int, kv_heads: int) -> int:
        """The same of some heads: every GPU has the latent row."""
        return heads * self.query_width + self.cached_width

    @property
    def output_width(self) -> int:
        """Columns of the output."""
        return self.heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Projection weights of one layer."""
        queries = self.heads * self.query_width
        query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        key_value = hidden * self.cached_width + self.kv_rank * self.heads * (self.head_dim + self.value_dim)
        own = query + key_value + hidden * self.output_width
        return own + (self.indexer.parameters(hidden, self.query_rank or hidden) if self.indexer else 0)


LinearKind = Literal["gated_delta", "kimi_delta", "mamba2"]
"""gated_delta: Qwen3-Next. kimi_delta: Kimi Linear, its decay per channel and its gate from low-rank projections.
mamba2: Nemotron-H."""


@dataclass(frozen=True, slots=True)
class LinearMixer:
    """Linear attention or a state-space layer: a state of constant size per sequence instead of a cache.

    Each value head keeps a matrix [key_dim, value_dim] that every token updates. Sources: Gated Delta Networks (arXiv
    2412.06464); Kimi Linear (arXiv 2510.26692); Mamba-2 (arXiv 2405.21060), where `key_heads` are the groups,
    `key_dim` is the state's size, `heads` and `value_dim` the heads and their width.

    Attributes:
        heads: Value heads, which tensor parallelism shares out.
        key_heads: Heads of queries and keys, which value heads share.
        key_dim, value_dim: Width of a key and of a value.
        conv_kernel: Tokens that the short convolution before the state sees.
    """

    kind: LinearKind
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    @property
    def kv_heads(self) -> int:
        """Heads of keys, which value heads share."""
        return self.key_heads

    @property
    def output_width(self) -> int:
        """Columns of the output, and of its gate."""
        return self.heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: queries, keys, values, the output's gate and scalars."""
        return self.local_qkv_width(self.heads, self.key_heads)

    def local_qkv_width(self, heads: int, kv_heads: int) -> int:
        """The same of some heads.

        Scalars are a decay per value head and, but for Mamba-2, a strength of the update. `kimi_delta` has its gates
        from low-rank projections, whose inner rows, `value_dim` wide each, every GPU has.
        """
        scalars = heads * (1 if self.kind == "mamba2" else 2)
        if self.kind == "kimi_delta":
            return self.local_conv_width(heads, kv_heads) + heads + 2 * self.value_dim
        return self.local_conv_width(heads, kv_heads) + heads * self.value_dim + scalars

    def local_conv_width(self, heads: int, kv_heads: int) -> int:
        """Channels that the convolution sees of some heads: queries, keys and values."""
        return 2 * kv_heads * self.key_dim + heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Weights of one layer: projections, and the convolution's."""
        up = 2 * self.value_dim * self.output_width if self.kind == "kimi_delta" else 0
        convolved = self.local_conv_width(self.heads, self.key_heads)
        return hidden * (self.qkv_width + self.output_width) + up + convolved * self.conv_kernel


Attention = GroupedAttention | LatentAttention | LinearMixer
