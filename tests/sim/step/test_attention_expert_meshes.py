"""Attention and experts on meshes of their own: bytes by hand, limits, and the paper's space inside it, to the bit.

The toy machine has nodes of 8 GPUs; see conftest. Its model has 8 query and 2 KV heads of 16 (q = 192, a = 128),
hidden 64, eight experts of 96, and 1000 cached tokens.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.catalog import load_workload
from sim.evaluation import Evaluation, OpBreakdown
from sim.layers.mixers import GroupedAttention
from sim.ops.dims import dims_of
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import op_names
from sim.optimum.spaces import extended_space
from sim.prices.collectives import Collective
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.attention_expert_meshes import attention_rank, experts_rank, sides, sides_of
from sim.strategy import GATHERED, GATHERED_TOKENS, NONE, TOKENS, Strategy
from sim.workload import Workload

WORKLOADS = {
    name: load_workload(name)
    for name in ("gpt_moe_1_2t_16k", "gpt_moe_1_6t_1m", "mixtral_8x22b_8k", "qwen3_235b_a22b_16k", "llama_3_1_405b_8k")
}


def op_of(evaluation: Evaluation, name: str, workload: Workload) -> OpBreakdown:
    return evaluation.ops[op_names(workload.model).index(name)]


def moved(collectives: tuple[Collective, ...]) -> list[tuple[str, str, int, float]]:
    return [(c.kind, c.axis, c.degree, c.bytes_per_device) for c in collectives]


# --- the paper's space inside the extended one --------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_strategy_of_the_paper_is_the_same_to_the_bit_when_its_degrees_are_spelled_out(name: str) -> None:
    workload, rng = WORKLOADS[name], np.random.default_rng(0)
    for _ in range(25):
        spelled = extended_space(workload, ()).sample(rng)
        assert (spelled.cp, spelled.dp) == (1, spelled.ep)
        short = dataclasses.replace(spelled, dp=None)
        assert dataclasses.replace(evaluate(workload, spelled), strategy=short) == evaluate(workload, short)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("tp", "ep", "batch"), [(1, 1, 4), (4, 2, 64), (8, 16, 512), (16, 1, 96)])
def test_two_sides_of_equal_groups_cost_what_one_side_costs(name: str, tp: int, ep: int, batch: int) -> None:
    # Through the planner on the mesh of both, not through the shortcut for the paper's strategies.
    workload = WORKLOADS[name]
    ep = ep if workload.model.is_moe else 1
    load = batching(workload, batch, ep).loads[0]
    (one,) = sides_of(workload, load, tp, 1, ep, ep)
    two = sides(attention_rank(workload, load, tp, 1, ep), experts_rank(workload, load, tp, ep, ep))
    assert one.attention is one.experts
    assert two.attention is not two.experts
    for tensor in one.experts.layer.tensors:
        for ends in np.ndindex(*(3,) * len(tensor.ops)):
            assert two.moves_s(tensor, ends) == one.moves_s(tensor, ends)
    assert two.stream_bytes() == one.stream_bytes()


# --- attention over the context -----------------------------------------------------------------------


def test_attention_over_the_context_by_hand(toy_moe: Workload) -> None:
    # tp = 2, cp = 4: 8 GPUs share 8 tokens, each 250 of 1000 cached tokens and one of 2 KV heads with its 4 queries.
    workload = toy_moe
    strategy = Strategy(2, 1, 1, 8, megatron_dims(workload.model), cp=4, dp=1)
    evaluation = evaluate(workload, strategy)
    attention = op_of(evaluation, "attention", workload)
    new = 8 * 2 * (4 + 1) * 16 * 2  # queries, key and value in, results out, in bf16
    rotated = 8 * (4 + 2) * 16 * 2 * 2  # those queries, the key and the value, in and out
    part = 8 * 4 * (16 * 2 + 4)  # a result of 16 in bf16 and a logarithm in fp32 per token and head
    assert evaluation.memory_bytes.kv_cache == 4 * (8 * 250 * 2 * 1 * 16)
    # The merge reads a part of its head from every GPU of the group, its own included, and writes 8 tokens of it.
    assert attention.traffic_bytes == 8 * 250 * 2 * 16 + new + rotated + part + 8 * 1 * 16 * 2
    assert attention.work_flops == 4 * 8 * 4 * 16 * 250 + 2 * 8 * 4 * 16
    # Every GPU keeps a quarter of its parts and sends the others.
    assert moved(attention.collectives) == [("all_to_all", "cp", 4, part * 3 / 4)]
    # 2 us, and 3/4 of the parts at 40 GB/s: the group lies in one node.
    assert attention.collectives[0].time_s == pytest.approx(2e-6 + part * 0.75 / 40e9, rel=1e-12)
    # Then heads lie on all 8 GPUs: o_proj contracts 16 of 128 rows on each, and an all-reduce over 8 adds them up.
    o_proj, add = (op_of(evaluation, name, workload) for name in ("o_proj", "attn_residual"))
    assert o_proj.work_flops == 2 * 8 * 16 * 64
    assert moved(add.collectives) == [("all_reduce", "tp x cp", 8, 2 * 7 / 8 * 8 * 64 * 2)]
    assert evaluation.gpus == 8
    assert strategy.moe_tp == 8


@pytest.mark.parametrize(
    ("qkv_proj", "wanted"),
    [
        (0, [("reduce_scatter", "tp", 2, 1536), ("all_reduce", "cp", 4, 2304)]),  # parts on all 8 GPUs
        (1, []),  # heads over tp: as attention reads them
        (2, []),  # whole: each GPU takes its heads
    ],
)
def test_queries_reach_every_gpu_that_shares_a_context(
    toy_moe: Workload, qkv_proj: int, wanted: list[tuple[str, str, int, float]]
) -> None:
    dims = dict(zip(op_names(toy_moe.model), megatron_dims(toy_moe.model), strict=True)) | {"qkv_proj": qkv_proj}
    evaluation = evaluate(toy_moe, Strategy(2, 1, 1, 8, tuple(dims.values()), cp=4, dp=1))
    got = moved(op_of(evaluation, "attention", toy_moe).collectives)[:-1]
    # V = 8 tokens * 192 columns * 2 B = 3072. A half of it after the reduce-scatter, or all over both axes at once.
    at_once = [("all_reduce", "tp x cp", 8, 2 * 7 / 8 * 3072)]
    assert got in (wanted, at_once)
    if qkv_proj == 0:  # the planner took the faster of the two
        seconds = {"reduce_scatter": 1e-6 + 0.1e-6 + 1536 / 50e9, "all_reduce": 1e-6 + 6 * 0.1e-6 + 2304 / 100e9}
        at_once_s = 1e-6 + 14 * 0.1e-6 + at_once[0][3] / 100e9
        assert got == (at_once if at_once_s < sum(seconds.values()) else wanted)


def test_parts_that_everyone_needs_are_gathered_after_the_merge(toy_moe: Workload) -> None:
    dims = dict(zip(op_names(toy_moe.model), megatron_dims(toy_moe.model), strict=True)) | {"attention": NONE}
    evaluation = evaluate(toy_moe, Strategy(2, 1, 1, 8, tuple(dims.values()), cp=4, dp=1))
    attention = op_of(evaluation, "attention", toy_moe)
    part, whole = 8 * 8 * (16 * 2 + 4), 8 * 8 * 16 * 2
    inside = [c for c in attention.collectives if c.axis == "cp"]
    assert moved(tuple(inside)) == [
        ("all_to_all", "cp", 4, part * 3 / 4),
        ("all_gather", "cp", 4, whole * 3 / 4),
    ]


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from(["gpt_moe_1_2t_16k", "qwen3_235b_a22b_16k"]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 512]),
)
def test_the_kv_cache_is_cut_by_every_degree_and_replicated_beyond_its_heads(
    name: str, tp: int, cp: int, dp: int, batch: int
) -> None:
    workload = WORKLOADS[name]
    model, dims = workload.model, megatron_dims(workload.model)
    memory = evaluate(workload, Strategy(tp, 1, 1, batch, dims, cp=cp, dp=dp)).memory_bytes
    attention = model.groups[0].attention
    assert isinstance(attention, GroupedAttention)
    whole = model.layers * batch * workload.context_tokens * 2 * attention.kv_heads * attention.head_dim
    assert memory.kv_cache == whole / dp / cp / min(tp, attention.kv_heads)


# --- tokens shared out, weights gathered --------------------------------------------------------------


@pytest.mark.parametrize(("op", "columns", "inner"), [("qkv_proj", 192, 64), ("o_proj", 64, 128)])
def test_gemms_over_tokens_and_gathered_weights_by_hand(toy_moe: Workload, op: str, columns: int, inner: int) -> None:
    def under(choice: int) -> tuple[Evaluation, OpBreakdown]:
        dims = [choice if name == op else NONE for name in op_names(toy_moe.model)]
        evaluation = evaluate(toy_moe, Strategy(4, 1, 1, 8, tuple(dims)))
        return evaluation, op_of(evaluation, op, toy_moe)

    weight = inner * columns
    share, gathered_share, gathered = (under(choice) for choice in (TOKENS, GATHERED_TOKENS, GATHERED))
    none, _ = under(NONE)
    for _, op_cost in (share, gathered_share):  # 2 of 8 tokens, and the whole weight read
        assert op_cost.work_flops == 2 * 2 * inner * columns
        assert op_cost.traffic_bytes == 2 * inner * 2 + weight + 2 * columns * 2
        assert op_cost.placement_out == "S(0)"
    assert gathered[1].work_flops == 2 * 8 * inner * columns
    assert gathered[1].placement_out == "R"
    assert share[0].memory_bytes.weights == none.memory_bytes.weights
    for evaluation, op_cost in (gathered_share, gathered):
        assert ("all_gather", "tp", 4, weight * 3 / 4) in moved(op_cost.collectives)
        assert none.memory_bytes.weights - evaluation.memory_bytes.weights == 4 * weight * 3 / 4  # four layers
        assert evaluation.memory_bytes.activations >= weight  # the buffer


def test_a_share_of_the_tokens_visits_fewer_experts(toy_moe: Workload) -> None:
    # tp = 4, ep = 2, 16 sequences: an expert is idle with (3/4) ** 16, for a quarter of the tokens with (3/4) ** 4.
    dims = [TOKENS if name == "ffn1" else NONE for name in op_names(toy_moe.model)]
    ffn1 = op_of(evaluate(toy_moe, Strategy(4, 2, 1, 16, tuple(dims))), "ffn1", toy_moe)
    active = 4 * (1 - 0.75**4)
    assert ffn1.work_flops == 2 * 4 * 64 * 192
    assert ffn1.traffic_bytes == pytest.approx(4 * 64 + active * 64 * 192 + 4 * 192 * 2, rel=1e-12)
    assert ffn1.placement_out == "S(1)"


# --- from one mesh to the other -----------------------------------------------------------------------


def stream_moves(workload: Workload, strategy: Strategy) -> dict[str, list[tuple[str, str, int, float]]]:
    """Collectives that move the residual stream between the sides, by the op that reads it."""
    evaluation = evaluate(workload, strategy)
    names = ("attn_norm", "attn_residual", "ffn_norm", "combine")
    found = {name: op_of(evaluation, name, workload).collectives for name in names}
    return {
        name: moved(tuple(c for c in collectives if c.tensor in ("residual_in", "residual_mid")))
        for name, collectives in found.items()
    }


def test_data_parallel_attention_before_tensor_parallel_experts(toy_moe: Workload) -> None:
    # Four GPUs attend to 4 sequences each; the experts of all share every token: 16 * 64 * 2 B gathered, and on the
    # way back each takes its own rows of what an all-reduce left whole.
    assert stream_moves(toy_moe, Strategy(1, 1, 1, 16, (NONE,) * 12, dp=4)) == {
        "attn_norm": [],
        "attn_residual": [],
        "ffn_norm": [("all_gather", "dp", 4, 3 / 4 * 16 * 64 * 2)],
        "combine": [],
    }


def test_tensor_parallel_attention_before_expert_parallel_experts(toy_moe: Workload) -> None:
    # The other way round: whole rows are there, and the next layer gathers what the expert ranks have left. The norm
    # and the residual add read the same, so it is moved once.
    assert stream_moves(toy_moe, Strategy(4, 4, 1, 16, (NONE,) * 12, dp=1)) == {
        "attn_norm": [("all_gather", "moe_ep", 4, 3 / 4 * 16 * 64 * 2)],
        "attn_residual": [],
        "ffn_norm": [],
        "combine": [],
    }


def test_tokens_shared_out_over_both_meshes_stay_where_they_are(toy_moe: Workload) -> None:
    dims = megatron_sp_dims(toy_moe.model)
    for strategy in (Strategy(4, 4, 1, 64, dims, dp=2), Strategy(2, 2, 1, 64, dims, cp=2, dp=2)):
        assert not any(stream_moves(toy_moe, strategy).values())


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.sampled_from(sorted(WORKLOADS)), st.integers(0, 10**6))
def test_every_extended_strategy_has_finite_figures_that_add_up(name: str, seed: int) -> None:
    workload = WORKLOADS[name]
    strategy = extended_space(workload).sample(np.random.default_rng(seed))
    evaluation = evaluate(workload, strategy)
    assert 0 < evaluation.tpot_s < float("inf")
    assert evaluation.gpus == strategy.tp * strategy.cp * strategy.attention_dp * strategy.pp
    assert evaluation.stage.layer_s == pytest.approx(sum(op.time_s for op in evaluation.ops), rel=1e-12)
    throughput = strategy.batch * strategy.pp / evaluation.tpot_s / evaluation.gpus
    assert evaluation.tokens_per_s_per_gpu == pytest.approx(throughput, rel=1e-12)
    for op in evaluation.ops:
        assert all(c.degree > 1 and c.bytes_per_device > 0 and c.time_s > 0 for c in op.collectives)


@pytest.mark.parametrize(("side", "tp", "dp", "ep"), [("experts", 4, 8, 32), ("attention", 1, 32, 8)])
def test_the_choices_of_a_side_of_one_gpu_change_nothing(side: str, tp: int, dp: int, ep: int) -> None:
    """Two ops that read the residual stream in two shards get the whole of it once, as any two do."""
    workload, rng = WORKLOADS["gpt_moe_1_2t_16k"], np.random.default_rng(0)
    space = extended_space(workload)
    own = np.array([dim.op.side == side for dim in dims_of(workload)])
    for _ in range(40):
        some, others = (space.sample(rng).dims for _ in range(2))
        mixed = tuple(np.where(own, others, some).tolist())
        one, other = (evaluate(workload, Strategy(tp, ep, 1, 256, dims, 1, dp)) for dims in (some, mixed))
        assert (one.tpot_s, one.memory_bytes) == (other.tpot_s, other.memory_bytes)


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
def test_on_one_gpu_nothing_is_communicated_whatever_the_choices(name: str) -> None:
    workload, rng = WORKLOADS[name], np.random.default_rng(1)
    names = op_names(workload.model)
    times = set[float]()
    for _ in range(20):
        dims = tuple(int(rng.choice(extended_space(workload).choices[op])) for op in names)
        evaluation = evaluate(workload, Strategy(1, 1, 1, 8, dims, cp=1, dp=1))
        assert not any(op.collectives for op in evaluation.ops)
        times.add(round(evaluation.tpot_s, 15))
    assert len(times) == 1


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_a_longer_context_never_takes_less_time_or_memory(cp: int) -> None:
    workload = WORKLOADS["gpt_moe_1_2t_16k"]
    strategy = Strategy(8, 16, 1, 64, megatron_dims(workload.model), cp=cp, dp=16)
    found = [
        evaluate(dataclasses.replace(workload, context_tokens=tokens), strategy) for tokens in (2**14, 2**17, 2**20)
    ]
    for shorter, longer in itertools.pairwise(found):
        assert shorter.tpot_s < longer.tpot_s
        assert shorter.memory_bytes.kv_cache < longer.memory_bytes.kv_cache


# --- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            Strategy(2, 4, 1, 8, (NONE,) * 12, dp=1),
            "tp*dp*cp (2*1*1) must equal moe_tp*ep, but ep=4 does not divide it",
        ),
        (
            Strategy(4, 2, 1, 48, (NONE,) * 12, dp=3),
            "groups of tp*cp=4 and of moe_tp=6 GPUs do not fit: one must divide the other",
        ),
        (Strategy(1, 1, 1, 8, (NONE,) * 12, cp=3, dp=1), "cp=3 does not divide the context of 1000 tokens"),
        (Strategy(2, 1, 1, 8, megatron_dims(WORKLOADS["gpt_moe_1_2t_16k"].model), cp=8, dp=1), "tp x cp=16 does not"),
        (Strategy(1, 1, 1, 4, megatron_sp_dims(WORKLOADS["gpt_moe_1_2t_16k"].model), cp=8, dp=1), "over tp x cp=8 ("),
    ],
)
def test_a_strategy_that_cannot_be_laid_out_says_why(toy_moe: Workload, strategy: Strategy, message: str) -> None:
    evaluation = evaluate(toy_moe, strategy)
    assert any(message in violation.message for violation in evaluation.violations), evaluation.violations
    assert evaluation.tpot_s > 0


# --- embedding and LM head ------------------------------------------------------------------------------


def bytes_per_vocabulary_row(workload: Workload, strategy: Strategy) -> float:
    """Bytes of weights on a GPU that one more row of the vocabulary adds."""
    model = workload.model
    larger = dataclasses.replace(workload, model=dataclasses.replace(model, vocab=9 * model.vocab))
    more_bytes = evaluate(larger, strategy).memory_bytes.weights - evaluate(workload, strategy).memory_bytes.weights
    return more_bytes / (8 * model.vocab)


def test_the_vocabulary_is_cut_over_attentions_gpus_wherever_the_experts_lie(toy_moe: Workload) -> None:
    whole = 2 * 64 * 2  # embedding and LM head, 64 wide, in bf16
    for tp, cp, dp, ep in ((4, 1, 1, 4), (4, 1, 1, 2), (2, 1, 4, 8), (2, 2, 2, 8), (4, 1, 2, 1), (1, 1, 4, 1)):
        strategy = Strategy(tp, ep, 1, 16, (NONE,) * 12, cp, dp)
        assert bytes_per_vocabulary_row(toy_moe, strategy) == pytest.approx(whole / (tp * cp))


def test_both_ends_before_and_behind_expert_parallel_experts_by_hand(toy_moe: Workload) -> None:
    # Four GPUs attend to all 16 sequences and have experts of their own, whose ranks leave a quarter of the tokens
    # each: parts of the look-up are reduced to those, and the head gathers them. V = 16 * 64 * 2 B.
    tensor, expert = (evaluate(toy_moe, Strategy(4, ep, 1, 16, (NONE,) * 12, dp=1)).stage for ep in (1, 4))
    stream_bytes = 16 * 64 * 2
    moved_s = 1e-6 + 3 * 0.1e-6 + 0.75 * stream_bytes / 50e9
    assert expert.embedding_s == pytest.approx(2 * stream_bytes / 0.8e12 + moved_s, rel=1e-12)
    assert expert.head_s == pytest.approx(tensor.head_s + moved_s, rel=1e-12)
    # Where tokens do not travel to their experts, every rank has all of them: both ends are those of plain tensor
    # parallelism.
    copies = dataclasses.replace(toy_moe, expert_exchange="all_gather")
    assert embedding_and_head_s(copies, Strategy(4, 4, 1, 16, (NONE,) * 12, dp=1)) == pytest.approx(
        (tensor.embedding_s, tensor.head_s), rel=1e-12
    )


def embedding_and_head_s(workload: Workload, strategy: Strategy) -> tuple[float, float]:
    stage = evaluate(workload, strategy).stage
    return stage.embedding_s, stage.head_s


@pytest.mark.parametrize("choice", [NONE, 0])
def test_data_parallel_attention_looks_up_and_chooses_for_itself(toy_moe: Workload, choice: int) -> None:
    # Whatever the tensor parallel experts leave, whole or cut by tokens: each GPU's own 4 of 16 tokens are there.
    dims = (NONE,) * 11 + (choice,)
    alone = embedding_and_head_s(toy_moe, Strategy(1, 1, 1, 4, (NONE,) * 12))
    assert embedding_and_head_s(toy_moe, Strategy(1, 1, 1, 16, dims, dp=4)) == alone
