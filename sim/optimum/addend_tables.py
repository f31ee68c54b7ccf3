"""The addends of a layer under all choices of some ops: tables with an axis per op, and what they join to on a grid.

Fronts of one side of a layer, bounds of ranges of batches and the landscape are joins of these, and state no addend.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sim.arrays import Floats, Ints
from sim.layers.ops import Layer, Tensor, crossing_tensors
from sim.ops.rank import OpCost
from sim.step.attention_expert_meshes import Sides
from sim.step.costs import moves
from sim.step.layer import Addend, layer_sum

OpFigure = Callable[[OpCost], float]
TIME_S, WEIGHT_BYTES, KV_BYTES, ACTIVATION_BYTES = map(
    operator.attrgetter, ("time_s", "weight_bytes", "kv_bytes", "activation_bytes")
)


class Factor(NamedTuple):
    """A number for each combination of choices of some ops.

    Attributes:
        ops: By name or by place, each once.
        table: An axis for each of them, with its choices.
    """

    ops: tuple[Hashable, ...]
    table: Floats

    def at(self, place: Mapping[Hashable, Hashable]) -> Factor:
        """The same with other names."""
        return Factor(tuple([place[op] for op in self.ops]), self.table)


class AddendTables:
    """The addends of one layer on one GPU.

    Attributes:
        choices: What is tabulated, per op of the layer.
        costs: Of each op, by choice.
    """

    def __init__(self, sides: Sides, choices: Mapping[str, Sequence[int]]) -> None:
        merges = sides.experts.workload.hardware.merge_collectives
        self._sides, self._sum = sides, layer_sum(sides.experts.layer, merges=merges)
        costs = [addend for addend in self._sum.costs if addend.name in choices]
        self.choices = {addend.name: tuple(choices[addend.name]) for addend in costs}
        self.costs: Mapping[str, Mapping[int, OpCost]] = {
            addend.name: {choice: addend.price(sides, (choice,)) for choice in self.choices[addend.name]}
            for addend in costs
        }

    def may(self, name: str, choice: int, *, or_more: bool = False) -> bool:
        """Whether a choice breaks no limit, or none that more tokens do not mend; ops of other layers break none."""
        return name not in self.costs or self.costs[name][choice].broken in ((None, "tokens") if or_more else (None,))

    def within(self, choices: Mapping[str, Sequence[int]]) -> AddendTables:
        """The same of some of the choices."""
        if all(self.choices[name] == tuple(choices[name]) for name in self.costs):
            return self
        found = copy(self)
        found.choices = {name: tuple(choices[name]) for name in self.costs}
        found.costs = {name: {each: row[each] for each in choices[name]} for name, row in self.costs.items()}
        return found

    def each(self, figure: OpFigure, ops: Container[str] | None = None) -> list[Factor]:
        """A figure of each op, or of each of some."""
        rows = [(name, row) for name, row in self.costs.items() if ops is None or name in ops]
        return [Factor((name,), np.array([*map(figure, row.values())])) for name, row in rows]

    def moved_s(self, *, crossing: bool = True) -> Iterator[Factor]:
        """Seconds of the tensors of which all ends are tabulated; without those that cross, if so asked."""
        layer = self._sum.layer
        for addend in self._sum.moves:
            inside = crossing or layer.tensor(addend.name) not in crossing_tensors(layer)
            if inside and set(addend.ops) <= self.choices.keys():
                yield self._moved_s(addend)

    def _moved_s(self, addend: Addend) -> Factor:
        layer, tensor = self._sum.layer, self._sum.layer.tensor(addend.name)
        ops = tuple(dict.fromkeys(addend.ops))
        workload = self._sides.experts.workload
        alone = workload.overlap_parts == 1 and not workload.hardware.merge_collectives
        moved = (layer, tensor) if alone and self._sides.within_a_group(tensor) else None
        examples, which = _alike(addend.ops, tuple([self.choices[op] for op in ops]), moved)
        seconds = np.array([sum(addend.price(self._sides, ends)) for ends in examples])
        return Factor(ops, seconds[which])


def tabulated(
    ends: Sequence[Hashable], choices: Mapping[Any, Sequence[int]], price: Callable[[tuple[int, ...]], float]
) -> Factor:
    """A number for all choices of some ops, of which one may stand in two places.

    Args:
        ends: The ops.
        choices: Of each.
        price: The number, from their choices.
    """
    ops = tuple(dict.fromkeys(ends))
    examples, which = _alike(tuple(ends), tuple([tuple(choices[op]) for op in ops]))
    return Factor(ops, np.array([price(each) for each in examples])[which])


@lru_cache(maxsize=1024)
def _alike(
    ends: tuple[Hashable, ...], tables: tuple[tuple[int, ...], ...], moved: tuple[Layer, Tensor] | None = None
) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """Choices at some ends that come to the same, one of each kind; and of all choices of the ops, of which kind.

    Args:
        ends: Ops, of which one may stand in two places.
        tables: Choices of each of them.
        moved: A tensor between them that moves within one group; what moves in the same way comes to the same.
    """
    ops = tuple(dict.fromkeys(ends))
    at, kinds, which = [ops.index(each) for each in ends], dict[object, tuple[int, tuple[int, ...]]](), list[int]()
    for row in itertools.product(*tables):
        chosen = tuple([row[place] for place in at])
        which.append(kinds.setdefault(moves(*moved, chosen) if moved else chosen, (len(kinds), chosen))[0])
    shape = [len(table) for table in tables]
    return tuple(chosen for _, chosen in kinds.values()), np.array(which, dtype=np.int64).reshape(shape)


def joined(factors: Iterable[Factor], sizes: Mapping[Any, int], join: np.ufunc = np.add) -> Floats:
    """What factors join to at each place of a grid: their sums, or the largest of them and 0.

    Args:
        factors: Of ops on the grid.
        sizes: Choices of each op, an axis each in this order.
        join: `np.add` or `np.maximum`.

    >>> some, more = (Factor((name,), np.array(each)) for name, each in (("b", [1.0, 2.0]), ("a", [10.0, 20.0])))
    >>> joined([some, more], {"a": 2, "b": 2}).tolist()
    [[11.0, 12.0], [21.0, 22.0]]
    """
    place, total = {name: at for at, name in enumerate(sizes)}, np.zeros(tuple(sizes.values()))
    for ops, table in factors:
        order = sorted(range(len(ops)), key=lambda axis: place[ops[axis]])
        shape = [size if name in ops else 1 for name, size in sizes.items()]
        join(total, table.transpose(order).reshape(shape), out=total)
    return total
