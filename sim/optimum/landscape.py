"""The landscape around the optimum of a space with one mesh, by adding up every strategy in it.

For fixed (tp, ep, batch) a layer's time is a sum of terms that each depend on the choices of a few
neighbouring ops. Once the choices of the two residual adds are fixed, the ops between them fall
into two independent segments, so all layer times (3^12 in the joint space) are outer sums of two short vectors, and
every pipeline degree only shifts and scales them. Nothing is pruned and nothing is sampled: the
feasible share counts each strategy once. Source: design in this repository; it agrees with
`sim.simulate.evaluate` to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats, Ints
from sim.canonical import dims_matter
from sim.evaluation import Evaluation
from sim.layers.ops import Layer, Side
from sim.ops.layers import layer_ops
from sim.ops.rank import OpCost
from sim.optimum.addend_tables import ACTIVATION_BYTES, KV_BYTES, TIME_S, WEIGHT_BYTES, AddendTables, Factor, joined
from sim.optimum.bounds import SLACK
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, space_of
from sim.optimum.sums import vocabulary_around
from sim.serving.confidence import ROUNDING, slower
from sim.serving.phases import Batching, batching, most_sequences, phase_of, throughput
from sim.simulate import degree_violations
from sim.step.attention_expert_meshes import Sides, sides
from sim.step.costs import rank_of
from sim.step.pipeline import Stage, pipelines
from sim.step.stage import base_of, stage_room, stage_s
from sim.strategy import Strategy
from sim.workload import Workload

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_BIN_BITS = 12
"""Bits of a single-precision number that a bin of the histogram is blind to; the eleven before them tell 0.05 %."""
_LAYER_BITS = 40
"""Bits of a layer's seconds that are looked at only near the limit; twelve before them are of the mantissa."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy of a workload's space and the landscape around it.

    Attributes:
        evaluation: Of the best feasible strategy, or None if there is none.
        space_size: Strategies in the space.
        feasible_count: How many of them break no limit.
        fastest: Tokens/s/GPU of the fastest that was counted, to within 0.05 %; 0.0 if there is none.
        quantiles: The same of the feasible strategies by share.
    """

    evaluation: Evaluation | None
    space_size: int
    feasible_count: int
    fastest: float
    quantiles: Mapping[float, float]

    @property
    def feasible_share(self) -> float:
        """Feasible strategies over all."""
        return self.feasible_count / self.space_size


def find_optimum(
    workload: Workload, progress: Callable[[int, int], None] | None = None, best: Evaluation | None = None
) -> Optimum:
    """The best strategy of a workload's space, and what lies around it.

    Args:
        workload: Its `space` is the paper's or the joint one.
        progress: Called with (done, total) parts of the work.
        best: What the search found, if that is known.

    Raises:
        ValueError: Steps carry prompts, or the space is the extended one, which is too large to add up: see
            `sim.optimum.exact_search`.

    >>> from sim.config.catalog import load_workload
    >>> find_optimum(load_workload("llama_3_1_405b_8k")).evaluation.feasible
    True
    """
    space = space_of(workload)
    if not can_be_added_up(space):
        what = f"the space {workload.space!r} of {workload.name} in phase {workload.phase!r}"
        raise ValueError(f"{what} cannot be added up: ask `find_best`")
    parts = list(itertools.product(space.tp, space.ep, space.batch))
    total = _Landscape()
    for done, (tp, ep, batch) in enumerate(parts, start=1):
        depths = [pp for pp in space.pp if not degree_violations(workload, tp, ep, pp)]
        for start in range(0, len(depths) if batch <= most_sequences(workload, ep) else 0, _MOST_DEPTHS):
            _add_part(total, space, tp, ep, batch, tuple(depths[start : start + _MOST_DEPTHS]))
        if progress:
            progress(done, len(parts))
    best = best or find_best(space).evaluation
    fastest, *quantiles = total.quantiles((1.0, *QUANTILES)) if total.histogram.any() else [0.0]
    most = best.tokens_per_s_per_gpu if best else math.inf
    by_share = {share: min(each, most) for share, each in zip(QUANTILES, quantiles, strict=False)}
    return Optimum(best, space.size, int(total.histogram.sum()), fastest, by_share)


MOST_BATCHES = 64
"""Longest list of batches that is added up; `find_best` solves longer ones without looking at each."""
_MOST_DEPTHS = 62
"""Pipeline degrees that are added up together, each a bit of a number."""
MOST_COMBINATIONS = 1 << 23
"""[assumed] Most combinations of a layer's choices that are added up: three of fourteen ops take seconds a mesh."""


def can_be_added_up(space: Space) -> bool:
    """Whether a space has a landscape: one mesh, one kind of steps and layers, engines' embedding, few choices."""
    workload = space.workload
    return (
        len(workload.model.groups) == 1
        and _cut(layer_ops(workload.model)) is not None
        and not space.vocabulary
        and space.one_mesh
        and not phase_of(workload).prefills
        and len(space.batch) <= MOST_BATCHES
        and math.prod(map(len, space.choices.values())) <= MOST_COMBINATIONS
    )


class _Landscape:
    """How many feasible strategies there are by throughput.

    A bin is where the first bits of seconds per token and GPU are alike, the exponent and the first half of the
    mantissa in single precision: no wider than 0.05 % of what is in it.
    """

    def __init__(self) -> None:
        self.histogram = np.zeros(1 << (31 - _BIN_BITS), dtype=np.int64)

    def count(self, seconds: NDArray[np.float32], often: Ints) -> None:
        """Adds feasible strategies, so many of each seconds per token and GPU."""
        np.add.at(self.histogram, seconds.view(np.int32) >> _BIN_BITS, often)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Throughput below which each of some shares of the feasible strategies lies: bin centres."""
        slowest_first = np.cumsum(self.histogram[::-1])
        wanted: Floats = np.array(shares) * slowest_first[-1]
        bins: Ints = len(slowest_first) - 1 - np.searchsorted(slowest_first, wanted)
        centres: NDArray[np.int32] = np.array((2 * bins + 1) << (_BIN_BITS - 1), np.int32)
        seconds: NDArray[np.float32] = centres.view(np.float32)
        return (1 / seconds.astype(np.float64)).tolist()


class _Cut(NamedTuple):
    """A layer cut by the last op of each side, names of ops.

    Attributes:
        left, right: Between them; no tensor has ends in both.
        separators: The last ops; the second leaves the residual stream.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    separators: tuple[str, str]


def _cut(layer: Layer) -> _Cut | None:
    """How to cut a layer; None if it cannot be cut so."""
    attention, experts = ([op.name for op in layer.ops if op.side == side] for side in get_args(Side))
    if len(attention) < 2 or len(experts) < 2:
        return None
    left, right = attention[:-1], experts[:-1]
    apart = layer.stream.producer == experts[-1] and all(
        set(left).isdisjoint(tensor.ops) or set(right).isdisjoint(tensor.ops) for tensor in layer.tensors
    )
    return _Cut(tuple(left), tuple(right), (attention[-1], experts[-1])) if apart else None


class _Depth(NamedTuple):
    """A pipeline degree.

    Attributes:
        scale, more: [stages, 1] seconds per token and GPU as lines over the seconds of a layer.
        longest_s: The most that a layer may take.
    """

    scale: NDArray[np.float32]
    more: NDArray[np.float32]
    longest_s: float

    def slowest(self, layer_s: Floats) -> NDArray[np.float32]:
        """[n] seconds per token and GPU by the slowest stage."""
        found: NDArray[np.float32] = (layer_s.astype(np.float32) * self.scale + self.more).max(axis=0)
        return found


class _Segment:
    """Every combination of the choices of the ops between the separators.

    Attributes:
        time_s: [choices of the one separator, of the other, n] seconds of the ops and of the tensors at them.
        sizes: [3, sizes] bytes of weights and of KV per layer, and the largest activations of any of the ops.
        size: [n] which of them a combination has.
    """

    def __init__(
        self, tables: AddendTables, moved_s: Sequence[Factor], separators: Sequence[str], ops: Sequence[str]
    ) -> None:
        own = set(ops)
        sizes = {name: len(tables.choices[name]) for name in ops}
        around = {name: len(tables.choices[name]) for name in separators}
        seconds = (*tables.each(TIME_S, own), *(each for each in moved_s if not own.isdisjoint(each.ops)))
        self.time_s = joined(seconds, around | sizes).reshape(*around.values(), -1)
        every = np.stack(
            [
                joined(tables.each(figure, own), sizes, join).ravel()
                for figure, join in ((WEIGHT_BYTES, np.add), (KV_BYTES, np.add), (ACTIVATION_BYTES, np.maximum))
            ]
        )
        order = np.lexsort(every)  # equal ones side by side
        begins = np.concatenate([[True], (every[:, order[1:]] != every[:, order[:-1]]).any(axis=0)])
        self.size = np.empty(len(order), np.int64)
        self.size[order], first = np.cumsum(begins) - 1, order[begins]
        self.sizes = every[:, first]


def _add_part(landscape: _Landscape, space: Space, tp: int, ep: int, batch: int, depths: tuple[int, ...]) -> None:
    """Adds every choice of one (tp, ep, batch) in pipelines of some degrees to the landscape."""
    workload = space.workload
    state = batching(workload, batch, ep)
    assert state.decode is not None
    rank = rank_of(workload, state.decode, tp, ep)
    alone = sides(rank, rank)
    choices, alike = space.choices, 1
    if not dims_matter(Strategy(tp, ep, 1, batch, tuple(itertools.chain(*choices.values())))):  # all come to the same
        choices, alike = {name: row[:1] for name, row in choices.items()}, math.prod(map(len, choices.values()))
    every = AddendTables(alone, choices)
    tables = every.within(
        {name: [each for each in row if every.may(name, each)] for name, row in every.choices.items()}
    )
    if not all(tables.choices.values()):
        return
    cut = _cut(rank.layer)
    assert cut is not None
    firsts, lasts = (tables.costs[name] for name in cut.separators)
    of_depths = _depths(alone, state, depths, tuple(lasts))
    least_s = sum(min(cost.time_s for cost in row.values()) for row in tables.costs.values()) * SLACK
    if all(least_s > longest_s for of_last in of_depths for *_, longest_s in of_last):
        return  # moves take no less than nothing
    moved_s = list(tables.moved_s())
    left, right = (_Segment(tables, moved_s, cut.separators, ops) for ops in (cut.left, cut.right))
    rooms = _Rooms(alone, depths, (left, right))
    for to, last in enumerate(lasts.values()):
        grids = [
            (left.time_s[at, to] + (first.time_s + last.time_s), right.time_s[at, to], rooms.of(first, last))
            for at, first in enumerate(firsts.values())
        ]
        if roomy := [grid for grid in grids if grid[-1][0].any()]:
            for seconds, often in _in_time(roomy, (left.size, right.size), of_depths[to]):
                landscape.count(seconds, alike * often)


def _depths(alone: Sides, state: Batching, depths: tuple[int, ...], last_choices: Sequence[int]) -> list[list[_Depth]]:
    """What each pipeline degree makes of a layer, for each choice of what leaves the residual stream."""
    workload, rank = alone.experts.workload, alone.experts
    each = pipelines(workload, depths)
    through, layers = state.through(each.pp), each.stages.layers[0]
    step, tpot, _ = through.lines()
    around_s = stage_s(each.stages, (0.0,), {}, vocabulary_around((alone,), depths, last_choices))
    limit_s = (slower(workload).tpot_limit_s * (1 + ROUNDING) - tpot.constant_s) / (tpot.decode * each.pp)
    longest_s = np.minimum.reduceat((limit_s - around_s) / layers, each.starts, axis=-1)
    each_token = 1 / throughput(state.tokens, each.pp, 1.0, rank.tp * rank.ep * each.pp)
    scale = (each_token * step.decode * each.pp * layers).astype(np.float32)
    more = (each_token * (step.decode * each.pp * around_s + step.constant_s)).astype(np.float32)
    return [
        [
            _Depth(scale[its, None], some[its, None], float(each_s))
            for its, each_s in zip(each.ranges, most_s, strict=True)
        ]
        for some, most_s in zip(more, longest_s, strict=True)
    ]


def _in_time(
    grids: Sequence[tuple[Floats, Floats, _Room]], sizes: tuple[Ints, Ints], depths: Sequence[_Depth]
) -> Iterator[tuple[NDArray[np.float32], Ints]]:
    """Seconds per token and GPU of what is feasible in pipelines of each degree, and how often it is.

    Layers are counted by the first bits of their seconds, for all pipelines at once; those that have these bits in
    common with the most that a layer may take are looked at one by one.

    Args:
        grids: Seconds of both segments of a layer, `[rows]` and `[columns]`, and where it has room.
        sizes: Of rows and columns.
        depths: Pipeline degrees.
    """
    longest_s = np.array([depth.longest_s for depth in depths])
    least_s, most_s = (
        float(end([end(some_s) + end(more_s) for some_s, more_s, _ in grids])) for end in (np.min, np.max)
    )
    most_s = min(most_s, float(longest_s.max()))
    if least_s > most_s:
        return
    lowest, highest = map(int, _first_bits(np.array([least_s, most_s])))
    beyond = highest - lowest + 1
    limits: Ints = np.clip(_first_bits(np.maximum(longest_s, 0.0)) - lowest, 0, beyond)
    at_limit = np.zeros(beyond + 1, bool)
    at_limit[limits] = True
    at_limit[beyond] = False
    counted, alone = dict[int, Ints](), list[tuple[Floats, Ints]]()
    for left_s, right_s, (depths_of, which) in grids:
        rows, columns = left_s + right_s.min() <= most_s, left_s.min() + right_s <= most_s
        layer_s = np.add.outer(left_s[rows], right_s[columns])
        bins = np.minimum(_first_bits(layer_s) - lowest, beyond)
        (near,) = at_limit.take(bins.ravel()).nonzero()
        if len(depths_of) > 1:
            bins += len(at_limit) * which[sizes[0][rows]][:, sizes[1][columns]]
        bins = bins.ravel()
        counts = np.bincount(bins, minlength=len(at_limit) * len(depths_of)).reshape(-1, len(at_limit))
        for fitting, often in zip(depths_of.tolist(), counts, strict=True):
            counted[fitting] = counted[fitting] + often if fitting in counted else often
        alone.append((layer_s.ravel()[near], depths_of[bins[near] // len(at_limit)]))
    alone_s, alone_fits = map(np.concatenate, zip(*alone, strict=True))
    alone_bins = _first_bits(alone_s) - lowest
    every_bin: Ints = np.arange(lowest, lowest + beyond)
    centres = _middle_of(every_bin)
    for at, (depth, limit) in enumerate(zip(depths, limits.tolist(), strict=True)):
        often = sum([each[:limit] for fitting, each in counted.items() if fitting >> at & 1], np.zeros(limit, np.int64))
        (seen,) = often.nonzero()
        last_s = alone_s[(alone_bins == limit) & (alone_s <= depth.longest_s) & (alone_fits >> at & 1 == 1)]
        if len(seen) + len(last_s):
            seconds = depth.slowest(np.concatenate([centres[seen], last_s]))
            yield seconds, np.concatenate([often[seen], np.ones(len(last_s), np.int64)])


def _first_bits(seconds: Floats) -> Ints:
    bits: Ints = seconds.view(np.int64)
    return bits >> _LAYER_BITS


def _middle_of(first_bits: Ints) -> Floats:
    """Seconds in the middle of those that begin with some bits."""
    bits: Ints = (2 * first_bits + 1) << (_LAYER_BITS - 1)
    return bits.view(np.float64)


_Room = tuple[Ints, Ints]
"""Kinds of room, each with a bit per pipeline that has it; and the kind of both segments' sizes, `[left, right]`."""


class _Rooms:
    """Which layers have room on a GPU, by the sizes of their segments: choices differ in few.

    Args:
        alone: The GPU.
        depths: Pipeline stages that are asked for.
        segments: What a layer is made of.
    """

    def __init__(self, alone: Sides, depths: tuple[int, ...], segments: Sequence[_Segment]) -> None:
        weights, kv, inner = zip(*(each.sizes for each in segments), strict=True)
        self._stored, self._inner_bytes = ([np.add.outer(*weights)], [np.add.outer(*kv)]), np.maximum.outer(*inner)
        self._least_bytes = float(self._inner_bytes.min())  # ops that have less do not count
        self._workload, self._base, self._known = alone.experts.workload, base_of([alone]), dict[float, _Room]()
        each = pipelines(self._workload, depths)
        layers, _, first, last = each.stages
        self._pp, *flags = (of_all.reshape(-1, 1, 1) for of_all in (each.pp, *layers, first, last))
        self._stages = Stage(tuple(flags[:-2]), (), *flags[-2:])
        self._ranges = each.ranges

    def of(self, *between: OpCost) -> _Room:
        """In which pipelines a layer has room, with some ops that are in neither segment."""
        most_bytes = max(self._least_bytes, *(each.activation_bytes for each in between))
        if most_bytes not in self._known:
            peak = np.maximum(self._inner_bytes, most_bytes)
            needed, allowed = stage_room(self._workload, self._stages, self._pp, *self._stored, peak, self._base)
            kept, rooms = needed <= allowed, np.zeros(peak.shape, np.int64)
            for at, its in enumerate(self._ranges):
                rooms += kept[its].all(axis=0) << at
            kinds, which = np.unique(rooms, return_inverse=True)
            self._known[most_bytes] = kinds, which.reshape(peak.shape)
        return self._known[most_bytes]
