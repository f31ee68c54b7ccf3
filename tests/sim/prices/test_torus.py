"""Collectives on a torus: the worked questions of "How to Scale Your Model", part 3, and what holds for any torus."""

import itertools
from dataclasses import replace

import pytest

from sim.config.catalog import load_hardware
from sim.prices.collectives import collective_price, expert_all_to_all_time_s, stage_send_s
from sim.prices.mesh import MeshGroup
from sim.prices.torus import Torus, best_torus_time_s, torus_time_s
from tests.sim.modelled import collective_time_s

V4P = Torus(dims=3, link_bandwidth_bytes_per_s=45e9, hop_s=1e-6, wraps=4)
V5E = Torus(dims=2, link_bandwidth_bytes_per_s=45e9, hop_s=1e-6, wraps=16)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
LARGE = 1e9


def test_a_gather_along_a_line_takes_all_but_one_hop() -> None:
    """Pop quiz 2: axis Y of a v5e mesh of 8 x 4 does not wrap around; 3 hops of 8.4 MB at 45 GB/s, or 3 of 1 us."""
    assert torus_time_s(V5E, "all_gather", (4,), 2048 * 8192 * 2) == pytest.approx(560e-6, rel=2e-3)
    assert torus_time_s(V5E, "all_gather", (4,), 256 * 256 * 2) == pytest.approx(3e-6)


def test_a_gather_around_a_ring_goes_both_ways() -> None:
    """Question 2 on a v4p of 4 x 4 x 4, B = 1024, D = 4096 in bf16: along X, Y, both, and Z; question 3, 256 bytes."""
    whole = 2 * 1024 * 4096
    for lengths, tensor_bytes, us in (((4,), whole / 4, 23), ((4, 4), whole, 46), ((4,), whole / 16, 5.8)):
        assert torus_time_s(V4P, "all_gather", lengths, tensor_bytes) == pytest.approx(us * 1e-6, rel=0.02)
    assert torus_time_s(V4P, "all_reduce", (4,), whole / 16) == pytest.approx(2 * 5.8e-6, rel=0.01)
    assert torus_time_s(V4P, "all_gather", (4,), 256) == pytest.approx(2e-6)


@pytest.mark.parametrize("length", [4, 8, 16, 64])
def test_an_all_to_all_around_an_even_ring_takes_a_quarter_of_a_gather(length: int) -> None:
    """Question 10."""
    gather, exchange = (torus_time_s(V4P, kind, (length,), LARGE) for kind in ("all_gather", "all_to_all"))
    assert exchange == pytest.approx(gather / 4)


@pytest.mark.parametrize(("length", "ring"), [(2, False), (3, False), (4, False), (5, True), (7, True), (8, True)])
def test_the_busiest_link_of_an_all_to_all_is_that_of_counted_blocks(length: int, ring: bool) -> None:
    """Every block by hand along its shorter way; those that go half way round are halved and sent both ways."""
    torus = replace(V4P, wraps=1 if ring else 1000)
    forward = [0.0] * length
    for source, target in itertools.permutations(range(length), 2):
        ahead = (target - source) % length
        half = 2 * ahead == length and ring
        if (ring and 2 * ahead <= length) or (not ring and target > source):
            for hop in range(ahead if ring else target - source):
                forward[(source + hop) % length] += 0.5 if half else 1.0
    assert torus.busiest_share(length) == pytest.approx(max(forward) / length**2)


@pytest.mark.parametrize("kind", KINDS)
def test_one_chip_sends_nothing_and_more_axes_are_never_slower(kind: str) -> None:
    assert torus_time_s(V4P, kind, (1, 1), LARGE) == 0.0
    one, two, three = (torus_time_s(V4P, kind, lengths, LARGE) for lengths in ((64,), (8, 8), (4, 4, 4)))
    assert three < two < one
    assert best_torus_time_s(V4P, kind, 64, LARGE) == three


@pytest.mark.parametrize("kind", KINDS)
def test_a_torus_machine_is_priced_by_its_links(kind: str) -> None:
    """16 neighbours are a block of 4 x 4, or of 2 x 2 x 4; no rate of a link is beaten."""
    machine = load_hardware("tpu_v5p")
    torus = machine.collectives.torus
    assert torus is not None
    assert torus.link_bandwidth_bytes_per_s == 90e9
    group = MeshGroup(16, 16)
    took = collective_time_s(machine, kind, group, LARGE)
    assert took == min(torus_time_s(torus, kind, lengths, LARGE) for lengths in ((16,), (2, 8), (4, 4), (2, 2, 4)))
    assert collective_price(machine, kind, group, LARGE).time_s == took
    received = LARGE * (1 / 16 if kind == "all_to_all" else 1) * 15 / 16
    assert took >= received / 540e9


def test_stages_and_experts_of_a_torus_use_its_links() -> None:
    machine = load_hardware("tpu_v5p")
    assert stage_send_s(machine, MeshGroup(2, 2), 90e6) == pytest.approx(1e-3 + 1e-6)
    model, sent = machine.collectives, 1e9
    cube, larger = (expert_all_to_all_time_s(model, "dispatch", MeshGroup(n, n), sent) for n in (64, 512))
    assert cube > sent / 540e9
    assert larger / cube == pytest.approx(2 * (63 / 64) / (511 / 512), rel=0.01)  # ways of 8 chips, not of 4
