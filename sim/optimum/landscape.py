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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats
from sim.evaluation import Evaluation
from sim.ops.rank import Rank
from sim.optimum.spaces import Space, space_of
from sim.serving.phases import batching, most_sequences, phase_of
from sim.simulate import ROUNDING, degree_violations, evaluate
from sim.step.attention_expert_meshes import Sides, sides
from sim.step.costs import rank_of
from sim.step.layer import Addend, layer_sum
from sim.step.pipeline import Stage, pipeline
from sim.step.stage import base_of, room, stage_bytes, vocabulary_layers_s, vocabulary_seconds, working_bytes
from sim.strategy import CHOICES, Strategy
from sim.workload import Workload

_SEPARATORS: tuple[str, ...] = ("attn_residual", "combine")
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
    alike = len(workload.model.groups) == 1 and not space.vocabulary
    return (
        alike
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
        position = np.log(tokens_per_s_per_gpu.astype(np.float32)) * np.float32(_BINS_PER_E_FOLD)
        bins = np.clip(position + np.float32(_BINS_EACH_SIDE), 0, 2 * _BINS_EACH_SIDE - 1).astype(np.int32)
        lowest = int(bins.min())
        counts = np.bincount(bins - lowest)
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
        self.move_s = {addend.name: _move_table(addend, alone) for addend in layer.moves}


def _move_table(addend: Addend, alone: Sides) -> Floats:
    seconds = [sum(addend.price(alone, ends)) for ends in itertools.product(CHOICES, repeat=len(addend.ops))]
    return np.array(seconds).reshape([len(CHOICES)] * len(addend.ops))


class _Segment:
    """Every allowed combination of the choices of some neighbouring ops.

    Attributes:
        ops: Their names.
        choices: [n, ops] the combinations.
        weight_bytes, kv_bytes: [n] per layer.
        peak_bytes: [n] largest activations of any of the ops.
    """

    def __init__(self, tables: _Tables, ops: Sequence[str]) -> None:
        self.ops = tuple(ops)
        self._tables = tables
        rows = list(itertools.product(*(tables.allowed[name] for name in ops)))
        self.choices = np.array(rows, dtype=np.int64).reshape(len(rows), len(ops))
        self._column = {name: self.choices[:, index] for index, name in enumerate(ops)}
        self.weight_bytes = self._total(tables.weight_bytes)
        self.kv_bytes = self._total(tables.kv_bytes)
        peaks = [tables.peak_bytes[name][column] for name, column in self._column.items()]
        self.peak_bytes = np.max(peaks, axis=0)
        self._inner_s = self._total(tables.time_s)

    def named(self, row: int) -> dict[str, int]:
        """The choices of one combination, by op name."""
        return dict(zip(self.ops, self.choices[row].tolist(), strict=True))

    def _total(self, per_op: Mapping[str, Floats]) -> Floats:
        return np.sum([per_op[name][column] for name, column in self._column.items()], axis=0)

    def time_s(self, separators: Mapping[str, int]) -> Floats:
        """[n] seconds of the ops and of every tensor they leave or read, given the choices around them."""
        column: dict[str, Any] = {**separators, **self._column}
        time_s = self._inner_s.copy()
        for tensor, ends in self._tables.tensors.items():
            if not self._column.keys().isdisjoint(ends):
                time_s += self._tables.move_s[tensor][tuple(column[name] for name in ends)]
        return time_s


def _add_part(landscape: _Landscape, space: Space, tp: int, ep: int, batch: int) -> None:
    """Adds every pp and every choice of one (tp, ep, batch) to the landscape."""
    workload = space.workload
    stages = [pp for pp in space.pp if not degree_violations(workload, tp, ep, pp)]
    if not stages:
        return
    state = batching(workload, batch, ep)
    assert state.decode is not None
    rank, engine_s = rank_of(workload, state.decode, tp, ep), state.pace.engine_s(state.times)
    if batch > most_sequences(workload, ep):
        return
    tables = _Tables(rank, space)
    if not all(tables.allowed.values()):
        return
    names = tuple(rank.layer.op_by_name)
    first, last = (names.index(name) for name in _SEPARATORS)
    left, right = _Segment(tables, names[:first]), _Segment(tables, names[first + 1 : last])
    for pair in itertools.product(*(tables.allowed[name] for name in _SEPARATORS)):
        separators = dict(zip(_SEPARATORS, pair, strict=True))
        own_s = sum(tables.time_s[name][choice] for name, choice in separators.items())
        own_peak = max(tables.peak_bytes[name][choice] for name, choice in separators.items())
        layer_s = np.add.outer(left.time_s(separators) + own_s, right.time_s(separators))
        fastest_s = float(layer_s.min())
        for pp in stages:
            parts = _stages_of(rank, pp, separators["combine"])
            limit_s = (workload.tpot_limit_s * (1 + ROUNDING) * state.pace.gained - engine_s) / pp
            longest_s = min((limit_s - ends_s) / layers for layers, ends_s in parts)
            if fastest_s > longest_s:
                continue
            allowed = layer_s <= longest_s
            if (fits := _fits_memory(rank, pp, left, right, own_peak)) is not None:
                allowed &= fits
            feasible_s = layer_s[allowed]
            if not feasible_s.size:
                continue
            of_stages_s = (layers * feasible_s + (ends_s + engine_s / pp) for layers, ends_s in parts)
            slowest_s = functools.reduce(np.maximum, of_stages_s)
            tokens_per_s_per_gpu = state.tokens / (tp * ep * pp) / slowest_s
            landscape.count(tokens_per_s_per_gpu)
            winner = int(feasible_s.argmin())
            if tokens_per_s_per_gpu[winner] > landscape.best_tokens_per_s_per_gpu:
                row, column = divmod(int(np.flatnonzero(allowed)[winner]), len(right.choices))
                choices = separators | left.named(row) | right.named(column)
                landscape.best = Strategy(tp, ep, pp, batch, tuple(choices[name] for name in names))
                landscape.best_tokens_per_s_per_gpu = float(tokens_per_s_per_gpu[winner])


def _stages_of(rank: Rank, pp: int, combine_choice: int) -> list[tuple[int, float]]:
    """(layers, most seconds of everything else) of the stages with so many layers."""
    ends = vocabulary_seconds(sides(rank, rank), pp, combine_choice)
    most_s: dict[int, float] = {}
    for stage in pipeline(rank.workload, pp):
        layers = stage.layers[0]
        most_s[layers] = max(most_s.get(layers, 0.0), vocabulary_layers_s(stage, ends) + ends.send_s)
    return list(most_s.items())


def _fits_memory(
    rank: Rank, pp: int, left: _Segment, right: _Segment, own_peak_bytes: float
) -> NDArray[np.bool_] | None:
    """[left, right] whether a layer has room; None when all do."""
    found = [_fits_stage(rank, pp, stage, left, right, own_peak_bytes) for stage in pipeline(rank.workload, pp)]
    tight = [each for each in found if each is not None]
    return np.logical_and.reduce(tight) if tight else None


def _fits_stage(
    rank: Rank, pp: int, stage: Stage, left: _Segment, right: _Segment, own_peak_bytes: float
) -> NDArray[np.bool_] | None:
    workload, segments, base = rank.workload, (left, right), base_of([sides(rank, rank)])
    head_bytes = max(own_peak_bytes, base.head)
    peaks = [np.maximum(segment.peak_bytes, head_bytes) for segment in segments]

    def fits(weights: Any, kv: Any, peak_bytes: Any) -> Any:
        """Whether layers of so many bytes have room."""
        of_weights, of_kv = stage_bytes(stage, pp, [weights], [kv], base)
        needed, allowed = room(workload, of_weights + of_kv + sum(working_bytes(workload, base, peak_bytes)), of_kv)
        return needed <= allowed

    weights, kv = [each.weight_bytes for each in segments], [each.kv_bytes for each in segments]
    most_weights, most_kv = (sum(float(each.max()) for each in sizes) for sizes in (weights, kv))
    if fits(most_weights, most_kv, max(float(peak.max()) for peak in peaks)):
        return None
    # Whole tables only where they make a difference: each is as large as the landscape.
    peak_bytes = np.maximum.outer(*peaks) if any((peak > head_bytes).any() for peak in peaks) else head_bytes
    if workload.engine is None or workload.engine.memory.of == "total":  # then cache counts as weights do
        held = [weight + pp * cached for weight, cached in zip(weights, kv, strict=True)]
        return fits(np.add.outer(*held), 0.0, peak_bytes)
    return fits(np.add.outer(*weights), np.add.outer(*kv), peak_bytes)
