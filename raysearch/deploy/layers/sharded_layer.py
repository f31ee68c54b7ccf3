"""A layer as a strategy cuts it: which op shards what over tp, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raysearch.base.errors import InputError
from sim.config.files import did_you_mean
from sim.layers.choices import OpRule, rule
from sim.layers.mixers import Attention, CompressedAttention, LatentAttention, LinearMixer
from sim.layers.model import FeedForward, Model
from sim.layers.ops import Layer, Tensor
from sim.ops.layers import layer_ops, op_names, registered_ops
from sim.sharding.placement import REPLICATE, Placement, Shard
from sim.strategy import CHOICES

EPSILON = 1e-6
"""Of norms."""


@dataclass(frozen=True)
class Sharded:
    """A model's layer under choices of a strategy, all in the joint space.

    Attributes:
        model: Of it the layers with experts, if any has them; with grouped attention to every token, no shared experts.
        choices: Per fused op, by name.
        tp, ep: Ranks of the two mesh axes. Attention is data-parallel over ep.
    """

    model: Model
    choices: Mapping[str, int]
    tp: int
    ep: int = 1

    @property
    def layer(self) -> Layer:
        """The fused ops and the tensors between them."""
        return layer_ops(self.model)

    @property
    def group(self) -> ShownLayer:
        """The layers that this is one of."""
        return shown_group(self.model)

    def rule(self, name: str) -> OpRule:
        """Placements of an op's inputs, weight and output."""
        return rule(self.layer.op(name), self.layer, self.choices[name])

    def label(self, name: str) -> str:
        """The einsum letter that an op shards, "" for none."""
        return self.layer.op(name).label(self.choices[name])

    @property
    def stream(self) -> Placement:
        """Of the residual stream between layers."""
        return self.rule("combine").output

    def weight_placement(self, name: str) -> Placement:
        """Of an op's weight over tp: what the rule says, and a norm's scale where its columns lie."""
        op, label = self.layer.op(name), self.label(name)
        if op.kind == "norm":
            return Shard(0) if label == "d" else REPLICATE
        return self.rule(name).weight or REPLICATE


class ShownLayer(NamedTuple):
    """The layer that stands for a model.

    Attributes:
        name: Of its group, or of both where its parts are layers of their own.
        attention: How it mixes tokens.
        feed_forward: What follows.
    """

    name: str
    attention: Attention
    feed_forward: FeedForward

    @property
    def is_moe(self) -> bool:
        """Whether it has experts."""
        return self.feed_forward.is_moe


def shown_group(model: Model) -> ShownLayer:
    """The first group with experts, or the first; of layers that are one part each, the first two that make a whole."""
    by_experts = sorted(model.groups, key=lambda group: not group.is_moe)
    for group in by_experts:
        if group.attention and group.feed_forward:
            return ShownLayer(group.name, group.attention, group.feed_forward)
    mixer = next((group.name, group.attention) for group in model.groups if group.attention)
    network = next((group.name, group.feed_forward) for group in by_experts if group.feed_forward)
    return ShownLayer(f"{mixer[0]} and {network[0]}", mixer[1], network[1])


def unshown(model: Model) -> tuple[str, ...]:
    """What the layer that stands for a model has and the layers that run have not, in words.

    >>> from sim.config.catalog import load_model
    >>> unshown(load_model("qwen3_235b_a22b"))
    ()
    """
    group, left_out = shown_group(model), list[str]()
    if isinstance(group.attention, LatentAttention):
        left_out.append("latent attention (qkv_proj stands for all its projections of queries and latents)")
    if isinstance(group.attention, CompressedAttention):
        left_out.append("attention over compressed keys (qkv_proj and o_proj stand for all its projections)")
    if isinstance(group.attention, LinearMixer):
        left_out.append("a mixer that is linear in the context (its state is no cache)")
    if group.feed_forward.shared_ffn_hidden:
        left_out.append("shared experts (as a dense feed-forward beside)")
    if group.feed_forward.latent:
        left_out.append("experts in a latent (with projections into it and back)")
    if model.residual_streams > 1 or model.residual_blocks:
        left_out.append("mixed residual streams (each part of the layer reads one)")
    left_out += [f"{name} (an op that somebody registered)" for name in registered_ops(model)]
    return tuple(left_out)


def check_runs(model: Model) -> None:
    """Refuses a model whose layer the layers that run would compute without a part.

    Raises:
        InputError: Its layer has such a part.
    """
    if lacking := unshown(model):
        raise InputError(
            f"the layer that runs has no {' and no '.join(lacking)}, and one of {model.name} has: take a model with "
            "grouped attention and routed experts alone, or run these parts yourself"
        )


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the weights of one layer, by the op that has them; those of experts lead with the expert."""
    attention, feed_forward = shown_group(model).attention, shown_group(model).feed_forward
    experts = (feed_forward.experts,) if feed_forward.is_moe else ()
    shapes = {
        "attn_norm": (model.hidden,),
        "qkv_proj": (model.hidden, attention.qkv_width),
        "o_proj": (attention.output_width, model.hidden),
        "ffn_norm": (model.hidden,),
        "ffn1": (*experts, model.hidden, feed_forward.in_width),
        "ffn2": (*experts, feed_forward.ffn_hidden, model.hidden),
    }
    return shapes | ({"router": (model.hidden, model.experts)} if model.is_moe else {})


def choices_of_weights(model: Model, placements: Mapping[str, Placement]) -> dict[str, tuple[int, ...]]:
    """The choices of every op under which weights lie as given, of the joint space: a hand-written plan, read in.

    Args:
        model: Whose layer it is.
        placements: Over tp, by op with a weight, dims as in `weight_shapes`; other ops may choose anything.

    Raises:
        InputError: An op that has no weight, or a placement that no choice gives it.

    >>> from sim.config.catalog import load_model
    >>> choices_of_weights(load_model("llama_3_1_70b"), {"qkv_proj": Shard(1), "o_proj": Shard(0)})["qkv_proj"]
    (1,)
    """
    shapes = weight_shapes(model)
    if unknown := [name for name in placements if name not in shapes]:
        raise InputError(f"no weight of an op {unknown[0]!r}: {did_you_mean(unknown[0], tuple(shapes))}")
    found: dict[str, tuple[int, ...]] = {}
    for name in op_names(model):
        lies = {choice: Sharded(model, {name: choice}, 1).weight_placement(name) for choice in CHOICES}
        found[name] = tuple(choice for choice in CHOICES if placements.get(name, lies[choice]) == lies[choice])
        if not found[name]:
            known = ", ".join(sorted({str(each) for each in lies.values()}))
            raise InputError(f"{name}: expected its weight under one of {known}, got {placements[name]}")
    return found


def array_dim(tensor: Tensor, dim: int) -> int:
    """The dim of the array that a dim of the simulator's tensor is: experts' copies keep senders apart."""
    return dim + 1 if tensor.by_expert and dim else dim
