"""Seconds and bytes of moving a tensor between two layouts on a mesh of several axes: the fastest route, priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.collectives import collective_price, sent_share
from sim.layout import Layout
from sim.mesh import group
from sim.routes import Step, cheapest_route
from sim.types import Collective, Hardware


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


@lru_cache(maxsize=1 << 17)
def mesh_collectives(
    hardware: Hardware,
    axes: tuple[Axis, ...],
    source: Layout,
    target: Layout,
    shape: tuple[int, int],
    element_bytes: float,
    tensor: str,
) -> tuple[Collective, ...]:
    """The collectives of the fastest route between two layouts, in order; none where each GPU has its piece.

    Args:
        hardware: Whose links and library.
        axes: Of the mesh, outermost first.
        source, target: One placement per axis.
        shape: Of the whole tensor on the mesh.
        element_bytes: Bytes per element.
        tensor: What is moved, by name.
    """

    def priced(step: Step) -> Collective | None:
        return _collective(hardware, axes[step.axis : step.axis + step.span], step, tensor)

    def microseconds(step: Step) -> float:  # not seconds: a route's costs are compared to 9 decimals
        collective = priced(step)
        return collective.time_s * 1e6 if collective else 0.0

    degrees = [axis.degree for axis in axes]
    route = cheapest_route(source, target, degrees, shape, element_bytes, microseconds, fused=True)
    return tuple(collective for step in route.steps if (collective := priced(step)))


def _collective(hardware: Hardware, axes: Sequence[Axis], step: Step, tensor: str) -> Collective | None:
    degree = math.prod(axis.degree for axis in axes)
    if step.collective is None or degree == 1:
        return None
    name, kind = " x ".join(axis.name for axis in axes if axis.degree > 1), step.collective
    neighbours = group(axes[-1].stride, degree, hardware.node_gpus)
    tensor_bytes = step.bytes_per_device / sent_share(kind, degree)
    priced = collective_price(hardware, kind, neighbours, tensor_bytes, axis=name)
    return Collective(kind, name, degree, tensor, step.bytes_per_device, *priced)
