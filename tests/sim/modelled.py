"""Collectives as the model of links and library has them, whatever was measured."""

from __future__ import annotations

from sim.prices.collectives import fastest_algorithm
from sim.prices.hardware import Hardware
from sim.prices.mesh import MeshGroup


def collective_time_s(hardware: Hardware, kind: str, group: MeshGroup, tensor_bytes: float) -> float:
    """Seconds of a collective of so many bytes over a group."""
    return fastest_algorithm(hardware.collectives, kind, group, tensor_bytes)[0]
