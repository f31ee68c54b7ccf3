"""One layer on one rank of a `jax.shard_map`, op by op, as a strategy shards it.

Each op works on the pieces that its rule hands it (`sim.layers.choices.rule`), each tensor is moved between ops by the
collective that the simulator charges (`sim.sharding.redistribute`).

Tensors lie as the simulator has them: [tokens, features]; copies for experts [experts, senders, tokens, features], a
copy of every token for every expert, weighted with zero where the router did not pick it. Queries, keys and values lie
side by side for each group of heads, gate and up projections column by column: a shard of the columns is one of each.
"""
# pyright: reportMissingImports=false
# (an optional extra)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from raysearch.deploy.layers.sharded_layer import EPSILON, Sharded, array_dim
from sim.layers.mixers import GroupedAttention
from sim.layers.ops import FusedOp, Side, Tensor
from sim.sharding.placement import PARTIAL, REPLICATE, Placement
from sim.sharding.redistribute import collective_between

Array = Any
Axes = tuple[str, ...]
"""Neighbouring axes of the mesh that act as one, by name."""


def run_layer(sharded: Sharded, weights: Mapping[str, Array], cache: tuple[Array, Array], stream: Array) -> Array:
    """The residual stream after one decode step of the layer, on one rank.

    Args:
        sharded: How it is cut.
        weights: This rank's pieces.
        cache: Keys and values [sequences, context, kv heads, head dim], this rank's.
        stream: [tokens, hidden], this rank's piece under `sharded.stream`.
    """
    run = _Run(sharded, weights, cache)
    run.left("residual_in", sharded.rule("combine").output, stream)
    for op in sharded.layer.ops:
        run.step(op)
    return run.result


class _Run:
    """A layer under way: what each tensor is, wherever it is held."""

    def __init__(self, sharded: Sharded, weights: Mapping[str, Array], cache: tuple[Array, Array]) -> None:
        self.sharded, self.weights, self.cache = sharded, weights, cache
        self.held: dict[str, dict[Placement, Array]] = {}
        self.source: dict[str, Placement] = {}
        self.crossed: set[str] = set()
        self.routings: list[tuple[Array, Array]] = []
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
            if late and op.kind == "combine" and self.sharded.copies > 1:
                return array  # in the one all-reduce over all that have the same tokens
            return self._moved(array, op.side, layer.tensor(op.output), PARTIAL, own.output) if late else array

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
            if self.sharded.crosses(tensor) and tensor.name not in self.crossed:
                self.crossed.add(tensor.name)
                self.held[tensor.name] = held = self._crossed(tensor, held[source], targets)
            for target in sorted(targets, key=lambda placement: placement != REPLICATE):
                if target not in held:
                    whole = REPLICATE if REPLICATE in held else source
                    side = self.sharded.layer.op(consumer).side
                    held[target] = self._moved(held[whole], side, tensor, whole, target)
        return held[self._target(consumer, tensor)]

    def routing_of_all(self, routing: Array) -> Array:
        """The choices of experts of all ranks whose tokens this one has; gathered once."""
        for own, gathered in self.routings:
            if own is routing:
                return gathered
        self.routings.append((routing, _all_gather(routing, 0, self.sharded.token_axes)))
        return self.routings[-1][1]

    def _crossed(self, tensor: Tensor, array: Array, targets: set[Placement]) -> dict[Placement, Array]:
        """On the other side's mesh: whole if anybody reads it whole, else as each consumer does."""
        found: dict[Placement, Array] = {}
        for target in {REPLICATE} if REPLICATE in targets else targets:
            moved = array
            for hop in self.sharded.hops[tensor.name, target]:
                moved = _moved(moved, tensor, hop.source, hop.target, hop.axes)
            found[target] = moved
        return found

    def _late(self, name: str, tensor: Tensor) -> bool:
        op = self.sharded.layer.op(name)
        passes = self.sharded.rule(name).passes_partial and op.inputs[0] == tensor.name
        return passes and self.source[tensor.name] == PARTIAL

    def _target(self, consumer: str, tensor: Tensor) -> Placement:
        return self.sharded.rule(consumer).inputs[self.sharded.layer.op(consumer).inputs.index(tensor.name)]

    def _moved(self, array: Array, side: Side, tensor: Tensor, source: Placement, target: Placement) -> Array:
        return _moved(array, tensor, source, target, self.sharded.group_axes(side))


def _moved(array: Array, tensor: Tensor, source: Placement, target: Placement, axes: Axes) -> Array:
    kind = collective_between(source, target)
    to, back = (array_dim(tensor, each.dims[0]) if each.dims else 0 for each in (target, source))
    if kind is None:
        return array if source == target else _own(array, to, axes)
    if kind == "all_gather":
        return _all_gather(array, back, axes)
    if kind == "all_reduce":
        return lax.psum(array, axes)
    if kind == "reduce_scatter":
        return _reduce_scatter(array, to, axes)
    return _all_to_all(array, to, back, axes)


Summed = Callable[[Array], Array]


def _norm(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    (x,), label = arrays, run.sharded.label(op.name)
    total = jnp.square(x.astype(jnp.float32)).sum(-1)
    if label == "d":
        total = lax.psum(total, run.sharded.group_axes(op.side))
    scale = (total / run.sharded.model.hidden + EPSILON) ** -0.5
    return (x * scale[:, None]).astype(x.dtype) * run.weights[op.name]


def _einsum(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    equation = "egcd,edf->egcf" if op.name == "ffn1" else "egcf,efd->egcd"
    if not run.sharded.layer.tensor(op.output).by_expert:
        equation = "tx,xy->ty"
    return summed(jnp.einsum(equation, arrays[0], run.weights[op.name]))


def _attention(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    kind, (keys, values) = run.sharded.group.attention, run.cache
    assert isinstance(kind, GroupedAttention)
    shared = kind.heads // kind.kv_heads
    groups = arrays[0].reshape(arrays[0].shape[0], -1, shared + 2, kind.head_dim)
    queries, key, value = groups[:, :, :shared], groups[:, :, shared], groups[:, :, shared + 1]
    before = jnp.einsum("tgrh,tlgh->tgrl", queries, keys)
    now = jnp.einsum("tgrh,tgh->tgr", queries, key)
    scores = jax.nn.softmax(jnp.concatenate([before, now[..., None]], axis=-1) / kind.head_dim**0.5)
    past, own = scores[..., :-1], scores[..., -1]
    out = jnp.einsum("tgrl,tlgh->tgrh", past, values) + own[..., None] * value[:, :, None]
    return out.reshape(out.shape[0], -1)


def _residual_add(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    return arrays[0] + arrays[1]


def _activation(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    (x,) = arrays
    if not run.sharded.group.feed_forward.gated:
        return jax.nn.silu(x)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jax.nn.silu(pairs[..., 0]) * pairs[..., 1]


def _router(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    """[tokens, picked, 2], single precision: index and weight of each token's experts."""
    logits = arrays[0] @ run.weights[op.name]
    if run.sharded.label(op.name) == "e":
        logits = _all_gather(logits, 1, run.sharded.group_axes(op.side))
    weight, index = lax.top_k(
        jax.nn.softmax(logits.astype(jnp.float32)), run.sharded.group.feed_forward.experts_per_token
    )
    return jnp.stack([index.astype(jnp.float32), weight / weight.sum(-1, keepdims=True)], axis=-1)


def _dispatch(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    """Copies travel to their experts' ranks, or every token goes to all ranks, which copy it for their experts."""
    x, routing = arrays
    sharded = run.sharded
    if sharded.exchange == "all_gather":
        x, routing = _all_gather(x, 0, sharded.token_axes), run.routing_of_all(routing)
        picked = _of_own_experts(run, _one_hot(run, routing).sum(1)).astype(x.dtype)
        return jnp.einsum("te,td->etd", picked, x)[:, None]
    picked = _one_hot(run, routing).sum(1).astype(x.dtype)
    return _all_to_all(jnp.einsum("te,td->etd", picked, x)[:, None], 0, 1, sharded.ep_axes)


def _combine(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    """Outputs travel back, or are summed over the ranks of all experts."""
    sharded = run.sharded
    if not sharded.model.is_moe:
        return _residual_add(run, op, arrays, summed)
    copies, stream, routing = arrays
    gathered = sharded.exchange == "all_gather"
    if gathered:
        routing = run.routing_of_all(routing)
    own = copies[:, 0] if gathered else _all_to_all(copies, 1, 0, sharded.ep_axes)[:, 0]
    weight = jnp.einsum("tke,tk->te", _one_hot(run, routing), routing[..., 1]).astype(own.dtype)
    if not gathered:
        return summed(jnp.einsum("te,etd->td", weight, own)) + stream
    total = _reduce_scatter(jnp.einsum("te,etd->td", _of_own_experts(run, weight), own), 0, sharded.token_axes)
    if sharded.copies > 1:
        parts = run.source[op.inputs[0]] == PARTIAL and sharded.rule(op.name).passes_partial
        total = lax.psum(total, ("middle", "inner") if parts else "middle")
    return summed(total) + stream


def _of_own_experts(run: _Run, by_expert: Array) -> Array:
    """Of [tokens, experts] the columns of this rank's experts."""
    return _own(by_expert, 1, run.sharded.ep_axes)


def _one_hot(run: _Run, routing: Array) -> Array:
    return jax.nn.one_hot(routing[..., 0].astype(jnp.int32), run.sharded.model.experts)


def _all_gather(array: Array, dim: int, axes: Axes) -> Array:
    return lax.all_gather(array, axes, axis=dim, tiled=True)


def _reduce_scatter(array: Array, dim: int, axes: Axes) -> Array:
    return lax.psum_scatter(array, axes, scatter_dimension=dim, tiled=True)


def _all_to_all(array: Array, split: int, join: int, axes: Axes) -> Array:
    return lax.all_to_all(array, axes, split, join, tiled=True)


def _own(array: Array, dim: int, axes: Axes) -> Array:
    size = array.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, dim)


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
