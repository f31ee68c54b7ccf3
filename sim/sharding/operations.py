"""What the operations of a layer compute, and their sharding rules.

Each is given as numbers on whole tensors, small and plain, because this is what the rules are proved
against; nothing here is fast. Gates `[t, e]` hold the weight of each expert a token visits, else 0, and
experts have one slot per token: `[e, t, d]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from sim.sharding.domains import REALS, TIED, indices
from sim.sharding.kinds import LogSumExp
from sim.sharding.placement import PARTIAL, REPLICATE, Array, Placement
from sim.sharding.rules import (
    Operation,
    Rule,
    add_rules,
    einsum_operation,
    label_rules,
    multilinear_rules,
    reads_as,
    rules_of,
    shards,
    written,
)

TOP_K = 2
VOCABULARY = 63
QUERIES = 2
HEAD = 3
NORM_EPSILON = 1e-6

# --- numbers ------------------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """Softmax over the last dim."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def top_k(logits: Array) -> Array:
    """Gates `[t, e]`: the softmax over the largest `TOP_K` logits of each token, 0 elsewhere."""
    least = np.sort(logits, -1)[:, [-TOP_K]]
    return softmax(np.where(logits >= least, logits, -np.inf))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _norm(x: Array) -> Array:
    return _normalised(x, np.square(x).sum(-1, keepdims=True), x.shape[-1])


def _normalised(x: Array, squares: Array, size: int) -> Array:
    return x / np.sqrt(squares / size + NORM_EPSILON)


def _swiglu(x: Array) -> Array:
    gate, up = x[..., 0], x[..., 1]
    return gate / (1 + np.exp(-gate)) * up


def _attention(qkv: Array, cache: Array) -> Array:
    """One new token per request, grouped heads.

    Args:
        qkv: `[t, h, (QUERIES + 2) * HEAD]`: per KV head its queries, the new key and the new value.
        cache: `[t, h, context, 2 * HEAD]`: cached keys and values.
    """
    return _values(cached_attention(qkv[..., : QUERIES * HEAD], _appended(qkv, cache)))


def _appended(qkv: Array, cache: Array) -> Array:
    """The cache with the new token's key and value behind it."""
    return np.concatenate([cache, qkv[:, :, None, QUERIES * HEAD :]], 2)


def cached_attention(queries: Array, cache: Array) -> Array:
    """Attention over what the cache has, and how much that is: see `LogSumExp`.

    Args:
        queries: `[t, h, QUERIES * HEAD]`.
        cache: `[t, h, context, 2 * HEAD]`.

    Returns:
        `[t, h, QUERIES, HEAD + 1]`: results, and the logarithm of the sum of exponentials behind them.
    """
    rows = queries.reshape(*queries.shape[:2], QUERIES, HEAD)
    scores = np.einsum("thqx,thcx->thqc", rows, cache[..., :HEAD])
    highest = scores.max(-1, keepdims=True, initial=-1e9)  # an empty cache weighs nothing
    powers = np.exp(scores - highest)
    sums = powers.sum(-1, keepdims=True)
    values = np.einsum("thqc,thcx->thqx", powers, cache[..., HEAD:]) / np.where(sums, sums, 1.0)
    with np.errstate(divide="ignore"):
        return np.concatenate([values, highest + np.log(sums)], -1)


def _values(results: Array) -> Array:
    """`[t, h, QUERIES * HEAD]` of what `cached_attention` returns."""
    return results[..., :-1].reshape(*results.shape[:2], QUERIES * HEAD)


def _router(x: Array, weight: Array) -> Array:
    return top_k(x @ weight)


def _dispatch(x: Array, gates: Array) -> Array:
    return np.einsum("td,te->etd", x, (gates > 0).astype(float))


def _combine(results: Array, residual: Array, gates: Array) -> Array:
    return np.einsum("etd,te->td", results, gates) + residual


def _look_up(tokens: Array, table: Array) -> Array:
    return table[tokens]


def _greedy(logits: Array) -> Array:
    """The most likely token, the first of several."""
    return logits.argmax(-1)


OPERATIONS: dict[str, Operation] = {
    "matmul": einsum_operation("ij,jk->ik"),
    "batched_matmul": einsum_operation("bij,bjk->bik"),
    "add": Operation("residual_add", "td,td->td", np.add, free="td"),
    "multiply": Operation("multiply", "td,td->td", np.multiply, free="td"),
    "negate": Operation("negate", "td->td", np.negative, free="td"),
    "relu": Operation("relu", "td->td", _relu, free="td"),
    "softmax": Operation("softmax", "td->td", softmax, free="t"),
    "top_k": Operation("top_k", "te->te", top_k, free="t"),
    "norm": Operation("norm", "td->td", _norm, free="t"),
    "activation": Operation("activation", "tfg->tf", _swiglu, free="tf", sizes={"g": 2}),
    "attention": Operation(
        "attention", "thu,thcz->thv", _attention, free="th", sizes={"u": (QUERIES + 2) * HEAD, "z": 2 * HEAD}
    ),
    "cached_attention": Operation(
        "cached_attention",
        "thu,thcz->thqw",
        cached_attention,
        free="th",
        sizes={"u": QUERIES * HEAD, "z": 2 * HEAD},
    ),
    "router": Operation("router", "td,de->te", _router, free="t"),
    "dispatch": Operation("dispatch", "td,te->etd", _dispatch, free="tde"),
    "combine": Operation("combine", "etd,td,te->td", _combine, free="td"),
    "embedding": Operation(
        "embedding",
        "t,vd->td",
        _look_up,
        free="td",
        sizes={"v": VOCABULARY},
        domains=(indices(VOCABULARY), REALS),
    ),
    "lm_head": einsum_operation("td,dv->tv"),
    "greedy": Operation("greedy", "tv->t", _greedy, free="t", domains=(TIED,)),
}
"""Every operation by name. Einsums of the layer come from their equations: see `sim.layers.choices`."""


@lru_cache(maxsize=64)
def activation_operation(letters: str) -> Operation:
    """The activation on a tensor of these letters; gate and up lie side by side and are sharded alike."""
    return replace(OPERATIONS["activation"], equation=f"{letters}g->{letters}", free=letters)


# --- rules --------------------------------------------------------------------------------------------

RankTensors = Sequence[Sequence[Array]]


def norm_over_columns(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the columns: the ranks all-reduce one sum of squares per row, and the rest is pointwise."""

    def run(ranks: RankTensors) -> list[Array]:
        squares = sum(np.square(x).sum(-1, keepdims=True) for (x,) in ranks)
        size = sum(x.shape[-1] for (x,) in ranks)
        return [_normalised(x, np.asarray(squares), size) for (x,) in ranks]

    for shard in shards(placements):
        yield Rule((shard.on(1),), shard.on(1), "d", run)


def attention_over_context(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the cached context: parts of every softmax are exchanged and merged, one rank having the new token's.

    Each rank ends with a share of the heads or of the requests, or with everything.
    """
    for shard in shards(placements):
        for output in (shard.on(1), shard.on(0), REPLICATE):

            def run(ranks: RankTensors, output: Placement = output) -> list[Array]:
                caches = [cache if rank else _appended(qkv, cache) for rank, (qkv, cache) in enumerate(ranks)]
                queries = ranks[0][0][..., : QUERIES * HEAD]
                parts = [cached_attention(queries, cache) for cache in caches]
                return output.split(_values(LogSumExp().assemble(parts)), len(ranks))

            yield Rule((REPLICATE, shard.on(2)), output, "c", run)


def cache_over_context(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the cache: every rank has the softmax over its part of it."""
    for shard in shards(placements):
        yield Rule((REPLICATE, shard.on(2)), LogSumExp(), "c")


def router_over_experts(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the experts: the ranks gather the logits, because top-k needs all of them."""
    for shard in shards(placements):

        def run(ranks: RankTensors, shard: Placement = shard) -> list[Array]:
            logits = shard.on(1).assemble([x @ weight for x, weight in ranks])
            return [top_k(logits)] * len(ranks)

        yield Rule((REPLICATE, shard.on(1)), REPLICATE, "e", run)


def combine_is_an_einsum_and_an_add(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Rules compose: what the weighted sum leaves is what the residual add takes."""
    weighted_sum, add = einsum_operation("etd,te->td"), OPERATIONS["add"]
    for first in (rule for rule in rules_of(weighted_sum, placements) if rule.run is None):
        for second in rules_of(add, placements):
            if reads_as(first.output, second.inputs[0]):
                results, gates = first.inputs
                yield Rule((results, second.inputs[1], gates), second.output, first.label or second.label)


def combine_sums_late(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Parts of the experts' results pass the weighted sum and are all-reduced before the residual add."""

    def run(ranks: RankTensors) -> list[Array]:
        weighted = sum(np.einsum("etd,te->td", results, gates) for results, _, gates in ranks)
        return [np.asarray(weighted) + residual for _, residual, _ in ranks]

    yield Rule((PARTIAL, REPLICATE, REPLICATE), REPLICATE, run=run)


def look_up_over_vocabulary(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the vocabulary: every rank looks up the tokens whose rows it has, and zeros for the others."""
    for shard in shards(placements):

        def run(ranks: RankTensors, shard: Placement = shard) -> list[Array]:
            own = shard.own(sum(len(table) for _, table in ranks), len(ranks))
            return [_masked_look_up(tokens, table, rows) for (tokens, table), rows in zip(ranks, own, strict=True)]

        yield Rule((REPLICATE, shard.on(0)), PARTIAL, "v", run)


def _masked_look_up(tokens: Array, table: Array, rows: Array) -> Array:
    mine = (tokens[:, None] == rows).astype(float)
    return mine @ table


def greedy_over_vocabulary(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard the vocabulary: the ranks gather the score and the token of each one's best, and take the best of those."""
    for shard in shards(placements):

        def run(ranks: RankTensors, shard: Placement = shard) -> list[Array]:
            own = shard.own(sum(logits.shape[1] for (logits,) in ranks), len(ranks))
            offers = [
                (logits.max(1), tokens[_greedy(logits)])
                for (logits,), tokens in zip(ranks, own, strict=True)
                if len(tokens)
            ]
            scores, tokens = (np.stack(column) for column in zip(*offers, strict=True))
            best = np.where(scores == scores.max(0), tokens, tokens.max() + 1).min(0)
            return [best] * len(ranks)

        yield Rule((shard.on(1),), REPLICATE, "v", run)


add_rules(
    "residual_add",
    label_rules,
    written(
        "P(sum), P(sum) -> P(sum)",
        "P(avg), P(avg) -> P(avg)",
        "P(max), R -> P(max)",
        "R, P(max) -> P(max)",
        "P(min), R -> P(min)",
        "R, P(min) -> P(min)",
        "LSE, R -> LSE",  # a term that all share moves every part, and every logarithm alike
        "R, LSE -> LSE",
    ),
)
add_rules("multiply", label_rules, multilinear_rules)
add_rules("negate", label_rules, multilinear_rules, written("P(max) -> P(min)", "P(min) -> P(max)"))
add_rules("relu", label_rules, written("P(max) -> P(max)", "P(min) -> P(min)", "NP(2) -> NP(2)"))
for _kind in ("softmax", "top_k", "activation", "attention"):
    add_rules(_kind, label_rules)
add_rules("attention", attention_over_context)
add_rules("cached_attention", label_rules, cache_over_context)
add_rules("norm", label_rules, norm_over_columns)
add_rules("router", label_rules, router_over_experts)
# A token is copied or left out, so parts of any kind that reduce zeros to zero pass.
add_rules(
    "dispatch",
    label_rules,
    written(*(f"{part}, R -> {part}" for part in ("P(sum)", "P(avg)", "P(max)", "P(min)", "NP(2)"))),
)
# A look-up copies rows, so parts that are reduced row by row pass.
add_rules(
    "embedding",
    label_rules,
    written(*(f"R, {part} -> {part}" for part in ("P(sum)", "P(avg)", "P(max)", "P(min)", "NP(2)", "LSE"))),
    look_up_over_vocabulary,
)
add_rules("greedy", label_rules, greedy_over_vocabulary)
add_rules("combine", combine_is_an_einsum_and_an_add, combine_sums_late)
