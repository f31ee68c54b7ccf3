"""The open registry of sharding rules: operation kind -> equalities.

A rule says `op(pieces of the inputs) == pieces of op(inputs)`. True equalities never contradict each
other, so anyone may add more to any operation; `sim.sharding.rule_check` proves them with numbers and finds
those that are missing. Rules are made by sources: functions of the operation and of the placements in
play, so that one statement ("shard label t wherever it occurs") holds for placements yet to be invented.

>>> add_rules("echo", label_rules)
>>> echo = Operation("echo", "td->td", lambda x: x, free="td")
>>> [str(rule) for rule in rules_of(echo, (Shard(0),))]
['R -> R', 'S(0) -> S(0)', 'S(1) -> S(1)']
>>> del SOURCES["echo"]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from sim.sharding import kinds as kinds  # registers their text forms
from sim.sharding.domains import Domain
from sim.sharding.placement import PARTIAL, REPLICATE, Array, Placement, PlacementError, Shard, parse_placement

RunOp = Callable[[Sequence[Sequence[Array]]], Sequence[Array]]
"""All ranks at once: the operands of each rank in, the result of each rank out."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A function of tensors whose dims have letters.

    Attributes:
        kind: Under which its rules are registered.
        equation: Letters of its operands and of its result, as an einsum's: "td,de->te".
        compute: What it does with whole operands, or with one rank's pieces of them.
        free: Letters over which it works slice by slice, so that each may be sharded anyhow.
        sizes: Sizes of letters that cannot be just any size.
        domains: What each operand may be; any real numbers by default.
        opaque: Whether nobody can compute it here: its rules are believed, not proved.
        operands: Letters of each operand.
        result: Letters of the result.
    """

    kind: str
    equation: str
    compute: Callable[..., Array]
    free: str
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    domains: tuple[Domain, ...] = ()
    opaque: bool = False
    operands: tuple[str, ...] = field(init=False)
    result: str = field(init=False)

    def __post_init__(self) -> None:
        operands, _, result = self.equation.partition("->")
        object.__setattr__(self, "operands", tuple(operands.split(",")))
        object.__setattr__(self, "result", result)

    @property
    def signs(self) -> tuple[float, ...]:
        """What its operands may be multiplied by."""
        signed = not self.domains or any(domain.signed for domain in self.domains)
        return (1.0, -1.0) if signed else (1.0,)


@dataclass(frozen=True, slots=True)
class Rule:
    """Placements on one mesh axis under which an operation is right.

    Attributes:
        inputs: One per operand.
        output: Of the result.
        label: The letter that is sharded, if one is.
        run: The operation with communication inside; without it every rank computes on its own pieces.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    label: str = ""
    run: RunOp | None = field(default=None, compare=False)

    def degrees(self, tried: Sequence[int]) -> tuple[int, ...]:
        """Those degrees of an axis that its placements fit, or the one that they are made for."""
        made_for = {given.ranks for given in (*self.inputs, self.output) if given.ranks is not None}
        return tuple(made_for if len(made_for) < 2 else ()) if made_for else tuple(tried)

    def implies(self, inputs: Sequence[Placement], output: Placement) -> bool:
        """Whether it says the same of these placements, a whole tensor being its own average and maximum too."""
        return all(map(reads_as, inputs, self.inputs)) and reads_as(self.output, output)

    def __str__(self) -> str:
        inside = " (with communication inside)" if self.run else ""
        return f"{', '.join(map(str, self.inputs))} -> {self.output}{inside}"


def reads_as(given: Placement, wanted: Placement) -> bool:
    """Whether a tensor that lies as `given` lies as `wanted` too."""
    return given == wanted or (given == REPLICATE and wanted.reads_replicated)


RuleSource = Callable[[Operation, Sequence[Placement]], Iterable[Rule]]
"""Rules of an operation, given the placements in play, those that shard on dim 0: see `Placement.on`."""

SOURCES: dict[str, list[RuleSource]] = {}
"""What is registered: operation kind -> sources. Extended by `add_rules`."""


def add_rules(kind: str, *sources: RuleSource) -> None:
    """Adds sources of rules to an operation kind, known or new.

    What they say is believed until `sim.sharding.rule_check` is run; `sim.sharding.rule_check.add_rule` proves first.
    """
    SOURCES.setdefault(kind, []).extend(sources)


def rules_of(operation: Operation, placements: Sequence[Placement]) -> tuple[Rule, ...]:
    """All registered rules of an operation for the placements in play, each once."""
    replicated = Rule((REPLICATE,) * len(operation.operands), REPLICATE)
    found = dict.fromkeys((replicated,))
    for source in SOURCES.get(operation.kind, ()):
        found.update(dict.fromkeys(source(operation, placements)))
    return tuple(found)


# --- sources ------------------------------------------------------------------------------------------


def shards(placements: Sequence[Placement]) -> Iterator[Placement]:
    """Those of the placements that give every element to one rank, along one dim."""
    return (placement for placement in placements if placement.holds == "shard" and len(placement.dims) == 1)


def placed(letters: str, label: str, shard: Placement) -> Placement:
    """The shard on the label's dim of a tensor that has it; others are replicated.

    >>> placed("td", "d", Shard(0)), placed("td", "q", Shard(0))
    (Shard(dim=1), Replicate())
    """
    return shard.on(letters.index(label)) if label in letters else REPLICATE


def label_rules(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard one free label wherever it occurs, all alike: right however it is sharded."""
    for label in operation.free:
        for shard in shards(placements):
            inputs = tuple(placed(letters, label, shard) for letters in operation.operands)
            yield Rule(inputs, placed(operation.result, label, shard), label)


def contraction_rules(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Shard a label that the operation sums over, alike in all operands: every rank has a part of the sum."""
    for label in dict.fromkeys("".join(operation.operands)):
        if label not in operation.result:
            for shard in shards(placements):
                yield Rule(tuple(placed(letters, label, shard) for letters in operation.operands), PARTIAL, label)


def multilinear_rules(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Pass the parts of one operand through, the others being whole."""
    for part in map(parse_placement, ("P(sum)", "P(avg)")):
        for index in range(len(operation.operands)):
            inputs = [REPLICATE] * len(operation.operands)
            yield Rule((*inputs[:index], part, *inputs[index + 1 :]), part)


def gathered_operand_rules(operation: Operation, placements: Sequence[Placement]) -> Iterator[Rule]:
    """Gather the last operand, sharded anyhow, at use: others are whole, or sharded along a letter that it lacks."""
    *others, last = operation.operands
    for rest, index in itertools.product(shards(placements), range(len(last))):
        at_rest = rest.on(index)

        def run(ranks: Sequence[Sequence[Array]], at_rest: Placement = at_rest) -> list[Array]:
            whole = at_rest.assemble([operands[-1] for operands in ranks])
            return [operation.compute(*operands[:-1], whole) for operands in ranks]

        yield Rule((*[REPLICATE] * len(others), at_rest), REPLICATE, run=run)
        for label, shard in itertools.product(operation.free, shards(placements)):
            if label not in last:
                inputs = (*(placed(letters, label, shard) for letters in others), at_rest)
                yield Rule(inputs, placed(operation.result, label, shard), run=run)


def written(*texts: str) -> RuleSource:
    """Rules as they are written: "P(max), R -> P(max)"."""
    rules = [parse_rule(text) for text in texts]
    return lambda operation, placements: rules


def parse_rule(text: str) -> Rule:
    """The rule that a text such as "P(max), R -> P(max)" writes.

    Raises:
        PlacementError: It is no rule.
    """
    inputs, arrow, output = text.partition("->")
    if not arrow:
        raise PlacementError(f"expected a rule such as 'S(0), R -> S(0)', got {text!r}")
    parts = re.split(r",(?![^(]*\))", inputs)
    return Rule(tuple(map(parse_placement, parts)), parse_placement(output))


# --- einsums ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def einsum_operation(equation: str) -> Operation:
    """An einsum as an operation; its rules follow from its letters."""
    return Operation("einsum", equation, partial(np.einsum, equation), free=equation.split("->")[1])


add_rules("einsum", label_rules, contraction_rules, multilinear_rules, gathered_operand_rules)


def einsum_rule(equation: str, label: str) -> tuple[tuple[Placement, ...], Placement]:
    """Placements of an einsum's operands and result when `label` is sharded wherever it occurs.

    A label that the einsum sums over leaves the result as unreduced parts. Together with
    replicating everything and passing one partial operand through, this is all that is right.

    >>> [str(p) for p in einsum_rule("td,dq->tq", "d")[0]], str(einsum_rule("td,dq->tq", "d")[1])
    (['S(1)', 'S(0)'], 'P(sum)')
    """
    found = label_rule(einsum_operation(equation), label)
    return found.inputs, found.output


def label_rule(operation: Operation, label: str) -> Rule:
    """The rule that shards one label of an operation, in plain chunks.

    Raises:
        ValueError: There is none.
    """
    rules = rules_of(operation, (Shard(0),))
    for rule in rules:
        if rule.label == label:
            return rule
    labels = ", ".join(sorted({rule.label for rule in rules} - {""}))
    raise ValueError(f"no rule of {operation.kind} {operation.equation} shards {label!r}; its rules shard {labels}")
