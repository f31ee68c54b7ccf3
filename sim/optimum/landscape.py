"""The landscape around the optimum of a space with one mesh, by adding up every strategy in it.

For fixed (tp, ep, batch) a layer's time is a sum of terms that each depend on the choices of a few
neighbouring ops. Once the choices of the two residual adds are fixed, the ops between them fall
into two independent segments, so all layer times (3^12 in the joint space) are outer sums of two short vectors, and
every pipeline degree only shifts and scales them. Nothing is pruned and nothing is sampled: the
feasible share counts each strategy once. Source: design in this repository; it agrees with
`sim.simulate.evaluate` to rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Flags, Floats, Ints
from sim.canonical import dims_matter
from sim.evaluation import Evaluation
from sim.layers.ops import Layer, Side
from sim.ops.layers import layer_ops
from sim.optimum.addend_tables import ACTIVATION_BYTES, KV_BYTES, TIME_S, WEIGHT_BYTES, AddendTables, Factor, joined
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, space_of
from sim.serving.confidence import ROUNDING, slower
from sim.serving.phases import StepLine, batching, most_sequences, phase_of, throughput
from sim.simulate import degree_violations
from sim.step.attention_expert_meshes import Sides, sides
from sim.step.costs import rank_of
from sim.step.pipeline import Stage, pipeline, pipelines
from sim.step.stage import base_of, stage_room, stage_s, vocabulary_seconds
from sim.strategy import Strategy
from sim.workload import Workload

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_BIN_BITS = 12
"""Bits of a single-precision number that a bin of the histogram is blind to; the eleven before them tell 0.05 %."""
Stages = list[tuple[float, float]]
"""Of pipeline stages a line over the seconds of a layer: how often these count, and everything else."""


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
        _add_part(total, space, tp, ep, batch)
        if progress:
            progress(done, len(parts))
    best = best or find_best(space).evaluation
    fastest, *quantiles = total.quantiles((1.0, *QUANTILES)) if total.histogram.any() else [0.0]
    most = best.tokens_per_s_per_gpu if best else math.inf
    by_share = {share: min(each, most) for share, each in zip(QUANTILES, quantiles, strict=False)}
    return Optimum(best, space.size, int(total.histogram.sum()), fastest, by_share)


MOST_BATCHES = 64
"""Longest list of batches that is added up; `find_best` solves longer ones without looking at each."""
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

    def count(self, seconds: NDArray[np.float32], least: np.float32, alike: int) -> None:
        """Adds feasible strategies to the histogram, none of which takes less, each standing for so many."""
        bins, lowest = seconds.view(np.int32) >> _BIN_BITS, int(least.view(np.int32)) >> _BIN_BITS
        counts = np.bincount(np.subtract(bins, lowest, out=bins))
        self.histogram[lowest : lowest + len(counts)] += alike * counts

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
        set(left).isdisjoint(tensor.ends) or set(right).isdisjoint(tensor.ends) for tensor in layer.tensors
    )
    return _Cut(tuple(left), tuple(right), (attention[-1], experts[-1])) if apart else None


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


def _add_part(landscape: _Landscape, space: Space, tp: int, ep: int, batch: int) -> None:
    """Adds every pp and every choice of one (tp, ep, batch) to the landscape."""
    workload = space.workload
    depths = [pp for pp in space.pp if not degree_violations(workload, tp, ep, pp)]
    if not depths or batch > most_sequences(workload, ep):
        return
    state = batching(workload, batch, ep)
    assert state.decode is not None
    rank = rank_of(workload, state.decode, tp, ep)
    alone = sides(rank, rank)
    tpot_limit_s = slower(workload).tpot_limit_s * (1 + ROUNDING)

    @functools.cache
    def longest(pp: int, last_choice: int) -> tuple[Stages, float]:
        """Seconds per token and GPU by each stage of a pipeline, and seconds that a layer may take in them."""
        through, parts = state.through(pp), _stages_of(alone, pp, last_choice)
        step, tpot = StepLine.of(through.step_s), StepLine.of(through.tpot_s)
        limit_s = (tpot_limit_s - tpot.constant_s) / (tpot.decode * pp)
        each_token = 1 / throughput(state.tokens, pp, 1.0, tp * ep * pp)
        lines = [
            (each_token * step.decode * pp * layers, each_token * (step.decode * pp * vocabulary_s + step.constant_s))
            for layers, vocabulary_s in parts
        ]
        return lines, min((limit_s - vocabulary_s) / layers for layers, vocabulary_s in parts)

    choices, alike = space.choices, 1
    if not dims_matter(Strategy(tp, ep, 1, batch, tuple(itertools.chain(*choices.values())))):  # all come to the same
        choices, alike = {name: row[:1] for name, row in choices.items()}, math.prod(map(len, choices.values()))
    every = AddendTables(alone, choices)
    tables = every.within(
        {name: [each for each in row if every.may(name, each)] for name, row in every.choices.items()}
    )
    if not all(tables.choices.values()):
        return
    least_s = sum(min(cost.time_s for cost in row.values()) for row in tables.costs.values()) * _ROUNDED
    if all(least_s > longest(pp, last)[1] for pp in depths for last in tables.choices[rank.layer.stream.producer]):
        return  # moves take no less than nothing
    cut = _cut(rank.layer)
    assert cut is not None
    moved_s = list(tables.moved_s())
    left, right = (_Segment(tables, moved_s, cut.separators, ops) for ops in (cut.left, cut.right))
    pairs = itertools.product(*(enumerate(tables.costs[name].items()) for name in cut.separators))
    rooms = _Rooms(alone, depths, (left, right))
    for (at, (_, first)), (to, (last_choice, last)) in pairs:
        left_s, right_s = left.time_s[at, to] + (first.time_s + last.time_s), right.time_s[at, to]
        peak_bytes = max(first.activation_bytes, last.activation_bytes)
        quickest_s, grid = float(left_s.min() + right_s.min()), None
        for pp in depths:
            of_stages, longest_s = longest(pp, last_choice)
            if quickest_s > longest_s:
                continue
            room_for, some, every = rooms.of(peak_bytes, pp)
            if not some:
                continue
            if grid is None:
                (left_s, rows), (right_s, columns) = _ascending(left_s), _ascending(right_s)
                layer_s = np.add.outer(left_s, right_s)
                grid = rows, columns, layer_s, layer_s.astype(np.float32)
            rows, columns, layer_s, coarse_s = grid
            height, width = (np.count_nonzero(each <= longest_s) for each in (layer_s[:, 0], layer_s[0]))
            in_time_s = layer_s[:height, :width]
            allowed = in_time_s <= longest_s
            if not every:
                allowed &= room_for[left.size[rows[:height]]][:, right.size[columns[:width]]]
            feasible_s = coarse_s[:height, :width][allowed]
            if not feasible_s.size:
                continue
            least_s = feasible_s.min()
            landscape.count(_slowest(feasible_s, of_stages), _slowest(least_s, of_stages), alike)


_ROUNDED = 1 - 2**-23
"""Times a number in single precision it is no more than what was rounded to it."""


def _slowest(layer_s: Any, of_stages: Sequence[tuple[float, float]]) -> Any:
    """Seconds per token and GPU by the slowest stage, in single precision: each a multiple of the layer's and more."""
    slowest = None
    for scale, more in of_stages:
        each = layer_s * np.float32(scale)
        each += np.float32(more)
        slowest = each if slowest is None else np.maximum(slowest, each)
    return slowest


def _ascending(seconds: Floats) -> tuple[Floats, Ints]:
    """[n] the least first; and of each where it stood."""
    order = np.argsort(seconds, kind="stable")
    return seconds[order], order


def _stages_of(alone: Sides, pp: int, combine_choice: int) -> Stages:
    """(layers, most seconds of everything else) of the stages with so many layers."""
    ends = vocabulary_seconds(alone, pp, combine_choice)
    most_s: dict[int, float] = {}
    for stage in pipeline(alone.experts.workload, pp):
        layers = stage.layers[0]
        most_s[layers] = max(most_s.get(layers, 0.0), stage_s(stage, (0.0,), {}, ends))
    return list(most_s.items())


class _Rooms:
    """Which layers have room on a GPU, by the sizes of their segments: choices differ in few.

    Args:
        alone: The GPU.
        depths: Pipeline stages that are asked for.
        segments: What a layer is made of.
    """

    def __init__(self, alone: Sides, depths: Sequence[int], segments: Sequence[_Segment]) -> None:
        self._workload, self._base, self._depths = alone.experts.workload, base_of([alone]), tuple(depths)
        weights, kv, inner = zip(*(each.sizes for each in segments), strict=True)
        self._stored, self._inner_bytes = ([np.add.outer(*weights)], [np.add.outer(*kv)]), np.maximum.outer(*inner)
        self._least_bytes = float(self._inner_bytes.min())
        self._fits: dict[float, dict[int, tuple[Flags, bool, bool]]] = {}

    def of(self, peak_bytes: float, pp: int) -> tuple[Flags, bool, bool]:
        """[left sizes, right sizes] whether a layer has room; whether any has, and whether all have.

        Args:
            peak_bytes: Largest activations of ops of neither segment.
            pp: Pipeline stages.
        """
        counted_bytes = max(peak_bytes, self._least_bytes)  # below, those of the segments are larger
        if counted_bytes not in self._fits:
            fits = zip(self._depths, self._room_for(counted_bytes), strict=True)
            self._fits[counted_bytes] = {depth: (each, bool(each.any()), bool(each.all())) for depth, each in fits}
        return self._fits[counted_bytes][pp]

    def _room_for(self, peak_bytes: float) -> Flags:
        """[depths, left sizes, right sizes]."""
        pp, stages, starts = _side_by_side(self._workload, self._depths)
        peak = np.maximum(self._inner_bytes, peak_bytes)
        needed, allowed = stage_room(self._workload, stages, pp, *self._stored, peak, self._base)
        return np.logical_and.reduceat(needed <= allowed, starts, axis=0)


@functools.lru_cache(maxsize=64)
def _side_by_side(workload: Workload, depths: tuple[int, ...]) -> tuple[Ints, Stage, Ints]:
    """Pipelines' degrees and stages `[stages, 1, 1]`, and where those of each begin."""
    each = pipelines(workload, depths)
    layers, _, first, last = each.stages
    pp, *flags = (of_all.reshape(-1, 1, 1) for of_all in (each.pp, *layers, first, last))
    return pp, Stage(tuple(flags[:-2]), (), *flags[-2:]), each.starts
