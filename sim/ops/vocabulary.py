"""The fused ops before and behind the layers, as ops with choices: embedding, LM head, sampling.

Together they are a ring, as a layer is: the head reads the residual stream, the embedding leaves it. They run on the
GPUs that share a sequence's attention. A choice stands for a proven rule of the op's operation: for the embedding 0
vocabulary, 1 hidden, 2 none, 3 tokens; for the head 0 hidden, 1 vocabulary, 2 none, 3 tokens, 4 and 5 tokens and none
with a weight that is gathered at use; for sampling 0 tokens, 1 vocabulary, 2 none.
"""

from __future__ import annotations

from sim.layers.ops import FusedOp, Megatron, layer_from
from sim.ops.rank import Rank, Work, elementwise, gemm
from sim.prices.curves import Gemm
from sim.sharding.operations import OPERATIONS
from sim.strategy import VOCABULARY_OPS

_STATISTIC_BYTES = 4
"""A norm's sum of squares is kept in fp32."""
_OFFER_BYTES = 8
"""A token and its score."""


def embedding_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Reads the rows of the tokens and writes them; of tokens that other GPUs have the rows of, zeros."""
    model, rows = rank.workload.model, rank.sizes.tokens
    if label == "t":
        rows = rank.shard(rows, when=True)
    columns = rank.shard(model.hidden, when=label == "d")
    held = rank.shard(model.vocab, when=label == "v") * columns * rank.activation_each
    return Work((elementwise(rank, 0.0, 2 * (rows * columns * rank.activation_each)),), weight_bytes=held)


def head_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The final norm, on what the head reads, and the product, of tokens that are due a next one."""
    model, rows = rank.workload.model, rank.sizes.output_tokens
    if label == "t":
        rows = rank.shard(rows, when=True)
    inner, columns = rank.shard(model.hidden, when=label == "d"), rank.shard(model.vocab, when=label == "v")
    norm = elementwise(rank, 4.0 * rows * inner, 2 * rows * inner * rank.activation_each)
    dtype = rank.workload.precisions.activations
    product = gemm(rank, dtype, Gemm(max(rows, 1.0), inner, columns), rank.activation_each)
    statistic = rank.tp_collective("all_reduce", "statistic", rows * _STATISTIC_BYTES) if label == "d" else ()
    return Work((norm, product), statistic, inner * columns * rank.activation_each)


def sampling_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """The likeliest token: where the vocabulary is sharded, of those that each GPU offers with its score.

    Logits are looked through as they come out of the product or of what moved them. [assumed]
    """
    offers = _OFFER_BYTES * rank.sizes.output_tokens * rank.tp
    return Work((), rank.tp_collective("all_gather", "offers", offers) if label == "v" else ())


_OPS = (
    FusedOp(
        "lm_head", "einsum", "attention", ("d", "v"), ("residual_in",), "logits", "tv",
        OPERATIONS["lm_head"], head_work, Megatron(1, 1), weighted=True
    ),
    FusedOp(
        "sampling", "greedy", "attention", ("t", "v"), ("logits",), "token", "t",
        OPERATIONS["greedy"], sampling_work, Megatron(1, 1)
    ),
    FusedOp(
        "embedding", "embedding", "attention", ("v", "d"), ("token",), "residual_in", "td",
        OPERATIONS["embedding"], embedding_work, Megatron(0, 0), weighted=True
    ),
)  # fmt: skip
VOCABULARY_LAYERS = layer_from(_OPS)
"""The ring of the three."""


def vocabulary_ops() -> tuple[FusedOp, ...]:
    """The three in the order of `Strategy.vocabulary`."""
    return tuple(VOCABULARY_LAYERS.op(name) for name in VOCABULARY_OPS)
