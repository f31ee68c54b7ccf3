"""One of four processes that run exported plans over gloo, and note the collectives that happen."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from examples.layers.torch_layer import TorchLayer
from raysearch.deploy.layers.sharded_layer import Slots
from raysearch.deploy.layers.styles import whole
from sim.layers.model import Model
from tests.examples.layers.small import BLOCK, numbers, truth

RANKS = 4
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Case(NamedTuple):
    """An exported plan of a model's layer."""

    model: Model
    source: str
    dtype: str = "bfloat16"


class Answer(NamedTuple):
    """What a rank found.

    Attributes:
        error: Largest difference to plain numpy in double precision.
        counted: Collectives that CommDebugMode counts.
        inputs: (kind, bytes of a rank's input) of each, sorted.
    """

    case: int
    error: float
    counted: int
    inputs: list[tuple[str, int]]


class Noting(CommDebugMode):
    """Notes the bytes of each collective's input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if func._schema.name.startswith("_c10d_functional") and name in _KINDS and DTensor not in types:
            self.inputs.append((_KINDS[name], args[0].nbytes))
        return super().__torch_dispatch__(func, types, args, kwargs)


def run(case: Case) -> tuple[float, Noting]:
    """The largest error of the layer under the plan, and what was sent."""
    (weights, cache, stream), dtype = numbers(case.model), getattr(torch, case.dtype)
    exported: dict[str, Any] = {}
    exec(case.source, exported)
    mesh = exported["mesh"]("cpu")

    def placed(array: Any, placements: Any) -> torch.Tensor:
        made = distribute_tensor(torch.from_numpy(array).to(dtype), mesh, placements, src_data_rank=None)
        return made.to_local() if placements == whole(mesh) else made

    layer = TorchLayer(case.model, Slots.of(case.model, BLOCK))
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    layer.load({name: torch.from_numpy(weight).to(dtype) for name, weight in weights.items()})
    parallelize_module(layers, mesh, exported["plan"](), src_data_rank=None)
    given = [placed(stream, exported["STREAM"]), *(placed(each, exported["CACHE"]) for each in cache)]
    with torch.no_grad(), Noting() as noting:
        result = layer(*given)
    wanted = distribute_tensor(
        torch.from_numpy(truth(case.model, weights, cache, stream)), mesh, exported["STREAM"], src_data_rank=None
    )
    own = result.to_local() if isinstance(result, DTensor) else result
    return float((own.double() - wanted.to_local()).abs().max()), noting


def work(rank: int, folder: Path) -> None:
    """Runs the folder's cases; writes an `Answer` to each."""
    cases, answers = pickle.loads((folder / "cases").read_bytes()), []
    sys.path.insert(0, str(folder))  # where the exported styles.py is
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    for number, case in enumerate(cases):
        error, noting = run(case)
        answers.append(Answer(number, error, noting.get_total_counts(), sorted(noting.inputs)))
    dist.barrier()
    dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps([tuple(answer) for answer in answers]))


if __name__ == "__main__":  # forks, since four imports of torch take longer than all cases
    ranks = [
        multiprocessing.get_context("fork").Process(target=work, args=(r, Path(sys.argv[1]))) for r in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(abs(each.exitcode or 0) for each in ranks))
