"""The device mesh (pp, ep, tp), tp innermost, laid on nodes: which links a group of GPUs talks over."""

from __future__ import annotations

import math
from typing import NamedTuple


class Group(NamedTuple):
    """The GPUs along one mesh axis, as their collective sees them.

    Attributes:
        degree: GPUs in the group.
        per_node: How many of them share a node.
    """

    degree: int
    per_node: int

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


def group(stride: int, degree: int, node_gpus: int) -> Group:
    """The worst-placed group of `degree` GPUs that lie `stride` apart on nodes of `node_gpus`.

    Groups follow each other without gaps, so where they do not divide a node some group straddles one
    node more than it must, and the slowest group sets the pace.

    >>> group(stride=1, degree=16, node_gpus=8), group(stride=1, degree=6, node_gpus=8)
    (Group(degree=16, per_node=8), Group(degree=6, per_node=3))
    """
    last_start = min(node_gpus - 1, node_gpus - math.gcd(stride * degree, node_gpus) + stride - 1)
    nodes = min(degree, (last_start + stride * (degree - 1)) // node_gpus + 1)
    return Group(degree, math.ceil(degree / nodes))


def tp_group(tp: int, node_gpus: int) -> Group:
    """The tensor-parallel group: neighbouring GPUs."""
    return group(1, tp, node_gpus)


def ep_group(tp: int, ep: int, node_gpus: int) -> Group:
    """The expert-parallel group: GPUs a tp group apart."""
    return group(tp, ep, node_gpus)


def stages_share_a_node(tp: int, ep: int, pp: int, node_gpus: int) -> bool:
    """Whether every pipeline boundary stays inside a node; the slowest boundary sets the pace."""
    gpus = tp * ep * pp
    return gpus <= node_gpus and node_gpus % gpus == 0
