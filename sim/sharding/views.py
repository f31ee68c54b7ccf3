"""Views and transposes of sharded tensors: where they lie afterwards when every rank only reshapes its own piece.

Mesh-oriented placements make views hard: a flattened `[R, S]` is no plain shard. It is a striped one. A view regroups
dims in row-major order; within a group of dims that become others, a shard cuts the elements into `stripes` equal runs
and each run into as many chunks as there are ranks. A view changes neither, so the shard lies on whichever new dim can
hold the same: plain where its runs are whole, else as `SS(dim, stripes)`. Where none can, the tensor must be gathered
first. Answers about tensors of up to `PROVED_ELEMENTS` are executed before they are given.

>>> view = View((4, 6, 8), (24, 8))  # batch and sequence become the rows of a product
>>> [str(placed_after(view, Shard(dim), 2)) for dim in range(3)]
['S(0)', 'SS(0,4)', 'S(1)']
>>> str(placed_after(View((24, 8), (4, 6, 8)), StridedShard(0, 4), 2))  # and back
'S(1)'
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.sharding.kinds import StridedShard
from sim.sharding.layout import Layout
from sim.sharding.placement import Array, Partial, Placement, PlacementError, Replicate, Shard
from sim.sharding.rule_check import difference

PROVED_ELEMENTS = 1 << 16
"""[assumed] What is right of so many elements in some order is right of more: an answer depends on divisors alone."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor under another shape, in the same order of elements: view, reshape, flatten and unflatten.

    Attributes:
        source: Shape before; no dim is empty.
        target: Shape after, of as many elements.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]

    def __post_init__(self) -> None:
        if min((*self.source, *self.target), default=1) < 1 or math.prod(self.source) != math.prod(self.target):
            raise PlacementError(f"expected shapes of as many elements, got {self.source} and {self.target}")

    @property
    def back(self) -> View:
        """The view that undoes it."""
        return View(self.target, self.source)


class _Group(NamedTuple):
    """Neighbouring dims that become neighbouring others of as many elements: from the first one up to another."""

    source: range
    target: range


def flattened(shape: tuple[int, ...], first: int = 0, last: int = -1) -> View:
    """The view that makes one dim of some, both ends included.

    >>> flattened((2, 3, 4), 0, 1).target
    (6, 4)
    """
    last %= len(shape)
    return View(shape, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def placed_after(view: View, placement: Placement, degree: int) -> Placement | None:
    """Where a tensor that lies so lies after a view, without communication; None where it must be gathered first.

    Args:
        view: Shapes of the whole tensor.
        placement: Before.
        degree: Ranks of the axis.
    """
    found = _placed(view, placement, degree)
    if found is not None and found.holds == "shard" and math.prod(view.source) <= PROVED_ELEMENTS:
        assert refuted(view, placement, found, degree) is None, (view, placement, found, degree)
    return found


def layout_after(view: View, layout: Layout, degrees: Sequence[int]) -> Layout | None:
    """The same on a mesh of several axes, from left to right: of each axis as it lies in what the earlier ones left.

    >>> view = View((4, 6), (24,))
    >>> [str(each) for each in layout_after(view, (Shard(0), Shard(1)), (2, 3))]
    ['S(0)', 'SS(0,2)']
    """
    found: list[Placement] = []
    for placement, degree in zip(layout, degrees, strict=True):
        after = placed_after(view, placement, degree)
        if after is None:
            return None
        found.append(after)
        try:
            view = View(placement.local_shape(view.source, degree), after.local_shape(view.target, degree))
        except PlacementError:
            return None  # pieces of unequal sizes
    return tuple(found)


def transposed(placement: Placement, order: Sequence[int]) -> Placement | None:
    """Where a tensor lies after its dims were put in another order: dim i is then what dim order[i] was.

    >>> str(transposed(Shard(2), (2, 0, 1))), str(transposed(StridedShard(0, 4), (1, 0)))
    ('S(0)', 'SS(1,4)')
    """
    if sorted(order) != list(range(len(order))):
        raise PlacementError(f"expected each dim once, got {tuple(order)}")
    if placement.holds == "shard":
        return placement.on(list(order).index(placement.dims[0])) if len(placement.dims) == 1 else None
    return placement if placement.holds == "whole" or isinstance(placement, Partial) else None


def reshape_pieces(view: View, pieces: Sequence[Array], after: Placement) -> list[Array]:
    """What the ranks hold after a view: each reshapes its own piece to what it shall hold."""
    whole = np.broadcast_to(np.zeros(()), view.target)
    shapes = [piece.shape for piece in after.split(whole, len(pieces))]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@lru_cache(maxsize=4096)
def refuted(view: View, before: Placement, after: Placement, degree: int) -> str | None:
    """Why pieces of one placement are, reshaped, none of the other; None where they are.

    Elements have different numbers, so that pieces are equal in the right order alone.
    """
    whole = np.arange(math.prod(view.source), dtype=float).reshape(view.source)
    try:
        got = reshape_pieces(view, before.split(whole, degree), after)
    except (PlacementError, ValueError) as error:
        return str(error)
    found = difference(after, got, whole.reshape(view.target))
    return found and found[1]


def _placed(view: View, placement: Placement, degree: int) -> Placement | None:
    if isinstance(placement, Replicate | Partial):
        return placement  # joined element by element
    if placement.holds != "shard" or len(placement.dims) != 1:
        return None
    (dim,) = placement.dims
    if not 0 <= dim < len(view.source):
        raise PlacementError(f"{placement} shards a dim that a tensor of {len(view.source)} dims has not")
    group = next(each for each in _groups(view) if dim in each.source)
    if [view.source[at] for at in group.source] == [view.target[at] for at in group.target]:
        return placement.on(group.target[dim - group.source.start])  # as it was, even or not
    if not isinstance(placement, Shard | StridedShard):
        return None
    own = placement.stripes if isinstance(placement, StridedShard) else 1
    if view.source[dim] % (own * degree):
        return None  # ranks' chunks are of several sizes
    stripes = math.prod(view.source[group.source.start : dim]) * own
    runs = 1
    for at in group.target:
        if stripes % runs == 0 and view.target[at] % (stripes // runs * degree) == 0:
            return Shard(at) if stripes == runs else StridedShard(at, stripes // runs)
        runs *= view.target[at]
    return None


def _groups(view: View) -> Iterator[_Group]:
    """The smallest groups of dims that hold as many elements; dims of one element join what is before them."""
    source, target, start, begin = 0, 0, 0, 0
    while source < len(view.source) or target < len(view.target):
        mine, its = 1, 1
        start, begin = source, target
        while source == start or target == begin or mine != its:
            if source < len(view.source) and (mine <= its or target == len(view.target)):
                mine *= view.source[source]
                source += 1
            elif target < len(view.target):
                its *= view.target[target]
                target += 1
            else:
                break
        while source < len(view.source) and target == len(view.target):
            source += 1
        while target < len(view.target) and source == len(view.source):
            target += 1
        yield _Group(range(start, source), range(begin, target))
