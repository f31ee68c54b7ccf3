"""Exported plans in four processes over gloo: the numbers of the layer, and the collectives that happen."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as TorchShard

from examples.layers.dtensor_placements import from_torch_placements, torch_placement
from raysearch.base.errors import InputError
from raysearch.deploy.export.cut import cut_of, with_ops
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.dtensor import export
from raysearch.deploy.layers import styles
from raysearch.deploy.layers.sharded_layer import choices_of_weights, weight_shapes
from sim.layers.model import Model
from sim.sharding.placement import PARTIAL, REPLICATE, Shard
from sim.workload import ExpertExchange
from tests.examples.layers.small import (
    DENSE,
    KNOWN,
    LATENT,
    MOE,
    OWN_MESHES,
    Degrees,
    charged,
    random_dims,
    strategy_of,
    workload_of,
)
from tests.examples.layers.torch_worker import RANKS, Answer, Case
from tests.processes import LONGEST_S

pytestmark = pytest.mark.slow

MESHES = ((DENSE, Degrees(4, 1)), (MOE, Degrees(2, 2)), (MOE, Degrees(4, 1)))
EXCHANGES: tuple[ExpertExchange, ...] = ("all_to_all", "all_gather")
Choices = tuple[Model, tuple[int, ...], Degrees]


def deployment(model: Model, dims: tuple[int, ...], degrees: Degrees) -> Deployment:
    return Deployment(workload_of(model, degrees), strategy_of(dims, degrees), "org/model")


def inputs_of(kind: str, degree: int, sent: int) -> tuple[str, int]:
    """(kind, bytes of a rank's input) of what it sends."""
    passes = {"all_gather": degree, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}[kind]
    return kind, round(sent * degree / (degree - 1) / passes)


def some_choices() -> list[Choices]:
    """Known strategies, each of a few ops alone, and random ones."""
    known = [(model, choose(model), degrees) for model, degrees in MESHES for choose in KNOWN.values()]
    some = [["qkv_proj", "attention", "o_proj"], ["ffn1"], ["router", "dispatch"], ["ffn2", "combine"]]
    whole = deployment(MOE, KNOWN["megatron_sp"](MOE), Degrees(2, 2))
    parts = [(MOE, with_ops(whole, names).strategy.dims, Degrees(2, 2)) for names in some]
    own = [
        (MOE, KNOWN["megatron"](MOE), degrees._replace(exchange=exchange))
        for degrees in (*OWN_MESHES, Degrees(1, 4), Degrees(2, 2))
        for exchange in EXCHANGES
    ]
    drawn: list[Choices] = []
    for seed in range(9):
        model, degrees = MESHES[seed % len(MESHES)]
        drawn.append((model, random_dims(model, seed), degrees))
    for seed, degrees, exchange in zip((0, 4, 2, 3), OWN_MESHES, 2 * EXCHANGES, strict=True):
        degrees = degrees._replace(exchange=exchange)
        drawn.append((MOE, random_dims(MOE, seed, degrees), degrees))
    latent = [(LATENT, choose(LATENT), degrees) for choose, degrees in latents()]
    return known + parts + own + drawn + latent


def latents() -> list[tuple[Callable[[Model], tuple[int, ...]], Degrees]]:
    """TP4, TP2 in each of two groups, DEP4, TEP4, and tokens sharded over tp."""
    megatron, by_tokens = KNOWN["megatron"], KNOWN["megatron_sp"]
    whole = [(megatron, each) for each in (Degrees(4, 1), Degrees(2, 2), Degrees(1, 4), Degrees(4, 4, 1))]
    gathered = [(choose, degrees._replace(exchange="all_gather")) for choose, degrees in whole[1:]]
    return whole + gathered + [(by_tokens, Degrees(2, 2))]


def test_exported_plans_compute_the_layer_and_send_what_the_simulator_charges(tmp_path: Path) -> None:
    choices = some_choices()
    exports = [export(deployment(*each)) for each in choices]
    cases = [Case(each[0], made.files["sharding.py"]) for each, made in zip(choices, exports, strict=True)]
    cases += [case._replace(dtype="float32") for case in cases[: len(KNOWN) + 1]]  # one model of each kind
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    (tmp_path / "styles.py").write_text(exports[0].files["styles.py"])
    command = [sys.executable, "-m", "tests.examples.layers.torch_worker", str(tmp_path)]
    subprocess.run(command, check=True, timeout=LONGEST_S)
    found = [Answer(*answer) for rank in range(RANKS) for answer in pickle.loads((tmp_path / f"{rank}").read_bytes())]
    assert len(found) == RANKS * len(cases)
    for answer in found:
        case, chosen = cases[answer.case], choices[answer.case % len(choices)]
        wanted = sorted(inputs_of(*each) for each in charged(*chosen))
        assert answer.error < {"float32": 1e-5, "bfloat16": 0.05}[case.dtype], chosen
        assert answer.counted == len(wanted)
        assert answer.inputs == wanted or case.dtype == "float32", chosen


def exported(chosen: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "styles", styles)
        exec(export(chosen).files["sharding.py"], found)
    return found


def test_the_plan_of_megatron_shards_columns_then_rows_and_sums_twice() -> None:
    plan = exported(deployment(DENSE, KNOWN["megatron"](DENSE), Degrees(4, 1)))["plan"]("blocks.*.")
    shard, whole, parts = (TorchShard(0), TorchShard(1)), (TorchShard(0), Replicate()), (TorchShard(0), Partial())
    assert {path.removeprefix("blocks.*."): (style.gives, style.leaves) for path, style in plan.items()} == {
        **dict.fromkeys(("qkv_proj", "attention", "ffn1", "activation"), (shard, shard)),
        **dict.fromkeys(("o_proj", "ffn2"), (parts, whole)),
    }
    assert plan["blocks.*.ffn1"].weight == (Replicate(), TorchShard(0))  # columns out come first in PyTorch
    assert plan["blocks.*.ffn2"].weight == (Replicate(), TorchShard(1))


def test_ops_that_are_not_named_stay_whole() -> None:
    chosen = deployment(MOE, KNOWN["megatron_sp"](MOE), Degrees(2, 1))
    assert [*exported(with_ops(chosen, ["ffn1"]))["PLAN"]] == ["ffn1"]
    assert exported(with_ops(chosen, []))["PLAN"] == {}
    over_ep = deployment(MOE, KNOWN["megatron_sp"](MOE), Degrees(2, 2))
    assert [*exported(with_ops(over_ep, []))["PLAN"]] == ["dispatch", "ffn1", "ffn2", "shares", "weigh"]
    with pytest.raises(InputError, match="did you mean 'o_proj'"):
        with_ops(chosen, ["oproj"])


def test_ranks_that_share_a_context_have_no_plan() -> None:
    chosen = deployment(DENSE, KNOWN["megatron"](DENSE), Degrees(4, 1))
    with pytest.raises(InputError, match="--to dtensor: expected cp 1"):
        export(replace(chosen, strategy=replace(chosen.strategy, cp=2)))


def test_a_stream_that_the_other_mesh_reads_in_two_shards_has_no_plan() -> None:
    degrees = OWN_MESHES[1]
    with pytest.raises(InputError, match="attn_norm and attn_residual read residual_in in two shards"):
        export(deployment(MOE, random_dims(MOE, 1, degrees), degrees))


def test_a_plan_of_weights_reads_in_as_the_choices_that_have_it() -> None:
    for model, degrees in MESHES:
        for choose in KNOWN.values():
            cut = cut_of(deployment(model, choose(model), degrees), "dtensor")
            placements = {name: cut.weight_placement(name) for name in weight_shapes(model)}
            found = choices_of_weights(model, placements)
            assert all(cut.choices[name] in choices for name, choices in found.items())
            assert [found[name] for name in ("qkv_proj", "ffn2")] == [(1,), (cut.choices["ffn2"],)]
            assert found["attention"] == (0, 1, 2)  # it has no weight
    with pytest.raises(InputError, match="did you mean 'qkv_proj'"):
        choices_of_weights(DENSE, {"qkv": Shard(1)})
    with pytest.raises(InputError, match="ffn1: expected its weight under one of R, S"):
        choices_of_weights(DENSE, {"ffn1": Shard(7)})


def test_placements_read_each_other() -> None:
    for ours, theirs in ((REPLICATE, Replicate()), (Shard(1), TorchShard(1)), (PARTIAL, Partial())):
        assert torch_placement(ours) == theirs
        assert from_torch_placements([theirs]) == (ours,)
    with pytest.raises(InputError, match="cannot read"):
        from_torch_placements([Partial("max")])
