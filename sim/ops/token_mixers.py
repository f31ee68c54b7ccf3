"""How a layer mixes tokens on one GPU: kernels of the projections into attention and of attention, and the cache.

Where the cache lies: KV heads are shared out over tp, and copied where there are fewer; a latent and an indexer's key
are every GPU's of the tp group; all of them are cut over cp. A state of constant size goes with its heads, and cp
leaves it whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sim.layers.mixers import GroupedAttention, Indexer, LatentAttention, LinearMixer
from sim.layers.ops import FusedOp
from sim.layers.sizes import GroupLoad
from sim.ops.context import merge_partials
from sim.ops.rank import Rank, Work, elementwise, gemm
from sim.prices.calibration import WIDEST_GROUP
from sim.prices.curves import DecodeAttention, Gemm, LatentDecode, PrefillAttention
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.roofline import Kernel

_SCALE_BYTES = 4
"""The indexer caches its fp8 key with one fp32 scale. [published] DeepSeek-V3.2-Exp, inference/model.py."""
_STATE_BYTES = 4
"""An element of a linear mixer's state is kept in fp32. [published] `mamba_ssm_dtype` of Qwen3-Next's config.json."""
_CHUNK = 64
"""Tokens of a prompt that a linear mixer computes at once. [published] flash-linear-attention's kernels."""
_UNMEASURED_STATE, _UNMEASURED_INDEXER, _UNMEASURED_QUERIES = (
    "linear mixers without measured kernels",
    "sparse attention without measured kernels",
    "several tokens of a sequence in decode attention",
)
Kernels = tuple[tuple[Kernel, ...], float]
"""Kernels, and bytes of KV cache or state of one layer and one microbatch."""


# --- projections --------------------------------------------------------------------------------------


def latent_projections(rank: Rank, latent: LatentAttention, label: str) -> Work:
    """Down to the latents on every GPU, up to its heads; decoding reads the up-projection of keys and values too.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C. The absorbed products run in the activations'
    format. [assumed]
    """
    model, precisions, load = rank.workload.model, rank.workload.precisions, rank.sizes.load
    dtype, tokens = precisions.weights, rank.sizes.tokens
    heads = rank.shard(latent.heads, when=label == "q")
    query_width = heads * latent.query_width
    if latent.query_rank:
        shapes = [Gemm(tokens, model.hidden, latent.query_rank + latent.cached_width)]
        shapes.append(Gemm(tokens, latent.query_rank, query_width))
    else:
        shapes = [Gemm(tokens, model.hidden, query_width + latent.cached_width)]
    expanded = heads * (latent.head_dim + latent.value_dim)
    kernels = [gemm(rank, dtype, shape, rank.activation_each) for shape in shapes]
    decoded = load.decoded_tokens
    if decoded:  # one small GEMM per head: together the work and the weights of one GEMM of all heads
        for absorbed in (
            Gemm(decoded, heads * latent.head_dim, latent.kv_rank),
            Gemm(decoded, latent.kv_rank, heads * latent.value_dim),
        ):
            kernels.append(gemm(rank, precisions.activations, absorbed, rank.activation_each))
    if load.prompts:
        prompt_tokens = load.prompts * load.prompt_tokens
        kernels.append(gemm(rank, dtype, Gemm(prompt_tokens, latent.kv_rank, expanded), rank.activation_each))
    weights = sum(shape.inner * shape.columns for shape in shapes) + latent.kv_rank * expanded
    return Work(tuple(kernels), weight_bytes=weights * DTYPE_BYTES[dtype])


def beside_projection(rank: Rank) -> Work:
    """What stands beside the fused projection: an indexer, whole on every GPU; the second half of a low-rank gate."""
    attention, dtype = rank.attention, rank.workload.precisions.weights
    hidden, tokens = rank.workload.model.hidden, rank.sizes.tokens
    if isinstance(attention, LinearMixer):
        if attention.kind != "kimi_delta":
            return Work(())
        width = rank.local_heads()[0] * attention.value_dim
        shapes = [Gemm(tokens, attention.value_dim, 2 * width)]  # of the decay and of the output's gate
    elif attention.indexer is not None:
        queries = attention.indexer.heads * attention.indexer.head_dim
        inner = getattr(attention, "query_rank", 0) or hidden
        shapes = [Gemm(tokens, inner, queries)]
        shapes.append(Gemm(tokens, hidden, attention.indexer.head_dim + attention.indexer.heads))
    else:
        return Work(())
    kernels = tuple(gemm(rank, dtype, shape, rank.activation_each) for shape in shapes)
    return Work(kernels, weight_bytes=sum(shape.inner * shape.columns for shape in shapes) * DTYPE_BYTES[dtype])


# --- attention ----------------------------------------------------------------------------------------


def attention_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Rotary embedding and cache write, decoding sequences, prompts; then the merge where the context is sharded."""
    attention, load = rank.attention, rank.sizes.load
    sequences, prompts = load.sequences, load.prompts
    if label == "t":
        sequences = math.ceil(sequences / rank.head_tp)
        prompts = math.ceil(prompts / rank.head_tp) if prompts > 1 else prompts
    heads, kv_heads = rank.local_heads() if label == "h" else (attention.heads, attention.kv_heads)
    price: Callable[..., Kernels] = _MIXERS[type(attention)]
    kernels, kv_bytes = price(rank, attention, sequences, prompts, heads, kv_heads)
    if rank.cp == 1 or isinstance(attention, LinearMixer):
        return Work(kernels, kv_bytes=kv_bytes)
    width = attention.kv_rank if isinstance(attention, LatentAttention) else attention.value_dim
    merge = merge_partials(rank, sequences * load.queries * heads, width, whole=not label)
    return Work((*kernels, merge.kernel), merge.collectives, kv_bytes=kv_bytes, buffer_bytes=merge.buffer_bytes)


def _grouped(
    rank: Rank, attention: GroupedAttention, sequences: int, prompts: float, heads: int, kv_heads: int
) -> Kernels:
    """Attention whose query heads share KV heads, with or without a window."""
    workload, load = rank.workload, rank.sizes.load
    kv_dtype, dtype = workload.precisions.kv_cache, workload.precisions.activations
    token_width, head_dim = attention.token_width, (attention.head_dim + attention.value_dim) // 2
    row_bytes = 1.0 * kv_heads * token_width * DTYPE_BYTES[kv_dtype]  # one token's keys and values
    decoded = sequences * load.queries
    tokens = decoded + prompts * load.prompt_tokens
    written = tokens * (heads * attention.head_dim + kv_heads * token_width) * 2 * rank.activation_each
    kernels = [elementwise(rank, 0.0, written)]
    context = math.ceil(_seen(attention, load.context_tokens) / rank.cp)
    new = heads * token_width + kv_heads * token_width  # q, k and v in, the output out
    if sequences:
        if attention.indexer:
            kernels.append(_index(rank, attention.indexer, sequences, context))
            context = min(context, attention.indexer.topk)
        multi_head = attention.heads == attention.kv_heads
        # A sequence's tokens read its cache together, unless each picks its own.
        readers, rows = (decoded, heads) if attention.indexer else (sequences, _rows(load, heads, kv_heads, multi_head))
        shape = DecodeAttention(readers, context, rows, kv_heads, head_dim, multi_head)
        flops = 2.0 * decoded * heads * token_width * context  # scores and values
        traffic = readers * context * row_bytes + decoded * new * rank.activation_each
        kernels.append(Kernel("attention", dtype, kv_dtype, flops, traffic, shape, unlike=_several(load)))
    if prompts:
        if attention.indexer:
            kernels.append(_index_prompts(rank, attention.indexer, prompts))
        reach = attention.indexer.topk if attention.indexer else attention.window
        shape = _causal(prompts, load.prompt_tokens, reach, heads, kv_heads, head_dim, chunked=attention.chunked)
        kernels.append(_prefill_kernel(rank, shape, kv_dtype))
    cached = math.ceil(_held(attention, rank.load.cached_tokens) / rank.cp)
    held = sequences * cached if sequences else prompts * _held(attention, load.prompt_tokens)
    return tuple(kernels), held * (row_bytes + _index_bytes(attention.indexer))


def _rows(load: GroupLoad, heads: int, kv_heads: int, multi_head: bool) -> int:
    """Query heads of the measured kernel that attends with a sequence's tokens at once.

    Tokens share the reading of a KV head as query heads do, and kernels put both into the rows of one product, whose
    time hardly grows up to the widest group measured. Its arithmetic is counted in any case. [assumed]
    """
    return heads if multi_head else max(heads, min(heads * load.queries, WIDEST_GROUP * kv_heads))


def _several(load: GroupLoad) -> str:
    """What was not measured where a sequence has several tokens."""
    return _UNMEASURED_QUERIES if load.queries > 1 else ""


def _seen(attention: GroupedAttention, context: float) -> float:
    """Tokens that a decoding token reads; one beyond its first chunk is at any place of its chunk ([assumed])."""
    if not attention.window or context <= attention.window + attention.sinks:
        return context
    if attention.chunked:
        return attention.window * (1 + attention.window / context) / 2 + attention.sinks
    return attention.window + attention.sinks


def _held(attention: GroupedAttention, cached: float) -> float:
    """Tokens of KV cache that stay: those of the window, or of a full chunk."""
    return min(cached, attention.window + attention.sinks) if attention.window else cached


def _causal(
    prompts: float, tokens: int, window: int, heads: int, kv_heads: int, head_dim: int, *, chunked: bool = False
) -> PrefillAttention:
    """Causal attention; a window of w makes n tokens see n*w - w*w/2 pairs instead of n*n/2, as independent chunks.

    Chunks of c tokens have n*c/2 pairs, so c = 2w - w*w/n: n where the window is as long, 2w where it is short.
    """
    if not window or window >= tokens:
        return PrefillAttention(prompts, tokens, heads, kv_heads, head_dim)
    chunk = window if chunked else 2 * window - window**2 / tokens
    return PrefillAttention(prompts * tokens / chunk, chunk, heads, kv_heads, head_dim)


def _prefill_kernel(rank: Rank, shape: PrefillAttention, kv_dtype: Dtype) -> Kernel:
    dtype = rank.workload.precisions.activations
    flops = 2.0 * shape.sequences * shape.heads * shape.head_dim * shape.tokens**2
    streamed = shape.sequences * shape.tokens * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return Kernel("attention", dtype, kv_dtype, flops, streamed * rank.activation_each, shape)


def _latent(rank: Rank, latent: LatentAttention, sequences: int, prompts: float, heads: int, kv_heads: int) -> Kernels:
    """One latent per token for all heads: absorbed where it decodes, expanded over prompts.

    A prompt longer than an indexer picks reads its latents token by token, as decoding does: absorbed products have
    more FLOP per pair of tokens, so that its time steps up there. Source: SGLang's
    `SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD`, by default what the indexer picks.
    """
    workload, load, indexer = rank.workload, rank.sizes.load, latent.indexer
    kv_dtype = workload.precisions.kv_cache
    row_bytes = latent.cached_width * DTYPE_BYTES[kv_dtype]
    decoded = sequences * load.queries
    tokens = decoded + prompts * load.prompt_tokens
    written = tokens * (heads * latent.query_width + latent.cached_width) * 2 * rank.activation_each
    kernels = [elementwise(rank, 0.0, written)]
    if sequences:
        context = math.ceil(load.context_tokens / rank.cp)
        if indexer:
            kernels.append(_index(rank, indexer, sequences, context))
            context = min(context, indexer.topk)
        # A sequence's tokens read its latents together, unless each picks its own.
        readers, rows = (decoded, heads) if indexer else (sequences, heads * load.queries)
        absorbed = _absorbed(rank, latent, readers, context, rows, LatentDecode(readers, context, rows))
        kernels.append(absorbed._replace(unlike=_several(load)))
    if prompts and indexer and load.prompt_tokens > indexer.topk:
        chosen = indexer.topk - indexer.topk**2 / (2 * load.prompt_tokens)  # on average: the first see fewer
        kernels.append(_index_prompts(rank, indexer, prompts))
        kernels.append(_absorbed(rank, latent, tokens - decoded, chosen, heads, _UNMEASURED_INDEXER))
    elif prompts:
        mean_dim = (latent.query_width + latent.value_dim) // 2  # of scores and of values
        kernels.append(
            _prefill_kernel(rank, PrefillAttention(prompts, load.prompt_tokens, heads, heads, mean_dim), kv_dtype)
        )
    held = sequences * math.ceil(rank.load.cached_tokens / rank.cp) if sequences else prompts * load.prompt_tokens
    return tuple(kernels), held * (row_bytes + _index_bytes(indexer))


def _absorbed(
    rank: Rank, latent: LatentAttention, queries: float, context: float, heads: int, shape: LatentDecode | str
) -> Kernel:
    """Queries in the latent's width, over `context` latents each."""
    kv_dtype, dtype = rank.workload.precisions.kv_cache, rank.workload.precisions.activations
    row_bytes = latent.cached_width * DTYPE_BYTES[kv_dtype]
    flops = 2.0 * queries * heads * context * (latent.cached_width + latent.kv_rank)
    traffic = queries * context * row_bytes + queries * heads * latent.kv_rank * 2 * rank.activation_each
    return Kernel("attention", dtype, kv_dtype, flops, traffic, shape)


# --- sparse attention's indexer -----------------------------------------------------------------------


def _index_bytes(indexer: Indexer | None) -> float:
    """Bytes that it caches per token and layer, on every GPU of a tp group."""
    return indexer.head_dim * DTYPE_BYTES["fp8"] + _SCALE_BYTES if indexer else 0.0


def _index(rank: Rank, indexer: Indexer, sequences: int, context: int) -> Kernel:
    """Scores every cached token for each decoding token, all heads on every GPU, and picks the best."""
    flops = 2.0 * sequences * rank.sizes.load.queries * context * indexer.heads * indexer.head_dim
    return Kernel("attention", "fp8", "fp8", flops, sequences * context * _index_bytes(indexer), _UNMEASURED_INDEXER)


def _index_prompts(rank: Rank, indexer: Indexer, prompts: float) -> Kernel:
    """The same for every token of prompts over those before it; scores are written and read once, in fp32."""
    pairs = prompts * rank.sizes.load.prompt_tokens**2 / 2
    flops = 2.0 * pairs * indexer.heads * indexer.head_dim
    return Kernel("attention", "fp8", "fp8", flops, pairs * 2 * 4, _UNMEASURED_INDEXER)


# --- states of constant size --------------------------------------------------------------------------


def _linear(rank: Rank, mixer: LinearMixer, sequences: int, prompts: float, heads: int, kv_heads: int) -> Kernels:
    """Convolution and state: decoding reads and writes the state, prompts go through it chunk by chunk.

    Per token and head, a state of k by v takes its decay, the value it holds for the key, the update and the output:
    8 k v FLOP. A chunk of c tokens has products of [c, k] and [c, v] instead: 4 k v + 2 c (2 k + v) per token. Where
    tokens are drafted, each leaves a state. [assumed] as SGLang keeps them.
    Source: Gated Delta Networks (arXiv 2412.06464), sections 2 and 3.
    """
    load, each = rank.sizes.load, rank.activation_each
    dtype = rank.workload.precisions.activations
    width = mixer.local_conv_width(heads, kv_heads)
    prompt_tokens = prompts * load.prompt_tokens
    decoded, kept = sequences * load.queries, load.queries  # a state per token, to go back to if it is not accepted
    tokens = decoded + prompt_tokens
    state = heads * mixer.key_dim * mixer.value_dim
    state_bytes = state * _STATE_BYTES
    convolution_bytes = (mixer.conv_kernel - 1) * width * each
    kernels = [
        elementwise(
            rank,
            2.0 * tokens * width * mixer.conv_kernel,
            2 * tokens * width * each + (sequences * (1 + kept) + 2 * prompts) * convolution_bytes,
            _UNMEASURED_STATE,
        )
    ]
    streamed = (width + 2 * heads * mixer.value_dim) * each  # queries, keys, values and gate in, the output out
    if sequences:
        traffic = sequences * (1 + kept) * state_bytes + decoded * streamed
        kernels.append(elementwise(rank, 8.0 * decoded * state, traffic, _UNMEASURED_STATE))
    if prompts:
        inside = 2 * _CHUNK * (2 * mixer.key_dim + mixer.value_dim) * heads
        traffic = prompt_tokens * (streamed + 2 * state_bytes / _CHUNK)
        flops = prompt_tokens * (4.0 * state + inside)
        kernels.append(Kernel("attention", dtype, dtype, flops, traffic, _UNMEASURED_STATE))
    return tuple(kernels), (sequences * kept if sequences else prompts) * (state_bytes + convolution_bytes)


_MIXERS: dict[type, Any] = {GroupedAttention: _grouped, LatentAttention: _latent, LinearMixer: _linear}
