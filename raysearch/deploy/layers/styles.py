"""`OpParallel`: how one module of a sharded layer reads its inputs, keeps its weight and leaves its result.

For `torch.distributed.tensor.parallel.parallelize_module`, on a mesh of any number of axes. It needs PyTorch alone:
`raysearch export --to dtensor` writes a copy of it beside a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ParallelStyle

Placements = tuple[Placement, ...]
"""One per axis of the mesh, outer axes first."""


class OpParallel(ParallelStyle):
    """A module under a rule: tensors are moved to what it reads, and its result to what is read next.

    What all ranks but those of the outermost axis hold whole passes between modules as a plain tensor, anything else as
    a `DTensor`: a module without a style takes and leaves plain tensors, as if nothing were sharded.

    A module may run on the same ranks as another mesh: `shape` says which, and `hops` how its result gets to the next.

    Args:
        reads: Of each input, in order.
        gives: Of the result that these lead to.
        leaves: What the result is moved to.
        weight: Of the module's parameters.
        local: Whether the module runs on each rank's pieces, by `local_map`: where DTensor has no rule that fits.
        shape: Ranks per axis of the mesh on which it runs; None for the mesh as it is.
        hops: Moves of the result, each on a mesh of its own: (its shape, placements there, those that it is moved to).
        leaves_shape: Of the mesh on which `leaves` then says how it lies.
    """

    def __init__(
        self,
        *,
        reads: Sequence[Placements],
        gives: Placements,
        leaves: Placements | None = None,
        weight: Placements | None = None,
        local: bool = False,
        shape: tuple[int, ...] | None = None,
        hops: Sequence[tuple[tuple[int, ...], Placements, Placements]] = (),
        leaves_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.reads, self.gives, self.leaves = tuple(reads), gives, leaves or gives
        self.weight, self.local = weight, local
        self.shape, self.hops, self.leaves_shape = shape, tuple(hops), leaves_shape

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        given, device_mesh = device_mesh, shaped(device_mesh, self.shape)
        hops = [(shaped(given, shape), source, target) for shape, source, target in self.hops]
        left_on = shaped(given, self.leaves_shape) if hops else device_mesh
        if self.weight is not None:
            for part in module.modules():
                for name, parameter in list(part.named_parameters(recurse=False)):
                    placed = distribute_tensor(parameter, device_mesh, self.weight, src_data_rank=self.src_data_rank)
                    placed = placed.to_local() if self.local else placed
                    part.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        run: Callable[..., Any] = module.forward
        if self.local:
            run = local_map(run, (self.gives,), self.reads, device_mesh=device_mesh)  # type: ignore[assignment]

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            result = run(*(redistributed(each, device_mesh, to) for each, to in zip(inputs, self.reads, strict=True)))
            if result.placements != self.gives:
                raise RuntimeError(f"{type(module).__name__}: DTensor left {result.placements}, expected {self.gives}")
            for mesh, source, target in hops:
                result = redistributed(lying(result.to_local(), mesh, source), mesh, target)
            if hops:
                result = lying(result.to_local(), left_on, self.leaves)
            result = redistributed(result, left_on, self.leaves)
            return result.to_local() if result.placements == whole(left_on) else result

        module.forward = forward
        return module


def whole(mesh: DeviceMesh) -> Placements:
    """Of a plain tensor: rows of its own on each rank of the outermost of several axes, the same on all others."""
    return (*[Shard(0)] * (mesh.ndim > 1), *[Replicate()] * (mesh.ndim - (mesh.ndim > 1)))


@lru_cache(maxsize=64)
def shaped(mesh: DeviceMesh, shape: tuple[int, ...] | None) -> DeviceMesh:
    """The same ranks in the same order as a mesh of another shape; all of them must ask for it."""
    if shape is None or shape == tuple(mesh.shape):
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(shape))


def lying(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A rank's piece, as what it is on a mesh."""
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


def redistributed(tensor: torch.Tensor, mesh: DeviceMesh, target: Placements) -> DTensor:
    """A tensor under other placements: one collective for each axis that differs.

    Outer axes first, but what is gathered last, and of that inner axes first, as shards of shards join.
    """
    if not isinstance(tensor, DTensor):
        tensor = lying(tensor, mesh, whole(mesh))
    ends = list(zip(tensor.placements, target, strict=True))
    gathers = [isinstance(source, Shard) and isinstance(wanted, Replicate) for source, wanted in ends]
    for axis in sorted(range(mesh.ndim), key=lambda axis: (gathers[axis], -axis if gathers[axis] else axis)):
        source, wanted = ends[axis]
        placements = (*tensor.placements[:axis], wanted, *tensor.placements[axis + 1 :])
        if source == wanted:
            continue
        others = [each for index, each in enumerate(tensor.placements) if index != axis]
        if mesh.size(axis) == 1:
            tensor = lying(tensor.to_local(), mesh, placements)
        elif isinstance(source, Shard) and isinstance(wanted, Shard):
            tensor = lying(_exchanged(tensor.to_local(), mesh, axis, source.dim, wanted.dim), mesh, placements)
        elif (source if isinstance(source, Shard) else wanted) in others:  # as if it were whole there: it stays apart
            alone = [Replicate()] * axis, [Replicate()] * (mesh.ndim - axis - 1)
            moved = lying(tensor.to_local(), mesh, (*alone[0], source, *alone[1]))
            moved = moved.redistribute(mesh, (*alone[0], wanted, *alone[1]))
            tensor = lying(moved.to_local(), mesh, placements)
        else:
            tensor = tensor.redistribute(mesh, placements)
    return tensor


def _exchanged(own: torch.Tensor, mesh: DeviceMesh, axis: int, join: int, split: int) -> torch.Tensor:
    """By an all-to-all, which DTensor itself replaces by gathering on CPUs."""
    sent = torch.cat(own.chunk(mesh.size(axis), split))
    received = all_to_all_single(sent, None, None, (mesh, axis))
    return torch.cat(received.chunk(mesh.size(axis)), join)
