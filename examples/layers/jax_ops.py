"""One layer on one rank of a `jax.shard_map`, op by op, as a strategy shards it.

Each op works on the pieces that its rule hands it (`sim.layers.choices.rule`), each tensor is moved between ops by the
collective that the simulator charges (`sim.sharding.redistribute`).

Tensors lie as the simulator has them: [tokens, features]; copies for experts [experts, senders, slots, features], the
picked ones alone, see `raysearch.deploy.layers.sharded_layer.Slots`. Queries, keys and values lie side by side for each
group of heads, gate and up projections column by column: a shard of the columns is one of each.
"""
# pyright: reportMissingImports=false
# (an optional extra)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from raysearch.deploy.layers.sharded_layer import EPSILON, Sharded, Slots, array_dim, runs_latents
from sim.layers.mixers import GroupedAttention, LatentAttention
from sim.layers.ops import FusedOp, Side, Tensor
from sim.sharding.placement import PARTIAL, REPLICATE, Placement
from sim.sharding.redistribute import collective_between

Array = Any
Axes = tuple[str, ...]
"""Neighbouring axes of the mesh that act as one, by name."""


def run_layer(
    sharded: Sharded, slots: Slots, weights: Mapping[str, Array], cache: tuple[Array, ...], stream: Array
) -> Array:
    """The residual stream after one decode step of the layer, on one rank.

    Args:
        sharded: How it is cut.
        slots: Of experts.
        weights: This rank's pieces.
        cache: Keys and values [sequences, context, kv heads, head dim], or latents [sequences, context, width], this
            rank's.
        stream: [tokens, hidden], this rank's piece under `sharded.stream`.
    """
    run = _Run(sharded, slots, weights, cache)
    run.left("residual_in", sharded.rule("combine").output, stream)
    for op in sharded.layer.ops:
        run.step(op)
    return run.result


class _Run:
    """A layer under way: what each tensor is, wherever it is placed."""

    def __init__(self, sharded: Sharded, slots: Slots, weights: Mapping[str, Array], cache: tuple[Array, ...]) -> None:
        self.sharded, self.slots, self.weights, self.cache = sharded, slots, weights, cache
        self.placed: dict[str, dict[Placement, Array]] = {}
        self.source: dict[str, Placement] = {}
        self.crossed: set[str] = set()
        self.routings: list[tuple[Array, Array]] = []
        self.shared: Array = None
        self.result: Array = None

    def left(self, tensor: str, placement: Placement, array: Array) -> None:
        """Notes what an op has left, and moves it to whole consumers first: the others slice their shard out of it."""
        self.placed[tensor], self.source[tensor] = {placement: array}, placement

    def step(self, op: FusedOp) -> None:
        """Runs an op; what arrives as parts and may stay so is summed on the op's own result."""
        own, layer = self.sharded.rule(op.name), self.sharded.layer
        late = own.passes_partial and self.source[op.inputs[0]] == PARTIAL
        arrays = [
            self.placed[name][PARTIAL] if late and index == 0 else self.as_placed(layer.tensor(name), op.name)
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
        """A tensor as one of its consumers reads it; moved once for each placement that is not placed yet."""
        placed, source = self.placed[tensor.name], self.source[tensor.name]
        if len(placed) == 1:
            targets = {self._target(name, tensor) for name in tensor.consumers if not self._late(name, tensor)}
            if self.sharded.crosses(tensor) and tensor.name not in self.crossed:
                self.crossed.add(tensor.name)
                self.placed[tensor.name] = placed = self._crossed(tensor, placed[source], targets)
            for target in sorted(targets, key=lambda placement: placement != REPLICATE):
                if target not in placed:
                    whole = REPLICATE if REPLICATE in placed else source
                    side = self.sharded.layer.op(consumer).side
                    placed[target] = self._moved(placed[whole], side, tensor, whole, target)
        return placed[self._target(consumer, tensor)]

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
    return _scaled(x, total / run.sharded.model.hidden, run.weights[op.name])


def _scaled(x: Array, mean_square: Array, weight: Array) -> Array:
    return (x * ((mean_square + EPSILON) ** -0.5)[:, None]).astype(x.dtype) * weight


def _einsum(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    if op.name == "qkv_proj" and runs_latents(run.sharded.group.attention):
        return _into_latents(run, arrays[0])
    equation = "egcd,edf->egcf" if op.name == "ffn1" else "egcf,efd->egcd"
    if not run.sharded.layer.tensor(op.output).by_expert:
        equation = "tx,xy->ty"
    return summed(jnp.einsum(equation, arrays[0], run.weights[op.name]))


def _into_latents(run: _Run, x: Array) -> Array:
    """Queries of this rank's heads, and beside them the latent with its rotary key, which every rank has."""
    weights, kind = run.weights, run.sharded.group.attention
    assert isinstance(kind, LatentAttention)

    def normed(latent: Array, name: str) -> Array:
        return _scaled(latent, jnp.square(latent.astype(jnp.float32)).mean(-1), weights[name])

    wide = x @ weights["kv_a_proj"]
    latent = normed(wide[:, : kind.kv_rank], "kv_a_norm")
    queries = normed(x @ weights["q_a_proj"], "q_a_norm") @ weights["q_b_proj"] if kind.query_rank else None
    queries = x @ weights["q_proj"] if queries is None else queries
    return jnp.concatenate([queries, latent, wide[:, kind.kv_rank :]], axis=1)


def _latent_attention(run: _Run, x: Array, kind: LatentAttention) -> Array:
    """Queries are brought into the latent, and what they read of it into values: decoding never expands the cache."""
    (cache,), up = run.cache, run.weights["kv_b_proj"]
    own = x[:, -kind.cached_width :]
    queries = x[:, : -kind.cached_width].reshape(x.shape[0], -1, kind.query_width)
    absorbed = jnp.einsum("thd,hrd->thr", queries[..., : kind.head_dim], up[..., : kind.head_dim])
    queries = jnp.concatenate([absorbed, queries[..., kind.head_dim :]], axis=-1)
    before, now = jnp.einsum("thc,tlc->thl", queries, cache), jnp.einsum("thc,tc->th", queries, own)
    scores = jax.nn.softmax(jnp.concatenate([before, now[..., None]], axis=-1) / kind.query_width**0.5)
    read = jnp.einsum("thl,tlr->thr", scores[..., :-1], cache[..., : kind.kv_rank])
    read += scores[..., -1:] * own[:, None, : kind.kv_rank]
    return jnp.einsum("thr,hrd->thd", read, up[..., kind.head_dim :]).reshape(x.shape[0], -1)


def _attention(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    kind = run.sharded.group.attention
    if isinstance(kind, LatentAttention):
        return _latent_attention(run, arrays[0], kind)
    keys, values = run.cache
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
    return _activated(run, arrays[0])


def _activated(run: _Run, x: Array) -> Array:
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
    if sharded.group.feed_forward.shared_ffn_hidden:
        run.shared = _activated(run, x @ run.weights["shared1"]) @ run.weights["shared2"]
    gathered = sharded.exchange == "all_gather"
    if gathered:
        x, routing = _all_gather(x, 0, sharded.token_axes), run.routing_of_all(routing)
    places, shape = _places(run, routing)
    copies = jnp.repeat(x, routing.shape[1], axis=0)
    filled = jnp.zeros((shape[0] * shape[1], x.shape[1]), x.dtype).at[places.ravel()].set(copies, mode="drop")
    filled = filled.reshape(shape[0], 1, shape[1], -1)
    return filled if gathered else _all_to_all(filled, 0, 1, sharded.ep_axes)


def _combine(run: _Run, op: FusedOp, arrays: list[Array], summed: Summed) -> Array:
    """Outputs travel back, or are summed over the ranks of all experts."""
    sharded = run.sharded
    if not sharded.model.is_moe:
        return _residual_add(run, op, arrays, summed)
    copies, stream, routing = arrays
    if sharded.exchange != "all_gather":
        own = _weighed(run, _all_to_all(copies, 1, 0, sharded.ep_axes), routing)
        return summed(_with_shared(run, own)) + stream
    total = _weighed(run, copies, run.routing_of_all(routing))
    total = _with_shared(run, _reduce_scatter(total, 0, sharded.token_axes))
    if sharded.copies > 1:
        total = lax.psum(total, ("middle", "inner") if sharded.sums_late else "middle")
    return summed(total) + stream


def _with_shared(run: _Run, total: Array) -> Array:
    """Of the shared experts the rows and columns that a rank has of the others' sum, parts where that is parts."""
    if run.shared is None:
        return total
    sharded, shared = run.sharded, run.shared
    for dim, label in enumerate("td"):
        if sharded.label("combine") == label and shared.shape[dim] != total.shape[dim]:
            shared = _own(shared, dim, sharded.group_axes("experts"))
    return total + shared


def _weighed(run: _Run, outputs: Array, routing: Array) -> Array:
    """The sum of each token's experts of this rank; NaN where one had no slot left for it."""
    places, shape = _places(run, routing)
    flat, weight = outputs.reshape(shape[0] * shape[1], -1), routing[..., 1].astype(outputs.dtype)
    found = flat.at[places].get(mode="fill", fill_value=0)
    found = jnp.where((places == _FULL)[..., None], jnp.nan, found)
    return jnp.einsum("tk,tkd->td", weight, found)


_FULL = 2**30
"""The place of a copy that found its expert's slots taken; one more of those whose expert is another rank's."""


def _places(run: _Run, routing: Array) -> tuple[Array, tuple[int, int]]:
    """Of each token's copies [tokens, picked] the place among (experts, slots) of this rank, and how many these are."""
    slots, sharded = run.slots, run.sharded
    expert, (tokens, picked) = routing[..., 0].astype(jnp.int32), routing.shape[:2]
    chosen = jax.nn.one_hot(expert, sharded.model.experts, dtype=jnp.int32)
    blocks = chosen.reshape(tokens // slots.block, slots.block * picked, -1)
    before = ((blocks.cumsum(1) - blocks) * blocks).sum(-1).reshape(tokens, picked)  # copies that came first
    slot = jnp.arange(tokens)[:, None] // slots.block * slots.each + before
    experts, each = sharded.model.experts, tokens // slots.block * slots.each
    if sharded.exchange == "all_gather":
        experts //= lax.axis_size(sharded.ep_axes)
        expert = expert - lax.axis_index(sharded.ep_axes) * experts
    own = (expert >= 0) & (expert < experts)
    place = jnp.where(own, expert * each + slot, _FULL + 1)
    return jnp.where(before < slots.each, place, _FULL), (experts, each)


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
