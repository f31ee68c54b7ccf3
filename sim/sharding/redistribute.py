"""Which collective turns one placement into another on a mesh axis; `sim.sharding.routes` plans whole meshes."""

from __future__ import annotations

from functools import lru_cache

from sim.sharding.placement import Holds, Placement, Replicate

_COLLECTIVES: dict[tuple[Holds, Holds], str | None] = {
    ("whole", "whole"): None,
    ("whole", "shard"): None,
    ("shard", "whole"): "all_gather",
    ("shard", "shard"): "all_to_all",
    ("part", "whole"): "all_reduce",
    ("part", "shard"): "reduce_scatter",
}


class RedistributionError(ValueError):
    """No collective leads from one placement to the other."""


@lru_cache(maxsize=1024)
def collective_between(source: Placement, target: Placement) -> str | None:
    """The collective that turns `source` into `target`; None when each rank already holds its part.

    Raises:
        RedistributionError: The target is Partial: nothing is split into parts on purpose.

    >>> from sim.sharding.placement import PARTIAL, REPLICATE, Shard
    >>> collective_between(PARTIAL, REPLICATE), collective_between(REPLICATE, Shard(0))
    ('all_reduce', None)
    """
    if source == target:
        return None
    if target.holds == "part":
        raise RedistributionError(f"cannot turn {source} into {target}: parts only come out of an op")
    return _COLLECTIVES[source.holds, target.holds]


@lru_cache(maxsize=1024)
def sent_share(kind: str, degree: int) -> float:
    """Bytes each GPU sends over the bytes V of the whole tensor in the group.

    Source: the bandwidth-optimal algorithms (ring, pairwise exchange); all-to-all counts V over the group.

    >>> sent_share("all_reduce", 4), sent_share("all_gather", 4)
    (1.5, 0.75)
    """
    shares = {
        "all_gather": (degree - 1) / degree,
        "reduce_scatter": (degree - 1) / degree,
        "all_reduce": 2 * (degree - 1) / degree,
        "all_to_all": (degree - 1) / degree**2,
    }
    return shares[kind]


@lru_cache(maxsize=4096)
def collectives_for(source: Placement, targets: tuple[Placement, ...]) -> tuple[str | None, ...]:
    """One collective per target, for a tensor that several consumers read.

    A placement that two consumers share is moved once, and where one consumer needs the whole
    tensor the others slice their shard out of it.

    >>> from sim.sharding.placement import REPLICATE, Shard
    >>> collectives_for(Shard(1), (Shard(0), REPLICATE, Shard(0)))
    (None, 'all_gather', None)
    """
    passed: set[Placement] = {source}
    moves: dict[Placement, str | None] = {}
    for target in sorted(set(targets), key=lambda placement: not isinstance(placement, Replicate)):
        moves[target] = None if target in passed or Replicate() in passed else collective_between(source, target)
        passed.add(target)
    charged: set[Placement] = set()
    result: list[str | None] = []
    for target in targets:
        result.append(None if target in charged else moves[target])
        charged.add(target)
    return tuple(result)
