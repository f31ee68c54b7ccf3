"""Placements in DTensor's words, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from raysearch.base.errors import InputError
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
