"""Choices that an addend does not tell apart cost the same: tables price one of each kind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from sim.ops.dims import dims_of
from sim.serving.phases import batching
from sim.step.attention_expert_meshes import sides_of
from sim.step.layer import group_sums
from sim.workload import Workload
from tests.questions import question_about

MESHES = ((4, 1, 2, 2), (2, 2, 2, 4), (1, 1, 8, 2))
"""tp, cp, dp, ep: one mesh for both sides, a context that is cut, groups of one GPU beside experts that are cut."""


def extended(**asked: Any) -> Workload:
    return replace(question_about("deepseek_v3", phase="serve", isl=512, osl=512), space="extended", **asked).load()


def test_choices_of_one_kind_cost_the_same_on_every_mesh() -> None:
    workload = extended()
    choices = [dim.choices for dim in dims_of(workload)]
    (_, load), spared = batching(workload, 48, 8).loads, 0
    for mesh in MESHES:
        for group, sides in zip(group_sums(workload), sides_of(workload, load, *mesh), strict=True):
            for addend, places in zip(group.layer.addends, group.places, strict=True):
                known: dict[Any, Any] = {}
                for chosen in itertools.product(*(choices[place] for place in places)):
                    kind, price = addend.kind(chosen), addend.price(sides, chosen)
                    spared += kind in known
                    assert known.setdefault(kind, price) == price, (addend.name, mesh, chosen)
    assert spared > 500


@pytest.mark.parametrize("asked", [{"merge_collectives": True}, {"overlap_parts": 4}], ids=str)
def test_where_neighbours_decide_too_no_choices_are_alike(asked: dict[str, Any]) -> None:
    kinds = [addend.kind for group in group_sums(extended(**asked)) for addend in group.layer.addends]
    assert all(kind((2, 0, 1)) == (2, 0, 1) for kind in kinds)
