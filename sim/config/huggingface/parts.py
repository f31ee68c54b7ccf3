"""What layers of many families share, in a model file's words: attention, networks, and which layer has which."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from sim.config.huggingface.keys import ALIASES, CannotImport, Keys

ConfigTable = dict[str, Any]
Value = TypeVar("Value")


class ImportedLayer(NamedTuple):
    """One layer, as keys of `[[groups]]`; `label` is a name for layers like it."""

    label: str
    attention: ConfigTable
    feed_forward: ConfigTable


def paired_layers(
    attention: list[tuple[str, ConfigTable]], feed_forward: list[tuple[str, ConfigTable]]
) -> list[ImportedLayer]:
    """Every layer's mixer with its network."""
    pairs = zip(attention, feed_forward, strict=True)
    return [ImportedLayer(f"{name}_{kind}", table, network) for (name, table), (kind, network) in pairs]


# --- attention ----------------------------------------------------------------------------------------


def heads_of(keys: Keys, prefix: str = "") -> ConfigTable:
    """Grouped-query attention; of layers with heads of their own, keys begin with a prefix."""
    names = {"heads": ("num_attention_heads",), "kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",)}
    if not prefix:
        names = {what: ALIASES[what] for what in names}
    heads = keys.count(*(prefix + name for name in names["heads"]))
    head_dim = keys.whole(*(prefix + name for name in names["head_dim"])) or head_dim_of(keys, heads)
    kv_heads = keys.count(*(prefix + name for name in names["kv_heads"]), default=heads)
    value_dim = keys.whole(prefix + "v_head_dim", default=head_dim)
    table: ConfigTable = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return {**table, "value_dim": value_dim} if value_dim not in (0, head_dim) else table


def head_dim_of(keys: Keys, heads: int) -> int:
    """The width of a head where it is not stated: the heads share the hidden width."""
    hidden = keys.need("hidden")
    if hidden < heads:
        raise CannotImport(f"{heads} attention heads share a hidden width of {hidden}: expected a head_dim")
    return hidden // heads


def latent_of(keys: Keys, *, gated: bool = False) -> ConfigTable:
    """Attention over latents, with a gate of its output or without."""
    latent: ConfigTable = {
        "query_rank": keys.whole("q_lora_rank"),
        "kv_rank": keys.count("kv_lora_rank"),
        "rope_dim": keys.count("qk_rope_head_dim"),
        "value_dim": keys.count("v_head_dim"),
    }
    if gated:
        latent["output_gate"] = True
    return {"heads": keys.need("heads"), "head_dim": keys.count("qk_nope_head_dim"), "latent_attention": latent}


def windowed(keys: Keys, full: ConfigTable, key: str = "sliding_window") -> ConfigTable:
    """The same attention within the window that a key says. Raises: CannotImport."""
    window = keys.whole(key)
    if not window:
        raise CannotImport(f"layers with a window, and no {key}")
    return {**full, "window": window}


def layer_kinds(keys: Keys, layers: int, default: Sequence[str], known: Collection[str], key: str) -> Sequence[str]:
    """Of every layer one of the kinds that are known."""
    kinds = per_layer(keys.texts(key) or default, layers, key)
    if unknown := sorted(set(kinds) - set(known)):
        raise CannotImport(f"{key} names {reprlib.repr(unknown[0])}, which this family is not known to have")
    return kinds


def per_layer(values: Sequence[Value], layers: int, key: str) -> Sequence[Value]:
    """As many values of a list as there are layers. Raises: CannotImport."""
    if len(values) < layers:
        raise CannotImport(f"{key} has {len(values)} entries for {layers} layers")
    return values[:layers]


def grouped_by_kind(keys: Keys, layers: int) -> list[tuple[str, ConfigTable]]:
    """Grouped-query attention of every layer, full or with a window, as `layer_types` says."""
    full = heads_of(keys)
    known = ("full_attention", "sliding_attention")
    kinds = layer_kinds(keys, layers, known[:1] * layers, known, "layer_types")
    tables = {"full_attention": ("full", full)}
    if "sliding_attention" in kinds:
        tables["sliding_attention"] = ("window", windowed(keys, full))
    return [tables[kind] for kind in kinds]


# --- feed-forward networks ----------------------------------------------------------------------------


def dense_network(width: int, *, gated: bool = True) -> tuple[str, ConfigTable]:
    """One network for all tokens, and its label. Raises: CannotImport."""
    if not width:
        raise CannotImport("dense layers, and no intermediate_size")
    return "dense", {"ffn_hidden": width, "experts": 1, "experts_per_token": 1, "gated": gated}


def expert_network(
    keys: Keys, width: int, shared: int = 0, *, gated: bool = True, latent: str = ""
) -> tuple[str, ConfigTable]:
    """Experts of a width beside shared ones, and their label; `latent` is a key. Raises: CannotImport."""
    if not width:
        raise CannotImport("experts, and no moe_intermediate_size")
    table: ConfigTable = {"ffn_hidden": width, "experts": keys.need("experts"), "gated": gated}
    table["experts_per_token"] = keys.need("experts_per_token")
    if shared:
        table["shared_ffn_hidden"] = shared
    if latent and keys.whole(latent) not in (0, keys.need("hidden")):
        table["expert_latent"] = keys.whole(latent)
    return "experts", table


def counted_shared(keys: Keys, width: int) -> int:
    """Width of `n_shared_experts` together: each is as wide as a routed one."""
    return keys.known("shared_experts") * width


def dense_first(keys: Keys, layers: int) -> list[bool]:
    """Whether each layer has experts: DeepSeek's keys, and lists of them."""
    if keys.texts("mlp_layer_types"):
        keys.seen("moe_layer_freq", "first_k_dense_replace")  # the same again
        return [kind == "sparse" for kind in layer_kinds(keys, layers, (), ("dense", "sparse"), "mlp_layer_types")]
    if keys.holds(list, "moe_layer_freq"):
        keys.seen("first_k_dense_replace")
        return [bool(each) for each in per_layer(keys.wholes("moe_layer_freq"), layers, "moe_layer_freq")]
    frequency, first = keys.count("moe_layer_freq", default=1), keys.whole("first_k_dense_replace")
    return [layer >= first and layer % frequency == 0 for layer in range(layers)]
