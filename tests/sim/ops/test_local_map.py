"""Opaque ops: nobody knows what they compute, only where their tensors lie and what a function says they cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest

from sim.layers.ops import FusedOp
from sim.ops.layers import all_operations, withdraw_op
from sim.ops.local_map import local_map
from sim.ops.rank import Rank, Work, elementwise
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import joint_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload


def ring_work(rank: Rank, op: FusedOp, label: str) -> Work:
    """Some passes over the results, and where tokens are shared out a ring of sends, priced as a gather."""
    rows, columns = rank.shard(rank.sizes.tokens, when=label == "t"), rank.sizes.columns["a"]
    traffic = 6.0 * rows * columns * rank.activation_each
    sent = rank.tp_collective("all_gather", "ring", rows * columns * rank.activation_each) if label == "t" else ()
    if label == "a":
        traffic /= rank.tp
    return Work((elementwise(rank, 0.0, traffic),), sent, buffer_bytes=17.0)


PLACEMENTS = {"t": "S(0) -> S(0)", "a": "S(1) -> S(1)"}
WHERE = {"inputs": ("attn_out",), "output": "attn_mapped", "side": "attention"}


@pytest.fixture(scope="module", autouse=True)
def op() -> Iterator[FusedOp]:
    yield local_map("ring", "ta->ta", PLACEMENTS, ring_work, where=lambda group: group.name == "mapped", **WHERE)
    withdraw_op("ring")


@pytest.fixture(scope="module")
def mapped(toy_moe: Workload) -> Workload:
    (group,) = toy_moe.model.groups
    model = dataclasses.replace(toy_moe.model, groups=(dataclasses.replace(group, name="mapped"),), order=())
    roomy = dataclasses.replace(toy_moe.hardware, hbm_bytes=1e12)
    return dataclasses.replace(toy_moe, model=model, hardware=roomy, name="mapped", tpot_slo_s=1e9)


def test_it_costs_what_the_function_says_and_moves_what_its_placements_say(mapped: Workload, op: FusedOp) -> None:
    """Heads lie as attention leaves them; tokens come by an all-to-all."""
    names = list(joint_space(mapped).choices)
    at, attention = names.index("ring"), names.index("attention")
    for choice, moved in ((1, []), (0, ["all_to_all"])):
        dims = [1] * len(names)
        dims[attention], dims[at] = 1, choice
        ring = next(each for each in evaluate(mapped, Strategy(4, 2, 1, 16, tuple(dims))).ops if each.name == "ring")
        waits = [each.kind for each in ring.collectives if each.tensor != "ring"]
        assert (waits, ring.placement_out) == (moved, f"S({choice})")
        assert ring.label == ("tokens" if choice == 0 else "heads")
        assert ring.traffic_bytes > 0


def test_the_optimum_chooses_it_as_brute_force_does(mapped: Workload) -> None:
    whole = joint_space(mapped)
    free = ("attention", "ring", "o_proj")
    choices = {name: table if name in free else table[1:2] for name, table in whole.choices.items()}
    space = dataclasses.replace(whole, tp=(2, 4), ep=(1, 2), pp=(1,), batch=(8, 16), choices=choices)
    every = [
        evaluate(mapped, Strategy(tp, ep, 1, batch, dims))
        for tp, ep, batch in itertools.product(space.tp, space.ep, space.batch)
        for dims in itertools.product(*choices.values())
    ]
    best = find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == max(each.tokens_per_s_per_gpu for each in every if each.feasible)


def test_nobody_executes_it() -> None:
    assert "ring" not in all_operations()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"t": "S(0) -> S(0)"}, "expected placements for two letters"),
        ({"t": "S(0), R -> S(0)", "a": "S(1) -> S(1)"}, "places 2 inputs, the equation has 1"),
        ({"t": "S(0 -> S(0)", "a": "S(1) -> S(1)"}, "expected a placement such as"),
        ({"t": "S(0) -> S(0)", "z": "S(1) -> S(1)"}, "no tensor has the dim 'z'"),
        ({"t": "S(0) -> S(0)", "a": "S(7) -> S(1)"}, r"S\(7\) in .* shards a dim that ta has not"),
    ],
)
def test_what_is_no_op_is_refused(placements: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_map("other", "ta->ta", placements, ring_work, inputs=("attn_out",), output="other_out", side="attention")


def test_an_equation_without_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an equation such as"):
        local_map("other", "ta", PLACEMENTS, ring_work, inputs=("attn_out",), output="other_out", side="attention")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rank: 3.0, "wrong: expected Work from its function, got 3.0"),
        (lambda rank: Work((elementwise(rank, 0.0, float("nan")),)), "wrong: expected operations and bytes of 0 or"),
        (lambda rank: Work((elementwise(rank, -1.0, 0.0),)), "wrong: expected operations and bytes of 0 or"),
    ],
)
def test_an_answer_that_is_no_price_is_refused(mapped: Workload, answer: Callable[[Rank], Work], message: str) -> None:
    here = {**WHERE, "output": "wrong_out", "where": lambda group: group.name == "mispriced"}
    local_map("wrong", "ta->ta", PLACEMENTS, lambda rank, op, label: answer(rank), **here)
    try:
        (group,) = mapped.model.groups
        model = dataclasses.replace(mapped.model, groups=(dataclasses.replace(group, name="mispriced"),), order=())
        workload = dataclasses.replace(mapped, model=model, name="mispriced")
        dims = (1,) * len(joint_space(workload).choices)
        with pytest.raises((TypeError, ValueError), match=message):
            evaluate(workload, Strategy(4, 2, 1, 16, dims))
    finally:
        withdraw_op("wrong")
