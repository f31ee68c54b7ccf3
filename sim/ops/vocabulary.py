"""The fused ops before and behind the layers, as ops with choices: embedding, LM head, sampling.

Together they are a ring, as a layer is: the head reads the residual stream, the embedding leaves it. They run on the
GPUs that share a sequence's attention. A choice stands for a proven rule of the op's operation: for the embedding 0
vocabulary, 1 hidden, 2 none, 3 tokens; for the head 0 hidden, 1 vocabulary, 2 none, 3 tokens, 4 and 5 tokens and none
with a weight that is gathered at use; for sampling 0 tokens, 1 vocabulary, 2 none.
"""

from __future__ import annotations

from sim.layers.ops import FusedOp, Megatron, layer_from
from sim.ops.work import embedding_work, head_work, sampling_work
from sim.sharding.operations import OPERATIONS
from sim.strategy import VOCABULARY_OPS

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
