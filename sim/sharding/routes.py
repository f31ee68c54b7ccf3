"""The cheapest sequence of collectives between two layouts on a mesh of several axes.

A shortest path over layouts (Dijkstra), so a detour is found where it pays: reduce-scatter, all-reduce
and all-gather on a mesh of two axes move less than an all-reduce over one after the other. An edge
changes the placement on one axis, or on neighbouring axes at once, by one collective. It is right if what the later
axes do commutes with it, as shards of other dims do; two axes on one dim need the striped forms of `_renamed_steps`.

>>> from sim.sharding.layout import format_layout, parse_layout
>>> route = cheapest_route(parse_layout("P(sum), P(sum)"), parse_layout("R, R"), (2, 8), (16, 64), 2)
>>> [(step.collective, step.axis) for step in route.steps]
[('reduce_scatter', 1), ('all_reduce', 0), ('all_gather', 1)]
>>> route.bytes_per_device
3840.0
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.sharding.kinds import StridedShard
from sim.sharding.layout import Layout, Pieces, format_layout, local_shape, local_shapes
from sim.sharding.placement import REPLICATE, Partial, Placement, PlacementError, Replicate, Shard
from sim.sharding.redistribute import RedistributionError, collective_between, sent_share

_PLAIN = (Replicate, Shard, StridedShard, Partial)


class RouteStep(NamedTuple):
    """One collective, or one local slice, on one axis of the mesh.

    Attributes:
        axis: Index of the axis, or of the first of several neighbours.
        collective: None where every rank slices its own piece.
        source, target: Placement before and after of what a group of the axis holds, which for stripes around
            a later axis' shard is a plain shard.
        layout: All placements afterwards.
        bytes_per_device: Bytes each rank sends.
        span: Neighbouring axes that the step moves at once, as one group.
    """

    axis: int
    collective: str | None
    source: Placement
    target: Placement
    layout: Layout
    bytes_per_device: float
    span: int = 1

    def of(self, shape: tuple[int, ...], degrees: tuple[int, ...], element_bytes: float) -> RouteStep:
        """The same step of a tensor."""
        axis, collective, source, target, layout, _, span = self
        sent_bytes = _sent(self, shape, degrees) * element_bytes if collective else 0.0
        return RouteStep(axis, collective, source, target, layout, sent_bytes, span)


@dataclass(frozen=True, slots=True)
class Route:
    """Steps in order, from `source` on."""

    source: Layout
    steps: tuple[RouteStep, ...]

    @property
    def bytes_per_device(self) -> float:
        """Bytes each rank sends in all."""
        return math.fsum(step.bytes_per_device for step in self.steps)


@dataclass(frozen=True, slots=True)
class _Problem:
    """What decides which steps lead from a layout to others.

    Attributes:
        choices: Placements that a route may use, per axis.
        degrees: Ranks per axis.
        shape: Of a tensor that is cut as evenly as the one that is moved: see `_cut_alike`.
        fused: Whether a step may move several axes.
    """

    choices: tuple[tuple[Placement, ...], ...]
    degrees: tuple[int, ...]
    shape: tuple[int, ...]
    fused: bool


class _Graph:
    """Layouts that some route came by, as numbers, and the steps between them: alike whatever the ends of a route."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self._numbers: dict[Layout, int] = {}
        self._known: list[list[tuple[int, RouteStep]]] = []
        self._further: list[Iterator[RouteStep]] = []

    def number(self, layout: Layout) -> int:
        """Of a layout."""
        found = self._numbers.setdefault(layout, len(self._known))
        if found == len(self._known):
            self._known.append([])
            self._further.append(_steps(layout, self._problem))
        return found

    def steps(self, number: int) -> Iterator[tuple[int, RouteStep]]:
        """Where steps from a layout lead, and the steps, of no tensor yet; each is computed when it is due."""
        known = self._known[number]
        yield from known
        for step in self._further[number]:
            known.append((self.number(step.layout), step))
            yield known[-1]


@lru_cache(maxsize=1024)
def _graph(problem: _Problem) -> _Graph:
    return _Graph(problem)


@lru_cache(maxsize=4096)
def _graph_between(
    source: Layout, target: Layout, degrees: tuple[int, ...], shape: tuple[int, ...], *, fused: bool, stripes: bool
) -> _Graph:
    """The graph for routes between two layouts. Raises: PlacementError."""
    for layout in (source, target):
        largest_shape(layout, degrees, shape)
    ends = list(zip(source, target, strict=True))
    choices = [_candidates(each, axis, degrees, len(shape), stripes=stripes) for axis, each in enumerate(ends)]
    return _graph(_Problem(tuple(choices), degrees, shape, fused))


def _cut_alike(shape: tuple[int, ...], degrees: tuple[int, ...], ends: Layout) -> tuple[int, ...]:
    """A shape between whose layouts the same steps lead, so that many tensors share what is known of them.

    Over two axes a step asks of a size but whether all ranks cut it evenly; beyond, and of unusual shards, of more.
    """
    if len(degrees) > 2 or not all(isinstance(each, _PLAIN) for each in ends):
        return shape
    ranks = math.prod(degrees)
    return tuple([ranks if size % ranks == 0 else ranks + 1 for size in shape])


def cheapest_route(
    source: Layout,
    target: Layout,
    degrees: Sequence[int],
    shape: Sequence[int],
    element_bytes: float,
    price: Callable[[RouteStep], float] = lambda step: step.bytes_per_device,
    *,
    fused: bool = False,
    stripes: bool = True,
) -> Route:
    """The cheapest steps from one layout to another; of equally cheap ones the fewest.

    Args:
        source: Placement per axis as the tensor lies.
        target: Placement per axis as it shall lie.
        degrees: Ranks per axis.
        shape: Of the whole tensor.
        element_bytes: Bytes per element.
        price: What a step costs, 0 or more; the bytes each rank sends by default, or seconds.
        fused: Whether one collective may also run over neighbouring axes that lie alike, as over one axis.
        stripes: Whether stripes are tried on the way, besides those that gathering an outer axis leaves.

    Raises:
        RedistributionError: The target has parts where the source has none.
        PlacementError: The tensor cannot lie so.
    """
    degrees, shape = tuple(degrees), tuple(shape)
    alike = _cut_alike(shape, degrees, (*source, *target))
    graph = _graph_between(source, target, degrees, alike, fused=fused, stripes=stripes)
    first, last = graph.number(source), graph.number(target)
    order = itertools.count()  # layouts have no order: the earlier one wins a tie
    queue: list[tuple[float, int, int, int, RouteStep | None]] = [(0.0, 0, next(order), first, None)]
    arrived: dict[int, RouteStep | None] = {}
    before: dict[int, int] = {}
    waiting: dict[int, tuple[float, int]] = {first: (0.0, 0)}
    while queue:
        cost, count, _, here, step = heapq.heappop(queue)
        if here in arrived:
            continue
        arrived[here] = step
        if here == last:
            return Route(source, _steps_back(last, arrived, before))
        for there, step in graph.steps(here):
            if there in arrived:
                continue
            onward = step.of(shape, degrees, element_bytes)
            # Rounded, so that equal costs reached in another order of additions count as equal.
            reached = (round(cost + price(onward), 9), count + 1)
            if reached < waiting.get(there, (math.inf, 0)):
                waiting[there], before[there] = reached, here
                heapq.heappush(queue, (*reached, next(order), there, onward))
                if there == last and reached == (cost, count + 1):  # for nothing: no other way is cheaper or shorter
                    arrived[last] = onward
                    return Route(source, _steps_back(last, arrived, before))
    raise RedistributionError(
        f"cannot turn {format_layout(source)} into {format_layout(target)}: parts only come out of an op"
    )


def execute(route: Route, pieces: Pieces, degrees: Sequence[int]) -> Pieces:
    """What the ranks hold after a route, from what they hold before it: each axis group acts on its own pieces."""
    for step in route.steps:
        after: Pieces = {}
        end = step.axis + step.span
        for ranks in pieces:
            if not any(ranks[step.axis : end]):
                members = itertools.product(*map(range, degrees[step.axis : end]))
                group = [(*ranks[: step.axis], *member, *ranks[end:]) for member in members]
                whole = step.source.assemble([pieces[member] for member in group])
                after.update(zip(group, step.target.split(whole, len(group)), strict=True))
        pieces = after
    return pieces


def _steps_back(last: int, arrived: Mapping[int, RouteStep | None], before: Mapping[int, int]) -> tuple[RouteStep, ...]:
    steps: list[RouteStep] = []
    while (step := arrived[last]) is not None:
        steps.append(step)
        last = before[last]
    return tuple(reversed(steps))


# --- edges --------------------------------------------------------------------------------------------


def _candidates(
    ends: Iterable[Placement], axis: int, degrees: Sequence[int], dims: int, *, stripes: bool
) -> tuple[Placement, ...]:
    """Placements a route may use on an axis: the plain ones, stripes of the other axes, and both ends'."""
    others = {degree for other, degree in enumerate(degrees) if other != axis and degree > 1}
    shards = [Shard(dim) for dim in range(dims)]
    striped = [StridedShard(dim, degree) for dim in range(dims) for degree in sorted(others) if stripes]
    found = dict.fromkeys([REPLICATE, *shards, *striped, *ends])
    return tuple(placement for placement in found if placement.holds != "part")


def _steps(layout: Layout, problem: _Problem) -> Iterator[RouteStep]:
    for axis, current in enumerate(layout):
        source = _as_seen(axis, current, layout, problem)
        if source is not None:
            for wanted in problem.choices[axis]:
                target = _as_seen(axis, wanted, layout, problem)
                after = (*layout[:axis], wanted, *layout[axis + 1 :])
                possible = target is not None and _in_one_step(source, target, problem)
                if wanted != current and target is not None and possible and _fits(after, problem):
                    yield RouteStep(axis, collective_between(source, target), source, target, after, 0.0)
        yield from _renamed_steps(axis, layout, problem)
    if problem.fused:
        yield from _fused_steps(layout, problem)


def _in_one_step(source: Placement, target: Placement, problem: _Problem) -> bool:
    """Whether one collective does it: a reduce-scatter leaves no dim short that its reduction must see whole."""
    return not (source.holds == "part" and source.spans(len(problem.shape)) & set(target.dims))


def _fused_steps(layout: Layout, problem: _Problem) -> Iterator[RouteStep]:
    """Moves neighbouring axes that lie alike as if they were one: plain shards in even sizes, and parts that nest."""
    for axis, end in itertools.combinations(range(len(layout) + 1), 2):
        current = layout[axis]
        if end - axis < 2 or any(other != current for other in layout[axis:end]):
            continue
        for wanted in problem.choices[axis]:
            ends = (current, wanted)
            one = all(_as_one(placement, axis, end, layout, problem) for placement in ends)
            if wanted != current and one and _in_one_step(current, wanted, problem):
                after = _replaced(layout, dict.fromkeys(range(axis, end), wanted))
                if _fits(after, problem):
                    yield RouteStep(axis, collective_between(current, wanted), current, wanted, after, 0.0, end - axis)


def _as_one(placement: Placement, axis: int, end: int, layout: Layout, problem: _Problem) -> bool:
    """Whether the same placement on all of these axes is that placement on one axis of all their ranks."""
    if not all(placement.commutes(later, len(problem.shape)) for later in layout[end:]):
        return False
    if isinstance(placement, Shard):
        return _even(placement.dim, layout[:axis], range(axis, end), problem)
    return isinstance(placement, Replicate) or placement.nests


def _as_seen(axis: int, placement: Placement, layout: Layout, problem: _Problem) -> Placement | None:
    """What a placement is to a group of its axis that sees only its own piece of the later axes' shards.

    Itself if it commutes with them. `SS(dim, n)` around a later `S(dim)` over n ranks is, stripe by stripe, a
    plain shard. None if it is no placement of that piece, so that it can neither come nor go.
    """
    seen = placement
    for other, later in enumerate(layout[axis + 1 :], axis + 1):
        if placement.commutes(later, len(problem.shape)):
            continue
        if not _striped_around(axis, placement, layout, other, problem):
            return None
        seen = later
    return seen


def _striped_around(axis: int, placement: Placement, layout: Layout, other: int, problem: _Problem) -> bool:
    """Whether it is `SS(dim, n)` and the one later shard of the dim is `S(dim)` over n ranks: even sizes only."""
    inner = layout[other]
    return (
        isinstance(inner, Shard)
        and placement == StridedShard(inner.dim, problem.degrees[other])
        and _alone(other, axis, layout, problem)
        and _even(inner.dim, layout[:axis], (axis, other), problem)
    )


def _alone(inner: int, axis: int, layout: Layout, problem: _Problem) -> bool:
    """Whether, of all that comes after an axis, only the inner one's shard concerns the dim that it shards."""
    shard, dims = layout[inner], len(problem.shape)
    return all(
        Shard(*shard.dims).commutes(current, dims) for current in (*layout[axis + 1 : inner], *layout[inner + 1 :])
    )


def _even(dim: int, outer: Layout, axes: Iterable[int], problem: _Problem) -> bool:
    """Whether every piece that the outer axes leave is sharded evenly along the dim by all the ranks of some axes."""
    ranks = math.prod(problem.degrees[axis] for axis in axes)
    sizes = _piece_shapes(outer, problem.degrees[: len(outer)], problem.shape)
    return all(shape[dim] % ranks == 0 for shape in sizes)


def _renamed_steps(axis: int, layout: Layout, problem: _Problem) -> Iterator[RouteStep]:
    """Gathers an outer axis under an inner one of the same dim, whose chunks then are stripes; and back."""
    for inner in range(axis + 1, len(layout)):
        outer_now, inner_now, degree = layout[axis], layout[inner], problem.degrees[axis]
        if not isinstance(inner_now, (Shard, StridedShard)) or not _alone(inner, axis, layout, problem):
            continue
        plain, striped = Shard(inner_now.dim), StridedShard(inner_now.dim, degree)
        if outer_now == inner_now == plain:
            after = _replaced(layout, {axis: REPLICATE, inner: striped})
            yield RouteStep(axis, collective_between(plain, REPLICATE), plain, REPLICATE, after, 0.0)
        even = inner_now == striped and _even(plain.dim, layout[:axis], (axis, inner), problem)
        if outer_now == REPLICATE and even:
            after = _replaced(layout, {axis: plain, inner: plain})
            yield RouteStep(axis, collective_between(REPLICATE, plain), REPLICATE, plain, after, 0.0)


def _replaced(layout: Layout, changes: Mapping[int, Placement]) -> Layout:
    return tuple(changes.get(axis, placement) for axis, placement in enumerate(layout))


# --- prices -------------------------------------------------------------------------------------------


def _sent(step: RouteStep, shape: tuple[int, ...], degrees: tuple[int, ...]) -> float:
    """Bytes that each rank sends, of elements of one byte."""
    axis, collective, source, target, layout, _, span = step
    assert collective
    before = (*layout[:axis], *[REPLICATE] * span, *layout[axis + span :])
    shape, degree = largest_shape(before, degrees, shape), math.prod(degrees[axis : axis + span])
    if collective == "all_to_all":
        return all_to_all_share(source, target, shape, degree) * math.prod(shape)
    return sent_share(collective, degree) * math.prod(shape)


@lru_cache(maxsize=1 << 14)
def all_to_all_share(source: Placement, target: Placement, shape: tuple[int, ...], degree: int) -> float:
    """Bytes that the busiest rank sends over the bytes of the tensor, when one shard is turned into another.

    Only what changes hands counts, which is why no detour is cheaper. Between even shards of different dims it is
    the (n - 1) / n^2 of the redistribution table.
    """
    if not math.prod(shape):
        return 0.0
    plain = isinstance(source, Shard) and isinstance(target, Shard) and source != target
    if plain and all(shape[shard.dims[0]] % degree == 0 for shard in (source, target)):
        return sent_share("all_to_all", degree)
    if len(source.dims) != 1 or len(target.dims) != 1:
        return 1 / degree  # [assumed] unknown shards keep nothing where it is
    sizes = tuple(shape[shard.dims[0]] for shard in (source, target))
    if source.dims == target.dims:
        owner, wanted = (shard.owners(sizes[0], degree) for shard in (source, target))
        return float(np.bincount(owner[owner != wanted], minlength=degree).max()) / sizes[0]
    if plain:
        return max(
            [current / sizes[0] * (1 - wanted / sizes[1]) for current, wanted in _chunks_side_by_side(sizes, degree)]
        )
    current, wanted = (shard.counts(size, degree) / size for shard, size in zip((source, target), sizes, strict=True))
    return float((current * (1 - wanted)).max())


def _chunks_side_by_side(sizes: Iterable[int], degree: int) -> Iterator[tuple[int, ...]]:
    """What ranks hold of each of some dims in chunks: of every kind of rank one, whole chunks being alike."""
    widths = [(size, -(-size // degree)) for size in sizes]
    first = {0} | {size // width + more for size, width in widths for more in (0, 1)}
    for rank in (each for each in first if each < degree):
        yield tuple([min(max(size - width * rank, 0), width) for size, width in widths])


def _fits(layout: Layout, problem: _Problem) -> bool:
    try:
        largest_shape(layout, problem.degrees, problem.shape)
    except PlacementError:
        return False
    return True


@lru_cache(maxsize=1 << 14)
def largest_shape(layout: Layout, degrees: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """`local_shape`, memoised: routes ask for the same few again and again."""
    return local_shape(shape, layout, degrees)


@lru_cache(maxsize=1 << 14)
def _piece_shapes(layout: Layout, degrees: tuple[int, ...], shape: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    return local_shapes(shape, layout, degrees)
