"""`OpParallel`: how one module of a sharded layer reads its inputs, keeps its weight and leaves its result.

For `torch.distributed.tensor.parallel.parallelize_module`, on a mesh of any number of axes. It needs PyTorch alone:
`raysearch export --to dtensor` writes a copy of it beside a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    What all ranks of the innermost axis hold whole passes between modules as a plain tensor, anything else as a
    `DTensor`: a module without a style takes and leaves plain tensors, as if nothing were sharded.

    Args:
        reads: Of each input, in order.
        gives: Of the result that these lead to.
        leaves: What the result is moved to.
        weight: Of the module's parameters.
        local: Whether the module runs on each rank's pieces, by `local_map`: where DTensor has no rule that fits.
    """

    def __init__(
        self,
        *,
        reads: Sequence[Placements],
        gives: Placements,
        leaves: Placements | None = None,
        weight: Placements | None = None,
        local: bool = False,
    ) -> None:
        self.reads, self.gives, self.leaves = tuple(reads), gives, leaves or gives
        self.weight, self.local = weight, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.weight is not None:
            for part in module.modules():
                for name, parameter in list(part.named_parameters(recurse=False)):
                    placed = distribute_tensor(parameter, device_mesh, self.weight, src_data_rank=self.src_data_rank)
                    part.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        run: Callable[..., Any] = module.forward
        if self.local:
            run = local_map(run, (self.gives,), self.reads, device_mesh=device_mesh)  # type: ignore[assignment]

        def forward(*inputs: torch.Tensor) -> torch.Tensor:
            result = run(*(redistributed(each, device_mesh, to) for each, to in zip(inputs, self.reads, strict=True)))
            if result.placements != self.gives:
                raise RuntimeError(f"{type(module).__name__}: DTensor left {result.placements}, expected {self.gives}")
            result = redistributed(result, device_mesh, self.leaves)
            return result.to_local() if result.placements == whole(device_mesh) else result

        module.forward = forward
        return module


def whole(mesh: DeviceMesh) -> Placements:
    """Of a plain tensor: rows of its own on each rank of the outer axes, the same on all of the innermost."""
    return (*[Shard(0)] * (mesh.ndim - 1), Replicate())


def redistributed(tensor: torch.Tensor, mesh: DeviceMesh, target: Placements) -> DTensor:
    """A tensor under other placements: one collective for each axis that differs, outer axes first."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, whole(mesh), run_check=False)
    for axis, (source, wanted) in enumerate(zip(tensor.placements, target, strict=True)):
        placements = (*target[: axis + 1], *tensor.placements[axis + 1 :])
        if source == wanted:
            continue
        if mesh.size(axis) == 1:
            tensor = DTensor.from_local(tensor.to_local(), mesh, placements, run_check=False)
        elif isinstance(source, Shard) and isinstance(wanted, Shard):
            tensor = _exchanged(tensor, mesh, axis, source.dim, wanted.dim, placements)
        else:
            tensor = tensor.redistribute(mesh, placements)
    return tensor


def _exchanged(tensor: DTensor, mesh: DeviceMesh, axis: int, join: int, split: int, to: Placements) -> DTensor:
    """By an all-to-all, which DTensor itself replaces by gathering on CPUs."""
    sent = torch.cat(tensor.to_local().chunk(mesh.size(axis), split))
    received = all_to_all_single(sent, None, None, (mesh, axis))
    return DTensor.from_local(torch.cat(received.chunk(mesh.size(axis)), join), mesh, to, run_check=False)
