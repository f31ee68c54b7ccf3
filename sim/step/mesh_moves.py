"""Seconds and bytes of moving a tensor between two layouts on a mesh of several axes: the fastest route, priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.prices.collectives import Collective, carried, collective_price
from sim.prices.hardware import Hardware
from sim.prices.mesh import MeshGroup, group
from sim.prices.priced import PricedKernel
from sim.sharding.layout import Layout
from sim.sharding.placement import Shard
from sim.sharding.redistribute import collective_between, sent_share
from sim.sharding.routes import RouteStep, cheapest_route


class Axis(NamedTuple):
    """One axis of a mesh.

    Attributes:
        name: As collectives name it.
        degree: GPUs along it.
        stride: How far apart they lie.
    """

    name: str
    degree: int
    stride: int


def axes_of(**degrees: int) -> tuple[Axis, ...]:
    """Axes from the outermost to the innermost, whose GPUs are neighbours.

    >>> axes_of(dp=2, tp=4)
    (Axis(name='dp', degree=2, stride=4), Axis(name='tp', degree=4, stride=1))
    """
    sizes = list(degrees.values())
    return tuple(Axis(name, n, math.prod(sizes[index + 1 :])) for index, (name, n) in enumerate(degrees.items()))


@lru_cache(maxsize=1 << 14)
def mesh_collectives(
    hardware: Hardware,
    axes: tuple[Axis, ...],
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    element_bytes: float,
    tensor: str,
    *,
    or_more: bool = False,
) -> tuple[Collective, ...]:
    """The collectives of the fastest route between two layouts, in order; none where each GPU has its piece.

    On one axis it is the one collective of the redistribution table, as everywhere in the paper's space, even where
    a detour were faster: else a strategy would gain by having a second mesh alone.

    Args:
        hardware: Whose links and library.
        axes: Of the mesh, outermost first.
        source: One placement per axis, as it lies.
        target: The same as it shall lie.
        shape: Of the whole tensor on the mesh.
        element_bytes: Bytes per element, of activations; of weights see `collectives.lossless`.
        tensor: What is moved, by name.
        or_more: Whether it has so many rows or more: a route is then no slower than that of any of these tensors. Rows
            that divide evenly have every step that others have, and their largest piece is no larger.
    """
    wide, steps = fastest_route(hardware, axes, source, target, shape, element_bytes, or_more=or_more)
    if len(wide) == 1:
        return _on_one_axis(hardware, wide[0], steps[0].collective, math.prod(shape), element_bytes, tensor)
    return tuple(priced for step in steps if (priced := _collective(hardware, wide, step, element_bytes, tensor)))


def fastest_route(
    hardware: Hardware,
    axes: tuple[Axis, ...],
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    element_bytes: float,
    *,
    or_more: bool = False,
) -> tuple[tuple[Axis, ...], tuple[RouteStep, ...]]:
    """The axes of more than one GPU, and the steps over them; arguments as of `mesh_collectives`."""

    def counted(step: RouteStep) -> RouteStep:
        if or_more and not _least_of_all_rows(step, shape[1] % ranks == 0):
            return step._replace(bytes_per_device=0.0)
        return step

    def microseconds(step: RouteStep) -> float:  # not seconds: a route's costs are compared to 9 decimals
        priced = step_price(hardware, axes, counted(step), element_bytes) if step.collective else None
        return priced.time_s * 1e6 if priced else 0.0

    wide = [index for index, axis in enumerate(axes) if axis.degree > 1]
    axes = tuple(axes[index] for index in wide)
    source, target = (tuple(layout[index] for index in wide) for layout in (source, target))
    if len(axes) == 1:
        return axes, (RouteStep(0, collective_between(source[0], target[0]), source[0], target[0], target, 0.0),)
    degrees = [axis.degree for axis in axes]
    ranks = math.prod(degrees)
    smaller, factor = _smaller_alike(shape, ranks, even_rows=or_more)
    route = cheapest_route(
        source, target, degrees, smaller, element_bytes * factor, microseconds, fused=True, stripes=False
    )
    return axes, tuple(map(counted, route.steps))


def _smaller_alike(shape: tuple[int, ...], ranks: int, *, even_rows: bool) -> tuple[tuple[int, ...], float]:
    """A smaller shape whose pieces are the same shares of it, and how many elements stand for one of its own.

    Dims that divide evenly, and rows that are taken to, need but one element per rank; what is known of a route then
    serves all of them.
    """
    smaller = tuple(ranks if size % ranks == 0 or (even_rows and not dim) else size for dim, size in enumerate(shape))
    return smaller, math.prod(shape) / math.prod(smaller)


def _least_of_all_rows(step: RouteStep, even_columns: bool) -> bool:
    """Whether a step between even rows sends no more than between as many that do not divide evenly.

    An all-to-all sends what changes hands. From rows to even columns or back the busiest rank keeps 1/n at most of a
    share of 1/n at least. Between uneven columns or stripes it may be that nothing moves.
    """
    if step.collective != "all_to_all":
        return True
    plain = isinstance(step.source, Shard) and isinstance(step.target, Shard) and step.source.dim != step.target.dim
    return plain and even_columns


def _on_one_axis(
    hardware: Hardware, axis: Axis, kind: str | None, elements: float, element_bytes: float, tensor: str
) -> tuple[Collective, ...]:
    if kind is None:
        return ()
    neighbours, tensor_bytes = group(axis.stride, axis.degree, *hardware.tiers), elements * element_bytes
    priced = collective_price(hardware, kind, neighbours, tensor_bytes, axis.name, element_bytes)
    sent_bytes = tensor_bytes * sent_share(kind, axis.degree)
    return (carried(kind, axis.name, axis.degree, tensor, sent_bytes, priced),)


def _collective(
    hardware: Hardware, mesh: Sequence[Axis], step: RouteStep, element_bytes: float, tensor: str
) -> Collective | None:
    if step.collective is None:
        return None
    name, group_ = _group_of(tuple(mesh), step.axis, step.span, hardware.tiers)
    priced = step_price(hardware, tuple(mesh), step, element_bytes)
    return carried(step.collective, name, group_.degree, tensor, step.bytes_per_device, priced)


def step_price(
    hardware: Hardware, mesh: tuple[Axis, ...], step: RouteStep, activation_each: float = 0.0
) -> PricedKernel:
    """Seconds of a step that communicates, on a mesh whose axes are given from the outermost to the innermost.

    `activation_each`: see `collective_price`.
    """
    assert step.collective is not None
    name, neighbours = _group_of(mesh, step.axis, step.span, hardware.tiers)
    tensor_bytes = step.bytes_per_device / sent_share(step.collective, neighbours.degree)
    return collective_price(hardware, step.collective, neighbours, tensor_bytes, name, activation_each)


@lru_cache(maxsize=4096)
def _group_of(mesh: tuple[Axis, ...], axis: int, span: int, tiers: tuple[int, int, bool]) -> tuple[str, MeshGroup]:
    """The GPUs along neighbouring axes, with how collectives name these."""
    axes = mesh[axis : axis + span]
    name, degree = " x ".join(each.name for each in axes), math.prod(each.degree for each in axes)
    return name, group(axes[-1].stride, degree, *tiers)
