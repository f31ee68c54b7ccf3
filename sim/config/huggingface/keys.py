"""Keys of a Hugging Face configuration: names that mean the same, and which of them were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CannotImport(ValueError):
    """A configuration that no model file can stand for; the message says why."""


ALIASES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "d_model"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
    ),
    "expert_hidden": ("moe_intermediate_size",),
    "ffn_hidden": ("intermediate_size", "ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "shared_hidden": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
}
"""What a model needs, and what families call it. Sources: transformers' attribute maps; vLLM's and AIConfigurator's
converters."""

_PRICELESS_KEYS = """
_name_or_path add_full_attention_sink_bias add_swa_attention_sink_bias architectures attention_bias
attention_chunk_size attention_dropout attention_value_scale attn_logit_softcapping attn_scale attn_temperature_tuning
audio_config auto_map aux_loss_alpha boi_token_index bos_token_id chunk_size cls_token_id decoder_start_token_id
diversity_penalty dtype emb_pdrop eoi_token_index eos_token_id ep_size expand experts_implementation
final_logit_softcapping floor_scale for_llm_use_cache head_dim hidden_act hidden_activation hidden_dropout id2label
image_token_id image_token_index index_share_for_mtp_iteration index_skip_topk_offset index_topk index_topk_freq
indexer_rope_interleave initial_context_length initializer_factor initializer_range label2id layer_norm_epsilon
layernorm_epsilon length_penalty mamba_hidden_act mamba_proj_bias mamba_ssm_cache_dtype mamba_ssm_dtype max_length
max_position_embeddings max_seq_len max_window_layers min_length mlp_bias mlp_hidden_act model_type moe_layers
moe_renormalize moe_router_activation_func moe_router_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern
mtp_layers_block_type mtp_transformer_layers mtp_use_dedicated_embeddings n_group no_repeat_ngram_size no_rope_layers
norm_eps norm_topk_prob num_beam_groups num_beams num_expert_group num_key_value_heads num_logits_to_keep
num_mtp_modules num_return_sequences original_max_position_embeddings output_gate_type output_router_logits
pad_token_id partial_rotary_factor position_embedding_type pretraining_tp qk_head_dim qk_layernorm qk_norm_type
qk_rope_head_dim qkv_bias quantization_config query_pre_attn_scalar repetition_penalty rescale_prenorm_residual
resid_pdrop residual_in_fp32 return_dict rms_norm_eps rope_interleave rope_local_base_freq rope_ntk_alpha
rope_ntk_beta rope_parameters rope_scaling rope_scaling_factor rope_theta rotary_dim routed_scaling_factor
router_aux_loss_coef router_bias router_jitter_noise scoring_func sep_token_id seq_aux sliding_window_size
swa_rope_theta swiglu_alpha swiglu_limit temperature text_config tie_word_embeddings time_step_floor time_step_limit
time_step_max time_step_min time_step_rank top_k top_p topk_group topk_method torch_dtype transformers_version
typical_p unk_token_id use_bias use_cache use_conv_bias use_gemma_norm use_mamba_kernels use_mtp use_qk_norm
use_routing_bias use_sliding_window video_token_id vision_config vision_end_token_id vision_start_token_id
"""
_PRICELESS = frozenset(_PRICELESS_KEYS.split())
"""Keys that move no price: tokens, positions, initial values, training, generation, and how numbers are scaled."""


class Keys:
    """The keys of a configuration; it remembers which were asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._asked: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of some names that is there and not null."""
        self._asked.update(names)
        return next((self._content[name] for name in names if self._content.get(name) is not None), default)

    def known(self, what: str, default: Any = None) -> Any:
        """The same for one of `ALIASES`."""
        return self.get(*ALIASES[what], default=default)

    def need(self, what: str) -> int:
        """A count that must be there.

        Raises:
            CannotImport: It is not.
        """
        value = self.known(what)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CannotImport(f"expected a positive {' or '.join(ALIASES[what])}, got {value!r}")
        return value

    def inside(self, name: str) -> Keys:
        """A table within; what it holds is asked for as a whole."""
        value = self.get(name, default={})
        return Keys(value)

    def read(self) -> tuple[str, ...]:
        """Keys that were asked for and are there, sorted."""
        return tuple(sorted(self._asked & set(self._content)))

    def unread(self) -> tuple[str, ...]:
        """Keys that were never asked for and may matter, sorted."""
        beyond = set(self._content) - self._asked - _PRICELESS
        return tuple(sorted(name for name in beyond if self._content[name] not in (None, False, [], {}, 0)))
