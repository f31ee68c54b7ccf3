"""Which measured series prices what: an engine's own kernels, and the fallback where nothing was measured.

Every choice here is [assumed]; a price that rests on a fallback says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from sim.prices.dtypes import BYTES


class Source(NamedTuple):
    """Whose measured kernel prices something, and the number format it was measured in."""

    engine: str
    dtype: str


_RATHER: Mapping[tuple[str, str, str], tuple[Source, ...]] = {
    # vLLM's fp8_block GEMMs hold 55 us of host time at every size, 165 and 288 on RTX PRO 6000 and L40S, where SGLang
    # has none: a CUDA graph does not pay it.
    ("gemm", "vllm", "fp8_block"): (Source("sglang", "fp8_block"), Source("vllm", "fp8")),
}
"""Fallbacks that are taken before an engine's own series: (family, engine, dtype) -> source."""
_FORMATS_ALIKE: Mapping[str, tuple[str, ...]] = {"fp8": ("fp8_block",), "fp8_block": ("fp8",)}
"""Formats of as many bytes and the same arithmetic peak."""
_ELSEWHERE: Mapping[tuple[str, str], Source] = {
    # SGLang's prefill was not measured; it and vLLM call FlashAttention.
    ("attention_prefill", "sglang"): Source("vllm", ""),
    ("mla_decode", "vllm"): Source("sglang", ""),  # both call FlashMLA and FlashInfer
    # Where no kernel with weights of 4 bits was measured: this one's efficiency, at their bytes and arithmetic.
    ("moe", "mxfp4"): Source("trtllm", "fp8"),
    ("moe", "nvfp4"): Source("trtllm", "fp8"),
    ("moe", "int4"): Source("trtllm", "fp8"),
}
"""(family, engine or dtype) -> source of last resort; "" keeps the dtype asked for."""

_NEVER_RUN = frozenset({"int4", "nvfp4"})
"""Formats of 4 bits of which no serving run was measured with fallback kernels; of mxfp4, gpt-oss's runs were."""


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


AITER, AITER_EXPERTS = "aiter", "aiter_fused_moe"
"""The library whose kernels every engine runs on AMD's machines, and its fused experts."""
EXPERT_KERNELS: Mapping[Source, tuple[str, ...]] = {
    Source("trtllm", "bf16"): ("moe_torch_flow_cutlass",),
    Source("trtllm", "fp8"): ("moe_torch_flow_cutlass",),
    Source("trtllm", "fp8_block"): ("moe_torch_flow_cutlass",),
    Source("trtllm", "nvfp4"): ("moe_torch_flow_min_latency", "moe_torch_flow_cutlass"),
    Source("trtllm", "mxfp4"): ("moe_torch_flow_w4a8", "moe_torch_flow_cutlass_w4a8", "moe_torch_flow"),
    Source("vllm", "bf16"): (
        "vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts",
        "vllm_unquantizedfusedmoe_flashinfer_cutlass_flashinferexperts",
        "vllm_unquantizedfusedmoe_triton_tritonexperts",
    ),
    Source("vllm", "fp8"): (
        "vllm_modeloptfp8moe_flashinfer_trtllm_trtllmfp8expertsmonolithic",
        "vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts",
    ),
    Source("vllm", "fp8_block"): (
        "vllm_fp8moe_flashinfer_trtllm_trtllmfp8expertsmonolithic",
        "vllm_fp8moe_triton_tritonexperts",
    ),
    Source("vllm", "nvfp4"): (
        "vllm_compressedtensorsw4a4nvfp4moe_flashinfer_trtllm_trtllmnvfp4expertsmonolithic",
        "vllm_compressedtensorsw4a4nvfp4moe_flashinfer_cutlass_flashinferexperts",
    ),
    Source("vllm", "mxfp4"): (
        "vllm_gptossmxfp4moe_flashinfer_trtllm_mxfp4_bf16_trtllmmxfp4expertsmonolithic",
        "vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic",
        "vllm_gptossmxfp4moe_marlin_marlinexperts",
    ),
    Source("sglang", "bf16"): ("sglang_fused_moe_triton",),
    Source("sglang", "fp8_block"): ("sglang_flashinfer_trtllm_moe", "sglang_fused_moe_triton"),
    Source("sglang", "nvfp4"): ("sglang_flashinfer_trtllm_moe", "sglang_flashinfer_cutlass_moe"),
    Source("sglang", "mxfp4"): ("sglang_mxfp4_flashinfer_trtllm_moe_w4a8", "sglang_fused_moe_triton"),
}
"""The gated expert kernel that an engine runs where several were measured: the first that the machine has."""
CUSTOM_ALL_REDUCE: Mapping[str, str] = {
    "trtllm": "trtllm_custom",
    "vllm": "vllm_custom_graph",
    "sglang": "sglang_custom_graph",
}
"""An engine's own all-reduce inside a node, as the measured tables call it."""


SUMMED_AS: Mapping[str, str] = {"ring": "int8", "tree": "int8", "nvls": "half"}
"""NCCL's algorithms of an all-reduce, and the format whose measured sums it makes by it, or by a faster one.

NVLink SHARP adds no 8-bit integers, so NCCL's 8-bit sums inside a node are rings, or trees where those are faster: 353
GB/s over 8 H100, where 16-bit ones reach 445. [published] ncclNvlsSupported of NCCL's src/include/device.h
"""


def newest_series(series: Iterable[str], dtype: str | None) -> str | None:
    """NCCL's all-reduce of a format in the newest version that was measured.

    >>> prefix = "collectives/all_reduce/nccl/nccl_"
    >>> newest_series([f"{prefix}2.9.1/int8", f"{prefix}2.27.3/int8", f"{prefix}2.27.3/half"], "int8")
    'collectives/all_reduce/nccl/nccl_2.27.3/int8'
    """
    found = [each for each in series if dtype and each.startswith("collectives/all_reduce/nccl/")]
    own = [each for each in found if each.endswith(f"/{dtype}")]
    return max(own, key=lambda name: [int(part) for part in re.findall(r"\d+", name.split("/")[3])], default=None)


def all_reduce_libraries(whose: str) -> tuple[str, ...]:
    """The measured libraries among which an all-reduce inside a node is chosen.

    >>> all_reduce_libraries("vllm"), len(all_reduce_libraries("fastest"))
    (('vllm_custom_graph',), 4)
    """
    if whose == "fastest":
        return ("nccl", *CUSTOM_ALL_REDUCE.values())
    if whose in ("one_shot", "two_shot"):  # of each kernel the better one is what was measured
        return (*CUSTOM_ALL_REDUCE.values(),)
    return (CUSTOM_ALL_REDUCE.get(whose, "nccl"),)


def sources(family: str, engine: str, dtype: str) -> Iterator[Source]:
    """Whose series may price a kernel, the best first.

    >>> list(sources("gemm", "vllm", "fp8"))
    [Source(engine='vllm', dtype='fp8'), Source(engine='vllm', dtype='fp8_block'), ...]
    """
    yield from _RATHER.get((family, engine, dtype), ())
    yield Source(engine, dtype)
    for alike in _FORMATS_ALIKE.get(dtype, ()):
        yield Source(engine, alike)
    for key in (engine, dtype):
        if elsewhere := _ELSEWHERE.get((family, key)):
            yield elsewhere._replace(dtype=elsewhere.dtype or dtype)
    for known in (dtype, *_FORMATS_ALIKE.get(dtype, ())):
        yield Source(AITER, known)
