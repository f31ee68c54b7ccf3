"""A decoder-only transformer: groups of equal layers, their order, and how many weights follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sim.layers.mixers import Attention, GroupedAttention
from sim.prices.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward network, or experts with a router.

    Attributes:
        ffn_hidden: Width of one expert, or of the one network of a dense layer.
        experts: Experts; 1 means a dense layer.
        experts_per_token: Distinct experts each token visits (top-k).
        gated: Whether the activation multiplies two projections (SwiGLU) or one (GELU).
        shared_ffn_hidden: Total width of the experts that every token visits, beside the routed ones.
        latent: Width of the latent that routed experts work in; 0 for the hidden width. Projections into it and back
            stand before the dispatch and behind the combine, whole on every GPU. Source: vLLM's nemotron_h.py.
    """

    ffn_hidden: int
    experts: int = 1
    experts_per_token: int = 1
    gated: bool = True
    shared_ffn_hidden: int = 0
    latent: int = 0

    @property
    def is_moe(self) -> bool:
        """Whether there is a router, a dispatch and several experts."""
        return self.experts > 1

    @property
    def in_width(self) -> int:
        """Columns of ffn1: gate and up projections side by side when gated."""
        return self.ffn_hidden * self.projections

    @property
    def projections(self) -> int:
        """Projections into the hidden width: 2 when gated."""
        return 2 if self.gated else 1

    def expert_parameters(self, hidden: int) -> int:
        """Weights of one expert, or of the one network."""
        return (self.latent or hidden) * (self.in_width + self.ffn_hidden)

    def parameters(self, hidden: int, experts: int | None = None) -> int:
        """Weights when so many experts count, all by default; the shared ones and the router always do."""
        counted = self.experts if experts is None else min(experts, self.experts)
        shared = hidden * self.shared_ffn_hidden * (self.projections + 1)
        router = hidden * self.experts if self.is_moe else 0
        return counted * self.expert_parameters(hidden) + shared + router + 2 * hidden * self.latent


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike.

    Attributes:
        name: For people, and before the ops' names where groups have choices of their own.
        count: Layers.
        attention: How they mix tokens; None for layers that are a feed-forward network alone.
        feed_forward: What follows; None for layers that mix tokens alone.
    """

    name: str
    count: int
    attention: Attention | None
    feed_forward: FeedForward | None

    @property
    def is_moe(self) -> bool:
        """Whether the layers have experts."""
        return self.feed_forward is not None and self.feed_forward.is_moe

    @property
    def experts(self) -> int:
        """Experts; 1 of dense layers and of those without a feed-forward network."""
        return self.feed_forward.experts if self.feed_forward else 1

    def parameters(self, hidden: int, *, active: bool = False) -> int:
        """Weights of one layer with a norm before each of its parts, or those that one token visits."""
        found = self.attention.parameters(hidden) + hidden if self.attention else 0
        if self.feed_forward:
            visited = self.feed_forward.experts_per_token if active else None
            found += self.feed_forward.parameters(hidden, visited) + hidden
        return found


@dataclass(frozen=True, slots=True)
class Published:
    """What the makers of a model, and of engines, published of it; no dimension.

    Attributes:
        context_tokens: Tokens of the longest request, prompt and answer; None where it is not known.
        repositories: Repositories of its weights on Hugging Face by their format, the preferred one first.
        fp8_kv_repository: Repository of weights in fp8 by NVIDIA's Model Optimizer, with scales of the KV cache.
        eagle3_repository: Repository of a public EAGLE-3 head, which drafts from the model's hidden states.
        measured_drafts: The kind of drafts whose acceptance was measured, which narrows their interval.
        layernorm_sp: Engines that can shard its norms over tokens in prefill.
        simulators: What other simulators call it.
        own_code: Whether its makers start engines with the repository's own code (--trust-remote-code).
    """

    context_tokens: int | None = None
    repositories: Mapping[Dtype, str] = field(default_factory=dict[Dtype, str])
    fp8_kv_repository: str | None = None
    eagle3_repository: str | None = None
    measured_drafts: Literal["mtp", "eagle3"] | None = None
    layernorm_sp: tuple[str, ...] = ()
    simulators: Mapping[str, str] = field(default_factory=dict[str, str])
    own_code: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        name: For people, and in the names of results.
        hidden: Width of the residual stream.
        vocab: Rows of the embedding and of the LM head.
        groups: Kinds of layers.
        order: Index of the group of each layer; empty for one group after the other.
        expert_dtype: Format of the experts' weights if the model is published in it; None leaves it to the deployment.
        tied_embeddings: Whether the LM head is the embedding.
        mtp_layers: Layers published beside these that draft further tokens (multi-token prediction).
        residual_streams: Residual streams that each part of a layer mixes into one and adds to; see
            `sim.ops.residuals`.
        residual_blocks: Layers after which attention residuals store the residual stream, for all later parts to mix;
            0 for none.
        published: What else its makers say; models that differ in it alone are equal.
    """

    name: str
    hidden: int
    vocab: int
    groups: tuple[LayerGroup, ...]
    order: tuple[int, ...] = ()
    expert_dtype: Dtype | None = None
    tied_embeddings: bool = False
    mtp_layers: int = 0
    residual_streams: int = 1
    residual_blocks: int = 0
    published: Published = field(default_factory=Published, compare=False, repr=False)

    def __post_init__(self) -> None:
        in_turn = tuple(index for index, group in enumerate(self.groups) for _ in range(group.count))
        if not self.order:
            object.__setattr__(self, "order", in_turn)
        assert sorted(self.order) == list(in_turn)
        assert any(group.attention for group in self.groups)
        assert any(group.feed_forward for group in self.groups)

    @property
    def layers(self) -> int:
        """Layers of all groups."""
        return len(self.order)

    @property
    def heads(self) -> int:
        """What a degree must divide to share out the heads of every group."""
        return math.gcd(*(group.attention.heads for group in self.groups if group.attention))

    @property
    def experts(self) -> int:
        """Most experts of any group; 1 for a dense model."""
        return max(group.experts for group in self.groups)

    @property
    def named_groups(self) -> tuple[str, ...]:
        """Of each group what a message says to tell it from the others; nothing where all layers are alike."""
        return tuple(f" in layers {group.name!r}" if len(self.groups) > 1 else "" for group in self.groups)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.experts > 1

    @property
    def parameters(self) -> int:
        """All weights: layers, token embedding, final norm and LM head."""
        vocabularies = 1 if self.tied_embeddings else 2
        return self._layer_parameters(active=False) + vocabularies * self.vocab * self.hidden + self.hidden

    @property
    def active_parameters(self) -> int:
        """Weights one token is multiplied with (the embedding is a look-up and does not count)."""
        return self._layer_parameters(active=True) + self.vocab * self.hidden + self.hidden

    @property
    def kept_residuals(self) -> float:
        """Kept residual streams that a part of a layer reads, on average over the layers."""
        every = self.residual_blocks
        return sum(layer // every + 1 for layer in range(self.layers)) / self.layers if every else 0.0

    @property
    def mixes_residuals(self) -> bool:
        """Whether parts of a layer read a mix of several residual streams, or of what was kept of one."""
        return self.residual_streams > 1 or self.residual_blocks > 0

    @property
    def stream_mix_columns(self) -> int:
        """Columns that say how a part of a layer mixes its residual streams; 0 of a model with one.

        A weight per stream into the part, one out of it, and a matrix between the streams. Source: DeepSeek-V4
        (DeepSeek-AI, 2026), section 2.2, manifold-constrained hyper-connections.
        """
        streams = self.residual_streams
        return streams * (streams + 2) if streams > 1 else 0

    def _layer_parameters(self, *, active: bool) -> int:
        own = sum(group.count * group.parameters(self.hidden, active=active) for group in self.groups)
        parts = sum(group.count * sum(map(bool, (group.attention, group.feed_forward))) for group in self.groups)
        return own + parts * self.residual_streams * self.hidden * self.stream_mix_columns


def uniform_model(
    name: str,
    layers: int,
    hidden: int,
    ffn_hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    experts: int = 1,
    experts_per_token: int = 1,
    gated: bool = True,
) -> Model:
    """A model of equal layers with grouped-query attention.

    >>> uniform_model("tiny", 2, 64, 96, 8, 2, 16, 1000).layers
    2
    """
    feed_forward = FeedForward(ffn_hidden, experts, experts_per_token, gated)
    return Model(
        name, hidden, vocab, (LayerGroup("layers", layers, GroupedAttention(heads, kv_heads, head_dim), feed_forward),)
    )
