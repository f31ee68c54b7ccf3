"""The busiest GPUs of many meshes as one whose degrees and load are `sim.arrays.Lanes`: prices for all of them at once.

Addends of a step are expressions of a GPU. Asked of this one, they come to figures of every mesh, to the last bit those
of each: where an expression branches and meshes differ, those that branch alike are asked again, together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np

from sim.arrays import Floats, Ints, Lanes, OfLanes, figures_in_lanes
from sim.ops.sizes import Load
from sim.step.attention_expert_meshes import Sides, sides_in_lanes
from sim.workload import Workload

_Mesh = tuple[int, ...]
"""tp, cp, dp, ep and batch; and pp of a pipeline."""
MOST_IN_LANES = 1 << 15
"""Degrees and batches up to which products of sizes are whole numbers of 64 bits."""
_LONGEST = 1 << 24
"""The same of tokens of a context or a prompt."""


def branches_alike(workload: Workload, mesh: _Mesh) -> Hashable:
    """What meshes had better have in common to be priced together; None where one goes alone."""
    tp, cp, dp, ep, *_ = mesh
    if max(mesh) > MOST_IN_LANES or max(workload.context_tokens, workload.prompt_tokens) > _LONGEST:
        return None
    one, moe_tp = cp == 1 and dp == ep, -(-tp * cp * dp // ep)
    copied = workload.expert_exchange == "all_gather" and ep > dp and ep % dp == 0 and not one
    return one, cp, copied, tp * cp == 1, moe_tp == 1


@final
class ManyMeshes(OfLanes):
    """GPUs of many meshes, and what is known of their costs.

    Attributes:
        stacks: Both sides of them per group of layers, of each kind of step.
    """

    def __init__(self, stacks: Sequence[Sequence[Sides]], count: int) -> None:
        self.stacks, self._count = stacks, count
        self._parts: dict[bytes, ManyMeshes] = {}

    @classmethod
    def of(cls, workload: Workload, meshes: Sequence[_Mesh], loads: Sequence[Sequence[Load]]) -> ManyMeshes:
        """GPUs of some meshes that branch alike, and what is in each kind of step of each."""
        tp, _, dp, ep, *_ = (np.array(column).view(Lanes) for column in zip(*meshes, strict=True))
        of_kinds = [Load(*map(_column, zip(*kind, strict=True))) for kind in zip(*loads, strict=True)]
        stacks = [sides_in_lanes(workload, load, tp, meshes[0][1], dp, ep) for load in of_kinds]
        return cls(stacks, len(meshes))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, lanes: Any) -> ManyMeshes:
        """Some of them, with nothing known; where several addends branch alike, they share what becomes known."""
        at = np.arange(len(self))[lanes]
        if (key := at.tobytes()) not in self._parts:
            self._parts[key] = ManyMeshes([_Some(stack, at) for stack in self.stacks], len(at))
        return self._parts[key]

    def figures(self, price: Callable[..., Sequence[Any]], *columns: Any) -> Floats:
        """What GPUs in each kind of step, and numbers or lanes beside them, come to: `[lanes, figures]`."""

        def of_some(gpus: ManyMeshes, *more: Any) -> Sequence[Any]:
            return price(gpus.stacks, *more)

        return figures_in_lanes(of_some, self, *columns)


class _Some(Sequence[Sides]):
    """Both sides of some GPUs, made of those of all as they are asked for."""

    def __init__(self, stack: Sequence[Sides], lanes: Ints) -> None:
        self._sides: Any = stack
        self._lanes, self._known = lanes, dict[int, Sides]()

    def __len__(self) -> int:
        return len(self._sides)

    def __getitem__(self, group: Any) -> Any:
        if group < 0:
            group += len(self)
        elif group >= len(self):
            raise IndexError(group)
        if group not in self._known:
            self._known[group] = self._sides[group].of_lanes(self._lanes)
        return self._known[group]


def _column(values: tuple[Any, ...]) -> Any:
    """Numbers as lanes, or what they all are."""
    return values[0] if values.count(values[0]) == len(values) else np.array(values).view(Lanes)
