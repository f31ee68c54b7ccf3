"""What `Strategy.dims` stands for: one choice per fused op, or per fused op of each group of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.layers.choices import has_grid
from sim.layers.ops import FusedOp
from sim.ops.layers import layer_of, layer_ops, op_names
from sim.strategy import FIRST_DECLARED, grid_choices
from sim.workload import TWO_DIMENSIONAL, Workload


class Dim(NamedTuple):
    """One entry of `Strategy.dims`.

    Attributes:
        name: Of the op; behind its group's, as in "dense.ffn1", where groups have choices of their own.
        op: The op; of several groups that share the choice, that with experts.
        groups: Indices of the groups that it decides for.
        declared: Whether choices that somebody declared for the op are there: the op is the same in all groups.
        grid: Choices that shard two dims over two sub-axes; none outside the two-dimensional space.
    """

    name: str
    op: FusedOp
    groups: tuple[int, ...]
    declared: bool = True
    grid: tuple[int, ...] = ()

    @property
    def choices(self) -> tuple[int, ...]:
        """Values in the extended space, declared ones behind, then those of the two-dimensional one."""
        found = self.op.choices
        if not self.declared:
            found = tuple([choice for choice in found if choice < FIRST_DECLARED])
        return (*found, *self.grid)


@lru_cache(maxsize=64)
def dims_of(workload: Workload) -> tuple[Dim, ...]:
    """The entries of `Strategy.dims`, in order."""
    groups = workload.model.groups
    grid = grid_choices(workload.tp_inner) if workload.space == TWO_DIMENSIONAL else ()
    layers = [layer_of(group) for group in groups]
    if workload.groups == "own" and len(groups) > 1:
        return tuple(
            Dim(f"{group.name}.{op.name}", op, (index,), grid=grid if has_grid(op) else ())
            for index, (group, layer) in enumerate(zip(groups, layers, strict=True))
            for op in layer.ops
        )
    found: list[Dim] = []
    for op in layer_ops(workload.model).ops:
        having = tuple(index for index, layer in enumerate(layers) if op.name in layer.op_by_name)
        alike = all(layers[index].op(op.name).key == op.key for index in having)
        found.append(Dim(op.name, op, having, alike, grid if has_grid(op) else ()))
    return tuple(found)


def spread_choices(workload: Workload, dims: Sequence[int]) -> tuple[int, ...]:
    """Dims in the workload's order from one choice per fused op that all groups share, such as a heuristic's."""
    by_op = dict(zip(op_names(workload.model), dims, strict=True))
    return tuple(by_op[dim.op.name] for dim in dims_of(workload))


def choices_of(workload: Workload, dims: Sequence[int]) -> tuple[Mapping[str, int], ...]:
    """The choice of each fused op by its name, per group of layers."""
    return tuple({name: dims[place] for name, place in names} for names in _places(workload))


@lru_cache(maxsize=64)
def _places(workload: Workload) -> tuple[tuple[tuple[str, int], ...], ...]:
    entries = list(enumerate(dims_of(workload)))
    return tuple(
        tuple((dim.op.name, place) for place, dim in entries if index in dim.groups)
        for index in range(len(workload.model.groups))
    )
