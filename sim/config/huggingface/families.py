"""What the layers of each family of models are: attention and feed-forward network, in a model file's words.

`intermediate_size` is the width of an expert in some families and of the dense layers in others, and
`num_key_value_heads` is not the cache where attention goes over latents: each family says what it means.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sim.config.fields import MOST_LAYERS
from sim.config.huggingface.keys import ALIASES, CannotImport, Keys
from sim.config.huggingface.parts import (
    ConfigTable,
    counted_shared,
    dense_first,
    dense_network,
    expert_network,
    grouped_by_kind,
    head_dim_of,
    heads_of,
    kinds_of,
    latent_of,
    per_layer,
    windowed,
)


class ImportedLayer(NamedTuple):
    """One layer, as keys of `[[groups]]`; `label` is a name for layers like it."""

    label: str
    attention: ConfigTable
    feed_forward: ConfigTable


def _joined(
    attention: list[tuple[str, ConfigTable]], feed_forward: list[tuple[str, ConfigTable]]
) -> list[ImportedLayer]:
    pairs = zip(attention, feed_forward, strict=True)
    return [ImportedLayer(f"{name}_{kind}", table, network) for (name, table), (kind, network) in pairs]


def _dense_family(keys: Keys, *, switched_on: bool = True, full_first: int = 0) -> list[ImportedLayer]:
    """Mistral names a window for all layers."""
    layers = keys.need("layers")
    attention = grouped_by_kind(keys, layers)
    switched_on = keys.flag("use_sliding_window", default=switched_on)
    if not keys.texts("layer_types") and keys.whole("sliding_window") and switched_on:
        full, first = heads_of(keys), keys.whole("max_window_layers", default=full_first)
        window = ("window", windowed(keys, full))
        attention = [("full", full) if layer < first else window for layer in range(layers)]
    return _joined(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _qwen_dense(keys: Keys) -> list[ImportedLayer]:
    """A window counts only where it is switched on. Source: transformers, configuration_qwen2.py, read 2026-11-22."""
    return _dense_family(keys, switched_on=False, full_first=28)


def _gemma3(keys: Keys) -> list[ImportedLayer]:
    layers, full = keys.need("layers"), heads_of(keys)
    if keys.texts("layer_types"):
        attention = grouped_by_kind(keys, layers)
    else:
        every, window = keys.count("sliding_window_pattern", default=6), ("window", windowed(keys, full))
        attention = [("full", full) if (layer + 1) % every == 0 else window for layer in range(layers)]
    return _joined(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _mixtral(keys: Keys) -> list[ImportedLayer]:
    """`intermediate_size` is an expert's."""
    layers = keys.need("layers")
    experts = expert_network(keys, keys.known("ffn_hidden"), keys.known("shared_hidden"))
    full = heads_of(keys)
    attention = [("window", windowed(keys, full))] if keys.whole("sliding_window") else [("full", full)]
    return _joined(attention * layers, [experts] * layers)


def _minimax_m2(keys: Keys) -> list[ImportedLayer]:
    if set(keys.wholes("attn_type_list", default=[1])) != {1}:
        raise CannotImport("layers of lightning attention (attn_type_list), whose state no model file can say")
    return _mixtral(keys)


def _gpt_oss(keys: Keys) -> list[ImportedLayer]:
    layers = keys.need("layers")
    return _joined(grouped_by_kind(keys, layers), [expert_network(keys, keys.known("ffn_hidden"))] * layers)


def _qwen_networks(keys: Keys, layers: int) -> list[tuple[str, ConfigTable]]:
    """`intermediate_size` is that of the layers without experts, of which most models have none."""
    step, dense = keys.count("decoder_sparse_step", default=1), set(keys.wholes("mlp_only_layers"))
    experts = expert_network(keys, keys.known("expert_hidden"), keys.known("shared_hidden"))
    width = keys.known("ffn_hidden")
    return [
        experts if layer not in dense and (layer + 1) % step == 0 else dense_network(width) for layer in range(layers)
    ]


def _qwen3_moe(keys: Keys) -> list[ImportedLayer]:
    layers = keys.need("layers")
    return _joined([("full", heads_of(keys))] * layers, _qwen_networks(keys, layers))


def _qwen3_next(keys: Keys) -> list[ImportedLayer]:
    """Three of four layers keep a state (Gated DeltaNet), the fourth has gated attention."""
    layers, every = keys.need("layers"), keys.count("full_attention_interval", default=4)
    known = ("linear_attention", "full_attention")
    usual = [known[(layer + 1) % every == 0] for layer in range(layers)]
    kinds = kinds_of(keys, layers, usual, known, "layer_types")
    tables = {
        "full_attention": ("full", {**heads_of(keys), "output_gate": keys.flag("attn_output_gate", default=True)}),
        "linear_attention": ("linear", {"linear_mixer": _gated_delta(keys)}),
    }
    attention = [tables[kind] for kind in kinds]
    if keys.known("experts"):
        return _joined(attention, _qwen_networks(keys, layers))
    return _joined(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _gated_delta(keys: Keys) -> ConfigTable:
    return {
        "kind": "gated_delta",
        "heads": keys.count("linear_num_value_heads"),
        "key_heads": keys.count("linear_num_key_heads"),
        "key_dim": keys.count("linear_key_head_dim"),
        "value_dim": keys.count("linear_value_head_dim"),
        "conv_kernel": keys.count("linear_conv_kernel_dim", default=4),
    }


def _deepseek(keys: Keys) -> list[ImportedLayer]:
    """Latent attention; `intermediate_size` is that of the first layers, which have no experts."""
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    latent = latent_of(keys)
    keys.seen("layer_types")  # sparse throughout, where there is an indexer
    if topk := keys.whole("index_topk"):
        latent["indexer"] = {
            "heads": keys.count("index_n_heads"),
            "head_dim": keys.count("index_head_dim"),
            "topk": topk,
        }
    attention = [("latent", latent)] * layers
    if keys.texts("indexer_types"):  # a layer without a scorer of its own reads what an earlier one chose
        if not topk:
            raise CannotImport("indexer_types, and no index_topk")
        follows = {**latent, "indexer": {**latent["indexer"], "heads": 0, "head_dim": 0}}
        kinds = kinds_of(keys, layers, (), ("full", "shared"), "indexer_types")
        attention = [("latent", latent) if kind == "full" else ("latent_shared", follows) for kind in kinds]
    experts = expert_network(keys, width, counted_shared(keys, width)) if keys.known("experts") else None
    dense = dense_network(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has and experts else dense for has in dense_first(keys, layers)])


def _deepseek_v4(keys: Keys) -> list[ImportedLayer]:
    """A window for all layers; compressed keys by `compress_ratios`, whose further entries are MTP layers'."""
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    kinds = keys.texts("layer_types")
    ratios = [_RATIOS.get(kind, -1) for kind in kinds] if kinds else keys.wholes("compress_ratios")
    own = {
        "query_rank": keys.count("q_lora_rank"),
        "rope_dim": keys.count("qk_rope_head_dim", default=64),
        "window": keys.count("sliding_window"),
        "output_groups": keys.count("o_groups"),
        "output_rank": keys.count("o_lora_rank"),
    }
    heads = {"heads": keys.need("heads"), "head_dim": keys.need("head_dim")}
    index = {"heads": keys.count("index_n_heads"), "head_dim": keys.count("index_head_dim")}
    indexer = {"indexer": {**index, "topk": keys.count("index_topk")}}
    attention: list[tuple[str, ConfigTable]] = []
    for ratio in per_layer(ratios, layers, "compress_ratios"):
        if ratio not in _RATIOS.values():
            raise CannotImport(f"compress_ratios: expected 0, 4 and 128, got {ratio}")
        table = {**heads, "compressed_attention": {**own, "ratio": ratio}, **(indexer if ratio == 4 else {})}
        attention.append(("window" if not ratio else f"compressed_{ratio}", table))
    keys.seen(
        "expert_dtype", "num_hash_layers", "mlp_layer_types", "hc_sinkhorn_iters", "hc_eps", "compress_rope_theta"
    )
    return _joined(attention, [expert_network(keys, width, counted_shared(keys, width))] * layers)


_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a compressed key. Source: transformers 5.23, configuration_deepseek_v4.py."""


def _kimi_linear(keys: Keys) -> list[ImportedLayer]:
    layers, width, linear = keys.need("layers"), keys.known("expert_hidden"), keys.inside("linear_attn_config")
    heads, head_dim = linear.count("num_heads"), linear.count("head_dim")
    mixer = {"kind": "kimi_delta", "heads": heads, "key_heads": heads, "key_dim": head_dim, "value_dim": head_dim}
    mixer["conv_kernel"] = linear.count("short_conv_kernel_size", default=4)
    if linear.flag("use_full_rank_gate", default=False):
        mixer["full_gate"] = True
    full = set(linear.wholes("full_attn_layers"))  # counted from 1
    latent = ("latent", latent_of(keys, gated=keys.flag("mla_use_output_gate", default=False)))
    attention = [latent if layer + 1 in full else ("linear", {"linear_mixer": mixer}) for layer in range(layers)]
    experts = expert_network(keys, width, counted_shared(keys, width), latent="routed_expert_hidden_size")
    dense = dense_network(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _glm4_moe(keys: Keys) -> list[ImportedLayer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    experts, dense = expert_network(keys, width, counted_shared(keys, width)), dense_network(keys.known("ffn_hidden"))
    return _joined(
        [("full", heads_of(keys))] * layers, [experts if has else dense for has in dense_first(keys, layers)]
    )


def _llama4(keys: Keys) -> list[ImportedLayer]:
    """`intermediate_size` is that of routed and shared experts, `intermediate_size_mlp` that of dense layers."""
    layers, full = keys.need("layers"), heads_of(keys)
    step, width = keys.count("interleave_moe_layer_step", default=1), keys.known("ffn_hidden")
    every = keys.count("no_rope_layer_interval", default=4)
    rotary = keys.wholes("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    chunked = {**windowed(keys, full, "attention_chunk_size"), "chunked": True}
    attention = [
        ("chunked", chunked) if has_rope else ("full", full) for has_rope in per_layer(rotary, layers, "no_rope_layers")
    ]
    with_experts = set(keys.wholes("moe_layers") or range(step - 1, layers, step))
    experts, dense_width = expert_network(keys, width, width), keys.whole("intermediate_size_mlp")
    networks = [experts if layer in with_experts else dense_network(dense_width) for layer in range(layers)]
    return _joined(attention, networks)


def _minimax_m3(keys: Keys) -> list[ImportedLayer]:
    layers, width, sparse = keys.need("layers"), keys.known("expert_hidden"), keys.inside("sparse_attention_config")
    full = heads_of(keys)
    where = per_layer(sparse.wholes("sparse_attention_freq", default=[0] * layers), layers, "sparse_attention_freq")
    attention = [("full", full)] * layers
    if any(where):
        tokens = sparse.count("sparse_topk_blocks") * sparse.count("sparse_block_size")
        heads, head_dim = sparse.count("sparse_num_index_heads"), sparse.count("sparse_index_dim")
        blocks = {"heads": heads, "head_dim": head_dim, "topk": tokens, "block": sparse.count("sparse_block_size")}
        chosen = ("sparse", {**full, "indexer": blocks})
        attention = [chosen if each else ("full", full) for each in where]
    experts = expert_network(keys, width or keys.known("ffn_hidden"), keys.known("shared_hidden"))
    keys.seen("intermediate_size", "n_shared_experts")  # the same width again, and its one shared expert
    dense = dense_network(keys.whole("dense_intermediate_size"))
    return _joined(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _dbrx(keys: Keys) -> list[ImportedLayer]:
    layers, attention, network = keys.need("layers"), keys.inside("attn_config"), keys.inside("ffn_config")
    heads = keys.need("heads")
    table = {"heads": heads, "kv_heads": attention.need("kv_heads"), "head_dim": head_dim_of(keys, heads)}
    return _joined([("full", table)] * layers, [expert_network(network, network.known("ffn_hidden"))] * layers)


def _grok(keys: Keys) -> list[ImportedLayer]:
    """Grok-2 has a dense network beside the experts in every layer (`residual_moe`)."""
    layers, width = keys.need("layers"), keys.known("ffn_hidden")
    beside = width if keys.flag("residual_moe", default=False) else 0
    experts = expert_network(keys, keys.known("expert_hidden", default=width), beside)
    return _joined([("full", heads_of(keys))] * layers, [experts] * layers)


def _mimo_v2(keys: Keys) -> list[ImportedLayer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    pattern = per_layer(keys.wholes("hybrid_layer_pattern", default=[0] * layers), layers, "hybrid_layer_pattern")
    window, full = ("window", windowed(keys, heads_of(keys, "swa_"))), ("full", heads_of(keys))
    attention = [window if narrow else full for narrow in pattern]
    experts, dense = expert_network(keys, width), dense_network(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _nemotron_h(keys: Keys) -> list[ImportedLayer]:
    """Layers that are one thing each: M (Mamba-2), * (attention), - (dense) or E (experts)."""
    keys.seen(*ALIASES["ffn_hidden"])  # read where a dense network comes
    pattern = keys.text("hybrid_override_pattern", longest=MOST_LAYERS)
    layers = keys.known("layers") or min(len(pattern or keys.texts("layers_block_type")), MOST_LAYERS)
    if not pattern:
        letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        pattern = "".join(letters.get(kind, "?") for kind in keys.texts("layers_block_type"))
    if not pattern or set(pattern) - set("M*-E"):
        raise CannotImport(f"expected a hybrid_override_pattern of M, *, - and E, got {reprlib.repr(pattern)}")
    kinds = {
        "M": lambda: _mixer_alone("mamba", {"linear_mixer": _mamba(keys)}),
        "*": lambda: _mixer_alone("full", heads_of(keys)),
        "-": lambda: _network_alone(*dense_network(keys.known("ffn_hidden"), gated=False)),
        "E": lambda: _network_alone(*_nemotron_experts(keys)),
    }
    known = {block: kinds[block]() for block in sorted(set(pattern))}
    return [known[block] for block in per_layer(pattern, layers, "hybrid_override_pattern")]


def _mamba(keys: Keys) -> ConfigTable:
    return {
        "kind": "mamba2",
        "heads": keys.count("mamba_num_heads"),
        "key_heads": keys.count("n_groups"),
        "key_dim": keys.count("ssm_state_size"),
        "value_dim": keys.count("mamba_head_dim"),
        "conv_kernel": keys.count("conv_kernel", default=4),
    }


def _mixer_alone(label: str, mixer: ConfigTable) -> ImportedLayer:
    return ImportedLayer(label, {"only": "mixer", **mixer}, {})


def _network_alone(label: str, network: ConfigTable) -> ImportedLayer:
    return ImportedLayer(label, {}, {"only": "feed_forward", **network})


def _nemotron_experts(keys: Keys) -> tuple[str, ConfigTable]:
    shared = keys.known("shared_hidden") * keys.known("shared_experts", default=1)
    return expert_network(keys, keys.known("expert_hidden"), shared, gated=False, latent="moe_latent_size")


IMPORTED_FAMILIES: Mapping[str, Callable[[Keys], list[ImportedLayer]]] = {
    "llama": _dense_family,
    "mistral": _dense_family,
    "qwen2": _qwen_dense,
    "qwen3": _qwen_dense,
    "qwen3_vl_text": _qwen_dense,
    "mimo": _dense_family,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen3_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "deepseek_ref": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
    "llama4": _llama4,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "dbrx": _dbrx,
    "grok": _grok,
    "mimo_v2_flash": _mimo_v2,
    "nemotron_h": _nemotron_h,
}
"""Families by `model_type`."""

UNSAID: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    }
}
"""What a family's configurations may leave to transformers. Source: its configuration_gemma3.py, read 2026-11-22."""

BY_ARCHITECTURE: Mapping[str, str] = {"Grok1ForCausalLM": "grok", "Grok1ModelForCausalLM": "grok"}
"""Families whose `model_type` names another thing, by an entry of `architectures`."""

REFUSED: Mapping[str, str] = {
    "gemma4_text": "keys that are the values (attention_k_eq_v) and a dense network beside the experts",
    "nemotron-nas": "blocks without attention and of many widths (block_configs)",
    "step3p7": "a family whose layers are not published in enough detail",
}
"""Families that are known and that no model file can express, with the reason."""
