"""What an action says, coordinate by coordinate: for gymnasium, and for searchers that know an order when they see one.

A long ordered coordinate, such as a batch that may be any number up to 4096, is too much for a searcher that keeps a
figure per value. `Factored` writes it as its doubling and its place between that and the next, in digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from gymnasium.spaces import MultiDiscrete
from numpy.typing import NDArray

from sim.optimum.spaces import Coordinate
from sim.strategy import FIRST_DECLARED, NONE

Action = NDArray[np.int64]
"""Indices into the tables of a `StrategySpace`, [A]: tp, ep, pp, batch, one choice per fused op; extended: cp, dp."""
ActionLike = NDArray[np.integer[Any]]
"""What is taken for an action: any integer type."""

LONG_LABEL = 32
"""Values beyond which an ordered coordinate counts as long. [assumed] powers of two stay below, ranges do not."""
_RADIX = 16
"""Values of a digit. [assumed]"""


def is_long(coordinate: Coordinate) -> bool:
    """Whether a coordinate has so many ordered values that it is searched by steps, not value by value."""
    return coordinate.ordered and len(coordinate.values) > LONG_LABEL


def doublings(values: Sequence[int]) -> tuple[range, ...]:
    """The indices of ascending values between two powers of two, for each such pair that has any.

    >>> doublings((1, 2, 3, 4, 5, 6, 7, 8, 16))
    (range(0, 1), range(1, 3), range(3, 7), range(7, 8), range(8, 9))
    """
    lengths = np.array([value.bit_length() for value in values])
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(values)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


@dataclass(frozen=True)
class ActionPart:
    """How a long coordinate is written: the place of its doubling, and those of the digits behind it.

    Attributes:
        doubling: Place among the factored coordinates, and of the long one among the plain ones.
        digits: Places of the digits, the first one the largest.
        starts: Index of each doubling's first value, `[D]`.
        counts: Values of each doubling, `[D]`.
    """

    doubling: int
    digits: tuple[int, ...]
    starts: Action
    counts: Action

    @property
    def codes(self) -> int:
        """Numbers that the digits can write."""
        return _RADIX ** len(self.digits)

    def index(self, actions: ActionLike) -> Action:
        """Table index `[...]` that factored actions `[..., B]` stand for."""
        doubling, code = actions[..., self.doubling], np.zeros(actions.shape[:-1], np.int64)
        for place in self.digits:
            code = code * _RADIX + actions[..., place]
        # A doubling of few values spreads them over all codes.
        return self.starts[doubling] + code * self.counts[doubling] // self.codes

    def write(self, index: ActionLike, factored: Action) -> None:
        """Writes a table index `[...]` into factored actions `[..., B]`, in the smallest code that stands for it."""
        doubling = np.searchsorted(self.starts, index, "right") - 1
        code = -(-(index - self.starts[doubling]) * self.codes // self.counts[doubling])
        factored[..., self.doubling] = doubling
        for place in reversed(self.digits):
            factored[..., place] = code % _RADIX
            code = code // _RADIX


@final
class Actions(MultiDiscrete):
    """A MultiDiscrete that knows what its coordinates are, so that RLlib's modules do as well.

    Args:
        coordinates: One per place of an action.
        parts: How long coordinates are written, if they are factored.

    Attributes:
        coordinates: One per place of an action.
        sizes: Values of each, `[A]`.
        ordered: Places of those whose values have an order.
    """

    def __init__(self, coordinates: Sequence[Coordinate], parts: Sequence[ActionPart] = ()) -> None:
        self.coordinates = tuple(coordinates)
        self.sizes = tuple(len(coordinate.values) for coordinate in self.coordinates)
        self.ordered = tuple(place for place, each in enumerate(self.coordinates) if each.ordered)
        self._parts = tuple(parts)
        self._tables = {each.name: (place, np.array(each.values)) for place, each in enumerate(self.coordinates)}
        self._choices = np.array([not each.ordered for each in self.coordinates])
        self._none = np.array([0 if each.ordered else _without(each) for each in self.coordinates])
        self._declared = np.array([0 if each.ordered else _declared(each) for each in self.coordinates])
        super().__init__(np.array(self.sizes, np.int64))

    def place(self, name: str) -> int | None:
        """Where a coordinate stands, None if there is none of that name."""
        return self._tables[name][0] if name in self._tables else None

    def folded(self, actions: ActionLike) -> Action:
        """For actions `[..., A]`, the one of each that stands for all that do the same: see `sim.canonical`."""
        folded = np.array(actions, np.int64)
        for part in self._parts:
            part.write(part.index(folded), folded)
        if self.place("prefills") is not None:  # which kind, and chunks, matter with it or without it alone
            split = self._values("prefills", folded, 0) > 0
            for name, idle in (("prefill", ~split), ("chunk_tokens", split)):
                if (place := self.place(name)) is not None:
                    folded[..., place] = np.where(idle, 0, folded[..., place])
        declared = (self._choices & (folded >= self._declared)).any(-1)
        return np.where((self._alone(folded) & ~declared)[..., None] & self._choices, self._none, folded)

    def _alone(self, actions: Action) -> NDArray[np.bool_]:
        """Of which actions `[..., A]` every group has one GPU, `[...]`."""
        tp, cp, ep = (self._values(name, actions, np.int64(1)) for name in ("tp", "cp", "ep"))
        return (tp == 1) & (cp == 1) & (self._values("dp", actions, ep) <= ep)

    def _values(self, name: str, actions: Action, missing: Any) -> Any:
        if name not in self._tables:
            return missing
        place, table = self._tables[name]
        return table[actions[..., place]]


def ordered_places(space: MultiDiscrete) -> tuple[int, ...]:
    """Places of the coordinates whose values have an order; none where a space does not say."""
    return space.ordered if isinstance(space, Actions) else ()


def _without(coordinate: Coordinate) -> int:
    """Index of an op's choice none; of its first one, where it has no such choice."""
    return coordinate.values.index(NONE) if NONE in coordinate.values else 0


def _declared(coordinate: Coordinate) -> int:
    """Index from which on an op's choices are declared ones."""
    return sum(value < FIRST_DECLARED for value in coordinate.values)


@final
class Factored:
    """Actions whose long coordinates are written as a doubling, in their place, and digits behind all others.

    Without a long coordinate it is the actions themselves.

    Attributes:
        actions: The factored ones.

    Example:
        >>> long = Coordinate("batch", tuple(range(1, 101)), ordered=True)
        >>> factored = Factored([Coordinate("tp", (1, 2), ordered=True), long])
        >>> factored.actions.sizes
        (2, 7, 16, 16)
        >>> factored.encode(np.array([1, 74]))  # 75 of 64, 65, ... 100
        array([ 1,  6,  4, 13])
        >>> factored.decode(factored.encode(np.array([1, 74])))
        array([ 1, 74])
    """

    def __init__(self, coordinates: Sequence[Coordinate]) -> None:
        short, digits, parts = [*coordinates], list[Coordinate](), list[ActionPart]()
        for place, coordinate in enumerate(coordinates):
            if not is_long(coordinate):
                continue
            tables = doublings(coordinate.values)
            counts = np.array([len(table) for table in tables])
            short[place] = Coordinate(coordinate.name, tuple(coordinate.values[t.start] for t in tables), ordered=True)
            places: list[int] = []
            while _RADIX ** len(places) < counts.max():
                places.append(len(coordinates) + len(digits))
                digits.append(Coordinate(f"{coordinate.name}_digit{len(places)}", tuple(range(_RADIX)), ordered=True))
            parts.append(ActionPart(place, tuple(places), np.array([table.start for table in tables]), counts))
        self._plain = len(coordinates)
        self._parts = parts
        self.actions = Actions([*short, *digits], parts)

    def encode(self, actions: ActionLike) -> Action:
        """Plain actions `[..., A]` as factored ones `[..., B]`, a new array."""
        factored = np.zeros((*actions.shape[:-1], len(self.actions.sizes)), np.int64)
        factored[..., : self._plain] = actions
        for part in self._parts:
            part.write(actions[..., part.doubling], factored)
        return factored

    def decode(self, factored: ActionLike) -> Action:
        """The plain actions `[..., A]` that factored ones `[..., B]` stand for, a new array."""
        actions = np.array(factored[..., : self._plain], np.int64)
        for part in self._parts:
            actions[..., part.doubling] = part.index(factored)
        return actions
