"""Shardings spread along a layer's tensors from what is given."""

from pathlib import Path

import numpy as np
import pytest

from sim.config.catalog import load_workload
from sim.layers.choices import rule
from sim.ops.dims import dims_of
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import layer_of
from sim.ops.propagation import GIVEN, UNREACHED, megatron_weights, propagated
from sim.strategy import NONE, TOKENS

WORKLOADS = sorted(path.stem for path in Path("configs/workloads").glob("*.toml"))
MOE = load_workload("gpt_moe_1_2t_16k")
NAMES = [dim.name for dim in dims_of(MOE)]


def given(**choices: int) -> tuple[int | None, ...]:
    return tuple(choices.get(name) for name in NAMES)


@pytest.mark.parametrize("name", WORKLOADS)
def test_megatrons_gemms_lead_to_megatrons_layer(name: str) -> None:
    workload = load_workload(name)
    found = propagated(workload, megatron_weights(workload))
    assert found.dims == tuple(dim.op.megatron.plain for dim in dims_of(workload))
    assert not found.conflicts


def test_one_norm_over_tokens_leads_to_sequence_parallelism() -> None:
    found = propagated(MOE, given(attn_norm=0, qkv_proj=1, o_proj=0, ffn1=1, ffn2=0))
    assert found.dims == megatron_sp_dims(MOE.model)


def test_what_is_whole_says_nothing() -> None:
    found = propagated(MOE, given())
    assert found.dims == (NONE,) * len(NAMES)
    assert set(found.origins) == {UNREACHED}


def test_shardings_spread_in_both_directions() -> None:
    """By hand: from attention over heads forward into the projection out of it, and backward into the one before."""
    found = propagated(MOE, given(attention=1))
    by_name = dict(zip(NAMES, zip(found.dims, found.origins, strict=True), strict=True))
    assert by_name["qkv_proj"] == (1, "backward from attention")
    assert by_name["o_proj"] == (0, "forward from attention")
    assert by_name["attn_norm"] == (NONE, UNREACHED)


def test_neighbours_that_want_different_things_are_a_conflict_and_the_earlier_has_its_way() -> None:
    workload = load_workload("gpt_moe_1_2t_16k", space="extended")
    tables = tuple(dim.choices for dim in dims_of(workload))
    found = propagated(workload, given(qkv_proj=1, o_proj=TOKENS), tables)
    assert found.dims[NAMES.index("attention")] == 1
    assert found.conflicts == ("attention: forward from qkv_proj and backward from o_proj want different shardings",)


def test_what_is_given_stays_and_what_is_propagated_moves_nothing_to_who_it_came_from() -> None:
    rng, layer = np.random.default_rng(0), layer_of(MOE.model.groups[0])
    for _ in range(300):
        known = tuple(int(choice) if choice <= NONE else None for choice in rng.integers(0, 8, len(NAMES)))
        found = propagated(MOE, known)
        for name, choice, dim, origin in zip(NAMES, known, found.dims, found.origins, strict=True):
            assert choice in (None, dim)
            assert (origin == GIVEN) == (choice is not None)
            direction, _, neighbour = origin.partition(" from ")
            if neighbour:
                before, after = (neighbour, name) if direction == "forward" else (name, neighbour)
                choices = dict(zip(NAMES, found.dims, strict=True))
                leaves = rule(layer.op(before), layer, choices[before]).output
                reader = layer.op(after)
                slot = reader.inputs.index(layer.op(before).output)
                assert rule(reader, layer, choices[after]).inputs[slot] == leaves
                assert leaves.holds == "shard"


def test_megatrons_layer_is_known_elsewhere_too() -> None:
    assert propagated(MOE, megatron_weights(MOE)).dims == megatron_dims(MOE.model)
