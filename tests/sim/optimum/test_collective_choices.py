"""How collectives run as a choice: whose all-reduce, gathers in fp8, gathers merged with those of weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sim.batched import Evaluations, evaluate_many
from sim.config.catalog import CatalogError
from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.layers.ops import Tensor, crossing_tensors
from sim.ops.heuristics import megatron_sp_dims
from sim.ops.rank import Rank
from sim.optimum.certificate import certify
from sim.optimum.checker import check
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space, joint_space
from sim.prices.collectives import IN_FP8, Collective, collective_price
from sim.prices.mesh import group
from sim.simulate import evaluate
from sim.step import layer
from sim.step.attention_expert_meshes import Sides
from sim.step.costs import moves
from sim.strategy import Strategy
from sim.workload import Workload
from tests.sim.execution import Wires

DENSE = Question(model="llama_3_1_70b", phase="decode", isl=4000, osl=500, engine="none", gpus=16, space="extended")
EXPERTS = Question(
    model="mixtral_8x7b",
    phase="serve",
    isl=1000,
    osl=100,
    engine="none",
    gpus=16,
    space="extended",
    expert_exchange="all_gather",
)
PROMPTS = dataclasses.replace(DENSE, phase="prefill", isl=8000, osl=1, gpus=8, hardware="l40s", weights="fp8")
CHOICES = ({"all_reduce": "fastest"}, {"fp8_gather": True}, {"merge_collectives": True})
ALL = {name: value for each in CHOICES for name, value in each.items()}


def gathers(found: Evaluation) -> Iterator[Collective]:
    return (sent for op in found.ops for sent in op.collectives if sent.kind == "all_gather")


def under(asked: Question, **choices: object) -> Workload:
    return dataclasses.replace(asked, **choices).load()  # type: ignore[arg-type]


def small(workload: Workload) -> Space:
    """Few degrees, and products that gather their weight or not behind what leaves its result whole or sharded."""
    whole = extended_space(workload)
    free = dict.fromkeys(("attn_norm", "ffn_norm"), (0, 1, 2))
    free |= {"qkv_proj": (1, 5), "o_proj": (0, 5), "ffn1": (1, 5), "ffn2": (0, 1)}
    choices = {
        name: tuple(each for each in free.get(name, table[:1]) if each in table)
        for name, table in whole.choices.items()
    }
    moe = workload.model.is_moe
    return dataclasses.replace(
        whole,
        tp=(2, 8),
        ep=(1, 4) if moe else (1,),
        pp=(1,),
        cp=(1,),
        dp=(1, 4) if moe else (1,),
        batch=(7, 64) if moe else (9, 128),
        choices=choices,
    )


ASKED = {"dense": DENSE, "experts": EXPERTS, "prompts": PROMPTS}


@pytest.mark.parametrize(
    ("named", "choices"),
    [*zip(("experts", "prompts", "dense"), CHOICES, strict=True), *((name, ALL) for name in ASKED)],
    ids=str,
)
def test_the_optimum_is_that_of_brute_force(named: str, choices: dict[str, object]) -> None:
    asked = ASKED[named]
    workload = under(asked, **choices)
    space = small(workload)
    several = every(space)
    many, plain = solved(workload, space, several), evaluate_many(under(asked), several)
    assert (many.tokens_per_s_per_gpu >= plain.tokens_per_s_per_gpu * (1 - 1e-12)).all()
    assert (many.tokens_per_s_per_gpu > plain.tokens_per_s_per_gpu).any()


def every(space: Space) -> list[Strategy]:
    return [
        Strategy(tp, ep, 1, batch, dims, cp, dp)
        for tp, cp, dp, ep in space.meshes()
        for batch in space.batch
        for dims in itertools.product(*space.choices.values())
    ]


def solved(workload: Workload, space: Space, several: list[Strategy]) -> Evaluations:
    """All strategies, after the optimum, its certificate and single evaluations were compared with them."""
    many, best = evaluate_many(workload, several), find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == (many.tokens_per_s_per_gpu * many.feasible).max()
    check(space, certify(space, best))
    for at in np.linspace(0, len(several) - 1, 12).astype(int):
        one = evaluate(workload, several[at])
        assert (one.tpot_s, one.ttft_s) == (many.tpot_s[at], many.ttft_s[at])
        assert sum(op.time_s for op in one.ops) == pytest.approx(one.stage.layer_s, rel=1e-9)
    return many


# --- algorithms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "algorithm"),
    [(DENSE, "nvls"), (DENSE, "tree"), (EXPERTS, "ring"), (PROMPTS, "one_shot"), (PROMPTS, "two_shot")],
    ids=str,
)
def test_the_optimum_with_one_algorithm_is_that_of_brute_force(asked: Question, algorithm: str) -> None:
    workload = under(asked, all_reduce=algorithm)
    space = small(workload)
    several = every(space)
    solved(workload, space, several)
    found = {
        each.algorithm.removesuffix(", measured").replace("-", "_")
        for strategy in several[:: len(several) // 50]
        for op in evaluate(workload, strategy).ops
        for each in op.collectives
        if each.kind == "all_reduce"
    }
    assert found == {algorithm}


@pytest.mark.parametrize("machine", ["h100_sxm", "b200_sxm", "a100_80_sxm", "mi300x"])
def test_no_algorithm_beats_what_was_measured_of_whoever_may_choose_it(machine: str) -> None:
    """NCCL picks among ring, tree and NVLS, an engine's kernel of one-shot and two-shot; all grow with the message."""
    asked = dataclasses.replace(DENSE, hardware=machine)
    plain = under(asked).hardware
    for algorithm in ("ring", "tree", "nvls", "one_shot", "two_shot"):
        if algorithm == "nvls" and machine in ("a100_80_sxm", "mi300x"):
            with pytest.raises(CatalogError, match=f"'nvls' does not run on {machine}: no switch of its adds up"):
                under(asked, all_reduce=algorithm)
            continue
        hardware = under(asked, all_reduce=algorithm).hardware
        for degree in (2, 4, 8):
            members = group(1, degree, *hardware.tiers)
            sizes = [2.0**power for power in range(10, 31, 2)]
            found = [collective_price(hardware, "all_reduce", members, size) for size in sizes]
            assert [each.time_s for each in found] == sorted(each.time_s for each in found)
            assert {each.algorithm.removesuffix(", measured").replace("-", "_") for each in found} == {algorithm}
            assert all(each.algorithm.endswith(", measured") or each.extrapolated for each in found if plain.curves)
            if plain.curves and algorithm.endswith("shot"):
                fastest = [plain.curves.under(all_reduce=each) for each in ("trtllm", "vllm", "sglang")]
                for size, each in zip(sizes, found, strict=True):
                    known = [curves.collective("all_reduce", degree, size) for curves in fastest]
                    assert each.time_s >= min((one.time_s for one in known if one), default=0.0)


def test_rings_are_slower_than_sums_inside_the_switch_where_messages_are_large() -> None:
    """As measured over 8 H100, 512 MiB: 16-bit sums in 2,111 us, 8-bit ones, which have no NVLS, in 2,665."""
    us = {}
    for algorithm in ("ring", "nvls"):
        hardware = under(DENSE, all_reduce=algorithm).hardware
        found = collective_price(hardware, "all_reduce", group(1, 8, *hardware.tiers), 2.0**29)
        us[algorithm] = found.time_s * 1e6
        assert found.algorithm == f"{algorithm}, measured"
    assert us == pytest.approx({"ring": 2665, "nvls": 2111}, rel=0.05)


def test_a_torus_has_no_choice_of_algorithm() -> None:
    with pytest.raises(CatalogError, match="'tree' does not run on tpu_v5p: a torus has the rings of its links alone"):
        under(dataclasses.replace(DENSE, hardware="tpu_v5p"), all_reduce="tree")


# --- fp8 ----------------------------------------------------------------------------------------------


def test_a_gather_in_fp8_sends_half_the_bytes_and_the_scales_and_pays_for_both_conversions() -> None:
    """By hand on L40S: half the bytes travel; a shard is read and written once, the whole tensor once."""
    plain, hardware = under(PROMPTS).hardware, under(PROMPTS, fp8_gather=True).hardware
    members, size = group(1, 4, *hardware.tiers), 2.0**28
    found = collective_price(hardware, "all_gather", members, size, "tp", 2.0)
    sent_s = collective_price(plain, "all_gather", members, size * IN_FP8).time_s
    converted_s = (size / 4 + size) * (1 + IN_FP8) / hardware.hbm_bandwidth_bytes_per_s
    converted_s /= hardware.efficiency["elementwise"].memory["bf16"]
    assert found.time_s == pytest.approx(sent_s + converted_s)
    assert found.sent == IN_FP8 == 1.03 / 2
    assert found.extrapolated == "all-gathers in fp8"
    assert found.algorithm.endswith("in fp8")


def test_only_large_gathers_of_16_bit_activations_travel_in_fp8() -> None:
    plain, hardware = under(PROMPTS).hardware, under(PROMPTS, fp8_gather=True).hardware
    members = group(1, 4, *hardware.tiers)
    for kind, size, each in (
        ("all_gather", 1e3, 2.0),
        ("all_gather", 1e8, 1.0),
        ("all_gather", 1e8, 0.0),
        ("all_gather", 1e8, 4.0),
        ("reduce_scatter", 1e8, 2.0),
        ("all_reduce", 1e8, 2.0),
    ):
        found, usual = (collective_price(each_, kind, members, size, "tp", each) for each_ in (hardware, plain))
        assert found == usual


def test_what_travels_in_fp8_is_stated_and_weights_never_do() -> None:
    workload = under(dataclasses.replace(PROMPTS, weights="bf16"), fp8_gather=True)
    dims = megatron_sp_dims(workload.model)
    found = evaluate(workload, Strategy(8, 1, 1, 2, dims))
    sent = {each.tensor: each.algorithm for each in gathers(found)}
    assert sent
    assert all(by.endswith("in fp8") for by in sent.values())
    assert any("all-gathers in fp8" in text for text in found.extrapolated)
    names = [op.name for op in found.ops]
    gathered = tuple(5 if name in ("qkv_proj", "ffn1") else dim for name, dim in zip(names, dims, strict=True))
    weights = [each for each in gathers(evaluate(workload, Strategy(8, 1, 1, 2, gathered))) if each.tensor == "weight"]
    assert weights
    assert not any(each.algorithm.endswith("in fp8") for each in weights)


# --- merged -------------------------------------------------------------------------------------------


def test_a_merged_gather_costs_what_one_call_of_both_tensors_does() -> None:
    dims = {"attn_norm": 0, "qkv_proj": 5}
    apart, merged = (one_layer(under(DENSE, merge_collectives=each or None), dims) for each in (False, True))
    (input_, weight), (with_weight, still) = apart, merged
    assert [each.kind for each in apart] == [each.kind for each in merged] == ["all_gather"] * 2
    assert (still, with_weight.bytes_per_device) == (weight, input_.bytes_per_device)
    hardware, members = under(DENSE).hardware, group(1, 8, *under(DENSE).hardware.tiers)
    both_bytes = (input_.bytes_per_device + weight.bytes_per_device) * 8 / 7
    both_s = collective_price(hardware, "all_gather", members, both_bytes).time_s
    assert with_weight.time_s + still.time_s == pytest.approx(both_s)
    assert max(input_.time_s, weight.time_s) < both_s < input_.time_s + weight.time_s
    assert with_weight.algorithm.endswith("with the weight")


def one_layer(workload: Workload, chosen: dict[str, int]) -> tuple[Collective, ...]:
    """The collectives of the projection into attention."""
    choices = {name: table[0] for name, table in extended_space(workload).choices.items()} | chosen
    found = evaluate(workload, Strategy(8, 1, 1, 64, tuple(choices.values())))
    return next(op for op in found.ops if op.name == "qkv_proj").collectives


def test_what_is_gathered_in_one_call_is_what_two_calls_gather() -> None:
    """Executed: four GPUs with a shard of an input and one of a weight each; as many bytes travel, in one call."""
    rng = np.random.default_rng(7)
    inputs, weights = (list(np.split(rng.normal(size=shape), 4)) for shape in ((8, 3), (12, 5)))
    two, one = Wires(), Wires()
    apart = [two.all_gather(pieces, 2.0) for pieces in (inputs, weights)]
    flat = [np.concatenate([x.ravel(), w.ravel()]) for x, w in zip(inputs, weights, strict=True)]
    for rank, pieces in enumerate(one.all_gather(flat, 2.0)):
        found = [np.split(piece, [inputs[0].size]) for piece in pieces]
        assert np.array_equal(np.concatenate([x.reshape(2, 3) for x, _ in found]), np.concatenate(apart[0][rank]))
        assert np.array_equal(np.concatenate([w.reshape(3, 5) for _, w in found]), np.concatenate(apart[1][rank]))
    assert [sent for *_, sent in one.log] == [sum(sent for *_, sent in two.log)]


@pytest.mark.parametrize(("engine", "lacks"), [("vllm", "one_shot"), ("sglang", "fastest"), ("trtllm", "vllm")])
def test_an_engine_is_asked_for_all_reduces_that_it_can_be_set_to_use(engine: str, lacks: str) -> None:
    asked = dataclasses.replace(PROMPTS, engine=engine, space=None, hardware="h100_sxm")
    assert under(asked, all_reduce="ring").hardware.collectives.all_reduce == "ring"
    with pytest.raises(CatalogError, match=f"all_reduce: .* has no option for '{lacks}', but for {engine}, nccl, ring"):
        under(asked, all_reduce=lacks)


def test_sums_and_exchanges_in_one_call_are_those_of_two() -> None:
    """Executed on four GPUs: two tensors of any shapes, rank by rank side by side, for every kind of collective."""
    rng = np.random.default_rng(3)
    shapes = ((8, 3), (4, 5))
    parts = [[rng.normal(size=shape) for _ in range(4)] for shape in shapes]  # of each tensor, on each GPU
    flat = [np.concatenate([one.ravel(), other.ravel()]) for one, other in zip(*parts, strict=True)]
    two, one = Wires(), Wires()
    apart = [two.all_reduce(each, 2.0) for each in parts]
    for rank, whole in enumerate(one.all_reduce(flat, 2.0)):
        np.testing.assert_allclose(whole, np.concatenate([apart[0][rank].ravel(), apart[1][rank].ravel()]))
    chunks = [[np.split(part, 4) for part in each] for each in parts]  # along the rows that are to be sharded
    beside = [
        [np.concatenate([a.ravel(), b.ravel()]) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(*chunks, strict=True)
    ]
    scattered = [two.reduce_scatter(each, 2.0) for each in chunks]
    for rank, piece in enumerate(one.reduce_scatter(beside, 2.0)):
        np.testing.assert_allclose(piece, np.concatenate([scattered[0][rank].ravel(), scattered[1][rank].ravel()]))
    sent = [two.all_to_all(each, 2.0) for each in chunks]
    for rank, pieces in enumerate(one.all_to_all(beside, 2.0)):
        for other, piece in enumerate(pieces):
            both = [sent[0][rank][other].ravel(), sent[1][rank][other].ravel()]
            assert np.array_equal(piece, np.concatenate(both))
    for (kind, gpus, together), *each in zip(one.log, two.log[::2], two.log[1::2], strict=True):
        assert {(kind, gpus)} == {(name, ranks) for name, ranks, _ in each}
        assert together == pytest.approx(sum(size for *_, size in each))


def test_tokens_and_their_routing_are_gathered_in_one_call_before_they_are_dispatched() -> None:
    """The router works on a share of the tokens, the dispatch on all: both its inputs are gathered over the group."""
    asked = dataclasses.replace(EXPERTS, phase="decode", expert_exchange="all_to_all")
    chosen = {"ffn_norm": 0, "router": 0, "dispatch": 2, "combine": 0}
    apart, merged = (routed(under(asked, merge_collectives=each or None), chosen) for each in (False, True))
    assert [each.tensor for each in apart if each.kind == "all_gather"] == ["ffn_in", "routing"]
    (tokens, routing), (still, lengthened) = (
        [each for each in of if each.kind == "all_gather"] for of in (apart, merged)
    )
    assert still == tokens
    assert lengthened.bytes_per_device == routing.bytes_per_device
    assert 0.0 <= lengthened.time_s < routing.time_s
    assert lengthened.algorithm.endswith(", with ffn_in")
    hardware, degree = under(asked).hardware, tokens.degree
    both_bytes = (tokens.bytes_per_device + routing.bytes_per_device) * degree / (degree - 1)
    both_s = collective_price(hardware, "all_gather", group(1, degree, *hardware.tiers), both_bytes).time_s
    assert still.time_s + lengthened.time_s == pytest.approx(both_s)


def routed(workload: Workload, chosen: dict[str, int]) -> tuple[Collective, ...]:
    choices = {name: table[0] for name, table in extended_space(workload).choices.items()} | chosen
    found = evaluate(workload, Strategy(4, 4, 1, 256, tuple(choices.values())))
    return next(op for op in found.ops if op.name == "dispatch").collectives


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "serve"])
@pytest.mark.parametrize("tpot_ms", [None, 18.0])
def test_the_optimum_with_two_inputs_merged_is_that_of_brute_force(phase: str, tpot_ms: float | None) -> None:
    asked = dataclasses.replace(
        EXPERTS, phase=phase, expert_exchange="all_to_all", space="joint", tpot_ms=tpot_ms, merge_collectives=True
    )
    workload = under(asked)
    whole = joint_space(workload)
    free = {"ffn_norm": (0, 1), "router": (0, 1, 2), "dispatch": (0, 1, 2), "ffn2": (0, 1), "combine": (0, 2)}
    choices = {name: free.get(name, table[1:2]) for name, table in whole.choices.items()}
    space = dataclasses.replace(whole, tp=(2, 4), ep=(1, 4), pp=(1, 2), batch=(7, 64, 256), choices=choices)
    several = [
        Strategy(tp, ep, pp, batch, dims)
        for tp, ep, pp, batch in itertools.product(space.tp, space.ep, space.pp, space.batch)
        for dims in itertools.product(*choices.values())
    ]
    many = solved(workload, space, several)
    plain = evaluate_many(under(dataclasses.replace(asked, merge_collectives=None)), several)
    assert (many.tokens_per_s_per_gpu >= plain.tokens_per_s_per_gpu * (1 - 1e-12)).all()
    assert (many.tokens_per_s_per_gpu > plain.tokens_per_s_per_gpu * 1.001).any()


def test_merging_the_residual_stream_with_what_is_added_to_it_could_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were it in one call with whatever else the op reads, moved or not, the optimum would be the same."""
    asked = dataclasses.replace(PROMPTS, model="mixtral_8x22b", hardware="h100_sxm", gpus=32, ttft_ms=300.0)
    moves_s, merged_moves_s, shortened = Sides.moves_s, layer.merged_moves_s, 0

    def merged(rank: Rank, tensor: Tensor, ends: Sequence[int], found: tuple[float, ...]) -> tuple[float, ...]:
        nonlocal shortened
        if tensor not in crossing_tensors(rank.layer) or rank.tp == 1:
            return found
        least = list(found)
        for at, move in enumerate(moves(rank.layer, tensor, tuple(ends[: len(tensor.ops)]))):
            others = rank.layer.op(tensor.consumers[at]).inputs if move else ()
            for other_bytes in (rank.tensor_bytes(rank.layer.tensor(name)) for name in others if name != tensor.name):
                assert move is not None
                both_s = rank.tp_s(move.kind, other_bytes + move.tensor_bytes(rank))
                least[at] = min(least[at], max(0.0, both_s - rank.tp_s(move.kind, other_bytes)))
        shortened += least != list(found)
        return tuple(least)

    def moved_s(sides: Sides, tensor: Tensor, ends: tuple[int, ...]) -> tuple[float, ...]:
        found, rank = moves_s(sides, tensor, ends), sides.rank_by_op[tensor.producer]
        return merged(rank, tensor, ends, found) if sides.within_a_group(tensor) else found

    def merged_s(rank: Rank, tensor: Tensor, ends: tuple[int, ...]) -> tuple[float, ...]:
        return merged(rank, tensor, ends, merged_moves_s(rank, tensor, ends))

    best = find_best(joint_space(under(asked, merge_collectives=True))).evaluation
    monkeypatch.setattr(Sides, "moves_s", moved_s)
    monkeypatch.setattr(layer, "merged_moves_s", merged_s)
    bound = find_best(joint_space(under(asked, merge_collectives=True))).evaluation
    assert best is not None
    assert bound is not None
    assert shortened
    assert bound.tokens_per_s_per_gpu == best.tokens_per_s_per_gpu


def test_a_sum_is_made_by_two_calls_where_these_are_faster() -> None:
    asked = dataclasses.replace(DENSE, all_reduce="one_shot")  # which is slow where messages are large
    hardware, plain = under(asked, merge_collectives=True).hardware, under(asked).hardware
    seen = set()
    for power in range(12, 31, 2):
        members = group(1, 8, *hardware.tiers)
        prices = {
            kind: collective_price(plain, kind, members, 2.0**power).time_s
            for kind in ("all_reduce", "reduce_scatter", "all_gather")
        }
        found = collective_price(hardware, "all_reduce", members, 2.0**power)
        two_s = prices["reduce_scatter"] + prices["all_gather"]
        assert found.time_s == min(prices["all_reduce"], two_s)
        seen.add(found.algorithm.startswith("reduce-scatter"))
    assert seen == {True, False}


@pytest.mark.parametrize("choices", CHOICES[1:], ids=str)
def test_what_no_engine_does_is_refused_in_an_engines_space(choices: dict[str, object]) -> None:
    (name,) = choices
    with pytest.raises(CatalogError, match=f"{name}: no engine .*, and 'vllm' is an engine's space: name another one"):
        under(PROMPTS, engine="vllm", space=None, hardware="h100_sxm", **choices)
    with pytest.raises(CatalogError, match="a gather in parts is no one call"):
        under(DENSE, merge_collectives=True, overlap_parts=2)
