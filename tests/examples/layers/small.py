"""A small layer of each kind, its numbers, its unsharded truth, and what the simulator charges for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raysearch.deploy.layers.sharded_layer import Sharded, cache_shape, sharded_layer_of, shown_group, weight_shapes
from sim.config.catalog import load_hardware
from sim.layers.mixers import LatentAttention
from sim.layers.model import FeedForward, LayerGroup, Model, uniform_model
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import op_names
from sim.ops.sizes import ROUTING_ENTRY_BYTES
from sim.prices.collectives import Collective
from sim.sharding.placement import REPLICATE
from sim.simulate import evaluate
from sim.strategy import NONE, Strategy
from sim.workload import DegreeTables, ExpertExchange, Precisions, Workload

SEQUENCES, CONTEXT = 32, 6
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 8
DENSE = uniform_model("small", 2, 64, 96, HEADS, KV_HEADS, HEAD_DIM, 128, 1, 1)
MOE = uniform_model("small_moe", 2, 64, 32, HEADS, KV_HEADS, HEAD_DIM, 128, 4, 2)
"""Every token visits two of four experts."""

LATENT = Model(
    "small_latent",
    64,
    128,
    (LayerGroup("layers", 2, LatentAttention(HEADS, 8, 24, 16, 4, 8), FeedForward(32, 4, 2, shared_ffn_hidden=32)),),
)
"""With latent attention and shared experts, as DeepSeek-V3."""

BLOCK = 4
"""Tokens among which every expert is picked as often, and which no rank shares with another."""


class Degrees(NamedTuple):
    """Of a strategy, and how tokens reach their experts."""

    tp: int
    ep: int
    dp: int | None = None
    exchange: ExpertExchange = "all_to_all"

    @property
    def ranks(self) -> int:
        return self.tp * (self.dp or self.ep)


OWN_MESHES = (Degrees(4, 4, 1), Degrees(2, 4, 2), Degrees(4, 2, 1), Degrees(1, 2, 4))
"""TEP4; attention's data-parallel groups among more experts' groups; experts shared by two; fewer experts' groups."""


def strategy_of(dims: tuple[int, ...], degrees: Degrees) -> Strategy:
    return Strategy(degrees.tp, degrees.ep, 1, SEQUENCES, dims, dp=degrees.dp)


def sharded(model: Model, dims: tuple[int, ...], degrees: Degrees) -> Sharded:
    return sharded_layer_of(workload_of(model, degrees), strategy_of(dims, degrees))


def ffn2_on_hidden(model: Model) -> tuple[int, ...]:
    names = op_names(model)
    dims = list(megatron_sp_dims(model))
    dims[names.index("ffn2")] = 1
    return tuple(dims)


KNOWN = {"megatron": megatron_dims, "megatron_sp": megatron_sp_dims, "ffn2_on_hidden": ffn2_on_hidden}


def random_dims(model: Model, seed: int, degrees: Degrees | None = None) -> tuple[int, ...]:
    """Of each op, but where its side's group is one rank, which shards nothing."""
    drawn = np.random.default_rng(seed).integers(0, 3, len(op_names(model))).tolist()
    if degrees is None:
        return tuple(drawn)
    cut = sharded(model, tuple(drawn), degrees)
    alone = {"attention": cut.tp == 1, "experts": cut.moe_tp == 1}
    return tuple(NONE if alone[op.side] else choice for op, choice in zip(cut.layer.ops, drawn, strict=True))


def numbers(model: Model, seed: int = 0) -> tuple[dict[str, Any], tuple[Any, ...], Any]:
    """(weights, cache, stream) in single precision, whole.

    Of experts every token picks the two that its first four columns say, neighbours the next two.
    """
    rng = np.random.default_rng(seed)
    weights = {n: rng.normal(0, s[-2 if len(s) > 1 else 0] ** -0.5, s) for n, s in weight_shapes(model).items()}
    cached = cache_shape(model)
    cache = [rng.normal(size=(SEQUENCES, CONTEXT, *cached)) for _ in range(len(cached))]
    stream = rng.normal(size=(SEQUENCES, model.hidden))
    if model.is_moe:
        weights["ffn_norm"][:4] = 1
        weights["router"] *= 0.05
        weights["router"][:4] += 4 * np.eye(4)
        weights["o_proj"][:, :4] = 0
        stream[:, :4] = [np.roll([1, 0.5, 0, 0], token) for token in range(SEQUENCES)]
    as_single = lambda array: array.astype(np.float32)  # noqa: E731
    return {n: as_single(w) for n, w in weights.items()}, tuple(map(as_single, cache)), as_single(stream)


def workload_of(model: Model, degrees: Degrees) -> Workload:
    """One decode step of the layer, everything in bf16."""
    return Workload(
        "small", model, load_hardware("h100_sxm"), "decode", CONTEXT, math.inf, 64,
        Precisions("bf16", "bf16", "bf16", "bf16"), 1.0, DegreeTables((degrees.tp,), (degrees.ep,), (1,), (SEQUENCES,)),
        "", expert_exchange=degrees.exchange,
    )  # fmt: skip


def charged(model: Model, dims: tuple[int, ...], degrees: Degrees) -> list[tuple[str, int, int]]:
    """(kind, degree, bytes that a rank sends) of every collective of one layer, sorted.

    Where tokens are gathered, their choices of experts come along, which nobody is charged for: once, or as dispatch
    and combine each read them.
    """
    evaluation = evaluate(workload_of(model, degrees), strategy_of(dims, degrees))
    found = [(c.kind, c.degree, round(c.bytes_per_device)) for op in evaluation.ops for c in _whole(op.collectives)]
    layer = sharded(model, dims, degrees)
    ranks = math.prod(layer.mesh[axis] for axis in layer.token_axes)
    if model.is_moe and degrees.exchange == "all_gather" and ranks > 1:
        readers = {layer.rule("dispatch").inputs[1], layer.rule("combine").inputs[2]}
        entry = layer.group.feed_forward.experts_per_token * ROUTING_ENTRY_BYTES
        tokens = SEQUENCES // ranks  # of each, before they are gathered
        for reader in readers:
            own = tokens // (1 if reader == REPLICATE else layer.moe_tp)
            found.append(("all_gather", ranks, own * entry * (ranks - 1)))
    return sorted(found)


def _whole(collectives: Sequence[Collective]) -> Sequence[Collective]:
    """What is summed over two axes at once is one collective, though what the second adds is charged apart."""
    wider = [each for each in collectives if each.tensor == "tokens" and " x " in each.axis]
    if not wider:
        return collectives
    (more,), alone = wider, next(each for each in collectives if each.kind == "all_reduce" and each is not wider[0])
    both = replace(more, bytes_per_device=more.bytes_per_device + alone.bytes_per_device)
    return [both, *(each for each in collectives if each not in (more, alone))]


def truth(model: Model, weights: dict[str, Any], cache: tuple[Any, ...], stream: Any) -> Any:
    """The layer in plain numpy, in double precision: the stream after it."""
    w = {name: weight.astype(float) for name, weight in weights.items()}

    def norm(x: Any, scale: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def softmax(x: Any) -> Any:
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def feed_forward(x: Any, first: Any, second: Any) -> Any:
        gate, up = (x @ first)[:, 0::2], (x @ first)[:, 1::2]
        return (gate / (1 + np.exp(-gate)) * up) @ second

    shared, dim = HEADS // KV_HEADS, HEAD_DIM
    x, kind = norm(stream, w["attn_norm"]), shown_group(model).attention

    def of_heads() -> Iterator[tuple[Any, Any, Any]]:
        """Queries [t, h], keys and values [t, l, h] of each head."""
        if isinstance(kind, LatentAttention):  # as trained: the cache is expanded into keys and values of heads
            wide, rank = x @ w["kv_a_proj"], kind.kv_rank
            own = np.concatenate([norm(wide[:, :rank], w["kv_a_norm"]), wide[:, rank:]], axis=1)
            latents = np.concatenate([cache[0], own[:, None]], axis=1)
            queries = norm(x @ w["q_a_proj"], w["q_a_norm"]) @ w["q_b_proj"]
            for head, query in enumerate(np.split(queries, HEADS, axis=1)):
                up = latents[..., :rank] @ w["kv_b_proj"][head]
                yield (
                    query,
                    np.concatenate([up[..., : kind.head_dim], latents[..., rank:]], -1),
                    up[..., kind.head_dim :],
                )
            return
        qkv = (x @ w["qkv_proj"]).reshape(len(stream), KV_HEADS, shared + 2, dim)
        for head in range(HEADS):
            group = head // shared
            keys = np.concatenate([cache[0][:, :, group], qkv[:, None, group, shared]], axis=1)
            values = np.concatenate([cache[1][:, :, group], qkv[:, None, group, shared + 1]], axis=1)
            yield qkv[:, group, head % shared], keys, values

    heads = []
    for query, keys, values in of_heads():
        scores = np.einsum("th,tlh->tl", query, keys) / math.sqrt(query.shape[1])
        heads.append(np.einsum("tl,tlh->th", softmax(scores), values))
    middle = stream + np.concatenate(heads, axis=1) @ w["o_proj"]
    x = norm(middle, w["ffn_norm"])
    if not model.is_moe:
        return middle + feed_forward(x, w["ffn1"], w["ffn2"])
    chances = softmax(x @ w["router"])
    least = np.sort(chances, axis=1)[:, -shown_group(model).feed_forward.experts_per_token, None]
    chances = np.where(chances >= least, chances, 0.0)
    chances /= chances.sum(1, keepdims=True)
    outs = [chances[:, e, None] * feed_forward(x, w["ffn1"][e], w["ffn2"][e]) for e in range(model.experts)]
    return middle + sum(outs) + (feed_forward(x, w["shared1"], w["shared2"]) if "shared1" in w else 0)
