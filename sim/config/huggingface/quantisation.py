"""Which format a checkpoint's weights have: `quantization_config`, or `hf_quant_config.json` beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

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


def formats_of(content: Mapping[str, Any], beside: Mapping[str, Any] | None) -> Formats:
    """The formats of a configuration, and of the quantisation file beside it if there is one.

    >>> formats_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, None).weights
    'fp8_block'
    """
    said: Mapping[str, Any] = content.get("quantization_config") or content.get("compression_config") or {}
    if beside and isinstance(beside.get("quantization"), Mapping):
        said = {"quant_method": "modelopt", **beside["quantization"]}
    expert_dtype: Dtype | None = "mxfp4" if content.get("expert_dtype") == "fp4" else None
    if not said:
        return Formats("bf16", expert_dtype)
    found, unknown = _format(said)
    kv_cache: Dtype | None = "fp8" if "8" in str(_cache(said) or "") else None
    if found is None:
        return Formats(None, expert_dtype, kv_cache, unknown)
    if expert_dtype is None and _spares_attention(said):
        return Formats("bf16", found, kv_cache, unknown)
    return Formats(found, expert_dtype, kv_cache, unknown)


def _format(said: Mapping[str, Any]) -> tuple[Dtype | None, str]:
    method = str(said.get("quant_method", "")).lower()
    algorithm = str(said.get("quant_algo", "")).upper()
    if method == "fp8":
        return ("fp8_block" if said.get("weight_block_size") else "fp8"), ""
    if method == "mxfp4":
        return "mxfp4", ""
    if method in ("awq", "gptq") and said.get("bits", said.get("w_bit")) == 4:
        return "int4", ""
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm], ""
    if algorithm == "MIXED_PRECISION":
        layers: Mapping[str, Mapping[str, Any]] = said.get("quantized_layers", {})
        counts = Counter(str(each.get("quant_algo", "")).upper() for each in layers.values())
        usual = next((name for name, _ in counts.most_common() if name in _MODELOPT), None)
        if usual:
            return _MODELOPT[usual], f"of mixed precisions the most frequent, {usual}, for all"
    groups: Mapping[str, Any] = said.get("config_groups") or {}
    for group in groups.values():
        return _compressed(group.get("weights") or {}, str(group.get("format") or said.get("format") or ""))
    return None, f"quantisation {algorithm or method or 'without a method'}"


def _compressed(weights: Mapping[str, Any], layout: str) -> tuple[Dtype | None, str]:
    """A group of compressed-tensors."""
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (8, "float"):
        return ("fp8_block" if weights.get("strategy") == "block" else "fp8"), ""
    if (bits, kind) == (4, "float"):
        return ("mxfp4" if "mxfp4" in layout else "nvfp4"), ""
    if (bits, kind) == (4, "int"):
        return "int4", ""
    return None, f"quantisation to {bits}-bit {kind}"


def _cache(said: Mapping[str, Any]) -> Any:
    scheme: Mapping[str, Any] = said.get("kv_cache_scheme") or {}
    return said.get("kv_cache_quant_algo") or scheme.get("num_bits")


def _spares_attention(said: Mapping[str, Any]) -> bool:
    """Whether attention is left as it is, so that only experts (and dense layers) are quantised."""
    left = said.get("modules_to_not_convert") or said.get("ignore") or said.get("exclude_modules") or ()
    return any(_ATTENTION.search(str(module)) for module in left)


_ATTENTION = re.compile(r"self_attn\W*$|attn\.(q|k|v|o|qkv|kv)(_a|_b)?_proj")
"""What names the whole of attention, or its large projections, rather than an indexer's."""
