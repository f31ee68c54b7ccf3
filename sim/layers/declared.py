"""Choices of fused ops that somebody declared besides those of `sim.strategy`: numbers from 6 on, per op.

Here they are kept; `sim.layers.choices.declare_choice` proves and adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sim.near_names import did_you_mean
from sim.sharding.rules import Rule
from sim.strategy import FIRST_DECLARED, GRID

DeclaredWork = Callable[[Any, Any], Any]
"""From a `sim.ops.rank.Rank` and the fused op to its `sim.ops.work.Work`."""
OpKey = tuple[str, str, str | None]
"""Name, kind and equation of a fused op: the same op of all layers that have it."""


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredChoice:
    """A further way to run a fused op.

    Attributes:
        number: As `Strategy.dims` has it.
        name: As people call it.
        label: The letter that it shards, "" for none.
        rule: Placements under which it is right; proved.
        sums_late: Whether the first input may arrive as unreduced parts, whose sum is taken on the op's result.
        work: What it does on a GPU; without one, what the op does when the label is sharded.
        source: Which workloads have it: those that name this function; None: all of the process.
    """

    number: int
    name: str
    label: str
    rule: Rule
    sums_late: bool = False
    work: DeclaredWork | None = None
    source: str | None = None


_DECLARED: dict[OpKey, dict[int, DeclaredChoice]] = {}
_NUMBERS: dict[OpKey, int] = {}
"""The next number of each op. None is given twice, so that what was memoised of a withdrawn choice stays unused."""
_NONE: Mapping[int, DeclaredChoice] = MappingProxyType({})
_source: ContextVar[str | None] = ContextVar("source", default=None)


@contextmanager
def declared_by(source: str) -> Generator[None]:
    """Marks what is declared meanwhile as coming from there."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def declared_choices(key: OpKey) -> Mapping[int, DeclaredChoice]:
    """The further choices of an op by their numbers."""
    return _DECLARED.get(key, _NONE)


def all_declared() -> tuple[tuple[OpKey, tuple[int, ...]], ...]:
    """The numbers of all further choices, by op."""
    return tuple([(key, tuple(choices)) for key, choices in _DECLARED.items()])


def next_number(key: OpKey, name: str) -> int:
    """The number that a new choice of this name gets.

    Raises:
        ValueError: The name is taken, or there are too many.
    """
    if any(choice.name == name for choice in declared_choices(key).values()):
        raise ValueError(f"{key[0]} has a choice {name!r} already; give yours another name")
    number = _NUMBERS.get(key, FIRST_DECLARED)
    if number >= min(GRID):
        raise ValueError(
            f"{key[0]} has been given {min(GRID) - FIRST_DECLARED} choices, the most there can be; declare fewer"
        )
    return number


def keep_choice(key: OpKey, choice: DeclaredChoice) -> None:
    """Adds a proved choice."""
    _DECLARED.setdefault(key, {})[choice.number] = replace(choice, source=_source.get())
    _NUMBERS[key] = choice.number + 1


def withdraw(key: OpKey, name: str) -> None:
    """Takes a choice out again.

    Raises:
        ValueError: There is none of that name.
    """
    for choice in declared_choices(key).values():
        if choice.name == name:
            del _DECLARED[key][choice.number]
            return
    names = [choice.name for choice in declared_choices(key).values()]
    raise ValueError(f"{key[0]} has no declared choice {name!r}: {did_you_mean(name, names)}")
