"""What the layers of `sim.batched` add up: tables of costs and moves per group of layers, filled as they are needed.

A row stands for a mesh and a batch. An op's choices count as places in their list. An entry is a place of one op, or
the places of the ops at the ends of one tensor; the entries of all ops lie side by side, as do those of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.evaluation import Violation
from sim.layers.dims import Dim
from sim.layers.model import LayerGroup
from sim.ops.layers import layer_of
from sim.step.costs import op_cost, token_rows
from sim.step.stage import meeting_s
from sim.step.two_meshes import Sides

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Stack = tuple[Sides, ...]
"""Both sides of a GPU, per group of layers."""
_EXACT_SUM = sum([1.0, 1e100, 1.0, -1e100]) == 2.0
"""Whether this Python's `sum` compensates what floats lose, as from 3.12 on."""
_COSTS = ("kernel_s", "collective_s", "weight", "kv", "activation", "rows", "heads", "unsupported")
"""Of an op under a choice: those of `OpCost`, the rows that cannot be shared out, and how far limits are missed."""
_KERNEL_S, _COLLECTIVE_S, _WEIGHT, _KV, _ACTIVATION, _ROWS, _HEADS, _UNSUPPORTED = range(len(_COSTS))


class Table:
    """A float64 array `[rows, ...]` that rows are added to, NaN at first."""

    def __init__(self, *shape: int) -> None:
        self.array: Floats = np.full((64, *shape), np.nan)

    def make_room(self, rows: int) -> None:
        """Grows so that so many rows fit."""
        if rows > len(self.array):
            more = np.full((max(rows, 2 * len(self.array)) - len(self.array), *self.array.shape[1:]), np.nan)
            self.array = np.concatenate([self.array, more])


def filled(table: Table, row: Ints, entries: Ints, term: Callable[[int, int], Sequence[Any]]) -> Floats:
    """Entries `[n, m]` of rows `[n]`, `[n, m, kinds, ...]`; those not known yet are worked out by `term`."""
    array = table.array
    flat = array.reshape(-1, *array.shape[2:])
    places = row[:, None] * array.shape[1] + entries
    picked: Floats = np.take(flat, places, axis=0)
    unknown = np.isnan(picked.reshape(*places.shape, -1)[..., 0])
    if not unknown.any():
        return picked
    for place in np.unique(places[unknown]).tolist():
        for kind, figures in enumerate(term(*divmod(place, array.shape[1]))):
            flat[place, kind] = figures
    return np.take(flat, places, axis=0)


def python_sum(rows: Floats) -> Floats:
    """What Python's `sum` makes of each row `[n, m]`."""
    if not _EXACT_SUM:
        return np.add.accumulate(rows, axis=1)[:, -1]
    total: Floats = np.zeros(len(rows))
    lost: Floats = np.zeros(len(rows))
    for column in rows.T:
        more: Floats = total + column
        larger, smaller = _by_size(total, column)
        lost += (larger - more) + smaller
        total = more
    return total + lost


def _by_size(some: Floats, others: Floats) -> tuple[Floats, Floats]:
    larger = np.abs(some) >= np.abs(others)
    return np.where(larger, some, others), np.where(larger, others, some)


class Missed(NamedTuple):
    """How far limits on the choices of one side of a layer are missed, `[n]` each.

    Attributes:
        heads, unsupported: As `Violation.excess` has it.
        rows: Fewest rows that an op cannot share out over its group; infinite where all can.
    """

    heads: Floats
    unsupported: Floats
    rows: Floats


class LayerFigures(NamedTuple):
    """One layer of a group under some strategies, `[n]` each, of the last kind of step but for the seconds.

    Attributes:
        times_s: Seconds in each kind of step.
        weight_bytes, kv_bytes, peak_bytes: Held, and the largest activations of any op.
        attention, experts: Limits missed on each side, in the first kind of step.
    """

    times_s: list[Floats]
    weight_bytes: Floats
    kv_bytes: Floats
    peak_bytes: Floats
    attention: Missed
    experts: Missed


class GroupTerms:
    """Tables of one group of layers.

    Attributes:
        columns: Places of the ops' choices in `Strategy.dims`, in the order of the ops.
        last: Which of those says how the residual stream is left.
    """

    def __init__(self, index: int, group: LayerGroup, dims: Sequence[Dim], kinds: int) -> None:
        self._index, self._layer, self._steps = index, layer_of(group), kinds
        at = {dim.op.name: place for place, dim in enumerate(dims) if index in dim.groups}
        names = [op.name for op in self._layer.ops]
        self.columns = [at[name] for name in names]
        self.last = at[self._layer.stream.producer]
        self._choices = [dims[place].choices for place in self.columns]
        self._op_start = np.cumsum([0, *map(len, self._choices)])
        self._ends = [[names.index(name) for name in tensor.ends] for tensor in self._layer.tensors]
        self._entered = [list(dict.fromkeys(ends)) for ends in self._ends]  # an op may be at both ends
        sizes = [[len(self._choices[op]) for op in ends] for ends in self._entered]
        self._scale = np.zeros((len(names), len(sizes)), np.int64)  # of an op's place in a tensor's entry
        for tensor, (ends, each) in enumerate(zip(self._entered, sizes, strict=True)):
            self._scale[ends, tensor] = [math.prod(each[place + 1 :]) for place in range(len(each))]
        self._tensor_start = np.cumsum([0, *map(math.prod, sizes)])
        self._most_consumers = max(map(len, self._ends)) - 1
        self._incoming = self._incoming_moves()
        self._of_attention = np.array([op.side == "attention" for op in self._layer.ops])
        self.forget()

    def forget(self) -> None:
        """Starts with empty tables."""
        self._costs = Table(int(self._op_start[-1]), self._steps, len(_COSTS))
        self._moves = Table(int(self._tensor_start[-1]), self._steps, self._most_consumers)

    def make_room(self, rows: int) -> None:
        """Has room for so many rows."""
        self._costs.make_room(rows)
        self._moves.make_room(rows)

    def figures(self, stacks: Sequence[Sequence[Stack]], row: Ints, places: Ints) -> LayerFigures:
        """One layer under strategies `[n]`.

        Args:
            stacks: Of each row, per kind of step.
            row: `[n]`.
            places: Of all dims' choices, `[n, dims]`.
        """
        mine = places[:, self.columns]

        def sides(at: int) -> list[Sides]:
            return [stack[self._index] for stack in stacks[at]]

        costs = filled(self._costs, row, self._op_start[:-1] + mine, lambda at, entry: self._cost(sides(at), entry))
        entries = mine @ self._scale + self._tensor_start[:-1]
        moves = filled(self._moves, row, entries, lambda at, entry: self._move(sides(at), entry))
        times_s: list[Floats] = []
        for kind in range(self._steps):
            own = moves[:, :, kind].reshape(len(row), -1)
            incoming = own[:, self._incoming[0]]
            for more in self._incoming[1:]:
                incoming = incoming + own[:, more]
            times_s.append(python_sum(costs[:, :, kind, _KERNEL_S] + (incoming + costs[:, :, kind, _COLLECTIVE_S])))
        first, last = costs[:, :, 0], costs[:, :, -1]
        held = python_sum(last[..., _WEIGHT]), python_sum(last[..., _KV]), last[..., _ACTIVATION].max(-1)
        on_attention = self._of_attention
        return LayerFigures(times_s, *held, _missed(first[:, on_attention]), _missed(first[:, ~on_attention]))

    def _incoming_moves(self) -> list[Ints]:
        """Which moves `[ops]` reach each op first, second, ...: places in `[tensors, consumers]` laid flat.

        An op of fewer inputs gets moves that take no time: a tensor of fewer consumers than another has such.
        """
        flat = np.arange(len(self._ends) * self._most_consumers).reshape(len(self._ends), -1)
        reaching: list[list[int]] = [[] for _ in self._choices]
        none = 0
        for tensor, (_, *consumers) in enumerate(self._ends):
            for column, op in enumerate(consumers):
                reaching[op].append(int(flat[tensor, column]))
            if len(consumers) < self._most_consumers:
                none = int(flat[tensor, -1])
        most = max(map(len, reaching))
        return list(np.array([each + [none] * (most - len(each)) for each in reaching]).T)

    def _cost(self, steps: Sequence[Sides], entry: int) -> list[Sequence[float]]:
        at = int(np.searchsorted(self._op_start, entry, "right")) - 1
        op, choice = self._layer.ops[at], self._choices[at][entry - int(self._op_start[at])]
        found: list[Sequence[float]] = []
        for each in steps:
            rank = each.rank_by_op[op.name]
            cost, heads, unsupported, rows = op_cost(rank, op, choice), 0.0, 0.0, math.inf
            if cost.broken == "tokens":
                rows = token_rows(rank, op, choice)
            elif cost.broken == "heads":
                heads = Violation("heads", rank.tp, rank.attention.heads, "").excess
            elif cost.broken == "unsupported":
                unsupported = Violation("unsupported", rank.tp, 1, "").excess
            found.append((*cost[:5], rows, heads, unsupported))
        return found

    def _move(self, steps: Sequence[Sides], entry: int) -> list[Sequence[float]]:
        at = int(np.searchsorted(self._tensor_start, entry, "right")) - 1
        code, ends = entry - int(self._tensor_start[at]), self._ends[at]
        choices = tuple(self._choices[op][code // int(self._scale[op, at]) % len(self._choices[op])] for op in ends)
        spare = (0.0,) * (self._most_consumers - len(ends) + 1)
        return [(*each.moves_s(self._layer.tensors[at], choices), *spare) for each in steps]


def _missed(costs: Floats) -> Missed:
    """Of costs `[n, ops, figures]` of one side; of none, if the layers lack it."""
    heads, unsupported = (costs[..., figure].max(-1, initial=0.0) for figure in (_HEADS, _UNSUPPORTED))
    return Missed(heads, unsupported, costs[..., _ROWS].min(-1, initial=math.inf))


class MeetingTerms:
    """A table of what the residual stream's way from one group of layers to another takes longer."""

    def __init__(self, left: int, right: int, groups: Sequence[LayerGroup], dims: Sequence[Dim], kinds: int) -> None:
        self._left, self._right = left, right
        streams = layer_of(groups[left]).stream, layer_of(groups[right]).stream
        sides = (left, dict.fromkeys(streams[0].ends)), (right, dict.fromkeys(streams[1].consumers))
        self._names = [name for _, names in sides for name in names]
        self._mine = len(sides[0][1])
        at: Mapping[tuple[int, str], int] = {
            (group, dim.op.name): place for place, dim in enumerate(dims) for group in dim.groups
        }
        self._columns = [at[group, name] for group, names in sides for name in names]
        self._choices = [dims[place].choices for place in self._columns]
        sizes = [len(table) for table in self._choices]
        self._scale = np.array([math.prod(sizes[place + 1 :]) for place in range(len(sizes))], np.int64)
        self._shape = math.prod(sizes), kinds
        self.forget()

    def forget(self) -> None:
        """Starts with an empty table."""
        self._table = Table(*self._shape)

    def make_room(self, rows: int) -> None:
        """Has room for so many rows."""
        self._table.make_room(rows)

    def times_s(self, stacks: Sequence[Sequence[Stack]], row: Ints, places: Ints) -> Floats:
        """Extra seconds `[n, kinds of step]`; arguments as of `GroupTerms.figures`."""
        entries = (places[:, self._columns] @ self._scale)[:, None]
        return filled(self._table, row, entries, lambda at, entry: self._meeting(stacks[at], entry))[:, 0]

    def _meeting(self, steps: Sequence[Stack], entry: int) -> list[float]:
        chosen = [
            table[entry // int(scale) % len(table)] for table, scale in zip(self._choices, self._scale, strict=True)
        ]
        named = list(zip(self._names, chosen, strict=True))
        mine, its = dict(named[: self._mine]), dict(named[self._mine :])
        return [meeting_s(stack[self._left], stack[self._right], mine, its) for stack in steps]
