"""Combinations of the choices of one side of a layer, attention's or the experts', that no other combination beats.

Groups of layers that share their choices are looked at together: a combination has the seconds and bytes of one layer
of each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.arrays import Floats, Ints
from sim.layers.ops import crossing_tensors
from sim.ops.rank import Rank
from sim.optimum.addend_tables import (
    ACTIVATION_BYTES,
    KV_BYTES,
    TIME_S,
    WEIGHT_BYTES,
    AddendTables,
    OpFigure,
    joined,
)
from sim.step.attention_expert_meshes import sides
from sim.strategy import MOST_CHOICES

_FITTING = 8
"""Columns of choices that fit into an integer beside a number for each of many rows."""
Ranks = tuple[tuple[Rank, ...], ...]
"""A GPU, per kind of step and group of layers."""


@dataclass(frozen=True, slots=True)
class FrontFigures:
    """What combinations of choices take and hold, [n] of them, of one layer of each group.

    Attributes:
        times_s: [kinds of step, groups, n] seconds.
        weight_bytes, kv_bytes: [groups, n] stored.
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
        tables: Per kind of step and group: all that more tokens might allow.
        allowed: Choices per op that break no limit.
        possible: Whether every op has a choice that more tokens might allow.
    """

    def __init__(self, ranks: Ranks, choices: Mapping[str, Sequence[int]]) -> None:
        self.ranks = ranks
        self.ops = tuple(choices)
        first = [AddendTables(sides(rank, rank), choices) for rank in ranks[0]]

        def left(table: Mapping[str, Sequence[int]], *, or_more: bool) -> dict[str, tuple[int, ...]]:
            return {
                name: tuple(each for each in row if all(known.may(name, each, or_more=or_more) for known in first))
                for name, row in table.items()
            }

        self.usable = left(choices, or_more=True)
        self.allowed = left(self.usable, or_more=False)
        self.possible = all(self.usable.values())
        rest = (tuple(AddendTables(sides(rank, rank), self.usable) for rank in row) for row in ranks[1:])
        self.tables = (
            (tuple(known.within(self.usable) for known in first), *rest) if self.possible else tuple(() for _ in ranks)
        )

    @cached_property
    def floor(self) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]]:
        """Least seconds per kind of step and group, weight bytes and KV bytes, each for itself and without moves."""
        return (
            tuple(tuple(_least(each, TIME_S) for each in row) for row in self.tables),
            tuple(_least(each, WEIGHT_BYTES) for each in self.tables[-1]),
            tuple(_least(each, KV_BYTES) for each in self.tables[-1]),
        )

    @cached_property
    def front(self) -> Front:
        """What no other combination beats, of those that break no limit."""
        return _front(self, self.allowed)

    @cached_property
    def free_front(self) -> Front:
        """The same of all that more tokens might allow, which bounds larger batches."""
        return self.front if self.usable == self.allowed else _front(self, self.usable)


def _least(tables: AddendTables, figure: OpFigure) -> float:
    return sum(min(map(figure, row.values())) for row in tables.costs.values())


@dataclass(frozen=True, slots=True)
class Front:
    """Combinations of one side's choices, [n], that no other beats which leaves and takes alike what crosses the sides.

    Attributes:
        choices: [n, ops]; no ops of layers that lack the side.
        crossing: [n] choices of the ops that leave or read what crosses, by name.
        figures: Of them.
    """

    choices: Ints
    crossing: Mapping[str, Ints]
    figures: FrontFigures


def _front(side: LayerSide, allowed: Mapping[str, tuple[int, ...]]) -> Front:
    tables = side.tables
    if allowed != side.usable:
        tables = tuple(tuple(each.within(allowed) for each in row) for row in tables)
    sizes = {name: len(table) for name, table in allowed.items()}

    def each(figure: OpFigure) -> Floats:
        return np.array([joined(known.each(figure), sizes).ravel() for known in tables[-1]])

    figures = FrontFigures(
        np.array(
            [
                [joined([*each.each(TIME_S), *each.moved_s(crossing=False)], sizes).ravel() for each in row]
                for row in tables
            ]
        ),
        each(WEIGHT_BYTES),
        each(KV_BYTES),
        joined([each for known in tables[-1] for each in known.each(ACTIVATION_BYTES)], sizes, np.maximum).ravel(),
    )
    rows = every_row(allowed.values())
    crossed = {name for rank in side.ranks[0] for tensor in crossing_tensors(rank.layer) for name in tensor.ops}
    crossing = {name: rows[:, at] for at, name in enumerate(side.ops) if name in crossed}
    kept = unbeaten_within(keys_of([*crossing.values(), np.zeros(len(rows), dtype=np.int64)]), figures)
    return Front(rows[kept], {name: each[kept] for name, each in crossing.items()}, figures.of(kept))


def every_row(tables: Iterable[Sequence[int]]) -> Ints:
    """[n, ops] every combination of some ops' choices, those of the last op changing first."""
    axes = np.meshgrid(*(np.array(table, dtype=np.int64) for table in tables), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1) if axes else np.zeros((1, 0), dtype=np.int64)


def keys_of(columns: Sequence[Ints]) -> Ints:
    """[n] one number for each combination of some choices."""
    keys = np.zeros_like(columns[0])
    for at, choices in enumerate(columns):
        if at and at % _FITTING == 0:
            keys = np.unique(keys, return_inverse=True)[1]
        keys = keys * MOST_CHOICES + choices
    return keys


def kinds_of(columns: Sequence[Ints]) -> tuple[list[tuple[int, ...]], Ints]:
    """The combinations of some choices that there are; and [n] which of them each row has."""
    _, first, which = np.unique(keys_of(columns), return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), which


def unbeaten_within(keys: Ints, figures: FrontFigures) -> Ints:
    """Combinations that no other of the same key matches or undercuts in every figure."""
    rows = figures.rows
    kept = [same[_unbeaten(rows[same])] for key in sorted(set(keys.tolist())) for same in [np.flatnonzero(keys == key)]]
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
