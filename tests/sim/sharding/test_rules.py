"""The open registry: outsiders add rules and whole placements without touching sim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from sim.sharding.operations import OPERATIONS
from sim.sharding.placement import (
    PARTIAL,
    Array,
    Placement,
    PlacementError,
    Shard,
    parse_placement,
    register_placement,
    unregister_placement,
)
from sim.sharding.routes import cheapest_route, execute
from sim.sharding.rule_check import WrongRule, add_rule, check_operation, counter_example
from sim.sharding.rules import SOURCES, Operation, Rule, add_rules, einsum_operation, label_rule, label_rules, rules_of


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    kept = {kind: list(sources) for kind, sources in SOURCES.items()}
    yield
    SOURCES.clear()
    SOURCES.update(kept)


@dataclass(frozen=True, slots=True)
class Cyclic(Placement):
    """A toy cut: rank i holds indices i, i + n, i + 2n, ..."""

    code = "CY"
    holds = "shard"
    dim: int

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.dim,)

    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        return [np.take(tensor, range(rank, tensor.shape[self.dim], degree), self.dim) for rank in range(degree)]

    def assemble(self, pieces: Sequence[Array]) -> Array:
        order = np.argsort(np.concatenate(self.own(sum(p.shape[self.dim] for p in pieces), len(pieces))))
        return np.take(np.concatenate(pieces, self.dim), order, self.dim)

    @classmethod
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(dim) for dim in range(dims)]


@dataclass(frozen=True, slots=True)
class Factors(Placement):
    """A toy reduction: the tensor is the product of the ranks' parts."""

    code = "F"
    holds = "part"

    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        rng = rng or np.random.default_rng(0)
        factors = [rng.uniform(0.5, 2, tensor.shape) * rng.choice([-1, 1], tensor.shape) for _ in range(degree - 1)]
        return [*factors, tensor / np.prod(factors, 0)]

    def assemble(self, pieces: Sequence[Array]) -> Array:
        return np.prod(pieces, 0)

    @classmethod
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return (cls(),)


@pytest.fixture
def cyclic() -> Iterator[None]:
    register_placement(Cyclic)
    yield
    unregister_placement(Cyclic)


@pytest.fixture
def factors() -> Iterator[None]:
    register_placement(Factors)
    yield
    unregister_placement(Factors)


@pytest.mark.usefixtures("cyclic")
def test_a_new_cut_obeys_every_label_rule_and_none_is_missing() -> None:
    assert parse_placement("CY(1)") == Cyclic(1)
    for name in ("matmul", "softmax", "add", "router", "norm", "dispatch"):
        verdict = check_operation(name, OPERATIONS[name])
        assert any("CY" in str(rule) for rule in verdict.rules)
        assert verdict.proved, (verdict.wrong, verdict.missing)


@pytest.mark.usefixtures("factors")
def test_a_new_reduction_is_found_missing_until_its_rule_is_added() -> None:
    multiply = OPERATIONS["multiply"]
    assert [str(rule) for rule in check_operation("multiply", multiply).missing] == ["F, F -> F"]
    add_rule(multiply, "F, F -> F")
    assert check_operation("multiply", multiply).proved


@pytest.mark.usefixtures("cyclic")
def test_a_new_cut_is_redistributed_like_any_other() -> None:
    tensor = np.arange(24.0).reshape(12, 2)
    for source, target in (((Cyclic(0),), (Shard(1),)), ((Shard(0),), (Cyclic(0),)), ((Cyclic(0),), (Shard(0),))):
        route = cheapest_route(source, target, (4,), tensor.shape, 1)
        pieces = dict(zip([(rank,) for rank in range(4)], source[0].split(tensor, 4), strict=True))
        assert [step.collective for step in route.steps] == ["all_to_all"]
        for got, wanted in zip(execute(route, pieces, (4,)).values(), target[0].split(tensor, 4), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_true_rule_is_added_to_an_operation_that_exists() -> None:
    before = rules_of(OPERATIONS["softmax"], ())
    assert "P(max) -> P(max)" not in map(str, before)
    relu = OPERATIONS["relu"]
    SOURCES["relu"] = [label_rules]
    add_rule(relu, "P(max) -> P(max)")
    assert "P(max) -> P(max)" in map(str, rules_of(relu, ()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("relu", "P(max) -> P(sum)"),
        ("relu", "P(sum) -> P(sum)"),
        ("matmul", "S(1), SS(0,2) -> P(sum)"),
        ("matmul", "S(1), R -> P(sum)"),
        ("matmul", "P(sum), P(sum) -> P(sum)"),
        ("matmul", "S(1), S(0) -> P(avg)"),
        ("add", "P(sum), R -> P(sum)"),
        ("multiply", "P(max), R -> P(max)"),
        ("negate", "P(max) -> P(max)"),
        ("softmax", "S(1) -> S(1)"),
        ("norm", "S(1) -> S(1)"),
        ("dispatch", "R, NP(2) -> R"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_counter_example(name: str, text: str) -> None:
    with pytest.raises(WrongRule, match=r"is wrong \(seed 0, sign [+-]1.*\): ") as refused:
        add_rule(OPERATIONS[name], text)
    assert str(refused.value.counter_example.rule) == text
    assert text not in map(str, rules_of(OPERATIONS[name], ()))


def test_a_rule_for_another_number_of_operands_is_refused() -> None:
    with pytest.raises(PlacementError, match="places 1 operands"):
        add_rule(OPERATIONS["add"], "R -> R")


def test_a_new_operation_brings_its_rules() -> None:
    double = Operation("double", "td->td", lambda x: 2 * x, free="td")
    add_rules("double", label_rules)
    add_rule(double, "P(sum) -> P(sum)")
    rule = label_rule(double, "d")
    assert rule.inputs == (Shard(1),)
    assert counter_example(double, rule) is None
    assert counter_example(double, Rule((Shard(0),), Shard(1))) is not None


def test_a_label_that_no_rule_shards_is_named() -> None:
    with pytest.raises(ValueError, match="no rule of softmax td->td shards 'd'; its rules shard t"):
        label_rule(OPERATIONS["softmax"], "d")


def test_a_contracted_label_takes_the_same_cut_on_both_sides_only() -> None:
    placements = [parse_placement("S(0)"), parse_placement("SS(0,2)")]
    contracted = [rule.inputs for rule in rules_of(einsum_operation("ij,jk->ik"), placements) if rule.label == "j"]
    assert [tuple(map(str, inputs)) for inputs in contracted] == [("S(1)", "S(0)"), ("SS(1,2)", "SS(0,2)")]


def test_two_sums_stay_due_until_they_are_one() -> None:
    """The third text's second case: the parts of two products are added first, and reduced once."""
    assert "P(sum), P(sum) -> P(sum)" in map(str, rules_of(OPERATIONS["add"], (Shard(0),)))
    rng = np.random.default_rng(5)
    (a, b), (c, d) = [(rng.standard_normal((6, 9)), rng.standard_normal((9, 4))) for _ in range(2)]
    shares = [
        [x @ w for x, w in zip(Shard(1).split(left, 4), Shard(0).split(right, 4), strict=True)]
        for left, right in ((a, b), (c, d))
    ]
    both = [some + more for some, more in zip(*shares, strict=True)]
    np.testing.assert_allclose(PARTIAL.assemble(both), a @ b + c @ d)
