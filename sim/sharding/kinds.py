"""Placements beyond the strategy space: striped, interleaved, ragged, and norms yet to be joined.

They are written as an outsider would write one: a subclass with `split` and `assemble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from sim.sharding.placement import (
    Array,
    Placement,
    PlacementError,
    chunk,
    chunk_bounds,
    chunk_sizes,
    join,
    register_placement,
    stack,
)


@register_placement
@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """The dim is chunked into `stripes`, every stripe over the ranks: rank i holds the i-th chunk of each.

    What a shard looks like from one axis when another, outer one has sharded the dim first: after gathering
    the outer axis of `S(0), S(0)` on a mesh of 2 x 4, the inner axis holds `SS(0,2)`.

    Source: DTensor's _StridedShard.
    """

    code = "SS"
    holds = "shard"
    dim: int
    stripes: int

    def __post_init__(self) -> None:
        if self.stripes < 1:
            raise PlacementError(f"{self} needs at least 1 stripe")

    @property
    @override
    def dims(self) -> tuple[int, ...]:
        return (self.dim,)

    @override
    def owners(self, size: int, degree: int) -> NDArray[np.int64]:
        width = max(-(-size // self.stripes), 1)
        stripe, within = np.divmod(np.arange(size), width)
        each = -(-np.minimum(width, size - stripe * width) // degree)
        return within // each

    @override
    def counts(self, size: int, degree: int) -> NDArray[np.int64]:
        whole, rest = divmod(size, max(-(-size // self.stripes), 1))
        return whole * chunk_sizes(-(-size // self.stripes), degree) + chunk_sizes(rest, degree)

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        stripes = [chunk(stripe, degree, self.dim) for stripe in chunk(tensor, self.stripes, self.dim)]
        return [join(self, [stripe[rank] for stripe in stripes], self.dim) for rank in range(degree)]

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        size = sum(piece.shape[self.dim] for piece in pieces)
        widths = [
            [end - begin for begin, end in chunk_bounds(stop - start, len(pieces))]
            for start, stop in chunk_bounds(size, self.stripes)
        ]
        return _zip_stripes(self, pieces, widths)

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(dim, 2) for dim in range(dims)]


def _zip_stripes(placement: StridedShard | InterleavedShard, pieces: Sequence[Array], widths: list[list[int]]) -> Array:
    """Stripes in order, each joined from its ranks' chunks; `widths[stripe][rank]`."""
    dim, ends = placement.dim, np.cumsum(widths, axis=0)
    if [piece.shape[dim] for piece in pieces] != ends[-1].tolist():
        raise PlacementError(f"pieces of shapes {[piece.shape for piece in pieces]} are no {placement}")
    by_rank = [np.split(piece, ends[:-1, rank], dim) for rank, piece in enumerate(pieces)]
    return join(placement, [stripes[index] for index in range(len(widths)) for stripes in by_rank], dim)


@register_placement
@dataclass(frozen=True, slots=True)
class InterleavedShard(Placement):
    """The dim is `sections` equal parts laid end to end, each sharded: fused weights such as gate and up.

    Equal to `StridedShard` where the sections are even; sections of different sizes would mix what was
    fused, so they are refused.

    The name is veScale's (arXiv 2509.07003); that sections are equal and uneven chunks allowed is ours. [assumed]
    """

    code = "IS"
    holds = "shard"
    dim: int
    sections: int

    def __post_init__(self) -> None:
        if self.sections < 1:
            raise PlacementError(f"{self} needs at least 1 section")

    @property
    @override
    def dims(self) -> tuple[int, ...]:
        return (self.dim,)

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        if self.dim < tensor.ndim and tensor.shape[self.dim] % self.sections:
            raise PlacementError(
                f"{self}: {self.sections} equal sections do not fill a dim of {tensor.shape[self.dim]}"
            )
        return StridedShard(self.dim, self.sections).split(tensor, degree)

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        return StridedShard(self.dim, self.sections).assemble(pieces)

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(dim, 3) for dim in range(dims)]


@register_placement
@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Rank i holds `units[i]` out of `sum(units)` equal units of the dim, in order; 0 units is an empty piece.

    For blocks that must not be sharded, as of block-wise quantization.

    Source: pytorch/pytorch issue 169320.
    """

    code = "RS"
    holds = "shard"
    dim: int
    units: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.units or min(self.units) < 0 or not sum(self.units):
            raise PlacementError(f"{self} needs units of at least 0, and one that is positive")

    @property
    @override
    def dims(self) -> tuple[int, ...]:
        return (self.dim,)

    @property
    @override
    def ranks(self) -> int | None:
        return len(self.units)

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        if len(self.units) != degree:
            raise PlacementError(f"{self} is for {len(self.units)} ranks, the axis has {degree}")
        size = tensor.shape[self.dim] if 0 <= self.dim < tensor.ndim else 0
        if not 0 <= self.dim < tensor.ndim or size % sum(self.units):
            raise PlacementError(f"{self}: {sum(self.units)} units do not fill dim {self.dim} of {tensor.shape}")
        ends = np.cumsum(self.units) * (size // sum(self.units))
        return np.split(tensor, ends[:-1], self.dim)

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        unit = sum(piece.shape[self.dim] for piece in pieces) / sum(self.units)
        if [piece.shape[self.dim] for piece in pieces] != [count * unit for count in self.units]:
            raise PlacementError(f"pieces of shapes {[piece.shape for piece in pieces]} are no {self}")
        return join(self, pieces, self.dim)

    @classmethod
    @override
    def from_arguments(cls, arguments: Sequence[str]) -> Placement:
        dim, units = arguments
        return cls(int(dim), tuple(map(int, units.split(":"))))

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(dim, (1, 0, 2, *[0] * (degree - 3))) for dim in range(dims)] if degree >= 3 else ()


@register_placement
@dataclass(frozen=True, slots=True)
class NormPartial(Placement):
    """Every rank holds the norm of what it has; the tensor is the norm of the ranks' norms, so never negative.

    Attributes:
        order: p of `sum(part ** p) ** (1 / p)`, greater than 0; inf is the maximum.

    Source: DTensor's _NormPartial.
    """

    code = "NP"
    holds = "part"
    nests = True
    order: float = 2.0

    def __post_init__(self) -> None:
        if not self.order > 0:
            raise PlacementError(f"{self} needs an order above 0")

    @property
    @override
    def reads_replicated(self) -> bool:
        return np.isinf(self.order)

    @override
    def spans(self, dims: int) -> frozenset[int]:
        return frozenset()

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        if np.any(tensor < 0):
            raise PlacementError(f"{self} contains norms, which are never negative")
        if rng is None:
            others = tensor if np.isinf(self.order) else np.zeros_like(tensor)
            return [tensor, *[others] * (degree - 1)]
        # A random owner per element, and among the others many that hold nothing of it.
        shares = rng.uniform(size=(degree, *tensor.shape)) * (rng.uniform(size=(degree, *tensor.shape)) < 0.5)
        shares[np.arange(degree).reshape(-1, *[1] * tensor.ndim) == rng.integers(degree, size=tensor.shape)] = 1.0
        return list(tensor * (shares if np.isinf(self.order) else (shares / shares.sum(0)) ** (1 / self.order)))

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        parts = stack(self, pieces)
        if np.isinf(self.order):
            return parts.max(0)
        with np.errstate(invalid="ignore"):  # parts that an op left negative are no norms: nan equals nothing
            return np.sum(parts**self.order, 0) ** (1 / self.order) if np.all(parts >= 0) else parts.sum(0) * np.nan

    @override
    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        return shape

    @override
    def admissible(self, tensor: Array) -> Array:
        return np.abs(tensor)

    @classmethod
    @override
    def from_arguments(cls, arguments: Sequence[str]) -> Placement:
        return cls(*map(float, arguments))

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return (cls(2.0),)


@register_placement
@dataclass(frozen=True, slots=True)
class LogSumExp(Placement):
    """Every rank holds a softmax over what it has; the tensor is the softmax over everything.

    The last column holds the logarithm of the sum of exponentials that the others were divided by, so the tensor
    is the parts' mean weighted by the exponential of it. Source: the merge of FlashDecoding.
    """

    code = "LSE"
    holds = "part"
    nests = True

    @override
    def spans(self, dims: int) -> frozenset[int]:
        """Every column needs the last one, of logarithms."""
        return frozenset({dims - 1})

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        """Equal parts, or, with an rng, of random weights, many of them next to nothing, and of both signs."""
        self._check_dims(tensor.shape)
        if rng is None:
            shares = np.full((degree, *tensor.shape[:-1], 1), 1 / degree)
            values = [tensor[..., :-1]] * degree
        else:
            shares = 10.0 ** rng.uniform(-6, 0, (degree, *tensor.shape[:-1], 1))
            shares /= shares.sum(0)
            free = [10.0 * rng.standard_normal(tensor[..., :-1].shape) for _ in range(degree - 1)]
            rest = tensor[..., :-1] - sum(share * value for share, value in zip(shares, free, strict=False))
            values = [*free, rest / shares[-1]]
        logs = tensor[..., -1:] + np.log(shares)
        return [np.concatenate(columns, -1) for columns in zip(values, logs, strict=True)]

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        parts = stack(self, pieces)
        self._check_dims(parts.shape[1:])
        highest = parts[..., -1:].max(0)
        with np.errstate(invalid="ignore"):  # ranks that all have nothing: nan equals nothing
            weights = np.exp(parts[..., -1:] - highest)
            values = (weights * parts[..., :-1]).sum(0) / weights.sum(0)
            return np.concatenate([values, highest + np.log(weights.sum(0))], -1)

    @override
    def local_shapes(self, shape: tuple[int, ...], degree: int) -> tuple[tuple[int, ...], ...]:
        self._check_dims(shape)
        return (shape,)

    @override
    def _check_dims(self, shape: tuple[int, ...]) -> None:
        if not shape or not shape[-1]:
            raise PlacementError(f"{self} needs a last column, of logarithms, which a piece of shape {shape} has not")

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return (cls(),)
