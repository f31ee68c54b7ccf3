"""How a layer mixes tokens on one GPU: kernels of the projections into attention and of attention, and the cache.

Where the cache lies: KV heads are shared out over tp, and copied where there are fewer; a latent and an indexer's key
are every GPU's of the tp group; all of them are cut over cp. A state of constant size goes with its heads, and cp
leaves it whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.arrays import add_up
from sim.layers.mixers import (
    Attention,
    CompressedAttention,
    GroupedAttention,
    Indexer,
    LatentAttention,
    LinearKind,
    LinearMixer,
)
from sim.layers.ops import FusedOp
from sim.ops.context import merge_partials
from sim.ops.rank import Rank, Work, elementwise, gemm
from sim.ops.sizes import GroupLoad
from sim.prices.calibration import WIDEST_GROUP
from sim.prices.curves import DecodeAttention, Gemm, LatentDecode, PrefillAttention
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.mixer_shapes import (
    INDEX_WIDTH,
    KEY_WIDTH,
    LATENT_WIDTH,
    Convolution,
    SparseAttention,
    StateKind,
    StateScan,
    sparse_shape,
)
from sim.prices.roofline import Kernel
from sim.prices.terms import window_as_chunks

_SCALE_BYTES = 4
"""The indexer caches its fp8 key with one fp32 scale. [published] DeepSeek-V3.2-Exp, inference/model.py."""
_STATE_BYTES = 4
"""An element of a linear mixer's state is kept in fp32. [published] `mamba_ssm_dtype` of Qwen3-Next's config.json."""
_CHUNK = 64
"""Tokens of a prompt that a linear mixer computes at once. [published] flash-linear-attention's kernels."""
_TILE_HEADS, _ROW_SCALE_BYTES = 64, 8
_UNMEASURED_STATE, _UNMEASURED_INDEXER, _UNMEASURED_COMPRESSED, _UNMEASURED_QUERIES = (
    "linear mixers without measured kernels",
    "sparse attention without measured kernels",
    "compressed attention without measured kernels",
    "several tokens of a sequence in decode attention",
)
_STATE_KINDS: Mapping[LinearKind, StateKind] = {"gated_delta": "gdn", "kimi_delta": "kda", "mamba2": "mamba2"}
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
    if latent.output_gate:
        shapes.append(Gemm(tokens, model.hidden, latent.gate_width(heads)))
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


def compressed_projections(rank: Rank, mixer: CompressedAttention, label: str) -> Work:
    """Down to the queries' latent and the one key on every GPU, up to its heads; indexer; compressors in bf16.

    Source: vLLM 0.33's models of DeepSeek V4 (attention.py), read 2026-11-23.
    """
    hidden, dtype, tokens = rank.workload.model.hidden, rank.workload.precisions.weights, rank.sizes.tokens
    heads = rank.shard(mixer.heads, when=label == "q")
    shapes = [Gemm(tokens, hidden, mixer.query_rank + mixer.head_dim)]
    shapes.append(Gemm(tokens, mixer.query_rank, heads * mixer.head_dim))
    pooled = [Gemm(tokens, hidden, width) for width in _pooled_widths(mixer)]
    if mixer.indexer:
        shapes.append(Gemm(tokens, mixer.query_rank, mixer.indexer.heads * mixer.indexer.head_dim))
        shapes.append(Gemm(tokens, hidden, mixer.indexer.heads))
    work, compressors = _products(rank, dtype, shapes), _products(rank, "bf16", pooled)
    return Work((*work.kernels, *compressors.kernels), weight_bytes=work.weight_bytes + compressors.weight_bytes)


def compressed_output(rank: Rank, mixer: CompressedAttention, label: str) -> Work:
    """Groups of heads to a latent each, as one product, and these to the hidden state."""
    groups, columns = rank.shard(mixer.output_groups, when=label == "a"), rank.sizes.columns["d"]
    inner = rank.shard(mixer.heads, when=label == "a") * mixer.head_dim
    tokens = rank.shard(rank.sizes.tokens, when=label == "t")
    back = Gemm(tokens, groups * mixer.output_rank, rank.shard(columns, when=label == "d"))
    return _products(rank, rank.workload.precisions.weights, [Gemm(tokens, inner, mixer.output_rank), back])


def _pooled_widths(mixer: CompressedAttention) -> list[int]:
    """Columns of the compressors: of keys, and of the indexer's."""
    if not mixer.ratio:
        return []
    return [
        mixer.compressor_width(key) for key in (mixer.head_dim, *([mixer.indexer.head_dim] if mixer.indexer else []))
    ]


def _products(rank: Rank, dtype: Dtype, shapes: list[Gemm]) -> Work:
    kernels = tuple(gemm(rank, dtype, shape, rank.activation_each) for shape in shapes)
    return Work(kernels, weight_bytes=sum(shape.inner * shape.columns for shape in shapes) * DTYPE_BYTES[dtype])


def indexer_projections(rank: Rank, attention: GroupedAttention | LatentAttention) -> Work:
    """An indexer's queries, keys and weights, whole on every GPU."""
    hidden, tokens, indexer = rank.workload.model.hidden, rank.sizes.tokens, attention.indexer
    if indexer is None or not indexer.scores:
        return Work(())
    inner = attention.query_rank or hidden if isinstance(attention, LatentAttention) else hidden
    shapes = [Gemm(tokens, inner, indexer.heads * indexer.head_dim), Gemm(tokens, hidden, indexer.from_hidden)]
    return _products(rank, rank.workload.precisions.weights, shapes)


def low_rank_gates(rank: Rank, mixer: LinearMixer) -> Work:
    """The second half of gates that pass a low rank: of the decay, and of the output's unless it is full."""
    if not mixer.low_rank_gates:
        return Work(())
    width = rank.local_heads()[0] * mixer.value_dim
    shapes = [Gemm(rank.sizes.tokens, mixer.value_dim, mixer.low_rank_gates * width)]
    return _products(rank, rank.workload.precisions.weights, shapes)


# --- attention ----------------------------------------------------------------------------------------


def attention_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Rotary embedding and cache write, decoding sequences, prompts; then the merge where the context is sharded."""
    attention, load = rank.attention, rank.sizes.load
    sequences, prompts = load.sequences, load.prompts
    if label == "t":
        sequences = math.ceil(sequences / rank.head_tp)
        prompts = math.ceil(prompts / rank.head_tp) if prompts > 1 else prompts
    heads, kv_heads = rank.local_heads() if label == "h" else (attention.heads, attention.kv_heads)
    kernels, kv_bytes = token_mixer(attention).kernels(rank, attention, sequences, prompts, heads, kv_heads)
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
        scored, context = context, min(context, attention.indexer.topk) if attention.indexer else context
        multi_head = attention.heads == attention.kv_heads
        # A sequence's tokens read its cache together, unless each picks its own.
        readers, rows = (decoded, heads) if attention.indexer else (sequences, _rows(load, heads, kv_heads, multi_head))
        windowed = bool(attention.window) and not attention.chunked
        shape = DecodeAttention(readers, context, rows, kv_heads, head_dim, multi_head, windowed)
        flops = 2.0 * decoded * heads * token_width * context  # scores and values
        traffic = readers * context * row_bytes + decoded * new * rank.activation_each
        attends = Kernel("attention", dtype, kv_dtype, flops, traffic, shape, unlike=_several(load))
        if attention.indexer:
            index = _index(rank, attention.indexer, sequences, scored)
            chosen = _sparse_blocks(rank, attention, (decoded, 1, scored - 1, heads), prompts=False)
            kernels += _as_measured(rank, chosen, [*index, attends])
        else:
            kernels.append(attends)
    if prompts:
        reach = attention.indexer.topk if attention.indexer else attention.window
        shape = _causal(prompts, load.prompt_tokens, reach, heads, kv_heads, head_dim, chunked=attention.chunked)
        attends = _prefill_kernel(rank, shape, kv_dtype)
        if attention.indexer:
            index = _index_prompts(rank, attention.indexer, prompts)
            chosen = _sparse_blocks(rank, attention, (prompts, load.prompt_tokens, 0, heads), prompts=True)
            kernels += _as_measured(rank, chosen, [*index, attends])
        else:
            kernels.append(attends)
    cached = math.ceil(_stored(attention, rank.load.cached_tokens) / rank.cp)
    stored = sequences * cached if sequences else prompts * _stored(attention, load.prompt_tokens)
    return tuple(kernels), stored * (row_bytes + _index_bytes(rank, attention.indexer))


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


def _stored(attention: GroupedAttention, cached: float) -> float:
    """Tokens of KV cache that stay: those of the window, or of a full chunk."""
    return min(cached, attention.window + attention.sinks) if attention.window else cached


def _causal(
    prompts: float, tokens: int, window: int, heads: int, kv_heads: int, head_dim: int, *, chunked: bool = False
) -> PrefillAttention:
    """Causal attention over whole prompts, in independent chunks, or as a sliding window's kernels have it."""
    if chunked and window < tokens:
        prompts, tokens = prompts * tokens / window, window
    elif window and not chunked:
        return PrefillAttention(*window_as_chunks(prompts, tokens, window), heads, kv_heads, head_dim, windowed=True)
    return PrefillAttention(prompts, tokens, heads, kv_heads, head_dim)


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
        scored = math.ceil(load.context_tokens / rank.cp)
        context = min(scored, indexer.topk) if indexer else scored
        # A sequence's tokens read its latents together, unless each picks its own.
        readers, rows = (decoded, heads) if indexer else (sequences, heads * load.queries)
        absorbed = _absorbed(rank, latent, readers, context, rows, LatentDecode(readers, context, rows))
        absorbed = absorbed._replace(unlike=_several(load))
        if indexer:
            index, chosen = _index(rank, indexer, sequences, scored), (decoded, 1, scored - 1, heads)
            kernels += _as_measured(rank, _sparse_latents(rank, latent, chosen, prompts=False), [*index, absorbed])
        else:
            kernels.append(absorbed)
    if prompts and indexer and load.prompt_tokens > indexer.topk:
        chosen = indexer.topk - indexer.topk**2 / (2 * load.prompt_tokens)  # on average: the first see fewer
        absorbed = _absorbed(rank, latent, tokens - decoded, chosen, heads, _UNMEASURED_INDEXER)
        shape = _sparse_latents(rank, latent, (prompts, load.prompt_tokens, 0, heads), prompts=True)
        kernels += _as_measured(rank, shape, [*_index_prompts(rank, indexer, prompts), absorbed])
    elif prompts:
        mean_dim = (latent.query_width + latent.value_dim) // 2  # of scores and of values
        kernels.append(
            _prefill_kernel(rank, PrefillAttention(prompts, load.prompt_tokens, heads, heads, mean_dim), kv_dtype)
        )
    stored = sequences * math.ceil(rank.load.cached_tokens / rank.cp) if sequences else prompts * load.prompt_tokens
    return tuple(kernels), stored * (row_bytes + _index_bytes(rank, indexer))


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


def _index_bytes(rank: Rank, indexer: Indexer | None) -> float:
    """Bytes that it caches per key and layer, on every GPU of a tp group: fp8 and a scale, or the cache's format."""
    if indexer is None or not indexer.scores:
        return 0.0
    if indexer.block:
        return indexer.head_dim * DTYPE_BYTES[rank.workload.precisions.kv_cache]
    return indexer.head_dim * DTYPE_BYTES["fp8"] + _SCALE_BYTES


def _index(rank: Rank, indexer: Indexer, sequences: int, keys: float) -> list[Kernel]:
    """Scores every cached key for each decoding token, all heads on every GPU, and picks the best."""
    flops = 2.0 * sequences * rank.sizes.load.queries * keys * indexer.heads * indexer.head_dim
    return _scoring(rank, indexer, flops, sequences * keys * _index_bytes(rank, indexer))


def _index_prompts(rank: Rank, indexer: Indexer, prompts: float, ratio: int = 1) -> list[Kernel]:
    """The same for every token of prompts over the keys before it; scores are written and read once, in fp32."""
    pairs = prompts * rank.sizes.load.prompt_tokens**2 / 2 / ratio
    return _scoring(rank, indexer, 2.0 * pairs * indexer.heads * indexer.head_dim, pairs * 2 * 4)


def _scoring(rank: Rank, indexer: Indexer, flops: float, traffic: float) -> list[Kernel]:
    dtype = rank.workload.precisions.kv_cache if indexer.block else "fp8"
    return [Kernel("attention", dtype, dtype, flops, traffic, _UNMEASURED_INDEXER)] if indexer.scores else []


def _sparse_latents(
    rank: Rank, latent: LatentAttention, sizes: tuple[float, float, float, int], *, prompts: bool
) -> SparseAttention | None:
    """Sequences, new and cached tokens and heads as measured of DeepSeek's sparse attention."""
    indexer = latent.indexer
    if indexer is None or indexer.block or latent.cached_width != LATENT_WIDTH:
        return None
    if indexer.scores and indexer.head_dim != INDEX_WIDTH:
        return None
    fp8 = rank.workload.precisions.kv_cache == "fp8"
    kind = "dsa" if indexer.scores else "dsa_shared"
    return sparse_shape(kind, sizes, fp8=fp8, prompts=prompts, topk=indexer.topk, index=indexer.heads)


def _sparse_blocks(
    rank: Rank, attention: GroupedAttention, sizes: tuple[float, float, float, int], *, prompts: bool
) -> SparseAttention | None:
    """The same of MiniMax's, whose heads share their keys by sixteen."""
    indexer = attention.indexer
    if indexer is None or indexer.block != INDEX_WIDTH or attention.heads != 16 * attention.kv_heads:
        return None
    if {attention.head_dim, attention.value_dim, indexer.head_dim} != {INDEX_WIDTH}:
        return None
    fp8 = rank.workload.precisions.kv_cache == "fp8"
    return sparse_shape("msa", sizes, fp8=fp8, prompts=prompts, topk=indexer.topk, index=indexer.heads)


def _compressed_shape(
    rank: Rank, mixer: CompressedAttention, sizes: tuple[float, float, float, int], *, prompts: bool
) -> SparseAttention | None:
    """The same of DeepSeek V4's.

    Layers with a window alone take what heavy compression takes. [assumed] as in AIConfigurator: no table has them.
    """
    indexer, fp8 = mixer.indexer, rank.workload.precisions.kv_cache == "fp8"
    if mixer.head_dim != KEY_WIDTH or mixer.window != INDEX_WIDTH:
        return None
    if indexer is not None:
        known = (mixer.ratio, indexer.heads, indexer.head_dim) == (4, 64, INDEX_WIDTH)
        return sparse_shape("csa", sizes, fp8=fp8, prompts=prompts, topk=indexer.topk, index=64) if known else None
    if mixer.ratio not in (0, 128):
        return None
    return sparse_shape("hca", sizes, fp8=fp8, prompts=prompts, topk=1, index=0)


def _as_measured(
    rank: Rank, shape: SparseAttention | Convolution | StateScan | None, kernels: list[Kernel], share: float = 1.0
) -> list[Kernel]:
    """The kernels as one of a measured shape, where curves know it; else as they are.

    Its arithmetic is a share of the last one's; of prompts no byte is counted, as neighbours read the same keys.
    """
    last, curves = kernels[-1], rank.workload.hardware.curves
    if shape is None or curves is None or curves.kernel(shape, last.math_dtype, last.stream_dtype) is None:
        return kernels
    traffic = 0.0 if shape.prompts else add_up([each.traffic_bytes for each in kernels])
    return [last._replace(flops=last.flops * share, traffic_bytes=traffic, shape=shape)]


# --- compressed keys ----------------------------------------------------------------------------------


def _compressed(
    rank: Rank, mixer: CompressedAttention, sequences: int, prompts: float, heads: int, kv_heads: int
) -> Kernels:
    """A window of keys and keys that stand for several tokens each, with what pools them.

    Kernels multiply as many heads as fill a tile. [published] FlashMLA's sparse kernels take 64 or 128.
    """
    load, indexer = rank.sizes.load, mixer.indexer
    kv_dtype, dtype, each = (
        rank.workload.precisions.kv_cache,
        rank.workload.precisions.activations,
        rank.activation_each,
    )
    row_bytes = _compressed_row_bytes(mixer, kv_dtype)
    decoded, prompt_tokens = sequences * load.queries, prompts * load.prompt_tokens
    tokens, pooling = decoded + prompt_tokens, sum(_pooled_widths(mixer)) * _STATE_BYTES
    kernels = [elementwise(rank, 0.0, tokens * (heads + 1) * mixer.head_dim * 2 * each)]
    if mixer.ratio:  # a row of the compressors' states per token, and all that are pooled once per key
        kernels.append(elementwise(rank, 0.0, tokens * pooling * (2 + mixer.pooled / mixer.ratio)))
    filled = _TILE_HEADS * math.ceil(heads / _TILE_HEADS)
    own = heads / filled

    def attend(queries: float, keys: float) -> Kernel:
        traffic = queries * keys * row_bytes + 2 * queries * heads * mixer.head_dim * each
        flops = 4.0 * queries * filled * mixer.head_dim * keys
        return Kernel("attention", dtype, kv_dtype, flops, traffic, _UNMEASURED_COMPRESSED)

    if sequences:
        context = math.ceil(load.context_tokens / rank.cp)
        pooled = context / mixer.ratio if mixer.ratio else 0.0
        index = _index(rank, indexer, sequences, pooled) if indexer else []
        seen = min(context, mixer.window) + (min(pooled, indexer.topk) if indexer else pooled)
        shape = _compressed_shape(rank, mixer, (decoded, 1, context - 1, heads), prompts=False)
        kernels += _as_measured(rank, shape, [*index, attend(decoded, seen)._replace(unlike=_several(load))], own)
    if prompts:
        seen = _mean_keys(load.prompt_tokens, 1, mixer.window)
        if mixer.ratio:
            seen += _mean_keys(load.prompt_tokens, mixer.ratio, indexer.topk if indexer else load.prompt_tokens)
        index = _index_prompts(rank, indexer, prompts, mixer.ratio) if indexer else []
        shape = _compressed_shape(rank, mixer, (prompts, load.prompt_tokens, 0, heads), prompts=True)
        kernels += _as_measured(rank, shape, [*index, attend(prompt_tokens, seen)], own)
    stored = rank.load.cached_tokens / rank.cp if sequences else load.prompt_tokens
    kept = min(stored, mixer.window) * row_bytes + mixer.pooled * pooling
    if mixer.ratio:
        kept += math.ceil(stored / mixer.ratio) * (row_bytes + _index_bytes(rank, indexer))
    return tuple(kernels), (sequences or prompts) * kept


def _mean_keys(tokens: int, ratio: int, most: int) -> float:
    """Keys of `ratio` tokens each that a token of a prompt sees of those before it, `most` at most, on average."""
    if tokens <= most * ratio:
        return tokens / (2 * ratio)
    return most - most**2 * ratio / (2 * tokens)


def _compressed_row_bytes(mixer: CompressedAttention, kv_dtype: Dtype) -> float:
    """Bytes of a cached key: in fp8 its rotary part stays in bf16, and eight bytes are scales.

    [published] vLLM 0.33's and SGLang 0.5.23's caches of DeepSeek V4: 584 B.
    """
    if kv_dtype != "fp8":
        return mixer.head_dim * DTYPE_BYTES[kv_dtype]
    return mixer.head_dim + mixer.rope_dim + _ROW_SCALE_BYTES


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
    state = heads * mixer.key_dim * mixer.value_dim
    state_bytes = state * _STATE_BYTES
    convolution_bytes = (mixer.conv_kernel - 1) * width * each
    kind, kernels = _STATE_KINDS[mixer.kind], list[Kernel]()

    def convolve(rows: float, moves: float, shape: Convolution) -> list[Kernel]:
        traffic = 2 * rows * width * each + moves * convolution_bytes
        own = elementwise(rank, 2.0 * rows * width * mixer.conv_kernel, traffic, _UNMEASURED_STATE)
        return _as_measured(rank, shape, [own])

    dims = (heads, mixer.key_dim, mixer.value_dim, width)
    streamed = (width + 2 * heads * mixer.value_dim) * each  # queries, keys, values and gate in, the output out
    if sequences:
        kernels += convolve(decoded, sequences * (1 + kept), Convolution(kind, False, sequences, load.queries, width))
        traffic = sequences * (1 + kept) * state_bytes + decoded * streamed
        scan = elementwise(rank, 8.0 * decoded * state, traffic, _UNMEASURED_STATE)._replace(unlike=_several(load))
        kernels += _as_measured(rank, StateScan(kind, False, sequences, load.queries, *dims), [scan])
    if prompts:
        kernels += convolve(prompt_tokens, 2 * prompts, Convolution(kind, True, prompts, load.prompt_tokens, width))
        inside = 2 * _CHUNK * (2 * mixer.key_dim + mixer.value_dim) * heads
        traffic = prompt_tokens * (streamed + 2 * state_bytes / _CHUNK)
        flops = prompt_tokens * (4.0 * state + inside)
        scan = Kernel("attention", dtype, dtype, flops, traffic, _UNMEASURED_STATE)
        kernels += _as_measured(rank, StateScan(kind, True, prompts, load.prompt_tokens, *dims), [scan])
    return tuple(kernels), (sequences * kept if sequences else prompts) * (state_bytes + convolution_bytes)


# --- which mixer does what ----------------------------------------------------------------------------


def _by_indexer(attention: GroupedAttention) -> bool:
    return attention.indexer is not None


def _by_low_rank(mixer: LinearMixer) -> bool:
    return mixer.low_rank_gates > 0


def _always(_attention: Attention) -> bool:
    return True


class TokenMixer(NamedTuple):
    """What a kind of mixer costs on one GPU.

    Attributes:
        kernels: Of attention or of the state: (rank, mixer, sequences, prompts, heads, KV heads) to its `Kernels`.
        projections: Into it, where they are not one product: (rank, mixer, letter that is sharded) to its `Work`.
        beside: What stands beside the projections: (rank, mixer) to its `Work`.
        output: Back to the hidden state, where that is not one product.
        in_two: Whether what comes out of one product goes into another, so that no part of the hidden width will do.
    """

    kernels: Callable[..., Kernels]
    projections: Callable[..., Work] | None = None
    beside: Callable[..., Work] | None = None
    output: Callable[..., Work] | None = None
    in_two: Callable[[Any], bool] = _always


_MIXERS: dict[type, TokenMixer] = {
    GroupedAttention: TokenMixer(_grouped, beside=indexer_projections, in_two=_by_indexer),
    LatentAttention: TokenMixer(_latent, latent_projections, indexer_projections),
    CompressedAttention: TokenMixer(_compressed, compressed_projections, output=compressed_output),
    LinearMixer: TokenMixer(_linear, beside=low_rank_gates, in_two=_by_low_rank),
}


def token_mixer(attention: Attention) -> TokenMixer:
    """What is known of a mixer's kind."""
    return _MIXERS[type(attention)]
