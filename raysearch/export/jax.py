"""A strategy as JAX reads it: a mesh, and a `PartitionSpec` for each weight, the cache and the residual stream.

The layer itself, whose collectives are those that the simulator charges, is `raysearch.frameworks.jax_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysearch.export.cut import ORDER_NOTE, cut_of, left_out
from raysearch.export.deployment import Deployment, Export
from raysearch.frameworks.layer import weight_shapes
from sim.sharding.placement import Placement, Shard

_TEXT = '''"""Shardings of {name}, tp {tp} x ep {ep}: one layer's, alike in all."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

EP, TP = {ep}, {tp}
WEIGHTS = {{
{weights}
}}
STREAM = {stream}  # [tokens, hidden], between layers
CACHE = {cache}  # keys and values: [sequences, context, kv heads, head dim]


def mesh(devices=None):
    return Mesh(np.array(devices or jax.devices()[: EP * TP]).reshape(EP, TP), ("ep", "tp"))
'''


def export(deployment: Deployment) -> Export:
    """sharding.py for one pipeline stage of one replica.

    Raises:
        InputError: A strategy beyond the joint space.
    """
    cut = cut_of(deployment, "jax")
    weights: list[str] = []
    for name, shape in weight_shapes(cut.model).items():
        over_ep = {"ep": Shard(0)} if cut.model.is_moe and name in ("ffn1", "ffn2") else {}
        weights.append(f'    "{name}": {spec_text({**over_ep, "tp": cut.weight_placement(name)}, len(shape))},')
    cache = {"t": Shard(0), "h": Shard(2)}.get(cut.label("attention"))
    text = _TEXT.format(
        name=cut.model.name,
        tp=cut.tp,
        ep=cut.ep,
        weights="\n".join(weights),
        stream=spec_text({"ep": Shard(0), "tp": cut.stream}, 2),
        cache=spec_text({"ep": Shard(0), **({"tp": cache} if cache else {})}, 4),
    )
    notes = (
        ORDER_NOTE,
        "raysearch.frameworks.jax_layer runs the layer with the collectives that the simulator charges",
    )
    return Export("", {"sharding.py": text}, left_out(deployment), notes)


def spec_text(placements: Mapping[str, Placement], rank: int) -> str:
    """A `PartitionSpec` as Python reads it.

    >>> spec_text({"ep": Shard(0), "tp": Shard(0)}, 2)
    "P(('ep', 'tp'), None)"
    """
    axes = [[name for name, each in placements.items() if each == Shard(dim)] for dim in range(rank)]
    return f"P({', '.join(repr(tuple(each)) if len(each) > 1 else repr((*each, None)[0]) for each in axes)})"
