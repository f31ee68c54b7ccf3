"""What the layers of each family of models are: attention and feed-forward network, in a model file's words.

`intermediate_size` is the width of an expert in some families and of the dense layers in others, and
`num_key_value_heads` is not the cache where attention goes over latents: each family says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sim.config.fields import MOST_LAYERS
from sim.config.huggingface.hybrid_families import HYBRID_FAMILIES
from sim.config.huggingface.keys import ALIASES, CannotImport, Keys
from sim.config.huggingface.parts import (
    ConfigTable,
    ImportedLayer,
    counted_shared,
    dense_first,
    dense_network,
    expert_network,
    grouped_by_kind,
    head_dim_of,
    heads_of,
    latent_of,
    layer_kinds,
    paired_layers,
    per_layer,
    windowed,
)


def _dense_family(
    keys: Keys, *, switched_on: bool = True, full_first: int = 0, gated: bool = True
) -> list[ImportedLayer]:
    """Mistral names a window for all layers."""
    layers = keys.need("layers")
    attention = grouped_by_kind(keys, layers)
    switched_on = keys.flag("use_sliding_window", default=switched_on)
    if not keys.texts("layer_types") and keys.whole("sliding_window") and switched_on:
        full, first = heads_of(keys), keys.whole("max_window_layers", default=full_first)
        window = ("window", windowed(keys, full))
        attention = [("full", full) if layer < first else window for layer in range(layers)]
    return paired_layers(attention, [dense_network(keys.known("ffn_hidden"), gated=gated)] * layers)


def _ungated(keys: Keys) -> list[ImportedLayer]:
    """Networks of two matrices, whose activation multiplies nothing."""
    return _dense_family(keys, gated=False)


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
    return paired_layers(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _mixtral(keys: Keys) -> list[ImportedLayer]:
    """`intermediate_size` is an expert's."""
    layers = keys.need("layers")
    experts = expert_network(keys, keys.known("ffn_hidden"), keys.known("shared_hidden"))
    full = heads_of(keys)
    if keys.texts("layer_types"):
        return paired_layers(grouped_by_kind(keys, layers), [experts] * layers)
    attention = [("window", windowed(keys, full))] if keys.whole("sliding_window") else [("full", full)]
    return paired_layers(attention * layers, [experts] * layers)


def _minimax_m2(keys: Keys) -> list[ImportedLayer]:
    if set(keys.wholes("attn_type_list", default=[1])) != {1}:
        raise CannotImport("layers of lightning attention (attn_type_list), whose state no model file can say")
    return _mixtral(keys)


def _gpt_oss(keys: Keys) -> list[ImportedLayer]:
    layers = keys.need("layers")
    return paired_layers(grouped_by_kind(keys, layers), [expert_network(keys, keys.known("ffn_hidden"))] * layers)


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
    return paired_layers([("full", heads_of(keys))] * layers, _qwen_networks(keys, layers))


def _qwen3_next(keys: Keys) -> list[ImportedLayer]:
    """Three of four layers keep a state (Gated DeltaNet), the fourth has gated attention."""
    layers, every = keys.need("layers"), keys.count("full_attention_interval", default=4)
    known = ("linear_attention", "full_attention")
    usual = [known[(layer + 1) % every == 0] for layer in range(layers)]
    kinds = layer_kinds(keys, layers, usual, known, "layer_types")
    tables = {
        "full_attention": ("full", {**heads_of(keys), "output_gate": keys.flag("attn_output_gate", default=True)}),
        "linear_attention": ("linear", {"linear_mixer": _gated_delta(keys)}),
    }
    attention = [tables[kind] for kind in kinds]
    if keys.known("experts"):
        return paired_layers(attention, _qwen_networks(keys, layers))
    return paired_layers(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _olmo_hybrid(keys: Keys) -> list[ImportedLayer]:
    """Three of four layers keep a state (Gated DeltaNet), the fourth has attention."""
    layers, known = keys.need("layers"), ("linear_attention", "full_attention")
    tables = {
        "full_attention": ("full", heads_of(keys)),
        "linear_attention": ("linear", {"linear_mixer": _gated_delta(keys)}),
    }
    usual = [known[(layer + 1) % 4 == 0] for layer in range(layers)]
    kinds = layer_kinds(keys, layers, usual, known, "layer_types")
    keys.seen(*(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")))
    keys.seen("linear_allow_neg_eigval")
    return paired_layers([tables[kind] for kind in kinds], [dense_network(keys.known("ffn_hidden"))] * layers)


def _gated_delta(keys: Keys) -> ConfigTable:
    return {
        "kind": "gated_delta",
        "heads": keys.count("linear_num_value_heads"),
        "key_heads": keys.count("linear_num_key_heads"),
        "key_dim": keys.count("linear_key_head_dim"),
        "value_dim": keys.count("linear_value_head_dim"),
        "conv_kernel": keys.count("linear_conv_kernel_dim", default=4),
    }


def _deepseek(keys: Keys, *, gated: bool = False) -> list[ImportedLayer]:
    """Latent attention; `intermediate_size` is that of the first layers, which have no experts."""
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    latent = latent_of(keys, gated=gated)
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
        kinds = layer_kinds(keys, layers, (), ("full", "shared"), "indexer_types")
        attention = [("latent", latent) if kind == "full" else ("latent_shared", follows) for kind in kinds]
    experts = expert_network(keys, width, counted_shared(keys, width)) if keys.known("experts") else None
    dense = dense_network(keys.known("ffn_hidden"))
    return paired_layers(attention, [experts if has and experts else dense for has in dense_first(keys, layers)])


def _hy_v4(keys: Keys) -> list[ImportedLayer]:
    """DeepSeek's layers with a gate of the attention's output."""
    keys.seen("hc_magnitude", "learnable_sink_init")
    return _deepseek(keys, gated=True)


def _glm4_moe(keys: Keys) -> list[ImportedLayer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    where, experts = dense_first(keys, layers), expert_network(keys, width, counted_shared(keys, width))
    dense = experts if all(where) else dense_network(keys.known("ffn_hidden"))  # no width, where no layer is dense
    return paired_layers([("full", heads_of(keys))] * layers, [experts if has else dense for has in where])


def _afmoe(keys: Keys) -> list[ImportedLayer]:
    """Gated attention, full in every so many-th layer; the first layers are dense."""
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    attention = _every_nth_full(keys, layers, keys.count("global_attn_every_n_layers", default=4))
    gated = [(label, {**table, "output_gate": True}) for label, table in attention]
    experts, dense = expert_network(keys, width, counted_shared(keys, width)), dense_network(keys.known("ffn_hidden"))
    first = keys.whole("num_dense_layers", default=1)
    keys.seen("route_scale", "mup_enabled")
    return paired_layers(gated, [dense] * first + [experts] * (layers - first))


def _cohere2_moe(keys: Keys) -> list[ImportedLayer]:
    """`intermediate_size` is an expert's; dense layers at the front may have a width of their own."""
    layers, width = keys.need("layers"), keys.known("ffn_hidden")
    attention = _every_nth_full(keys, layers, keys.count("sliding_window_pattern", default=4))
    experts = expert_network(keys, width, counted_shared(keys, width))
    dense = dense_network(keys.whole("prefix_dense_intermediate_size", default=width))
    keys.seen("shared_expert_combination_strategy", "expert_selection_fn", "prefix_dense_sliding_window_pattern")
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _mellum(keys: Keys) -> list[ImportedLayer]:
    layers = keys.need("layers")
    experts = expert_network(keys, keys.known("expert_hidden"))
    where = dense_first(keys, layers)
    dense = experts if all(where) else dense_network(keys.known("ffn_hidden"))
    keys.seen("intermediate_size", "sliding_window")  # of layers that it may not have
    return paired_layers(grouped_by_kind(keys, layers), [experts if has else dense for has in where])


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
    return paired_layers(attention, networks)


def _minimax_m3(keys: Keys) -> list[ImportedLayer]:
    layers, width, sparse = keys.need("layers"), keys.known("expert_hidden"), keys.inside("sparse_attention_config")
    full = heads_of(keys)
    if kinds := keys.texts("layer_types"):  # as transformers 5 writes it
        sparse, where = keys, [kind != "full_attention" for kind in per_layer(kinds, layers, "layer_types")]
        names = ("index_topk_blocks", "index_block_size", "index_n_heads", "index_head_dim")
    else:
        stated = sparse.wholes("sparse_attention_freq", default=[0] * layers)
        where = [bool(each) for each in per_layer(stated, layers, "sparse_attention_freq")]
        names = ("sparse_topk_blocks", "sparse_block_size", "sparse_num_index_heads", "sparse_index_dim")
    attention = [("full", full)] * layers
    keys.seen("index_local_blocks", *names)
    if any(where):
        topk, block, heads, head_dim = (sparse.count(name) for name in names)
        blocks = {"heads": heads, "head_dim": head_dim, "topk": topk * block, "block": block}
        chosen = ("sparse", {**full, "indexer": blocks})
        attention = [chosen if each else ("full", full) for each in where]
    experts = expert_network(keys, width or keys.known("ffn_hidden"), keys.known("shared_hidden"))
    keys.seen("intermediate_size", "n_shared_experts")  # the same width again, and its one shared expert
    dense = dense_network(keys.whole("dense_intermediate_size"))
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _dbrx(keys: Keys) -> list[ImportedLayer]:
    layers, attention, network = keys.need("layers"), keys.inside("attn_config"), keys.inside("ffn_config")
    heads = keys.need("heads")
    table = {"heads": heads, "kv_heads": attention.need("kv_heads"), "head_dim": head_dim_of(keys, heads)}
    return paired_layers([("full", table)] * layers, [expert_network(network, network.known("ffn_hidden"))] * layers)


def _grok(keys: Keys) -> list[ImportedLayer]:
    """Grok-2 has a dense network beside the experts in every layer (`residual_moe`)."""
    layers, width = keys.need("layers"), keys.known("ffn_hidden")
    beside = width if keys.flag("residual_moe", default=False) else 0
    experts = expert_network(keys, keys.known("expert_hidden", default=width), beside)
    return paired_layers([("full", heads_of(keys))] * layers, [experts] * layers)


def _mimo_v2(keys: Keys) -> list[ImportedLayer]:
    layers, width = keys.need("layers"), keys.known("expert_hidden")
    pattern = per_layer(keys.wholes("hybrid_layer_pattern", default=[0] * layers), layers, "hybrid_layer_pattern")
    own = heads_of(keys)
    if kinds := keys.texts("layer_types"):  # as transformers 5 writes it, with twice the KV heads under a window
        pattern = [kind == "sliding_attention" for kind in per_layer(kinds, layers, "layer_types")]
        narrow_heads = {**own, "kv_heads": 2 * own["kv_heads"]}
    else:
        narrow_heads = heads_of(keys, "swa_")
    window, full = ("window", windowed(keys, narrow_heads)), ("full", own)
    attention = [window if narrow else full for narrow in pattern]
    experts, dense = expert_network(keys, width), dense_network(keys.known("ffn_hidden"))
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _gemma2(keys: Keys) -> list[ImportedLayer]:
    """Every other layer has a window, from the first on."""
    layers, full = keys.need("layers"), heads_of(keys)
    attention = (
        grouped_by_kind(keys, layers)
        if keys.texts("layer_types")
        else [("full", full) if layer % 2 else ("window", windowed(keys, full)) for layer in range(layers)]
    )
    return paired_layers(attention, [dense_network(keys.known("ffn_hidden"))] * layers)


def _every_nth_full(keys: Keys, layers: int, every: int) -> list[tuple[str, ConfigTable]]:
    """As `layer_types` says, or a window in all layers but every so many-th."""
    if keys.texts("layer_types") or not every or not keys.whole("sliding_window"):
        return grouped_by_kind(keys, layers)
    full = heads_of(keys)
    window = ("window", windowed(keys, full))
    return [window if (layer + 1) % every else ("full", full) for layer in range(layers)]


def _cohere2(keys: Keys) -> list[ImportedLayer]:
    layers = keys.need("layers")
    every = keys.count("sliding_window_pattern", "layer_switch", default=4)
    keys.seen("order_of_interleaved_layers")
    return paired_layers(_every_nth_full(keys, layers, every), [dense_network(keys.known("ffn_hidden"))] * layers)


def _exaone4(keys: Keys) -> list[ImportedLayer]:
    """`sliding_window_pattern` is a number or letters, L for a window and G for none."""
    layers, pattern = keys.need("layers"), keys.holds(str, "sliding_window_pattern")
    every = len(keys.text("sliding_window_pattern")) if pattern else keys.whole("sliding_window_pattern", default=4)
    attention = _every_nth_full(keys, layers, every)
    dense, width = dense_network(keys.known("ffn_hidden")), keys.known("expert_hidden")
    if not keys.known("experts"):
        return paired_layers(attention, [dense] * layers)
    experts = expert_network(keys, width, counted_shared(keys, width))
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _nemotron_nas(keys: Keys) -> list[ImportedLayer]:
    """Blocks of their own widths, some without attention. Source: DeciLM's configuration and modelling code."""
    layers, hidden, heads = keys.need("layers"), keys.need("hidden"), keys.need("heads")
    blocks = keys.lists_of_tables("block_configs")
    keys.seen(*ALIASES["ffn_hidden"], *ALIASES["kv_heads"])
    found: list[ImportedLayer] = []
    for block in per_layer(blocks, layers, "block_configs"):
        attention, network = block.inside("attention"), block.inside("ffn")
        if any(part.flag("replace_with_linear", default=False) for part in (attention, network)):
            raise CannotImport("block_configs: replace_with_linear, which no model file can say")
        width = int(2 * network.number("ffn_mult") * hidden / 3) if not network.flag("no_op", default=False) else 0
        label, own = dense_network(-(-width // 256) * 256) if width else ("", {})
        if attention.flag("no_op", default=False):
            found.append(ImportedLayer(label, {}, {"only": "feed_forward", **own}))
            continue
        kv_heads = heads // attention.count("n_heads_in_group")
        table: ConfigTable = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim_of(keys, heads)}
        if not width:
            table["only"] = "mixer"
        found.append(ImportedLayer(f"full_{label}".rstrip("_"), table, own))
    return found


def _gemma4(keys: Keys) -> list[ImportedLayer]:
    """Global layers have wider heads, fewer of keys, which are the values too; experts stand beside a dense network.

    Keys that are values are loaded, computed and cached as both. Source: vLLM 0.33, gemma4.py.
    """
    layers, own = keys.need("layers"), heads_of(keys)
    if keys.whole("hidden_size_per_layer_input") or keys.whole("num_kv_shared_layers"):
        raise CannotImport("layers that share their keys, or embeddings of layers' own, which no model file can say")
    kinds = layer_kinds(keys, layers, (), ("full_attention", "sliding_attention"), "layer_types")
    full = {**own, "head_dim": keys.count("global_head_dim", default=own["head_dim"])}
    full["kv_heads"] = keys.count("num_global_key_value_heads", default=own["kv_heads"])
    for table in keys.inside("per_layer_config").tables():  # transformers 5: the same of every global layer
        full = heads_of(Keys({**keys.stated(), **table.stated()}))
    tables = {"full_attention": ("full", full), "sliding_attention": ("window", windowed(keys, own))}
    dense = dense_network(keys.known("ffn_hidden"))
    if keys.flag("enable_moe_block", default=False):
        dense = expert_network(keys, keys.known("expert_hidden"), keys.known("ffn_hidden"))
    keys.seen("attention_k_eq_v", "use_bidirectional_attention", "vocab_size_per_layer_input")
    return paired_layers([tables[kind] for kind in kinds], [dense] * layers)


def _step(keys: Keys) -> list[ImportedLayer]:
    """Layers with a window have more heads. Lists go on over the layers of multi-token prediction.

    A checkpoint that leaves the heads of these layers out has 96. [published] stepfun-ai/Step-3.5-Flash
    """
    layers, full = keys.need("layers"), heads_of(keys)
    other = keys.inside("attention_other_setting")
    heads = keys.whole("num_sliding_attention_heads") or other.whole("num_attention_heads", default=96)
    kinds = layer_kinds(keys, layers, (), ("full_attention", "sliding_attention"), "layer_types")
    window = windowed(keys, {**full, "heads": heads})
    attention = [("window", window) if kind == "sliding_attention" else ("full", full) for kind in kinds]
    experts = expert_network(keys, keys.known("expert_hidden"), keys.known("shared_hidden"))
    dense = dense_network(keys.known("ffn_hidden"))
    enumerated = keys.text("moe_layers_enum", longest=20_000) if keys.holds(str, "moe_layers_enum") else ""
    stated = {each.strip() for each in enumerated.split(",")}
    where = {layer for layer in range(layers) if str(layer) in stated} if enumerated else set(range(3, layers))
    if keys.texts("mlp_layer_types"):
        where = {layer for layer, sparse in enumerate(dense_first(keys, layers)) if sparse}
    keys.seen("first_k_dense_replace", "n_shared_experts", *_CLAMPS)
    return paired_layers(attention, [experts if layer in where else dense for layer in range(layers)])


_CLAMPS = ("swiglu_limits", "swiglu_limits_shared", "use_moe_router_bias", "moe_router_scaling_factor")


def _laguna(keys: Keys) -> list[ImportedLayer]:
    """Each layer has its own number of heads; a gate per head is left out: it is as narrow as there are heads."""
    layers, full = keys.need("layers"), heads_of(keys)
    heads = per_layer(keys.wholes("num_attention_heads_per_layer", default=[full["heads"]] * layers), layers, "heads")
    kinds = layer_kinds(keys, layers, (), ("full_attention", "sliding_attention"), "layer_types")
    attention: list[tuple[str, ConfigTable]] = []
    for kind, count in zip(kinds, heads, strict=True):
        own = {**full, "heads": count}
        attention.append(("full", own) if kind == "full_attention" else ("window", windowed(keys, own)))
    keys.seen("gating", "gating_types", "decoder_sparse_step", "mlp_only_layers", "moe_routed_scaling_factor")
    experts = expert_network(keys, keys.known("expert_hidden"), keys.known("shared_hidden"))
    dense = dense_network(keys.known("ffn_hidden"))
    return paired_layers(attention, [experts if has else dense for has in dense_first(keys, layers)])


def _hunyuan(keys: Keys) -> list[ImportedLayer]:
    """Numbers of experts and their widths stand once per layer, or once for all."""
    layers, full = keys.need("layers"), heads_of(keys)
    width = keys.first_whole("moe_intermediate_size", default=keys.known("ffn_hidden"))
    shared = keys.first_whole("num_shared_expert", default=1)
    table: ConfigTable = {"ffn_hidden": width, "experts": keys.need("experts"), "gated": True}
    table |= {"experts_per_token": keys.first_whole("moe_topk", default=1), "shared_ffn_hidden": shared * width}
    if keys.flag("use_cla", default=False):
        raise CannotImport("layers that share another's keys (use_cla), which no model file can say")
    keys.seen("use_mixed_mlp_moe", "cla_share_factor")
    return paired_layers([("full", full)] * layers, [("experts", table)] * layers)


def _ernie(keys: Keys) -> list[ImportedLayer]:
    """Experts from one layer to another, in every so many-th."""
    layers, width = keys.need("layers"), keys.first_whole("moe_intermediate_size", default=0)
    first, every = keys.first_whole("moe_layer_start_index", default=1), keys.count("moe_layer_interval", default=1)
    keys.seen("moe_layer_end_index")  # the last
    experts = expert_network(keys, width, keys.whole("moe_num_shared_experts") * width)
    dense = dense_network(keys.known("ffn_hidden"))
    networks = [experts if layer >= first and (layer + 1) % every == 0 else dense for layer in range(layers)]
    return paired_layers([("full", heads_of(keys))] * layers, networks)


def _longcat(keys: Keys) -> list[ImportedLayer]:
    """A layer has two of attention and two dense networks, and experts beside the first, described as two layers.

    Of the experts that a token picks those that are the identity cost nothing: counted are the others, by their share.
    Source: vLLM 0.33, longcat_flash.py, which runs them in order.
    """
    most = MOST_LAYERS // 2
    layers = keys.count("num_layers", default=keys.known("layers") // 2 or None, most=most)
    width = keys.known("ffn_hidden")
    routed, none = keys.need("experts"), keys.whole("zero_expert_num")
    experts = expert_network(keys, keys.count("expert_ffn_hidden_size"), width)[1]
    experts["experts_per_token"] = max(1, round(experts["experts_per_token"] * routed / (routed + none)))
    keys.seen("num_hidden_layers", "zero_expert_type", "router_bias", "mla_scale_q_lora", "mla_scale_kv_lora")
    pair = [("experts", experts), dense_network(width)]
    return paired_layers([("latent", latent_of(keys))] * 2 * layers, pair * layers)


_LIKE_LLAMA = (
    "cohere", "ernie4_5", "exaone", "gemma", "glm", "glm4", "granite", "hunyuan_v1_dense", "ministral", "ministral3",
    "olmo", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3", "stablelm", "internlm2", "internlm3", "cwm",
    "granite_swa", "helium", "hyperclovax", "iquestcoder", "bitnet",
)  # fmt: skip
"""Dense layers of grouped attention, with windows where `layer_types` or `sliding_window` say so."""

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
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
    "llama4": _llama4,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "dbrx": _dbrx,
    "grok": _grok,
    "mimo_v2_flash": _mimo_v2,
    **dict.fromkeys(_LIKE_LLAMA, _dense_family),
    "gemma2": _gemma2,
    "vaultgemma": _gemma2,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "exaone_moe": _exaone4,
    **dict.fromkeys(("nemotron", "apertus", "apertus1p5_text", "arcee", "jais2", "phi", "starcoder2"), _ungated),
    "nemotron-nas": _nemotron_nas,
    "gemma4_text": _gemma4,
    "gemma4": _gemma4,
    "gemma4_unified_text": _gemma4,
    "step3p5": _step,
    "step3p7": _step,
    "phimoe": _mixtral,
    "olmoe": _mixtral,
    "granitemoe": _mixtral,
    **dict.fromkeys(("granitemoeshared", "granitemoe_swa", "flex_olmo"), _mixtral),
    "hunyuan_v1_moe": _hunyuan,
    "hy_v3": _glm4_moe,
    "hy_v4": _hy_v4,
    "dots1": _glm4_moe,
    "bailing_moe": _glm4_moe,
    "bailing_moe_v2": _glm4_moe,
    "sarvam_moe": _glm4_moe,
    "solar_open": _glm4_moe,
    "afmoe": _afmoe,
    "cohere2_moe": _cohere2_moe,
    "mellum": _mellum,
    "olmo_hybrid": _olmo_hybrid,
    "ernie4_5_moe": _ernie,
    "ernie4_5_vl_moe_text": _ernie,
    **dict.fromkeys(("glm4_moe_lite", "axk1", "sarvam_mla", "youtu", "minicpm3"), _deepseek),
    "longcat_flash": _longcat,
    "laguna": _laguna,
    **HYBRID_FAMILIES,
}
"""Families by `model_type`."""

UNSAID: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    },
}
"""What a family's configurations may leave to transformers. Source: its configuration_gemma3.py, read 2026-11-22."""

BY_ARCHITECTURE: Mapping[str, str] = {"Grok1ForCausalLM": "grok", "Grok1ModelForCausalLM": "grok"}
"""Families whose `model_type` names another thing, by an entry of `architectures`."""

APPROXIMATED: Mapping[str, str] = {
    "gemma4_text": "keys of global layers that are the values too are counted, computed and cached as both",
    "step3p5": "a gate per head is left out",
    "step3p7": "a gate per head is left out",
    "laguna": "a gate per head is left out",
    "longcat_flash": "of the experts that a token picks, those that do nothing are left out by their share",
    "falcon_h1": "attention and state of a layer run one after the other, with an all-reduce each",
    "jamba": "Mamba's first form is priced as its second, with a decay per 64 channels",
    "deepseek_v4": "layers routed by a table are priced like the others; drafts have the last layer's attention",
    "deepseek_ref": "layers routed by a table are priced like the others; drafts have the last layer's attention",
    "hy_v4": "its streams are mixed as DeepSeek V4's, whose mixing matrix it leaves out",
    "kimi_linear": "latent attention without rotary positions is priced as with them",
    "minimax_m3": "index heads are whole on every GPU; engines cut them over as many as there are",
    "ernie4_5_vl_moe_text": "experts that see are left out",
}
"""What of a family a model file says otherwise than its code, for the answer."""

REFUSED: Mapping[str, str] = {
    "minimax": "layers of lightning attention",
    "minimax_text_01": "layers of lightning attention",
    "longcat_flash_ngram": "tables of n-grams beside the embedding",
    "qwen4_exp_text": "tables of n-grams beside the embedding",
    "gemma3n_text": "embeddings of layers' own and keys that layers share",
    "mamba": "no networks beside its states",
    "mamba2": "no networks beside its states",
    "falcon_mamba": "no networks beside its states",
    "zamba2": "attention that layers share",
    "lfm2": "layers of short convolutions",
    "lfm2_moe": "layers of short convolutions",
    "recurrent_gemma": "layers of gated linear recurrent units",
    "rwkv": "layers of RWKV's own attention",
    "axk2": "norms with gates of their own",
    "deepseek_v41": "keys that layers share (kv_source_layers) and tables of n-grams (engram_layer_ids)",
}
"""Families that are known and that no model file can express, with the reason."""
