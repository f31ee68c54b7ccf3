"""The mesh is (pp, ep, tp), tp innermost, laid on nodes of 8: groups by enumeration of every GPU."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.prices.mesh import MeshGroup, ep_group, group, stage_pair, tp_group

POWERS = st.integers(0, 6).map(lambda exponent: 2**exponent)


def gpu(stage: int, expert_rank: int, tensor_rank: int, *, tp: int, ep: int) -> int:
    """Number of a GPU on the machine: tp varies fastest, then ep, then pp."""
    return (stage * ep + expert_rank) * tp + tensor_rank


def most_nodes(groups: list[list[int]], node_gpus: int = 8) -> int:
    """Nodes that the worst-placed group touches."""
    return max(len({member // node_gpus for member in members}) for members in groups)


@settings(derandomize=True, deadline=None)
@given(tp=POWERS, ep=POWERS, pp=POWERS)
def test_groups_span_the_nodes_that_an_enumeration_of_all_gpus_finds(tp: int, ep: int, pp: int) -> None:
    pp = min(pp, 4)
    along_tp = [[gpu(p, e, t, tp=tp, ep=ep) for t in range(tp)] for p in range(pp) for e in range(ep)]
    along_ep = [[gpu(p, e, t, tp=tp, ep=ep) for e in range(ep)] for p in range(pp) for t in range(tp)]
    assert tp_group(tp, 8).nodes == most_nodes(along_tp)
    assert ep_group(tp, ep, 8).nodes == most_nodes(along_ep)
    if pp > 1:
        boundaries = [
            [gpu(p, e, t, tp=tp, ep=ep), gpu(p + 1, e, t, tp=tp, ep=ep)]
            for p in range(pp - 1)
            for e in range(ep)
            for t in range(tp)
        ]
        assert (stage_pair(tp, ep, pp, 8).nodes == 1) == (most_nodes(boundaries) == 1)


@pytest.mark.parametrize(("tp", "nodes"), [(3, 2), (5, 2), (6, 2), (7, 2), (12, 2), (24, 3)])
def test_a_degree_that_does_not_divide_the_node_straddles_nodes_somewhere(tp: int, nodes: int) -> None:
    groups = [list(range(start, start + tp)) for start in range(0, 64 * tp, tp)]
    assert most_nodes(groups) == nodes
    assert tp_group(tp, 8).nodes == nodes


@pytest.mark.parametrize(
    ("stride", "degree", "expected", "tier"),
    [
        (1, 1, MeshGroup(1, 1), "intra"),
        (1, 8, MeshGroup(8, 8), "intra"),
        (1, 16, MeshGroup(16, 8), "hierarchical"),
        (2, 4, MeshGroup(4, 4), "intra"),
        (2, 16, MeshGroup(16, 4), "hierarchical"),
        (8, 16, MeshGroup(16, 1), "inter"),
        (16, 2, MeshGroup(2, 1), "inter"),
    ],
)
def test_the_tier_of_a_group_follows_from_its_stride_and_degree(
    stride: int, degree: int, expected: MeshGroup, tier: str
) -> None:
    found = group(stride, degree, node_gpus=8)
    assert found == expected
    assert found.tier == tier


def test_a_group_of_one_never_leaves_its_node() -> None:
    for stride, node_gpus in itertools.product((1, 3, 8, 128), (1, 4, 8)):
        assert group(stride, 1, node_gpus).nodes == 1
        assert group(stride, 1, node_gpus).tier == "intra"


def test_stages_meet_inside_a_node_only_when_the_whole_replica_fits_into_one() -> None:
    assert stage_pair(tp=2, ep=2, pp=2, node_gpus=8).nodes == 1
    assert stage_pair(tp=8, ep=1, pp=2, node_gpus=8).nodes == 2
    assert stage_pair(tp=1, ep=1, pp=16, node_gpus=8).nodes == 2  # stages 8 and 9 lie on two nodes
    assert stage_pair(tp=3, ep=1, pp=2, node_gpus=8).nodes == 2  # the second replica lies on GPUs 6 to 11
