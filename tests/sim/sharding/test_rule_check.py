"""The checker: all that is registered is right, nothing right is missing, and no trap catches it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.ops.layers import all_operations
from sim.sharding.domains import NON_NEGATIVE
from sim.sharding.operations import OPERATIONS
from sim.sharding.placement import PARTIAL, REPLICATE, Array, Partial, Shard, parse_placement
from sim.sharding.rule_check import DEGREE, check_operation, counter_example
from sim.sharding.rules import SOURCES, Operation, Rule, einsum_operation, label_rules, rules_of, written
from tests.processes import LONGEST_S


@pytest.mark.slow
@pytest.mark.parametrize("name", all_operations())
def test_every_registered_rule_is_right_and_none_is_missing(name: str) -> None:
    verdict = check_operation(name, all_operations()[name])
    assert not verdict.wrong, list(map(str, verdict.wrong))
    assert not verdict.missing, list(map(str, verdict.missing))


@pytest.mark.slow
def test_the_rule_of_an_einsum_is_complete_in_three_cases() -> None:
    placements, combinations = (REPLICATE, Shard(0), PARTIAL), 0
    for equation in ("td,dq->tq", "ecd,edf->ecf", "bhd,bhd->bh"):
        verdict = check_operation(equation, einsum_operation(equation), placements)
        labels = set(equation) - set(",->")
        alone = [rule for rule in verdict.rules if rule.run is None]
        # Replicate all, pass the parts of either operand (summed or averaged), shard one label.
        assert {rule for rule in alone if "avg" not in str(rule)} == {
            Rule((REPLICATE, REPLICATE), REPLICATE),
            Rule((PARTIAL, REPLICATE), PARTIAL),
            Rule((REPLICATE, PARTIAL), PARTIAL),
            *(rule for rule in alone if rule.label in labels),
        }
        assert len([rule for rule in alone if rule.label]) == len(labels)
        assert verdict.proved
        combinations += verdict.combinations
    assert combinations == 4**3 + 5**3 + 5**2 * 4 == 289


def test_a_missing_rule_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "relu", [label_rules, written("P(min) -> P(min)")])
    assert sorted(map(str, check_operation("relu", OPERATIONS["relu"]).missing)) == [
        "NP(2) -> NP(2)",
        "P(max) -> P(max)",
    ]


def test_a_wrong_rule_is_listed_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "softmax", [label_rules, written("S(1) -> S(1)")])
    (wrong,) = check_operation("softmax", OPERATIONS["softmax"]).wrong
    assert "S(1) -> S(1) is wrong (seed 0, sign +1, rank 0 of 4):" in str(wrong)
    assert "should be" in str(wrong)


def test_naive_parts_would_let_relu_turn_a_maximum_into_a_sum() -> None:
    tensor = np.random.default_rng(0).standard_normal((15, 21))
    naive = [tensor, *[np.full_like(tensor, -1e9)] * (DEGREE - 1)]
    np.testing.assert_array_equal(Partial("max").assemble(naive), tensor)
    np.testing.assert_array_equal(sum(np.maximum(part, 0) for part in naive), np.maximum(tensor, 0))
    assert counter_example(OPERATIONS["relu"], Rule((Partial("max"),), PARTIAL)) is not None


def test_a_shard_contracted_with_stripes_fits_and_is_wrong() -> None:
    left, right = Shard(1), parse_placement("SS(0,2)")
    a, b = np.ones((15, 21)), np.ones((21, 6))
    for x, y in zip(left.split(a, DEGREE), right.split(b, DEGREE), strict=True):
        assert (x @ y).shape == (15, 6)  # nothing complains
    found = counter_example(OPERATIONS["matmul"], Rule((left, right), PARTIAL))
    assert found is not None
    assert "should be" in found.reason


def test_a_rule_that_holds_for_positive_numbers_only_is_found_out_by_the_negated_ones() -> None:
    positive = Operation("absolute", "td->td", np.abs, free="td")
    found = counter_example(positive, Rule((Partial("max"),), Partial("max")))
    assert found is not None


def test_communication_inside_is_part_of_the_equality() -> None:
    (inside,) = [rule for rule in rules_of(OPERATIONS["norm"], (Shard(0),)) if rule.run]
    assert str(inside) == "S(1) -> S(1) (with communication inside)"
    assert counter_example(OPERATIONS["norm"], inside) is None
    assert counter_example(OPERATIONS["norm"], Rule(inside.inputs, inside.output)) is not None


def test_a_rule_of_too_few_operands_is_wrong_not_a_crash() -> None:
    found = counter_example(OPERATIONS["matmul"], Rule((Shard(0),), Shard(0)))
    assert found is not None
    assert "it places 1 operands, ij,jk->ik has 2" in str(found)


def test_a_rule_whose_communication_forgets_ranks_is_wrong() -> None:
    def halves(ranks: Sequence[Sequence[Array]]) -> list[Array]:
        return np.array_split(np.concatenate([x for (x,) in ranks]), [8])  # 15 rows: S(0) over two ranks, not four

    found = counter_example(
        OPERATIONS["negate"], Rule((Shard(0),), Shard(0), run=lambda ranks: [-x for x in halves(ranks)])
    )
    assert found is not None
    assert "results for 2 ranks, should be 4" in str(found)


def test_a_sum_by_recursive_doubling_is_right_on_powers_of_two_alone_and_refused() -> None:
    def doubling(ranks: Sequence[Sequence[Array]]) -> list[Array]:
        sums = [-x for (x,) in ranks]
        for step in (1, 2, 4):
            sums = [s + (sums[r ^ step] if r ^ step < len(sums) else 0) for r, s in enumerate(sums)]
        return sums

    found = counter_example(OPERATIONS["negate"], Rule((PARTIAL,), REPLICATE, run=doubling))
    assert found is not None
    assert found.degree == 3
    assert "rank 1 of 3" in str(found)


@pytest.mark.parametrize("wrong_at", [3, 5, 6])
def test_a_rule_that_one_number_of_ranks_refutes_is_refused(wrong_at: int) -> None:
    def forgetful(ranks: Sequence[Sequence[Array]]) -> list[Array]:
        kept = ranks[:-1] if len(ranks) == wrong_at else ranks
        return [-np.sum([x for (x,) in kept], 0)] * len(ranks)

    found = counter_example(OPERATIONS["negate"], Rule((PARTIAL,), REPLICATE, run=forgetful))
    assert found is not None
    assert found.degree == wrong_at


def test_a_rule_for_a_ragged_shard_is_proved_on_as_many_ranks_as_it_has_units() -> None:
    thirds, halves = parse_placement("RS(0,1:0:2)"), parse_placement("RS(0,1:2)")
    assert counter_example(OPERATIONS["relu"], Rule((thirds,), thirds)) is None
    assert counter_example(OPERATIONS["relu"], Rule((halves,), halves)) is None
    found = counter_example(OPERATIONS["relu"], Rule((thirds,), halves))
    assert found is not None
    assert "no degree suits all its placements" in found.reason


def test_an_operation_is_proved_on_the_numbers_that_it_takes() -> None:
    anywhere = Operation("sqrt", "td->td", np.sqrt, free="td")
    domain = replace(anywhere, domains=(NON_NEGATIVE,))
    by_rows, norms = Rule((Shard(0),), Shard(0)), [parse_placement(text) for text in ("NP(2)", "NP(4)")]
    assert counter_example(anywhere, by_rows) is not None  # nan is not even equal to itself
    assert counter_example(domain, by_rows) is None
    assert counter_example(domain, Rule((norms[0],), norms[1])) is None
    assert counter_example(domain, Rule((norms[0],), norms[0])) is not None
    # The tensor is not negative, but the parts of a sum may be.
    assert counter_example(domain, Rule((PARTIAL,), PARTIAL)) is not None


def test_tokens_are_integers_of_the_vocabulary() -> None:
    rules = [str(rule) for rule in rules_of(OPERATIONS["embedding"], (Shard(0),))]
    assert "R, S(0) -> P(sum) (with communication inside)" in rules
    # Without the mask every rank looks up rows that it has not.
    found = counter_example(OPERATIONS["embedding"], Rule((REPLICATE, Shard(0)), PARTIAL))
    assert found is not None
    assert "do not fit" in found.reason


def test_the_best_token_of_a_vocabulary_is_the_first_of_equals_on_every_rank() -> None:
    def last_of_equals(ranks: Sequence[Sequence[Array]]) -> list[Array]:
        logits = np.concatenate([x for (x,) in ranks], 1)
        return [logits.shape[1] - 1 - logits[:, ::-1].argmax(1)] * len(ranks)

    (right,) = [rule for rule in rules_of(OPERATIONS["greedy"], (Shard(0),)) if rule.run]
    assert counter_example(OPERATIONS["greedy"], right) is None
    assert counter_example(OPERATIONS["greedy"], replace(right, run=last_of_equals)) is not None


def test_a_placement_that_fits_no_tensor_refutes_its_rule() -> None:
    found = counter_example(OPERATIONS["relu"], Rule((parse_placement("RS(0,1:1)"),), parse_placement("RS(0,1:1)")))
    assert found is not None
    assert "cannot be placed" in found.reason


TORCH_LACKS = {
    # Every rank holding the whole result needs no rule there: DTensor always considers replicating.
    "matmul": {"R, R -> R"},
    "multiply": {"R, R -> R"},
    "negate": {"R -> R"},
    "relu": {"R -> R"},
    "softmax": set(),
    # A maximum passes a replicated addend on either side; DTensor lists the first operand only.
    "add": {"R, R -> R", "R, P(max) -> P(max)", "R, P(min) -> P(min)"},
}
TORCH_LISTS_WHAT_WE_IMPLY = {"add": {"P(avg), R -> P(avg)", "R, P(avg) -> P(avg)"}}
"""A whole tensor is its own average, so these follow from `P(avg), P(avg) -> P(avg)`."""


@pytest.mark.slow
def test_the_rules_agree_with_those_of_dtensor_but_for_the_explained() -> None:
    pytest.importorskip("torch")
    script = Path(__file__).with_name("torch_rules.py")
    asked = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONGEST_S, check=True)
    in_play = [parse_placement(text) for text in ("R", "S(0)", "P(sum)", "P(avg)", "P(max)", "P(min)")]
    for name, theirs in json.loads(asked.stdout).items():
        rules = rules_of(OPERATIONS[name], in_play)
        # DTensor's norms are private to its norm ops, and it has no parts of a softmax and no gathers inside a rule.
        ours = {str(rule) for rule in rules if rule.run is None and not re.search("NP|LSE", str(rule))}
        assert ours - set(theirs) == TORCH_LACKS[name], name
        assert set(theirs) - ours == TORCH_LISTS_WHAT_WE_IMPLY.get(name, set()), name
        for text in set(theirs) - ours:
            (wanted,) = written(text)(OPERATIONS[name], ())
            assert any(rule.implies(wanted.inputs, wanted.output) for rule in rules)
