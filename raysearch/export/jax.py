"""A strategy as JAX reads it: a mesh, and a `PartitionSpec` for each weight, the cache and the residual stream.

The layer itself, whose collectives are those that the simulator charges, is `raysearch.frameworks.jax_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysearch.export.cut import ORDER_NOTE, cut_of, left_out, told_in_file
from raysearch.export.deployment import Deployment, Export
from raysearch.frameworks.layer import Sharded, weight_shapes
from sim.layers.mixers import GroupedAttention
from sim.sharding.placement import Placement, Shard

_TEXT = '''"""Shardings of {name}, tp {tp} x ep {ep}: one layer's, alike in all.{left}"""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

EP, TP = {ep}, {tp}
WEIGHTS = {{
{weights}
}}
STREAM = {stream}  # [tokens, hidden], between layers
CACHE = {cache}


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
    text = _TEXT.format(
        name=cut.model.name,
        tp=cut.tp,
        ep=cut.ep,
        left=told_in_file(deployment),
        weights="\n".join(weights),
        stream=spec_text({"ep": Shard(0), "tp": cut.stream}, 2),
        cache=_cache_text(cut),
    )
    notes = (
        ORDER_NOTE,
        "raysearch.frameworks.jax_layer runs the layer with the collectives that the simulator charges",
    )
    return Export("", {"sharding.py": text}, left_out(deployment), notes)


def _cache_text(cut: Sharded) -> str:
    if not isinstance(cut.group.attention, GroupedAttention):
        return "None  # it has no heads: left out"
    over_tp = {"t": Shard(0), "h": Shard(2)}.get(cut.label("attention"))
    spec = spec_text({"ep": Shard(0), **({"tp": over_tp} if over_tp else {})}, 4)
    return f"{spec}  # keys and values: [sequences, context, kv heads, head dim]"


def spec_text(placements: Mapping[str, Placement], rank: int) -> str:
    """A `PartitionSpec` as Python reads it.

    >>> spec_text({"ep": Shard(0), "tp": Shard(0)}, 2)
    "P(('ep', 'tp'), None)"
    """
    axes = [[name for name, each in placements.items() if each == Shard(dim)] for dim in range(rank)]
    return f"P({', '.join(repr(tuple(each)) if len(each) > 1 else repr((*each, None)[0]) for each in axes)})"
