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
from sim.layers.model import Model
from sim.sharding.placement import PARTIAL, REPLICATE, Shard
from sim.workload import ExpertExchange
from tests.examples.layers.small import (
    DENSE,
    KNOWN,
    MOE,
    OWN_MESHES,
    SOME,
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


def run(model: Model, dims: tuple[int, ...], degrees: Degrees) -> tuple[np.ndarray, Sequence[tuple[str, int, int]]]:
    """The stream after the layer on its devices, and (kind, degree, bytes sent) of its collectives, sorted.

    In float16, for XLA turns bf16 into single precision on CPUs; both have two bytes.
    """
    from examples.layers.jax_layer import collectives_of, sharded_layer

    cut = sharded(model, dims, degrees)
    devices = np.array(jax.devices()[: degrees.ranks]).reshape(tuple(cut.mesh.values()))
    mesh = jax.sharding.Mesh(devices, tuple(cut.mesh))
    given = jax.tree.map(lambda array: array.astype(np.float16), numbers(model))
    layer = sharded_layer(cut, mesh).lower(*given).compile(FAST)
    placed = jax.tree.map(jax.device_put, given, layer.input_shardings[0])
    return np.asarray(layer(*placed)), sorted(collectives_of(layer.as_text()))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def check(elsewhere: Executor, model: Model, dims: tuple[int, ...], degrees: Degrees, *, exact: bool = True) -> None:
    """The layer on several devices gives what it gives on one, by exactly the collectives that are charged."""
    result, sent = elsewhere.submit(run, model, dims, degrees).result()
    np.testing.assert_allclose(result, truth(model, *numbers(model)), atol=0.02)
    if exact:
        assert sent == charged(model, dims, degrees)


MESHES = ((DENSE, Degrees(4, 1)), (MOE, Degrees(2, 2)), (MOE, Degrees(4, 2)), (MOE, Degrees(4, 1)))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("model", "degrees"), [MESHES[0], MESHES[2]])
def test_the_result_and_the_collectives_are_those_of_the_simulator(
    elsewhere: Executor, name: str, model: Model, degrees: Degrees
) -> None:
    check(elsewhere, model, KNOWN[name](model), degrees)


@pytest.mark.parametrize("seed", range(20))
def test_so_they_are_for_random_strategies(elsewhere: Executor, seed: int) -> None:
    model, degrees = MESHES[seed % 4]
    check(elsewhere, model, random_dims(model, seed), degrees)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("degrees", OWN_MESHES)
def test_attention_and_experts_on_meshes_of_their_own_send_what_is_charged(
    elsewhere: Executor, degrees: Degrees, exchange: ExpertExchange
) -> None:
    for model in (MOE, SOME) if exchange == "all_gather" else (MOE,):
        check(elsewhere, model, KNOWN["megatron"](model), degrees._replace(exchange=exchange))


@pytest.mark.parametrize("seed", range(8))
def test_so_do_random_strategies_of_them(elsewhere: Executor, seed: int) -> None:
    exchange: ExpertExchange = "all_gather" if seed % 2 else "all_to_all"
    degrees = OWN_MESHES[seed // 2]._replace(exchange=exchange)
    check(elsewhere, MOE, random_dims(MOE, seed, degrees), degrees)


def test_tokens_that_visit_some_experts_are_right_though_more_is_sent(elsewhere: Executor) -> None:
    check(elsewhere, SOME, KNOWN["megatron_sp"](MOE), Degrees(2, 2), exact=False)


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
    sharded_layer(sharded(DENSE, KNOWN["megatron"](DENSE), Degrees(4, 1)), mesh)


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
