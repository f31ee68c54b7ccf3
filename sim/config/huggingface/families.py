"""What the layers of each family of models are: attention and feed-forward network, in a model file's words.

`intermediate_size` is the width of an expert in some families and of the dense layers in others, and
`num_key_value_heads` is not the cache where attention goes over latents: each family says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.config.huggingface.keys import CannotImport, Keys

Table = dict[str, Any]


class Layer(NamedTuple):
    """One layer, as keys of `[[groups]]`; `label` is a name for layers like it."""

    label: str
    attention: Table
    feed_forward: Table


# --- attention ----------------------------------------------------------------------------------------


def _heads(keys: Keys, prefix: str = "") -> Table:
    if prefix:
        heads, kv_heads, head_dim, value_dim = (
            keys.get(prefix + name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        )
    else:
        heads = keys.need("heads")
        kv_heads, head_dim, value_dim = keys.known("kv_heads"), keys.known("head_dim"), keys.get("v_head_dim")
    head_dim = head_dim or keys.need("hidden") // heads
    table: Table = {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim}
    return {**table, "value_dim": value_dim} if value_dim and value_dim != head_dim else table


def _latent(keys: Keys) -> Table:
    table: Table = {
        "heads": keys.need("heads"),
        "head_dim": keys.get("qk_nope_head_dim"),
        "latent_attention": {
            "query_rank": keys.get("q_lora_rank", default=0),
            "kv_rank": keys.get("kv_lora_rank"),
            "rope_dim": keys.get("qk_rope_head_dim"),
            "value_dim": keys.get("v_head_dim"),
        },
    }
    if missing := [name for name, value in table["latent_attention"].items() if value is None]:
        raise CannotImport(f"latent attention lacks {', '.join(missing)}")
    return table


def _windowed(keys: Keys, full: Table, key: str = "sliding_window") -> Table:
    window = keys.get(key)
    if not window:
        raise CannotImport(f"layers with a window, and no {key}")
    return {**full, "window": window}


def _kinds(keys: Keys, layers: int) -> list[str]:
    """`layer_types` of every layer, or full attention throughout."""
    kinds = keys.get("layer_types", default=["full_attention"] * layers)
    return _per_layer(kinds, layers, "layer_types")


def _per_layer(values: list[Any], layers: int, key: str) -> list[Any]:
    if len(values) < layers:
        raise CannotImport(f"{key} has {len(values)} entries for {layers} layers")
    return values[:layers]


def _grouped_by_kind(keys: Keys, layers: int) -> list[tuple[str, Table]]:
    """Grouped-query attention of every layer, full or with a window, as `layer_types` says."""
    full = _heads(keys)
    tables = {"full_attention": ("full", full)}
    kinds = _kinds(keys, layers)
    if "sliding_attention" in kinds:
        tables["sliding_attention"] = ("window", _windowed(keys, full))
    if unknown := sorted(set(kinds) - set(tables)):
        raise CannotImport(f"layer_types names {unknown[0]!r}, which this family is not known to have")
    return [tables[kind] for kind in kinds]


# --- feed-forward networks ----------------------------------------------------------------------------


def _dense(width: int | None, *, gated: bool = True) -> tuple[str, Table]:
    if not width:
        raise CannotImport("dense layers, and no intermediate_size")
    return "dense", {"ffn_hidden": width, "experts": 1, "experts_per_token": 1, "gated": gated}


def _experts(keys: Keys, width: int | None, shared: int = 0, *, gated: bool = True) -> tuple[str, Table]:
    if not width:
        raise CannotImport("experts, and no moe_intermediate_size")
    table: Table = {"ffn_hidden": width, "experts": keys.need("experts"), "gated": gated}
    table["experts_per_token"] = keys.need("experts_per_token")
    return "experts", {**table, "shared_ffn_hidden": shared} if shared else table


def _counted_shared(keys: Keys, width: int | None) -> int:
    """Width of `n_shared_experts` together: each is as wide as a routed one."""
    return keys.known("shared_experts", default=0) * (width or 0)


def _dense_first(keys: Keys, layers: int) -> list[bool]:
    """Whether each layer has experts: DeepSeek's keys, and lists of them."""
    frequency: int | list[Any] = keys.get("moe_layer_freq", default=1)
    first: int = keys.get("first_k_dense_replace", default=0)
    if kinds := keys.get("mlp_layer_types"):
        return [kind != "dense" for kind in _per_layer(kinds, layers, "mlp_layer_types")]
    if isinstance(frequency, list):
        return [bool(each) for each in _per_layer(frequency, layers, "moe_layer_freq")]
    return [layer >= first and layer % frequency == 0 for layer in range(layers)]


# --- families -----------------------------------------------------------------------------------------


def _joined(attention: list[tuple[str, Table]], feed_forward: list[tuple[str, Table]]) -> list[Layer]:
    pairs = zip(attention, feed_forward, strict=True)
    return [Layer(f"{name}_{kind}", table, network) for (name, table), (kind, network) in pairs]


def _dense_family(keys: Keys) -> list[Layer]:
    layers = keys.need("layers")
    attention = _grouped_by_kind(keys, layers)
    # Mistral names a window for all layers; Qwen's counts only where it is switched on.
    if keys.get("layer_types") is None and keys.get("sliding_window") and keys.get("use_sliding_window", default=True):
        full, first = _heads(keys), keys.get("max_window_layers", default=0)
        window = ("window", _windowed(keys, full))
        attention = [("full", full) if layer < first else window for layer in range(layers)]
    return _joined(attention, [_dense(keys.known("ffn_hidden"))] * layers)


def _gemma3(keys: Keys) -> list[Layer]:
    layers, full = keys.need("layers"), _heads(keys)
    if keys.get("layer_types") is not None:
        attention = _grouped_by_kind(keys, layers)
    else:
        every, window = keys.get("sliding_window_pattern", default=6), ("window", _windowed(keys, full))
        attention = [("full", full) if (layer + 1) % every == 0 else window for layer in range(layers)]
    return _joined(attention, [_dense(keys.known("ffn_hidden"))] * layers)


def _mixtral(keys: Keys) -> list[Layer]:
    """`intermediate_size` is an expert's."""
    layers = keys.need("layers")
    shared = keys.known("shared_hidden", default=0)
    experts = _experts(keys, keys.known("ffn_hidden"), shared)
    attention = [("window", _windowed(keys, _heads(keys)))] if keys.get("sliding_window") else [("full", _heads(keys))]
    return _joined(attention * layers, [experts] * layers)


def _minimax_m2(keys: Keys) -> list[Layer]:
    if set(keys.get("attn_type_list", default=[1])) != {1}:
        raise CannotImport("layers of lightning attention (attn_type_list), whose state no model file can say")
    return _mixtral(keys)


def _gpt_oss(keys: Keys) -> list[Layer]:
    layers = keys.need("layers")
    return _joined(_grouped_by_kind(keys, layers), [_experts(keys, keys.known("ffn_hidden"))] * layers)


def _qwen_networks(keys: Keys, layers: int) -> list[tuple[str, Table]]:
    """`intermediate_size` is that of the layers without experts, of which most models have none."""
    step, dense = keys.get("decoder_sparse_step", default=1), keys.get("mlp_only_layers", default=[])
    experts = _experts(keys, keys.known("expert_hidden"), keys.known("shared_hidden", default=0))
    width = keys.known("ffn_hidden")
    return [experts if layer not in dense and (layer + 1) % step == 0 else _dense(width) for layer in range(layers)]


def _qwen3_moe(keys: Keys) -> list[Layer]:
    layers = keys.need("layers")
    return _joined([("full", _heads(keys))] * layers, _qwen_networks(keys, layers))


def _qwen3_next(keys: Keys) -> list[Layer]:
    """Three of four layers keep a state (Gated DeltaNet), the fourth has gated attention."""
    layers, every = keys.need("layers"), keys.get("full_attention_interval", default=4)
    kinds = keys.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)
    ]
    full = {**_heads(keys), "output_gate": bool(keys.get("attn_output_gate", default=True))}
    linear = {
        "linear_mixer": {
            "kind": "gated_delta",
            "heads": keys.get("linear_num_value_heads"),
            "key_heads": keys.get("linear_num_key_heads"),
            "key_dim": keys.get("linear_key_head_dim"),
            "value_dim": keys.get("linear_value_head_dim"),
            "conv_kernel": keys.get("linear_conv_kernel_dim", default=4),
        }
    }
    tables = {"full_attention": ("full", full), "linear_attention": ("linear", linear)}
    if unknown := sorted(set(kinds) - set(tables)):
        raise CannotImport(f"layer_types names {unknown[0]!r}, which this family is not known to have")
    attention = [tables[kind] for kind in _per_layer(kinds, layers, "layer_types")]
    if keys.known("experts"):
        return _joined(attention, _qwen_networks(keys, layers))
    return _joined(attention, [_dense(keys.known("ffn_hidden"))] * layers)


def _deepseek(keys: Keys) -> list[Layer]:
    """Latent attention; `intermediate_size` is that of the first layers, which have no experts."""
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    latent, _ = _latent(keys), keys.get("layer_types")  # sparse throughout, where there is an indexer
    if topk := keys.get("index_topk"):
        latent["indexer"] = {"heads": keys.get("index_n_heads"), "head_dim": keys.get("index_head_dim"), "topk": topk}
    shared = keys.get("indexer_types")
    attention = [("latent", latent)] * layers
    if shared is not None:  # a layer without a scorer of its own reads what an earlier one chose
        alone = {key: value for key, value in latent.items() if key != "indexer"}
        follows = {**alone, "indexer": {**latent["indexer"], "heads": 1, "head_dim": 1}}
        own = [kind == "full" for kind in _per_layer(shared, layers, "indexer_types")]
        attention = [("latent", latent) if scores else ("latent_shared", follows) for scores in own]
    experts = _experts(keys, width, _counted_shared(keys, width)) if keys.known("experts") else None
    dense = _dense(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has and experts else dense for has in _dense_first(keys, layers)])


def _kimi_linear(keys: Keys) -> list[Layer]:
    if keys.get("routed_expert_hidden_size", default=keys.need("hidden")) != keys.need("hidden"):
        raise CannotImport("experts in a narrower space (routed_expert_hidden_size), which no model file can say")
    layers, width, linear = keys.need("layers"), keys.known("expert_hidden"), keys.inside("linear_attn_config")
    heads, head_dim = linear.get("num_heads"), linear.get("head_dim")
    mixer = {"kind": "kimi_delta", "heads": heads, "key_heads": heads, "key_dim": head_dim, "value_dim": head_dim}
    mixer["conv_kernel"] = linear.get("short_conv_kernel_size", default=4)
    full = set(linear.get("full_attn_layers", default=[]))  # counted from 1
    latent = ("latent", _latent(keys))
    attention = [latent if layer + 1 in full else ("linear", {"linear_mixer": mixer}) for layer in range(layers)]
    experts = _experts(keys, width, _counted_shared(keys, width))
    dense = _dense(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has else dense for has in _dense_first(keys, layers)])


def _glm4_moe(keys: Keys) -> list[Layer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    experts, dense = _experts(keys, width, _counted_shared(keys, width)), _dense(keys.known("ffn_hidden"))
    return _joined([("full", _heads(keys))] * layers, [experts if has else dense for has in _dense_first(keys, layers)])


def _llama4(keys: Keys) -> list[Layer]:
    """`intermediate_size` is that of routed and shared experts, `intermediate_size_mlp` that of dense layers."""
    layers, full = keys.need("layers"), _heads(keys)
    step, width = keys.get("interleave_moe_layer_step", default=1), keys.known("ffn_hidden")
    rotary = keys.get("no_rope_layers") or [
        int((layer + 1) % keys.get("no_rope_layer_interval", default=4) != 0) for layer in range(layers)
    ]
    chunked = {**_windowed(keys, full, "attention_chunk_size"), "chunked": True}
    attention = [
        ("chunked", chunked) if has_rope else ("full", full)
        for has_rope in _per_layer(rotary, layers, "no_rope_layers")
    ]
    listed = keys.get("moe_layers")
    with_experts = set(listed) if listed else set(range(step - 1, layers, step))
    experts, dense_width = _experts(keys, width, width or 0), keys.get("intermediate_size_mlp")
    networks = [experts if layer in with_experts else _dense(dense_width) for layer in range(layers)]
    return _joined(attention, networks)


def _minimax_m3(keys: Keys) -> list[Layer]:
    layers, width, sparse = keys.need("layers"), keys.known("expert_hidden"), keys.inside("sparse_attention_config")
    full = _heads(keys)
    tokens = sparse.get("sparse_topk_blocks", default=0) * sparse.get("sparse_block_size", default=0)
    index = {"heads": sparse.get("sparse_num_index_heads"), "head_dim": sparse.get("sparse_index_dim"), "topk": tokens}
    where = sparse.get("sparse_attention_freq", default=[0] * layers)
    attention = [
        ("sparse", {**full, "indexer": index}) if each else ("full", full)
        for each in _per_layer(where, layers, "sparse_attention_freq")
    ]
    experts = _experts(keys, width or keys.known("ffn_hidden"), keys.known("shared_hidden", default=0))
    keys.get("intermediate_size", "n_shared_experts")  # the same width again, and its one shared expert
    dense = _dense(keys.get("dense_intermediate_size"))
    return _joined(attention, [experts if has else dense for has in _dense_first(keys, layers)])


def _dbrx(keys: Keys) -> list[Layer]:
    layers, attention, network = keys.need("layers"), keys.inside("attn_config"), keys.inside("ffn_config")
    heads = keys.need("heads")
    table = {"heads": heads, "kv_heads": attention.known("kv_heads"), "head_dim": keys.need("hidden") // heads}
    return _joined([("full", table)] * layers, [_experts(network, network.known("ffn_hidden"))] * layers)


def _grok(keys: Keys) -> list[Layer]:
    """Grok-2 has a dense network beside the experts in every layer (`residual_moe`)."""
    layers, width = keys.need("layers"), keys.known("ffn_hidden")
    beside = width if keys.get("residual_moe") else 0
    experts = _experts(keys, keys.known("expert_hidden", default=width), beside or 0)
    return _joined([("full", _heads(keys))] * layers, [experts] * layers)


def _mimo_v2(keys: Keys) -> list[Layer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    window = ("window", {**_heads(keys, "swa_"), "window": keys.get("sliding_window")})
    pattern = _per_layer(keys.get("hybrid_layer_pattern", default=[0] * layers), layers, "hybrid_layer_pattern")
    attention = [window if narrow else ("full", _heads(keys)) for narrow in pattern]
    experts, dense = _experts(keys, width), _dense(keys.known("ffn_hidden"))
    return _joined(attention, [experts if has else dense for has in _dense_first(keys, layers)])


def _nemotron_h(keys: Keys) -> list[Layer]:
    """Layers that are one thing each: M (Mamba-2), * (attention), - (dense) or E (experts)."""
    if keys.get("moe_latent_size"):
        raise CannotImport("experts in a narrower space (moe_latent_size), which no model file can say")
    layers = keys.need("layers")
    keys.known("ffn_hidden")  # read where a dense network comes
    pattern = keys.get("hybrid_override_pattern")
    if not pattern:
        letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        pattern = "".join(letters.get(kind, "?") for kind in keys.get("layers_block_type", default=[]))
    if not pattern or set(pattern) - set("M*-E"):
        raise CannotImport(f"expected a hybrid_override_pattern of M, *, - and E, got {pattern!r}")
    mamba = {
        "linear_mixer": {
            "kind": "mamba2",
            "heads": keys.get("mamba_num_heads"),
            "key_heads": keys.get("n_groups"),
            "key_dim": keys.get("ssm_state_size"),
            "value_dim": keys.get("mamba_head_dim"),
            "conv_kernel": keys.get("conv_kernel", default=4),
        }
    }
    kinds = {
        "M": lambda: _mixer_alone("mamba", mamba),
        "*": lambda: _mixer_alone("full", _heads(keys)),
        "-": lambda: _network_alone(*_dense(keys.known("ffn_hidden"), gated=False)),
        "E": lambda: _network_alone(*_nemotron_experts(keys)),
    }
    known = {block: kinds[block]() for block in sorted(set(pattern))}
    return [known[block] for block in _per_layer(list(pattern), layers, "hybrid_override_pattern")]


def _mixer_alone(label: str, mixer: Table) -> Layer:
    return Layer(label, {"only": "mixer", **mixer}, {})


def _network_alone(label: str, network: Table) -> Layer:
    return Layer(label, {}, {"only": "feed_forward", **network})


def _nemotron_experts(keys: Keys) -> tuple[str, Table]:
    shared = keys.known("shared_hidden", default=0) * keys.known("shared_experts", default=1)
    return _experts(keys, keys.known("expert_hidden"), shared, gated=False)


FAMILIES: Mapping[str, Callable[[Keys], list[Layer]]] = {
    "llama": _dense_family,
    "mistral": _dense_family,
    "qwen2": _dense_family,
    "qwen3": _dense_family,
    "qwen3_vl_text": _dense_family,
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

BY_ARCHITECTURE: Mapping[str, str] = {"Grok1ForCausalLM": "grok", "Grok1ModelForCausalLM": "grok"}
"""Families whose `model_type` names another thing, by an entry of `architectures`."""

REFUSED: Mapping[str, str] = {
    "deepseek_v4": "attention over compressed tokens (compress_ratios) and hyper-connections (hc_mult)",
    "deepseek_ref": "DeepSeek V4 in its reference form: attention over compressed tokens and hyper-connections",
    "gemma4_text": "keys that are the values (attention_k_eq_v) and a dense network beside the experts",
    "nemotron-nas": "blocks without attention and of many widths (block_configs)",
    "step3p7": "a family whose layers are not published in enough detail",
}
"""Families that are known and cannot be said in a model file, with what stands in the way."""
