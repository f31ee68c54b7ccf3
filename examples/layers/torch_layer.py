"""A transformer layer as one writes it in PyTorch, one module per op: unsharded, and what a plan's paths name.

One decode step of grouped attention, and a feed-forward block, dense or of experts. Queries, keys and values lie side
by side for each group of heads, gate and up projections column by column: a shard of the columns is one of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raysearch.deploy.layers.sharded_layer import EPSILON, ShownLayer, check_runs, shown_group, weight_shapes
from sim.layers.mixers import GroupedAttention
from sim.layers.model import Model


class TorchLayer(nn.Module):
    """(stream [tokens, hidden], keys and values [tokens, context, kv heads, head dim]) -> the stream after it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        check_runs(model)
        group = shown_group(model)
        shapes = weight_shapes(model)
        self.attn_norm = Norm(model.hidden)
        self.qkv_proj = nn.Linear(*shapes["qkv_proj"], bias=False)
        self.attention = TorchAttention(group)
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
        self.dispatch = Dispatch(group.feed_forward.experts)
        self.ffn1 = Experts(shapes["ffn1"])
        self.ffn2 = Experts(shapes["ffn2"])
        self.shares = Shares(group.feed_forward.experts)
        self.weigh = Weigh()

    def forward(self, stream: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One decode step."""
        attended = self.attention(self.qkv_proj(self.attn_norm(stream)), keys, values)
        stream = self.attn_residual(self.o_proj(attended), stream)
        x = self.ffn_norm(stream)
        if not self.moe:
            return self.combine(self.ffn2(self.activation(self.ffn1(x))), stream)
        routing = self.pick(self.router(x))
        outputs = self.ffn2(self.activation(self.ffn1(self.dispatch(x, routing))))
        return self.combine(self.weigh(outputs, self.shares(routing)), stream)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights as the simulator has them, by op, input columns before output columns."""
        for name, weight in weights.items():
            module = getattr(self, name)
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
    """A copy of each token for each expert, zeros where it was not picked."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """[experts, senders, tokens, hidden], this sender's."""
        picked = _one_hot(routing, self.experts).sum(1).to(x.dtype)
        return torch.einsum("te,td->etd", picked, x)[:, None]


class Experts(nn.Module):
    """A projection per expert."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, senders, tokens, columns]."""
        return torch.bmm(x.flatten(1, 2), self.weight).unflatten(1, x.shape[1:3])


class Shares(nn.Module):
    """The weight of each expert for each token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, routing: Tensor) -> Tensor:
        """[experts, tokens], zeros where it was not picked."""
        return torch.einsum("tke,tk->et", _one_hot(routing, self.experts), routing[..., 1])


class Weigh(nn.Module):
    """The sum of a token's experts."""

    def forward(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """[tokens, hidden] of this sender's [experts, senders, tokens, hidden]."""
        return torch.einsum("et,etd->td", shares.to(outputs.dtype), outputs[:, 0])


def _one_hot(routing: Tensor, experts: int) -> Tensor:
    return nn.functional.one_hot(routing[..., 0].long(), experts).to(routing.dtype)
