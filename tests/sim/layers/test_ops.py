"""The layer as data: its twelve ops, the edges between them, and how many tokens and experts it sees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_model, load_workload
from sim.layers.model import uniform_model
from sim.layers.ops import Layer
from sim.ops.layers import DENSE_LAYER, MOE_LAYER, layer_ops, op_names
from sim.ops.sizes import Load, element_bytes, layer_sizes, tensor_columns
from sim.workload import Workload

MOE = load_workload("gpt_moe_1_2t_16k")


def decoding(batch: int, groups: int) -> Load:
    """A step that decodes `batch` sequences over so many groups."""
    return Load(batch, 1024, 1024, attention_groups=groups)


def test_a_moe_layer_has_the_twelve_fused_ops_in_the_order_of_the_strategy() -> None:
    assert op_names(load_model("gpt_moe_1_2t")) == (
        "attn_norm",
        "qkv_proj",
        "attention",
        "o_proj",
        "attn_residual",
        "ffn_norm",
        "router",
        "dispatch",
        "ffn1",
        "activation",
        "ffn2",
        "combine",
    )


def test_a_dense_layer_drops_router_and_dispatch() -> None:
    expected = tuple(name for name in op_names(load_model("gpt_moe_1_2t")) if name not in ("router", "dispatch"))
    assert op_names(load_model("llama_3_1_405b")) == expected
    assert layer_ops(load_model("llama_3_1_405b")).op("combine").kind == "residual_add"


@pytest.mark.parametrize("layer", [MOE_LAYER, DENSE_LAYER])
def test_every_tensor_is_left_by_one_op_and_read_by_those_that_name_it(layer: Layer) -> None:
    for tensor in layer.tensors:
        assert layer.op(tensor.producer).output == tensor.name
        assert tensor.consumers
        for op in layer.ops:
            assert (tensor.name in op.inputs) == (op.name in tensor.consumers)
    assert {name for op in layer.ops for name in op.inputs} == {tensor.name for tensor in layer.tensors}


@pytest.mark.parametrize("layer", [MOE_LAYER, DENSE_LAYER])
def test_the_residual_stream_is_an_edge_from_each_add_to_the_next_and_around_the_layer(layer: Layer) -> None:
    assert layer.op("combine").output in layer.op("attn_residual").inputs
    assert layer.op("combine").output in layer.op("attn_norm").inputs
    assert layer.op("attn_residual").output in layer.op("combine").inputs
    assert layer.op("attn_residual").output in layer.op("ffn_norm").inputs


def test_router_and_dispatch_read_the_same_tensor() -> None:
    shared = MOE_LAYER.op("ffn_norm").output
    assert MOE_LAYER.tensor(shared).consumers == ("router", "dispatch")


def test_sizes_of_the_toy_layer_by_hand(toy_moe: Workload) -> None:
    sizes = layer_sizes(toy_moe, decoding(15, 2), 2)
    assert sizes.tokens == 8  # 15 sequences over 2 ranks: 8 and 7
    assert sizes.expert_tokens == 16  # 8 tokens, each to 2 experts
    assert sizes.local_experts == 4  # 8 experts over 2 ranks
    # 16 tokens in the group; one of them misses an expert with 1 - 2/8: 4 * (1 - 0.75 ** 16) = 3.9599
    assert sizes.active_experts == pytest.approx(3.959909617, rel=1e-9)
    assert sizes.columns == {"d": 64, "q": 192, "a": 128, "e": 8, "k": 2, "f": 96}  # q: (8 + 2 * 2) heads of 16


def test_the_load_imbalance_stretches_the_experts_of_the_busiest_rank(toy_moe: Workload) -> None:
    skewed = dataclasses.replace(toy_moe, load_imbalance=1.5)
    assert layer_sizes(skewed, decoding(16, 2), 2).expert_tokens == 24  # 8 * 2 * 1.5
    assert layer_sizes(skewed, decoding(16, 1), 1).expert_tokens == 32  # one rank has every expert and every token


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 16, 2), (4, 16, 2), (9, 8, 2), (6, 128, 8), (3, 8, 7)])
def test_active_experts_are_those_that_distinct_top_k_routing_visits(tokens: int, experts: int, top_k: int) -> None:
    model = uniform_model("moe", 1, 64, 96, 8, 8, 16, 1000, experts, top_k)
    workload = dataclasses.replace(MOE, model=model)
    expected = layer_sizes(workload, decoding(tokens, 1), 1).active_experts

    rng = np.random.default_rng(7)
    trials = 6000
    chosen = np.argsort(rng.random((trials, tokens, experts)), axis=2)[:, :, :top_k]  # top-k of random scores
    visited = np.zeros((trials, experts), dtype=bool)
    visited[np.arange(trials)[:, None], chosen.reshape(trials, -1)] = True
    counts = visited.sum(1)
    error = max(counts.std() / np.sqrt(trials), 1e-12)
    assert abs(counts.mean() - expected) < 5 * error
    # Draws with repetition, (1 - 1/E) ** (tokens * k), would let one token visit an expert twice: too few.
    with_repetition = experts * (1 - (1 - 1 / experts) ** (tokens * top_k))
    assert abs(counts.mean() - with_repetition) > 5 * error


def test_one_token_activates_exactly_its_top_k(moe: Workload) -> None:
    assert layer_sizes(moe, decoding(1, 1), 1).active_experts == pytest.approx(2.0, rel=1e-12)


@settings(derandomize=True, deadline=None)
@given(ep=st.integers(1, 40), batch=st.integers(1, 5000), more=st.integers(0, 5000))
def test_more_sequences_never_mean_fewer_tokens_or_active_experts(ep: int, batch: int, more: int) -> None:
    few, many = layer_sizes(MOE, decoding(batch, ep), ep), layer_sizes(MOE, decoding(batch + more, ep), ep)
    assert few.tokens <= many.tokens
    assert few.expert_tokens <= many.expert_tokens
    assert few.active_experts <= many.active_experts <= many.local_experts
    assert few.tokens * ep >= batch
    assert few.local_experts * ep >= MOE.model.experts


def test_tensor_sizes_by_hand(toy_moe: Workload) -> None:
    sizes = layer_sizes(toy_moe, decoding(16, 2), 2)
    layers = toy_moe.model.groups[0]
    found = {
        tensor.name: (
            sizes.expert_tokens if tensor.by_expert else sizes.tokens,
            tensor_columns(toy_moe.model, layers, tensor),
            element_bytes(toy_moe, tensor),
        )
        for tensor in MOE_LAYER.tensors
    }
    assert found == {
        "attn_in": (8, 64, 2),
        "qkv": (8, 192, 2),
        "attn_out": (8, 128, 2),
        "attn_projected": (8, 64, 2),
        "residual_mid": (8, 64, 2),
        "ffn_in": (8, 64, 2),
        "routing": (8, 2, 8),  # an index and a weight of 4 bytes each
        "expert_in": (16, 64, 1),  # sent in fp8
        "ffn_mid": (16, 192, 2),  # gate and up
        "ffn_act": (16, 96, 2),
        "expert_out": (16, 64, 2),
        "residual_in": (8, 64, 2),
    }
