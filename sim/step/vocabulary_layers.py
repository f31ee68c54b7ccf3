"""Embedding, LM head and greedy sampling, priced, each under a choice of its own.

They lie on the GPUs that share a sequence's attention, whatever mesh the experts lie on, so each attention group looks
its own tokens up and chooses its own next ones. Engines cut all three over the vocabulary (`ENGINES_VOCABULARY`): vLLM,
TensorRT-LLM and Megatron-LM over attention's tensor parallelism, SGLang with `--enable-dp-lm-head` beside data parallel
attention. Other choices are other rules of `sim.ops.vocabulary`; `Workload.vocabulary` has them. Around these
layers the residual stream lies as a layer's last op leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sim.arrays import add_up, larger
from sim.layers.choices import OpRule, rule
from sim.layers.ops import FusedOp, Layer
from sim.ops.rank import Rank, Work
from sim.ops.vocabulary import VOCABULARY_LAYERS, vocabulary_ops
from sim.ops.work import op_work
from sim.prices.collectives import Collective
from sim.sharding.redistribute import collective_between
from sim.step.attention_expert_meshes import Sides, crossing
from sim.step.attention_expert_meshes import sides as both_sides
from sim.step.costs import price, seconds, stream_bytes, stream_placement
from sim.strategy import VOCABULARY_OPS
from sim.workload import with_vocabulary

_TOKEN_BYTES = 4
_LOGIT_BYTES = 4
"""Logits are kept in fp32."""


class VocabularyPlan(NamedTuple):
    """The three ops under their choices.

    Attributes:
        ops: By name.
        rules: Of each, over the GPUs that share a sequence's attention.
        choices: Of each.
        logits_by, tokens_by: The collective that brings logits to sampling and tokens to the embedding, if any.
        logits: Whether tokens and whether the vocabulary of the logits are sharded, as they are left and as they are
            read.
    """

    ops: Mapping[str, FusedOp]
    rules: Mapping[str, OpRule]
    choices: Mapping[str, int]
    logits_by: str | None
    tokens_by: str | None
    logits: tuple[tuple[bool, bool], ...]


@lru_cache(maxsize=1024)
def vocabulary_plan(choices: tuple[int, ...]) -> VocabularyPlan:
    """The plan of some choices, in the order of `VOCABULARY_OPS`."""
    by_op = dict(zip(VOCABULARY_OPS, choices, strict=True))
    ops = dict(zip(VOCABULARY_OPS, vocabulary_ops(), strict=True))
    rules = {name: rule(op, VOCABULARY_LAYERS, by_op[name]) for name, op in ops.items()}
    left, read, chosen = rules["lm_head"].output, rules["sampling"].inputs[0], rules["sampling"].output
    return VocabularyPlan(
        ops,
        rules,
        by_op,
        collective_between(left, read),
        collective_between(chosen, rules["embedding"].inputs[0]),
        tuple((each.dims == (0,), each.dims == (1,)) for each in (left, read)),
    )


@lru_cache(maxsize=1024)
def _stream_by(choices: tuple[int, ...], layer: Layer, last_choice: int) -> tuple[str | None, str | None]:
    """The collectives of the residual stream, from the embedding to the layers and from them to the head, if any."""
    rules, placement = vocabulary_plan(choices).rules, stream_placement(layer, last_choice)
    return (
        collective_between(rules["embedding"].output, placement),
        collective_between(placement, rules["lm_head"].inputs[0]),
    )


class HeadSeconds(NamedTuple):
    """Addends of what follows the layers, however these leave the stream; or arrays of them.

    Attributes:
        kernels_s, collectives_s: Of the LM head.
        logits_s: Of logits on their way to sampling.
        sampling_s: Of sampling's collectives.
        tokens_s: Of tokens on their way to the embedding.
    """

    kernels_s: Any
    collectives_s: Any
    logits_s: Any
    sampling_s: Any
    tokens_s: Any

    def total_s(self, entering_s: Any) -> Any:
        """With the stream on its way to the head."""
        inside_s, outside_s = self.collectives_s + self.logits_s, self.sampling_s + self.tokens_s
        return self.kernels_s + (entering_s + inside_s + outside_s)


class VocabularyAddend(NamedTuple):
    """One of these.

    Attributes:
        ops: Whose choices decide it, by their places in `VOCABULARY_OPS`.
        price: Its seconds on a GPU of an attention group.
    """

    ops: tuple[int, ...]
    price: Callable[[Rank], float]


class VocabularyCost(NamedTuple):
    """What embedding, LM head and sampling cost on a GPU of an attention group, however layers leave the stream.

    Attributes:
        embedding_s: Seconds of the look-up.
        head: Of what follows the layers.
        bytes: Held by embedding and head, and what of them is one weight: see `vocabulary_bytes`.
        activation_bytes: See `head_activation_bytes`.
    """

    embedding_s: float
    head: HeadSeconds
    bytes: tuple[float, float, float]
    activation_bytes: float


def vocabulary_cost(rank: Rank) -> VocabularyCost:
    """Of a GPU; worked out once for all of as many tokens."""
    memo = rank.memo_of_tokens
    if memo.vocabulary is None:
        memo.vocabulary = VocabularyCost(
            kernels_s(rank, "embedding"),
            HeadSeconds(*[addend.price(rank) for addend in HEAD_ADDENDS]),
            vocabulary_bytes(rank),
            head_activation_bytes(rank),
        )
    return memo.vocabulary


def embedding_s(sides: Sides, last_choice: int) -> float:
    """Seconds of the look-up, and of bringing its result into the layers' placement."""
    return vocabulary_cost(sides.attention).embedding_s + seconds(leaving(sides, last_choice))


def head_s(sides: Sides, last_choice: int) -> float:
    """Seconds of the final norm, the LM head and greedy sampling, for tokens due next."""
    return vocabulary_cost(sides.attention).head.total_s(entering_s(sides, last_choice))


def kernels_s(rank: Rank, name: str) -> float:
    """Seconds of the kernels of one of the three."""
    return (add_up if rank.in_lanes else sum)(
        [price(rank, kernel).total_s for kernel in vocabulary_work(rank, name).kernels]
    )


def vocabulary_work(rank: Rank, name: str) -> Work:
    """What one of the three does on a GPU of an attention group."""
    known = rank.memo_of_tokens.vocabulary_work
    if name not in known:
        plan = vocabulary_plan(rank.workload.vocabulary)
        known[name] = op_work(rank, plan.ops[name], plan.choices[name])
    return known[name]


def sides_with_vocabulary(sides: Sides, choices: tuple[int, ...]) -> Sides:
    """The same GPU where embedding and LM head lie otherwise."""
    attention = sides.attention.with_workload(with_vocabulary(sides.attention.workload, choices))
    return both_sides(attention, attention if sides.attention is sides.experts else sides.experts)


# --- moves --------------------------------------------------------------------------------------------


def leaving(sides: Sides, last_choice: int) -> tuple[Collective, ...]:
    """The embedding's result on its way into the layers' placement.

    Attention groups smaller than the experts' keep their tokens apart: the first layer would only undo more.
    """
    rank, leaves = sides.attention, sides.leaves
    vocabulary, stream = rank.workload.vocabulary, rank.layer.stream
    if sides.leaves_elsewhere and leaves.tp < rank.tp:
        source = vocabulary_plan(vocabulary).rules["embedding"].output
        return crossing(rank, leaves, stream, source, stream_placement(leaves.layer, last_choice))
    kind, _ = _stream_by(vocabulary, leaves.layer, last_choice)
    return rank.tp_collective(kind, stream.name, stream_bytes(rank), rank.activation_each) if kind else ()


def entering(sides: Sides, last_choice: int) -> tuple[Collective, ...]:
    """The residual stream, of tokens due next, on its way to the head."""
    rank, leaves = sides.attention, sides.leaves
    vocabulary, stream = rank.workload.vocabulary, rank.layer.stream
    if sides.leaves_elsewhere:
        (target,) = vocabulary_plan(vocabulary).rules["lm_head"].inputs
        return crossing(leaves, rank, stream, stream_placement(leaves.layer, last_choice), target, due=True)
    _, kind = _stream_by(vocabulary, leaves.layer, last_choice)
    due_bytes = rank.sizes.output_tokens * rank.workload.model.hidden * rank.activation_each
    return rank.tp_collective(kind, stream.name, due_bytes, rank.activation_each) if kind else ()


def entering_s(sides: Sides, last_choice: int) -> float:
    """Seconds of that."""
    return seconds(entering(sides, last_choice))


def _collectives_s(rank: Rank, name: str) -> float:
    """Seconds of those of one of the three."""
    return seconds(vocabulary_work(rank, name).collectives)


def _logits_s(rank: Rank) -> float:
    """Seconds of logits on their way from the head to sampling."""
    kind = vocabulary_plan(rank.workload.vocabulary).logits_by
    logits_bytes = rank.sizes.output_tokens * rank.workload.model.vocab * _LOGIT_BYTES
    return seconds(rank.tp_collective(kind, "logits", logits_bytes) if kind else ())


def _tokens_s(rank: Rank) -> float:
    """Seconds of chosen tokens on their way to the embedding; those of prompts come from outside."""
    kind = vocabulary_plan(rank.workload.vocabulary).tokens_by
    return seconds(rank.tp_collective(kind, "token", rank.sizes.output_tokens * _TOKEN_BYTES) if kind else ())


HEAD_ADDENDS = (
    VocabularyAddend((1,), partial(kernels_s, name="lm_head")),
    VocabularyAddend((1,), partial(_collectives_s, name="lm_head")),
    VocabularyAddend((1, 2), _logits_s),
    VocabularyAddend((2,), partial(_collectives_s, name="sampling")),
    VocabularyAddend((0, 2), _tokens_s),
)
"""Those of `HeadSeconds`, in its order."""


# --- bytes --------------------------------------------------------------------------------------------


def vocabulary_bytes(rank: Rank) -> tuple[float, float, float]:
    """Bytes of the embedding and of the LM head on one GPU of an attention group, and what of them is one weight.

    Tied weights are one where they lie alike.
    """
    embedding, head = vocabulary_work(rank, "embedding").weight_bytes, vocabulary_work(rank, "lm_head").weight_bytes
    tied = rank.workload.model.tied_embeddings and _rest_alike(rank)
    return embedding, head, embedding if tied else 0.0


def _rest_alike(rank: Rank) -> bool:
    letters = set[str]()
    for name in ("embedding", "lm_head"):
        plan = vocabulary_plan(rank.workload.vocabulary)
        weight = plan.rules[name].weight
        assert weight is not None
        letters.add("".join(plan.ops[name].operation.operands[-1][dim] for dim in weight.dims))
    return rank.tp == 1 or len(letters) == 1


def head_activation_bytes(rank: Rank) -> float:
    """The hidden state and the fp32 logits at the LM head, on one GPU of an attention group."""
    rows, vocab = rank.sizes.output_tokens, rank.workload.model.vocab
    logits = 0.0
    for tokens_sharded, vocabulary_sharded in vocabulary_plan(rank.workload.vocabulary).logits:
        own_rows = rank.shard(rows, when=True) if tokens_sharded else rows
        logits = larger(logits, own_rows * rank.shard(vocab, when=vocabulary_sharded) * float(_LOGIT_BYTES))
    return stream_bytes(rank) + (logits + vocabulary_work(rank, "lm_head").buffer_bytes)
