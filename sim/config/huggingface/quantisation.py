"""Which format a checkpoint's weights have: `quantization_config`, or `hf_quant_config.json` beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from sim.config.huggingface.keys import Keys
from sim.json_object import JsonFields
from sim.prices.dtypes import Dtype


class Formats(NamedTuple):
    """Formats of a checkpoint.

    Attributes:
        weights: Of what is not the experts'; None where the configuration does not say.
        experts: Of the experts, if they differ.
        kv_cache: Of the cache, if stated.
        unknown: What stands there and is not followed, or "".
    """

    weights: Dtype | None
    experts: Dtype | None = None
    kv_cache: Dtype | None = None
    unknown: str = ""


_MODELOPT: Mapping[str, Dtype] = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8_block",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
}


def formats_of(content: JsonFields, beside: JsonFields | None, *, layers: int = 1, moe: bool = True) -> Formats:
    """The formats of a configuration, and of the quantisation file beside it if there is one.

    Args:
        content: Of config.json.
        beside: Of hf_quant_config.json.
        layers: Of the model.
        moe: Whether it has experts, which alone can have a format of their own.

    >>> formats_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, None).weights
    'fp8_block'
    """
    keys, of_file = Keys(content), Keys(beside or {}, "hf_quant_config.json: ").inside("quantization")
    keys_given = of_file or keys.inside("quantization_config", "compression_config")
    expert_dtype: Dtype | None = "mxfp4" if keys.text("expert_dtype") == "fp4" else None
    if not keys_given:
        return Formats("bf16", expert_dtype)
    found, unknown = _format(keys_given, keys_given.text("quant_method", default="modelopt" if of_file else "").lower())
    kv_cache: Dtype | None = "fp8" if "8" in _cache(keys_given) else None
    if found is None:
        return Formats(None, expert_dtype, kv_cache, unknown)
    spared = 0 if expert_dtype else _layers_that_spare_attention(keys_given, layers)
    if moe and 2 * spared > layers:
        return Formats("bf16", found, kv_cache, unknown)
    if spared:
        left = f"attention of {spared} of {layers} layers is not quantised, and charged as {found} like the rest"
        unknown = "; ".join(filter(None, (unknown, left)))
    return Formats(found, expert_dtype, kv_cache, unknown)


def _format(keys_given: Keys, method: str) -> tuple[Dtype | None, str]:
    algorithm = keys_given.text("quant_algo").upper()
    if method == "fbgemm_fp8":
        return "fp8", ""
    if method == "fp8":
        return ("fp8_block" if keys_given.wholes("weight_block_size") else "fp8"), ""
    if method == "mxfp4":
        return "mxfp4", ""
    if method in ("awq", "gptq", "auto-round") and keys_given.whole("bits", "w_bit") == 4:
        return "int4", ""
    if keys_given.flag("load_in_4bit", default=False):
        return "int4", f"weights of {method or 'four bits'} to 4 bits, charged as int4"
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm], ""
    if algorithm == "MIXED_PRECISION":
        counts = Counter(each.text("quant_algo").upper() for each in keys_given.inside("quantized_layers").tables())
        usual = next((name for name, _ in counts.most_common() if name in _MODELOPT), None)
        if usual:
            return _MODELOPT[usual], f"of mixed precisions the most frequent, {usual}, for all"
    groups = [
        _compressed(group.inside("weights"), group.text("format") or keys_given.text("format"))
        for group in keys_given.inside("config_groups").tables()
    ]
    if groups:
        first, unknown = groups[0]
        others = [each for each, _ in groups if each != first]
        return (first, f"of several formats the first, {first}, for all") if first and others else (first, unknown)
    return None, f"quantisation {algorithm or method or 'without a method'}"


def _compressed(weights: Keys, layout: str) -> tuple[Dtype | None, str]:
    """A group of compressed-tensors."""
    bits, kind = weights.whole("num_bits"), weights.text("type")
    if (bits, kind) == (8, "float"):
        return ("fp8_block" if weights.text("strategy") == "block" else "fp8"), ""
    if (bits, kind) == (4, "float"):
        return ("mxfp4" if "mxfp4" in layout else "nvfp4"), ""
    if (bits, kind) == (4, "int"):
        return "int4", ""
    return None, f"quantisation to {bits or '?'}-bit {kind or 'numbers'}"


def _cache(keys_given: Keys) -> str:
    """The cache's format as it is called, or its bits; "" where it is not stated."""
    if algorithm := keys_given.text("kv_cache_quant_algo"):
        return algorithm
    if keys_given.holds(str, "kv_cache_scheme"):
        return keys_given.text("kv_cache_scheme")
    return str(keys_given.inside("kv_cache_scheme").whole("num_bits"))


def _layers_that_spare_attention(keys_given: Keys, layers: int) -> int:
    """In how many layers attention is left as it is, so that only experts (and dense layers) are quantised."""
    left = (keys_given.texts(name) for name in ("modules_to_not_convert", "ignore", "exclude_modules"))
    spared = [_LAYER.search(module) for modules in left for module in modules if _ATTENTION.search(module)]
    named = {each.group(1) for each in spared if each}
    return layers if None in spared else min(len(named), layers)


_LAYER = re.compile(r"layers\.(\d+)\.")
"""A layer by its number; a pattern of many has none."""
_ATTENTION = re.compile(r"self_attn\W*$|attn\.(q|k|v|o|qkv|kv)(_a|_b)?_proj")
"""What names the whole of attention, or its large projections, rather than an indexer's."""
