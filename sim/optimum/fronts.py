"""Combinations of the choices of one side of a layer, attention's or the experts', that no other combination beats.

Groups of layers that share their choices are looked at together: a combination has the seconds and bytes of one layer
of each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sim.arrays import Floats, Ints
from sim.layers.ops import Layer, Tensor, crossing_tensors
from sim.ops.rank import OpCost, Rank
from sim.step.attention_expert_meshes import Sides, sides
from sim.step.costs import moves
from sim.step.layer import Addend, layer_sum
from sim.strategy import MOST_CHOICES

Ranks = tuple[tuple[Rank, ...], ...]
"""A GPU, per kind of step and group of layers."""


@dataclass(frozen=True, slots=True)
class FrontFigures:
    """What combinations of choices take and hold, [n] of them, of one layer of each group.

    Attributes:
        times_s: [kinds of step, groups, n] seconds.
        weight_bytes, kv_bytes: [groups, n] held.
        peak_bytes: [n] largest activations of any op.
    """

    times_s: Floats
    weight_bytes: Floats
    kv_bytes: Floats
    peak_bytes: Floats

    def of(self, index: Ints) -> FrontFigures:
        """Those of some combinations."""
        return FrontFigures(
            self.times_s[..., index], self.weight_bytes[:, index], self.kv_bytes[:, index], self.peak_bytes[index]
        )

    @property
    def rows(self) -> Floats:
        """[n, figures], all to be kept small."""
        size = self.peak_bytes.size
        parts = (self.times_s.reshape(-1, size), self.weight_bytes, self.kv_bytes, self.peak_bytes[None])
        return np.concatenate(parts).T


class LayerSide:
    """One side of a layer on one GPU, under every combination of its ops' choices.

    Attributes:
        ranks: The GPU.
        ops: Names of the side's ops.
        costs: Per kind of step, group and op, by choice: all that more tokens might allow.
        allowed: Choices per op that break no limit.
        possible: Whether every op has a choice that more tokens might allow.
    """

    def __init__(self, ranks: Ranks, choices: Mapping[str, Sequence[int]]) -> None:
        self.ranks = ranks
        self.ops = tuple(choices)
        first = [self._costs(rank, choices) for rank in ranks[0]]
        usable = {
            name: [choice for choice in table if all(_usable(costs, name, choice) for costs in first)]
            for name, table in choices.items()
        }
        every = all(len(usable[name]) == len(table) for name, table in choices.items())
        known = tuple(first) if every else tuple(self._costs(rank, usable) for rank in ranks[0])
        self.costs = (known, *(tuple(self._costs(rank, usable) for rank in row) for row in ranks[1:]))
        self.allowed = {
            name: {choice for choice in table if all(_allowed(costs, name, choice) for costs in first)}
            for name, table in usable.items()
        }
        self.usable = {name: set(table) for name, table in usable.items()}
        self.possible = all(self.usable.values())

    @staticmethod
    def _costs(rank: Rank, choices: Mapping[str, Sequence[int]]) -> dict[str, dict[int, OpCost]]:
        alone = sides(rank, rank)
        return {
            addend.name: {choice: addend.price(alone, (choice,)) for choice in choices[addend.name]}
            for addend in layer_sum(rank.layer).costs
            if addend.name in choices
        }

    @cached_property
    def floor(self) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]]:
        """Least seconds per kind of step and group, weight bytes and KV bytes, each for itself and without moves."""
        return (
            tuple(tuple(_least(costs, lambda cost: cost.time_s) for costs in row) for row in self.costs),
            tuple(_least(costs, lambda cost: cost.weight_bytes) for costs in self.costs[-1]),
            tuple(_least(costs, lambda cost: cost.kv_bytes) for costs in self.costs[-1]),
        )

    @cached_property
    def front(self) -> Front:
        """What no other combination beats, of those that break no limit."""
        return _front(self, self.allowed)

    @cached_property
    def free_front(self) -> Front:
        """The same of all that more tokens might allow, which bounds larger batches."""
        return self.front if self.usable == self.allowed else _front(self, self.usable)


def _usable(costs: Mapping[str, Mapping[int, OpCost]], name: str, choice: int) -> bool:
    return name not in costs or costs[name][choice].broken in (None, "tokens")


def _allowed(costs: Mapping[str, Mapping[int, OpCost]], name: str, choice: int) -> bool:
    return name not in costs or costs[name][choice].broken is None


def _least(costs: Mapping[str, Mapping[int, OpCost]], figure: Callable[[OpCost], float]) -> float:
    return sum(min(figure(cost) for cost in row.values()) for row in costs.values())


@dataclass(frozen=True, slots=True)
class Front:
    """Combinations of one side's choices, [n], that no other beats which leaves and takes alike what crosses the sides.

    Attributes:
        choices: [n, ops]; no ops of layers that lack the side.
        ends: [n] choices of the ops that leave or read what crosses, by name.
        figures: Of them.
    """

    choices: Ints
    ends: Mapping[str, Ints]
    figures: FrontFigures


def _front(side: LayerSide, allowed: Mapping[str, set[int]]) -> Front:
    grid = _Grid({name: tuple(sorted(allowed[name])) for name in side.ops})
    held = side.costs[-1]
    figures = FrontFigures(
        np.array(
            [
                [
                    grid.total(costs, lambda cost: cost.time_s, _inner_moves_s(rank, grid.choices))
                    for rank, costs in zip(ranks, row, strict=True)
                ]
                for ranks, row in zip(side.ranks, side.costs, strict=True)
            ]
        ),
        np.array([grid.total(costs, lambda cost: cost.weight_bytes) for costs in held]),
        np.array([grid.total(costs, lambda cost: cost.kv_bytes) for costs in held]),
        grid.largest(held, lambda cost: cost.activation_bytes),
    )
    rows = grid.rows()
    at_ends = {name for rank in side.ranks[0] for tensor in crossing_tensors(rank.layer) for name in tensor.ends}
    ends = {name: rows[:, at] for at, name in enumerate(side.ops) if name in at_ends}
    kept = unbeaten_within(keys_of([*ends.values(), np.zeros(len(rows), dtype=np.int64)]), figures)
    return Front(rows[kept], {name: each[kept] for name, each in ends.items()}, figures.of(kept))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Every combination of some ops' choices, an axis per op.

    Attributes:
        choices: Of each op, by its name, in the order of the axes.
    """

    choices: Mapping[str, tuple[int, ...]]

    def rows(self) -> Ints:
        """[n, ops] choices, those of the last op changing first."""
        axes = np.meshgrid(*(np.array(table, dtype=np.int64) for table in self.choices.values()), indexing="ij")
        return np.stack([axis.ravel() for axis in axes], axis=1) if axes else np.zeros((1, 0), dtype=np.int64)

    def total(
        self,
        costs: Mapping[str, Mapping[int, OpCost]],
        figure: Callable[[OpCost], float],
        more: Iterable[tuple[tuple[str, ...], Floats]] = (),
    ) -> Floats:
        """[n] sums of a figure over the ops, and of tables over the choices of some of them."""
        total = np.zeros(self._shape)
        for name, row in costs.items():
            total += self._along(name, row, figure)
        for names, table in more:
            order = sorted(range(len(names)), key=lambda at: self._axis(names[at]))
            axes = {self._axis(name) for name in names}
            shape = [size if axis in axes else 1 for axis, size in enumerate(self._shape)]
            total += table.transpose(order).reshape(shape)
        return total.ravel()

    def largest(
        self, groups: Sequence[Mapping[str, Mapping[int, OpCost]]], figure: Callable[[OpCost], float]
    ) -> Floats:
        """[n] largest of a figure of any op of any group."""
        largest = np.zeros(self._shape)
        for costs in groups:
            for name, row in costs.items():
                np.maximum(largest, self._along(name, row, figure), out=largest)
        return largest.ravel()

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.choices.values()))

    def _axis(self, name: str) -> int:
        return list(self.choices).index(name)

    def _along(self, name: str, row: Mapping[int, OpCost], figure: Callable[[OpCost], float]) -> Floats:
        values = np.array([figure(row[choice]) for choice in self.choices[name]])
        return values.reshape([-1] + [1] * (len(self.choices) - 1 - self._axis(name)))


def _inner_moves_s(rank: Rank, choices: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[tuple[str, ...], Floats]]:
    """Seconds of the tensors that stay on the side, by the choices at their ends."""
    for addend in layer_sum(rank.layer).moves:
        if set(addend.ops) <= set(choices) and rank.layer.tensor(addend.name) not in crossing_tensors(rank.layer):
            yield addend.ops, moves_table_s(sides(rank, rank), addend, tuple(choices[name] for name in addend.ops))


def moves_table_s(alone: Sides, addend: Addend, tables: tuple[tuple[int, ...], ...]) -> Floats:
    """Seconds of a tensor on one mesh: an axis per op at its ends, with the choices of its table."""
    layer = alone.experts.layer
    tensor = layer.tensor(addend.name)
    if alone.within_a_group(tensor):
        examples, which = _alike(layer, tensor, tables)
    else:
        examples = tuple(itertools.product(*tables))
        which = np.arange(len(examples))
    seconds = np.array([sum(addend.price(alone, ends)) for ends in examples])
    return seconds[which].reshape([len(table) for table in tables])


@lru_cache(maxsize=1024)
def _alike(
    layer: Layer, tensor: Tensor, tables: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """Choices at a tensor's ends that move it in each possible way; and of all choices there, which way is theirs."""
    ways: dict[object, tuple[int, tuple[int, ...]]] = {}
    which = [ways.setdefault(moves(layer, tensor, ends), (len(ways), ends))[0] for ends in itertools.product(*tables)]
    return tuple(ends for _, ends in ways.values()), np.array(which, dtype=np.int64)


def keys_of(columns: Sequence[Ints]) -> Ints:
    """[n] one small number for each combination of some choices."""
    keys = np.zeros_like(columns[0])
    for choices in columns:
        keys = np.unique(keys * MOST_CHOICES + choices, return_inverse=True)[1]
    return keys


def unbeaten_within(keys: Ints, figures: FrontFigures) -> Ints:
    """Combinations that no other of the same key matches or undercuts in every figure."""
    rows = figures.rows
    kept = [same[_unbeaten(rows[same])] for key in np.unique(keys) for same in [np.flatnonzero(keys == key)]]
    return np.concatenate(kept or [np.zeros(0, dtype=np.int64)])


def _unbeaten(figures: Floats) -> Ints:
    """Rows of [n, figures] that no other row matches or undercuts in every figure; one of equal rows stays."""
    left = np.lexsort(figures.T[::-1])
    kept: list[int] = []
    while left.size:
        row, others = left[0], left[1:]
        kept.append(int(row))
        left = others[(figures[others] < figures[row]).any(axis=1)]
    return np.array(kept, dtype=np.int64)
