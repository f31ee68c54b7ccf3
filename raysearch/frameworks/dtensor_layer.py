"""A strategy's layer in PyTorch: DTensor moves tensors between their placements, ops work on a rank's own pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from raysearch.errors import InputError
from raysearch.frameworks.layer import Array, Sharded, run_layer
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard


def torch_placement(placement: Placement) -> Any:
    """The same in torch.distributed.tensor.

    Raises:
        InputError: DTensor has none such.

    >>> torch_placement(Shard(1)), torch_placement(PARTIAL)
    (Shard(dim=1), Partial(sum))
    """
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if placement == PARTIAL:
        return TorchPartial()
    if placement == REPLICATE:
        return TorchReplicate()
    raise InputError(f"DTensor has no public placement for {placement}; expected R, S(dim) or P(sum)")


def from_torch_placements(placements: Sequence[Any]) -> tuple[Placement, ...]:
    """A DTensor's placement list, one per mesh axis, as the simulator has it.

    Raises:
        InputError: A placement that strategies do not have.

    >>> from_torch_placements([TorchReplicate(), TorchShard(0)])
    (Replicate(), Shard(dim=0))
    """
    found: list[Placement] = []
    for placement in placements:
        if type(placement) is TorchShard:
            found.append(Shard(placement.dim))
        elif placement == TorchPartial():
            found.append(PARTIAL)
        elif placement.is_replicate():
            found.append(REPLICATE)
        else:
            raise InputError(f"cannot read {placement}: expected Shard(dim), Replicate() or Partial('sum')")
    return tuple(found)


class _Collectives:
    """By DTensor's redistribution on one axis of a mesh; over ep, where every rank has rows of its own, directly."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def _move(self, array: Array, source: Any, target: Any, axis: str) -> Array:
        mesh = self._mesh[axis]
        if mesh.size() == 1:
            return array
        whole = DTensor.from_local(array, mesh, [source], run_check=False)
        moved = whole.redistribute(mesh, [target]).to_local()
        return moved.wait() if isinstance(moved, collectives.AsyncCollectiveTensor) else moved

    def all_gather(self, array: Array, dim: int, axis: str) -> Array:
        return self._move(array, TorchShard(dim), TorchReplicate(), axis)

    def reduce_scatter(self, array: Array, dim: int, axis: str) -> Array:
        return self._move(array, TorchPartial(), TorchShard(dim), axis)

    def all_reduce(self, array: Array, axis: str) -> Array:
        return self._move(array, TorchPartial(), TorchReplicate(), axis)

    def all_to_all(self, array: Array, split: int, join: int, axis: str) -> Array:
        """Directly: DTensor gathers and slices where the backend is a CPU's."""
        group = self._mesh[axis].get_group()
        count = dist.get_world_size(group)
        if count == 1:
            return array
        sent = torch.cat(array.chunk(count, split)).contiguous()
        got = collectives.all_to_all_single(sent, None, None, group)
        got = got.wait() if isinstance(got, collectives.AsyncCollectiveTensor) else got
        return torch.cat(got.chunk(count), join)

    def own(self, array: Array, dim: int, axis: str) -> Array:
        return self._move(array, TorchReplicate(), TorchShard(dim), axis)


class _Numbers:
    def einsum(self, equation: str, *arrays: Array) -> Array:
        return torch.einsum(equation, *arrays)

    def softmax(self, array: Array) -> Array:
        return torch.softmax(array, -1)

    def silu(self, array: Array) -> Array:
        return torch.nn.functional.silu(array)

    def top(self, array: Array, count: int) -> tuple[Array, Array]:
        found, index = torch.topk(array, count)
        return found, index

    def one_hot(self, array: Array, classes: int) -> Array:
        return torch.nn.functional.one_hot(array.long(), classes).to(array.dtype)

    def concat(self, arrays: list[Array]) -> Array:
        return torch.cat(arrays, -1)

    def stack(self, arrays: list[Array]) -> Array:
        return torch.stack(arrays, -1)


def layer_of_rank(
    sharded: Sharded, mesh: DeviceMesh, weights: Mapping[str, Array], cache: tuple[Array, Array], stream: Array
) -> Array:
    """The residual stream after one decode step of the layer, this rank's piece.

    Args:
        sharded: How it is cut.
        mesh: With axes "ep" and "tp" of the degrees.
        weights: This rank's pieces, by op.
        cache: This rank's keys and values.
        stream: This rank's tokens, under `sharded.stream`.

    Raises:
        InputError: The mesh is another.
    """
    shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if shape != {"ep": sharded.ep, "tp": sharded.tp}:
        raise InputError(f"expected a mesh (ep {sharded.ep}, tp {sharded.tp}), got {shape}")
    return run_layer(sharded, weights, cache, stream, _Collectives(mesh), _Numbers())
