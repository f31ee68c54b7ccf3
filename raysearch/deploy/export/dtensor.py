"""A strategy as PyTorch reads it: a mesh and a plan that `parallelize_module` takes, with the styles that it needs.

The plan's modules are those of `examples.layers.torch_layer`, whose collectives under it are those that the
simulator charges.
"""

from __future__ import annotations

from pathlib import Path

from raysearch.deploy.export.cut import cut_of, left_out, notes_of
from raysearch.deploy.export.deployment import Deployment, Export
from raysearch.deploy.export.render import Call, SourceName, python_text
from raysearch.deploy.layers.layer_plan import Lay, OpPlan, cache_lay, layer_plan, stream_lay
from raysearch.deploy.layers.sharded_layer import cache_shape
from sim.config.catalog import as_configurable
from sim.sharding.placement import PARTIAL, REPLICATE
from sim.simulate import evaluate

_HEAD = '''
"""Shardings over the GPUs of MESH of one layer of MODEL, for PyTorch; all layers are alike.

    parallelize_module(model, mesh(), plan())

A module that is not in PLAN stays as it is. Rename those that your model calls otherwise. Placements are over the axes
of MESH, or of the same GPUs in the shape that a module states, where experts have a mesh of their own: STREAM those of
[tokens, hidden] between layers, CACHE those of keys and values, [sequences, context, kv heads, head dim], or of
latents, [sequences, context, width], or None where there is none. LEFT_OUT is what they do not say of the model,
CHARGED what each GPU sends in a layer, as the simulator charges it.
"""

from styles import OpParallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

P, R, S = Partial(), Replicate(), Shard
'''
_TAIL = """
def mesh(device: str = "cuda") -> DeviceMesh:
    return init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def plan(layers: str = "layers.*.") -> dict[str, OpParallel]:
    return {layers + path: style for path, style in PLAN.items()}
"""


def export(deployment: Deployment) -> Export:
    """sharding.py for one pipeline stage of one replica, and styles.py, which it imports.

    Raises:
        InputError: A strategy beyond the joint space.
    """
    cut, missing = cut_of(deployment, "dtensor"), left_out(deployment)
    constants = {
        "MODEL": cut.model.name,
        **cut.degrees,
        "MESH": {"dp": cut.attention_dp, "tp": cut.tp} if cut.extended else dict(cut.mesh),
        "PLAN": {path: style(plan) for path, plan in layer_plan(cut).items()},
        "STREAM": placements(stream_lay(cut)),
        "CACHE": placements(cache_lay(cut)) if cache_shape(cut.model) else None,
        "LEFT_OUT": missing,
        "CHARGED": _charged(deployment),
    }
    styles = Path(__file__).parents[1] / "layers" / "styles.py"
    files = {"sharding.py": python_text(_HEAD, constants, _TAIL), "styles.py": styles.read_text(encoding="utf-8")}
    rows = "dp" if cut.extended else "ep"
    notes = (
        *notes_of(deployment),
        f"tokens are each {rows} rank's own; examples.layers.torch_layer has the modules of the plan",
    )
    return Export(None, files, missing, notes)


def style(plan: OpPlan) -> Call:
    """The `OpParallel` of a module as Python reads it.

    >>> from sim.sharding.placement import Shard
    >>> style(OpPlan(((Shard(0), REPLICATE),), (Shard(0), Shard(1)), (Shard(0), Shard(1)), (REPLICATE, Shard(0))))
    OpParallel(reads=[(S(0), R)], weight=(R, S(0)), gives=(S(0), S(1)))
    """
    named: dict[str, object] = {"reads": [placements(lay) for lay in plan.reads]}
    named |= {"weight": placements(plan.weight)} if plan.weight else {}
    named |= {"gives": placements(plan.gives)}
    named |= {"leaves": placements(plan.leaves)} if plan.leaves != plan.gives or plan.hops else {}
    named |= {"local": True} if plan.local else {}
    named |= {"shape": plan.shape} if plan.shape else {}
    if plan.hops:
        named["hops"] = [(shape, placements(source), placements(target)) for shape, source, target in plan.hops]
        named["leaves_shape"] = plan.leaves_shape
    return Call("OpParallel", (), named)


def placements(lay: Lay) -> tuple[object, ...]:
    """Placements over ep and tp as the exported file writes them."""
    return tuple(
        {REPLICATE: SourceName("R"), PARTIAL: SourceName("P")}.get(each) or Call(each.code, each.dims) for each in lay
    )


def _charged(deployment: Deployment) -> tuple[str, ...]:
    """Which collectives to expect."""
    return tuple(
        f"{c.kind} of {c.tensor}, {c.degree} GPUs: {c.bytes_per_device:,.0f} bytes"
        for op in evaluate(as_configurable(deployment.workload, None), deployment.strategy).ops
        for c in op.collectives
    )
