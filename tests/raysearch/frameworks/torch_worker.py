"""One of four processes that run layers through DTensor over gloo, and note the collectives that happen."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from raysearch.frameworks.dtensor_layer import layer_of_rank
from sim.sharding.placement import REPLICATE, Placement, Shard
from tests.raysearch.frameworks.small import numbers, sharded, truth

RANKS = 4
_KINDS = {
    "all_gather_into_tensor": ("all_gather", RANKS),
    "all_reduce": ("all_reduce", 2),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
}
"""Operator -> kind; each rank sends (degree - 1) / degree of its input so often, and of what it gathers, its input."""


class Noting(TorchDispatchMode):
    """Notes (kind, elements of the input) of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func._schema.name.startswith("_c10d_functional") and name in _KINDS:
            self.found.append((_KINDS[name][0], args[0].numel()))
        return func(*args, **(kwargs or {}))


def piece(array: Any, placements: dict[str, Placement], place: dict[str, tuple[int, int]]) -> torch.Tensor:
    """This rank's piece of a numpy array, outer axes first."""
    for axis, placement in placements.items():
        index, count = place[axis]
        if isinstance(placement, Shard):
            array = np.split(array, count, placement.dim)[index]
    return torch.from_numpy(np.ascontiguousarray(array))


def work(rank: int, folder: Path) -> None:
    """Runs the folder's cases (model, dims, tp, ep); writes (case, rank, largest error, collectives) of each."""
    cases, answers, store = pickle.loads((folder / "cases").read_bytes()), [], folder / "store"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for number, (model, dims, tp, ep) in enumerate(cases):
        mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
        cut, (weights, cache, stream) = sharded(model, dims, tp, ep), numbers(model)
        place = {"ep": (rank // tp, ep), "tp": (rank % tp, tp)}
        experts = ("ffn1", "ffn2") if model.is_moe else ()
        own = {
            name: piece(w, {"ep": Shard(0) if name in experts else REPLICATE, "tp": cut.weight_placement(name)}, place)
            for name, w in weights.items()
        }
        over_tp = {"t": Shard(0), "h": Shard(2)}.get(cut.label("attention"), REPLICATE)
        keys, values = (piece(each, {"ep": Shard(0), "tp": over_tp}, place) for each in cache)
        mine = {"ep": Shard(0), "tp": cut.stream}
        with Noting() as noting:
            result = layer_of_rank(cut, mesh, own, (keys, values), piece(stream, mine, place))
        wanted = piece(truth(model, weights, cache, stream), mine, place)
        answers.append((number, rank, float((result - wanted).abs().max()), sorted(noting.found)))
    dist.barrier()
    dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps(answers))


if __name__ == "__main__":  # forks, since four imports of torch take longer than all cases
    ranks = [
        multiprocessing.get_context("fork").Process(target=work, args=(r, Path(sys.argv[1]))) for r in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(abs(each.exitcode or 0) for each in ranks))
