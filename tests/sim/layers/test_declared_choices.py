"""Choices declared outside `sim`: proved when declared, priced like the letter they shard, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sim.layers.choices import declare_choice, rule, withdraw_choice
from sim.layers.declared import declared_choices
from sim.ops.layers import DENSE_LAYER, MOE_LAYER
from sim.ops.sizes import Load
from sim.sharding.placement import Array, parse_placement
from sim.sharding.rule_check import WrongRule
from sim.sharding.rules import Rule
from sim.step.costs import op_cost, rank_of
from sim.strategy import FIRST_DECLARED, TOKENS, Strategy
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import Workload

NORM = MOE_LAYER.op("ffn_norm")


@pytest.fixture(autouse=True)
def nothing_declared() -> Iterator[None]:
    yield
    for op in MOE_LAYER.ops:
        for choice in [*declared_choices(op.key).values()]:
            withdraw_choice(op, choice.name)


def test_a_declared_choice_has_its_rule_and_a_number_of_its_own_in_every_layer_that_has_the_op() -> None:
    number = declare_choice(NORM, MOE_LAYER, "striped", "SS(0,2) -> SS(0,2)")
    assert number >= FIRST_DECLARED
    assert NORM.choices == (0, 1, 2, number)
    assert NORM.label(number) == "t"
    for layer in (MOE_LAYER, DENSE_LAYER):
        found = rule(layer.op("ffn_norm"), layer, number)
        assert found.inputs == (parse_placement("SS(0,2)"),)
        assert found.output == parse_placement("SS(0,2)")
    assert declare_choice(NORM, MOE_LAYER, "sections", "IS(0,3) -> IS(0,3)") == number + 1


def test_by_default_it_costs_what_the_letter_that_it_shards_costs(toy_moe: Workload) -> None:
    rank = rank_of(toy_moe, Load(8, toy_moe.context_tokens, toy_moe.context_tokens), 2, 1)
    for name, text, plain in (
        ("qkv_proj", "R, SS(1,2) -> SS(1,2)", 1),
        ("qkv_proj", "SS(0,2), R -> SS(0,2)", TOKENS),
        ("activation", "SS(2,2) -> SS(2,2)", 1),
        ("combine", "SS(2,2), SS(1,2), R -> SS(1,2)", 1),
    ):
        op = MOE_LAYER.op(name)
        number = declare_choice(op, MOE_LAYER, f"like {plain}", text)
        assert op_cost(rank, op, number) == op_cost(rank, op, plain)


def test_a_strategy_may_have_it_and_is_reported_of_it(toy_moe: Workload) -> None:
    number = declare_choice(NORM, MOE_LAYER, "striped", "SS(0,2) -> SS(0,2)")
    dims = [2] * 12
    dims[5] = number
    check_strategy(toy_moe, Strategy(1, 1, 1, 8, tuple(dims)))
    dims[5] = number + 1
    with pytest.raises(StrategyError, match=rf"ffn_norm must be 0 .* or {number} \(striped\), as declared, got"):
        check_strategy(toy_moe, Strategy(1, 1, 1, 8, tuple(dims)))


def test_a_wrong_rule_is_refused_with_its_counter_example() -> None:
    with pytest.raises(WrongRule, match=r"norm: S\(1\) -> S\(1\) is wrong"):
        declare_choice(NORM, MOE_LAYER, "by columns", "S(1) -> S(1)")
    assert NORM.choices == (0, 1, 2)


@pytest.mark.parametrize(
    ("op", "text", "message"),
    [
        ("ffn_norm", "SS(0,2) > SS(0,2)", "expected a rule such as"),
        ("ffn1", "S(2), S(1) -> P(avg)", "is wrong"),
        ("qkv_proj", "P(sum), R -> P(sum)", "must be there whole too; replicate it and give sums_late"),
        ("ffn_norm", "RS(0,1:0:2) -> RS(0,1:0:2)", "is for one number of ranks"),
    ],
)
def test_what_a_strategy_cannot_have_is_refused(op: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare_choice(MOE_LAYER.op(op), MOE_LAYER, "mine", text)


def test_communication_inside_needs_a_price() -> None:
    def gathered(ranks: Sequence[Sequence[Array]]) -> list[Array]:
        whole = np.concatenate([x for (x,) in ranks])
        return [NORM.operation.compute(whole)] * len(ranks)

    inside = Rule((parse_placement("S(0)"),), parse_placement("R"), run=gathered)
    with pytest.raises(ValueError, match=r"has communication inside, which has no price of its own here; give work="):
        declare_choice(NORM, MOE_LAYER, "gathered", inside)


def test_parts_are_not_summed_late_where_others_read_them() -> None:
    with pytest.raises(ValueError, match="others read residual_mid too"):
        declare_choice(NORM, MOE_LAYER, "late", "R -> R", sums_late=lambda ranks: [x for (x,) in ranks])


def test_names_are_not_given_twice_and_unknown_ones_are_reported() -> None:
    number = declare_choice(NORM, MOE_LAYER, "striped", "SS(0,2) -> SS(0,2)")
    with pytest.raises(ValueError, match="ffn_norm has a choice 'striped' already"):
        declare_choice(NORM, MOE_LAYER, "striped", "SS(0,3) -> SS(0,3)")
    with pytest.raises(ValueError, match="no declared choice 'stripes': did you mean 'striped'"):
        withdraw_choice(NORM, "stripes")
    withdraw_choice(NORM, "striped")
    assert NORM.choices == (0, 1, 2)
    # What was memoised of its number stays unused.
    assert declare_choice(NORM, MOE_LAYER, "striped", "SS(0,3) -> SS(0,3)") == number + 1
