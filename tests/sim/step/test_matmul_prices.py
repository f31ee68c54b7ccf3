"""Seconds of sharded matrix products: worked questions on a torus, and the prices of collectives and kernels."""

from dataclasses import replace
from functools import cache

import pytest

from sim.config.catalog import load_hardware
from sim.prices.collectives import collective_price
from sim.prices.mesh import group
from sim.prices.torus import Torus
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


def test_the_lowest_latency_of_a_whole_product_is_that_of_sharing_out_what_is_not_contracted() -> None:
    """Question 5, on two axes: parts of a sum cost twice what gathering rows does; slicing whole inputs is free."""
    size = 8192
    found = priced_matmuls(V5P, product("A[I, J] B[J, K] -> C[I, K]", {"X": 4, "Y": 4}))
    gather_s, plans = 2 * size**2 / (2 * 180e9), by_rules(found)
    rows, sums = ", ".join(["S(0), R -> S(0)"] * 2), ", ".join(["S(1), S(0) -> P(sum)"] * 2)
    assert plans[rows].communication_s == pytest.approx(gather_s)
    assert plans[sums].communication_s == pytest.approx(2 * gather_s)
    spread = [each for each in found if each.plan.flops == 2 * size**3 / 16]
    assert min(each.communication_s for each in spread) == pytest.approx(gather_s)
    assert found[0].plan.flops == 2 * size**3 / 16


V5E = replace(
    V5P,
    collectives=replace(V5P.collectives, torus=Torus(dims=2, link_bandwidth_bytes_per_s=45e9, hop_s=1e-6, wraps=16)),
)
"""Its links alone: 4 chips are a line of 3 hops, which gathers 60 GB a second."""


@pytest.mark.parametrize(
    ("text", "rows", "passes", "moved"),
    [
        ("A[I_X, J_Y] B[J_Y, K] -> C[I_X, K]", 2048, 2, "IK"),
        ("A[I_X, J] B[J_X, K_Y] -> C[I_X, K_Y]", 32768, 1, "JK"),
        ("A[I_X, J] B[J, K_Y] -> C[I_X, K_Y]", 2048, 0, "JK"),
    ],
)
def test_layers_of_training_and_inference_send_what_the_textbook_asks_for(
    text: str, rows: int, passes: int, moved: str
) -> None:
    """Question 6 on a v5e of 4 x 4: a sum over Y, the weights gathered over X, and nothing.

    With fewer rows than the weights have, the sums are exchanged instead.
    """
    sizes = {"I": rows, "J": 8192, "K": 16384}
    best = priced_matmuls(V5E, product(text, {"X": 4, "Y": 4}, **sizes))[0]
    sent_bytes = 2 * sizes[moved[0]] * sizes[moved[1]] / 4
    assert best.communication_s == pytest.approx(passes * sent_bytes / 60e9)
    assert best.plan.flops == 2 * rows * 8192 * 16384 / 16


def test_two_products_in_a_row_are_cut_along_what_lies_between_them() -> None:
    """Question 7 on a v5e of 2 x 2 with 300 MB: weights cut four ways, and of all such ways the best, 23 us."""
    rows, inner, wide = 128, 8192, 32768
    assert 2 * 2 * inner * wide / 4 < 300e6 < 2 * 2 * inner * wide / 2
    sizes = {"B": rows, "D": inner, "F": wide}

    @cache
    def sent_s(text: str) -> float:
        return priced_matmuls(V5E, product(text, {"X": 2, "Y": 2}, **sizes))[0].communication_s

    found = {
        (first, second, h): sent_s(f"x[B, D] W[{first}] -> h[{h}]") + sent_s(f"h[{h}] W[{second}] -> y[B, D]")
        for first in ("D_XY, F", "D, F_XY", "D_X, F_Y")
        for second in ("F_XY, D", "F, D_XY", "F_Y, D_X")
        for h in ("B, F", "B, F_XY")
    }
    best_s = 2 * 2 * rows * inner / 180e9
    assert min(found.values()) == pytest.approx(best_s)
    assert best_s == pytest.approx(23e-6, rel=0.02)
    ways = {each for each, taken_s in found.items() if taken_s < best_s * 1.001}
    assert ways == {("D, F_XY", "F_XY, D", "B, F_XY")}


def test_a_product_that_may_stay_sharded_costs_as_much_less_as_it_is_narrower() -> None:
    """Question 9: gathering A[N, M] or scattering the sums of C[N, K] first, M / K."""
    rows, inner, columns = 1024, 8192, 2048
    text = "A[N, M_X] B[M, K] -> C[N, K_X]"
    found = by_rules(priced_matmuls(V5P, product(text, {"X": 4}, N=rows, M=inner, K=columns)))
    gathered, summed = found["R, S(1) -> S(1)"], found["S(1), S(0) -> P(sum)"]
    assert gathered.communication_s / summed.communication_s == pytest.approx(inner / columns)
    assert [step.collective for step in summed.plan.steps if step.collective] == ["reduce_scatter"]


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
