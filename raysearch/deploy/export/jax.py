"""A strategy as JAX reads it: a mesh, and a `PartitionSpec` for each weight, the cache and the residual stream.

The layer itself, whose collectives are those that the simulator charges, is `examples.layers.jax_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysearch.deploy.export.cut import cut_of, left_out, notes_of
from raysearch.deploy.export.deployment import Deployment, Export
from raysearch.deploy.export.render import Call, python_text
from raysearch.deploy.layers.sharded_layer import cache_shape, weight_shapes
from sim.sharding.placement import Placement, Shard

_HEAD = '''
"""Shardings over the devices of MESH of one layer of MODEL, for JAX; all layers are alike.

Where attention (DP x TP) and experts (EP x MOE_TP) have separate meshes, each of the four is an axis of MESH or two
neighbours. STREAM is that of [tokens, hidden] between layers, CACHE that of keys and values, [sequences, context, kv
heads, head dim], or of latents, [sequences, context, width], or None where there is none. LEFT_OUT is what they do not
say of the model.
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
'''
_TAIL = """
def mesh(devices=None):
    sizes = tuple(MESH.values())
    return Mesh(np.array(devices or jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(MESH))
"""


def export(deployment: Deployment) -> Export:
    """sharding.py for one pipeline stage of one replica.

    Raises:
        InputError: A strategy beyond the joint space.
    """
    cut, missing = cut_of(deployment, "jax"), left_out(deployment)
    cached = cache_shape(cut.model)
    weights = {name: spec(cut.weight_spread(name), len(shape)) for name, shape in weight_shapes(cut.model).items()}
    constants = {
        "MODEL": cut.model.name,
        **cut.degrees,
        "WEIGHTS": weights,
        "MESH": dict(cut.mesh),
        "STREAM": spec(cut.stream, 2),
        "CACHE": spec(cut.cache, 2 + len(cached)) if cached else None,
        "LEFT_OUT": missing,
    }
    notes = (
        *notes_of(deployment),
        "examples.layers.jax_layer runs the layer with the collectives that the simulator charges",
    )
    return Export(None, {"sharding.py": python_text(_HEAD, constants, _TAIL)}, missing, notes)


def spec(placements: Mapping[str, Placement], rank: int) -> Call:
    """A `PartitionSpec` as Python reads it.

    >>> spec({"ep": Shard(0), "tp": Shard(0)}, 2)
    P(('ep', 'tp'), None)
    """
    axes = [tuple(name for name, each in placements.items() if each == Shard(dim)) for dim in range(rank)]
    return Call("P", tuple(each if len(each) > 1 else each[0] if each else None for each in axes))
