"""A strategy's layer in JAX: `jax.jit` of `jax.shard_map`, weights placed by `NamedSharding`, and what XLA made of it.

An optional extra: `pip install -e '.[jax]'` in the checkout.
"""
# pyright: reportMissingImports=false
# (an optional extra)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.layers.jax_ops import Array, run_layer
from raysearch.base.errors import InputError
from raysearch.deploy.layers.sharded_layer import (
    Sharded,
    Slots,
    cache_shape,
    check_runs,
    runs_latents,
    weight_shapes,
)
from sim.sharding.placement import REPLICATE, Placement, Shard


def partition_spec(placements: Mapping[str, Placement], rank: int) -> PartitionSpec:
    """The spec of an array: per dim, the mesh axes that shard it, outer axes first.

    Args:
        placements: By mesh axis, outer axes first.
        rank: Dims of the array.

    Raises:
        InputError: A placement that no spec can say, such as a sum's parts.

    >>> partition_spec({"ep": Shard(0), "tp": Shard(2)}, 3)
    P('ep', None, 'tp')
    """
    axes: list[list[str]] = [[] for _ in range(rank)]
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            axes[placement.dim].append(axis)
        elif placement != REPLICATE:
            raise InputError(
                f"a PartitionSpec cannot say {placement} on {axis}: it knows whole and evenly sharded dims"
            )
    return PartitionSpec(*(tuple(names) if len(names) > 1 else (*names, None)[0] for names in axes))


def from_partition_spec(spec: PartitionSpec, axes: tuple[str, ...]) -> dict[str, Placement]:
    """Placements by mesh axis of a spec.

    Args:
        spec: Of an array.
        axes: All axes of the mesh, outer axes first.

    Raises:
        InputError: An axis that the mesh does not have, or one dim sharded inner axis first.

    >>> from_partition_spec(PartitionSpec("ep", None, "tp"), ("ep", "tp"))["tp"]
    Shard(dim=2)
    """
    found: dict[str, Placement] = dict.fromkeys(axes, REPLICATE)
    for dim, names in enumerate(spec):
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        if unknown := [name for name in names if name not in axes]:
            raise InputError(f"the spec names an axis {unknown[0]!r}; the mesh has {', '.join(axes)}")
        if list(names) != [axis for axis in axes if axis in names]:
            raise InputError(f"dim {dim} is sharded over {names}, inner axis first: expected the mesh's order {axes}")
        found |= dict.fromkeys(names, Shard(dim))
    return found


def weight_specs(sharded: Sharded) -> dict[str, PartitionSpec]:
    """Specs of a layer's weights on `sharded.mesh`; experts are dealt out."""
    shapes = weight_shapes(sharded.model)
    return {name: partition_spec(sharded.weight_spread(name), len(shape)) for name, shape in shapes.items()}


def stream_spec(sharded: Sharded) -> PartitionSpec:
    """Spec of the residual stream [tokens, hidden], as the layer leaves it."""
    return partition_spec(sharded.stream, 2)


def cache_spec(sharded: Sharded) -> PartitionSpec:
    """Spec of keys and values [sequences, context, kv heads, head dim], or of latents [sequences, context, width]."""
    return partition_spec(sharded.cache, 2 + len(cache_shape(sharded.model)))


def sharded_layer(
    sharded: Sharded, mesh: Mesh, slots: Slots
) -> Callable[[Mapping[str, Array], tuple[Array, ...], Array], Array]:
    """The jitted layer: (weights, (keys, values) or (latents,), stream [tokens, hidden]) -> the stream after it.

    Args:
        sharded: How it is cut.
        mesh: With the axes of `sharded.mesh`.
        slots: Of experts; a dense layer looks at none.

    Raises:
        InputError: The mesh is another, or the model's layer has a part that cannot be run.
    """
    check_runs(sharded.model)
    if dict(mesh.shape) != sharded.mesh:
        raise InputError(f"expected a mesh {sharded.mesh}, got {dict(mesh.shape)}")
    stream = stream_spec(sharded)

    def on_rank(weights: Mapping[str, Array], cache: tuple[Array, ...], x: Array) -> Array:
        return run_layer(sharded, slots, weights, cache, x)

    kept = 1 if runs_latents(sharded.group.attention) else 2
    specs = (weight_specs(sharded), (cache_spec(sharded),) * kept, stream)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=stream, check_vma=False)
    return jax.jit(mapped, in_shardings=placed, out_shardings=NamedSharding(mesh, stream))


class Sent(NamedTuple):
    """A collective that happens: its kind, the ranks of a group, and bytes that each sends."""

    kind: str
    degree: int
    sent_bytes: int


_HLO = re.compile(r"= (?P<shapes>[^=]*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")
_SHAPE = re.compile(r"[a-z]+(\d+)\w*\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")


def collectives_of(hlo: str) -> list[Sent]:
    """The collectives in compiled HLO, as `jitted.lower(...).compile().as_text()` prints it.

    >>> collectives_of("  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}")
    [Sent(kind='all_gather', degree=4, sent_bytes=96)]
    """
    found: list[Sent] = []
    for line in hlo.splitlines():
        match = _HLO.search(line)
        if match is None:
            continue
        groups = _GROUPS.search(line)
        assert groups is not None, line
        degree = len(groups[1].split(",")) if groups[1] is not None else int(groups[2])
        shapes = _SHAPE.findall(match["shapes"])
        result = sum(math.prod(map(int, filter(None, dims.split(",")))) * int(bits) // 8 for bits, dims in shapes)
        kind = match["kind"].replace("-", "_")
        if degree > 1:
            found.append(Sent(kind, degree, _sent(kind, degree, result)))
    return found


def _sent(kind: str, degree: int, result: int) -> int:
    """Bytes that a rank sends, from those of its result: rings for what is reduced or gathered."""
    each = {"all_gather": 1, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": degree}[kind]
    return each * result * (degree - 1) // degree
