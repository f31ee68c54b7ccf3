"""Predicted microseconds of measured rows: by fitted coefficients, and by the bare roofline.

A frame is what `raysearch.fidelity.calibration.measured_tables.read_table` returns:
the CSV's own columns, validated. `moe_alltoall_deepep` has two sides per row: its frame is long, one row per side
as `read_table` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.mixer_tables import (
    module_series,
    module_shape,
    projections,
    state_series,
    state_shape,
)
from sim.prices import mixer_terms
from sim.prices.calibration import COMBINE_EACH, DISPATCH_EACH, Calibration, MissingSeries, is_plain
from sim.prices.dtypes import BYTES
from sim.prices.machine import Machine, machine_of
from sim.prices.mixer_shapes import Convolution
from sim.prices.routing import EXPONENT, drawn_experts
from sim.prices.terms import window_as_chunks

MicrosecondArray = NDArray[np.float64]

SHORT_DTYPE = {
    "bfloat16": "bf16",
    "half": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int8": "fp8",
    "nvfp4": "nvfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
    "w4a16_mxfp4": "mxfp4",
    "int4_wo": "int4",
}
"""The names of the CSV files as the simulator calls them."""


def predict(family: str, frame: pd.DataFrame, calibration: Calibration) -> MicrosecondArray:
    """[rows] microseconds by the fitted curves; NaN where the calibration has no such series.

    Args:
        family: A key of `raysearch.fidelity.calibration.measured_tables.MEASURED_FAMILIES`.
        frame: Its rows (long form for `moe_alltoall_deepep`).
        calibration: Coefficients; as its rows were benchmarked, launch after launch of one shape.
    """
    price, calibration = _PREDICT[family], calibration.as_benchmarked()
    return np.array([_or_nan(price, calibration, row) for row in frame.itertuples(index=False)], dtype=float)


def bare_roofline(family: str, frame: pd.DataFrame, header: Mapping[str, Mapping[str, float]]) -> MicrosecondArray:
    """[rows] microseconds at a machine's peak rates (as `Calibration.data` has them): FLOP, HBM or link."""
    price, machine = _ROOFLINE[family], machine_of(header)
    return np.array([price(machine, row) for row in frame.itertuples(index=False)], dtype=float)


def series_of(family: str, frame: pd.DataFrame) -> list[str]:
    """[rows] name of the series in the coefficients file that prices each row."""
    name = _SERIES[family]
    return [name(row) for row in frame.itertuples(index=False)]


def _or_nan(price: Callable[[Calibration, Any], float], calibration: Calibration, row: Any) -> float:
    try:
        return price(calibration, row)
    except MissingSeries:
        return float("nan")


# --- one row of each family: series, fitted time, speed of light ------------------------------------------


def _short(name: str) -> str:
    return SHORT_DTYPE[name]


def _gemm_us(calibration: Calibration, row: Any) -> float:
    return calibration.gemm_us(row.framework, _short(row.dtype), row.m, row.n, row.k, _kernel(row))


def _kernel(row: Any) -> str:
    """The kernel of a GEMM, where its engine's of a format are fitted apart; else ""."""
    return getattr(row, "kernel_source", "")


def window_of(row: Any) -> int:
    """Tokens of the sliding window of a row of attention; 0 for none."""
    return getattr(row, "window_size", 0)


def seen_tokens(row: Any) -> float:
    """Cached tokens that a row of decode attention reads: all, or those of its window."""
    return min(row.kv_len, window_of(row) or row.kv_len)


def prompts_as_chunks(row: Any) -> tuple[float, float]:
    """Sequences and the tokens of each that a row of prompt attention is priced as."""
    return window_as_chunks(row.batch_size, row.isl, window_of(row))


def _decode_us(calibration: Calibration, row: Any) -> float:
    shape = (row.batch_size, seen_tokens(row), row.num_heads, row.num_kv_heads, row.head_dim)
    windowed = bool(window_of(row))
    return calibration.attention_decode_us(row.framework, _short(row.kv_cache_dtype), *shape, windowed=windowed)


def _prefill_us(calibration: Calibration, row: Any) -> float:
    shape = (*prompts_as_chunks(row), row.num_heads, row.num_kv_heads, row.head_dim)
    dtypes = (_short(row.attn_dtype), _short(row.kv_cache_dtype))
    return calibration.attention_prefill_us(row.framework, *dtypes, *shape, windowed=bool(window_of(row)))


def _mla_us(calibration: Calibration, row: Any) -> float:
    shape = (row.batch_size, row.kv_len, row.num_heads)
    return calibration.mla_decode_us(_short(row.kv_cache_dtype), *shape, engine=row.framework)


def _module_us(calibration: Calibration, row: Any) -> float:
    return row.projections_us + calibration.sparse_attention_us(module_series(row), module_shape(row)[2:])


def _state_us(calibration: Calibration, row: Any) -> float:
    shape, series = state_shape(row), state_series(row)
    if isinstance(shape, Convolution):
        return calibration.convolution_us(series, shape.sequences, shape.tokens, shape.width)
    return calibration.state_scan_us(series, shape[2:])


def moe_shape(row: Any) -> tuple[float, float, float, float, float, float]:
    """(tokens, hidden, width on the rank, topk, experts, ep) of a measured MoE layer."""
    width = row.inter_size / row.moe_tp_size
    return row.num_tokens, row.hidden_size, width, row.topk, row.num_experts, row.moe_ep_size


def _moe_us(calibration: Calibration, row: Any) -> float:
    return calibration.moe_layer_us(_moe_series(row), *moe_shape(row), **moe_routing(row))


class RoutingColumns(TypedDict):
    """Keywords of `sim.prices.routing.drawn_experts`."""

    skewed: bool
    exponent: float
    all_choices: bool


_ALL_CHOICES = ("sglang", "0.5.10")
"""Engine and release whose measured ranks multiply every choice of the tokens that visit them: A100's rows of bf16 run
at 85 to 118 TFLOP/s so, from 1 to 128 ranks, where their own experts' rows alone would make 85 to 15. [fitted]"""


def moe_routing(row: Any) -> RoutingColumns:
    """How tokens were spread over the experts of a measured MoE layer: "balanced" or "power_law_" and its exponent."""
    _, _, exponent = row.distribution.rpartition("power_law_")
    skewed = row.distribution != "balanced"
    all_choices = (row.framework, getattr(row, "framework_version", "")) == _ALL_CHOICES
    try:
        return RoutingColumns(skewed=skewed, exponent=float(exponent), all_choices=all_choices)
    except ValueError:
        return RoutingColumns(skewed=skewed, exponent=EXPONENT, all_choices=all_choices)


def _collective_us(calibration: Calibration, row: Any) -> float:
    own, library = _collective_series(row), f"collectives/{row.op}/{library_of(row.source)}"
    series = own if own in calibration.series else library
    return calibration.collective_us(series, row.op, row.num_gpus, row.message_bytes)


def _expert_us(calibration: Calibration, row: Any) -> float:
    width = row.hidden * (DISPATCH_EACH if row.side == "dispatch" else COMBINE_EACH)
    shape = (row.tokens_per_rank, width, row.num_experts, row.topk, row.num_nodes)
    return calibration.expert_all_to_all_us(row.side, *shape, mode=row.mode, sms=row.comm_sms)


def _send_recv_us(calibration: Calibration, row: Any) -> float:
    return calibration.send_recv_us(row.scope[:5], row.message_bytes)


def library_of(source: str) -> str:
    """The library behind a source: every version of NCCL is "nccl", the engines' kernels are their own.

    >>> library_of("nccl_2.27.3"), library_of("vllm_graph_0.24.0"), library_of("trtllm_custom_1.3.0rc20")
    ('nccl', 'vllm_custom_graph', 'trtllm_custom')
    """
    if source.startswith("nccl"):
        return "nccl"
    return re.sub(
        r"^(vllm|sglang)_(graph|eager)_[0-9].*", r"\1_custom_\2", re.sub(r"^(trtllm_custom)_.*", r"\1", source)
    )


def _moe_series(row: Any) -> str:
    eight_bit = "_w4a8" if row.dtype.startswith("w4a8") else ""  # activations, of weights in as many bits
    return f"moe/{row.framework}/{row.kernel_source}{eight_bit}/{_short(row.dtype)}"


def _collective_series(row: Any) -> str:
    library = library_of(row.source)
    return f"collectives/{row.op}/{library}" + (f"/{row.source}/{row.dtype}" if library == "nccl" else "")


def _decode_series(row: Any) -> str:
    group = row.num_heads / row.num_kv_heads
    variant = "mha" if group == 1 else "gqa" if group <= 32 else "wide"
    return f"attention_decode/{row.framework}/{_short(row.kv_cache_dtype)}/{variant}{_window(row)}"


def _prefill_series(row: Any) -> str:
    arithmetic, cache = _short(row.attn_dtype), _short(row.kv_cache_dtype)
    return f"attention_prefill/{row.framework}/{arithmetic}/{cache}{_window(row)}"


def _window(row: Any) -> str:
    return "/window" if window_of(row) else ""


def _expert_series(row: Any) -> str:
    tier = "intra" if row.num_nodes == 1 else "inter"
    return f"moe_alltoall_deepep/{row.mode}/{row.side}/{row.comm_sms}/{tier}"


_PREDICT: dict[str, Callable[[Calibration, Any], float]] = {
    "gemm": _gemm_us,
    "attention_decode": _decode_us,
    "attention_prefill": _prefill_us,
    "mla_decode": _mla_us,
    "sparse_attention": _module_us,
    "state": _state_us,
    "moe": _moe_us,
    "collectives": _collective_us,
    "moe_alltoall_deepep": _expert_us,
    "send_recv": _send_recv_us,
}
_SERIES: dict[str, Callable[[Any], str]] = {
    "gemm": lambda row: "/".join(filter(None, ("gemm", row.framework, _short(row.dtype), _kernel(row)))),
    "attention_decode": _decode_series,
    "attention_prefill": _prefill_series,
    "mla_decode": lambda row: "/".join(filter(None, ("mla_decode", row.framework, _short(row.kv_cache_dtype)))),
    "sparse_attention": module_series,
    "state": state_series,
    "moe": _moe_series,
    "collectives": _collective_series,
    "moe_alltoall_deepep": _expert_series,
    "send_recv": lambda row: f"send_recv/{row.scope[:5]}",
}


# --- the bare roofline --------------------------------------------------------------------------------


def _each(name: str) -> float:
    return BYTES[_short(name)]


def _gemm_light(machine: Machine, row: Any) -> float:
    flop_us = 2 * row.m * row.n * row.k / machine.flop_per_us[_short(row.dtype)]
    return max(flop_us, (_each(row.dtype) * (row.m + row.n) * row.k + 2 * row.m * row.n) / machine.hbm_bytes_per_us)


def _decode_light(machine: Machine, row: Any) -> float:
    byte_us = (
        2
        * row.batch_size
        * row.num_kv_heads
        * seen_tokens(row)
        * row.head_dim
        * _each(row.kv_cache_dtype)
        / machine.hbm_bytes_per_us
    )
    flop = 4 * row.batch_size * row.num_heads * row.head_dim * seen_tokens(row)
    return max(byte_us, flop / machine.flop_per_us["bf16"])


def _prefill_light(machine: Machine, row: Any) -> float:
    sequences, tokens = prompts_as_chunks(row)
    return 2 * sequences * row.num_heads * row.head_dim * tokens**2 / machine.flop_per_us[_short(row.attn_dtype)]


def _mla_light(machine: Machine, row: Any) -> float:
    byte_us = row.batch_size * row.kv_len * 576 * _each(row.kv_cache_dtype) / machine.hbm_bytes_per_us
    return max(byte_us, 2 * row.batch_size * row.num_heads * row.kv_len * 1088 / machine.flop_per_us["bf16"])


def _module_light(machine: Machine, row: Any) -> float:
    """Products of the projections, and of attention over what it reads."""
    flop_us = sum(
        2 * shape.rows * shape.inner * shape.columns / machine.flop_per_us[dtype] for dtype, shape in projections(row)
    )
    _, attention_flop_us, _, byte_us, *_ = mixer_terms.sparse_attention(machine, *module_shape(row)[2:])
    return flop_us + (attention_flop_us if module_shape(row).prompts else max(attention_flop_us, byte_us))


def _state_light(machine: Machine, row: Any) -> float:
    shape = state_shape(row)
    if isinstance(shape, Convolution):
        return mixer_terms.convolution(machine, *shape[2:])[1]
    return max(mixer_terms.state_scan(machine, *shape[2:])[1:4])


def _moe_light(machine: Machine, row: Any) -> float:
    tokens, hidden, width, topk, experts, ep = moe_shape(row)
    active, rows, _ = drawn_experts(tokens, topk, experts, ep, skewed=False)
    area = (2 if is_plain(row.kernel_source) else 3) * hidden * width
    return max(
        2 * rows * area / machine.flop_per_us[_short(row.dtype)],
        active * area * _each(row.dtype) / machine.hbm_bytes_per_us,
    )


def _collective_light(machine: Machine, row: Any) -> float:
    passes = 2 if row.op == "all_reduce" else 1
    return row.message_bytes * passes * (row.num_gpus - 1) / row.num_gpus / machine.nvlink_bytes_per_us


def _expert_light(machine: Machine, row: Any) -> float:
    sent = row.tokens_per_rank * row.topk * row.hidden * (DISPATCH_EACH if row.side == "dispatch" else COMBINE_EACH)
    if row.num_nodes == 1:
        return sent * (1 - 1 / machine.node_gpus) / machine.nvlink_bytes_per_us
    return sent * (row.num_nodes - 1) / row.num_nodes / machine.network_bytes_per_us


def _send_recv_light(machine: Machine, row: Any) -> float:
    return row.message_bytes / (
        machine.nvlink_bytes_per_us if row.scope.startswith("intra") else machine.network_bytes_per_us
    )


_ROOFLINE: dict[str, Callable[[Machine, Any], float]] = {
    "gemm": _gemm_light,
    "attention_decode": _decode_light,
    "attention_prefill": _prefill_light,
    "mla_decode": _mla_light,
    "sparse_attention": _module_light,
    "state": _state_light,
    "moe": _moe_light,
    "collectives": _collective_light,
    "moe_alltoall_deepep": _expert_light,
    "send_recv": _send_recv_light,
}
