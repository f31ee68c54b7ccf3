"""The checker is checked: every registered rule, broken in one place, is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from sim.ops.layers import all_operations
from sim.sharding.placement import Array
from sim.sharding.rule_check import candidates, counter_example
from sim.sharding.rules import Operation, Rule, rules_of

Ranks = Sequence[Sequence[Array]]
Mutation = Callable[[Ranks], Ranks]
"""What the ranks hold, broken: operands of each rank in, and out."""


def first(count: int) -> Mutation:
    """Only the first ranks take part, wherever there are more."""

    def broken(ranks: Ranks) -> Ranks:
        return [operands if rank < count else [x * 0 for x in operands] for rank, operands in enumerate(ranks)]

    return broken


def all_but(last: int) -> Mutation:
    return lambda ranks: first(len(ranks) - last)(ranks)


def last_twice(ranks: Ranks) -> Ranks:
    return [*ranks[:-1], [2 * x for x in ranks[-1]]]


def last_against(ranks: Ranks) -> Ranks:
    return [*ranks[:-1], [-x for x in ranks[-1]]]


def off_by_one(ranks: Ranks) -> Ranks:
    """Every rank's rows begin one too late."""
    return [[np.roll(x, -1, 0) for x in operands] for operands in ranks]


MUTATIONS: dict[str, Mutation] = {
    **{f"the first {count} ranks alone": first(count) for count in range(1, 11)},
    "all but the last rank": all_but(1),
    "all but the last two ranks": all_but(2),
    "the last rank twice": last_twice,
    "the last rank negated": last_against,
    "rows off by one": off_by_one,
}


FULL = int(os.environ.get("RAYSEARCH_FUZZ", "0")) > 0
EACH = 1 if FULL else 90
"""Every n-th rule is broken in a way, by each way others; with RAYSEARCH_FUZZ all are in every way."""


def registered() -> list[tuple[str, Operation, Rule]]:
    """Rules of all operations, but those that are made for four ranks, of which the last has nothing."""
    return [
        (name, operation, rule)
        for name, operation in all_operations().items()
        for rule in rules_of(operation, candidates(1))
        if all(placement.ranks is None for placement in (*rule.inputs, rule.output))
    ]


def some(what: str) -> list[tuple[str, Operation, Rule]]:
    return registered()[list(MUTATIONS).index(what) % EACH :: EACH]


def results(operation: Operation, rule: Rule, ranks: Ranks) -> Sequence[Array]:
    return rule.run(ranks) if rule.run else [operation.compute(*operands) for operands in ranks]


def left_broken(operation: Operation, rule: Rule, mutation: Mutation) -> Rule:
    """The rule with a mistake in what the ranks are left with."""

    def run(ranks: Ranks) -> Sequence[Array]:
        return [x for (x,) in mutation([[x] for x in results(operation, rule, ranks)])]

    return replace(rule, run=run)


def read_broken(operation: Operation, rule: Rule, mutation: Mutation, index: int) -> Rule:
    """The rule with a mistake in what they make of one operand."""

    def run(ranks: Ranks) -> Sequence[Array]:
        kept = mutation([[operands[index]] for operands in ranks])
        mixed = [[*own[:index], x, *own[index + 1 :]] for own, (x,) in zip(ranks, kept, strict=True)]
        return results(operation, rule, mixed)

    return replace(rule, run=run)


def survivors(broken: Iterator[tuple[str, Operation, Rule]]) -> list[str]:
    return [f"{name}: {rule}" for name, operation, rule in broken if counter_example(operation, rule) is None]


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_rule_that_leaves_a_rank_with_something_else_is_refused(what: str) -> None:
    broken = ((name, op, left_broken(op, rule, MUTATIONS[what])) for name, op, rule in some(what))
    assert not survivors(broken)


@pytest.mark.parametrize("what", sorted(MUTATIONS.keys() - {"the last rank twice"}))
def test_a_rule_that_reads_something_else_of_a_rank_is_refused(what: str) -> None:
    """Of what all have whole, communication inside may take anybody's; twice as much has the same maximum."""
    broken = (
        (f"{name}, operand {index}", op, read_broken(op, rule, MUTATIONS[what], index))
        for name, op, rule in some(what)
        for index, placement in enumerate(rule.inputs)
        if placement.holds != "whole"
    )
    assert not survivors(broken)


def test_a_rule_that_says_another_placement_of_its_result_is_refused() -> None:
    def moved_rows() -> Iterator[tuple[str, Operation, Rule]]:
        for name, op, rule in registered()[::EACH]:
            known = rules_of(op, candidates(1))
            for output in candidates(len(op.result)):
                changed = replace(rule, output=output)
                if not any(each.implies(changed.inputs, output) for each in known):
                    yield name, op, changed

    assert not survivors(moved_rows())
