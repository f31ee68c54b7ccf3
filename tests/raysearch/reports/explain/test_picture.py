"""What a picture says is what the evaluation says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysearch.reports.explain.picture import Picture, pictures_of, shown_tensor
from sim.config.catalog import load_model, load_workload
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.simulate import evaluate
from sim.strategy import Strategy

WORKLOAD = load_workload("gpt_moe_1_2t_16k")
MIXED = (0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0)


def picture(dims: tuple[int, ...]) -> Picture:
    (only,) = pictures_of("title", WORKLOAD, evaluate(WORKLOAD, Strategy(8, 16, 2, 512, dims)))
    return only


@pytest.mark.parametrize("dims", [megatron_dims(WORKLOAD.model), megatron_sp_dims(WORKLOAD.model), MIXED])
def test_every_collective_stands_once_on_an_edge_or_in_an_op(dims: tuple[int, ...]) -> None:
    evaluation = evaluate(WORKLOAD, Strategy(8, 16, 2, 512, dims))
    for node, op in zip(picture(dims).nodes, evaluation.ops, strict=True):
        shown = [c for edge in node.edges for c in edge.collectives] + list(node.inside)
        assert sorted(map(repr, shown)) == sorted(map(repr, op.collectives))


def test_a_tensor_arrives_as_it_was_left_unless_a_collective_or_a_slice_moved_it() -> None:
    for dims in (megatron_dims(WORKLOAD.model), megatron_sp_dims(WORKLOAD.model), MIXED):
        for node in picture(dims).nodes:
            for edge in node.edges:
                if edge.collectives:
                    assert edge.produced.placement != edge.arrives.placement


def test_megatron_reduces_after_attention_and_late_inside_the_combine() -> None:
    nodes = {node.name: node for node in picture(megatron_dims(WORKLOAD.model)).nodes}
    (projected, residual) = nodes["attn_residual"].edges
    assert (projected.main, residual.main) == (True, False)
    assert projected.produced.named == "attn_projected[t, d] {U_tp}"
    assert [c.kind for c in projected.collectives] == ["all_reduce"]
    assert [c.kind for c in nodes["combine"].inside] == ["all_reduce", "all_to_all"]
    weight = nodes["qkv_proj"].weight
    assert weight is not None
    assert weight.named == "W[d, q_tp]"


def test_the_stream_comes_from_the_layer_above() -> None:
    first = picture(MIXED).nodes[0].edges[0]
    assert (first.producer, first.main, first.produced.named) == (-1, True, "residual_in[t_tp, d]")


def test_shown_tensors_have_both_notations() -> None:
    assert shown_tensor("x", "td", "S(0)").named == "x[t_tp, d]"
    assert shown_tensor("x", "ecd", "R").named == "x[e, c, d]"


@pytest.mark.parametrize("dims", [megatron_dims(WORKLOAD.model), MIXED, (2, 4, 0, 3, 0, 2, 2, 0, 5, 0, 3, 0)])
def test_every_collective_of_two_meshes_stands_once_too(dims: tuple[int, ...]) -> None:
    evaluation = evaluate(WORKLOAD, Strategy(2, 4, 2, 512, dims, cp=4, dp=8))
    for node, op in zip(pictures_of("title", WORKLOAD, evaluation)[0].nodes, evaluation.ops, strict=True):
        shown = [c for edge in node.edges for c in edge.collectives] + list(node.inside)
        assert sorted(map(repr, shown)) == sorted(map(repr, op.collectives))
        sides = {"attn_norm", "qkv_proj", "attention", "o_proj", "attn_residual"}
        for edge in node.edges:
            assert ("moe_tp" in edge.arrives.named) <= (node.name not in sides)


@pytest.mark.parametrize("degrees", [(8, 8, 1, 64), (4, 8, 1, 64, 2, 1)])
def test_each_group_of_layers_has_a_picture_of_its_own(degrees: tuple[int, ...]) -> None:
    workload = replace(WORKLOAD, model=load_model("deepseek_v3"))
    strategy = Strategy(*degrees[:4], megatron_dims(workload.model), *degrees[4:])
    evaluation = evaluate(workload, strategy)
    dense, experts = pictures_of("title", workload, evaluation)
    assert (dense.layers, experts.layers, dense.model_layers) == (3, 58, 61)
    assert (len(dense.nodes), len(experts.nodes)) == (10, 12)
    shown = [node.time_s for picture in (dense, experts) for node in picture.nodes]
    assert shown == [op.time_s for op in evaluation.ops]
    for picture in (dense, experts):
        assert sum(node.time_s for node in picture.nodes) == pytest.approx(picture.layer_s)
    assert not any("moe_tp" in node.output.named for node in dense.nodes)
    assert any("moe_tp" in node.output.named for node in experts.nodes) == strategy.extended
