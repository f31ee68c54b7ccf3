"""A layer in JAX on eight host devices: its numbers, and the collectives that XLA compiled.

JAX has devices in a process of its own: its threads do not survive a fork, by which other tests' Ray starts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from raysearch.base.errors import InputError
from raysearch.deploy.layers.sharded_layer import Slots
from sim.layers.model import Model
from sim.ops.heuristics import megatron_dims
from sim.ops.layers import op_names
from sim.sharding.placement import PARTIAL, REPLICATE, Shard
from sim.workload import ExpertExchange
from tests.examples.layers.small import (
    BLOCK,
    DENSE,
    KNOWN,
    LATENT,
    MOE,
    OWN_MESHES,
    Degrees,
    charged,
    numbers,
    random_dims,
    sharded,
    truth,
)

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
jax.config.update("jax_num_cpu_devices", 8)

pytestmark = pytest.mark.slow

FAST = {"xla_backend_optimization_level": "0"}
"""Machine code that need not be fast; the HLO, with its collectives, is what it is."""


def run(
    model: Model, dims: tuple[int, ...], degrees: Degrees, capacity_factor: float = 1.0, whole: Any = None
) -> tuple[np.ndarray, Sequence[tuple[str, int, int]]]:
    """The stream after the layer on its devices, and (kind, degree, bytes sent) of its collectives, sorted.

    In float16, for XLA turns bf16 into single precision on CPUs; both have two bytes.
    """
    from examples.layers.jax_layer import collectives_of, sharded_layer

    cut = sharded(model, dims, degrees)
    devices = np.array(jax.devices()[: degrees.ranks]).reshape(tuple(cut.mesh.values()))
    mesh = jax.sharding.Mesh(devices, tuple(cut.mesh))
    given = jax.tree.map(lambda array: array.astype(np.float16), whole or numbers(model))
    layer = sharded_layer(cut, mesh, Slots.of(model, BLOCK, capacity_factor)).lower(*given).compile(FAST)
    placed = jax.tree.map(jax.device_put, given, layer.input_shardings[0])
    return np.asarray(layer(*placed)), sorted(collectives_of(layer.as_text()))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def check(elsewhere: Executor, model: Model, dims: tuple[int, ...], degrees: Degrees) -> None:
    """The layer on several devices gives what it gives on one, by exactly the collectives that are charged."""
    result, sent = elsewhere.submit(run, model, dims, degrees).result()
    np.testing.assert_allclose(result, truth(model, *numbers(model)), atol=0.02)
    assert sent == charged(model, dims, degrees)


MESHES = ((DENSE, Degrees(4, 1)), (MOE, Degrees(2, 2)), (MOE, Degrees(4, 2)), (MOE, Degrees(4, 1)))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("model", "degrees"), [MESHES[0], MESHES[2]])
def test_the_result_and_the_collectives_are_those_of_the_simulator(
    elsewhere: Executor, name: str, model: Model, degrees: Degrees
) -> None:
    check(elsewhere, model, KNOWN[name](model), degrees)


@pytest.mark.parametrize("seed", range(4))
def test_so_they_are_for_random_strategies(elsewhere: Executor, seed: int) -> None:
    model, degrees = MESHES[seed]
    check(elsewhere, model, random_dims(model, seed), degrees)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("degrees", OWN_MESHES)
def test_attention_and_experts_on_meshes_of_their_own_send_what_is_charged(
    elsewhere: Executor, degrees: Degrees, exchange: ExpertExchange
) -> None:
    check(elsewhere, MOE, KNOWN["megatron"](MOE), degrees._replace(exchange=exchange))


@pytest.mark.parametrize(("seed", "own"), [(0, 0), (3, 1), (4, 2), (15, 3)])
def test_so_do_random_strategies_of_them(elsewhere: Executor, seed: int, own: int) -> None:
    exchange: ExpertExchange = "all_gather" if seed % 2 else "all_to_all"
    degrees = OWN_MESHES[own]._replace(exchange=exchange)
    check(elsewhere, MOE, random_dims(MOE, seed, degrees), degrees)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("degrees", [Degrees(4, 2), Degrees(1, 4), Degrees(4, 4, 1)])
def test_so_do_latent_attention_and_shared_experts(
    elsewhere: Executor, degrees: Degrees, exchange: ExpertExchange
) -> None:
    dims = KNOWN["megatron_sp" if degrees == (4, 2) and exchange == "all_to_all" else "megatron"](LATENT)
    check(elsewhere, LATENT, dims, degrees._replace(exchange=exchange))


def test_choices_that_would_need_a_collective_that_nobody_charges_are_refused_by_name() -> None:
    for names, match in (
        ({"qkv_proj": 1, "attention": 0}, "expected qkv_proj on q with attention on h"),
        ({"dispatch": 1}, "shared experts read what dispatch reads"),
    ):
        dims = [names.get(name, choice) for name, choice in zip(op_names(LATENT), megatron_dims(LATENT), strict=True)]
        with pytest.raises(InputError, match=match):
            sharded(LATENT, tuple(dims), Degrees(4, 2))
    degrees = OWN_MESHES[3]._replace(exchange="all_gather")
    with pytest.raises(InputError, match="both to shard tokens or neither"):
        sharded(MOE, random_dims(MOE, 7, degrees), degrees)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_experts_that_are_picked_by_more_tokens_than_they_have_slots_leave_nan_unless_they_get_more(
    elsewhere: Executor, exchange: ExpertExchange
) -> None:
    dims, degrees = KNOWN["megatron"](MOE), Degrees(2, 2, exchange=exchange)
    wanted = truth(MOE, *uneven())
    full, _ = elsewhere.submit(run, MOE, dims, degrees, 1.0, uneven()).result()
    assert 0 < np.isnan(full).any(1).sum() < len(full)
    enough, sent = elsewhere.submit(run, MOE, dims, degrees, 2.0, uneven()).result()
    np.testing.assert_allclose(enough, wanted, atol=0.02)
    assert sent != charged(MOE, dims, degrees) or exchange == "all_gather"


def uneven() -> tuple[dict[str, Any], tuple[Any, Any], Any]:
    """Numbers of which the first block's tokens all pick the first two experts."""
    weights, cache, stream = numbers(MOE)
    stream[:BLOCK, :4] = [1, 0.5, 0, 0]
    return weights, cache, stream


def test_specs_and_placements_read_each_other() -> None:
    from jax.sharding import PartitionSpec

    from examples.layers.jax_layer import from_partition_spec, partition_spec

    for ep in (REPLICATE, Shard(0), Shard(1)):
        for tp in (REPLICATE, Shard(0), Shard(1)):
            placements = {"ep": ep, "tp": tp}
            assert from_partition_spec(partition_spec(placements, 2), ("ep", "tp")) == placements
    assert partition_spec({"ep": Shard(0), "tp": Shard(0)}, 2) == PartitionSpec(("ep", "tp"), None)
    with pytest.raises(InputError, match="cannot say"):
        partition_spec({"tp": PARTIAL}, 2)
    with pytest.raises(InputError, match="mesh has ep, tp"):
        from_partition_spec(PartitionSpec("dp"), ("ep", "tp"))
    with pytest.raises(InputError, match="inner axis first"):
        from_partition_spec(PartitionSpec(("tp", "ep")), ("ep", "tp"))


def test_another_mesh_is_refused(elsewhere: Executor) -> None:
    with pytest.raises(InputError, match="expected a mesh"):
        elsewhere.submit(shard_over_others).result()


def shard_over_others() -> None:
    from examples.layers.jax_layer import sharded_layer

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("ep", "tp"))
    sharded_layer(sharded(DENSE, KNOWN["megatron"](DENSE), Degrees(4, 1)), mesh, Slots.of(DENSE, BLOCK))


def test_every_weight_has_a_spec_that_divides_it() -> None:
    from examples.layers.jax_layer import weight_specs

    specs: dict[str, Any] = weight_specs(sharded(MOE, KNOWN["megatron"](MOE), Degrees(4, 2)))
    assert {name: tuple(spec) for name, spec in specs.items()} == {
        "attn_norm": (None,),
        "qkv_proj": (None, "tp"),
        "o_proj": ("tp", None),
        "ffn_norm": (None,),
        "ffn1": ("ep", None, "tp"),
        "ffn2": ("ep", "tp", None),
        "router": (None, None),
    }


def test_the_exported_file_holds_the_same_specs(elsewhere: Executor) -> None:
    from examples.layers.jax_layer import cache_spec, stream_spec, weight_specs
    from raysearch.deploy.export.deployment import Deployment
    from raysearch.deploy.export.jax import export
    from raysearch.deploy.layers.sharded_layer import sharded_layer_of
    from sim.strategy import Strategy
    from tests.questions import question_about

    workload = question_about("mixtral_8x7b", isl=1024, osl=256, gpus=8).load()
    dims = KNOWN["ffn2_on_hidden"](workload.model)
    source = export(Deployment(workload, Strategy(4, 2, 1, 64, dims), "org/model")).files["sharding.py"]
    exported: dict[str, Any] = {}
    exec(source, exported)
    cut = sharded_layer_of(workload, Strategy(4, 2, 1, 64, dims))
    assert exported["WEIGHTS"] == weight_specs(cut)
    assert (exported["STREAM"], exported["CACHE"]) == (stream_spec(cut), cache_spec(cut))
    assert elsewhere.submit(shape_of_mesh, source).result() == {"ep": 2, "tp": 4}
    with pytest.raises(InputError, match="--to jax: expected cp 1"):
        export(Deployment(workload, Strategy(4, 2, 1, 64, dims, cp=2), "org/model"))


def shape_of_mesh(source: str) -> dict[str, int]:
    exported: dict[str, Any] = {}
    exec(source, exported)
    return dict(exported["mesh"]().shape)
