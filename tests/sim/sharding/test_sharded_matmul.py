"""Plans of a sharded matrix product: the four cases by hand, and every plan carried out on numpy shards."""

import heapq
import itertools
import math
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sharding.layout import assemble, parse_named, split
from sim.sharding.placement import PlacementError
from sim.sharding.redistribute import RedistributionError
from sim.sharding.routes import RouteStep
from sim.sharding.sharded_matmul import MatmulPlan, execute_plan, matmul_plans, parse_matmul

SIZES = {"I": 64, "J": 128, "K": 32}


def sent(step: RouteStep) -> float:
    return step.bytes_per_device


def best(text: str, mesh: dict[str, int], **sizes: int) -> MatmulPlan:
    return matmul_plans(parse_matmul(text, mesh, {**SIZES, **sizes}), 2, sent)[0]


def collectives(plan: MatmulPlan) -> list[str]:
    return [step.collective for step in plan.steps if step.collective]


@pytest.mark.parametrize(
    "text",
    [
        "A[I, J] B[J, K] -> C[I, K]",
        "A[I_X, J] B[J, K] -> C[I_X, K]",
        "A[I, J] B[J, K_Y] -> C[I, K_Y]",
        "A[I_X, J] B[J, K_Y] -> C[I_X, K_Y]",
        "A[I, J_X] B[J_X, K] -> C[I, K] {U_X}",
    ],
)
def test_case_1_sends_nothing(text: str) -> None:
    assert best(text, {"X": 4, "Y": 2}).sent_bytes == 0.0


def test_case_2_gathers_the_operand_or_reduces_the_product_whichever_is_smaller() -> None:
    """By hand, in bf16 over 4: gathering A sends 3/4 of it, reducing C twice 3/4 of it, or once if it stays sharded."""
    text = "A[I, J_X] B[J, K] -> C[I, K]"
    wide = best(text, {"X": 4}, K=4096)
    assert (collectives(wide), wide.sent_bytes) == (["all_gather"], 3 / 4 * 2 * 64 * 128)
    deep = best(text, {"X": 4}, J=4096)
    assert (collectives(deep), deep.sent_bytes) == (["all_reduce"], 2 * 3 / 4 * 2 * 64 * 32)
    kept = best("A[I, J_X] B[J, K] -> C[I, K_X]", {"X": 4}, J=4096)
    assert (collectives(kept), kept.sent_bytes) == (["reduce_scatter"], 3 / 4 * 2 * 64 * 32)


def test_case_3_reduces_the_product() -> None:
    plan = best("A[I, J_X] B[J_X, K] -> C[I, K]", {"X": 4})
    assert (collectives(plan), plan.sent_bytes) == (["all_reduce"], 2 * 3 / 4 * 2 * 64 * 32)
    assert plan.flops == 2 * 64 * 32 * 32


def test_case_4_gathers_the_smaller_operand() -> None:
    plan = best("A[I_X, J] B[J, K_X] -> C[I_X, K]", {"X": 4})
    assert (collectives(plan), plan.sent_bytes) == (["all_gather"], 3 / 4 * 2 * 128 * 32)
    assert best("A[I_X, J] B[J, K_X] -> C[I, K_X]", {"X": 4}, I=16).sent_bytes == 3 / 4 * 2 * 16 * 128


@pytest.mark.parametrize("result", ["I_X, K", "I, K_X", "I, K"])
def test_case_4_has_no_plan_that_sends_nothing_before_the_product(result: str) -> None:
    """One block of the diagonal on each device: neither slices nor a sum make the product of these."""
    plans = matmul_plans(parse_matmul(f"A[I_X, J] B[J, K_X] -> C[{result}]", {"X": 4}, SIZES), 2, sent)
    assert all(any(step.collective for route in plan.before for step in route.steps) for plan in plans)


def test_an_axis_that_nobody_names_shares_the_reduction() -> None:
    """Slicing costs nothing: over Y each device reduces an eighth over X, and then they gather."""
    plan = best("A[I, J_X] B[J_X, K] -> C[I, K]", {"X": 4, "Y": 8})
    whole = 2 * 64 * 32
    assert plan.sent_bytes == 2 * 3 / 4 * whole / 8 + 7 / 8 * whole


@st.composite
def products(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    mesh = draw(st.sampled_from([{"X": 2}, {"X": 3}, {"X": 2, "Y": 2}, {"X": 2, "Y": 3}, {"X": 2, "Y": 4}]))

    def tensor(name: str, dims: str, *, parts: bool) -> str:
        at: dict[str, str] = {}
        for axis in mesh:
            where: str = draw(st.sampled_from([*dims, "", "U"] if parts else [*dims, ""]))
            at[where] = at.get(where, "") + axis
        texts = [dim + (f"_{at[dim]}" if dim in at else "") for dim in dims]
        return f"{name}[{', '.join(texts)}]" + (f" {{U_{at['U']}}}" if "U" in at else "")

    batched = draw(st.booleans())
    dims = ("EIJ", "EJK", "EIK") if batched else ("IJ", "JK", "IK")
    first, second = tensor("A", dims[0], parts=True), tensor("B", dims[1], parts=False)
    return f"{first} * {second} -> {tensor('C', dims[2], parts=False)}", mesh


@settings(max_examples=12, deadline=None)
@given(products(), st.sampled_from([(12, 24, 36, 12), (7, 10, 5, 3)]))
def test_every_plan_gives_the_product(product: tuple[str, dict[str, int]], extents: tuple[int, ...]) -> None:
    text, mesh = product
    sizes = {dim: size for dim, size in zip("IJKE", extents, strict=True) if dim in text}
    matmul = parse_matmul(text, mesh, sizes)
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(matmul.shape(tensor)) for tensor in matmul.operands)
    whole = first @ second
    plans = matmul_plans(matmul, 2, sent)
    costs = [round(plan.cost, 9) for plan in plans]
    assert costs == sorted(costs)
    for plan in plans:
        assert plan.cost == pytest.approx(plan.sent_bytes)
        got = assemble(execute_plan(plan, first, second), matmul.result.layout, matmul.degrees)
        np.testing.assert_allclose(got, whole, atol=1e-9)


SHARE = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "all_reduce": 6 / 4, "all_to_all": 3 / 16}
"""Of a tensor's bytes that each of four devices sends."""


def moved_bytes(source: str, target: str, elements: int) -> float:
    """By one collective, from and to R (whole), P (parts of a sum) or the dim that is sharded."""
    if source in (target, "R"):
        return 0.0
    if source == "P":
        return 2 * elements * SHARE["all_reduce" if target == "R" else "reduce_scatter"]
    return 2 * elements * SHARE["all_gather" if target == "R" else "all_to_all"]


@pytest.mark.parametrize(("a", "b", "c"), list(itertools.product("RIJ", "RJK", "RIK")))
def test_no_plan_on_one_axis_is_cheaper_than_the_best(a: str, b: str, c: str) -> None:
    """Brute force: what each operand may be in the product, what comes out, and the one collective to and from it."""
    ways = [("R", "R", "R"), ("I", "R", "I"), ("R", "K", "K"), ("J", "J", "P")]
    least = min(
        moved_bytes(a, first, 64 * 128) + moved_bytes(b, second, 128 * 32) + moved_bytes(product, c, 64 * 32)
        for first, second, product in ways
    )
    text = f"A[{on_x('IJ', a)}] B[{on_x('JK', b)}] -> C[{on_x('IK', c)}]"
    assert best(text, {"X": 4}).sent_bytes == pytest.approx(least)


def on_x(dims: str, sharded: str) -> str:
    return ", ".join(dim + ("_X" if dim == sharded else "") for dim in dims)


State = tuple[str, ...]
"""What each axis does to a tensor: shards one of its dims, leaves it whole ("R") or in parts of a sum ("P")."""


def moved(state: State, dims: str, sizes: dict[str, int], degrees: tuple[int, ...]) -> Iterator[tuple[State, float]]:
    """Every next state by one collective on neighbouring axes that are alike, and bytes sent per device in bf16."""
    stored = 2.0 * math.prod(sizes[dim] for dim in dims)
    stored /= math.prod(degree for at, degree in zip(state, degrees, strict=True) if at not in "RP")
    for start, end in itertools.combinations(range(len(state) + 1), 2):
        kinds, ranks = set(state[start:end]), math.prod(degrees[start:end])
        if len(kinds) > 1:
            continue
        (kind,), share = kinds, (ranks - 1) / ranks
        targets = {"R": 2 * stored * share if kind == "P" else stored * (ranks - 1)} if kind != "R" else {}
        targets |= {dim: 0.0 if kind == "R" else stored * share for dim in dims if dim != kind}
        for target, sent_bytes in targets.items():
            yield state[:start] + (target,) * (end - start) + state[end:], sent_bytes


def least_bytes(state: State, dims: str, sizes: dict[str, int], degrees: tuple[int, ...]) -> dict[State, float]:
    """Bytes of the cheapest way to every state (Dijkstra)."""
    least, queue = {state: 0.0}, [(0.0, state)]
    while queue:
        sent_bytes, at = heapq.heappop(queue)
        for then, more in moved(at, dims, sizes, degrees):
            if sent_bytes + more < least.get(then, math.inf) - 1e-9:
                least[then] = sent_bytes + more
                heapq.heappush(queue, (least[then], then))
    return least


def test_no_sequence_on_two_axes_is_cheaper_than_the_best() -> None:
    """Brute force over what axes do in the product, with every sequence of collectives before it and behind it.

    It moves an axis whatever other axes do to that dim, so where two share one it is a bound, and mostly the best.
    """
    rng, equal = random.Random(30), 0
    ways = (("R", "R", "R"), ("I", "R", "I"), ("R", "K", "K"), ("J", "J", "P"), ("P", "R", "P"), ("R", "P", "P"))
    for _ in range(12):
        degrees = rng.choice([(2, 2), (2, 4), (3, 2), (1, 4), (5, 1)])
        mesh, sizes = dict(zip("XY", degrees, strict=True)), {}
        ends: list[State] = []
        for dims, may_be in (("IJ", "IJRP"), ("JK", "JKR"), ("IK", "IKR")):
            sizes |= {dim: math.prod(degrees) * rng.choice([1, 2, 3, 5]) for dim in dims if dim not in sizes}
            ends.append(tuple(rng.choice(may_be) for _ in degrees))
        first, second, wanted = ends
        before = least_bytes(first, "IJ", sizes, degrees), least_bytes(second, "JK", sizes, degrees)
        least = math.inf
        for rules in itertools.product(ways, repeat=2):
            one, other, result = zip(*rules, strict=True)
            if one in before[0] and other in before[1]:
                behind = least_bytes(result, "IK", sizes, degrees)[wanted]
                least = min(least, before[0][one] + before[1][other] + behind)
        text = f"{written('A', 'IJ', first)} * {written('B', 'JK', second)} -> {written('C', 'IK', wanted)}"
        found = best(text, mesh, **sizes).sent_bytes
        assert found >= least - 1e-6, (text, mesh, sizes)
        equal += found == pytest.approx(least)
    assert equal > 6


def written(name: str, dims: str, state: State) -> str:
    on = {dim: "".join(axis for axis, at in zip("XY", state, strict=True) if at == dim) for dim in (*dims, "P")}
    named = ", ".join(dim + f"_{on[dim]}" * bool(on[dim]) for dim in dims)
    return f"{name}[{named}]" + f" {{U_{on['P']}}}" * bool(on["P"])


VIEWS = {
    "flattened rows": ("x[(B S)_X, D] W[D, F_Y] -> h[B_X, S, F_Y]", 0.0),
    "unflattened columns": ("x[T_X, D] W[D, (H E)_Y] -> q[T_X, H_Y, E]", 0.0),
    "a contracted dim, flattened in one operand": ("a[T_X, (H E)_Y] W[H_Y, E, D] -> o[T_X, D] {U_Y}", 0.0),
    "transposed": ("x[D, T_X] W[F_Y, D] -> h[F_Y, T_X]", 0.0),
    "striped: the inner dim of a flattened pair": ("x[B, S_X, D] W[D, F_Y] -> h[(B S), F_Y]", 2 * 1 / 2 * 24 * 6 / 3),
    "rows over two axes": ("x[(S B)_XY, D] W[D, F] -> h[S_XY, B, F]", 0.0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_product_of_views_is_carried_out_on_what_each_rank_reshapes(name: str) -> None:
    """Whole tensors are joined and cut as they are written; each rank reshapes its piece, multiplies, reshapes back."""
    text, sent_bytes = VIEWS[name]
    mesh, sizes = {"X": 2, "Y": 3}, {"B": 4, "S": 6, "D": 8, "F": 6, "T": 4, "H": 3, "E": 2}
    matmul = parse_matmul(text, mesh, {dim: size for dim, size in sizes.items() if dim in text})
    rng = np.random.default_rng(3)
    wholes = [rng.standard_normal(matmul.shape(tensor)) for tensor in matmul.operands]
    plan = matmul_plans(matmul, 2, sent)[0]
    assert plan.sent_bytes == pytest.approx(sent_bytes)
    texts = re.findall(r"\w+\[[^\]]*\]", re.sub(r"\((.) (.)\)", r"\1·\2", text))
    named = [parse_named(each, tuple(mesh)) for each in texts]
    for whole, tensor, (_, dims, layout) in zip(wholes, matmul.operands, named, strict=False):
        shape = [math.prod(sizes[dim] for dim in joined.split("·")) for joined in dims]
        stored = split(whole.reshape(shape), layout, matmul.degrees)
        for ranks, piece in split(whole, tensor.layout, matmul.degrees).items():
            np.testing.assert_array_equal(stored[ranks].reshape(piece.shape), piece)
    got = execute_plan(plan, *wholes)
    expected = matmul.operation.compute(*wholes)
    _, dims, layout = named[2]
    shape = [math.prod(sizes[dim] for dim in joined.split("·")) for joined in dims]
    if not text.endswith("}"):
        for ranks, piece in split(expected.reshape(shape), layout, matmul.degrees).items():
            np.testing.assert_allclose(got[ranks].reshape(piece.shape), piece, atol=1e-12)
    np.testing.assert_allclose(assemble(got, matmul.result.layout, matmul.degrees), expected, atol=1e-12)


def test_joined_dims_whose_shards_are_no_shards_of_theirs_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"x\[\(B S\), D\]: its shards are no shards of B, S, D of sizes 6, 5, 8"):
        parse_matmul("x[(B S)_X, D] W[D, F] -> h[B, S, F]", {"X": 4}, {"B": 6, "S": 5, "D": 8, "F": 2})
    with pytest.raises(PlacementError, match="x has a dim twice: B, S, B"):
        parse_matmul("x[(B S), B] W[B, F] -> h[S, F]", {"X": 2}, {}, usual_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A[I, J] B[J, K]", "expected a product such as"),
        ("A[I, J] -> C[I, J]", "expected a product such as"),
        ("A[I, J] B[J, K] and -> C[I, K]", "expected a product such as"),
        ("A[I, J] B[J, K] -> C[I, L]", "no operand has the dim L"),
        ("A[I, J] B[J, K] -> C[I]", "dim K is in B alone"),
        ("A[I, I] B[I, K] -> C[I, K]", "A has a dim twice"),
        ("A[I_Z, J] B[J, K] -> C[I, K]", "names axis 'Z'; the mesh has X, Y"),
        ("A[I_X, J_X] B[J, K] -> C[I, K]", "uses axis 'X' twice"),
    ],
)
def test_what_is_no_product_is_refused(text: str, expected: str) -> None:
    with pytest.raises(PlacementError, match=expected):
        parse_matmul(text, {"X": 2, "Y": 2}, {}, usual_size=8)


def test_sizes_are_those_of_the_dims() -> None:
    with pytest.raises(PlacementError, match="the size of K is not given"):
        parse_matmul("A[I, J] B[J, K] -> C[I, K]", {"X": 2}, {"I": 2, "J": 2})
    with pytest.raises(PlacementError, match="a size of L is given; the dims are I, J, K"):
        parse_matmul("A[I, J] B[J, K] -> C[I, K]", {"X": 2}, {"L": 2}, usual_size=2)


def test_parts_of_a_sum_come_out_of_a_product_alone() -> None:
    matmul = parse_matmul("A[I, J] B[J, K] -> C[I, K] {U_X}", {"X": 2}, SIZES)
    assert [str(plan.rules[0]) for plan in matmul_plans(matmul, 2, sent)] == ["S(1), S(0) -> P(sum)"]
    outer = parse_matmul("A[I] B[K] -> C[I, K] {U_X}", {"X": 2}, {"I": 4, "K": 4})
    with pytest.raises(RedistributionError, match="C cannot be left in parts of a sum"):
        matmul_plans(outer, 2, sent)
