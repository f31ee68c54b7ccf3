"""A decoder-only transformer: what its configuration says, and how many weights follow."""

from __future__ import annotations

from dataclasses import dataclass

from sim.prices.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low-rank latents.

    The cache holds one latent and one rotary key per token, shared by all heads.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Attributes:
        query_rank: Width of the query latent.
        kv_rank: Width of the cached key/value latent.
        rope_dim: Width of the cached rotary key, and of each head's rotary query.
        value_dim: Width of each head's value; `Model.head_dim` is that of its non-rotary query and key.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int

    @property
    def cached_width(self) -> int:
        """Cached elements per token and layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    Layers that differ, as the fields below `gated` say, share a strategy's choices; `sim.step.work` prices their mean.

    Attributes:
        ffn_hidden: Width of one expert, or of the feed-forward network of a dense model.
        experts: Experts per layer; 1 means a dense feed-forward network.
        experts_per_token: Distinct experts each token visits (top-k).
        gated: Whether the activation multiplies two projections (SwiGLU) or one (GELU).
        shared_experts: Experts beside those, of the same width, that every token visits.
        dense_layers: Layers with a dense feed-forward network of `dense_ffn_hidden` instead of experts.
        sliding_window: Tokens that attention sees in `sliding_layers` of the layers; 0 for no window.
        expert_dtype: Format of the experts' weights if the model is published in it; None leaves it to the deployment.
        latent_attention: Multi-head latent attention, or None for grouped-query attention.
    """

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    experts_per_token: int
    gated: bool
    shared_experts: int = 0
    dense_layers: int = 0
    dense_ffn_hidden: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0
    expert_dtype: Dtype | None = None
    latent_attention: LatentAttention | None = None

    @property
    def is_moe(self) -> bool:
        """Whether the layer has a router, a dispatch and several experts."""
        return self.experts > 1

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def ffn_in_width(self) -> int:
        """Columns of ffn1: gate and up projections side by side when gated."""
        return self.ffn_hidden * (2 if self.gated else 1)

    @property
    def attention_width(self) -> int:
        """Columns of the attention output, heads * head_dim."""
        return self.heads * (self.latent_attention.value_dim if self.latent_attention else self.head_dim)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection: with latents, the queries and the one latent row."""
        if self.latent_attention is not None:
            query_dim = self.head_dim + self.latent_attention.rope_dim
            return self.heads * query_dim + self.latent_attention.cached_width
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Projection weights of one layer's attention."""
        output = self.hidden * self.attention_width
        latent = self.latent_attention
        if latent is None:
            return self.hidden * self.qkv_width + output
        query = latent.query_rank * (self.hidden + self.heads * (self.head_dim + latent.rope_dim))
        key_value = self.hidden * latent.cached_width + latent.kv_rank * self.heads * (self.head_dim + latent.value_dim)
        return query + key_value + output

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert (or of the one dense feed-forward network) of one layer."""
        return self.hidden * (self.ffn_in_width + self.ffn_hidden)

    @property
    def dense_ffn_parameters(self) -> int:
        """Weights of the feed-forward network of one of `dense_layers`."""
        return self.hidden * self.dense_ffn_hidden * (3 if self.gated else 2)

    @property
    def _small_parameters(self) -> int:
        router = self.hidden * self.experts if self.is_moe else 0
        return router + 2 * self.hidden

    def _layer_parameters(self, experts: int) -> int:
        """Weights of all layers when `experts` of each layer's count."""
        with_experts = (experts + self.shared_experts) * self.expert_parameters + self._small_parameters
        dense = self.dense_ffn_parameters + 2 * self.hidden
        return (
            self.layers * self.attention_parameters
            + (self.layers - self.dense_layers) * with_experts
            + self.dense_layers * dense
        )

    @property
    def parameters(self) -> int:
        """All weights: layers, token embedding, final norm and an untied LM head."""
        return self._layer_parameters(self.experts) + 2 * self.vocab * self.hidden + self.hidden

    @property
    def active_parameters(self) -> int:
        """Weights one token is multiplied with (the embedding is a look-up and does not count)."""
        return self._layer_parameters(self.experts_per_token) + self.vocab * self.hidden + self.hidden
