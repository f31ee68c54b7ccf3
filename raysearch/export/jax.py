"""A strategy as JAX reads it: a mesh, and a `PartitionSpec` for each weight, the cache and the residual stream.

The layer itself, whose collectives are those that the simulator charges, is `raysearch.frameworks.jax_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysearch.errors import InputError
from raysearch.export.deployment import Deployment, Export
from raysearch.frameworks.layer import Sharded, shown_group, weight_shapes
from sim.layers.mixers import GroupedAttention
from sim.layers.ops import op_names
from sim.sharding.placement import Placement, Shard
from sim.strategy import CHOICES

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
    strategy, model = deployment.strategy, deployment.workload.model
    if strategy.extended or set(strategy.dims) - set(CHOICES):
        raise InputError("--to jax knows the strategies of the joint space: one mesh of tp and ep, choices 0, 1 and 2")
    cut = Sharded(model, dict(zip(op_names(model), strategy.dims, strict=True)), strategy.tp, strategy.ep)
    weights: list[str] = []
    for name, shape in weight_shapes(model).items():
        over_ep = {"ep": Shard(0)} if model.is_moe and name in ("ffn1", "ffn2") else {}
        weights.append(f'    "{name}": {spec_text({**over_ep, "tp": cut.weight_placement(name)}, len(shape))},')
    cache = {"t": Shard(0), "h": Shard(2)}.get(cut.label("attention"))
    text = _TEXT.format(
        name=model.name,
        tp=strategy.tp,
        ep=strategy.ep,
        weights="\n".join(weights),
        stream=spec_text({"ep": Shard(0), "tp": cut.stream}, 2),
        cache=spec_text({"ep": Shard(0), **({"tp": cache} if cache else {})}, 4),
    )
    notes = [
        "queries, keys and values lie side by side for each group of heads, gate and up projections column by column",
        "raysearch.frameworks.jax_layer runs the layer with the collectives that the simulator charges",
    ]
    dropped = [f"pp {strategy.pp}: give each stage a mesh and its layers"] if strategy.pp > 1 else []
    group = shown_group(model)
    if len(model.groups) > 1:
        dropped.append(f"of {len(model.groups)} groups of layers the specs are those of {group.name} alone")
    if not isinstance(group.attention, GroupedAttention) or group.feed_forward.shared_ffn_hidden:
        dropped.append("latent attention, linear mixers and shared experts have no spec")
    return Export("", {"sharding.py": text}, tuple(dropped), tuple(notes))


def spec_text(placements: Mapping[str, Placement], rank: int) -> str:
    """A `PartitionSpec` as Python reads it.

    >>> spec_text({"ep": Shard(0), "tp": Shard(0)}, 2)
    "P(('ep', 'tp'), None)"
    """
    axes = [[name for name, each in placements.items() if each == Shard(dim)] for dim in range(rank)]
    return f"P({', '.join(repr(tuple(each)) if len(each) > 1 else repr((*each, None)[0]) for each in axes)})"
