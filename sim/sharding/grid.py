"""Two dims of a tensor over two sub-axes of one mesh axis: its n ranks as n/b outer ones times b inner neighbours.

>>> import numpy as np
>>> [piece.tolist() for piece in GridShard(0, 1).split(np.arange(4).reshape(2, 2), 4)]
[[[0]], [[1]], [[2]], [[3]]]
>>> str(GridShard(0, SUM)), grid_of(Shard(1), REPLICATE)
('G(0,-2,2)', GridShard(outer=1, inner=-1, inner_ranks=2))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from sim.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Array,
    Placement,
    PlacementError,
    Shard,
    register_placement,
)

USUAL_RANKS = 2
"""Neighbouring ranks of the inner sub-axis."""
WHOLE, SUM = -1, -2
"""In place of a dim: nothing is sharded over the sub-axis, or it has the parts of a sum."""


def sub_degrees(degree: int, ranks: int = USUAL_RANKS) -> tuple[int, int]:
    """Ranks of the outer and of the inner sub-axis; where so many do not divide the axis, as many of them as do.

    >>> sub_degrees(8), sub_degrees(3), sub_degrees(2), sub_degrees(16, 4), sub_degrees(2, 4)
    ((4, 2), (3, 1), (1, 2), (4, 4), (1, 2))
    """
    inner = math.gcd(degree, ranks)
    return degree // inner, inner


@register_placement
@dataclass(frozen=True, slots=True)
class GridShard(Placement):
    """A placement over each of two sub-axes, outer one first: a dim, `WHOLE` or `SUM`; and the inner one's ranks."""

    code = "G"
    outer: int
    inner: int
    inner_ranks: int = USUAL_RANKS

    def __post_init__(self) -> None:
        if min(self.outer, self.inner) < SUM or (self.outer == self.inner and self.outer >= 0) or self.inner_ranks < 1:
            raise PlacementError(
                f"expected two dims, {WHOLE} for none or {SUM} for a sum, got {self.outer}, {self.inner}"
            )

    @property
    def holds(self):  # type: ignore[override]
        """Parts where a sum is left over one of the sub-axes."""
        return "part" if SUM in (self.outer, self.inner) else "shard"

    @property
    @override
    def dims(self) -> tuple[int, ...]:
        return tuple(dim for dim in (self.outer, self.inner) if dim >= 0)

    @property
    def layout(self) -> tuple[Placement, Placement]:
        """One placement per sub-axis."""
        return _single(self.outer), _single(self.inner)

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        (outer, inner), (ranks, neighbours) = self.layout, sub_degrees(degree, self.inner_ranks)
        pieces = outer.split(tensor, ranks, rng)
        return [each for piece in pieces for each in inner.split(piece, neighbours, rng)]

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        (outer, inner), (_, neighbours) = self.layout, sub_degrees(len(pieces), self.inner_ranks)
        rows = [pieces[at : at + neighbours] for at in range(0, len(pieces), neighbours)]
        return outer.assemble([inner.assemble(row) for row in rows])

    @override
    def local_shapes(self, shape: tuple[int, ...], degree: int) -> tuple[tuple[int, ...], ...]:
        if self.holds == "shard":
            return tuple(dict.fromkeys(piece.shape for piece in self.split(np.broadcast_to(0.0, shape), degree)))
        return (max((piece.shape for piece in self.split(np.broadcast_to(0.0, shape), degree)), key=math.prod),)


def grid_of(outer: Placement, inner: Placement, ranks: int = USUAL_RANKS) -> Placement:
    """Placements on both sub-axes as one; whole on both, or parts on both, is what it is on one axis.

    Raises:
        PlacementError: One is neither whole, a plain shard nor the parts of a sum.
    """
    if outer == inner and not isinstance(outer, Shard):
        return outer
    return GridShard(_code(outer), _code(inner), ranks)


def lifted(placement: Placement) -> tuple[Placement, Placement] | None:
    """A placement on the one axis as placements on its sub-axes; None where it is none of plain ones."""
    if isinstance(placement, GridShard):
        return placement.layout
    return (placement, placement) if placement in (REPLICATE, PARTIAL) or isinstance(placement, Shard) else None


def _single(code: int) -> Placement:
    return {WHOLE: REPLICATE, SUM: PARTIAL}.get(code) or Shard(code)


def _code(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return placement.dim
    if placement in (REPLICATE, PARTIAL):
        return WHOLE if placement == REPLICATE else SUM
    raise PlacementError(f"{placement} is not divided over two sub-axes")
