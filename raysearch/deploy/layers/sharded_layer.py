"""A layer as a strategy cuts it: which op shards what over tp, and the shapes of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raysearch.base.errors import InputError
from sim.layers.choices import OpRule, rule
from sim.layers.mixers import Attention, CompressedAttention, GroupedAttention, LatentAttention, LinearMixer
from sim.layers.model import FeedForward, Model
from sim.layers.ops import Layer, Side, Tensor
from sim.near_names import did_you_mean
from sim.ops.layers import layer_ops, op_names, registered_ops
from sim.ops.rank import Rank
from sim.serving.phases import batching
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard
from sim.step.attention_expert_meshes import crossing_steps, sides_of_strategy
from sim.strategy import CHOICES, Strategy
from sim.workload import ExpertExchange, Workload

EPSILON = 1e-6
"""Of norms."""


class Hop(NamedTuple):
    """A step of the residual stream's way from one side's mesh to the other's.

    Attributes:
        axes: Neighbouring axes of the mesh that it moves over as one group, by name.
        source, target: Placement before and after of what such a group holds.
        before, after: Of the whole tensor, by axis of `Sharded.mesh`; alike but for these axes.
    """

    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Mapping[str, Placement]
    after: Mapping[str, Placement]


@dataclass(frozen=True)
class Sharded:
    """A model's layer under choices of a strategy, of 0, 1 and 2 for each op.

    Attributes:
        model: Of it the layers with experts, if any has them.
        choices: Per fused op, by name.
        tp, ep: Ranks that share an attention head's tokens, and groups of experts.
        dp: Groups with tokens of their own in attention; None for those of ep.
        exchange: How tokens reach their experts.
        hops: By tensor of the residual stream that goes from one side's mesh to the other's, and target, its way.
    """

    model: Model
    choices: Mapping[str, int]
    tp: int
    ep: int = 1
    dp: int | None = None
    exchange: ExpertExchange = "all_to_all"
    hops: Mapping[tuple[str, Placement], tuple[Hop, ...]] = field(default_factory=dict[Any, Any])

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
    def attention_dp(self) -> int:
        """Groups with tokens of their own in attention."""
        return self.ep if self.dp is None else self.dp

    @property
    def extended(self) -> bool:
        """Whether attention and experts have separate meshes."""
        return self.attention_dp != self.ep

    @property
    def moe_tp(self) -> int:
        """Ranks that share an expert."""
        return self.tp * self.attention_dp // self.ep

    @property
    def copies(self) -> int:
        """Groups of experts that have the same tokens, where these do not travel to their experts' ranks."""
        return self.ep // self.attention_dp if self.exchange == "all_gather" and self.ep > self.attention_dp else 1

    @property
    def degrees(self) -> dict[str, int]:
        """As exported files name them: those of both meshes where they are separate."""
        own = {"DP": self.attention_dp, "TP": self.tp, "EP": self.ep, "MOE_TP": self.moe_tp}
        return own if self.extended else {"EP": self.ep, "TP": self.tp}

    @property
    def mesh(self) -> Mapping[str, int]:
        """Ranks per axis, the innermost last.

        >>> from sim.config.catalog import load_model
        >>> Sharded(load_model("qwen3_235b_a22b"), {}, tp=4, ep=4, dp=1).mesh
        {'outer': 1, 'middle': 4, 'inner': 1}
        """
        if not self.extended:
            return {"ep": self.ep, "tp": self.tp}
        inner, larger = sorted((self.tp, self.moe_tp))
        return {"outer": self.tp * self.attention_dp // larger, "middle": larger // inner, "inner": inner}

    def group_axes(self, side: Side) -> tuple[str, ...]:
        """Axes of the ranks that an op of a side shards over."""
        if not self.extended:
            return ("tp",)
        larger = self.tp > self.moe_tp if side == "attention" else self.moe_tp > self.tp
        return ("middle", "inner") if larger else ("inner",)

    @property
    def ep_axes(self) -> tuple[str, ...]:
        """Axes of the groups of experts."""
        return tuple(axis for axis in self.mesh if axis not in self.group_axes("experts"))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes of the groups of experts with tokens of their own."""
        return self.ep_axes[:1] if self.copies > 1 else self.ep_axes

    def spread(self, side: Side, placement: Placement, rows: tuple[str, ...] | None = None) -> dict[str, Placement]:
        """By axis of the mesh: rows dealt out over some axes, and the placement over those of the side's group.

        Args:
            side: On whose mesh the tensor lies.
            placement: Over the group.
            rows: Axes over which dim 0 is dealt out; None for those whose ranks have tokens of their own.
        """
        group = self.group_axes(side)
        if rows is None:
            rows = self.token_axes if side == "experts" else tuple(axis for axis in self.mesh if axis not in group)
        return {axis: placement if axis in group else Shard(0) if axis in rows else REPLICATE for axis in self.mesh}

    @property
    def stream(self) -> dict[str, Placement]:
        """Of the residual stream as a layer leaves it, by axis of the mesh."""
        return self.spread(self.layer.op("combine").side, self.rule("combine").output)

    @property
    def cache(self) -> dict[str, Placement]:
        """Of what attention has cached, see `cache_shape`, by axis of the mesh."""
        return self.spread("attention", self.cache_placement)

    @property
    def cache_placement(self) -> Placement:
        """The same over attention's group: latents are every head's."""
        heads = REPLICATE if runs_latents(self.group.attention) else Shard(2)
        return {"t": Shard(0), "h": heads}.get(self.label("attention"), REPLICATE)

    @property
    def sums_late(self) -> bool:
        """Whether experts' outputs arrive as parts over their group, which are summed behind the combine."""
        return self.rule("ffn2").output == PARTIAL and self.rule("combine").passes_partial

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """Axes over which shared experts are cut: those over which what a token gets is summed anyway."""
        group = self.group_axes("experts") if self.sums_late else ()
        return ("middle", *group) if self.copies > 1 else group

    def weight_spread(self, name: str) -> dict[str, Placement]:
        """Of a weight, by axis of the mesh; experts are dealt out."""
        if name in _SHARED:
            cut = Shard(_SHARED[name])
            return {axis: cut if axis in self.shared_axes else REPLICATE for axis in self.mesh}
        if name not in self.layer.op_by_name:
            return self.spread("attention", self.latent_placement(name), ())
        op = self.layer.op(name)
        rows = self.ep_axes if self.layer.tensor(op.output).by_expert else ()
        return self.spread(op.side, self.weight_placement(name), rows)

    def weight_placement(self, name: str) -> Placement:
        """Of an op's weight over its side's group: what the rule says, and a norm's scale where its columns lie."""
        op, label = self.layer.op(name), self.label(name)
        if op.kind == "norm":
            return Shard(0) if label == "d" else REPLICATE
        return self.rule(name).weight or REPLICATE

    def latent_placement(self, name: str) -> Placement:
        """Of a weight of latent attention over its group: whatever leads to heads is cut by heads."""
        if name == "kv_b_proj":
            return Shard(0) if self.label("attention") == "h" else REPLICATE
        by_heads = self.label("qkv_proj") == "q" and name in ("q_proj", "q_b_proj")
        return Shard(1) if by_heads else REPLICATE

    def crosses(self, tensor: Tensor) -> bool:
        """Whether it goes from one side's mesh to the other's."""
        sides = {self.layer.op(name).side for name in tensor.ops}
        return self.extended and len(sides) > 1


def sharded_layer_of(workload: Workload, strategy: Strategy) -> Sharded:
    """The layer as a strategy shards it on a workload's machine.

    Raises:
        InputError: Ranks that share a context, meshes that do not fit each other, other choices than 0, 1 and 2,
            layers that are one part each on meshes of their own, or an order of tokens that two ops do not share.
    """
    model = workload.model
    if strategy.cp != 1 or set(strategy.dims) - set(CHOICES):
        raise InputError("expected cp 1 and the choices 0, 1 and 2 of each op: other layers do not run")
    tp, dp, ep = strategy.tp, strategy.attention_dp, strategy.ep
    if tp * dp % ep or max(tp, strategy.moe_tp) % min(tp, strategy.moe_tp):
        raise InputError(f"expected ep to divide tp*dp = {tp * dp}, and of tp and tp*dp/ep one the other, got ep={ep}")
    choices = dict(zip(op_names(model), strategy.dims, strict=True))
    sharded = Sharded(model, choices, tp, ep, dp, workload.expert_exchange)
    _check_beside(sharded)
    senders = math.prod(sharded.mesh[axis] for axis in sharded.token_axes)
    if model.is_moe and sharded.exchange == "all_gather" and sharded.moe_tp > 1 and senders > 1:
        by_tokens = {name: sharded.label(name) == "t" for name in ("dispatch", "combine")}
        if len(set(by_tokens.values())) > 1:
            raise InputError(
                "where tokens are gathered, expected dispatch and combine both to shard tokens or neither: what one "
                "gathers rank by rank lies in another order than what the other does"
            )
    return replace(sharded, hops=_hops(sharded, workload, strategy)) if sharded.extended else sharded


def _check_beside(sharded: Sharded) -> None:
    """Refuses choices under which latents or shared experts would need a collective that is not charged."""
    ways = sharded.label("qkv_proj"), sharded.label("attention")
    if runs_latents(sharded.group.attention) and sharded.tp > 1 and ways not in (("q", "h"), ("", ""), ("", "t")):
        raise InputError(
            "latents are on every GPU of a group: expected qkv_proj on q with attention on h, or qkv_proj whole with "
            f"attention whole or on t, got qkv_proj on {ways[0] or 'nothing'} with attention on {ways[1] or 'nothing'}"
        )
    if not sharded.group.feed_forward.shared_ffn_hidden or sharded.moe_tp == 1:
        return
    reads, adds = sharded.label("dispatch"), sharded.label("combine")
    if reads == "d" or (reads == "t" and adds != "t"):
        raise InputError(
            "shared experts read what dispatch reads and are added where combine is: expected dispatch whole, or both "
            f"on t, got dispatch on {reads} with combine on {adds or 'nothing'}"
        )


def _hops(sharded: Sharded, workload: Workload, strategy: Strategy) -> dict[tuple[str, Placement], tuple[Hop, ...]]:
    """Every way of the residual stream from one side to the other."""
    groups = [group.name for group in sharded.model.groups]
    if sharded.group.name not in groups:
        raise InputError(f"layers of {sharded.model.name} are one part each: expected dp = ep, got dp={sharded.dp}")
    load = batching(workload, strategy.batch, strategy.attention_dp).through(strategy.pp).loads[0]
    sides = sides_of_strategy(workload, load, strategy)[groups.index(sharded.group.name)]
    found: dict[tuple[str, Placement], tuple[Hop, ...]] = {}
    for tensor in filter(sharded.crosses, sharded.layer.tensors):
        source = sharded.rule(tensor.producer).output
        leaves, takes = sides.rank_by_op[tensor.producer], sides.rank_by_op[tensor.consumers[0]]
        for name in tensor.consumers:
            target = sharded.rule(name).inputs[sharded.layer.op(name).inputs.index(tensor.name)]
            found[tensor.name, target] = _way(
                sharded, sharded.layer.op(tensor.producer).side, leaves, takes, source, target
            )
    return found


def _way(
    sharded: Sharded, side: Side, leaves: Rank, takes: Rank, source: Placement, target: Placement
) -> tuple[Hop, ...]:
    wide, steps = crossing_steps(leaves, takes, source, target)
    inner = [axis for axis in ("middle", "inner") if sharded.mesh[axis] > 1]
    assert len(inner) == len(wide), wide
    lies, hops = sharded.spread(side, source), list[Hop]()
    for step in steps:
        axes = tuple(inner[step.axis : step.axis + step.span])
        after = lies | dict(zip(inner, step.layout, strict=True))
        hops.append(Hop(axes, step.source, step.target, lies, after))
        lies = after
    return tuple(hops)


class Slots(NamedTuple):
    """Room for tokens at each expert, so that shapes are known before any token picks.

    Tokens are looked at in blocks of neighbours; each expert has slots for every block, which its tokens take in turn.
    An expert that more tokens pick leaves NaN, never silently a token less. Source: GShard (arXiv 2006.16668), section
    2.2, whose expert capacity this is; that of even routing is what the simulator charges.

    Attributes:
        block: Tokens of one, a divisor of those of every rank in every op.
        each: Slots of an expert for each block.
    """

    block: int
    each: int

    @classmethod
    def of(cls, model: Model, block: int, capacity_factor: float = 1.0) -> Slots:
        """Those of even routing, times a factor; `experts / experts_per_token` is enough for any routing.

        >>> from sim.config.catalog import load_model
        >>> Slots.of(load_model("mixtral_8x7b"), block=16), Slots.of(load_model("mixtral_8x7b"), 16, 4.0).each
        (Slots(block=16, each=4), 16)
        """
        feed_forward = shown_group(model).feed_forward
        even = block * feed_forward.experts_per_token / feed_forward.experts
        return cls(block, min(block, math.ceil(capacity_factor * even)))


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
    if isinstance(group.attention, LatentAttention) and not runs_latents(group.attention):
        left_out.append("a gate or an indexer beside latents (qkv_proj stands for all its projections)")
    if isinstance(group.attention, CompressedAttention):
        left_out.append("attention over compressed keys (qkv_proj and o_proj stand for all its projections)")
    if isinstance(group.attention, LinearMixer):
        left_out.append("a mixer that is linear in the context (its state is no cache)")
    if group.feed_forward.latent:
        left_out.append("experts in a latent (with projections into it and back)")
    if model.residual_streams > 1 or model.residual_blocks:
        left_out.append("mixed residual streams (each part of the layer reads one)")
    left_out += [f"{name} (an op that somebody registered)" for name in registered_ops(model)]
    return tuple(left_out)


def runs_latents(attention: Attention) -> bool:
    """Whether it is latent attention to every token, without a gate."""
    return isinstance(attention, LatentAttention) and not attention.indexer and not attention.output_gate


def check_runs(model: Model) -> None:
    """Refuses a model whose layer the layers that run would compute without a part.

    Raises:
        InputError: Its layer has such a part.
    """
    if lacking := unshown(model):
        raise InputError(
            f"the layer that runs has no {' and no '.join(lacking)}, and one of {model.name} has: take a model with "
            "grouped or latent attention to every token, or run these parts yourself"
        )


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the weights of one layer, by the op that has them; those of experts lead with the expert."""
    attention, feed_forward = shown_group(model).attention, shown_group(model).feed_forward
    experts = (feed_forward.experts,) if feed_forward.is_moe else ()
    shapes = {
        "attn_norm": (model.hidden,),
        **_into_attention(model.hidden, attention),
        "o_proj": (attention.output_width, model.hidden),
        "ffn_norm": (model.hidden,),
        "ffn1": (*experts, model.hidden, feed_forward.in_width),
        "ffn2": (*experts, feed_forward.ffn_hidden, model.hidden),
    }
    if shared := feed_forward.shared_ffn_hidden:
        shapes |= {"shared1": (model.hidden, shared * feed_forward.projections), "shared2": (shared, model.hidden)}
    return shapes | ({"router": (model.hidden, model.experts)} if model.is_moe else {})


_SHARED = {"shared1": 1, "shared2": 0}
"""The dims of shared experts' weights that are their columns: gate and up side by side, and down."""


def _into_attention(hidden: int, attention: Attention) -> dict[str, tuple[int, ...]]:
    """One projection, or down to latents and up to heads, as DeepSeek-V2 (arXiv 2405.04434, section 2.1) has them."""
    if not runs_latents(attention):
        return {"qkv_proj": (hidden, attention.qkv_width)}
    assert isinstance(attention, LatentAttention)
    rank, queries = attention.query_rank, attention.heads * attention.query_width
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (hidden, queries)}
    if rank:
        shapes = {"q_a_proj": (hidden, rank), "q_a_norm": (rank,), "q_b_proj": (rank, queries)}
    up = (attention.heads, attention.kv_rank, attention.head_dim + attention.value_dim)
    return shapes | {
        "kv_a_proj": (hidden, attention.cached_width),
        "kv_a_norm": (attention.kv_rank,),
        "kv_b_proj": up,
    }


def cache_shape(model: Model) -> tuple[int, ...]:
    """What attention has cached of one token: heads of keys, and as many of values, or one latent for all heads.

    A layer takes [sequences, context, *this], twice of keys and values; nothing of a state.
    """
    attention = shown_group(model).attention
    if isinstance(attention, GroupedAttention):
        return attention.kv_heads, attention.head_dim
    return (attention.cached_width,) if isinstance(attention, LatentAttention) else ()


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
    weighted = tuple(op.name for op in layer_ops(model).ops if op.weighted or op.kind == "norm")
    if unknown := [name for name in placements if name not in weighted]:
        raise InputError(f"no weight of an op {unknown[0]!r}: {did_you_mean(unknown[0], weighted)}")
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
