"""Families whose layers keep states or compressed keys, alone or beside attention: what their layers are.

A mixer of Mamba's first form is described as one of its second: a state of as many numbers, with one decay per head
of 64 channels.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping

from sim.config.fields import MOST_LAYERS
from sim.config.huggingface.keys import ALIASES, CannotImport, Keys
from sim.config.huggingface.parts import (
    ConfigTable,
    ImportedLayer,
    counted_shared,
    dense_first,
    dense_network,
    expert_network,
    heads_of,
    latent_of,
    layer_kinds,
    paired_layers,
    per_layer,
)


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
        "expert_dtype",
        "num_hash_layers",
        "mlp_layer_types",
        "hc_sinkhorn_iters",
        "compress_rope_theta",
        "compress_rates",
    )
    return paired_layers(attention, [expert_network(keys, width, counted_shared(keys, width))] * layers)


_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a compressed key. Source: transformers 5.23, configuration_deepseek_v4.py."""


def _kimi_linear(keys: Keys) -> list[ImportedLayer]:
    layers, width, linear = keys.need("layers"), keys.known("expert_hidden"), keys.inside("linear_attn_config")
    full = set(linear.wholes("full_attn_layers"))  # counted from 1
    if linear:
        mixer = _kimi_delta(linear.count("num_heads"), linear.count("head_dim"))
        mixer["conv_kernel"] = linear.count("short_conv_kernel_size", default=4)
    else:  # as transformers 5 writes it
        mixer = _kimi_delta(keys.count("linear_num_heads"), keys.count("linear_head_dim"))
        mixer["conv_kernel"] = keys.count("linear_conv_kernel_dim", default=4)
        kinds = layer_kinds(keys, layers, (), ("linear_attention", "full_attention"), "layer_types")
        full = {layer + 1 for layer, kind in enumerate(kinds) if kind == "full_attention"}
    if linear.flag("use_full_rank_gate", default=False):
        mixer["full_gate"] = True
    latent = ("latent", latent_of(keys, gated=keys.flag("mla_use_output_gate", default=False)))
    attention = [latent if layer + 1 in full else ("linear", {"linear_mixer": mixer}) for layer in range(layers)]
    experts = expert_network(keys, width, counted_shared(keys, width), latent="routed_expert_hidden_size")
    dense = dense_network(keys.known("ffn_hidden"))
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _kimi_delta(heads: int, head_dim: int) -> ConfigTable:
    return {"kind": "kimi_delta", "heads": heads, "key_heads": heads, "key_dim": head_dim, "value_dim": head_dim}


def _nemotron_h(keys: Keys) -> list[ImportedLayer]:
    """Layers that are one thing each: M (Mamba-2), * (attention), - (dense) or E (experts)."""
    keys.seen(*ALIASES["ffn_hidden"])  # read where a dense network comes
    pattern = keys.text("hybrid_override_pattern", longest=MOST_LAYERS)
    layers = keys.known("layers") or min(len(pattern or keys.texts("layers_block_type")), MOST_LAYERS)
    if not pattern:
        letters = {
            "mamba": "M",
            "attention": "*",
            "mlp": "-",
            "moe": "E",
            "linear_attention": "M",
            "full_attention": "*",
        }
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


def _bailing_hybrid(keys: Keys) -> list[ImportedLayer]:
    """Kimi's linear attention, and latent attention in the last layer of every group."""
    layers, width, every = keys.need("layers"), keys.known("expert_hidden"), keys.count("layer_group_size", default=6)
    heads = keys.count("linear_num_heads", default=keys.need("heads"))
    head_dim = keys.count("linear_head_dim", "head_dim", default=128)
    usual = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = layer_kinds(keys, layers, usual, ("linear_attention", "full_attention"), "layer_types")
    mixer = {**_kimi_delta(heads, head_dim), "full_gate": True}
    mixer["conv_kernel"] = keys.count("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    latent, linear = ("latent", latent_of(keys)), ("linear", {"linear_mixer": mixer})
    keys.seen("kda_safe_gate", "kda_lower_bound", "num_mtp_layers")
    experts = expert_network(keys, width, counted_shared(keys, width))
    dense, has_experts = dense_network(keys.known("ffn_hidden")), dense_first(keys, layers)
    return paired_layers(
        [latent if kind == "full_attention" else linear for kind in kinds],
        [experts if has else dense for has in has_experts],
    )


def _bamba(keys: Keys) -> list[ImportedLayer]:
    """Mamba-2, or attention in some layers, each with a dense network behind."""
    layers = keys.need("layers")
    kinds = keys.texts("layer_types") or keys.texts("layers_block_type")
    where = set(keys.wholes("attn_layer_indices"))
    where |= {layer for layer, kind in enumerate(kinds) if kind in ("attention", "full_attention")}
    full, linear = ("full", heads_of(keys)), ("mamba", {"linear_mixer": _mamba_of(keys)})
    keys.seen("mamba_expand", "z_loss_coefficient")
    attention = [full if layer in where else linear for layer in range(layers)]
    return paired_layers(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _falcon_h1(keys: Keys) -> list[ImportedLayer]:
    """A layer has attention and Mamba-2 side by side, described as two layers, of which the second has the network."""
    layers = keys.count(*ALIASES["layers"], most=MOST_LAYERS // 2)
    network = dense_network(keys.known("ffn_hidden"))
    (second,) = paired_layers([("mamba", {"linear_mixer": _mamba_of(keys)})], [network])
    keys.seen("mamba_expand", "mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp")
    keys.seen(
        *(f"{name}_multiplier" for name in ("key", "lm_head", "attention_in", "attention_out", "ssm_in", "ssm_out"))
    )
    keys.seen("ssm_multipliers", "mlp_multipliers", "projectors_bias")
    return [_mixer_alone("full", heads_of(keys)), second] * layers


def _mamba_of(keys: Keys) -> ConfigTable:
    """Mamba-2 by Bamba's names."""
    keys.seen("mamba_chunk_size", "mamba_conv_bias")
    return {
        "kind": "mamba2",
        "heads": keys.count("mamba_n_heads"),
        "key_heads": keys.count("mamba_n_groups", default=1),
        "key_dim": keys.count("mamba_d_state"),
        "value_dim": keys.count("mamba_d_head"),
        "conv_kernel": keys.count("mamba_d_conv", default=4),
    }


def _granite_hybrid(keys: Keys) -> list[ImportedLayer]:
    """Mamba-2 or attention, each with experts or one network behind."""
    layers = keys.need("layers")
    known = ("linear_attention", "mamba", "full_attention", "attention")
    kinds = layer_kinds(keys, layers, keys.texts("layers_block_type") or ["mamba"] * layers, known, "layer_types")
    heads = keys.count("mamba_n_heads", default=128)
    inner = keys.count("mamba_expand", default=2) * keys.need("hidden")
    width = inner // heads if keys.holds(str, "mamba_d_head") else keys.count("mamba_d_head", default=inner // heads)
    mixer = {
        "kind": "mamba2",
        "heads": heads,
        "key_heads": keys.count("mamba_n_groups", default=1),
        "key_dim": keys.count("mamba_d_state", default=256),
        "value_dim": width,
        "conv_kernel": keys.count("mamba_d_conv", default=4),
    }
    full, linear = ("full", heads_of(keys)), ("mamba", {"linear_mixer": mixer})
    shared = keys.known("shared_hidden")
    network = expert_network(keys, keys.known("ffn_hidden"), shared) if keys.known("experts") else dense_network(shared)
    keys.seen(*ALIASES["ffn_hidden"], "mamba_chunk_size", "mamba_conv_bias", *_MULTIPLIERS)
    return paired_layers(
        [full if "attention" in kind and "linear" not in kind else linear for kind in kinds], [network] * layers
    )


_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _jamba(keys: Keys) -> list[ImportedLayer]:
    """Attention in one of eight layers, experts in every other; Mamba's first form elsewhere."""
    layers, inner = keys.need("layers"), keys.count("mamba_expand", default=2) * keys.need("hidden")
    mixer = {
        "kind": "mamba2",
        "heads": max(1, inner // _CHANNELS),
        "key_heads": 1,
        "key_dim": keys.count("mamba_d_state", default=16),
        "value_dim": min(inner, _CHANNELS),
        "conv_kernel": keys.count("mamba_d_conv", default=4),
    }
    every, at = keys.count("attn_layer_period", default=8), keys.whole("attn_layer_offset", default=4)
    experts_every, experts_at = (
        keys.count("expert_layer_period", default=2),
        keys.whole("expert_layer_offset", default=1),
    )
    full, linear = ("full", heads_of(keys)), ("mamba", {"linear_mixer": mixer})
    experts, dense = expert_network(keys, keys.known("ffn_hidden")), dense_network(keys.known("ffn_hidden"))
    keys.seen("mamba_dt_rank", "mamba_conv_bias")
    return paired_layers(
        [full if layer % every == at else linear for layer in range(layers)],
        [experts if layer % experts_every == experts_at else dense for layer in range(layers)],
    )


_CHANNELS = 64
"""Channels of a head that stands for as many of Mamba's first form. [assumed]"""

HYBRID_FAMILIES: Mapping[str, Callable[[Keys], list[ImportedLayer]]] = {
    "deepseek_v4": _deepseek_v4,
    "deepseek_ref": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "bailing_hybrid": _bailing_hybrid,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
}
"""These families by `model_type`."""
