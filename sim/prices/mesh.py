"""The device mesh (pp, ep, tp), tp innermost, laid on nodes and racks: which links a group of GPUs talks over."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from sim.arrays import Lanes, by_distinct


class MeshGroup(NamedTuple):
    """The GPUs along one mesh axis, as their collective sees them.

    Attributes:
        degree: GPUs in the group.
        per_node: How many of them share a node.
        racked: Whether it spans nodes and stays inside a rack, on machines that have links between node and network.
    """

    degree: int
    per_node: int
    racked: bool = False

    @property
    def nodes(self) -> int:
        """Nodes the group spans."""
        return math.ceil(self.degree / self.per_node)

    @property
    def tier(self) -> str:
        """Either "intra" (one node), "inter" (one GPU per node) or "hierarchical"."""
        if self.nodes == 1:
            return "intra"
        return "inter" if self.per_node == 1 else "hierarchical"


def group(stride: int, degree: int, node_gpus: int, rack_gpus: int = 0, gaps: bool = False) -> MeshGroup:
    """The worst-placed group of `degree` GPUs that lie `stride` apart on nodes of `node_gpus` in racks of `rack_gpus`.

    Without racks, `rack_gpus` is 0. Groups follow each other without gaps, so where they do not divide a node some
    group straddles one node more than it must, and the slowest group sets the pace. A node of several hosts may have
    `gaps`: hosts that stay idle, as jobs are given whole hosts, so that a group that fits straddles none.

    >>> group(stride=1, degree=6, node_gpus=8)
    MeshGroup(degree=6, per_node=3, racked=False)
    >>> group(stride=1, degree=6, node_gpus=2, rack_gpus=8).racked, group(1, 8, 2, 8).racked
    (False, True)
    >>> group(1, 16, 72).nodes, group(1, 16, 72, gaps=True).nodes
    (2, 1)
    """
    if isinstance(stride, Lanes) or isinstance(degree, Lanes):
        return MeshGroup(*by_distinct(partial(_group, node_gpus, rack_gpus, gaps), stride, degree))
    return _group(node_gpus, rack_gpus, gaps, stride, degree)


def _group(node_gpus: int, rack_gpus: int, gaps: bool, stride: int, degree: int) -> MeshGroup:
    nodes = 1 if gaps and stride * degree <= node_gpus else _spanned(stride, degree, node_gpus)
    racked = nodes > 1 and rack_gpus > node_gpus and _spanned(stride, degree, rack_gpus) == 1
    return MeshGroup(degree, math.ceil(degree / nodes), racked)


def _spanned(stride: int, degree: int, size: int) -> int:
    """Blocks of `size` GPUs that the worst-placed group touches."""
    last_start = min(size - 1, size - math.gcd(stride * degree, size) + stride - 1)
    return min(degree, (last_start + stride * (degree - 1)) // size + 1)


def tp_group(tp: int, node_gpus: int, rack_gpus: int = 0, gaps: bool = False) -> MeshGroup:
    """The tensor-parallel group: neighbouring GPUs."""
    return group(1, tp, node_gpus, rack_gpus, gaps)


def ep_group(tp: int, ep: int, node_gpus: int, rack_gpus: int = 0, gaps: bool = False) -> MeshGroup:
    """The expert-parallel group: GPUs a tp group apart."""
    return group(tp, ep, node_gpus, rack_gpus, gaps)


STAGE_PAIRS = MeshGroup(2, 2), MeshGroup(2, 1), MeshGroup(2, 1, racked=True)
"""A GPU and its neighbour in the next stage: on one node, on two, on two of a rack."""


def stage_pair(tp: int, ep: int, pp: int, node_gpus: int, rack_gpus: int = 0, gaps: bool = False) -> MeshGroup:
    """The pair across the slowest of all boundaries of a pipeline.

    >>> stage_pair(2, 2, 2, node_gpus=8).nodes, stage_pair(8, 1, 2, node_gpus=8).nodes
    (1, 2)
    """
    gpus = tp * ep * pp
    if node_gpus % gpus == 0 or (gaps and gpus <= node_gpus):
        return STAGE_PAIRS[0]
    return STAGE_PAIRS[2 if rack_gpus > node_gpus and rack_gpus % gpus == 0 else 1]
