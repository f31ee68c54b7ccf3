"""What Megatron-LM's rules put on the tp axis, and what the paper's all-gather strategy puts there instead."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import op_names
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WORKLOADS = ["gpt_moe_1_2t_16k", "gpt_moe_1_6t_64k", "mixtral_8x22b_8k", "llama_3_1_405b_8k"]


def on_tp(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """(op, collective, tensor) of everything that one layer puts on the tp axis."""
    return [(op.name, c.kind, c.tensor) for op in evaluation.ops for c in op.collectives if c.axis == "tp"]


def evaluated(workload: Workload, dims: tuple[int, ...], tp: int = 4) -> Evaluation:
    return evaluate(workload, Strategy(tp, 2 if workload.model.is_moe else 1, 1, 64, dims))


def test_megatron_choices_are_those_of_the_design() -> None:
    moe, dense = (load_workload(name).model for name in ("gpt_moe_1_2t_16k", "llama_3_1_405b_8k"))
    assert megatron_dims(moe) == (2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2)
    assert megatron_sp_dims(moe) == (0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0)
    assert megatron_dims(dense) == (2, 1, 1, 0, 2, 2, 1, 1, 0, 2)
    assert megatron_sp_dims(dense) == (0, 1, 1, 0, 0, 0, 1, 1, 0, 0)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("tp", [2, 8, 16])
def test_megatron_puts_exactly_two_all_reduces_on_the_tp_axis(name: str, tp: int) -> None:
    workload = load_workload(name)
    found = on_tp(evaluated(workload, megatron_dims(workload.model), tp))
    assert [(op, kind) for op, kind, _ in found] == [("attn_residual", "all_reduce"), ("combine", "all_reduce")]


@pytest.mark.parametrize("name", WORKLOADS)
def test_both_all_reduces_of_megatron_move_tokens_times_hidden(name: str) -> None:
    workload = load_workload(name)
    evaluation = evaluated(workload, megatron_dims(workload.model))
    tokens = 32 if workload.model.is_moe else 64  # 64 sequences over ep = 2, or over one rank
    whole_bytes = tokens * workload.model.hidden * 2
    for op in evaluation.ops:
        for collective in op.collectives:
            if collective.axis == "tp":
                assert collective.bytes_per_device == pytest.approx(2 * whole_bytes * 3 / 4, rel=1e-12)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("tp", [2, 8, 16])
def test_sequence_parallelism_puts_two_all_gathers_and_two_reduce_scatters_there(name: str, tp: int) -> None:
    workload = load_workload(name)
    found = on_tp(evaluated(workload, megatron_sp_dims(workload.model), tp))
    assert [(op, kind) for op, kind, _ in found] == [
        ("qkv_proj", "all_gather"),
        ("attn_residual", "reduce_scatter"),
        ("ffn1", "all_gather"),
        ("combine", "reduce_scatter"),
    ]


def test_ffn2_on_hidden_trades_the_all_reduce_for_two_all_gathers(dense: Workload) -> None:
    # Figure 4 of "Learning to Shard", {TP=4, EP=1, PP=1}: ffn1 on f, ffn2 on d.
    choice = dict(zip(op_names(dense.model), megatron_dims(dense.model), strict=True)) | {"ffn2": 1}
    evaluation = evaluated(dense, tuple(choice.values()))
    in_ffn = [found for found in on_tp(evaluation) if found[0] != "attn_residual"]
    assert in_ffn == [("ffn2", "all_gather", "ffn_act"), ("combine", "all_gather", "ffn_out")]
    by_op = {op.name: op for op in evaluation.ops}
    # 64 tokens of bf16: [64, 53248] before ffn2 and [64, 16384] after it, of which a rank sends 3/4.
    assert by_op["ffn2"].collectives[0].bytes_per_device == 64 * 53248 * 2 * 3 / 4
    assert by_op["combine"].collectives[0].bytes_per_device == 64 * 16384 * 2 * 3 / 4


def test_ffn2_on_hidden_in_a_moe_gathers_the_copies_of_every_expert(moe: Workload) -> None:
    choice = dict(zip(op_names(moe.model), megatron_dims(moe.model), strict=True)) | {"ffn2": 1}
    by_op = {op.name: op for op in evaluated(moe, tuple(choice.values())).ops}
    kinds = {name: [(c.kind, c.bytes_per_device) for c in by_op[name].collectives if c.axis == "tp"] for name in by_op}
    # 64 sequences over ep = 2: 32 tokens, 64 copies.
    assert kinds["ffn2"] == [("all_gather", 64 * 30720 * 2 * 3 / 4)]
    assert kinds["combine"] == [("all_gather", 64 * 16384 * 2 * 3 / 4)]


def test_parts_are_reduced_where_the_choice_of_combine_says(moe: Workload) -> None:
    names = op_names(moe.model)
    base = dict(zip(names, megatron_dims(moe.model), strict=True))
    found = {}
    for choice in (0, 1, 2):
        by_op = {op.name: op for op in evaluated(moe, tuple((base | {"combine": choice}).values())).ops}
        found[choice] = [(c.kind, c.tensor, c.bytes_per_device) for c in by_op["combine"].collectives if c.axis == "tp"]
    copies_bytes, tokens_bytes = 64 * 16384 * 2, 32 * 16384 * 2
    assert found[0] == [("reduce_scatter", "expert_out", copies_bytes * 3 / 4)]
    assert found[1] == [("reduce_scatter", "expert_out", copies_bytes * 3 / 4)]
    # Passed through the weighted sum and reduced on the stream: t * d bytes, not t * top-k * d.
    assert found[2] == [("all_reduce", "residual_in", 2 * tokens_bytes * 3 / 4)]


@pytest.mark.parametrize(
    ("changed", "charged"),
    [
        # The stream is whole after combine, so an add along hidden cuts its share out of it for free, but leaves
        # it cut: ffn_norm and combine read it whole, so it is gathered once.
        ({"attn_residual": 1}, [("ffn_norm", "all_gather", "residual_mid")]),
        # Both adds along hidden: each norm gathers, neither add does.
        (
            {"attn_residual": 1, "combine": 1},
            [("attn_norm", "all_gather", "residual_in"), ("ffn_norm", "all_gather", "residual_mid")],
        ),
        # Adds cut along different dims: the stream is exchanged on its way to each.
        (
            {"attn_norm": 1, "attn_residual": 1, "ffn_norm": 0, "combine": 0},
            [("attn_norm", "all_to_all", "residual_in"), ("ffn_norm", "all_to_all", "residual_mid")],
        ),
    ],
)
def test_the_residual_edges_of_both_adds_are_charged(
    dense: Workload, changed: dict[str, int], charged: list[tuple[str, str, str]]
) -> None:
    base = dict(zip(op_names(dense.model), megatron_dims(dense.model), strict=True))
    found = on_tp(evaluated(dense, tuple((base | changed).values())))
    assert [entry for entry in found if entry[2] in ("residual_in", "residual_mid")] == charged


def test_a_tensor_that_router_and_dispatch_read_is_moved_once(moe: Workload) -> None:
    base = dict(zip(op_names(moe.model), megatron_dims(moe.model), strict=True))
    found = on_tp(evaluated(moe, tuple((base | {"ffn_norm": 0}).values())))
    assert Counter(tensor for _, _, tensor in found)["ffn_in"] == 1
    # Cut differently it is moved twice: whole for the router, along hidden from there for free.
    found = on_tp(evaluated(moe, tuple((base | {"ffn_norm": 0, "dispatch": 1}).values())))
    assert [entry[1] for entry in found if entry[2] == "ffn_in"] == ["all_gather"]


def test_the_first_op_reads_the_stream_as_the_last_one_leaves_it(dense: Workload) -> None:
    base = dict(zip(op_names(dense.model), megatron_dims(dense.model), strict=True)) | {"combine": 0}
    by_op = {op.name: op for op in evaluated(dense, tuple(base.values())).ops}
    assert [(c.kind, c.tensor) for c in by_op["attn_norm"].collectives] == [("all_gather", "residual_in")]


@pytest.mark.parametrize("name", WORKLOADS)
def test_megatron_at_degree_one_communicates_nothing(name: str) -> None:
    workload = load_workload(name)
    evaluation = evaluate(workload, Strategy(1, 1, 1, 64, megatron_dims(workload.model)))
    assert all(not op.collectives for op in evaluation.ops)
