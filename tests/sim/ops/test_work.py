"""FLOPs, bytes, seconds and weights of every op under every choice, worked out by hand on the toy machine.

tp = 4, ep = 2, batch 16: 8 tokens per ep rank, 16 copies for experts, 4 local experts of which
A = 4 * (1 - (1 - 2/8) ** 16) are visited. Activations have 2 bytes, weights, KV cache and
dispatched tokens 1; norms and the router keep theirs in 2.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from sim.evaluation import OpBreakdown
from sim.layers.model import uniform_model
from sim.ops.layers import layer_ops
from sim.ops.work import op_work
from sim.prices.collectives import Collective
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.costs import rank_of
from sim.strategy import Strategy
from sim.workload import Workload

A = 4 * (1 - 0.75**16)  # 3.9599 of 4 local experts
GEMM_FP8, GEMM_FP8_BYTES = 2.4e12, 0.5e12  # FLOP/s and B/s, see conftest
POINTWISE, STREAM = 0.4e12, 0.8e12  # STREAM is also the router's, in bf16
ATTENTION, KV = 2.0e12, 0.4e12


class Expected(NamedTuple):
    """One op under one choice, by hand."""

    op: str
    choice: int
    flops: float
    traffic: float
    seconds: float
    weight: float = 0.0
    kv: float = 0.0


EXPECTED = [
    # Norm: square and sum, scale, weight = 4 FLOP per element. Write, weight of hidden: the add before it has read.
    Expected("attn_norm", 0, 4 * 2 * 64, 2 * 64 * 2 + 64 * 2, 512 / POINTWISE, 128),
    Expected("attn_norm", 1, 4 * 8 * 16, 8 * 16 * 2 + 16 * 2, 512 / POINTWISE, 32),
    Expected("attn_norm", 2, 4 * 8 * 64, 8 * 64 * 2 + 64 * 2, 2048 / POINTWISE, 128),
    # [8, 64] x [64, 192]; 192 = (8 query + 2 key + 2 value heads) * 16.
    # d: 16 of 64 rows of the weight. The output is whole, and partial.
    Expected("qkv_proj", 0, 2 * 8 * 16 * 192, 8 * 16 * 2 + 16 * 192 + 8 * 192 * 2, 49152 / GEMM_FP8, 3072),
    # q: 2 query heads, and one of the 2 KV heads on each of the 4 GPUs: (2 + 1 + 1) * 16 = 64 columns.
    Expected("qkv_proj", 1, 2 * 8 * 64 * 64, 8 * 64 * 2 + 64 * 64 + 8 * 64 * 2, 65536 / GEMM_FP8, 4096),
    Expected("qkv_proj", 2, 2 * 8 * 64 * 192, 8 * 64 * 2 + 64 * 192 + 8 * 192 * 2, 196608 / GEMM_FP8, 12288),
    # Scores and values: 2 products of 2 FLOP per query head, dim and cached token; K and V of 1000 tokens.
    # The rotary embedding reads and writes q, k and v: 4 bytes per element.
    # requests: 2 sequences. New q, k, v and output: (8 + 2 + 2 + 8) * 16 elements each.
    Expected(
        "attention",
        0,
        4 * 2 * 8 * 16 * 1000,
        128_000 + 2 * 320 * 2 + 2 * 192 * 4,
        1_024_000 / ATTENTION + 1536 / STREAM,
        kv=2 * 1000 * 2 * 2 * 16,
    ),
    # heads: 8 sequences, 2 query heads and 1 replicated KV head: (2 + 1 + 1 + 2) * 16 new elements each.
    Expected(
        "attention",
        1,
        4 * 8 * 2 * 16 * 1000,
        256_000 + 8 * 96 * 2 + 8 * 64 * 4,
        (256_000 + 1536) / KV + 2048 / STREAM,
        kv=8 * 1000 * 2 * 1 * 16,
    ),
    Expected(
        "attention",
        2,
        4 * 8 * 8 * 16 * 1000,
        512_000 + 8 * 320 * 2 + 8 * 192 * 4,
        4_096_000 / ATTENTION + 6144 / STREAM,
        kv=8 * 1000 * 2 * 2 * 16,
    ),
    # [8, 128] x [128, 64]
    Expected("o_proj", 0, 2 * 8 * 32 * 64, 8 * 32 * 2 + 32 * 64 + 8 * 64 * 2, 32768 / GEMM_FP8, 2048),
    Expected("o_proj", 1, 2 * 8 * 128 * 16, 8 * 128 * 2 + 128 * 16 + 8 * 16 * 2, 32768 / GEMM_FP8, 2048),
    Expected("o_proj", 2, 2 * 8 * 128 * 64, 8 * 128 * 2 + 128 * 64 + 8 * 64 * 2, 131072 / GEMM_FP8, 8192),
    # Two reads and a write of [8, 64] or a quarter of it.
    Expected("attn_residual", 0, 2 * 64, 3 * 2 * 64 * 2, 768 / STREAM),
    Expected("attn_residual", 1, 8 * 16, 3 * 8 * 16 * 2, 768 / STREAM),
    Expected("attn_residual", 2, 8 * 64, 3 * 8 * 64 * 2, 3072 / STREAM),
    Expected("ffn_norm", 0, 512, 384, 512 / POINTWISE, 128),
    Expected("ffn_norm", 1, 512, 288, 512 / POINTWISE, 32),
    Expected("ffn_norm", 2, 2048, 1152, 2048 / POINTWISE, 128),
    # [8, 64] x [64, 8] in bf16, then top-2 of 8: 5 FLOP per logit; reads logits, writes 2 entries of 8 bytes.
    Expected(
        "router",
        0,
        2 * 2 * 64 * 8 + 5 * 2 * 8,
        (2 * 64 * 2 + 64 * 8 * 2 + 2 * 8 * 2) + (2 * 8 * 2 + 2 * 2 * 8),
        1312 / STREAM + 80 / POINTWISE,  # top-k: 80 FLOP take longer than 64 bytes
        1024,
    ),
    Expected(
        "router",
        1,
        2 * 8 * 64 * 2 + 5 * 8 * 8,
        (8 * 64 * 2 + 64 * 2 * 2 + 8 * 2 * 2) + (8 * 8 * 2 + 8 * 2 * 8),
        1312 / STREAM + 320 / POINTWISE,
        256,
    ),
    Expected(
        "router",
        2,
        2 * 8 * 64 * 8 + 5 * 8 * 8,
        (8 * 64 * 2 + 64 * 8 * 2 + 8 * 8 * 2) + (8 * 8 * 2 + 8 * 2 * 8),
        2176 / STREAM + 320 / POINTWISE,
        1024,
    ),
    # Permute: read every token in bf16, write two copies in fp8.
    Expected("dispatch", 0, 0, 2 * 64 * 2 + 4 * 64, 512 / STREAM),
    Expected("dispatch", 1, 0, 8 * 16 * 2 + 16 * 16, 512 / STREAM),
    Expected("dispatch", 2, 0, 8 * 64 * 2 + 16 * 64, 2048 / STREAM),
    # 16 copies over the local experts, [64, 2 * 96] each: every weight is held, those of A experts are read.
    Expected(
        "ffn1",
        0,
        2 * 16 * 16 * 192,
        16 * 16 + A * 16 * 192 + 16 * 192 * 2,
        98304 / GEMM_FP8,
        4 * 16 * 192,
    ),
    Expected("ffn1", 1, 2 * 16 * 64 * 48, 16 * 64 + A * 64 * 48 + 16 * 48 * 2, 98304 / GEMM_FP8, 4 * 64 * 48),
    Expected("ffn1", 2, 2 * 16 * 64 * 192, 16 * 64 + A * 64 * 192 + 16 * 192 * 2, 393216 / GEMM_FP8, 4 * 64 * 192),
    # SwiGLU: exp, add, divide and two products per output; reads gate and up, writes one.
    Expected("activation", 0, 5 * 4 * 96, 4 * 192 * 2 + 4 * 96 * 2, 1920 / POINTWISE),
    Expected("activation", 1, 5 * 16 * 24, 16 * 48 * 2 + 16 * 24 * 2, 1920 / POINTWISE),
    Expected("activation", 2, 5 * 16 * 96, 16 * 192 * 2 + 16 * 96 * 2, 7680 / POINTWISE),
    # 16 copies, [96, 64] per expert.
    Expected("ffn2", 0, 2 * 16 * 24 * 64, 16 * 24 * 2 + A * 24 * 64 + 16 * 64 * 2, 49152 / GEMM_FP8, 4 * 24 * 64),
    Expected("ffn2", 1, 2 * 16 * 96 * 16, 16 * 96 * 2 + A * 96 * 16 + 16 * 16 * 2, 49152 / GEMM_FP8, 4 * 96 * 16),
    Expected("ffn2", 2, 2 * 16 * 96 * 64, 16 * 96 * 2 + A * 96 * 64 + 16 * 64 * 2, 196608 / GEMM_FP8, 4 * 96 * 64),
    # Weighted sum of the copies (2 FLOP each) plus the residual; reads copies and residual, writes the stream.
    Expected("combine", 0, 2 * 4 * 64 + 2 * 64, (4 + 2 + 2) * 64 * 2, 640 / POINTWISE),
    Expected("combine", 1, 2 * 16 * 16 + 8 * 16, (16 + 8 + 8) * 16 * 2, 640 / POINTWISE),
    Expected("combine", 2, 2 * 16 * 64 + 8 * 64, (16 + 8 + 8) * 64 * 2, 2560 / POINTWISE),
]
ids = [f"{expected.op}-{expected.choice}" for expected in EXPECTED]


def breakdown(workload: Workload, op: str, choice: int, ep: int = 2) -> OpBreakdown:
    """The op in a strategy that makes the same choice everywhere."""
    dims = (choice,) * len(layer_ops(workload.model).ops)
    return next(found for found in evaluate(workload, Strategy(4, ep, 1, 8 * ep, dims)).ops if found.name == op)


def test_the_hand_computed_table_covers_every_op_and_choice(toy_moe: Workload) -> None:
    names = [op.name for op in layer_ops(toy_moe.model).ops]
    assert sorted((e.op, e.choice) for e in EXPECTED) == sorted((n, c) for n in names for c in (0, 1, 2))


@pytest.mark.parametrize("expected", EXPECTED, ids=ids)
def test_flops_bytes_and_seconds_match_the_hand_computation(toy_moe: Workload, expected: Expected) -> None:
    op = breakdown(toy_moe, expected.op, expected.choice)
    assert op.work_flops == pytest.approx(expected.flops, rel=1e-12, abs=0)
    assert op.traffic_bytes == pytest.approx(expected.traffic, rel=1e-12, abs=0)
    assert op.kernel_time_s == pytest.approx(expected.seconds, rel=1e-12, abs=0)


@pytest.mark.parametrize("expected", EXPECTED, ids=ids)
def test_weights_and_kv_cache_match_the_hand_computation(toy_moe: Workload, expected: Expected) -> None:
    rank = rank_of(toy_moe, batching(toy_moe, 16, 2).loads[0], tp=4, ep=2)
    work = op_work(rank, rank.layer.op(expected.op), expected.choice)
    assert work.weight_bytes == expected.weight
    assert work.kv_bytes == expected.kv


def own_collectives(workload: Workload, op: str, choice: int, tp: int = 4, ep: int = 2) -> list[Collective]:
    rank = rank_of(workload, batching(workload, 8 * ep, ep).loads[0], tp=tp, ep=ep)
    return list(op_work(rank, rank.layer.op(op), choice).collectives)


@pytest.mark.parametrize("op", ["attn_norm", "ffn_norm"])
def test_a_norm_along_hidden_reduces_one_fp32_statistic_per_token(toy_moe: Workload, op: str) -> None:
    (reduce,) = own_collectives(toy_moe, op, 1)
    # V = 8 tokens * 4 B; all-reduce over 4: 2 * 32 * 3/4 sent; a ring of 6 steps of 0.1 us after 1 us.
    assert (reduce.kind, reduce.axis, reduce.bytes_per_device) == ("all_reduce", "tp", 48)
    assert reduce.time_s == pytest.approx(1e-6 + 6 * 0.1e-6 + 48 / 100e9, rel=1e-12, abs=0)
    assert own_collectives(toy_moe, op, 0) == own_collectives(toy_moe, op, 2) == []


def test_a_router_along_experts_gathers_all_logits(toy_moe: Workload) -> None:
    (gather,) = own_collectives(toy_moe, "router", 1)
    # V = 8 tokens * 8 experts * 2 B = 128; a rank sends 3/4 of it at 50 GB/s in 3 steps.
    assert (gather.kind, gather.axis, gather.bytes_per_device) == ("all_gather", "tp", 96)
    assert gather.time_s == pytest.approx(1e-6 + 3 * 0.1e-6 + 96 / 50e9, rel=1e-12, abs=0)
    assert own_collectives(toy_moe, "router", 0) == own_collectives(toy_moe, "router", 2) == []


@pytest.mark.parametrize(
    ("op", "choice", "sent", "seconds"),
    [
        # Half of the copies belong to the other rank. Its GPU is in the same node: 4 apart, on a node of 8.
        ("dispatch", 0, 4 * 64 / 2, 3e-6 + 128 / 20e9),
        ("dispatch", 1, 16 * 16 / 2, 3e-6 + 128 / 20e9),
        ("dispatch", 2, 16 * 64 / 2, 3e-6 + 512 / 20e9),
        ("combine", 0, 4 * 64 * 2 / 2, 4e-6 + 256 / 16e9),
        ("combine", 1, 16 * 16 * 2 / 2, 4e-6 + 256 / 16e9),
        ("combine", 2, 16 * 64 * 2 / 2, 4e-6 + 1024 / 16e9),
    ],
)
def test_experts_exchange_the_copies_of_other_ranks(
    toy_moe: Workload, op: str, choice: int, sent: float, seconds: float
) -> None:
    (exchange,) = own_collectives(toy_moe, op, choice)
    assert (exchange.kind, exchange.axis, exchange.bytes_per_device) == ("all_to_all", "ep", sent)
    assert exchange.time_s == pytest.approx(seconds, rel=1e-12, abs=0)


def test_experts_across_nodes_exchange_over_the_network(toy_moe: Workload) -> None:
    # tp = 8 fills a node, so the other ep rank is in the next one: 6 us and 2 GB/s. 16 * 64 / 8 B, half of them sent.
    (exchange,) = own_collectives(toy_moe, "dispatch", 1, tp=8)
    assert exchange.bytes_per_device == 64
    assert exchange.time_s == pytest.approx(6e-6 + 64 / 2e9, rel=1e-12, abs=0)


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_one_expert_rank_exchanges_nothing(toy_moe: Workload, choice: int) -> None:
    for op in ("dispatch", "combine"):
        assert own_collectives(toy_moe, op, choice, ep=1) == []


def test_a_model_without_gate_halves_ffn1(toy_moe: Workload) -> None:
    plain = dataclasses.replace(toy_moe, model=uniform_model("plain", 4, 64, 96, 8, 2, 16, 1000, 8, 2, gated=False))
    assert breakdown(plain, "ffn1", 1).work_flops == 2 * 16 * 64 * 24
    assert breakdown(plain, "ffn2", 0).work_flops == breakdown(toy_moe, "ffn2", 0).work_flops


def test_a_dense_feed_forward_is_one_expert_that_every_token_visits(toy_dense: Workload) -> None:
    ffn1 = breakdown(toy_dense, "ffn1", 1, ep=1)
    # [8, 64] x [64, 48], the input in bf16: it was never dispatched.
    assert ffn1.work_flops == 2 * 8 * 64 * 48
    assert ffn1.traffic_bytes == 8 * 64 * 2 + 64 * 48 + 8 * 48 * 2
    combine = breakdown(toy_dense, "combine", 2, ep=1)
    assert (combine.work_flops, combine.traffic_bytes) == (8 * 64, 3 * 8 * 64 * 2)


def heads_on_one_gpu(heads: int, kv_heads: int, tp: int) -> int:
    """KV heads that the query heads of the worst-off GPU read, by enumeration."""
    each, share = heads // tp, heads // kv_heads
    return max(len({head // share for head in range(rank * each, (rank + 1) * each)}) for rank in range(tp))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12, 16, 24, 48])
def test_every_gpu_holds_the_kv_heads_that_its_query_heads_read(moe: Workload, tp: int) -> None:
    model = uniform_model("grouped", 48, 16384, 30720, 48, 8, 128, 51200, 16, 2)  # six query heads share a KV head
    workload = dataclasses.replace(moe, model=model)
    rank = rank_of(workload, batching(workload, 1, 1).loads[0], tp=tp, ep=1)
    kept = op_work(rank, rank.layer.op("attention"), 1).kv_bytes
    assert kept == heads_on_one_gpu(48, 8, tp) * 16384 * 2 * 128


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64, 128])
def test_kv_heads_are_replicated_once_tp_exceeds_them(moe: Workload, tp: int) -> None:
    rank = rank_of(moe, batching(moe, 1, 1).loads[0], tp=tp, ep=1)
    kept = op_work(rank, rank.layer.op("attention"), 1).kv_bytes
    assert kept == max(8 // tp, 1) * 16384 * 2 * 128  # K and V of 16384 tokens, heads of 128, one byte each
