"""The exact optimum of a whole space with one mesh, by adding up every strategy in it.

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
from typing import NamedTuple, get_args

import numpy as np

from sim.arrays import Flags, Floats, Ints
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.layers.ops import Layer, Side
from sim.ops.layers import layer_ops
from sim.ops.rank import Rank
from sim.optimum.fronts import moves_table_s
from sim.optimum.spaces import Space, space_of
from sim.serving.phases import batching, most_sequences, phase_of
from sim.simulate import ROUNDING, degree_violations, evaluate
from sim.step.attention_expert_meshes import Sides, sides
from sim.step.costs import rank_of
from sim.step.layer import layer_sum
from sim.step.pipeline import pipeline, side_by_side
from sim.step.stage import base_of, room, stage_bytes, stage_s, vocabulary_seconds
from sim.strategy import CHOICES, Strategy
from sim.workload import Workload

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_BINS_PER_E_FOLD = 2000
"""Histogram resolution of the landscape: a bin is 0.05 % wide."""
_BINS_EACH_SIDE = 30 * _BINS_PER_E_FOLD
"""Bins below and above 1 token/s/GPU: exp(+-30), or 13 orders of magnitude each way."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy of a workload's space and the landscape around it.

    Attributes:
        evaluation: Of the best feasible strategy, or None if there is none.
        swept_tokens_per_s_per_gpu: Its throughput as the sweep added it up, 0.0 if there is none.
        space_size: Strategies in the space.
        feasible_count: How many of them break no limit.
        quantiles: Tokens/s/GPU of the feasible strategies by share, to within 0.05 %.
    """

    evaluation: Evaluation | None
    swept_tokens_per_s_per_gpu: float
    space_size: int
    feasible_count: int
    quantiles: Mapping[float, float]

    @property
    def feasible_share(self) -> float:
        """Feasible strategies over all."""
        return self.feasible_count / self.space_size


def find_optimum(workload: Workload, progress: Callable[[int, int], None] | None = None) -> Optimum:
    """Solves the whole space of a workload exactly.

    Args:
        workload: Its `space` is the paper's or the joint one.
        progress: Called with (done, total) parts of the work.

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
    evaluation = evaluate(workload, space.plain(total.best)) if total.best else None
    return Optimum(
        evaluation=evaluation,
        swept_tokens_per_s_per_gpu=total.best_tokens_per_s_per_gpu,
        space_size=space.size,
        feasible_count=int(total.histogram.sum()),
        quantiles=total.quantiles(evaluation.tokens_per_s_per_gpu) if evaluation else {},
    )


MOST_BATCHES = 64
"""Longest list of batches that is added up; `find_best` solves longer ones without looking at each."""


def can_be_added_up(space: Space) -> bool:
    """Whether a space has a landscape: one mesh, steps and layers of one kind, engines' ends, few batches."""
    workload = space.workload
    return (
        len(workload.model.groups) == 1
        and _cut(layer_ops(workload.model)) is not None
        and not space.vocabulary
        and space.one_mesh
        and not phase_of(workload).prefills
        and len(space.batch) <= MOST_BATCHES
    )


class _Landscape:
    """Best strategy and histogram of feasible throughputs, over log-spaced bins."""

    def __init__(self) -> None:
        self.best: Strategy | None = None
        self.best_tokens_per_s_per_gpu = 0.0
        self.histogram = np.zeros(2 * _BINS_EACH_SIDE, dtype=np.int64)

    def count(self, tokens_per_s_per_gpu: Floats) -> None:
        """Adds feasible strategies to the histogram."""
        # Single precision halves the cost of the logarithm and blurs a bin's edge by a thousandth of its width.
        position = np.log(tokens_per_s_per_gpu.astype(np.float32))
        position *= np.float32(_BINS_PER_E_FOLD)
        position += np.float32(_BINS_EACH_SIDE)
        bins = np.clip(position, 0, 2 * _BINS_EACH_SIDE - 1, out=position).astype(np.int64)
        lowest = int(bins.min())
        counts = np.bincount(np.subtract(bins, lowest, out=bins))
        self.histogram[lowest : lowest + len(counts)] += counts

    def quantiles(self, most: float) -> dict[float, float]:
        """Throughput below which each share of the feasible strategies lies: bin centres, up to `most`."""
        total = int(self.histogram.sum())
        cumulative = np.cumsum(self.histogram)
        bins = {share: int(np.argmax(cumulative >= share * total)) for share in QUANTILES}
        centres = {share: math.exp((b + 0.5 - _BINS_EACH_SIDE) / _BINS_PER_E_FOLD) for share, b in bins.items()}
        return {share: min(centre, most) for share, centre in centres.items()}


class _Tables:
    """Costs of every op and choice, and of every tensor between choices, for one (tp, ep, batch).

    Attributes:
        time_s, weight_bytes, kv_bytes, peak_bytes: [3] per op name.
        move_s: [3, ...] per tensor name: producer's choice, then each consumer's.
        allowed: Choices per op that the space has and that break no limit at this degree.
    """

    def __init__(self, rank: Rank, space: Space) -> None:
        layer, alone = layer_sum(rank.layer), sides(rank, rank)
        self.tensors = {addend.name: addend.ops for addend in layer.moves}
        costs = {addend.name: [addend.price(alone, (choice,)) for choice in CHOICES] for addend in layer.costs}
        self.time_s = {name: np.array([c.time_s for c in row]) for name, row in costs.items()}
        self.weight_bytes = {name: np.array([c.weight_bytes for c in row]) for name, row in costs.items()}
        self.kv_bytes = {name: np.array([c.kv_bytes for c in row]) for name, row in costs.items()}
        self.peak_bytes = {name: np.array([c.activation_bytes for c in row]) for name, row in costs.items()}
        self.allowed = {
            name: [choice for choice in space.choices[name] if row[choice].broken is None]
            for name, row in costs.items()
        }
        self.move_s = {
            addend.name: moves_table_s(alone, addend, (CHOICES,) * len(addend.ops)) for addend in layer.moves
        }


class _Segment:
    """Every allowed combination of the choices of some neighbouring ops.

    Attributes:
        ops: Their names.
        choices: [n, ops] the combinations.
        sizes: [3, sizes] bytes of weights and of KV per layer, and the largest activations of any of the ops.
        size: [n] which of them a combination has.
    """

    def __init__(self, tables: _Tables, ops: Sequence[str]) -> None:
        self.ops = tuple(ops)
        self._tables = tables
        rows = list(itertools.product(*(tables.allowed[name] for name in ops)))
        self.choices = np.array(rows, dtype=np.int64).reshape(len(rows), len(ops))
        self._column = {name: self.choices[:, index] for index, name in enumerate(ops)}
        self._inner_s = self._total(tables.time_s)
        peaks = [tables.peak_bytes[name][column] for name, column in self._column.items()]
        every = np.stack([self._total(tables.weight_bytes), self._total(tables.kv_bytes), np.max(peaks, axis=0)])
        keys = np.zeros(len(rows), dtype=np.int64)
        for figures in every:
            values, which = np.unique(figures, return_inverse=True)
            keys = keys * len(values) + which
        _, first, self.size = np.unique(keys, return_index=True, return_inverse=True)
        self.sizes = every[:, first]

    def named(self, row: int) -> dict[str, int]:
        """The choices of one combination, by op name."""
        return dict(zip(self.ops, self.choices[row].tolist(), strict=True))

    def _total(self, per_op: Mapping[str, Floats]) -> Floats:
        return np.sum([per_op[name][column] for name, column in self._column.items()], axis=0)

    def time_s(self, separators: Mapping[str, int]) -> Floats:
        """[n] seconds of the ops and of every tensor they leave or read, given the choices around them."""
        column: JsonObject = {**separators, **self._column}
        time_s = self._inner_s.copy()
        for tensor, ends in self._tables.tensors.items():
            if not self._column.keys().isdisjoint(ends):
                time_s += self._tables.move_s[tensor][tuple(column[name] for name in ends)]
        return time_s


class _Cut(NamedTuple):
    """A layer cut by the last op of each side, names of ops.

    Attributes:
        left, right: Between them; no tensor has ends in both.
        separators: The last ops.
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
    apart = all(set(left).isdisjoint(tensor.ends) or set(right).isdisjoint(tensor.ends) for tensor in layer.tensors)
    return _Cut(tuple(left), tuple(right), (attention[-1], experts[-1])) if apart else None


def _add_part(landscape: _Landscape, space: Space, tp: int, ep: int, batch: int) -> None:
    """Adds every pp and every choice of one (tp, ep, batch) to the landscape."""
    workload = space.workload
    depths = [pp for pp in space.pp if not degree_violations(workload, tp, ep, pp)]
    if not depths or batch > most_sequences(workload, ep):
        return
    state = batching(workload, batch, ep)
    assert state.decode is not None
    rank, engine_s = rank_of(workload, state.decode, tp, ep), state.pace.engine_s(state.times)
    factor = state.times.kernel_factor
    tables = _Tables(rank, space)
    if not all(tables.allowed.values()):
        return
    cut, names = _cut(rank.layer), tuple(rank.layer.op_by_name)
    assert cut is not None
    left, right = (_Segment(tables, ops) for ops in (cut.left, cut.right))
    alone, stages_of = sides(rank, rank), functools.cache(_stages_of)
    pairs = list(itertools.product(*(tables.allowed[name] for name in cut.separators)))
    of_pairs = [dict(zip(cut.separators, pair, strict=True)) for pair in pairs]
    peaks = [max(tables.peak_bytes[name][choice] for name, choice in each.items()) for each in of_pairs]
    rooms = _Rooms(alone, depths, (left, right), peaks)
    for separators, peak_bytes in zip(of_pairs, peaks, strict=True):
        own_s = sum(tables.time_s[name][choice] for name, choice in separators.items())
        (left_s, rows), (right_s, columns) = (
            _ascending(left.time_s(separators) + own_s),
            _ascending(right.time_s(separators)),
        )
        layer_s = None
        for pp in depths:
            if not (room_for := rooms.of(peak_bytes, pp)).any():
                continue
            parts = stages_of(alone, pp, separators[rank.layer.stream.producer])
            limit_s = (workload.tpot_limit_s * (1 + ROUNDING) * state.pace.gained / pp - engine_s) / factor
            longest_s = min((limit_s - ends_s) / layers for layers, ends_s in parts)
            height, width = (
                np.count_nonzero(each) for each in (left_s + right_s[0] <= longest_s, left_s[0] + right_s <= longest_s)
            )
            if not height:
                continue
            if layer_s is None:
                layer_s = np.add.outer(left_s, right_s)
            in_time_s = layer_s[:height, :width]
            allowed = in_time_s <= longest_s
            if not room_for.all():
                allowed &= room_for[left.size[rows[:height]]][:, right.size[columns[:width]]]
            feasible_s = in_time_s[allowed]
            if not feasible_s.size:
                continue
            of_stages_s = (factor * layers * feasible_s + (factor * ends_s + engine_s) for layers, ends_s in parts)
            slowest_s = functools.reduce(np.maximum, of_stages_s)
            tokens_per_s_per_gpu = state.tokens / (tp * ep * pp) / slowest_s
            landscape.count(tokens_per_s_per_gpu)
            winner = int(feasible_s.argmin())
            if tokens_per_s_per_gpu[winner] > landscape.best_tokens_per_s_per_gpu:
                equal = np.nonzero(allowed & (in_time_s == feasible_s[winner]))
                row, column = divmod(int(np.min(rows[equal[0]] * len(columns) + columns[equal[1]])), len(columns))
                choices = separators | left.named(row) | right.named(column)
                landscape.best = Strategy(tp, ep, pp, batch, tuple(choices[name] for name in names))
                landscape.best_tokens_per_s_per_gpu = float(tokens_per_s_per_gpu[winner])


def _ascending(seconds: Floats) -> tuple[Floats, Ints]:
    """[n] the least first; and of each where it stood."""
    order = np.argsort(seconds, kind="stable")
    return seconds[order], order


def _stages_of(alone: Sides, pp: int, combine_choice: int) -> list[tuple[int, float]]:
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
        peaks_bytes: Largest activations of ops of neither segment that are asked for.
    """

    def __init__(
        self, alone: Sides, depths: Sequence[int], segments: Sequence[_Segment], peaks_bytes: Sequence[float]
    ) -> None:
        workload, base = alone.experts.workload, base_of([alone])
        pipelines = [pipeline(workload, pp) for pp in depths]
        starts = np.cumsum([0, *(len(each) for each in pipelines)])
        pp = np.repeat(depths, np.diff(starts))[:, None, None]
        stages = side_by_side([stage for each in pipelines for stage in each], pp.shape)
        weights, kv, inner = zip(*(each.sizes for each in segments), strict=True)
        held, inner_bytes = ([np.add.outer(*weights)], [np.add.outer(*kv)]), np.maximum.outer(*inner)
        self._fits: dict[tuple[float, int], Flags] = {}
        for peak_bytes in set(peaks_bytes):
            kinds = stage_bytes(workload, stages, pp, *held, np.maximum(inner_bytes, peak_bytes), base)
            needed, allowed = room(workload, sum(kinds), kinds[1])
            fits = np.logical_and.reduceat(needed <= allowed, starts[:-1], axis=0)
            self._fits |= {(peak_bytes, pp): each for pp, each in zip(depths, fits, strict=True)}

    def of(self, peak_bytes: float, pp: int) -> Flags:
        """[left sizes, right sizes] whether a layer has room."""
        return self._fits[peak_bytes, pp]
