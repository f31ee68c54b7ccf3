"""One placement per axis of a mesh: applied left to right, undone right to left.

>>> import numpy as np
>>> layout = parse_layout("[S(0), S(0)]")
>>> pieces = split(np.arange(12), layout, (2, 3))
>>> pieces[1, 0].tolist(), assemble(pieces, layout, (2, 3)).tolist() == list(range(12))
([6, 7], True)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from sim.sharding import kinds as kinds  # registers their text forms
from sim.sharding.placement import PARTIAL, REPLICATE, Array, Placement, PlacementError, Shard, parse_placement

Layout = tuple[Placement, ...]
Pieces = dict[tuple[int, ...], Array]
"""What each rank holds, by its coordinates on the mesh."""


def split(tensor: Array, layout: Layout, degrees: Sequence[int], rng: np.random.Generator | None = None) -> Pieces:
    """What every rank of the mesh holds: each axis in turn splits what the axes before it left.

    Raises:
        PlacementError: There is not one placement per axis, or one cannot split its tensor.
    """
    _check(layout, degrees)
    pieces: Pieces = {(): tensor}
    for placement, degree in zip(layout, degrees, strict=True):
        pieces = {
            (*ranks, rank): piece
            for ranks, whole in pieces.items()
            for rank, piece in enumerate(placement.split(whole, degree, rng))
        }
    return pieces


def assemble(pieces: Pieces, layout: Layout, degrees: Sequence[int]) -> Array:
    """The tensor whose pieces these are; the last axis is undone first.

    Raises:
        PlacementError: There is not one placement per axis, or the pieces do not fit.
    """
    _check(layout, degrees)
    for axis in reversed(range(len(layout))):
        outer = itertools.product(*map(range, degrees[:axis]))
        pieces = {
            ranks: layout[axis].assemble([pieces[(*ranks, rank)] for rank in range(degrees[axis])]) for ranks in outer
        }
    return pieces[()]


def local_shape(shape: tuple[int, ...], layout: Layout, degrees: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest piece that any rank holds: not always that of the largest piece's largest piece.

    >>> local_shape((7,), parse_layout("S(0), SS(0,3)"), (2, 4))  # the second half, of 3, leaves one rank all of it
    (3,)

    Raises:
        PlacementError: There is not one placement per axis, or one cannot shard its tensor on some rank.
    """
    if not all(placement.grows for placement in layout):
        return max(local_shapes(shape, layout, degrees), key=math.prod)
    _check(layout, degrees)
    for placement, degree in zip(layout, degrees, strict=True):
        shape = placement.local_shape(shape, degree)
    return shape


def local_shapes(shape: tuple[int, ...], layout: Layout, degrees: Sequence[int]) -> frozenset[tuple[int, ...]]:
    """Shapes of the pieces that the ranks hold, each once.

    Raises:
        PlacementError: There is not one placement per axis, or one cannot shard its tensor on some rank.
    """
    _check(layout, degrees)
    shapes = frozenset({shape})
    for placement, degree in zip(layout, degrees, strict=True):
        shapes = frozenset(local for whole in shapes for local in placement.local_shapes(whole, degree))
    return shapes


def local_bytes(shape: tuple[int, ...], layout: Layout, degrees: Sequence[int], element_bytes: float) -> float:
    """Bytes of the largest piece."""
    return math.prod(local_shape(shape, layout, degrees)) * element_bytes


def _check(layout: Layout, axes: Sequence[object]) -> None:
    if len(layout) != len(axes):
        raise PlacementError(f"a mesh of {len(axes)} axes takes as many placements, got {format_layout(layout)}")


# --- text forms ---------------------------------------------------------------------------------------


def format_layout(layout: Layout) -> str:
    """As `parse_layout` reads it: "[S(0), R]"."""
    return f"[{', '.join(map(str, layout))}]"


def parse_layout(text: str) -> Layout:
    """One placement per axis from "[S(0), R]"; the brackets may be missing.

    Raises:
        PlacementError: Some part is no placement.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    return tuple(parse_placement(part) for part in re.split(r",(?![^(]*\))", inner)) if inner.strip() else ()


def parse_named(text: str, axes: Sequence[str]) -> tuple[str, tuple[str, ...], Layout]:
    """Name, dims and layout of a tensor in the notation `A[I_X, J_Y]`.

    A subscript names the axes that shard the dim, outermost first: `I_XY` or `I_{XY}`, or `I_{tp,ep}` for axes of
    longer names. Axes that no dim names replicate the tensor; `{U_X}` behind it leaves it unreduced over X.

    >>> parse_named("A[I_XY, J]", ("X", "Y"))
    ('A', ('I', 'J'), (Shard(dim=0), Shard(dim=0)))

    Raises:
        PlacementError: The text is not of this form, names an unknown axis or one axis twice, or wants an inner
            axis of the mesh to shard a dim before an outer one, which a list of placements says with StridedShard.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\[(.*)\]\s*(?:\{\s*U_(.+?)\s*\})?\s*", text)
    if match is None:
        raise PlacementError(f"expected a tensor such as A[I_X, J], got {text!r}")
    axes = tuple(axes)  # a text of one-letter axes too
    layout: dict[str, Placement] = {}
    names: list[str] = []
    for dim, part in enumerate(re.split(r",(?![^{]*\})", match[2])):
        name, _, subscript = part.strip().partition("_")
        if not name.isidentifier():
            raise PlacementError(f"expected a dim such as I or I_X, got {part.strip()!r} in {text!r}")
        names.append(name)
        _claim(layout, _subscript(subscript, axes, text), Shard(dim), axes, text)
    _claim(layout, _subscript(match[3] or "", axes, text), PARTIAL, axes, text)
    return match[1], tuple(names), tuple(layout.get(axis, REPLICATE) for axis in axes)


def _subscript(subscript: str, axes: Sequence[str], text: str) -> list[str]:
    inner = subscript.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    if not inner:
        return []
    split_up = [part.strip() for part in inner.split(",")] if "," in inner or inner in axes else list(inner)
    for axis in split_up:
        if axis not in axes:
            raise PlacementError(f"{text!r} names axis {axis!r}; the mesh has {', '.join(axes)}")
    return split_up


def _claim(
    layout: dict[str, Placement], claimed: Sequence[str], placement: Placement, axes: Sequence[str], text: str
) -> None:
    for axis in claimed:
        if axis in layout:
            raise PlacementError(f"{text!r} uses axis {axis!r} twice: an axis shards one dim, or none")
        layout[axis] = placement
    if list(claimed) != sorted(claimed, key=list(axes).index):
        raise PlacementError(
            f"{text!r} shards a dim by {', '.join(claimed)}, against the order of the mesh ({', '.join(axes)}); "
            "reorder the mesh, or write the list of placements with StridedShard"
        )


def format_named(name: str, dims: Sequence[str], layout: Layout, axes: Sequence[str]) -> str:
    """A layout in the notation `A[I_X, J_Y]`.

    >>> format_named("A", "IJ", (Shard(1), REPLICATE), "XY")
    'A[I, J_X]'

    Raises:
        PlacementError: The notation has no word for one of the placements.
    """
    _check(layout, axes)
    shards: Mapping[int, list[str]] = {dim: [] for dim in range(len(dims))}
    unreduced: list[str] = []
    for axis, placement in zip(axes, layout, strict=True):
        if placement == PARTIAL:
            unreduced.append(axis)
        elif isinstance(placement, Shard) and placement.dim in shards:
            shards[placement.dim].append(axis)
        elif placement != REPLICATE:
            raise PlacementError(f"A[I_X] notation cannot say {placement} over {axis}: it knows R, S(dim) and P(sum)")
    parts = [dim + _named_subscript(shards[index]) for index, dim in enumerate(dims)]
    tail = f" {{U{_named_subscript(unreduced)}}}" if unreduced else ""
    return f"{name}[{', '.join(parts)}]{tail}"


def _named_subscript(axes: Sequence[str]) -> str:
    if not axes:
        return ""
    if all(len(axis) == 1 for axis in axes):
        return "_" + "".join(axes)
    return "_" + (axes[0] if len(axes) == 1 else "{" + ",".join(axes) + "}")
