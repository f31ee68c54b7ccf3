"""Proves sharding rules with numbers, and finds those that nobody wrote down.

A rule is an equality, so it is executed: operands are split, every rank computes on its pieces, and
what the ranks hold must be the pieces of the whole result, shapes included. What makes a wrong rule
look right is avoided: float64; several degrees, of which some are no power of two and some are prime; sizes
that leave uneven and empty chunks, all different within an equation, and sizes of which every rank of a long axis
holds something, the last one less; several seeds, each also negated where the operation takes negative numbers;
parts of sums of both signs and larger than their sum; parts of a maximum with a random owner per element, tiny and
huge offsets. With naive parts, for one, relu from a maximum's parts to a sum's would pass; on six ranks, the sum of
the first six of any number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sim.sharding.domains import REALS
from sim.sharding.placement import Array, Placement, PlacementError, placement_types
from sim.sharding.rules import Operation, Rule, add_rules, rules_of, written

DEGREE = 4
"""On which all combinations are tried."""
SIZES = (15, 21, 6, 9, 27)
"""By letter in order of appearance; over four ranks 6 and 9 leave an empty chunk. All fill the samples' sections."""
LONG = {8: 45, 11: 66}
"""By degree the size of some letters, each of them in one seed: no rank's chunk is empty, of stripes and sections
neither; on eight ranks the last one is shorter."""
BESIDE_LONG = (36, 3, 6, 12, 15)
"""The sizes of the others beside them, in order of appearance: so many tokens that some choose the last rank's."""
DEGREES = (DEGREE, 3, 5, 6, 2, *LONG)
"""On which a rule must hold: communication may be right on powers of two alone, or on the first few ranks."""
SEEDS = (0, 1, 2)
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class CounterExample:
    """Why a rule is wrong: on how many ranks and on which of them it fails first, and with what numbers."""

    rule: Rule
    degree: int
    seed: int
    sign: float
    rank: int | None
    reason: str

    def __str__(self) -> str:
        where = f", {self.degree} ranks" if self.rank is None else f", rank {self.rank} of {self.degree}"
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


def candidates(dims: int, degree: int = DEGREE) -> tuple[Placement, ...]:
    """Every registered placement as it may lie on a tensor of `dims` dims over `degree` ranks."""
    return tuple(sample for kind in placement_types() for sample in kind.samples(dims, degree))


def check_operation(name: str, operation: Operation, placements: Sequence[Placement] | None = None) -> Verdict:
    """Proves all registered rules of an operation and tries every combination of placements for missing ones.

    Args:
        name: How the verdict calls it.
        operation: What is checked.
        placements: Those in play; all registered ones by default. Shards stand for the same shard on any dim.
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
        prove(operation, rule)
    add_rules(operation.kind, source)


def prove(operation: Operation, rule: Rule) -> None:
    """Accepts a rule that holds on all numbers tried.

    Raises:
        WrongRule: It does not; the message is the counter-example.
    """
    if found := counter_example(operation, rule):
        raise WrongRule(operation.kind, found)


def counter_example(operation: Operation, rule: Rule) -> CounterExample | None:
    """The numbers that refute a rule, or None if all agree."""
    if len(rule.inputs) != len(operation.operands):
        reason = f"it places {len(rule.inputs)} operands, {operation.equation} has {len(operation.operands)}"
        return CounterExample(rule, DEGREE, SEEDS[0], 1.0, None, reason)
    degrees = rule.degrees(DEGREES)
    if not degrees:
        return CounterExample(rule, DEGREE, SEEDS[0], 1.0, None, "cannot be placed: no degree suits all its placements")
    for degree, seed, sign in _tried(degrees, operation.signs):
        try:
            refuted = _refute(_trial(operation, degree, seed, sign), rule)
        except PlacementError as error:
            refuted = None, f"cannot be placed: {error}"
        if refuted:
            return CounterExample(rule, degree, seed, sign, *refuted)
    return None


def _tried(degrees: Sequence[int], signs: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Degrees, seeds and signs: all numbers on the first degree, on long axes all sizes."""
    for degree in degrees:
        seeds = SEEDS if degree == degrees[0] or degree in LONG else SEEDS[:1]
        yield from itertools.product([degree], seeds, signs[:1] if degree in LONG else signs)


class _Trial:
    """An operation's operands with numbers, and what the ranks hold of them under each placement, drawn once."""

    def __init__(self, operation: Operation, degree: int, seed: int, sign: float) -> None:
        self.operation, self.degree, self.seed, self.sign = operation, degree, seed, sign
        self._tensors: dict[tuple[int, Placement], Array] = {}
        self._pieces: dict[tuple[int, Placement], list[Array]] = {}
        self._wholes: dict[tuple[bool, ...], Array] = {}

    @cached_property
    def operands(self) -> tuple[Array, ...]:
        """Numbers that the operation takes."""
        operation, rng = self.operation, np.random.default_rng(self.seed)
        letters = list(dict.fromkeys("".join(operation.operands)))
        sizes = self._sizes(letters) | dict(operation.sizes)
        shapes = [[sizes[letter] for letter in operand] for operand in operation.operands]
        domains = operation.domains or (REALS,) * len(shapes)
        return tuple(domain.draw(rng, shape, self.sign) for domain, shape in zip(domains, shapes, strict=True))

    def _sizes(self, letters: Sequence[str]) -> dict[str, int]:
        if self.degree not in LONG:
            return dict(zip(letters, SIZES, strict=False))
        long = dict.fromkeys(letters[self.seed :: len(SEEDS)], LONG[self.degree])
        return dict(zip(letters, BESIDE_LONG, strict=False)) | long

    def tensor(self, index: int, placement: Placement) -> Array:
        """The operand, or one like it that can lie so."""
        key = (index, placement)
        if key not in self._tensors:
            self._tensors[key] = placement.admissible(self.operands[index])
        return self._tensors[key]

    def pieces(self, index: int, placement: Placement) -> list[Array]:
        """What each rank holds of an operand.

        Raises:
            PlacementError: It cannot lie so.
        """
        key = (index, placement)
        if key not in self._pieces:
            rng = np.random.default_rng([self.seed, index])
            self._pieces[key] = placement.split(self.tensor(*key), self.degree, rng)
        return self._pieces[key]

    def ranks(self, inputs: Sequence[Placement]) -> list[tuple[Array, ...]]:
        """The operands of each rank."""
        return list(zip(*itertools.starmap(self.pieces, enumerate(inputs)), strict=True))

    def whole(self, inputs: Sequence[Placement]) -> Array:
        """The result on whole operands."""
        tensors = list(itertools.starmap(self.tensor, enumerate(inputs)))
        key = tuple(tensor is operand for tensor, operand in zip(tensors, self.operands, strict=True))
        if key not in self._wholes or not all(key):
            self._wholes[key] = self.operation.compute(*tensors)
        return self._wholes[key]


@lru_cache(maxsize=64)
def _trial(operation: Operation, degree: int, seed: int, sign: float) -> _Trial:
    return _Trial(operation, degree, seed, sign)


def _refute(trial: _Trial, rule: Rule) -> tuple[int | None, str] | None:
    ranks, compute = trial.ranks(rule.inputs), trial.operation.compute
    with np.errstate(all="ignore"):
        try:
            got = rule.run(ranks) if rule.run else [compute(*operands) for operands in ranks]
        except (ValueError, IndexError) as error:
            return None, f"the pieces do not fit each other: {error}"
        if len(got) != trial.degree:
            return None, f"results for {len(got)} ranks, should be {trial.degree}"
        return difference(rule.output, got, trial.whole(rule.inputs))


def difference(placement: Placement, got: Sequence[Array], whole: Array) -> tuple[int | None, str] | None:
    """Where what the ranks hold is not the tensor under the placement; None if it is."""
    if placement.holds == "part":
        shapes = (
            [each.shape for each in placement.split(whole, len(got))] if placement.dims else [whole.shape] * len(got)
        )
        if [piece.shape for piece in got] != shapes:
            return None, f"parts of shapes {[piece.shape for piece in got]} for a result of {whole.shape}"
        got, wanted = [placement.assemble(got)], [whole]
    else:
        wanted = placement.split(whole, len(got))
    for rank, (piece, want) in enumerate(zip(got, wanted, strict=True)):
        if piece.shape != want.shape:
            return rank, f"shape {piece.shape}, should be {want.shape}"
        close = np.abs(piece - want) <= TOLERANCE * (1 + np.abs(want))
        if not close.all() and not (close := close | (piece == want)).all():  # infinities have no difference
            at = tuple(map(int, np.unravel_index(np.argmin(close), want.shape)))
            return (None if placement.holds == "part" else rank), f"{piece[at]:.6g} at {at}, should be {want[at]:.6g}"
    return None


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
    """Computes once and holds the result against each output; what survives is proved with all degrees and seeds."""
    trial = _trial(operation, DEGREE, SEEDS[0], operation.signs[0])
    with np.errstate(all="ignore"):
        try:
            got = [operation.compute(*operands) for operands in trial.ranks(inputs)]
            whole = trial.whole(inputs)
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
