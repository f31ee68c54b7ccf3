"""One strategy, end to end: time, memory and limits by hand, and what a search may never exploit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.evaluation import Evaluation, Violation
from sim.layers.mixers import GroupedAttention
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import op_names
from sim.prices.hardware import CollectiveModel, ExpertAllToAll, Hardware, PointToPoint
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WORKLOADS = {
    name: load_workload(name)
    for name in ("gpt_moe_1_2t_16k", "mixtral_8x22b_8k", "qwen3_235b_a22b_16k", "llama_3_1_405b_8k")
}
NAMES = st.sampled_from(list(WORKLOADS))


def dims_of(workload: Workload, dims: tuple[int, ...]) -> tuple[int, ...]:
    return dims[: len(op_names(workload.model))]


CHOICES = st.tuples(*[st.sampled_from([0, 1, 2])] * 12)


def strategies(
    tp: st.SearchStrategy[int], ep: st.SearchStrategy[int], pp: st.SearchStrategy[int], batch: st.SearchStrategy[int]
) -> st.SearchStrategy[tuple[Workload, Strategy]]:
    """Any strategy on one of the real workloads, sensible or not."""
    return st.builds(
        lambda name, tp, ep, pp, batch, dims: (
            WORKLOADS[name],
            Strategy(tp, ep, pp, batch, dims_of(WORKLOADS[name], dims)),
        ),
        NAMES,
        tp,
        ep,
        pp,
        batch,
        CHOICES,
    )


REALISTIC = strategies(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16]),
    st.integers(1, 5000),
)
EXTREME = strategies(*[st.sampled_from([1, 7, 128, 5000, 10**6, 10**9, 10**15])] * 4)


def kinds(evaluation: Evaluation) -> list[str]:
    return [violation.kind for violation in evaluation.violations]


# --- time, by hand --------------------------------------------------------------------------------------


def all_reduce_s(whole_bytes: float) -> float:
    """The toy ring over 4 GPUs: 1 us, 6 steps of 0.1 us, 2 * 3/4 of the bytes at 100 GB/s."""
    return 1e-6 + 6 * 0.1e-6 + 1.5 * whole_bytes / 100e9


def test_a_dense_megatron_step_takes_the_hand_computed_time(toy_dense: Workload) -> None:
    # tp = 4, pp = 2, 8 sequences: 8 tokens, 2 of 8 query heads and 1 of 2 KV heads, 24 of 96 f per GPU.
    evaluation = evaluate(toy_dense, Strategy(4, 1, 2, 8, megatron_dims(toy_dense.model)))
    norm_s = 4 * 8 * 64 / 0.4e12
    add_s = 3 * 8 * 64 * 2 / 0.8e12
    kernels_s = [
        norm_s,
        2 * 8 * 64 * (2 + 1 + 1) * 16 / 2.4e12,  # qkv_proj
        (8 * 1000 * 2 * 1 * 16 + 8 * (2 + 1 + 1 + 2) * 16 * 2) / 0.4e12  # attention: K and V, then q, k, v, out
        + 8 * (2 + 1 + 1) * 16 * 2 * 2 / 0.8e12,  # rotary embedding: q, k and v in and out
        2 * 8 * 32 * 64 / 2.4e12,  # o_proj
        add_s,
        norm_s,
        2 * 8 * 64 * 48 / 2.4e12,  # ffn1: gate and up
        5 * 8 * 24 / 0.4e12,  # activation
        2 * 8 * 24 * 64 / 2.4e12,  # ffn2
        add_s,
    ]
    assert [op.kernel_time_s for op in evaluation.ops] == pytest.approx(kernels_s, rel=1e-12, abs=0)
    stream_bytes = 8 * 64 * 2
    layer_s = sum(kernels_s) + 2 * all_reduce_s(stream_bytes)
    assert evaluation.stage.layer_s == pytest.approx(layer_s, rel=1e-12, abs=0)
    # First stage: look-up in a quarter of the vocabulary (read and write), then an all-reduce of the parts.
    embedding_s = 2 * stream_bytes / 0.8e12 + all_reduce_s(stream_bytes)
    assert evaluation.stage.embedding_s == pytest.approx(embedding_s, rel=1e-12, abs=0)
    # Last stage: norm, [8, 64] x [64, 250], and 8 bytes per sequence and rank gathered in 3 steps at 50 GB/s.
    head_s = norm_s + 2 * 8 * 64 * 250 / 3.2e12 + (1e-6 + 3 * 0.1e-6 + 0.75 * (8 * 8 * 4) / 50e9)
    assert evaluation.stage.head_s == pytest.approx(head_s, rel=1e-12, abs=0)
    # The 8 GPUs share a node: 0.5 us and 10 GB/s; every GPU hands the whole stream on.
    send_recv_s = 0.5e-6 + stream_bytes / 10e9
    assert evaluation.stage.send_recv_s == pytest.approx(send_recv_s, rel=1e-12, abs=0)
    # Two layers on each of two stages; the slower end counts. Every token passes both stages.
    tpot_s = 2 * (2 * layer_s + max(embedding_s, head_s) + send_recv_s)
    assert evaluation.tpot_s == pytest.approx(tpot_s, rel=1e-12, abs=0)
    assert evaluation.tokens_per_s_per_gpu == pytest.approx(8 * 2 / tpot_s / 8, rel=1e-12)


def test_one_stage_holds_both_ends_and_hands_nothing_on(toy_dense: Workload) -> None:
    stage = evaluate(toy_dense, Strategy(4, 1, 1, 8, megatron_dims(toy_dense.model))).stage
    assert stage.send_recv_s == 0
    assert stage.total_s == pytest.approx(4 * stage.layer_s + stage.embedding_s + stage.head_s, rel=1e-12, abs=0)


def test_a_sharded_stream_is_reduce_scattered_by_the_embedding_and_handed_on_in_shares(toy_dense: Workload) -> None:
    # tp = 4, pp = 4: 16 GPUs on two nodes, so 7 us and 1 GB/s; V = 1024 B, a quarter of it per GPU.
    stage = evaluate(toy_dense, Strategy(4, 1, 4, 8, megatron_sp_dims(toy_dense.model))).stage
    assert stage.send_recv_s == pytest.approx(7e-6 + 256 / 1e9, rel=1e-12, abs=0)
    scatter_s = 1e-6 + 3 * 0.1e-6 + 0.75 * 1024 / 50e9
    assert stage.embedding_s == pytest.approx(2048 / 0.8e12 + scatter_s, rel=1e-12, abs=0)
    # The head reads the whole stream: one more gather of the same size.
    whole = evaluate(toy_dense, Strategy(4, 1, 4, 8, megatron_dims(toy_dense.model))).stage
    assert stage.head_s == pytest.approx(whole.head_s + scatter_s, rel=1e-12, abs=0)


def test_a_moe_step_with_tensor_and_expert_parallelism_adds_up_by_hand(toy_moe: Workload) -> None:
    # tp = 4, ep = 2, batch 16, sequence parallelism: communication only, kernels are in test_work.
    by_op = {op.name: op for op in evaluate(toy_moe, Strategy(4, 2, 1, 16, megatron_sp_dims(toy_moe.model))).ops}

    def gather_s(whole_bytes: float) -> float:
        return 1e-6 + 3 * 0.1e-6 + 0.75 * whole_bytes / 50e9

    seconds = {
        "qkv_proj": gather_s(8 * 64 * 2),  # attn_in: 8 tokens in bf16
        "attn_residual": gather_s(8 * 64 * 2),  # reduce-scatter of o_proj's parts
        "dispatch": 3e-6 + 4 * 64 / 2 / 20e9,  # 4 of 16 copies per GPU in fp8, half of them leave
        "ffn1": gather_s(16 * 64),  # 16 copies in fp8
        "combine": gather_s(16 * 64 * 2) + 4e-6 + 4 * 64 * 2 / 2 / 16e9,  # reduce-scatter, then 4 copies in bf16
    }
    found = {name: op.communication_time_s for name, op in by_op.items() if op.communication_time_s}
    assert found == pytest.approx(seconds, rel=1e-12, abs=0)


@settings(derandomize=True, deadline=None)
@given(REALISTIC)
def test_the_breakdown_adds_up_to_the_result(case: tuple[Workload, Strategy]) -> None:
    workload, strategy = case
    evaluation = evaluate(workload, strategy)
    stage = evaluation.stage
    for op in evaluation.ops:
        assert op.communication_time_s == pytest.approx(sum(c.time_s for c in op.collectives), rel=1e-12, abs=0)
        assert op.time_s == op.kernel_time_s + op.communication_time_s
        assert op.kernel_time_s >= max(op.compute_time_s, op.memory_time_s) / 2  # of two kernels at most
        assert all(c.degree > 1 and c.bytes_per_device > 0 and c.time_s > 0 for c in op.collectives)
    assert stage.layer_s == pytest.approx(sum(op.time_s for op in evaluation.ops), rel=1e-12, abs=0)
    both_s = stage.embedding_s + stage.head_s
    ends = [both_s] if strategy.pp == 1 else [0.0, stage.embedding_s, stage.head_s]
    assert stage.layers in (workload.model.layers // strategy.pp, math.ceil(workload.model.layers / strategy.pp))
    rest_s = stage.layers * stage.layer_s + stage.send_recv_s
    assert any(stage.total_s == pytest.approx(rest_s + ends_s, rel=1e-12, abs=0) for ends_s in ends)
    assert evaluation.tpot_s == strategy.pp * stage.total_s
    throughput = strategy.batch * strategy.pp / evaluation.tpot_s / (strategy.tp * strategy.ep * strategy.pp)
    assert evaluation.tokens_per_s_per_gpu == pytest.approx(throughput, rel=1e-12)


@pytest.mark.parametrize(("tp", "ep", "pp", "same_node"), [(2, 2, 2, True), (8, 1, 2, False), (1, 1, 16, False)])
def test_stages_hand_on_inside_a_node_or_across(moe: Workload, tp: int, ep: int, pp: int, same_node: bool) -> None:
    stage = evaluate(by_medians(moe), Strategy(tp, ep, pp, 1, megatron_dims(moe.model))).stage
    latency_s, bandwidth = (5e-6, 350e9) if same_node else (17e-6, 35e9)
    assert stage.send_recv_s == pytest.approx(latency_s + 16384 * 2 / bandwidth, rel=1e-9, abs=0)


# --- memory, by hand ------------------------------------------------------------------------------------


def test_memory_of_the_toy_dense_model_by_hand(toy_dense: Workload) -> None:
    memory = evaluate(toy_dense, Strategy(4, 1, 2, 8, megatron_dims(toy_dense.model))).memory_bytes
    # Norms whole, in bf16; qkv (2 + 1 + 1) * 16 columns; o_proj 32 rows; ffn1 2 * 24 columns; ffn2 24 rows.
    layer = 2 * 64 * 2 + 64 * 64 + 32 * 64 + 64 * 48 + 24 * 64
    assert memory.weights == 2 * layer + 250 * 64 * 2  # two layers, and a quarter of one vocabulary in bf16
    assert memory.kv_cache == 2 * 2 * (8 * 1000 * 2 * 1 * 16)  # two layers, two microbatches in flight, one KV head
    # The stream, and at the head the hidden state and fp32 logits: more than any op of the layer needs.
    assert memory.activations == 8 * 64 * 2 + (8 * 64 * 2 + 8 * 250 * 4)
    assert memory.overhead == 1e6
    assert memory.total == memory.weights + memory.kv_cache + memory.activations + memory.overhead


def test_memory_of_gpt_moe_1_2t_by_hand(moe: Workload) -> None:
    memory = evaluate(moe, Strategy(8, 16, 2, 512, megatron_dims(moe.model))).memory_bytes
    attention = 16384 * (16 + 2) * 128 + 16 * 128 * 16384  # 16 query heads, one key and one value head; o_proj
    norms = 2 * 16384 * 2
    router = 16384 * 16 * 2  # whole on every GPU, in bf16
    expert = 16384 * 2 * 3840 + 3840 * 16384  # one expert per ep rank, an eighth of its 30720
    assert memory.weights == 24 * (attention + norms + router + expert) + 51200 // 8 * 16384 * 2
    # 32 sequences of 16384 tokens, K and V of one head of 128 in fp8, 24 layers, 2 microbatches in flight.
    assert memory.kv_cache == 24 * 2 * (32 * 16384 * 2 * 128)
    # Largest op: combine reads 64 copies, the residual and the routing of 32 tokens, and writes the stream.
    stream = 32 * 16384 * 2
    assert memory.activations == stream + (64 * 16384 * 2 + stream + 32 * 2 * 8 + stream)
    assert memory.overhead == 4e9


@pytest.mark.parametrize("op", ["attn_norm", "qkv_proj", "o_proj", "ffn_norm", "router", "ffn1", "ffn2"])
def test_a_choice_of_none_replicates_the_weight_of_its_op(moe: Workload, op: str) -> None:
    names = op_names(moe.model)
    weights = {}
    for choice in (1, 2):
        dims = tuple(choice if name == op else 1 for name in names)
        weights[choice] = evaluate(moe, Strategy(8, 16, 1, 64, dims)).memory_bytes.weights
    whole = {
        "attn_norm": 16384 * 2,
        "qkv_proj": 16384 * (128 + 16) * 128,
        "o_proj": 16384 * 16384,
        "ffn_norm": 16384 * 2,
        "router": 16384 * 16 * 2,
        "ffn1": 16384 * 61440,
        "ffn2": 30720 * 16384,
    }[op]
    assert weights[2] - weights[1] == 48 * (whole - whole / 8)


def test_kv_cache_follows_from_who_reads_it(moe: Workload) -> None:
    def kv_cache(tp: int, attention: int, pp: int = 1) -> float:
        dims = tuple(attention if name == "attention" else 2 for name in op_names(moe.model))
        return evaluate(moe, Strategy(tp, 1, pp, 32, dims)).memory_bytes.kv_cache

    whole = 48 * 32 * 16384 * 2 * 8 * 128
    assert kv_cache(1, 2) == kv_cache(8, 2) == whole  # none: on every GPU
    assert kv_cache(8, 0) == kv_cache(8, 1) == whole / 8  # along requests, along heads
    assert kv_cache(16, 0) == whole / 16
    assert kv_cache(16, 1) == kv_cache(128, 1) == whole / 8  # 8 KV heads cannot be cut further
    assert kv_cache(8, 1, pp=4) == whole / 8  # a quarter of the layers, four microbatches in flight


def test_one_stage_holds_both_vocabularies(moe: Workload) -> None:
    def weights(pp: int) -> float:
        return evaluate(moe, Strategy(8, 16, pp, 16, megatron_dims(moe.model))).memory_bytes.weights

    vocabulary = 51200 / 8 * 16384 * 2  # in bf16
    assert weights(1) - 2 * vocabulary == 48 * (weights(48) - vocabulary)


# --- degree 1 -------------------------------------------------------------------------------------------


def slow_network(hardware: Hardware) -> Hardware:
    """Every message takes at least a second."""
    model = hardware.collectives
    exchange, link = ExpertAllToAll((1.0,), 1.0, 1.0), PointToPoint(1.0, 1.0, 1.0, 1.0)
    slow = CollectiveModel(
        protocols=tuple(dataclasses.replace(p, ring_base_s=1.0, tree_base_s=1.0) for p in model.protocols),
        net_overhead_s=1.0,
        all_reduce_bandwidth_bytes_per_s=1.0,
        gather_bandwidth_bytes_per_s=1.0,
        nic_bandwidth_bytes_per_s=1.0,
        custom_all_reduce=None,
        all_to_all=link,
        dispatch=exchange,
        combine=exchange,
        send_recv=link,
    )
    return dataclasses.replace(hardware, collectives=slow)


@settings(derandomize=True, deadline=None)
@given(NAMES, st.integers(1, 4096), CHOICES)
def test_degree_one_communicates_nothing_whatever_the_choices(name: str, batch: int, dims: tuple[int, ...]) -> None:
    workload = WORKLOADS[name]
    strategy = Strategy(1, 1, 1, batch, dims_of(workload, dims))
    evaluation = evaluate(workload, strategy)
    assert all(op.communication_time_s == 0 and not op.collectives for op in evaluation.ops)
    offline = dataclasses.replace(workload, hardware=slow_network(workload.hardware))
    assert evaluate(offline, strategy).tpot_s == evaluation.tpot_s


@settings(derandomize=True, deadline=None)
@given(CHOICES, st.sampled_from([2, 8, 16]))
def test_each_axis_is_charged_only_when_it_has_a_degree(dims: tuple[int, ...], degree: int) -> None:
    moe = WORKLOADS["gpt_moe_1_2t_16k"]
    axes = {
        axis: {c.axis for op in evaluate(moe, strategy).ops for c in op.collectives}
        for axis, strategy in (("tp", Strategy(degree, 1, 1, 512, dims)), ("ep", Strategy(1, degree, 1, 512, dims)))
    }
    assert axes["tp"] <= {"tp"}
    assert axes["ep"] == {"ep"}
    assert evaluate(moe, Strategy(1, 1, 2, 512, dims)).stage.send_recv_s > 0


@settings(derandomize=True, deadline=None)
@given(NAMES, st.integers(1, 64))
def test_choices_make_no_difference_on_one_gpu(name: str, batch: int) -> None:
    workload = WORKLOADS[name]
    ops = len(op_names(workload.model))
    found = [evaluate(workload, Strategy(1, 1, 1, batch, (choice,) * ops)) for choice in (0, 1, 2)]
    assert found[0].tpot_s == pytest.approx(found[2].tpot_s, rel=1e-12, abs=0)
    assert found[1].tpot_s == pytest.approx(found[2].tpot_s, rel=1e-12, abs=0)
    assert found[0].memory_bytes == found[1].memory_bytes == found[2].memory_bytes


# --- what a search may never exploit --------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(REALISTIC, st.integers(1, 5000))
def test_more_sequences_never_speed_a_step_up(case: tuple[Workload, Strategy], more: int) -> None:
    workload, strategy = case
    few = evaluate(workload, strategy)
    many = evaluate(workload, dataclasses.replace(strategy, batch=strategy.batch + more))
    slack = 1 + 1e-12
    assert few.tpot_s <= many.tpot_s * slack
    assert few.memory_bytes.total <= many.memory_bytes.total
    for before, after in zip(few.ops, many.ops, strict=True):
        assert before.time_s <= after.time_s * slack
        assert before.work_flops <= after.work_flops * slack
        assert before.traffic_bytes <= after.traffic_bytes * slack


def faster(hardware: Hardware, knob: str, factor: float) -> Hardware:
    """One kind of speed raised."""
    model = hardware.collectives
    if knob == "arithmetic":
        return dataclasses.replace(
            hardware, peak_flop_per_s={dtype: peak * factor for dtype, peak in hardware.peak_flop_per_s.items()}
        )
    if knob == "hbm":
        return dataclasses.replace(hardware, hbm_bandwidth_bytes_per_s=hardware.hbm_bandwidth_bytes_per_s * factor)
    fields: dict[str, Any] = {}
    if knob == "nvlink":
        fields = {
            name: getattr(model, name) * factor
            for name in ("all_reduce_bandwidth_bytes_per_s", "gather_bandwidth_bytes_per_s")
        }
    elif knob == "network":
        fields = {"nic_bandwidth_bytes_per_s": model.nic_bandwidth_bytes_per_s * factor}
    for name in ("all_to_all", "send_recv", "dispatch", "combine"):
        part = getattr(model, name)
        field = ("intra" if knob == "nvlink" else "inter") + "_bandwidth_bytes_per_s"
        fields[name] = dataclasses.replace(part, **{field: getattr(part, field) * factor})
    return dataclasses.replace(hardware, collectives=dataclasses.replace(model, **fields))


def by_medians(workload: Workload) -> Workload:
    """The same without fitted curves, which belong to one machine and follow no other's speed."""
    return dataclasses.replace(workload, hardware=dataclasses.replace(workload.hardware, curves=None))


@settings(derandomize=True, deadline=None)
@given(REALISTIC, st.sampled_from(["arithmetic", "hbm", "nvlink", "network"]), st.sampled_from([1.0, 1.3, 10.0, 1e4]))
def test_faster_hardware_never_slows_a_step(case: tuple[Workload, Strategy], knob: str, factor: float) -> None:
    workload, strategy = case
    workload = by_medians(workload)
    upgraded = dataclasses.replace(workload, hardware=faster(workload.hardware, knob, factor))
    assert evaluate(upgraded, strategy).tpot_s <= evaluate(workload, strategy).tpot_s * (1 + 1e-12)


@pytest.mark.parametrize("knob", ["arithmetic", "hbm", "nvlink", "network"])
def test_every_kind_of_speed_matters_somewhere(moe: Workload, knob: str) -> None:
    strategy, workload = Strategy(8, 16, 2, 4096, megatron_sp_dims(moe.model)), by_medians(moe)
    upgraded = dataclasses.replace(workload, hardware=faster(workload.hardware, knob, 10.0))
    assert evaluate(upgraded, strategy).tpot_s < evaluate(workload, strategy).tpot_s


@settings(derandomize=True, deadline=None)
@given(REALISTIC)
def test_no_strategy_beats_the_speed_of_light(case: tuple[Workload, Strategy]) -> None:
    workload, strategy = case
    model, hardware = workload.model, workload.hardware
    # A token costs 2 FLOP per active weight of the layers and reads the whole KV cache of its sequence.
    (group,) = model.groups
    routed = group.feed_forward.experts_per_token * group.feed_forward.expert_parameters(model.hidden)
    flops = 2 * model.layers * (group.attention.parameters(model.hidden) + routed)
    assert isinstance(group.attention, GroupedAttention)
    kv_bytes = model.layers * workload.context_tokens * group.attention.kv_heads * group.attention.token_width
    limit = min(hardware.peak_flop_per_s["fp8"] / flops, hardware.hbm_bandwidth_bytes_per_s / kv_bytes)
    assert evaluate(workload, strategy).tokens_per_s_per_gpu <= limit


@settings(derandomize=True, deadline=None)
@given(st.one_of(REALISTIC, EXTREME))
def test_any_strategy_gets_finite_positive_figures_and_never_an_exception(case: tuple[Workload, Strategy]) -> None:
    workload, strategy = case
    evaluation = evaluate(workload, strategy)
    for figure in (evaluation.tokens_per_s_per_gpu, evaluation.tpot_s, evaluation.memory_bytes.total):
        assert 0 < figure < math.inf
    assert evaluation.gpus == strategy.tp * strategy.ep * strategy.pp
    assert all(op.kernel_time_s > 0 and math.isfinite(op.time_s) for op in evaluation.ops)
    for violation in evaluation.violations:
        assert math.isfinite(violation.needed)
        assert math.isfinite(violation.allowed)
        assert violation.message
    assert evaluation.feasible == (not evaluation.violations)


@settings(derandomize=True, deadline=None)
@given(REALISTIC)
def test_evaluating_twice_gives_the_same_figures_to_the_last_bit(case: tuple[Workload, Strategy]) -> None:
    assert evaluate(*case) == evaluate(*case)


# --- violations, each with its amounts ------------------------------------------------------------------


def only_violation(workload: Workload, strategy: Strategy) -> tuple[str, float, float, str]:
    (violation,) = evaluate(workload, strategy).violations
    return violation.kind, violation.needed, violation.allowed, violation.message


def test_a_feasible_strategy_violates_nothing(moe: Workload) -> None:
    assert evaluate(moe, Strategy(8, 16, 2, 512, megatron_dims(moe.model))).feasible


def test_too_many_gpus_for_the_budget(moe: Workload) -> None:
    small = dataclasses.replace(moe, max_gpus=255)
    kind, needed, allowed, message = only_violation(small, Strategy(8, 16, 2, 512, megatron_dims(moe.model)))
    assert (kind, needed, allowed) == ("gpus", 256, 255)
    assert "256" in message
    assert "255" in message
    assert evaluate(dataclasses.replace(moe, max_gpus=256), Strategy(8, 16, 2, 512, megatron_dims(moe.model))).feasible


def test_a_pipeline_with_more_stages_than_layers(moe: Workload) -> None:
    strategy = Strategy(1, 16, 96, 16, megatron_dims(moe.model))
    assert "layers" in kinds(evaluate(moe, strategy))
    assert "layers" not in kinds(evaluate(moe, dataclasses.replace(strategy, pp=47)))  # one stage has two layers


def test_more_expert_ranks_than_experts(moe: Workload) -> None:
    strategy = Strategy(16, 12, 2, 256, megatron_dims(moe.model))
    assert "experts" not in kinds(evaluate(moe, strategy))  # some ranks hold two, others one
    assert "experts" in kinds(evaluate(moe, dataclasses.replace(strategy, ep=32)))


def test_a_dense_model_has_no_experts_to_spread(dense: Workload) -> None:
    assert "experts" in kinds(evaluate(dense, Strategy(8, 2, 2, 64, megatron_dims(dense.model))))


def test_heads_that_do_not_divide_when_heads_are_sharded(moe: Workload) -> None:
    strategy = Strategy(12, 16, 2, 256, megatron_dims(moe.model))
    kind, needed, allowed, message = only_violation(moe, strategy)
    assert (kind, needed, allowed) == ("heads", 12, 128)
    assert "qkv_proj, attention" in message
    # Sharded along hidden and requests, the same degree is fine.
    along_other_dims = (2, 0, 0, *megatron_dims(moe.model)[3:])
    assert "heads" not in kinds(evaluate(moe, dataclasses.replace(strategy, dims=along_other_dims)))


def test_a_limit_that_several_groups_of_layers_break_is_one_message_of_each() -> None:
    workload = Question(model="deepseek_v3", isl=1000, osl=100, engine="vllm", phase="serve").load()
    broken = evaluate(workload, Strategy(12, 6, 1, 8, megatron_dims(workload.model), dp=6)).violations
    assert len({violation.message for violation in broken}) == len(broken)
    heads = [violation.message for violation in broken if violation.kind == "heads"]
    assert [message.split(" in ")[1] for message in heads] == ["layers 'dense')", "layers 'experts')"]


@pytest.mark.parametrize("op", ["attn_norm", "attention", "attn_residual", "ffn_norm", "router", "dispatch", "combine"])
def test_fewer_tokens_than_ranks_when_tokens_are_sharded(moe: Workload, op: str) -> None:
    dims = tuple(0 if name == op else 1 for name in op_names(moe.model))
    kind, needed, allowed, message = only_violation(moe, Strategy(16, 16, 2, 15 * 16, dims))
    assert (kind, needed, allowed) == ("tokens", 16, 15)  # 240 sequences over 16 ep ranks
    assert op in message
    assert "tokens" not in kinds(evaluate(moe, Strategy(16, 16, 2, 16 * 16, dims)))
    assert "tokens" not in kinds(evaluate(moe, Strategy(16, 16, 2, 17 * 16, dims)))  # uneven is allowed
    assert "tokens" not in kinds(evaluate(moe, Strategy(16, 16, 2, 15 * 16, (1,) * 12)))


def test_fewer_copies_than_ranks_when_the_activation_is_sharded_along_them(moe: Workload) -> None:
    dims = tuple(0 if name == "activation" else 1 for name in op_names(moe.model))
    # 7 tokens per ep rank, each copied to 2 experts: 14 rows for 16 GPUs. With 8 tokens there are 16.
    assert only_violation(moe, Strategy(16, 16, 2, 7 * 16, dims))[:3] == ("tokens", 16, 14)
    assert "tokens" not in kinds(evaluate(moe, Strategy(16, 16, 2, 8 * 16, dims)))


def test_memory_beyond_the_hbm(moe: Workload) -> None:
    strategy = Strategy(8, 16, 1, 2048, (2, 1, 2, 0, 2, 2, 2, 2, 1, 1, 0, 2))  # the KV cache on every GPU
    evaluation = evaluate(moe, strategy)
    (violation,) = [v for v in evaluation.violations if v.kind == "hbm"]
    assert violation.needed == evaluation.memory_bytes.total > violation.allowed == 85.52e9
    assert f"{violation.needed / 1e9:.1f} GB" in violation.message


def test_a_step_slower_than_the_slo(moe: Workload) -> None:
    strategy = Strategy(8, 16, 1, 4096, megatron_dims(moe.model))
    evaluation = evaluate(moe, strategy)
    (violation,) = evaluation.violations
    assert (violation.kind, violation.needed, violation.allowed) == ("tpot", evaluation.tpot_s, 0.050)
    assert "50.0 ms" in violation.message
    relaxed = dataclasses.replace(moe, tpot_slo_s=evaluation.tpot_s)
    assert evaluate(relaxed, strategy).feasible  # exactly on time is on time


def test_several_broken_limits_are_all_reported(moe: Workload) -> None:
    found = kinds(evaluate(moe, Strategy(7, 17, 49, 10**6, (0,) * 12)))
    assert {"layers", "experts", "hbm", "tpot"} <= set(found)
    assert len(found) == len(set(found))


# --- the breakdown in words -----------------------------------------------------------------------------


def test_the_breakdown_names_placements_and_labels(moe: Workload) -> None:
    by_op = {op.name: op for op in evaluate(moe, Strategy(8, 16, 2, 512, megatron_dims(moe.model))).ops}
    assert dict(by_op["qkv_proj"].placements_in) == {"attn_in": "R"}
    assert by_op["qkv_proj"].placement_out == "S(1)"
    assert by_op["o_proj"].placement_out == by_op["ffn2"].placement_out == "P(sum)"
    assert dict(by_op["combine"].placements_in) == {"expert_out": "P(sum)", "residual_mid": "R", "routing": "R"}
    assert [by_op[name].label for name in ("attn_norm", "qkv_proj", "ffn1", "ffn2")] == [
        "none",
        "heads",
        "ffn hidden",
        "ffn hidden",
    ]


def test_what_bounds_an_op_is_where_its_time_goes(moe: Workload) -> None:
    decode = {op.name: op for op in evaluate(moe, Strategy(8, 16, 2, 512, megatron_dims(moe.model))).ops}
    assert decode["attention"].bound == "memory"  # the KV cache
    assert decode["ffn1"].bound == "memory"  # weights of one expert for 64 rows
    assert decode["attn_residual"].bound == "communication"  # the all-reduce
    tiny = {op.name: op for op in evaluate(moe, Strategy(8, 16, 2, 1, megatron_dims(moe.model))).ops}
    assert tiny["attn_norm"].bound == "launch"
    crowded = {op.name: op for op in evaluate(moe, Strategy(8, 1, 2, 16384, megatron_dims(moe.model))).ops}
    assert crowded["qkv_proj"].bound == "compute"


def test_excess_adds_up_the_factors_by_which_limits_are_missed() -> None:
    evaluation = evaluate(WORKLOADS["gpt_moe_1_2t_16k"], Strategy(1, 1, 1, 4096, (2,) * 12))
    ratios = {violation.kind: violation.needed / violation.allowed for violation in evaluation.violations}
    assert set(ratios) == {"hbm", "tpot"}
    assert evaluation.excess == pytest.approx(math.log(ratios["hbm"] * ratios["tpot"]))


def test_a_broken_divisor_counts_as_a_factor_of_e_and_what_is_feasible_as_none() -> None:
    workload = WORKLOADS["gpt_moe_1_2t_16k"]
    assert evaluate(workload, Strategy(8, 16, 2, 512, megatron_dims(workload.model))).excess == 0.0
    assert Violation("heads", 7, 64, "tp=7 does not divide 64 heads").excess == 1.0
    assert Violation("layers", 96, 48, "pp=96 stages share 48 layers").excess == pytest.approx(math.log(2))
    assert Violation("gpus", 2048, 1024, "").excess == pytest.approx(math.log(2))
    assert Violation("hbm", math.inf, 1, "").excess == Violation("tokens", 8, 0, "").excess == 1.0


def modules_visited(workload: Workload, strategy: Strategy) -> list[str]:
    """The module of each call of a function of the simulator, in order."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("sim."):
            seen.append(module)

    before = sys.getprofile()
    sys.setprofile(note)
    evaluate(workload, strategy)
    sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
def test_degrees_never_seen_are_evaluated_by_25_modules_and_600_switches_between_them(name: str) -> None:
    """The median of what follows the first forty; calls are counted, which no machine changes."""
    workload, rng = WORKLOADS[name], np.random.default_rng(0)
    tables, ops = workload.degrees, len(op_names(workload.model))
    degrees = list(itertools.product(tables.tp, tables.ep, tables.batch))
    drawn = [degrees[at] for at in rng.permutation(len(degrees))[:70]]
    cold = [Strategy(tp, ep, 1, batch, tuple(rng.integers(3, size=ops).tolist())) for tp, ep, batch in drawn]
    for strategy in cold[:40]:
        evaluate(workload, strategy)
    visits = [modules_visited(workload, strategy) for strategy in cold[40:]]
    assert statistics.median(len(set(each)) for each in visits) <= 25
    assert max(sum(one != other for one, other in itertools.pairwise(each)) for each in visits) <= 600
