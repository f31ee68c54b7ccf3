"""Configurations of every family with one value replaced by another: a model, or one line that says what is wrong.

A few in the default run, many by `make fuzz`.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.config.catalog import imported_model, load_model
from sim.config.files import CatalogError
from sim.config.huggingface.families import IMPORTED_FAMILIES

LONG = 10 * int(os.environ.get("RAYSEARCH_FUZZ", "0"))
"""Of the long form: inputs of all families together."""
Config = dict[str, Any]

WRONG: list[Any] = [
    *(None, True, False, 0, 1, 2, 7, -1, -(10**9), 4096, 10**7, 10**9, 10**19, 10**300),
    *(1.5, 1e308, float("nan"), float("inf"), "", "x", "128", "²,1,2", "9" * 5000, "\n\x1b[2J\udcff", "M" * 5000),
    *([], {}, [1], [None] * 100, [0] * 5000, [-1] * 100, ["full_attention"] * 5000, ["\n"] * 100, [[[[[[]]]]]]),
    *({"a": 1}, {"a": {"a": {"a": [1]}}}, {"\n": None}),
]
USUAL: Config = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "architectures": ["ForCausalLM"],
}
WINDOWS: Config = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: Config = EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}
LATENT: Config = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA: Config = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 4,
    "attn_output_gate": True,
}
INDEXED: Config = {
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "indexer_types": ["full", "shared"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
SPARSE: Config = {
    "dense_intermediate_size": 128,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_topk_blocks": 4,
        "sparse_block_size": 16,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 8,
    },
}
MAMBA: Config = {
    "hybrid_override_pattern": "M-*E",
    "layers_block_type": ["mamba", "mlp", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}
FP8: Config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
INT4: Config = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"format": "pack", "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
    "ignore": ["re:.*self_attn.*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
MIXED: Config = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.0": {"quant_algo": "NVFP4"}},
    "kv_cache_quant_algo": "FP8",
}
MIXTRAL: Config = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
QWEN: Config = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [0], "shared_expert_intermediate_size": 32}

BLOCK: Config = {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 2.625, "no_op": False}}

CONFIGURATIONS: list[Config] = [
    USUAL | {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}},
    USUAL | WINDOWS | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
    USUAL | {"model_type": "mistral", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
    {"model_type": "gemma3", "text_config": USUAL | {"model_type": "gemma3_text", "sliding_window": 32}},
    USUAL | MIXTRAL | {"model_type": "mixtral", "sliding_window": 32, "head_dim": 8},
    USUAL | MIXTRAL | {"model_type": "minimax_m2", "attn_type_list": [1] * 4, "quantization_config": FP8},
    USUAL | WINDOWS | MIXTRAL | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    USUAL | QWEN | {"model_type": "qwen3_moe", "quantization_config": MIXED},
    USUAL | QWEN | DELTA | {"model_type": "qwen3_next"},
    {"model_type": "qwen3_5_moe", "text_config": USUAL | QWEN | DELTA | {"model_type": "qwen3_5_moe_text"}},
    USUAL | LATENT | SHARED | {"model_type": "deepseek_v3", "quantization_config": FP8, "num_nextn_predict_layers": 1},
    USUAL | LATENT | SHARED | {"model_type": "kimi_k2", "quantization_config": INT4, "expert_dtype": "fp4"},
    USUAL | LATENT | SHARED | INDEXED | {"model_type": "glm_moe_dsa"},
    USUAL
    | LATENT
    | SHARED
    | {"model_type": "kimi_linear", "routed_expert_hidden_size": 64}
    | {"linear_attn_config": {"num_heads": 8, "head_dim": 8, "full_attn_layers": [4], "short_conv_kernel_size": 4}},
    USUAL | SHARED | {"model_type": "glm4_moe"},
    USUAL
    | MIXTRAL
    | {"model_type": "llama4_text", "attention_chunk_size": 32, "intermediate_size_mlp": 64}
    | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 4, "no_rope_layers": [], "moe_layers": []},
    USUAL | SHARED | SPARSE | {"model_type": "minimax_m3", "moe_layer_freq": [0, 1, 1, 1]},
    {"model_type": "dbrx", "d_model": 64, "n_heads": 8, "n_layers": 4, "vocab_size": 100}
    | {"attn_config": {"kv_n_heads": 4}, "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2}},
    USUAL | EXPERTS | {"architectures": ["Grok1ForCausalLM"], "residual_moe": True},
    USUAL
    | EXPERTS
    | {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 32}
    | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 4},
    USUAL | EXPERTS | MAMBA | {"model_type": "nemotron_h", "moe_latent_size": None},
    USUAL | {"model_type": "gemma2", "sliding_window": 32},
    USUAL | {"model_type": "cohere2", "sliding_window": 32, "sliding_window_pattern": 4},
    USUAL | SHARED | {"model_type": "exaone_moe", "sliding_window": 32, "sliding_window_pattern": "LLLG"},
    USUAL | {"model_type": "nemotron"},
    USUAL | {"model_type": "nemotron-nas", "block_configs": [BLOCK] * 3 + [BLOCK | {"attention": {"no_op": True}}]},
    USUAL | WINDOWS | EXPERTS | {"model_type": "gemma4_text", "global_head_dim": 16, "enable_moe_block": True},
    USUAL
    | WINDOWS
    | EXPERTS
    | {"model_type": "step3p5", "share_expert_dim": 32, "moe_layers_enum": "1,2,3"}
    | {"attention_other_setting": {"num_attention_heads": 8}},
    USUAL | WINDOWS | SHARED | {"model_type": "laguna", "num_attention_heads_per_layer": [8, 16, 8, 16]},
    USUAL
    | {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * 4, "num_shared_expert": 1}
    | {"moe_intermediate_size": [32] * 4},
    USUAL
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}
    | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_interval": 1},
    USUAL
    | LATENT
    | {"model_type": "longcat_flash", "num_layers": 2, "n_routed_experts": 8, "moe_topk": 3, "zero_expert_num": 4}
    | {"expert_ffn_hidden_size": 32},
    USUAL
    | SHARED
    | {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128, 4, 0], "head_dim": 16, "q_lora_rank": 32}
    | {"qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 32, "hc_mult": 4}
    | {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 64},
    USUAL | LATENT | SHARED | {"model_type": "bailing_hybrid", "head_dim": 8, "layer_group_size": 4},
    USUAL
    | MIXTRAL
    | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "attention", "mamba"]}
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    USUAL | LATENT | SHARED | {"model_type": "hy_v4"},
    USUAL | SHARED | WINDOWS | {"model_type": "afmoe", "num_dense_layers": 1, "num_shared_experts": 1},
    USUAL | EXPERTS | WINDOWS | {"model_type": "cohere2_moe", "num_shared_experts": 1},
    USUAL | QWEN | WINDOWS | {"model_type": "mellum"},
    USUAL | QWEN | DELTA | {"model_type": "olmo_hybrid"},
    USUAL
    | {"model_type": "bamba", "attn_layer_indices": [2], "mamba_n_heads": 8, "mamba_d_head": 16}
    | {"mamba_d_state": 16, "mamba_n_groups": 1},
    USUAL
    | {"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128}
    | {"mamba_d_state": 16, "mamba_n_groups": 1},
    USUAL | EXPERTS | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2},
]


def _name(content: Config) -> str:
    return content.get("model_type", "grok")


def _places(content: Config) -> Iterator[tuple[Config, str]]:
    """Every key, in tables within too, with the table that it stands in."""
    for key, value in content.items():
        yield content, key
        if isinstance(value, dict):
            yield from _places(value)


def _saved(content: Config, path: Path) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("content", CONFIGURATIONS, ids=_name)
def test_a_wrong_value_is_one_line_or_another_model(content: Config, tmp_path: Path) -> None:
    path = _saved(content, tmp_path / "config.json")
    assert load_model(path).layers == 4
    rng = random.Random(_name(content))
    for _ in range(LONG // len(CONFIGURATIONS) or 8):
        broken = copy.deepcopy(content)
        table, key = rng.choice(list(_places(broken)))
        table[key] = rng.choice(WRONG)
        _saved(broken, path)
        try:
            model, imported = load_model(path), imported_model(path)
        except CatalogError as refusal:
            assert str(refusal).isprintable(), (key, table[key])  # noqa: PT017
            assert len(str(refusal)) < 1000 + len(str(path))  # noqa: PT017
        else:
            assert imported is not None
            assert 0 < model.active_parameters <= model.parameters
            assert 1 <= model.layers <= 4096


def test_a_wrong_value_of_the_file_beside_is_one_line_or_another_format(tmp_path: Path) -> None:
    path = _saved(CONFIGURATIONS[0], tmp_path / "config.json")
    for seed in range(LONG or 25):
        rng, beside = random.Random(seed), copy.deepcopy({"quantization": MIXED | {"exclude_modules": ["lm_head"]}})
        table, key = rng.choice(list(_places(beside)))
        table[key] = rng.choice(WRONG)
        _saved(beside, tmp_path / "hf_quant_config.json")
        try:
            load_model(path)
        except CatalogError as refusal:
            assert "hf_quant_config.json: " in str(refusal)  # noqa: PT017
            assert str(refusal).isprintable()  # noqa: PT017


def test_every_family_is_among_them() -> None:
    tried = {IMPORTED_FAMILIES[_name(content)] for content in CONFIGURATIONS}
    assert tried == set(IMPORTED_FAMILIES.values())


def test_the_deepest_model_is_read_in_the_order_of_its_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 4095 + ["full_attention"]
    deep = USUAL | {"model_type": "qwen3", "num_hidden_layers": 4096, "layer_types": kinds[::-1], "sliding_window": 32}
    model = load_model(_saved(deep, tmp_path / "config.json"))
    assert model.order == (0, *[1] * 4095)
    with pytest.raises(CatalogError, match="from 1 to 4,096, got 4097"):
        load_model(_saved(deep | {"num_hidden_layers": 4097}, tmp_path / "config.json"))


@pytest.mark.parametrize("content", CONFIGURATIONS, ids=_name)
def test_no_list_is_made_of_as_many_layers_as_a_file_likes(content: Config, tmp_path: Path) -> None:
    for table, key in list(_places(broken := copy.deepcopy(content))):
        if key in ("num_layers", "num_hidden_layers", "n_layers"):
            table[key] = 10**9
    broken.setdefault("num_hidden_layers", 10**9)
    with pytest.raises(CatalogError, match=r"layers: expected a whole number from [01] to [24],\d{3}, got 1000000000"):
        load_model(_saved(broken, tmp_path / "config.json"))
