"""One layer on one rank, op by op, as a strategy shards it: arithmetic of any array library, collectives of any kind.

Each op works on the pieces that its rule hands it (`sim.layers.choices.rule`), each tensor is moved between ops by the
collective that the simulator charges (`sim.sharding.redistribute`). A framework passes in its own.

Tensors lie as the simulator has them: [tokens, features]; copies for experts [experts, senders, tokens, features], a
copy of every token for every expert, weighted with zero where the router did not pick it. Queries, keys and values lie
side by side for each group of heads, gate and up projections column by column: a shard of the columns is one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sim.layers.choices import OpRule, rule
from sim.layers.mixers import GroupedAttention
from sim.layers.model import LayerGroup, Model
from sim.layers.ops import FusedOp, Layer, Tensor, layer_ops
from sim.sharding.placement import PARTIAL, REPLICATE, Placement
from sim.sharding.redistribute import collective_between

Array = Any
EPSILON = 1e-6


class Collectives(Protocol):
    """What a rank does with others of one mesh axis, "tp" or "ep"."""

    def all_gather(self, array: Array, dim: int, axis: str) -> Array:
        """The pieces of all ranks, one after the other along a dim."""
        ...

    def reduce_scatter(self, array: Array, dim: int, axis: str) -> Array:
        """This rank's piece of the sum."""
        ...

    def all_reduce(self, array: Array, axis: str) -> Array:
        """The sum."""
        ...

    def all_to_all(self, array: Array, split: int, join: int, axis: str) -> Array:
        """A piece to each rank along one dim, theirs joined along another."""
        ...

    def own(self, array: Array, dim: int, axis: str) -> Array:
        """This rank's piece of what all have."""
        ...


class Numbers(Protocol):
    """The functions of an array library that a layer needs; `jax.numpy` has them, torch under other names."""

    def einsum(self, equation: str, *arrays: Array) -> Array:
        """As numpy's."""
        ...

    def softmax(self, array: Array) -> Array:
        """Over the last dim."""
        ...

    def silu(self, array: Array) -> Array:
        """X times its sigmoid."""
        ...

    def top(self, array: Array, count: int) -> tuple[Array, Array]:
        """The largest of the last dim, and their indices."""
        ...

    def one_hot(self, array: Array, classes: int) -> Array:
        """As the library's, floating point."""
        ...

    def concat(self, arrays: list[Array]) -> Array:
        """Along the last dim."""
        ...

    def stack(self, arrays: list[Array]) -> Array:
        """Along a new last dim."""
        ...


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
    def group(self) -> LayerGroup:
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
            return _shard(0) if label == "d" else REPLICATE
        return self.rule(name).weight or REPLICATE


def _shard(dim: int) -> Placement:
    from sim.sharding.placement import Shard

    return Shard(dim)


def shown_group(model: Model) -> LayerGroup:
    """The first group with experts, or the first."""
    return next((group for group in model.groups if group.is_moe), model.groups[0])


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


def array_dim(tensor: Tensor, dim: int) -> int:
    """The dim of the array that a dim of the simulator's tensor is: experts' copies keep senders apart."""
    return dim + 1 if tensor.by_expert and dim else dim


def run_layer(
    sharded: Sharded,
    weights: Mapping[str, Array],
    cache: tuple[Array, Array],
    stream: Array,
    comm: Collectives,
    xp: Numbers,
) -> Array:
    """The residual stream after one decode step of the layer, on one rank.

    Args:
        sharded: How it is cut.
        weights: This rank's pieces.
        cache: Keys and values [sequences, context, kv heads, head dim], this rank's.
        stream: [tokens, hidden], this rank's piece under `sharded.stream`.
        comm: Collectives.
        xp: Arithmetic.
    """
    run = _Run(sharded, weights, cache, comm, xp)
    run.left("residual_in", sharded.stream, stream)
    for op in sharded.layer.ops:
        run.step(op)
    return run.result


class _Run:
    """A layer under way: what each tensor is, wherever it is held."""

    def __init__(
        self, sharded: Sharded, weights: Mapping[str, Array], cache: tuple[Array, Array], comm: Collectives, xp: Numbers
    ) -> None:
        self.sharded, self.weights, self.cache, self.comm, self.xp = sharded, weights, cache, comm, xp
        self.held: dict[str, dict[Placement, Array]] = {}
        self.source: dict[str, Placement] = {}
        self.result: Array = None

    def left(self, tensor: str, placement: Placement, array: Array) -> None:
        """Notes what an op has left, and moves it to whole consumers first: the others slice their shard out of it."""
        self.held[tensor], self.source[tensor] = {placement: array}, placement

    def step(self, op: FusedOp) -> None:
        """Runs an op; what arrives as parts and may stay so is summed on the op's own result."""
        own, layer = self.sharded.rule(op.name), self.sharded.layer
        late = own.passes_partial and self.source[op.inputs[0]] == PARTIAL
        arrays = [
            self.held[name][PARTIAL] if late and index == 0 else self.as_placed(layer.tensor(name), op.name)
            for index, name in enumerate(op.inputs)
        ]

        def summed(array: Array) -> Array:
            return self._moved(array, layer.tensor(op.output), PARTIAL, own.output) if late else array

        result = _OPS[op.kind](self, op, arrays, summed)
        if op.output == "residual_in":
            self.result = result
        else:
            self.left(op.output, own.output, result)

    def as_placed(self, tensor: Tensor, consumer: str) -> Array:
        """A tensor as one of its consumers reads it; moved once for each placement that is not held yet."""
        held, source = self.held[tensor.name], self.source[tensor.name]
        if len(held) == 1:
            targets = {self._target(name, tensor) for name in tensor.consumers if not self._late(name, tensor)}
            for target in sorted(targets, key=lambda placement: placement != REPLICATE):
                if target not in held:
                    whole = REPLICATE if REPLICATE in held else source
                    held[target] = self._moved(held[whole], tensor, whole, target)
        return held[self._target(consumer, tensor)]

    def _late(self, name: str, tensor: Tensor) -> bool:
        op = self.sharded.layer.op(name)
        passes = self.sharded.rule(name).passes_partial and op.inputs[0] == tensor.name
        return passes and self.source[tensor.name] == PARTIAL

    def _target(self, consumer: str, tensor: Tensor) -> Placement:
        return self.sharded.rule(consumer).inputs[self.sharded.layer.op(consumer).inputs.index(tensor.name)]

    def _moved(self, array: Array, tensor: Tensor, source: Placement, target: Placement) -> Array:
        kind = collective_between(source, target)
        to, back = (array_dim(tensor, each.dims[0]) if each.dims else 0 for each in (target, source))
        if kind is None:
            return array if source == target else self.comm.own(array, to, "tp")
        if kind == "all_gather":
            return self.comm.all_gather(array, back, "tp")
        if kind == "all_reduce":
            return self.comm.all_reduce(array, "tp")
        if kind == "reduce_scatter":
            return self.comm.reduce_scatter(array, to, "tp")
        return self.comm.all_to_all(array, to, back, "tp")


Summed = Callable[[Array], Array]


def _norm(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    (x,), label = arrays, run.sharded.label(op.name)
    total = (x * x).sum(-1)
    if label == "d":
        total = run.comm.all_reduce(total, "tp")
    scale = (total / run.sharded.model.hidden + EPSILON) ** -0.5
    return x * scale[:, None] * run.weights[op.name]


def _einsum(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    equation = "egcd,edf->egcf" if op.name == "ffn1" else "egcf,efd->egcd"
    if not run.sharded.layer.tensor(op.output).by_expert:
        equation = "tx,xy->ty"
    return summed(run.xp.einsum(equation, arrays[0], run.weights[op.name]))


def _attention(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    kind, (keys, values), xp = run.sharded.group.attention, run.cache, run.xp
    if not isinstance(kind, GroupedAttention):
        raise TypeError(f"expected grouped attention, got {type(kind).__name__}; no other kind can be run yet")
    shared = kind.heads // kind.kv_heads
    groups = arrays[0].reshape(arrays[0].shape[0], -1, shared + 2, kind.head_dim)
    queries, key, value = groups[:, :, :shared], groups[:, :, shared], groups[:, :, shared + 1]
    before = xp.einsum("tgrh,tlgh->tgrl", queries, keys)
    now = xp.einsum("tgrh,tgh->tgr", queries, key)
    scores = xp.softmax(xp.concat([before, now[..., None]]) / kind.head_dim**0.5)
    past, own = scores[..., :-1], scores[..., -1]
    out = xp.einsum("tgrl,tlgh->tgrh", past, values) + own[..., None] * value[:, :, None]
    return out.reshape(out.shape[0], -1)


def _residual_add(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    return arrays[0] + arrays[1]


def _activation(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    (x,) = arrays
    if not run.sharded.group.feed_forward.gated:
        return run.xp.silu(x)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return run.xp.silu(pairs[..., 0]) * pairs[..., 1]


def _router(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    """[tokens, picked, 2]: index and weight of each token's experts."""
    logits = arrays[0] @ run.weights[op.name]
    if run.sharded.label(op.name) == "e":
        logits = run.comm.all_gather(logits, 1, "tp")
    weight, index = run.xp.top(run.xp.softmax(logits), run.sharded.group.feed_forward.experts_per_token)
    return run.xp.stack([index + 0.0 * weight, weight / weight.sum(-1, keepdims=True)])


def _dispatch(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    x, routing = arrays
    picked = (run.xp.one_hot(routing[..., 0], run.sharded.model.experts)).sum(1)
    copies = run.xp.einsum("te,td->etd", picked, x)[:, None]
    return run.comm.all_to_all(copies, 0, 1, "ep")


def _combine(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    if not run.sharded.model.is_moe:
        return _residual_add(run, op, arrays, summed)
    copies, stream, routing = arrays
    own = run.comm.all_to_all(copies, 1, 0, "ep")[:, 0]
    weight = run.xp.einsum("tke,tk->te", run.xp.one_hot(routing[..., 0], run.sharded.model.experts), routing[..., 1])
    return summed(run.xp.einsum("te,etd->td", weight, own)) + stream


_OPS: Mapping[str, Callable[[_Run, FusedOp, list[Array], Summed], Array]] = {
    "norm": _norm,
    "einsum": _einsum,
    "attention": _attention,
    "residual_add": _residual_add,
    "activation": _activation,
    "router": _router,
    "dispatch": _dispatch,
    "combine": _combine,
}
