"""Prints, as JSON, the sharding rules that torch.distributed.tensor has for some operations on one mesh axis.

A process of its own, because asking takes a process group. A rule is written as ours are: "S(1), S(0) -> P(sum)".
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten
X, Y = torch.ones(15, 21), torch.ones(21, 6)
ASKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "matmul": (aten.mm.default, (X, Y)),
    "add": (aten.add.Tensor, (X, X)),
    "multiply": (aten.mul.Tensor, (X, X)),
    "negate": (aten.neg.default, (X,)),
    "relu": (aten.relu.default, (X,)),
    "softmax": (aten._softmax.default, (X, -1, False)),
}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    print(json.dumps({name: sorted(rules(op, args, mesh)) for name, (op, args) in ASKED.items()}))
    dist.destroy_process_group()


def rules(op: Any, args: tuple[Any, ...], mesh: Any) -> set[str]:
    """Rules in either of the two forms in which the propagator keeps them."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if op in propagator.op_single_dim_strategy_funcs:
        found = propagator.op_single_dim_strategy_funcs[op](op, tuple(map(meta, args)), {})
        return {written(row[1 : len(tensors) + 1], row[0]) for row in found}
    schema = OpSchema(op, tuple(every_placement(arg, mesh) for arg in args), {})
    found = propagator.op_strategy_funcs[op](schema).strategies
    return {written([spec.placements[0] for spec in one.input_specs], one.output_spec.placements[0]) for one in found}


def meta(arg: Any) -> Any:
    return TensorMeta(arg.shape, arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg


def every_placement(arg: Any, mesh: Any) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    parts = [Partial(kind) for kind in ("sum", "avg", "max", "min")]
    placements = [Replicate(), Shard(0), Shard(1), *parts]
    return OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), meta(arg))) for placement in placements])


def written(inputs: Any, output: Any) -> str:
    return f"{', '.join(map(text, inputs))} -> {text(output)}"


def text(placement: Any) -> str:
    """The placement, or the placeholder that stands for a shard of any kind."""
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return f"S({placement.dim})" if hasattr(placement, "dim") else "R"


if __name__ == "__main__":
    main()
