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
        heads: Its query heads, of which every GPU has all; 0 where a layer reads what an earlier layer's scorer picked.
        head_dim: Width of each, and of the one key that it caches per token and layer.
        topk: Tokens that attention reads.
        block: Tokens of the blocks that are picked whole, each by its best token, with no weight per head; 0 where
            tokens are picked one by one. Source: MiniMax-M3's `sparse_attention_config`.
    """

    heads: int
    head_dim: int
    topk: int
    block: int = 0

    @property
    def scores(self) -> bool:
        """Whether the layer has a scorer of its own."""
        return self.heads > 0

    @property
    def from_hidden(self) -> int:
        """Columns of its projection of the hidden state beside queries: one key, and a weight per head."""
        return self.head_dim + (0 if self.block else self.heads)

    def parameters(self, hidden: int, query_width: int) -> int:
        """Weights: queries from a row of `query_width`, one key and one weight per head from the hidden state."""
        return query_width * self.heads * self.head_dim + hidden * self.from_hidden


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Softmax attention whose query heads share KV heads; multi-head and multi-query attention are its ends.

    Attributes:
        heads, kv_heads: Query heads, and heads of keys and values.
        head_dim: Width of a query and a key.
        value_width: Width of a value if it differs; 0 for `head_dim`.
        window: Tokens that a token sees, itself the last; 0 for all.
        chunked: Whether the window is a chunk instead: a token sees its own chunk of `window` tokens so far.
        sinks: Tokens at the beginning that every token sees beside its window.
        output_gate: Whether a gate as wide as the queries is projected with them.
        indexer: The indexer of sparse attention; without one every cached token is read.
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
        output_gate: Whether a gate as wide as the values is projected from the hidden state.
        indexer: The indexer of sparse attention; without one every cached token is read.
    """

    heads: int
    head_dim: int
    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
    output_gate: bool = False
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
        return heads * self.query_width + self.cached_width + self.gate_width(heads)

    def gate_width(self, heads: int) -> int:
        """Columns of the gate of some heads."""
        return heads * self.value_dim if self.output_gate else 0

    @property
    def output_width(self) -> int:
        """Columns of the output."""
        return self.heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Projection weights of one layer."""
        queries = self.heads * self.query_width
        query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        key_value = hidden * self.cached_width + self.kv_rank * self.heads * (self.head_dim + self.value_dim)
        own = query + key_value + hidden * (self.output_width + self.gate_width(self.heads))
        return own + (self.indexer.parameters(hidden, self.query_rank or hidden) if self.indexer else 0)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention over a window of tokens and, beyond it, over keys that each stand for several tokens.

    One key, which is the value too, serves all heads. A compressor pools `ratio` tokens into one key; where they are
    many, an indexer picks among them by keys of its own, pooled alike from overlapping stretches. Groups of heads
    leave through a latent each. Source: DeepSeek-V4 (DeepSeek-AI, 2026), section 2.3: compressed sparse (ratio 4,
    indexer) and heavily compressed attention (ratio 128).

    Attributes:
        heads: Query heads.
        head_dim: Width of each, and of a key.
        query_rank: Width of the query latent.
        rope_dim: Rotary part of a key, which the cache keeps in bf16.
        window: Latest tokens whose keys are read as they are.
        output_groups, output_rank: Groups of heads that leave through a latent, and its width.
        ratio: Tokens of a compressed key; 0 for the window alone.
        indexer: Picks `topk` of the compressed keys; None reads all of them.
    """

    heads: int
    head_dim: int
    query_rank: int
    rope_dim: int
    window: int
    output_groups: int
    output_rank: int
    ratio: int = 0
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        """Keys per token."""
        return 1

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the projections' result: the queries and the one key."""
        return self.local_qkv_width(self.heads, 1)

    def local_qkv_width(self, heads: int, kv_heads: int) -> int:
        """The same of some heads: every GPU has the key."""
        return (heads + 1) * self.head_dim

    @property
    def output_width(self) -> int:
        """Columns of the heads' results, in front of the groups' latents."""
        return self.heads * self.head_dim

    @property
    def pooled(self) -> int:
        """Tokens whose keys are pooled into one: those of two stretches where these overlap."""
        return self.ratio * (2 if self.indexer else 1)

    def compressor_width(self, key_width: int) -> int:
        """Columns of a compressor's projection into keys of a width: a key and a weight per stretch that it is in."""
        return 2 * key_width * (2 if self.indexer else 1) if self.ratio else 0

    def parameters(self, hidden: int) -> int:
        """Projection weights of one layer."""
        own = hidden * (self.query_rank + self.head_dim) + self.query_rank * self.output_width
        own += self.output_width * self.output_rank + self.output_groups * self.output_rank * hidden
        own += hidden * self.compressor_width(self.head_dim)
        if self.indexer:
            own += self.query_rank * self.indexer.heads * self.indexer.head_dim
            own += hidden * (self.indexer.heads + self.compressor_width(self.indexer.head_dim))
        return own


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
        kind: Gated delta rule (Qwen3-Next), KDA (Kimi Linear) or Mamba-2.
        heads: Value heads, which tensor parallelism shares out.
        key_heads: Heads of queries and keys, which value heads share.
        key_dim, value_dim: Width of a key and of a value.
        conv_kernel: Tokens that the short convolution before the state sees.
        full_gate: Whether the output's gate of `kimi_delta` is projected at its full width, as Kimi K3's is.
    """

    kind: LinearKind
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    full_gate: bool = False

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
            gate = heads * self.value_dim if self.full_gate else self.value_dim
            return self.local_conv_width(heads, kv_heads) + heads + self.value_dim + gate
        return self.local_conv_width(heads, kv_heads) + heads * self.value_dim + scalars

    def local_conv_width(self, heads: int, kv_heads: int) -> int:
        """Channels that the convolution sees of some heads: queries, keys and values."""
        return 2 * kv_heads * self.key_dim + heads * self.value_dim

    @property
    def low_rank_gates(self) -> int:
        """Gates that have a second projection, from `value_dim` rows: the decay, and the output's unless it is full."""
        return 0 if self.kind != "kimi_delta" else 1 if self.full_gate else 2

    def parameters(self, hidden: int) -> int:
        """Weights of one layer: projections, and the convolution's."""
        up = self.low_rank_gates * self.value_dim * self.output_width
        convolved = self.local_conv_width(self.heads, self.key_heads)
        return hidden * (self.qkv_width + self.output_width) + up + convolved * self.conv_kernel


Attention = GroupedAttention | LatentAttention | CompressedAttention | LinearMixer
