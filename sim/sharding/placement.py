"""How a tensor lies on the ranks of one mesh axis.

A placement is an invertible division: `split` makes one piece per rank, `assemble` undoes it. That is all
an outsider's placement must bring, besides saying which kind of pieces it leaves (`holds`), which
dims it shards (`dims`) and how it is written (`code`). `sim.sharding.kinds` has four more;
`sim.sharding.layout` puts one placement per axis of a mesh together.

>>> import numpy as np
>>> [piece.tolist() for piece in Shard(0).split(np.arange(5), 3)]
[[0, 1], [2, 3], [4]]
>>> parse_placement("P(avg)")
Partial(op='avg')
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from sim.near_names import nearest_name

Array = NDArray[Any]
Holds = Literal["whole", "shard", "part"]


class PlacementError(ValueError):
    """A tensor cannot lie so, or a text is no placement."""


class Placement:
    """How a tensor lies on one mesh axis: a value object, extended by subclassing and `register_placement`.

    It has no abstract metaclass because `evaluate` asks for the kind of a placement in its innermost loop.

    Attributes:
        code: What its text form begins with.
        holds: What a rank has: the "whole" tensor, a "shard" of it, or a full-size "part" yet to be reduced.
        nests: Whether parts over several axes may be joined axis by axis in any order, or all at once, as sums may.
        grows: Whether the largest piece of a larger tensor is never smaller, as that of chunks: the largest piece over
            several such axes is then the largest piece's largest piece.
        reads_replicated: Whether ranks that all hold the whole tensor hold it under this placement too, as its
            average or maximum is the tensor itself.
    """

    __slots__ = ()

    code: ClassVar[str]
    holds: ClassVar[Holds]
    nests: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    @property
    def reads_replicated(self) -> bool:
        """Whether equal whole tensors on every rank assemble to that tensor."""
        return False

    @property
    def dims(self) -> tuple[int, ...]:
        """Tensor dims that it shards."""
        return ()

    @property
    def ranks(self) -> int | None:
        """The one degree that an axis must have for it; None if any will do."""
        return None

    def spans(self, dims: int) -> frozenset[int]:
        """Dims of a tensor of `dims` dims along which it must have whole slices to be undone.

        A placement works slice by slice along all others, so what a later axis does to them can stay as it is. A shard
        spans what it shards, and parts span everything unless their class says that they are joined element by element.
        """
        return frozenset(range(dims)) if self.holds == "part" else frozenset(self.dims)

    def on(self, dim: int) -> Placement:
        """The same shard along another dim.

        Raises:
            PlacementError: It shards no single dim.
        """
        if len(self.dims) != 1:
            raise PlacementError(f"{self} shards no single dim, so it cannot be moved to dim {dim}")
        return dataclasses.replace(self, dim=dim)  # type: ignore[type-var]

    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        """One piece per rank.

        Args:
            tensor: What is split, of any shape that has the placement's dims.
            degree: Ranks of the axis.
            rng: Where the pieces are not unique, as with parts, draws some that give mistakes away; without it
                they are the simplest ones.

        Raises:
            PlacementError: The tensor cannot be split so.
        """
        raise NotImplementedError

    def assemble(self, pieces: Sequence[Array]) -> Array:
        """The tensor whose pieces these are.

        Raises:
            PlacementError: They are no pieces of one tensor.
        """
        raise NotImplementedError

    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """Shape of the largest piece."""
        return max(self.local_shapes(shape, degree), key=math.prod)

    def local_shapes(self, shape: tuple[int, ...], degree: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the ranks' pieces, each once, in the order of the ranks."""
        if self.holds != "shard":
            return (shape,)
        self._check_dims(shape)
        if len(self.dims) != 1:
            pieces = self.split(np.broadcast_to(np.zeros(()), shape), degree)
            return tuple(dict.fromkeys(piece.shape for piece in pieces))
        before, after = shape[: self.dims[0]], shape[self.dims[0] + 1 :]
        return tuple((*before, count, *after) for count in self._counts(shape[self.dims[0]], degree))

    def counts(self, size: int, degree: int) -> NDArray[np.int64]:
        """How many indices of its one dim each rank holds, [degree]; shards that a search asks often have a formula."""
        return np.bincount(self.owners(size, degree), minlength=degree)

    def _counts(self, size: int, degree: int) -> Iterable[int]:
        """The same, each number once, in the order of the ranks."""
        return dict.fromkeys(self.counts(size, degree).tolist())

    def _check_dims(self, shape: tuple[int, ...]) -> None:
        if any(not 0 <= dim < len(shape) for dim in self.dims):
            raise PlacementError(f"{self} shards a dim that a tensor of {len(shape)} dims has not; dims count from 0")

    def own(self, size: int, degree: int) -> tuple[Array, ...]:
        """Which indices of its one dim, of that size, each rank holds."""
        return tuple(self.on(0).split(np.arange(size), degree))

    def owners(self, size: int, degree: int) -> NDArray[np.int64]:
        """Which rank holds each index of its one dim, [size]; shards that a search asks often say it in one formula."""
        owner = np.empty(size, dtype=np.int64)
        for rank, own in enumerate(self.own(size, degree)):
            owner[own] = rank
        return owner

    def local_bytes(self, shape: tuple[int, ...], degree: int, element_bytes: float) -> float:
        """Bytes of the largest piece."""
        return math.prod(self.local_shape(shape, degree)) * element_bytes

    def admissible(self, tensor: Array) -> Array:
        """A tensor like this one that can lie so; almost every placement takes any tensor."""
        return tensor

    def commutes(self, later: Placement, dims: int) -> bool:
        """Whether it can be undone while `later`, applied to its pieces of `dims` dims, stays in place."""
        if self.holds == "part" and later.holds == "part":
            return self.nests and self == later
        return not self.spans(dims) & later.spans(dims)

    @classmethod
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        """Instances that the rule checker tries on a tensor of `dims` dims over `degree` ranks."""
        return ()

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Placement:
        """The instance that a text form's arguments describe; `ValueError` or `TypeError` if they do not."""
        return cls(*map(int, arguments))

    def __str__(self) -> str:
        return _written(self)


@lru_cache(maxsize=4096)
def _written(placement: Placement) -> str:
    arguments = [_text(getattr(placement, field.name)) for field in dataclasses.fields(placement)]  # type: ignore[arg-type]
    return f"{placement.code}({','.join(arguments)})" if arguments else placement.code


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return str(value).removesuffix(".0")  # a float in full, so that it is read back as it was


# --- the open set and its text forms ------------------------------------------------------------------

_TYPES: dict[str, type[Placement]] = {}
PlacementType = TypeVar("PlacementType", bound=type[Placement])


def register_placement(placement: PlacementType) -> PlacementType:
    """Class decorator: lets the text form parse and the rule checker try the placement.

    Raises:
        ValueError: Its code is taken.
    """
    taken = _TYPES.setdefault(placement.code, placement)
    if taken is not placement:
        raise ValueError(f"placement code {placement.code!r} is {taken.__name__}'s; choose another")
    return placement


def unregister_placement(placement: type[Placement]) -> None:
    """Takes a registered placement out again, as a test does with its own."""
    del _TYPES[placement.code]


def placement_types() -> tuple[type[Placement], ...]:
    """All registered placements."""
    return tuple(_TYPES.values())


def parse_placement(text: str) -> Placement:
    """The placement that a text such as "R", "S(0)", "P(sum)" or "SS(0,2)" stands for.

    Raises:
        PlacementError: The text stands for none.
    """
    match = re.fullmatch(r"\s*([A-Za-z]\w*)\s*(?:\(([^()]*)\))?\s*", text)
    if match is None:
        raise PlacementError(f"expected a placement such as R, S(0) or P(sum), got {text!r}")
    code, arguments = match[1], match[2]
    if code not in _TYPES:
        hint = f": {near}" if (near := nearest_name(code, _TYPES, least=0.1)) else ""
        raise PlacementError(f"unknown placement {code!r} in {text!r} (known: {', '.join(_TYPES)}){hint}")
    try:
        return _TYPES[code].from_arguments([part.strip() for part in arguments.split(",")] if arguments else [])
    except (TypeError, ValueError) as error:
        raise PlacementError(f"cannot read {text!r} as {_TYPES[code].__name__}: {error}") from None


# --- the three that every strategy uses ---------------------------------------------------------------


def chunk_bounds(size: int, degree: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk of ceil(size / degree); trailing chunks are short or empty.

    Source: torch.chunk, but for empty chunks, which it leaves out and DTensor puts back.
    """
    step = -(-size // degree)
    return [(min(rank * step, size), min((rank + 1) * step, size)) for rank in range(degree)]


def chunk_sizes(size: int, degree: int) -> NDArray[np.int64]:
    """Indices of each of these chunks, [degree]."""
    width = -(-size // degree)
    return np.clip(size - width * np.arange(degree), 0, width)


def chunk(tensor: Array, degree: int, dim: int) -> list[Array]:
    """`degree` chunks along a dim."""
    if not 0 <= dim < tensor.ndim:
        raise PlacementError(f"a tensor of {tensor.ndim} dims has no dim {dim}; dims count from 0")
    before = (slice(None),) * dim
    return [tensor[(*before, slice(*bounds))] for bounds in chunk_bounds(tensor.shape[dim], degree)]


@register_placement
@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank holds the whole tensor."""

    code = "R"
    holds = "whole"
    grows = True

    @property
    @override
    def reads_replicated(self) -> bool:
        return True

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        return [tensor] * degree

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        return pieces[0]

    @override
    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        return shape

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return (cls(),)


@register_placement
@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Rank i holds the i-th chunk along tensor dim `dim`, chunks of ceil(size / degree); the last may be empty."""

    code = "S"
    holds = "shard"
    grows = True
    dim: int

    @property
    @override
    def dims(self) -> tuple[int, ...]:
        return (self.dim,)

    @override
    def owners(self, size: int, degree: int) -> NDArray[np.int64]:
        return np.arange(size) // max(-(-size // degree), 1)

    @override
    def counts(self, size: int, degree: int) -> NDArray[np.int64]:
        return chunk_sizes(size, degree)

    @override
    def _counts(self, size: int, degree: int) -> Iterable[int]:
        width = max(-(-size // degree), 1)
        whole, rest = divmod(size, width)
        own = (width, whole > 0), (rest, rest > 0), (0, whole + (rest > 0) < degree)
        return [count for count, some in own if some]

    @override
    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        return chunk(tensor, degree, self.dim)

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        return join(self, pieces, self.dim)

    @override
    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        self._check_dims(shape)
        return (*shape[: self.dim], -(-shape[self.dim] // degree), *shape[self.dim + 1 :])

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(dim) for dim in range(dims)]


def join(placement: Placement, pieces: Sequence[Array], dim: int) -> Array:
    """Pieces side by side along a dim, refused in the placement's name if they do not fit."""
    try:
        return np.concatenate(pieces, dim)
    except ValueError as error:
        raise PlacementError(
            f"pieces of shapes {[piece.shape for piece in pieces]} are no {placement}: {error}"
        ) from None


_REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "avg": lambda parts: np.mean(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
}


@register_placement
@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank holds a full-size part; the tensor is their elementwise reduction: sum, avg, max or min."""

    code = "P"
    holds = "part"
    grows = True
    nests = True
    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in _REDUCTIONS:
            raise PlacementError(f"unknown reduction {self.op!r}; expected one of {', '.join(_REDUCTIONS)}")

    @property
    @override
    def reads_replicated(self) -> bool:
        return self.op != "sum"

    def split(self, tensor: Array, degree: int, rng: np.random.Generator | None = None) -> list[Array]:
        """Parts that reduce to the tensor.

        With an rng, parts of sums are random, of both signs and larger than what they add up to; the maximum
        has a random owner per element and lies a random offset, tiny or huge, above the other parts. Without,
        sums are on rank 0 and the others are equal on every rank.
        """
        if self.op in ("sum", "avg"):
            return self._addends(tensor, degree, rng)
        return [tensor] * degree if rng is None else self._bounded(tensor, degree, rng)

    def _addends(self, tensor: Array, degree: int, rng: np.random.Generator | None) -> list[Array]:
        whole = tensor * degree if self.op == "avg" else tensor
        if rng is None:
            return [whole, *[np.zeros_like(tensor)] * (degree - 1)]
        parts = [10.0 * rng.standard_normal(tensor.shape) for _ in range(degree - 1)]
        return [*parts, whole - sum(parts)]

    def _bounded(self, tensor: Array, degree: int, rng: np.random.Generator) -> list[Array]:
        owner = rng.integers(degree, size=tensor.shape)
        sign = -1.0 if self.op == "max" else 1.0
        offsets = 10.0 ** rng.uniform(-3, 2, (degree, *tensor.shape))
        return [np.where(owner == rank, tensor, tensor + sign * offsets[rank]) for rank in range(degree)]

    @override
    def assemble(self, pieces: Sequence[Array]) -> Array:
        return _REDUCTIONS[self.op](stack(self, pieces))

    @override
    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        return shape

    @override
    def spans(self, dims: int) -> frozenset[int]:
        return frozenset()

    @override
    def commutes(self, later: Placement, dims: int) -> bool:
        """Sums and averages are linear, so they also commute with each other."""
        linear = {Partial("sum"), Partial("avg")}
        return (self in linear and later in linear) or Placement.commutes(self, later, dims)

    @classmethod
    @override
    def samples(cls, dims: int, degree: int) -> Sequence[Placement]:
        return [cls(op) for op in _REDUCTIONS]

    @classmethod
    @override
    def from_arguments(cls, arguments: Sequence[str]) -> Placement:
        return cls(*arguments)


def stack(placement: Placement, pieces: Sequence[Array]) -> Array:
    """Parts on top of each other, `[degree, ...]`, refused in the placement's name if they do not fit."""
    if len({piece.shape for piece in pieces}) != 1:
        raise PlacementError(f"parts of shapes {[piece.shape for piece in pieces]} are no {placement}")
    return np.stack(pieces)


REPLICATE = Replicate()
PARTIAL = Partial()
