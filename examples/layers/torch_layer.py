"""A transformer layer as one writes it in PyTorch, one module per op: unsharded, and what a plan's paths name.

One decode step of grouped or latent attention, and a feed-forward block, dense or of experts. Queries, keys and values
lie side by side for each group of heads, gate and up projections column by column: a shard of the columns is one of
each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raysearch.deploy.layers.sharded_layer import (
    EPSILON,
    ShownLayer,
    Slots,
    check_runs,
    runs_latents,
    shown_group,
    weight_shapes,
)
from sim.layers.mixers import GroupedAttention, LatentAttention
from sim.layers.model import Model


class TorchLayer(nn.Module):
    """(stream [tokens, hidden], keys and values [tokens, context, kv heads, head dim]) -> the stream after it.

    With latent attention (stream, latents [tokens, context, width]).

    Args:
        model: Whose layer it is.
        slots: Of experts; a dense layer looks at none.
    """

    qkv_proj: nn.Linear
    q_proj: nn.Linear
    q_a_proj: nn.Linear
    q_a_norm: Norm
    q_b_proj: nn.Linear
    kv_a_proj: nn.Linear
    kv_a_norm: Norm

    def __init__(self, model: Model, slots: Slots) -> None:
        super().__init__()
        check_runs(model)
        group = shown_group(model)
        shapes = weight_shapes(model)
        self.attn_norm = Norm(model.hidden)
        self.latents = runs_latents(group.attention)
        for name in shapes:
            if name.endswith("_proj") and name not in ("o_proj", "kv_b_proj"):
                setattr(self, name, nn.Linear(*shapes[name], bias=False))
            if name.endswith("_a_norm"):
                setattr(self, name, Norm(*shapes[name]))
        self.attention = LatentTorchAttention(group, shapes["kv_b_proj"]) if self.latents else TorchAttention(group)
        self.o_proj = nn.Linear(*shapes["o_proj"], bias=False)
        self.attn_residual = Add()
        self.ffn_norm = Norm(model.hidden)
        self.activation = Activation(gated=group.feed_forward.gated)
        self.combine = Add()
        self.moe = group.is_moe
        if not self.moe:
            self.ffn1 = nn.Linear(*shapes["ffn1"], bias=False)
            self.ffn2 = nn.Linear(*shapes["ffn2"], bias=False)
            return
        self.router = nn.Linear(*shapes["router"], bias=False)
        self.pick = Pick(group.feed_forward.experts_per_token)
        self.dispatch = Dispatch(group.feed_forward.experts, slots)
        self.ffn1 = Experts(shapes["ffn1"])
        self.ffn2 = Experts(shapes["ffn2"])
        self.shares = Shares(group.feed_forward.experts, slots)
        self.weigh = Weigh(slots)
        self.shared = "shared1" in shapes
        if self.shared:
            self.shared1 = nn.Linear(*shapes["shared1"], bias=False)
            self.shared_activation = Activation(gated=group.feed_forward.gated)
            self.shared2 = nn.Linear(*shapes["shared2"], bias=False)
            self.with_shared = Add()

    def forward(self, stream: Tensor, *cache: Tensor) -> Tensor:
        """One decode step."""
        x = self.attn_norm(stream)
        attended = self.attention(*(self._into_latents(x) if self.latents else (self.qkv_proj(x),)), *cache)
        stream = self.attn_residual(self.o_proj(attended), stream)
        x = self.ffn_norm(stream)
        if not self.moe:
            return self.combine(self.ffn2(self.activation(self.ffn1(x))), stream)
        routing = self.pick(self.router(x))
        outputs = self.ffn2(self.activation(self.ffn1(self.dispatch(x, routing))))
        weighed = self.weigh(outputs, self.shares(routing))
        if self.shared:
            weighed = self.with_shared(weighed, self.shared2(self.shared_activation(self.shared1(x))))
        return self.combine(weighed, stream)

    def _into_latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and the latent with its rotary key."""
        rank = self.kv_a_norm.scale.hidden
        wide = self.kv_a_proj(x)
        queries = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))) if hasattr(self, "q_b_proj") else self.q_proj(x)
        return queries, torch.cat([self.kv_a_norm(wide[..., :rank]), wide[..., rank:]], -1)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights as the simulator has them, by op, input columns before output columns."""
        for name, weight in weights.items():
            module = self.attention if name == "kv_b_proj" else getattr(self, name)
            module = module.scale if isinstance(module, Norm) else module
            module.weight.data = weight.T.contiguous() if isinstance(module, nn.Linear) else weight


class Norm(nn.Module):
    """Root mean square, its statistic in single precision and a module of its own, which ranks may have to sum."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.statistic = SumOfSquares()
        self.scale = Scale(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] alike."""
        return self.scale(x, self.statistic(x))


class SumOfSquares(nn.Module):
    """Over a token's columns."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 1], single precision."""
        return x.float().square().sum(-1, keepdim=True)


class Scale(nn.Module):
    """A norm without its statistic."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        """[tokens, hidden], given the sums of squares [tokens, 1]."""
        return (x * torch.rsqrt(total / self.hidden + EPSILON)).to(x.dtype) * self.weight


class TorchAttention(nn.Module):
    """Each token's queries to its sequence's cache and to itself."""

    def __init__(self, group: ShownLayer) -> None:
        super().__init__()
        assert isinstance(group.attention, GroupedAttention)
        self.head_dim = group.attention.head_dim
        self.shared = group.attention.heads // group.attention.kv_heads

    def forward(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head dim], of as many heads as there are columns."""
        groups = qkv.unflatten(-1, (-1, self.shared + 2, self.head_dim))
        queries, key, value = groups.split([self.shared, 1, 1], dim=2)
        keys = torch.cat([keys, key.transpose(1, 2)], dim=1)
        values = torch.cat([values, value.transpose(1, 2)], dim=1)
        scores = torch.einsum("tgrh,tlgh->tgrl", queries, keys) / self.head_dim**0.5
        return torch.einsum("tgrl,tlgh->tgrh", scores.softmax(-1), values).flatten(1)


class LatentTorchAttention(nn.Module):
    """Each token's queries, brought into the latent, to its sequence's latents and its own."""

    def __init__(self, group: ShownLayer, up: tuple[int, ...]) -> None:
        super().__init__()
        assert isinstance(group.attention, LatentAttention)
        self.head_dim = group.attention.head_dim
        self.kv_rank, self.query_width = group.attention.kv_rank, group.attention.query_width
        self.weight = nn.Parameter(torch.empty(up))

    def forward(self, queries: Tensor, own: Tensor, cache: Tensor) -> Tensor:
        """[tokens, heads * value dim], of as many heads as there are columns."""
        queries = queries.unflatten(-1, (-1, self.query_width))
        keys, values = self.weight[..., : self.head_dim], self.weight[..., self.head_dim :]
        absorbed = torch.einsum("thd,hrd->thr", queries[..., : self.head_dim], keys)
        cache = torch.cat([cache, own[:, None]], dim=1)
        queries = torch.cat([absorbed, queries[..., self.head_dim :]], dim=-1)
        scores = torch.einsum("thc,tlc->thl", queries, cache) / self.query_width**0.5
        read = torch.einsum("thl,tlr->thr", scores.softmax(-1), cache[..., : self.kv_rank])
        return torch.einsum("thr,hrd->thd", read, values).flatten(1)


class Activation(nn.Module):
    """SiLU, of every first column times the second if gated."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns], half of them if gated."""
        return nn.functional.silu(x[..., 0::2]) * x[..., 1::2] if self.gated else nn.functional.silu(x)


class Add(nn.Module):
    """A residual connection."""

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """Their sum."""
        return x + stream


class Pick(nn.Module):
    """The experts of each token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, logits: Tensor) -> Tensor:
        """[tokens, picked, 2], single precision: index and weight of each expert."""
        weight, index = logits.float().softmax(-1).topk(self.count)
        return torch.stack([index.float(), weight / weight.sum(-1, keepdim=True)], -1)


class Dispatch(nn.Module):
    """A copy of each token for each expert that it picked, in the expert's slots."""

    def __init__(self, experts: int, slots: Slots) -> None:
        super().__init__()
        self.experts, self.slots = experts, slots

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """[experts, senders, slots, hidden], this sender's."""
        places, shape = _places(routing, self.experts, self.slots)
        filled = x.new_zeros(shape[0] * shape[1] + 1, x.shape[1])
        filled[places.clamp(max=len(filled) - 1).flatten()] = x.repeat_interleave(routing.shape[1], 0)
        return filled[:-1].unflatten(0, shape)[:, None]


class Experts(nn.Module):
    """A projection per expert."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, senders, tokens, columns]."""
        return torch.bmm(x.flatten(1, 2), self.weight).unflatten(1, x.shape[1:3])


class Shares(nn.Module):
    """Which token is in which expert's slot, and with what weight."""

    def __init__(self, experts: int, slots: Slots) -> None:
        super().__init__()
        self.experts, self.slots = experts, slots

    def forward(self, routing: Tensor) -> Tensor:
        """[experts, slots, 2], index and weight; the weights of an expert with more tokens than slots are NaN."""
        places, shape = _places(routing, self.experts, self.slots)
        tokens = torch.arange(len(routing), device=routing.device)[:, None].expand_as(places)
        filled = routing.new_zeros(shape[0] * shape[1] + 1, 2)
        filled[places.clamp(max=len(filled) - 1).flatten()] = torch.stack([tokens, routing[..., 1]], -1).flatten(0, 1)
        full = routing[..., 0][places > shape[0] * shape[1]].long()
        filled = filled[:-1].unflatten(0, shape)
        filled[full, :, 1] = torch.nan
        return filled


class Weigh(nn.Module):
    """The sum of a token's experts."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def forward(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """[tokens, hidden] of this sender's [experts, senders, slots, hidden]."""
        tokens = shares.shape[1] // self.slots.each * self.slots.block
        weighed = outputs[:, 0] * shares[..., 1:].to(outputs.dtype)
        total = outputs.new_zeros(tokens, outputs.shape[-1])
        return total.index_add(0, shares[..., 0].long().flatten(), weighed.flatten(0, 1))


def _places(routing: Tensor, experts: int, slots: Slots) -> tuple[Tensor, tuple[int, int]]:
    """Of each token's copies [tokens, picked] the place among (experts, slots), beyond all for none; their number."""
    expert = routing[..., 0].long()
    blocks = nn.functional.one_hot(expert, experts).reshape(len(routing) // slots.block, -1, experts)
    before = ((blocks.cumsum(1) - blocks) * blocks).sum(-1).reshape_as(expert)  # copies that came first
    each = len(blocks) * slots.each
    slot = torch.arange(len(routing), device=routing.device)[:, None] // slots.block * slots.each + before
    return torch.where(before < slots.each, expert * each + slot, experts * each + 1), (experts, each)
