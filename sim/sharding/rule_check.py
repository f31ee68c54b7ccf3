"""Proves sharding rules with numbers, and finds those that nobody wrote down.

A rule is an equality, so it is executed: operands are split, every rank computes on its pieces, and
what the ranks hold must be the pieces of the whole result, shapes included. What makes a wrong rule
look right is avoided: float64; four ranks; sizes that leave uneven and empty chunks, all different
within an equation; several seeds, each also negated; parts of sums of both signs and larger than their
sum; parts of a maximum with a random owner per element, tiny and huge offsets. With naive parts, for
one, relu from a maximum's parts to a sum's would pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sim.sharding.placement import Array, Placement, PlacementError, placement_types
from sim.sharding.rules import Operation, Rule, add_rules, rules_of, written

DEGREE = 4
SEEDS = (0, 1, 2)
SIZES = (15, 21, 6, 9, 27)
"""By letter in order of appearance; over four ranks 6 and 9 leave an empty chunk. All fill the samples' sections."""
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class CounterExample:
    """Why a rule is wrong: the first rank on which it fails, and with what numbers."""

    rule: Rule
    seed: int
    sign: float
    rank: int | None
    reason: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank {self.rank} of {DEGREE}"
        return f"{self.rule} is wrong (seed {self.seed}, sign {self.sign:+g}{where}): {self.reason}"


class WrongRule(ValueError):
    """A rule that numbers refute; `counter_example` has them."""

    def __init__(self, kind: str, counter_example: CounterExample) -> None:
        super().__init__(f"{kind}: {counter_example}")
        self.counter_example = counter_example


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker found about one operation.

    Attributes:
        rules: Registered ones, for all registered placements.
        combinations: Placements of operands and result that were tried.
        wrong: One counter-example per wrong rule.
        missing: Right combinations that no registered rule implies.
    """

    name: str
    equation: str
    rules: tuple[Rule, ...]
    combinations: int
    wrong: tuple[CounterExample, ...]
    missing: tuple[Rule, ...]

    @property
    def proved(self) -> bool:
        """Whether every rule is right and none is missing."""
        return not self.wrong and not self.missing


def candidates(dims: int) -> tuple[Placement, ...]:
    """Every registered placement as it may lie on a tensor of `dims` dims."""
    return tuple(sample for kind in placement_types() for sample in kind.samples(dims, DEGREE))


def check_operation(name: str, operation: Operation, placements: Sequence[Placement] | None = None) -> Verdict:
    """Proves all registered rules of an operation and tries every combination of placements for missing ones.

    Args:
        name: How the verdict calls it.
        operation: What is checked.
        placements: Those in play; all registered ones by default. Cuts stand for the same cut on any dim.
    """
    in_play = candidates(1) if placements is None else tuple(placements)
    rules = rules_of(operation, in_play)
    wrong = [found for found in (counter_example(operation, rule) for rule in rules) if found]
    combinations, missing = 0, list[Rule]()
    for rule in _combinations(operation, in_play):
        combinations += 1
        if isinstance(rule, Rule) and not any(
            known.run is None and known.implies(rule.inputs, rule.output) for known in rules
        ):
            missing.append(rule)
    return Verdict(name, operation.equation, rules, combinations, tuple(wrong), tuple(missing))


def add_rule(operation: Operation, text: str) -> None:
    """Adds one written rule, such as "P(max), R -> P(max)", once it is proved.

    Raises:
        WrongRule: It is not right; the message is the counter-example.
        PlacementError: The text is no rule.
    """
    source = written(text)
    for rule in source(operation, ()):
        if len(rule.inputs) != len(operation.operands):
            raise PlacementError(f"{text!r} places {len(rule.inputs)} operands, {operation.equation} has more or fewer")
        if found := counter_example(operation, rule):
            raise WrongRule(operation.kind, found)
    add_rules(operation.kind, source)


def counter_example(operation: Operation, rule: Rule) -> CounterExample | None:
    """The numbers that refute a rule, or None if all agree."""
    if len(rule.inputs) != len(operation.operands):
        reason = f"it places {len(rule.inputs)} operands, {operation.equation} has {len(operation.operands)}"
        return CounterExample(rule, SEEDS[0], 1.0, None, reason)
    for seed, sign in itertools.product(SEEDS, (1.0, -1.0)):
        try:
            refuted = _refute(operation, rule, seed, sign)
        except PlacementError as error:
            refuted = None, f"cannot be placed: {error}"
        if refuted:
            return CounterExample(rule, seed, sign, *refuted)
    return None


def _refute(operation: Operation, rule: Rule, seed: int, sign: float) -> tuple[int | None, str] | None:
    rng = np.random.default_rng(seed)
    tensors = [
        placement.admissible(tensor)
        for placement, tensor in zip(rule.inputs, _tensors(operation, rng, sign), strict=True)
    ]
    pieces = [placement.split(tensor, DEGREE, rng) for placement, tensor in zip(rule.inputs, tensors, strict=True)]
    ranks = list(zip(*pieces, strict=True))
    with np.errstate(all="ignore"):
        try:
            got = rule.run(ranks) if rule.run else [operation.compute(*operands) for operands in ranks]
        except (ValueError, IndexError) as error:
            return None, f"the pieces do not fit each other: {error}"
        if len(got) != DEGREE:
            return None, f"results for {len(got)} ranks, should be {DEGREE}"
        return difference(rule.output, got, operation.compute(*tensors))


def difference(placement: Placement, got: Sequence[Array], whole: Array) -> tuple[int | None, str] | None:
    """Where what the ranks hold is not the tensor under the placement; None if it is."""
    if placement.holds == "part":
        if any(piece.shape != whole.shape for piece in got):
            return None, f"parts of shapes {[piece.shape for piece in got]} for a result of {whole.shape}"
        got, wanted = [placement.assemble(got)], [whole]
    else:
        wanted = placement.split(whole, len(got))
    for rank, (piece, want) in enumerate(zip(got, wanted, strict=True)):
        if piece.shape != want.shape:
            return rank, f"shape {piece.shape}, should be {want.shape}"
        if not np.allclose(piece, want, rtol=TOLERANCE, atol=TOLERANCE):
            where = np.unravel_index(np.argmax(~np.isclose(piece, want, TOLERANCE, TOLERANCE)), want.shape)
            at = tuple(map(int, where))
            return (None if placement.holds == "part" else rank), f"{piece[at]:.6g} at {at}, should be {want[at]:.6g}"
    return None


def _tensors(operation: Operation, rng: np.random.Generator, sign: float) -> list[Array]:
    letters = dict.fromkeys("".join(operation.operands))
    sizes = dict(zip(letters, SIZES, strict=False)) | dict(operation.sizes)
    return [sign * rng.standard_normal([sizes[letter] for letter in operand]) for operand in operation.operands]


def _combinations(operation: Operation, in_play: Sequence[Placement]) -> Iterator[Rule | None]:
    """Every combination of placements: as a rule where it is right, else None."""
    outputs = _on_every_dim(in_play, operation.result)
    for inputs in itertools.product(*(_on_every_dim(in_play, letters) for letters in operation.operands)):
        yield from _right_outputs(operation, inputs, outputs)


def _on_every_dim(in_play: Sequence[Placement], letters: str) -> list[Placement]:
    cut_on = [
        [placement] if not placement.dims else [placement.on(dim) for dim in range(len(letters))]
        for placement in in_play
    ]
    return list(itertools.chain.from_iterable(cut_on))


def _right_outputs(
    operation: Operation, inputs: tuple[Placement, ...], outputs: Sequence[Placement]
) -> Iterator[Rule | None]:
    """Computes once and holds the result against each output; what survives is proved with all seeds."""
    rng = np.random.default_rng(SEEDS[0])
    got, whole = list[Array](), np.zeros(())
    with np.errstate(all="ignore"):
        try:
            tensors = [p.admissible(x) for p, x in zip(inputs, _tensors(operation, rng, 1.0), strict=True)]
            pieces = [p.split(x, DEGREE, rng) for p, x in zip(inputs, tensors, strict=True)]
            got = [operation.compute(*operands) for operands in zip(*pieces, strict=True)]
            whole = operation.compute(*tensors)
        except (ValueError, IndexError):  # PlacementError among them: not to be placed so, hence no rule
            yield from [None] * len(outputs)
            return
        for output in outputs:
            rule = Rule(inputs, output)
            yield rule if _holds(output, got, whole) and not counter_example(operation, rule) else None


def _holds(output: Placement, got: Sequence[Array], whole: Array) -> bool:
    try:
        return difference(output, got, whole) is None
    except PlacementError:
        return False
