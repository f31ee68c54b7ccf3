"""Fitted kernels and collectives leave no hole: over all a search can reach, and far outside what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_calibration, load_hardware, load_machine_header
from sim.config.files import config_path
from sim.ops.heuristics import megatron_dims
from sim.prices.calibration import Calibration
from sim.prices.collectives import collective_price, expert_all_to_all, stage_send_s
from sim.prices.curves import (
    LOW_LATENCY_TOKENS,
    Curves,
    DecodeAttention,
    ExpertActivation,
    ExpertRouting,
    Gemm,
    GroupedGemm,
    KernelShape,
    LatentDecode,
    Permute,
    PrefillAttention,
)
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.hardware import AllReduce, EngineName
from sim.prices.mesh import MeshGroup, tp_group
from sim.prices.roofline import PRICED_BY_MEDIANS, Kernel, kernel_time
from sim.prices.routing import drawn_experts
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

H100 = load_hardware("h100_sxm")
H200 = dataclasses.replace(  # with nothing of its own measured
    load_hardware("h200_sxm"),
    curves=Curves(load_calibration("h100_sxm").scaled_to(load_machine_header("h200_sxm")), "trtllm", "trtllm"),
)
FITTED = load_calibration("h100_sxm")
BY_ENGINE = {
    engine: dataclasses.replace(H100, curves=Curves(FITTED, engine, engine)) for engine in get_args(EngineName)
}
ENGINES = st.sampled_from(get_args(EngineName))
DTYPES = st.sampled_from(get_args(Dtype))
MULTIPLIED = st.sampled_from(["bf16", "fp8", "fp8_block"])
"""Formats of measured dense GEMMs."""
KV_DTYPES = st.sampled_from(["bf16", "fp8"])
FACTORS = st.sampled_from([1.0, 1 + 1e-9, 1.001, 1.5, 7.0, 1e3])


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


SIZES = log_floats(0.01, 1e7)
WIDTHS = log_floats(1, 1e7)


def priced(engine: str, shape: KernelShape, dtype: str, kv_dtype: str = "bf16") -> float:
    curves = BY_ENGINE[engine].curves
    assert curves is not None
    found = curves.kernel(shape, dtype, kv_dtype)  # type: ignore[arg-type]
    assert found is not None
    assert 0 < found.time_s < math.inf
    assert 0 < found.error < 1
    return found.time_s


@pytest.mark.parametrize("missing", [{}, {"mape": None}])
def test_a_series_without_a_cross_validated_error_counts_as_uncalibrated(missing: dict[str, None]) -> None:
    name = "gemm/trtllm/fp8"
    record = {key: value for key, value in FITTED.series[name].items() if key not in ("mape", "interval")} | missing
    curves = Curves(Calibration("mine", {**FITTED.data, "series": {name: record}}), "trtllm", "nccl", 0.4)
    for kept in (curves, pickle.loads(pickle.dumps(curves))):
        found = kept.kernel(Gemm(64, 4096, 4096), "fp8", "bf16")
        assert found is not None
        assert found.error == 0.4
        assert found.interval == pytest.approx((1 / 1.8, 1.8))


def grows(time: Callable[..., float], sizes: dict[str, float], factor: float, *, along: tuple[str, ...]) -> None:
    """Time must not fall with any of the sizes, and hardly move when one hardly moves."""
    base = time(**sizes)
    for name in along:
        assert time(**{**sizes, name: sizes[name] * factor}) >= base * (1 - 1e-12), name
        assert time(**{**sizes, name: sizes[name] * (1 + 1e-9)}) <= base * (1 + 1e-6), name


@settings(derandomize=True, deadline=None)
@given(ENGINES, MULTIPLIED, SIZES, WIDTHS, WIDTHS, FACTORS)
def test_gemms(engine: str, dtype: Dtype, rows: float, inner: float, columns: float, factor: float) -> None:
    def time(**sizes: float) -> float:
        return priced(engine, Gemm(**sizes), dtype)

    sizes = {"rows": rows, "inner": inner, "columns": columns}
    grows(time, sizes, factor, along=("rows", "inner", "columns"))
    almost = 1 + 1e-12
    assert time(**sizes) * almost >= 2 * rows * inner * columns / H100.peak_flop_per_s[dtype]
    each = 2 if dtype == "bf16" else 1
    assert time(**sizes) * almost >= inner * columns * each / 3.35e12
    assert time(**sizes) > 2e-6


@settings(derandomize=True, deadline=None)
@given(
    ENGINES,
    KV_DTYPES,
    log_floats(1, 1e6),
    log_floats(1, 1e8),
    st.sampled_from([1, 2, 8, 16, 128, 1024]),
    st.sampled_from([1, 1.5, 2, 8, 16, 32, 40, 64, 128]),
    st.sampled_from([32, 64, 96, 128, 256, 512]),
    st.booleans(),
    FACTORS,
)
def test_decode_attention(
    engine: str,
    kv_dtype: str,
    sequences: float,
    kv_len: float,
    kv_heads: float,
    group: float,
    head_dim: float,
    multi_head: bool,
    factor: float,
) -> None:
    def time(**sizes: float) -> float:
        shape = DecodeAttention(head_dim=head_dim, multi_head=multi_head, **sizes)
        return priced(engine, shape, "bf16", kv_dtype)

    heads = kv_heads if multi_head else kv_heads * group
    sizes = {"sequences": sequences, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads}
    # A kernel for more than 32 query heads per KV head is slower: a step, up, that no strategy can cross backwards.
    grows(time, sizes, factor, along=("sequences", "kv_len"))
    if not multi_head:
        assert time(**{**sizes, "heads": heads * factor}) >= time(**sizes) * (1 - 1e-12)
    each = 2 if kv_dtype == "bf16" else 1
    almost = 1 + 1e-12
    assert time(**sizes) * almost >= 2 * sequences * kv_len * kv_heads * head_dim * each / 3.35e12
    assert time(**sizes) * almost >= 4 * sequences * kv_len * heads * head_dim / 989e12
    assert time(**sizes) > 2e-6


@settings(derandomize=True, deadline=None)
@given(ENGINES, DTYPES, st.booleans(), SIZES, st.sampled_from([1, 4, 16, 512]), WIDTHS, WIDTHS, FACTORS)
def test_the_pieces_of_a_moe_layer(
    engine: str, dtype: Dtype, gated: bool, rows: float, local: float, inner: float, columns: float, factor: float
) -> None:
    active = local * (1 - math.exp(-rows / local))
    sizes = {"rows": rows, "inner": inner, "columns": columns, "active": active}

    def grouped(**given: float) -> float:
        return priced(engine, GroupedGemm(local=local, gated=gated, skewed=False, **given), dtype)

    grows(grouped, sizes, factor, along=("rows", "inner", "columns", "active"))
    each = DTYPE_BYTES[dtype]
    almost = 1 + 1e-12
    assert grouped(**sizes) * almost >= 2 * rows * inner * columns / H100.peak_flop_per_s[dtype]
    assert grouped(**sizes) * almost >= active * inner * columns * each / 3.35e12

    def permute(**given: float) -> float:
        return priced(engine, Permute(dtype=dtype, gated=gated, **given), dtype)

    def activation(**given: float) -> float:
        return priced(engine, ExpertActivation(dtype=dtype, gated=gated, **given), dtype)

    def routing(**given: float) -> float:
        return priced(engine, ExpertRouting(dtype=dtype, gated=gated, **given), dtype)

    grows(permute, {"tokens": rows, "rows": 2 * rows, "hidden": inner}, factor, along=("tokens", "rows", "hidden"))
    grows(activation, {"rows": rows, "width": inner}, factor, along=("rows", "width"))
    grows(routing, {"tokens": rows, "experts": local, "topk": 2}, factor, along=("tokens", "experts", "topk"))


KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
DEGREES = st.sampled_from([2, 3, 4, 6, 8, 16, 32, 64, 128])
MESSAGES = st.one_of(st.just(0.0), log_floats(1, 1e12))


@settings(derandomize=True, deadline=None)
@given(ENGINES, st.sampled_from(KINDS), DEGREES, MESSAGES, FACTORS)
def test_collectives(engine: str, kind: str, degree: int, message: float, factor: float) -> None:
    hardware, group = BY_ENGINE[engine], tp_group(degree, 8)
    found = collective_price(hardware, kind, group, message).time_s
    assert 1e-6 < found < math.inf
    assert collective_price(hardware, kind, group, message * factor).time_s >= found * (1 - 1e-12)
    assert collective_price(hardware, kind, group, message * (1 + 1e-9)).time_s <= found * (1 + 1e-6)
    assert found * (1 + 1e-12) >= message * (degree - 1) / degree**2 / 450e9


@settings(derandomize=True, deadline=None)
@given(ENGINES, st.sampled_from(KINDS), MESSAGES)
def test_leaving_the_node_never_pays(engine: str, kind: str, message: float) -> None:
    inside = collective_price(BY_ENGINE[engine], kind, MeshGroup(8, 8), message)
    for group in (MeshGroup(8, 4), MeshGroup(8, 1), MeshGroup(16, 8), MeshGroup(128, 8)):
        across = collective_price(BY_ENGINE[engine], kind, group, message * group.degree / 8)
        assert across.time_s >= inside.time_s * (1 - 1e-12)
        assert "across nodes" in across.extrapolated
    assert inside.error <= across.error


def test_leaving_the_node_is_marked_without_curves_too() -> None:
    medians = dataclasses.replace(H100, curves=None)
    assert collective_price(medians, "all_reduce", MeshGroup(8, 8), 1e6).extrapolated == ""
    assert (
        collective_price(medians, "all_reduce", MeshGroup(16, 8), 1e6).extrapolated == "all-reduce over tp across nodes"
    )


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from(["dispatch", "combine"]),
    log_floats(0.01, 1e6),
    log_floats(1, 1e6),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 8, 16, 256, 512]),
    st.sampled_from([1, 2, 8]),
    FACTORS,
)
def test_expert_all_to_all(
    side: str, tokens: float, columns: float, each: int, experts: int, topk: int, factor: float
) -> None:
    def time(group: MeshGroup, **sizes: float) -> float:
        return expert_all_to_all(H100, side, group, each=each, experts=experts, topk=topk, **sizes).time_s

    sizes = {"tokens": tokens, "columns": columns}
    groups = [
        MeshGroup(2, 2),
        MeshGroup(4, 4),
        MeshGroup(8, 8),
        MeshGroup(16, 8),
        MeshGroup(32, 8),
        MeshGroup(64, 8),
        MeshGroup(256, 8),
    ]
    times = [time(group, **sizes) for group in groups]
    assert all(0 < t < math.inf for t in times)
    assert times == sorted(times)  # more peers, then more nodes
    for group in groups:
        grows(lambda group=group, **s: time(group, **s), sizes, factor, along=("tokens", "columns"))
        if group.nodes > 1:
            # Beyond low latency a token travels once to each node.
            per_token = topk if tokens <= LOW_LATENCY_TOKENS else group.nodes * (1 - (1 - 1 / group.nodes) ** topk)
            sent = tokens * per_token * columns * each
            assert time(group, **sizes) * (1 + 1e-12) >= sent * (group.nodes - 1) / group.nodes / 50e9


@settings(derandomize=True, deadline=None)
@given(MESSAGES, FACTORS)
def test_send_and_receive(message: float, factor: float) -> None:
    pairs = MeshGroup(2, 2), MeshGroup(2, 1)
    inside, across = (stage_send_s(H100, pair, message) for pair in pairs)
    assert 1e-6 < inside <= across < math.inf
    assert across * (1 + 1e-12) >= message / 50e9
    for pair, found in zip(pairs, (inside, across), strict=True):
        assert stage_send_s(H100, pair, message * factor) >= found


TERMS: list[tuple[Callable[..., float], dict[str, float]]] = [
    (
        lambda **s: FITTED.attention_prefill_us("trtllm", "bf16", "fp8", **s),
        {"sequences": 2.0, "tokens": 3000.0, "heads": 16.0, "kv_heads": 2.0, "head_dim": 128.0},
    ),
    (lambda **s: FITTED.mla_decode_us("bf16", **s), {"sequences": 20.0, "kv_len": 5000.0, "heads": 16.0}),
    (
        lambda **s: FITTED.moe_layer_us("moe/trtllm/moe_torch_flow_cutlass/fp8", ep=4.0, skewed=True, **s),
        {"tokens": 100.0, "hidden": 4096.0, "width": 1536.0, "topk": 8.0, "experts": 128.0},
    ),
]


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(TERMS), st.lists(log_floats(1e-2, 1e3), min_size=5, max_size=5), FACTORS)
def test_kernels_that_only_serving_uses(case: Any, scales: list[float], factor: float) -> None:
    time, sizes = case
    scaled = {name: size * scale for (name, size), scale in zip(sizes.items(), scales, strict=False)}
    assert 0 < time(**scaled) < math.inf
    grows(time, scaled, factor, along=tuple(name for name in sizes if name not in ("experts", "topk")))


def test_only_a_benchmark_finds_its_operands_in_the_cache_of_the_launch_before() -> None:
    l40s = load_calibration("l40s")
    shape = ("sglang", "bf16", 16.0, 512.0, 16.0, 16.0, 128.0)  # 67 MB, in a cache of 96
    streamed_us = 2 * 16 * 512 * 16 * 128 * 2 / l40s.machine.hbm_bytes_per_us
    assert l40s.attention_decode_us(*shape) == pytest.approx(streamed_us)
    assert l40s.as_benchmarked().attention_decode_us(*shape) < streamed_us / 3


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    ("engine", "dtype", "series"),
    [
        ("trtllm", "fp8_block", "moe/trtllm/moe_torch_flow_cutlass/fp8_block"),
        ("vllm", "fp8_block", "moe/vllm/vllm_fp8moe_triton_tritonexperts/fp8_block"),
        ("sglang", "fp8", "moe/sglang/sglang_fused_moe_triton/fp8_block"),
        ("vllm", "mxfp4", "moe/vllm/vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic/mxfp4"),
    ],
)
def test_the_pieces_of_a_moe_layer_add_up_to_the_measured_whole(
    engine: str, dtype: Dtype, series: str, skewed: bool
) -> None:
    tokens, hidden, width, topk, experts, ep = 512.0, 4096.0, 1536.0, 8.0, 128.0, 4.0
    active, rows, local = drawn_experts(tokens, topk, experts, ep, skewed=skewed)
    pieces = [
        ExpertRouting(tokens, experts, topk, dtype, gated=True),
        Permute(tokens, rows, hidden, dtype, gated=True),
        GroupedGemm(rows, hidden, 2 * width, active, local, gated=True, skewed=skewed),
        ExpertActivation(rows, width, dtype, gated=True),
        GroupedGemm(rows, width, hidden, active, local, gated=True, skewed=skewed),
        Permute(tokens, rows, hidden, dtype, gated=True),
    ]
    summed_s = sum(priced(engine, piece, dtype) for piece in pieces)
    priced_as = dtype if dtype == "mxfp4" else series.rpartition("/")[2]
    whole_us = FITTED.moe_layer_us(series, tokens, hidden, width, topk, experts, ep, skewed=skewed, dtype=priced_as)
    # Never less: a piece alone does not beat its bytes, which the sum of a layer may hide.
    assert whole_us * 1e-6 * (1 - 1e-12) <= summed_s <= whole_us * 1e-6 * 1.005


@settings(derandomize=True, deadline=None)
@given(ENGINES, KV_DTYPES, st.lists(log_floats(1e-2, 1e2), min_size=5, max_size=5), FACTORS)
def test_attention_of_prompts_and_over_latents(engine: str, kv: str, scales: list[float], factor: float) -> None:
    def prefill(**sizes: float) -> float:
        return priced(engine, PrefillAttention(**sizes), "bf16", kv)

    def latent(**sizes: float) -> float:
        return priced(engine, LatentDecode(**sizes), "bf16", kv)

    typical = {"sequences": 2.0, "tokens": 3000.0, "heads": 16.0, "kv_heads": 2.0, "head_dim": 128.0}
    sizes = {name: size * scale for (name, size), scale in zip(typical.items(), scales, strict=True)}
    grows(prefill, sizes, factor, along=tuple(sizes))
    sizes = {"sequences": 20.0 * scales[0], "kv_len": 5000.0 * scales[1], "heads": 16.0 * scales[2]}
    grows(latent, sizes, factor, along=tuple(sizes))


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp8_block"])
def test_the_aspect_of_an_expert_gemm_costs_what_it_costs_a_dense_one(engine: str, dtype: Dtype) -> None:
    for rows in (4, 16, 64):
        for inner, columns in ((30720, 2048), (16384, 1024), (8192, 4096)):
            dense = [priced(engine, Gemm(rows, *sides), dtype) for sides in ((inner, columns), (columns, inner))]
            grouped = [
                priced(engine, GroupedGemm(rows, *sides, active=1, local=1, gated=True), dtype)
                for sides in ((inner, columns), (columns, inner))
            ]
            assert 1 / 1.8 <= (grouped[0] / grouped[1]) / (dense[0] / dense[1]) <= 1.8
            assert grouped[0] >= grouped[1]


def test_an_expert_gemm_of_widths_that_no_measured_layer_has_is_marked_and_less_sure() -> None:
    curves = Curves(FITTED, "trtllm", "trtllm")

    def judged(inner: float, columns: float) -> tuple[str, float]:
        found = curves.kernel(GroupedGemm(64, inner, columns, 4, 4, gated=True), "fp8", "fp8")
        assert found is not None
        return found.extrapolated, found.error

    ranges = FITTED.series["moe/trtllm/moe_torch_flow_cutlass/fp8"]["range"]
    assert ranges["width_per_hidden"][1] == 3.5
    first, second, on_hidden = judged(4096, 2 * 1536), judged(1536, 4096), judged(30720, 2048)
    assert first[0] == second[0] == ""
    assert on_hidden[0] == "experts of unmeasured widths"
    assert on_hidden[1] >= H100.errors.extrapolated > first[1] == second[1]


def test_few_local_experts_have_an_interval_of_their_own() -> None:
    record = FITTED.series["moe/trtllm/moe_torch_flow_cutlass/fp8"]
    curves = Curves(FITTED, "trtllm", "trtllm")
    few, many = (
        curves.kernel(GroupedGemm(64, 4096, 3072, local, local, gated=True), "fp8", "fp8") for local in (8, 16)
    )
    assert few is not None
    assert many is not None
    assert list(few.interval) == record["interval_of_few"]
    assert list(many.interval) == record["interval"]


@pytest.mark.parametrize(
    ("shape", "gain"),
    [
        (DecodeAttention(256, 16384, 16, 2, 128, False), 4800 / 3350),  # streams the cache
        (Gemm(8192, 8192, 8192), 1.0),  # multiplies
        (Gemm(1, 128, 128), 1.0),  # launches
    ],
)
def test_efficiencies_carried_over_gain_what_the_machine_gains(shape: KernelShape, gain: float) -> None:
    old, new = (hardware.curves.kernel(shape, "fp8", "fp8") for hardware in (H100, H200))  # type: ignore[union-attr]
    assert old is not None
    assert new is not None
    assert old.time_s / new.time_s == pytest.approx(gain, rel=0.15)
    assert "efficiencies carried over from h100_sxm" in new.extrapolated
    assert new.error >= H200.errors.extrapolated
    assert new.interval[0] < old.interval[0] < old.interval[1] < new.interval[1]


@settings(derandomize=True, deadline=None)
@given(SIZES, WIDTHS, WIDTHS)
def test_more_bandwidth_never_slows_a_kernel_and_never_gains_more_than_itself(
    rows: float, inner: float, columns: float
) -> None:
    old, new = (
        hardware.curves.kernel(Gemm(rows, inner, columns), "fp8", "fp8").time_s  # type: ignore[union-attr]
        for hardware in (H100, H200)
    )
    assert old * 3350 / 4800 * (1 - 1e-9) <= new <= old * (1 + 1e-9)


def test_what_stands_in_for_another_engines_kernel_says_so() -> None:
    sglang = Curves(FITTED, "sglang", "sglang").kernel(PrefillAttention(2, 4096, 16, 2, 128), "bf16", "fp8")
    vllm = Curves(FITTED, "vllm", "vllm").kernel(PrefillAttention(2, 4096, 16, 2, 128), "bf16", "fp8")
    assert sglang is not None
    assert vllm is not None
    assert sglang.time_s == vllm.time_s
    assert (sglang.extrapolated, vllm.extrapolated) == ("sglang fp8 priced as attention_prefill/vllm/bf16/fp8", "")


def without_four_bits(workload: Workload) -> Workload:
    curves = workload.hardware.curves
    assert curves is not None
    data = curves.calibration.data
    series = {name: each for name, each in data["series"].items() if name.rpartition("/")[2] != "int4"}
    known = Calibration("fewer", {**data, "series": series})
    return dataclasses.replace(workload, hardware=dataclasses.replace(workload.hardware, curves=curves.under(known)))


def test_formats_of_four_bits_that_nothing_was_measured_in_say_to_which_side_they_err() -> None:
    notes = {
        dtype: question_about("kimi_k2_5", isl=4096, osl=512, engine="vllm", gpus=8, weights=dtype).load()
        for dtype in ("int4", "fp8", "bf16")
    }
    too_fast = "at their fewer bytes: probably too fast"
    for dtype, workload in notes.items():
        dims = megatron_dims(workload.model)
        named = evaluate(without_four_bits(workload), Strategy(8, 1, 1, 64, dims)).extrapolated
        experts = [each for each in named if each.startswith(("experts", "vllm int4 priced as moe/trtllm"))]
        assert len(experts) == 2
        assert all(too_fast in each for each in experts)
        gemms = [each for each in named if each.startswith("kernels without a fitted curve")]
        assert [too_fast in each for each in gemms] == ([True] if dtype == "int4" else [])
    oss = question_about("gpt_oss_120b", isl=4096, osl=512, engine="vllm", gpus=8).load()
    assert too_fast not in str(evaluate(oss, Strategy(4, 1, 1, 64, megatron_dims(oss.model))).extrapolated)


def test_the_bar_of_formats_that_were_never_run_reaches_to_kernels_that_gain_nothing_over_fp8() -> None:
    dense = {
        dtype: question_about("llama_3_1_8b", isl=4000, osl=500, gpus=8, weights=dtype).load()
        for dtype in ("fp8", "int4", "nvfp4")
    }
    found = {name: evaluate(each, Strategy(1, 1, 1, 4, megatron_dims(each.model))) for name, each in dense.items()}
    low_s, high_s = found["int4"].tpot_interval_s
    assert low_s < found["int4"].tpot_s < high_s
    asymmetry = {name: each.kernel_interval[0] * each.kernel_interval[1] for name, each in found.items()}
    assert min(asymmetry["int4"], asymmetry["nvfp4"]) > 1.2 > asymmetry["fp8"]
    assert found["fp8"].tpot_interval_s[0] < high_s  # four bits may be as slow as eight


def test_many_tokens_per_rank_take_the_normal_mode_of_the_expert_all_to_all() -> None:
    curves = Curves(FITTED, "vllm", "vllm")
    few, many = (curves.expert_all_to_all("dispatch", n, 7168, 1, 256, 8, 8, 2) for n in (1024.0, 8192.0))
    assert few is not None
    assert many is not None
    assert few.time_s * 1e6 == pytest.approx(
        FITTED.expert_all_to_all_us("dispatch", 1024, 7168 * 1.03, 256, 8, 2), rel=1e-12
    )
    assert many.time_s * 1e6 == pytest.approx(
        FITTED.expert_all_to_all_us("dispatch", 8192, 7168 * 1.03, 256, 8, 2, mode="normal", sms=24), rel=1e-12
    )


def test_the_smallest_kernels_take_their_measured_floors() -> None:
    assert 2.7e-6 < priced("vllm", Gemm(1, 128, 128), "bf16") < 7e-6
    assert 4e-6 < priced("trtllm", DecodeAttention(1, 16, 8, 1, 128, False), "bf16") < 13e-6


def test_a_kernel_no_curve_describes_falls_back_to_the_medians() -> None:
    lacking = {**FITTED.data, "series": {k: v for k, v in FITTED.series.items() if not k.startswith("gemm/")}}
    partial = dataclasses.replace(H100, curves=Curves(Calibration("partial", lacking), "trtllm", "trtllm"))
    medians = dataclasses.replace(H100, curves=None)
    kernel = Kernel("gemm", "fp8", "fp8", 1e12, 1e9, Gemm(1e3, 1e4, 5e4))
    assert kernel_time(partial, kernel) == kernel_time(medians, kernel)._replace(extrapolated=PRICED_BY_MEDIANS)
    assert kernel_time(partial, kernel).error == H100.errors.uncalibrated
    attention = Kernel("attention", "bf16", "fp8", 1e9, 1e9, DecodeAttention(64, 8192, 16, 2, 128, False))
    assert kernel_time(partial, attention) == kernel_time(H100, attention) != kernel_time(medians, attention)


def test_what_lies_outside_the_measured_range_says_so_and_is_less_sure() -> None:
    inside = kernel_time(H100, Kernel("gemm", "fp8", "fp8", 1, 1, Gemm(64, 4096, 4096)))
    outside = kernel_time(H100, Kernel("gemm", "fp8", "fp8", 1, 1, Gemm(64, 4096, 1e7)))
    assert (inside.extrapolated, outside.extrapolated) == ("", "GEMM beyond measured columns")
    assert inside.error < H100.errors.extrapolated <= outside.error
    assert outside.interval[0] < inside.interval[0] < 1 < inside.interval[1] < outside.interval[1]


def test_attention_of_more_query_heads_than_an_engine_is_built_for_is_marked() -> None:
    for engine in ("trtllm", "vllm", "sglang"):
        curves = Curves(FITTED, engine, engine)
        usual, wide = (
            curves.kernel(DecodeAttention(64, 8192, heads, 1, 128, False), "bf16", "fp8") for heads in (32, 64)
        )
        assert usual is not None
        assert wide is not None
        assert usual.extrapolated == ""
        assert wide.extrapolated == "attention of more than 32 query heads per KV head"
        assert wide.time_s >= usual.time_s
        assert wide.error >= H100.errors.extrapolated > usual.error
        assert wide.interval[0] < usual.interval[0] < 1 < usual.interval[1] < wide.interval[1]


def test_the_error_of_serving_is_that_of_the_calibrations_held_out_runs(tmp_path: Path) -> None:
    assert H100.errors.serving == FITTED.data["serving"]["mape"]
    text = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    path = tmp_path / "x.toml"
    path.write_text(text.replace("[expected_error]", "[expected_error]\nserving = 0.2"), encoding="utf-8")
    assert load_hardware(path).errors.serving == 0.2
    path.write_text(text.replace('calibration = "h100_sxm"', ""), encoding="utf-8")
    assert load_hardware(path).errors.serving == load_hardware(path).errors.uncalibrated  # never compared with any


@pytest.mark.parametrize("machine", ["h200_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server"])
def test_measured_decode_attention_prices_its_engine_where_no_wide_groups_were_measured(machine: str) -> None:
    calibration = load_calibration(machine)
    measured = {tuple(series.split("/")[1:]) for series in calibration.series if series.startswith("attention_decode/")}
    narrow = {each[:2] for each in measured if each[2:] == ("gqa",)} - {each[:2] for each in measured if "wide" in each}
    assert narrow
    for engine, dtype in narrow:
        usual, widest, wide = (
            Curves(calibration, engine, "nccl").kernel(DecodeAttention(64, 4096, heads, 1, 128, False), dtype, dtype)
            for heads in (8, 32, 64)
        )
        assert (usual.extrapolated, widest.extrapolated) == ("", "")
        assert wide.extrapolated == "attention of more than 32 query heads per KV head"
        assert usual.time_s <= widest.time_s < wide.time_s <= 2 * widest.time_s * (1 + 1e-9)


def test_nccl_alone_is_slower_than_an_engines_own_all_reduce_on_small_messages() -> None:
    nccl = dataclasses.replace(H100, curves=Curves(FITTED, "trtllm", "nccl"))
    small = [collective_price(hardware, "all_reduce", tp_group(8, 8), 131072.0).time_s for hardware in (H100, nccl)]
    assert 6.2e-6 <= small[0] * 1.1 < small[1] == pytest.approx(19e-6, rel=0.1)


@pytest.mark.parametrize("machine", ["h100_sxm", "l40s", "gb200_nvl72"])
def test_the_fastest_all_reduce_is_the_least_of_all_that_were_measured_and_says_whose(machine: str) -> None:
    hardware = load_hardware(machine)
    curves, taken = hardware.curves, set[str]()
    assert curves is not None
    for gpus, message in itertools.product((2, 4), (1e4, 1e6, 8e6, 5e8)):
        each = [curves.under(all_reduce=who).collective("all_reduce", gpus, message) for who in get_args(AllReduce)[:4]]
        fastest = curves.under(all_reduce="fastest").collective("all_reduce", gpus, message)
        assert fastest is not None
        assert fastest == min(priced for priced in each if priced)
        light = 2 * (gpus - 1) / gpus * message / (curves.calibration.data["speed_of_light"]["nvlink_gb_per_s"] * 1e9)
        assert fastest.time_s >= light
        taken.add(fastest.algorithm)
    assert len(taken) > 1


def test_overlap_hides_its_share_of_a_collective() -> None:
    hidden = dataclasses.replace(H100, communication_overlap=0.4)
    group = tp_group(8, 8)
    whole, rest = (collective_price(hardware, "all_gather", group, 1e7).time_s for hardware in (H100, hidden))
    assert rest == pytest.approx(0.6 * whole)


def test_curves_survive_being_sent_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(H100.curves))
    assert copy.kernel(Gemm(64, 4096, 4096), "fp8", "fp8") == H100.curves.kernel(Gemm(64, 4096, 4096), "fp8", "fp8")  # type: ignore[union-attr]
