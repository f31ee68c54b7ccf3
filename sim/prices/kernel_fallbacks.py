"""Which measured series prices what: an engine's own kernels, and the fallback where nothing was measured.

Every choice here is [assumed]; a price that rests on a fallback says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from sim.prices.dtypes import BYTES


class Source(NamedTuple):
    """Whose measured kernel prices something, and the number format it was measured in."""

    engine: str
    dtype: str


_RATHER: Mapping[tuple[str, str, str], Source] = {
    # vLLM's fp8_block GEMMs hold 55 us of host time at every size, which a CUDA graph does not pay.
    ("gemm", "vllm", "fp8_block"): Source("sglang", "fp8_block"),
}
"""Fallbacks that are taken before an engine's own series: (family, engine, dtype) -> source."""
_FORMATS_ALIKE: Mapping[str, tuple[str, ...]] = {"fp8": ("fp8_block",), "fp8_block": ("fp8",)}
"""Formats of as many bytes and the same arithmetic peak."""
_ELSEWHERE: Mapping[tuple[str, str], Source] = {
    # SGLang's prefill was not measured; it and vLLM call FlashAttention.
    ("attention_prefill", "sglang"): Source("vllm", ""),
    # No kernel with weights of 4 bits was measured: this one's efficiency, at their bytes and arithmetic.
    ("moe", "mxfp4"): Source("trtllm", "fp8"),
    ("moe", "nvfp4"): Source("trtllm", "fp8"),
    ("moe", "int4"): Source("trtllm", "fp8"),
}
"""(family, engine or dtype) -> source of last resort; "" keeps the dtype asked for."""

_NEVER_RUN = frozenset({"int4", "nvfp4"})
"""Formats of 4 bits of which neither kernels nor serving runs were measured; of mxfp4, gpt-oss's runs were."""


@lru_cache(maxsize=64)
def leaning(dtype: str) -> str:
    """To which side kernels of a format err that are priced by a fallback, or "".

    Unpacking costs time that fewer bytes do not show. [assumed]

    >>> leaning("int4"), leaning("fp8")
    (', at their fewer bytes: probably too fast', '')
    """
    return ", at their fewer bytes: probably too fast" if dtype in _NEVER_RUN else ""


@lru_cache(maxsize=64)
def slower_by(dtype: str) -> float:
    """By what factor kernels of a format may take longer, besides.

    [assumed] one that nobody ran may gain nothing over fp8, of one byte.

    >>> slower_by("nvfp4"), slower_by("fp8")
    (1.7777777777777777, 1.0)
    """
    return 1 / BYTES[dtype] if dtype in _NEVER_RUN else 1.0


EXPERT_KERNELS: Mapping[Source, str] = {
    Source("trtllm", "bf16"): "moe_torch_flow_cutlass",
    Source("trtllm", "fp8"): "moe_torch_flow_cutlass",
    Source("trtllm", "fp8_block"): "moe_torch_flow_cutlass",
    Source("vllm", "bf16"): "vllm_unquantizedfusedmoe_triton_tritonexperts",
    Source("vllm", "fp8"): "vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts",
    Source("vllm", "fp8_block"): "vllm_fp8moe_triton_tritonexperts",
    Source("sglang", "bf16"): "sglang_fused_moe_triton",
    Source("sglang", "fp8_block"): "sglang_fused_moe_triton",
}
"""The gated expert kernel that an engine runs where several were measured."""
CUSTOM_ALL_REDUCE: Mapping[str, str] = {
    "trtllm": "trtllm_custom",
    "vllm": "vllm_custom_graph",
    "sglang": "sglang_custom_graph",
}
"""An engine's own all-reduce inside a node, as the measured tables call it."""


def sources(family: str, engine: str, dtype: str) -> Iterator[Source]:
    """Whose series may price a kernel, the best first.

    >>> list(sources("gemm", "vllm", "fp8"))
    [Source(engine='vllm', dtype='fp8'), Source(engine='vllm', dtype='fp8_block')]
    """
    if rather := _RATHER.get((family, engine, dtype)):
        yield rather
    yield Source(engine, dtype)
    for alike in _FORMATS_ALIKE.get(dtype, ()):
        yield Source(engine, alike)
    for key in (engine, dtype):
        if elsewhere := _ELSEWHERE.get((family, key)):
            yield elsewhere._replace(dtype=elsewhere.dtype or dtype)
