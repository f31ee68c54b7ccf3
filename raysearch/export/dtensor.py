"""A strategy as PyTorch reads it: a mesh and a plan that `parallelize_module` takes, with the styles that it needs.

The plan's modules are those of `raysearch.frameworks.torch_layer`, whose collectives under it are those that the
simulator charges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raysearch.export.cut import ORDER_NOTE, cut_of, left_out, told_in_file
from raysearch.export.deployment import Deployment, Export
from raysearch.frameworks.layer import Sharded
from raysearch.frameworks.plan import Lay, OpPlan, cache_lay, layer_plan, stream_lay
from sim.layers.mixers import GroupedAttention
from sim.sharding.placement import PARTIAL, REPLICATE
from sim.simulate import evaluate

_TEXT = '''"""Shardings of {name}, tp {tp} x ep {ep}, for PyTorch: one layer's, alike in all.

    parallelize_module(model, mesh(), plan())

A module that is not in PLAN stays as it is. Rename those that your model calls otherwise.{left}
"""

from styles import OpParallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

EP, TP = {ep}, {tp}
P, R, S = Partial(), Replicate(), Shard
PLAN = {{  # placements over ep and tp
{plan}
}}
STREAM = {stream}  # [tokens, hidden], between layers
CACHE = {cache}
{charged}


def mesh(device: str = "cuda") -> DeviceMesh:
    return init_device_mesh(device, (EP, TP), mesh_dim_names=("ep", "tp"))


def plan(layers: str = "layers.*.") -> dict[str, OpParallel]:
    return {{layers + path: style for path, style in PLAN.items()}}
'''


def export(deployment: Deployment) -> Export:
    """sharding.py for one pipeline stage of one replica, and styles.py, which it imports.

    Raises:
        InputError: A strategy beyond the joint space.
    """
    cut = cut_of(deployment, "dtensor")
    text = _TEXT.format(
        name=cut.model.name,
        tp=cut.tp,
        ep=cut.ep,
        left=told_in_file(deployment),
        plan="\n".join(f'    "{path}": {style_text(plan)},' for path, plan in layer_plan(cut).items()),
        stream=lay_text(stream_lay(cut)),
        cache=_cache_text(cut),
        charged="\n".join(_charged(deployment)),
    )
    styles = Path(__file__).parents[1] / "frameworks" / "styles.py"
    notes = (ORDER_NOTE, "tokens are each ep rank's own; raysearch.frameworks.torch_layer has the modules of the plan")
    files = {"sharding.py": text, "styles.py": styles.read_text(encoding="utf-8")}
    return Export("", files, left_out(deployment), notes)


def _cache_text(cut: Sharded) -> str:
    if not isinstance(cut.group.attention, GroupedAttention):
        return "None  # it has no heads: left out"
    return f"{lay_text(cache_lay(cut))}  # keys and values: [sequences, context, kv heads, head dim]"


def style_text(plan: OpPlan) -> str:
    """The `OpParallel` of a module as Python reads it.

    >>> from sim.sharding.placement import Shard
    >>> style_text(OpPlan(((Shard(0), REPLICATE),), (Shard(0), Shard(1)), (Shard(0), Shard(1)), (REPLICATE, Shard(0))))
    'OpParallel(reads=[(S(0), R)], weight=(R, S(0)), gives=(S(0), S(1)))'
    """
    said = [f"reads=[{', '.join(map(lay_text, plan.reads))}]"]
    said += [f"weight={lay_text(plan.weight)}"] if plan.weight else []
    said += [f"gives={lay_text(plan.gives)}"]
    said += [f"leaves={lay_text(plan.leaves)}"] if plan.leaves != plan.gives else []
    return f"OpParallel({', '.join(said + ['local=True'] * plan.local)})"


def lay_text(lay: Lay) -> str:
    """Placements over ep and tp as the exported file writes them."""
    return f"({', '.join({REPLICATE: 'R', PARTIAL: 'P'}.get(each, str(each)) for each in lay)})"


def _charged(deployment: Deployment) -> Sequence[str]:
    """Comments that say which collectives to expect."""
    found = [
        f"#   {c.kind} of {c.tensor}, {c.degree} GPUs: {c.bytes_per_device:,.0f} bytes"
        for op in evaluate(deployment.workload, deployment.strategy).ops
        for c in op.collectives
    ]
    return ["# Sent by each GPU in a layer, as the simulator charges it:", *found] if found else []
