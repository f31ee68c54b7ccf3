"""A matrix product of sharded operands: every way to multiply them where they lie, and the collectives around it.

On each axis of the mesh the product follows one rule: shard a dim that the result keeps, shard the contracted one and
leave parts of a sum, or work on whole operands. The operands are moved to where the rules want them, and the product
to where it shall lie, each by its cheapest route; so the cheapest of all plans is exact. The textbook's four cases
are what comes out: nothing to move, a gather before, a reduction after, and an axis that both operands use.

Source: "How to Scale Your Model", part 3 (Google DeepMind, 2025), for the cases and the notation.

>>> by_bytes = lambda step: step.bytes_per_device
>>> product = parse_matmul("A[I, J_X] B[J_X, K] -> C[I, K]", {"X": 4}, {"I": 8, "J": 64, "K": 16})
>>> best = matmul_plans(product, 2, by_bytes)[0]
>>> [step.collective for step in best.after.steps], best.sent_bytes
(['all_reduce'], 384.0)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from sim.sharding.layout import Layout, Pieces, local_shape, parse_named, split
from sim.sharding.placement import Array, PlacementError, Shard
from sim.sharding.redistribute import RedistributionError
from sim.sharding.routes import Route, RouteStep, cheapest_route, execute
from sim.sharding.rules import Operation, Rule, einsum_operation, rules_of
from sim.sharding.views import View, layout_after

_TENSOR = re.compile(r"\w+\s*\[[^\]]*\](?:\s*\{\s*U_[^\]]*?\}(?!\}))?")
_JOINED = re.compile(r"\(\s*([^\W\d_]\w*(?:\s+[^\W\d_]\w*)+)\s*\)")
"""Dims that a view has made one, as in (B S)."""
JOIN = "\N{MIDDLE DOT}"
"""Stands between their names; it may be part of one."""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor by name, its dims by name, and where it lies: one placement per axis of the mesh."""

    name: str
    dims: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class ShardedMatmul:
    """A product of two sharded tensors.

    Attributes:
        mesh: Devices along each axis, outermost first.
        sizes: Of each dim.
        operands: As they lie.
        result: As it shall lie.
        operation: The einsum.
    """

    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    operands: tuple[ShardedTensor, ShardedTensor]
    result: ShardedTensor
    operation: Operation = field(init=False)

    def __post_init__(self) -> None:
        letters = {dim: chr(ord("a") + index) for index, dim in enumerate(self.sizes)}
        texts = ["".join(letters[dim] for dim in tensor.dims) for tensor in (*self.operands, self.result)]
        object.__setattr__(self, "operation", einsum_operation(f"{texts[0]},{texts[1]}->{texts[2]}"))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(self.mesh.values())

    def shape(self, tensor: ShardedTensor) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.sizes[dim] for dim in tensor.dims)


@dataclass(frozen=True, slots=True)
class MatmulPlan:
    """One way to multiply.

    Attributes:
        matmul: What is multiplied.
        rules: What each axis does in the product.
        before: Routes of the operands.
        product: Where the product lies as it comes out.
        after: Its route to where it shall lie.
        local_sizes: Of each dim in the largest product that a device computes.
        cost: Of the routes and the product, in the unit of the prices.
    """

    matmul: ShardedMatmul
    rules: tuple[Rule, ...]
    before: tuple[Route, Route]
    product: Layout
    after: Route
    local_sizes: Mapping[str, int]
    cost: float

    @property
    def steps(self) -> tuple[RouteStep, ...]:
        """Of all routes, in order."""
        return (*self.before[0].steps, *self.before[1].steps, *self.after.steps)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends."""
        return math.fsum(step.bytes_per_device for step in self.steps)

    @property
    def flops(self) -> float:
        """Floating-point operations of the busiest device."""
        return 2.0 * math.prod(self.local_sizes.values())


def parse_matmul(
    text: str, mesh: Mapping[str, int], sizes: Mapping[str, int], usual_size: int | None = None
) -> ShardedMatmul:
    """A product as it is written: "A[I, J_X] B[J_X, K] -> C[I, K]".

    Dims in parentheses are one dim of the tensor, as a view makes it: "x[(B S)_X, D] W[D, F] -> h[B_X, S, F]". Every
    tensor is planned with its dims apart, which each rank sees in its own piece by a reshape (`sim.sharding.views`); so
    nothing but the product and its routes costs anything. The order of dims is free.

    Args:
        text: Two operands, an arrow and the result, each in the notation of `sim.sharding.layout.parse_named`.
        mesh: Devices along each axis, outermost first.
        sizes: Of dims.
        usual_size: Of dims that `sizes` lacks; None where it must have all.

    Raises:
        PlacementError: It is no product of two tensors, a dim has no size, a size has no dim, or a shard of joined dims
            is no shard of theirs.
    """
    left, arrow, right = _JOINED.sub(lambda found: JOIN.join(found[1].split()), text).partition("->")
    tensors = [*_TENSOR.findall(left), *_TENSOR.findall(right)]
    rest = _TENSOR.sub("", left).strip(" *@.·") + _TENSOR.sub("", right).strip()
    if not arrow or len(tensors) != 3 or rest:
        raise PlacementError(f"expected a product such as 'A[I, J_X] B[J_X, K] -> C[I, K]', got {text!r}")
    viewed = [ShardedTensor(*parse_named(tensor, tuple(mesh))) for tensor in tensors]  # two operands and the result
    apart = first, second, result = tuple(_apart(tensor.dims) for tensor in viewed)
    for tensor, own in zip(viewed, apart, strict=True):
        if len(set(own)) < len(own):
            raise PlacementError(f"{tensor.name} has a dim twice: {', '.join(own)}")
    dims = dict.fromkeys((*first, *second))
    if unknown := set(result) - set(dims):
        raise PlacementError(f"no operand has the dim {min(unknown)} of {viewed[2].name}")
    for dim in dims:
        users = [tensor.name for tensor, own in zip(viewed, apart, strict=True) if dim in own]
        if len(users) < 2:
            raise PlacementError(f"dim {dim} is in {users[0]} alone; a product shares each dim between two tensors")
    if unknown := [dim for dim in sizes if dim not in dims]:
        raise PlacementError(f"a size of {unknown[0]} is given; the dims are {', '.join(dims)}")
    known = {dim: sizes.get(dim, usual_size) for dim in dims}
    if missing := [dim for dim, size in known.items() if size is None]:
        raise PlacementError(f"the size of {', '.join(missing)} is not given")
    all_sizes = {dim: size for dim, size in known.items() if size}
    one, other, product = (_seen_apart(tensor, mesh, all_sizes) for tensor in viewed)
    return ShardedMatmul(dict(mesh), all_sizes, (one, other), product)


def _apart(dims: Sequence[str]) -> tuple[str, ...]:
    return tuple(dim for joined in dims for dim in joined.split(JOIN))


def _seen_apart(tensor: ShardedTensor, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> ShardedTensor:
    """A tensor with joined dims apart, each rank's piece being a reshape of what it has. Raises: PlacementError."""
    dims = _apart(tensor.dims)
    if dims == tensor.dims:
        return tensor
    joined = tuple(math.prod(sizes[dim] for dim in each.split(JOIN)) for each in tensor.dims)
    view = View(joined, tuple(sizes[dim] for dim in dims))
    layout = layout_after(view, tensor.layout, tuple(mesh.values()))
    if layout is None:
        written = ", ".join(f"({each.replace(JOIN, ' ')})" if JOIN in each else each for each in tensor.dims)
        raise PlacementError(
            f"{tensor.name}[{written}]: its shards are no shards of {', '.join(dims)} of sizes "
            f"{', '.join(str(sizes[dim]) for dim in dims)}, so a view of each rank's piece is none of the tensor: "
            "shard one of these dims, or by several axes whose lengths divide them one after the other"
        )
    return ShardedTensor(tensor.name, dims, layout)


def matmul_plans(
    matmul: ShardedMatmul,
    element_bytes: float,
    move_price: Callable[[RouteStep], float],
    product_price: Callable[[Mapping[str, int]], float] = lambda local_sizes: 0.0,
) -> list[MatmulPlan]:
    """Every plan that is the cheapest for what the axes do in the product, the cheapest of all first.

    Args:
        matmul: What is multiplied.
        element_bytes: Bytes per element.
        move_price: What a step of a route costs, 0 or more; costs are compared to 9 decimals.
        product_price: What the product costs on one device, from the sizes of each dim there.

    Raises:
        RedistributionError: The result shall be left in parts of a sum where no plan leaves any.
        PlacementError: A tensor cannot lie so.
    """

    @cache
    def moved(tensor: ShardedTensor, source: Layout, target: Layout) -> Route | None:
        shape = matmul.shape(tensor)
        try:
            return cheapest_route(source, target, matmul.degrees, shape, element_bytes, move_price, fused=True)
        except RedistributionError:
            return None

    first, second, result = (*matmul.operands, matmul.result)
    for tensor in (first, second, result):
        local_shape(matmul.shape(tensor), tensor.layout, matmul.degrees)
    found: list[MatmulPlan] = []
    for rules in itertools.product(_rules(matmul.operation), repeat=len(matmul.mesh)):
        wanted = [tuple(rule.inputs[index] for rule in rules) for index in (0, 1)]
        product = tuple(rule.output for rule in rules)
        routes = (
            moved(first, first.layout, wanted[0]),
            moved(second, second.layout, wanted[1]),
            moved(result, product, result.layout),
        )
        if any(route is None for route in routes):
            continue
        before, also_before, after = (route for route in routes if route is not None)
        sizes = _local_sizes(matmul, rules)
        steps = itertools.chain.from_iterable(route.steps for route in (before, also_before, after))
        cost = math.fsum(map(move_price, steps)) + product_price(sizes)
        found.append(MatmulPlan(matmul, rules, (before, also_before), product, after, sizes, cost))
    if not found:
        raise RedistributionError(f"{result.name} cannot be left in parts of a sum over those axes")
    return sorted(found, key=lambda plan: (round(plan.cost, 9), len(plan.steps)))


def execute_plan(plan: MatmulPlan, first: Array, second: Array) -> Pieces:
    """What each device holds in the end, from whole operands: every route and every local product carried out."""
    matmul = plan.matmul
    pieces = [
        execute(route, split(tensor, operand.layout, matmul.degrees), matmul.degrees)
        for tensor, operand, route in zip((first, second), matmul.operands, plan.before, strict=True)
    ]
    products = {ranks: matmul.operation.compute(piece, pieces[1][ranks]) for ranks, piece in pieces[0].items()}
    return execute(plan.after, products, matmul.degrees)


def _rules(operation: Operation) -> list[Rule]:
    """Those without communication inside, which the routes are there for."""
    return [rule for rule in rules_of(operation, (Shard(0),)) if rule.run is None]


def _local_sizes(matmul: ShardedMatmul, rules: Sequence[Rule]) -> dict[str, int]:
    sizes = dict(matmul.sizes)
    for dim, degree in _sharded_dims(matmul, rules):
        sizes[dim] = -(-sizes[dim] // degree)
    return sizes


def _sharded_dims(matmul: ShardedMatmul, rules: Sequence[Rule]) -> Iterator[tuple[str, int]]:
    dims = itertools.chain.from_iterable(tensor.dims for tensor in matmul.operands)
    letters = dict(zip("".join(matmul.operation.operands), dims, strict=True))
    for rule, degree in zip(rules, matmul.degrees, strict=True):
        if rule.label:
            yield letters[rule.label], degree
