"""Both ends of the model: the embedding, and the LM head with greedy sampling.

The vocabulary is cut over the GPUs that share a sequence's attention, whatever mesh the experts lie on: vLLM,
TensorRT-LLM and Megatron-LM cut it over attention's tensor parallelism, SGLang with `--enable-dp-lm-head` beside data
parallel attention. So each attention group looks its own tokens up and chooses its own next ones. Around them the
residual stream lies as the layers hand it on: as a layer's last op leaves it.
"""

from __future__ import annotations

from sim.layers.choices import LOOK_UP
from sim.ops.kernels import elementwise, gemm
from sim.ops.rank import Rank
from sim.prices.curves import Gemm
from sim.prices.roofline import Kernel
from sim.sharding.placement import REPLICATE
from sim.sharding.redistribute import collective_between
from sim.step.costs import price, seconds, stream_bytes, stream_placement
from sim.step.two_meshes import Sides, crossing


def ends_s(sides: Sides, last_choice: int) -> tuple[float, float]:
    """Seconds of the embedding and of the LM head, around layers whose last op leaves the residual stream so."""
    if sides.leaves_elsewhere:
        return embedding_s(sides, last_choice), head_s(sides, last_choice)
    known = sides.attention.memo_of_tokens.ends
    found = known.get(last_choice)
    if found is None:
        found = known[last_choice] = (embedding_s(sides, last_choice), head_s(sides, last_choice))
    return found


def embedding_s(sides: Sides, last_choice: int) -> float:
    """Seconds of the vocabulary-parallel look-up, whose parts are reduced to the layers' placement."""
    rank = sides.attention
    return price(rank, elementwise(rank, 0.0, 2 * stream_bytes(rank))).total_s + _reduced_s(sides, last_choice)


def _reduced_s(sides: Sides, last_choice: int) -> float:
    """Attention groups smaller than the experts' keep their tokens apart: the first layer would only undo more."""
    rank, leaves = sides.attention, sides.leaves
    placement = stream_placement(leaves, last_choice)
    if sides.leaves_elsewhere and leaves.tp < rank.tp:
        return seconds(crossing(rank, leaves, rank.layer.stream, LOOK_UP.output, placement))
    kind = collective_between(LOOK_UP.output, placement)
    return rank.tp_s(kind, stream_bytes(rank)) if kind else 0.0


def head_s(sides: Sides, last_choice: int) -> float:
    """Seconds of the final norm, the LM head with its columns over tp, and greedy sampling, for tokens due next."""
    rank = sides.attention
    tokens = rank.sizes.output_tokens
    # Each rank offers its best token and score: 8 bytes per sequence and rank.
    sample_s = rank.tp_s("all_gather", 8.0 * tokens * rank.tp)
    norm, head = [price(rank, kernel).total_s for kernel in head_kernels(rank)]
    return norm + head + (_gathered_s(sides, last_choice) + sample_s)


def _gathered_s(sides: Sides, last_choice: int) -> float:
    rank, leaves = sides.attention, sides.leaves
    placement = stream_placement(leaves, last_choice)
    if sides.leaves_elsewhere:
        return seconds(crossing(leaves, rank, rank.layer.stream, placement, REPLICATE, due=True))
    due_bytes = rank.sizes.output_tokens * rank.workload.model.hidden * rank.activation_each
    return 0.0 if placement == REPLICATE else rank.tp_s("all_gather", due_bytes)


def head_kernels(rank: Rank) -> tuple[Kernel, Kernel]:
    """The final norm and the LM head of a GPU of an attention group."""
    model, tokens = rank.workload.model, rank.sizes.output_tokens
    norm = elementwise(rank, 4.0 * tokens * model.hidden, 2 * tokens * model.hidden * rank.activation_each)
    shape = Gemm(max(tokens, 1.0), model.hidden, rank.shard(model.vocab, when=True))
    return norm, gemm(rank, rank.workload.precisions.activations, shape, rank.activation_each)


def vocabulary_bytes(rank: Rank) -> float:
    """Bytes of the embedding, or of the LM head, on one GPU of an attention group; both are cut over all of it."""
    model = rank.workload.model
    return rank.shard(model.vocab, when=True) * model.hidden * rank.activation_each


def head_activation_bytes(rank: Rank) -> float:
    """The hidden state and the fp32 logits at the LM head, on one GPU of an attention group."""
    return stream_bytes(rank) + rank.sizes.output_tokens * rank.shard(rank.workload.model.vocab, when=True) * 4.0
