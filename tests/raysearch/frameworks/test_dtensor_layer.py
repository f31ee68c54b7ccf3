"""A layer through DTensor in four processes over gloo: its numbers, and the collectives that happen."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as TorchShard

from raysearch.errors import InputError
from raysearch.frameworks.dtensor_layer import from_torch_placements, torch_placement
from sim.layers.ops import op_names
from sim.sharding.placement import PARTIAL, REPLICATE, Shard
from tests.raysearch.frameworks.small import DENSE, KNOWN, MOE, charged
from tests.raysearch.frameworks.torch_worker import RANKS

MESHES = ((DENSE, 4, 1), (MOE, 2, 2), (MOE, 4, 1))


def inputs_of(kind: str, degree: int, sent: int) -> tuple[str, int]:
    """(kind, elements of a rank's input) of what it sends."""
    passes = {"all_gather": degree, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}[kind]
    return kind, round(sent * degree / (degree - 1) / passes)


@pytest.mark.slow
def test_known_and_random_strategies_compute_and_send_what_the_simulator_says(tmp_path: Path) -> None:
    cases = [(model, known(model), tp, ep) for model, tp, ep in MESHES for known in KNOWN.values()]
    for seed in range(20):
        model, tp, ep = MESHES[seed % len(MESHES)]
        dims = np.random.default_rng(seed).integers(0, 3, len(op_names(model))).tolist()
        cases.append((model, tuple(dims), tp, ep))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-m", "tests.raysearch.frameworks.torch_worker", str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    found = [answer for rank in range(RANKS) for answer in pickle.loads((tmp_path / f"{rank}").read_bytes())]
    assert len(found) == RANKS * len(cases)
    for number, _, error, sent in found:
        assert error < 1e-3, cases[number]
        assert sent == sorted(inputs_of(*each) for each in charged(*cases[number])), cases[number]


def test_placements_read_each_other() -> None:
    for ours, theirs in ((REPLICATE, Replicate()), (Shard(1), TorchShard(1)), (PARTIAL, Partial())):
        assert torch_placement(ours) == theirs
        assert from_torch_placements([theirs]) == (ours,)
    with pytest.raises(InputError, match="cannot read"):
        from_torch_placements([Partial("max")])
