"""Measured modules of sparse attention and kernels of linear mixers: what a row holds, and its shape as it is priced.

A module is measured with its projections: they are priced by the machine's own GEMMs, and what is left is fitted. What
a row holds: AIConfigurator's collectors (collector/, 095f58a), read 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sim.arrays import Floats
from sim.prices.calibration import Calibration
from sim.prices.curves import Curves, Gemm
from sim.prices.dtypes import Dtype
from sim.prices.mixer_shapes import (
    INDEX_WIDTH,
    KEY_WIDTH,
    LATENT_WIDTH,
    Convolution,
    SparseAttention,
    SparseKind,
    StateKind,
    StateScan,
    sparse_shape,
)

_FORMATS: Mapping[str, Dtype] = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}


class _Module(NamedTuple):
    """A measured model's attention: hidden width, width of the query latent, heads' widths, what is picked.

    Attributes:
        inner: Width of a head's query and value as they are projected, beside latents.
        index_heads: Of the indexer, 128 wide each.
        groups: Of heads that leave through a latent of 1,024, and all heads, of compressed attention.
    """

    hidden: int
    query_rank: int = 0
    inner: tuple[int, int] = (0, 0)
    nope: int = 0
    index_heads: int = 0
    topk: int = 0
    groups: tuple[int, int] = (0, 1)


_GLM, _V4_PRO = _Module(6144, 2048, (256, 256), 192, 32, 2048), _Module(7168, 1536, topk=1024, groups=(16, 128))
_MODULES: Mapping[str, _Module] = {
    "deepseek-ai/DeepSeek-V3.2": _Module(7168, 1536, (192, 128), 128, 64, 2048),
    **dict.fromkeys(("zai-org/GLM-5", "zai-org/GLM-5-FP8", "zai-org/GLM-5.2", "zai-org/GLM-5.2-FP8"), _GLM),
    "nvidia/GLM-5.2-NVFP4": _GLM,
    "MiniMaxAI/MiniMax-M3": _Module(6144, index_heads=4, topk=2048),
    "deepseek-ai/DeepSeek-V4-Pro": _V4_PRO,
    "sgl-project/DeepSeek-V4-Pro-FP8": _V4_PRO,
    "sgl-project/DeepSeek-V4-Flash-FP8": _Module(4096, 1024, topk=512, groups=(8, 64)),
}
"""[published] the models' config.json."""
_OUT = 1024
"""Width of the latent that a group of heads leaves by."""
_OPS: Mapping[str, SparseKind] = {"dsa": "dsa", "dsv4_csa": "csa", "dsv4_hca": "hca", "msa": "msa"}


def usable_modules(raw: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole modules of sparse attention, but those that ran dense attention instead as they are short."""
    kinds = raw["op"].str.rpartition("_")
    known = kinds[0].isin(_OPS) & kinds[2].isin(["context", "generation"]) & raw["model"].isin(_MODULES)
    return raw.loc[known.to_numpy(dtype=bool) & ~raw["kernel_source"].str.contains("dense").to_numpy(dtype=bool)]


def usable_states(raw: pd.DataFrame) -> pd.DataFrame:
    """Rows of one kernel each: those that do a whole decode step or verify drafts are left out."""
    fused = raw["kernel_source"].str.contains(r"fused_kda_decode|kda_fused_decode").to_numpy(dtype=bool)
    return raw.loc[raw["phase"].isin(["context", "generation"]).to_numpy(dtype=bool) & ~fused]


def module_shape(row: Any) -> SparseAttention:
    """What is between the projections of a measured module."""
    module, (op, _, phase) = _MODULES[row.model], row.op.rpartition("_")
    kind, fp8, heads = _OPS[op], "fp8" in row.kv_cache_dtype, row.num_heads
    prompts = phase == "context"
    sizes = (row.batch_size, row.isl if prompts else 1, row.step, heads)
    if kind == "dsa" and "skip" in row.variant:
        kind = "dsa_shared"
    return sparse_shape(kind, sizes, fp8=fp8, prompts=prompts, topk=module.topk, index=module.index_heads)


def projections(row: Any) -> list[tuple[Dtype, Gemm]]:
    """Products of a measured module, and the format of each; those of SGLang's DSA have no first one."""
    module, (op, _, phase), heads = _MODULES[row.model], row.op.rpartition("_"), row.num_heads
    dtype, rows = _FORMATS[row.gemm_type], row.batch_size * (row.isl if phase == "context" else 1)
    kept = _FORMATS["bfloat16"]
    found: list[tuple[Dtype, int, int]] = []

    def add(each: Dtype, *products: tuple[int, int]) -> None:
        found.extend((each, inner, columns) for inner, columns in products)

    if op == "dsa":
        (query, value), rank = module.inner, module.query_rank
        if row.framework != "sglang":
            add(dtype, (module.hidden, rank + LATENT_WIDTH))
        add(dtype, (rank, heads * query), (heads * value, module.hidden))
        if phase == "context":
            add(dtype, (KEY_WIDTH, heads * (module.nope + value)))
        else:
            add(kept, (heads * module.nope, KEY_WIDTH), (KEY_WIDTH, heads * value))
        if "skip" not in row.variant:
            index = module.index_heads
            add(dtype, (rank, index * INDEX_WIDTH), (module.hidden, INDEX_WIDTH + index))
    elif op == "msa":
        columns = (heads + 2 * max(1, heads // 16)) * INDEX_WIDTH
        add(dtype, (module.hidden, columns), (module.hidden, (1 + module.index_heads) * INDEX_WIDTH))
        add(dtype, (heads * INDEX_WIDTH, module.hidden))
    else:
        groups = max(1, module.groups[0] * heads // module.groups[1])
        add(dtype, (module.hidden, module.query_rank + KEY_WIDTH), (module.query_rank, heads * KEY_WIDTH))
        add(dtype, (heads * KEY_WIDTH, _OUT), (groups * _OUT, module.hidden))
        if op == "dsv4_hca":
            add(kept, (module.hidden, 2 * KEY_WIDTH))
        else:
            add(kept, (module.hidden, 4 * KEY_WIDTH), (module.hidden, 4 * INDEX_WIDTH))
            add(dtype, (module.query_rank, 64 * INDEX_WIDTH), (module.hidden, 64))
    return [(each, Gemm(rows, inner, columns)) for each, inner, columns in found]


def projections_us(frame: pd.DataFrame, calibration: Calibration) -> Floats:
    """[rows] microseconds of the projections of modules, by the machine's GEMMs; NaN where it has none."""

    @cache
    def curves(engine: str) -> Curves:
        return Curves(calibration, engine, "nccl")

    def of_row(row: Any) -> float:
        priced = [curves(row.framework).kernel(shape, dtype, dtype) for dtype, shape in projections(row)]
        return sum(each.time_s if each else np.nan for each in priced) * 1e6

    return np.array([of_row(row) for row in frame.itertuples(index=False)], dtype=float)


def state_shape(row: Any) -> Convolution | StateScan:
    """A measured kernel of a linear mixer. TensorRT-LLM's convolutions of the gated delta rule see keys alone."""
    kind: StateKind = row.op
    prompts, tokens = row.phase == "context", row.seq_len if row.phase == "context" else 1
    if kind == "mamba2":
        keys, values = 2 * row.n_groups * row.d_state, row.nheads * row.head_dim
        heads, key_dim, value_dim = row.nheads, row.d_state, row.head_dim
    else:
        keys, values = 2 * row.num_k_heads * row.head_k_dim, row.num_v_heads * row.head_v_dim
        heads, key_dim, value_dim = row.num_v_heads, row.head_k_dim, row.head_v_dim
    if "conv" in row.kernel_source:
        width = keys / 2 if (row.framework, kind) == ("trtllm", "gdn") else keys + values
        return Convolution(kind, prompts, row.batch_size, tokens, width)
    return StateScan(kind, prompts, row.batch_size, tokens, heads, key_dim, value_dim, keys + values)


def module_series(row: Any) -> str:
    """The series that a module belongs to."""
    cache = "fp8" if "fp8" in row.kv_cache_dtype else "bf16"
    return f"sparse_attention/{row.framework}/{module_shape(row).series}/{cache}"


def state_series(row: Any) -> str:
    """The series that a kernel of a linear mixer belongs to."""
    return f"state/{row.framework}/{row.op}_{row.phase}/{'conv' if 'conv' in row.kernel_source else 'scan'}"
