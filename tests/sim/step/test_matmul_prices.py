"""Seconds of sharded matrix products: worked questions on a torus, and the prices of collectives and kernels."""

import pytest

from sim.config.catalog import load_hardware
from sim.prices.collectives import collective_price
from sim.prices.mesh import group
from sim.sharding.placement import PlacementError
from sim.sharding.redistribute import sent_share
from sim.sharding.sharded_matmul import ShardedMatmul, parse_matmul
from sim.step.matmul_prices import PricedMatmul, priced_matmuls, unsharded_s

H100, V5P = load_hardware("h100_sxm"), load_hardware("tpu_v5p")


def product(text: str, mesh: dict[str, int], **sizes: int) -> ShardedMatmul:
    return parse_matmul(text, mesh, sizes, usual_size=8192)


def by_rules(found: list[PricedMatmul]) -> dict[str, PricedMatmul]:
    return {", ".join(map(str, priced.plan.rules)): priced for priced in found}


def test_gathering_the_weights_and_reducing_the_product_take_what_the_textbook_says() -> None:
    """Question 4 on a ring of 4, 2 x 90 GB/s: 2DF / W to gather B, 4BF / W to reduce C, with a quarter of the FLOPs."""
    rows, inner, columns = 1024, 8192, 16384
    found = by_rules(priced_matmuls(V5P, product("A[B, D] B[D_X, F] -> C[B, F]", {"X": 4}, B=rows, D=inner, F=columns)))
    gathered, reduced = found["R, R -> R"], found["S(1), S(0) -> P(sum)"]
    assert gathered.communication_s == pytest.approx(2 * inner * columns / 180e9)
    assert reduced.communication_s == pytest.approx(4 * rows * columns / 180e9)
    assert gathered.plan.flops == 4 * reduced.plan.flops == 2 * rows * inner * columns
    assert reduced.total_s < gathered.total_s


@pytest.mark.parametrize("hardware", [H100, V5P], ids=lambda hardware: hardware.name)
def test_the_best_by_time_and_by_bytes_are_the_best_of_all(hardware) -> None:
    matmul = product("A[I, J_X] B[J_Y, K] -> C[I_X, K]", {"X": 4, "Y": 8})
    fastest, leanest = (priced_matmuls(hardware, matmul, objective=objective) for objective in ("time", "bytes"))
    assert [found.total_s for found in fastest] == sorted(found.total_s for found in fastest)
    assert fastest[0].total_s <= leanest[0].total_s
    assert leanest[0].plan.sent_bytes <= fastest[0].plan.sent_bytes
    for found in fastest:
        low, high = found.interval_s
        assert low <= found.total_s <= high
        assert max(found.communication_s, found.product.time_s) == found.overlapped_s <= found.total_s


def test_a_mesh_of_one_device_takes_what_the_product_takes() -> None:
    matmul = product("A[I_X, J] B[J, K_Y] -> C[I, K]", {"X": 1, "Y": 1})
    best = priced_matmuls(H100, matmul)[0]
    assert (best.communication_s, best.plan.sent_bytes) == (0.0, 0.0)
    assert best.total_s == unsharded_s(H100, matmul)


def test_the_last_axis_lies_between_neighbours() -> None:
    """On a mesh of 2 x 8 the inner axis is a node, the outer one spans two; each collective is priced as everywhere."""
    groups = [group(8, 2, *H100.tiers), group(1, 8, *H100.tiers)]
    assert [each.nodes for each in groups] == [2, 1]
    priced_steps = 0
    for found in priced_matmuls(H100, product("A[I_Y, J_X] B[J_X, K_Y] -> C[I_X, K]", {"X": 2, "Y": 8})):
        for step, move in zip(found.plan.steps, found.moves, strict=True):
            if step.collective and step.span == 1:
                whole = step.bytes_per_device / sent_share(step.collective, groups[step.axis].degree)
                assert move.time_s == collective_price(H100, step.collective, groups[step.axis], whole).time_s
                priced_steps += 1
    assert priced_steps


def test_fp8_sends_half_of_what_bf16_does() -> None:
    matmul = product("A[I_X, J] B[J, K] -> C[I, K]", {"X": 8})
    wide, narrow = (priced_matmuls(H100, matmul, dtype, "bytes")[0] for dtype in ("bf16", "fp8"))
    assert narrow.plan.sent_bytes == wide.plan.sent_bytes / 2


def test_a_torus_has_no_more_axes_than_its_own() -> None:
    with pytest.raises(PlacementError, match="tpu_v5p is a torus of 3 axes, the mesh has 4: W, X, Y, Z"):
        priced_matmuls(V5P, product("A[I, J] B[J, K] -> C[I, K]", dict.fromkeys("WXYZ", 2)))
