"""Keys of a Hugging Face configuration: names that mean the same, and which of them were read."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from sim.config.fields import LARGEST_FIELD, MOST_LAYERS
from sim.json_object import JsonFields, JsonObject


class CannotImport(ValueError):
    """A configuration that no model file can stand for; the message says why."""


ALIASES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "d_model"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "kv_n_heads", "num_attention_groups"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "moe_topk",
        "moe_k",
    ),
    "expert_hidden": ("moe_intermediate_size",),
    "ffn_hidden": ("intermediate_size", "ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_hidden": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "share_expert_dims",
    ),
    "mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"),
}
"""What a model needs, and what families call it. Sources: transformers' attribute maps; vLLM's and AIConfigurator's
converters."""

_PRICELESS_KEYS = """
_name_or_path activation_situ_beta activation_situ_linear_beta
_sliding_window_pattern attention_multiplier dim_model_base embedding_initializer_range embedding_multiplier
enable_moe_fp32_combine hc_eps layer_norm_eps layer_rope_theta logit_scale logits_scaling model_max_length moe_norm_min
no_rope_layer_interval norm_epsilon residual_dropout residual_multiplier router_scaling_factor scale_depth scale_emb
use_associative_scan use_post_norm
add_full_attention_sink_bias add_swa_attention_sink_bias architectures attention_bias
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
    """The keys of a configuration, each read as what it must be; it remembers which were asked for.

    A key that is null is one that is not there. Every value that is not what was expected is refused by its name.
    """

    def __init__(self, content: JsonFields, where: str = "") -> None:
        """Keys of a table that `where` comes before in messages."""
        self._content = content
        self._where = where
        self._asked: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._content)

    def holds(self, kind: type, name: str) -> bool:
        """Whether the value of a key is of a kind."""
        return isinstance(self._first((name,))[1], kind)

    def count(self, *names: str, default: int | None = None, most: int = LARGEST_FIELD) -> int:
        """A number of 1 or more; one without a default must be there.

        Raises:
            CannotImport: It is not, or is none.
        """
        return self._number(names, default, 1, most)

    def whole(self, *names: str, default: int = 0, most: int = LARGEST_FIELD) -> int:
        """A number of 0 or more.

        Raises:
            CannotImport: It is none.
        """
        return self._number(names, default, 0, most)

    def need(self, what: str) -> int:
        """A count that must be there, of `ALIASES`; of layers a few thousand at most.

        Raises:
            CannotImport: It is not.
        """
        return self.count(*ALIASES[what], most=_most(what))

    def known(self, what: str, default: int = 0) -> int:
        """A number of `ALIASES`; of layers a few thousand at most.

        Raises:
            CannotImport: It is none.
        """
        return self.whole(*ALIASES[what], default=default, most=_most(what))

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false.

        Raises:
            CannotImport: It is neither.
        """
        found, value = self._first((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(found, "true or false", value)
        return value

    def text(self, *names: str, default: str = "", longest: int = 200) -> str:
        """A word or a name.

        Raises:
            CannotImport: It is none, or too long for one.
        """
        found, value = self._first(names)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise self._refused(found, f"a text of at most {longest} characters", value)
        return value

    def texts(self, name: str) -> Sequence[str]:
        """A list of texts, empty where there is none.

        Raises:
            CannotImport: It is none.
        """
        found, value = self._first((name,))
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[Any]", value)):
            raise self._refused(found, "a list of texts", value)
        return cast("list[str]", value)

    def wholes(self, name: str, *, default: Sequence[int] = ()) -> Sequence[int]:
        """A list of numbers of 0 or more; true and false are 1 and 0.

        Raises:
            CannotImport: It is none.
        """
        found, value = self._first((name,))
        if value is None:
            return default
        if not isinstance(value, list) or not all(
            isinstance(each, int) and each >= 0 for each in cast("list[Any]", value)
        ):
            raise self._refused(found, "a list of whole numbers", value)
        return cast("list[int]", value)

    def first_whole(self, name: str, *, default: int = 0) -> int:
        """A number of 0 or more, or the first of a list of them, one per layer.

        Raises:
            CannotImport: It is neither.
        """
        if not self.holds(list, name):
            return self.whole(name, default=default)
        stated = self.wholes(name) or [default]
        return stated[0]

    def number(self, name: str) -> float:
        """A positive number that need not be whole.

        Raises:
            CannotImport: It is none.
        """
        found, value = self._first((name,))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FIELD:
            raise self._refused(found or name, "a positive number", value)
        return float(value)

    def lists_of_tables(self, name: str) -> Sequence[Keys]:
        """A list of tables, empty where there is none.

        Raises:
            CannotImport: It is none.
        """
        found, value = self._first((name,))
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast("list[Any]", value)):
            raise self._refused(found, "a list of tables", value)
        return [Keys(each, f"{self._where}{found}.") for each in cast("list[dict[str, Any]]", value)]

    def inside(self, *names: str) -> Keys:
        """A table within, empty where there is none; what it holds is asked for as a whole.

        Raises:
            CannotImport: It is no table.
        """
        found, value = self._first(names)
        if value is None:
            return Keys({}, f"{self._where}{names[0]}.")
        if not isinstance(value, dict):
            raise self._refused(found, "a table of keys", value)
        return Keys(cast("dict[str, Any]", value), f"{self._where}{found}.")

    def tables(self) -> Iterator[Keys]:
        """Every table that stands here under a name of its own.

        Raises:
            CannotImport: One is no table.
        """
        return (self.inside(name) for name in self._content)

    def stated(self) -> JsonObject:
        """What is there and not null, as it stands."""
        return {name: value for name, value in self._content.items() if value is not None}

    def seen(self, *names: str) -> None:
        """Counts keys as understood that nothing comes of."""
        self._asked.update(names)

    def read(self) -> tuple[str, ...]:
        """Keys that were asked for and are there, sorted."""
        return tuple(sorted(self._asked & set(self._content)))

    def unread(self) -> tuple[str, ...]:
        """Keys that were never asked for and may matter, sorted."""
        beyond = set(self._content) - self._asked - _PRICELESS
        return tuple(sorted(name for name in beyond if self._content[name] not in (None, False, [], {}, 0)))

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of some names that is there and not null, and its value."""
        self._asked.update(names)
        return next(((name, self._content[name]) for name in names if self._content.get(name) is not None), ("", None))

    def _number(self, names: tuple[str, ...], default: int | None, least: int, most: int) -> int:
        found, value = self._first(names)
        if value is None:
            if default is None:
                raise CannotImport(f"lacks {self._where}{' or '.join(names)}, a number from {least} to {most:,}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._refused(found, f"a whole number from {least} to {most:,}", value)
        return value

    def _refused(self, name: str, expected: str, value: Any) -> CannotImport:
        return CannotImport(f"{self._where}{name}: expected {expected}, got {reprlib.repr(value)}")


def _most(what: str) -> int:
    """The largest number of `ALIASES`: a list is made of as many layers."""
    return MOST_LAYERS if what == "layers" else LARGEST_FIELD
