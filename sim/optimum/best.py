"""The exact best strategy of a space, in every phase: bounds leave out what cannot win, and nothing else.

With the choices of the two residual adds and of the norms behind them fixed, attention's side of a layer and the
experts' side meet only in their sums: seconds of each kind of step, bytes of weights, of KV cache, and the larger of
their activations. All latencies and the throughput are monotone in those sums. So of each side only those combinations
can win that no other beats in all of them (a Pareto front), and all pairs of the two fronts are added up.

Time and memory grow with the batch. So a range of batches is bounded by the costs of its smallest and the tokens of its
largest: ranges come best bound first and are halved, until the best bound left is a single batch that is no better than
the best strategy found. Lists of powers of two and lists of every batch are solved alike. Source: design in this
repository; it agrees with `sim.simulate.evaluate` to rounding, and with brute force on small spaces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.canonical import canonical
from sim.evaluation import Evaluation
from sim.layers.ops import Layer, layer_ops
from sim.layers.sizes import Load
from sim.optimum.spaces import Space
from sim.serving.phases import Batching, batching, most_sequences
from sim.simulate import ROUNDING, degree_violations, evaluate
from sim.step.costs import head_activation_bytes, op_cost
from sim.step.rank import OpCost, Rank
from sim.step.stage import layers_per_stage, memory_bytes, needed_and_allowed_bytes, room, stage_time
from sim.step.two_meshes import ATTENTION_SIDE, Sides, attention_rank, experts_rank, sides
from sim.strategy import MOST_CHOICES, Strategy
from sim.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_CHOICES = MOST_CHOICES
_SLACK = 1 - 1e-12
"""A bound that lies this little below the best is still looked into: sums round."""
_NARROW = 1.5
"""Largest over smallest batch of a range below which its smallest is added up for a bound that is tight."""

Mesh = tuple[int, int, int, int]
"""tp, cp, dp, ep."""


Score = Callable[[float, int], float]
"""What a strategy is worth, from its tokens/s/GPU and the GPUs of a replica."""


def as_is(tokens_per_s_per_gpu: float, _gpus: int) -> float:
    """Goes by tokens/s/GPU alone."""
    return tokens_per_s_per_gpu


@dataclass(frozen=True, slots=True)
class Best:
    """The best strategy of a space.

    Attributes:
        evaluation: Of it, or None if nothing is feasible.
        swept_tokens_per_s_per_gpu: Its throughput as the search added it up, 0.0 if there is none.
        space_size: Strategies in the space.
        opened: Of the tuples of degrees and batch, how many were added up; the others' bounds ruled them out.
        tuples: How many there are.
    """

    evaluation: Evaluation | None
    swept_tokens_per_s_per_gpu: float
    space_size: int
    opened: int
    tuples: int


def find_best(space: Space, progress: Callable[[int, int], None] | None = None) -> Best:
    """Solves a space exactly.

    Args:
        space: See `sim.optimum.spaces`.
        progress: Called with (done, total) parts of the work.

    >>> from sim.config.catalog import load_workload
    >>> from sim.optimum.spaces import extended_space
    >>> find_best(extended_space(load_workload("mixtral_8x22b_8k"), ["context"])).evaluation.feasible
    True
    """
    found, opened = _search_parts(space, _Ranking(), progress)
    tuples = len(space.tp) * len(space.cp) * len(space.dp or (0,)) * len(space.ep) * len(space.pp) * len(space.batch)
    value, best = found.ranked[0] if found.ranked else (0.0, None)
    return Best(evaluate(space.workload, best) if best else None, value, space.size, opened, tuples)


def find_bests(
    space: Space, count: int, score: Score = as_is, progress: Callable[[int, int], None] | None = None
) -> tuple[Evaluation, ...]:
    """The best strategies of different degrees, the best first: of each degrees tp, cp, dp, ep, pp one, exactly.

    Args:
        space: See `sim.optimum.spaces`.
        count: How many, at most.
        score: What to go by: of tokens/s/GPU and a replica's GPUs; it never falls with the former.
        progress: Called with (done, total) parts of the work.
    """
    found, _ = _search_parts(space, _Ranking(count, score), progress)
    return tuple(evaluate(space.workload, strategy) for _, strategy in found.ranked)


class _Ranking:
    """The best strategies of different degrees so far.

    Attributes:
        score: What it goes by.
        least: What a further strategy must score more than.
    """

    def __init__(self, count: int = 1, score: Score = as_is) -> None:
        self.score = score
        self.least = 0.0
        self._count = count
        self._of_degrees: dict[tuple[int, ...], tuple[float, Strategy]] = {}

    @property
    def ranked(self) -> list[tuple[float, Strategy]]:
        """(score, strategy), the best first."""
        return sorted(self._of_degrees.values(), key=lambda each: -each[0])[: self._count]

    def offer(self, score: float, strategy: Strategy) -> None:
        """Takes a strategy in if it is among the best."""
        degrees = (strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep, strategy.pp)
        if score > self._of_degrees.get(degrees, (0.0, None))[0]:
            self._of_degrees[degrees] = (score, strategy)
            self.least = self.ranked[-1][0] if len(self._of_degrees) >= self._count else 0.0


def _search_parts(space: Space, ranking: _Ranking, progress: Callable[[int, int], None] | None) -> tuple[_Ranking, int]:
    opened, parts = 0, space.parts()
    for at, part in enumerate(parts):
        search = _Search(part, ranking)
        search.run(_share(progress, at, len(parts)))
        opened += search.opened
    return ranking, opened


def _share(progress: Callable[[int, int], None] | None, at: int, parts: int) -> Callable[[int, int], None] | None:
    """Progress of one of several parts, each counted alike."""
    if progress is None or parts == 1:
        return progress
    return lambda done, total: progress(at * total + done, parts * total)


def best_of_degrees(space: Space, progress: Callable[[int, int], None] | None = None) -> list[Strategy]:
    """The fastest choices of each tuple of degrees and batch that has room, whether or not it meets the SLOs.

    Of an engine's space those of each of its plans, as far as they differ.

    Args:
        space: See `sim.optimum.spaces`. Every tuple is added up, so it should have few batches.
        progress: Called with (done, total) parts of the work.

    >>> from sim.config.catalog import load_workload
    >>> from sim.optimum.spaces import heuristic_space
    >>> len(best_of_degrees(heuristic_space(load_workload("mixtral_8x22b_8k"), sequence_parallel=True)))
    812
    """
    anyhow = replace(space, workload=replace(space.workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf))
    found: dict[Strategy, Strategy] = {}
    work = [(part, list(part.meshes())) for part in anyhow.parts()]
    total, done = sum(len(meshes) for _, meshes in work), 0
    for part, meshes in work:
        search = _Search(part, _Ranking())
        for mesh in meshes:
            for pp, batch in itertools.product(search.stages(mesh), part.batch):
                if batch <= most_sequences(part.workload, mesh[2]):
                    search.ranking = _Ranking()
                    search.add_up(mesh, pp, batch)
                    for _, best in search.ranking.ranked:
                        found.setdefault(canonical(best), best)
            done += 1
            if progress:
                progress(done, total)
    return list(found.values())


class _Figures(NamedTuple):
    """Sums over some ops of a layer, [n] combinations of their choices each.

    Attributes:
        times_s: Per kind of step, seconds.
        weight_bytes, kv_bytes: Held.
        peak_bytes: Largest activations of any op.
    """

    times_s: tuple[Floats, ...]
    weight_bytes: Floats
    kv_bytes: Floats
    peak_bytes: Floats

    def rows(self, index: NDArray[np.int64]) -> _Figures:
        return _Figures(
            tuple(each[index] for each in self.times_s),
            self.weight_bytes[index],
            self.kv_bytes[index],
            self.peak_bytes[index],
        )


class _Side:
    """One side of a layer on one GPU, under every combination of its ops' choices.

    Attributes:
        ranks: The GPU, per kind of step.
        ops: Names of the side's ops.
        costs: Per kind of step and op, by choice: all that more tokens might allow.
        allowed: Choices per op that break no limit.
    """

    def __init__(self, ranks: Sequence[Rank], names: Sequence[str], space: Space) -> None:
        self.ranks = tuple(ranks)
        self.ops = tuple(names)
        layer = self.ranks[0].layer
        self.costs: tuple[Mapping[str, Mapping[int, OpCost]], ...] = tuple(
            {
                name: {
                    choice: cost
                    for choice in space.choices[name]
                    if (cost := op_cost(rank, layer.op(name), choice)).broken in (None, "tokens")
                }
                for name in names
            }
            for rank in self.ranks
        )
        self.allowed = {
            name: {choice for choice, cost in row.items() if cost.broken is None} for name, row in self.costs[0].items()
        }
        self.possible = all(self.costs[0].values())

    @cached_property
    def floor(self) -> tuple[tuple[float, ...], float, float]:
        """Least seconds per kind of step, weight bytes and KV bytes, each for itself and without moves."""
        return (
            tuple(sum(min(cost.time_s for cost in row.values()) for row in costs.values()) for costs in self.costs),
            sum(min(cost.weight_bytes for cost in row.values()) for row in self.costs[-1].values()),
            sum(min(cost.kv_bytes for cost in row.values()) for row in self.costs[-1].values()),
        )

    @cached_property
    def front(self) -> _Front:
        """What no other combination beats, of those that break no limit."""
        return _front(self, self.allowed)

    @cached_property
    def free_front(self) -> _Front:
        """The same of all that more tokens might allow, which bounds larger batches."""
        every = {name: set(row) for name, row in self.costs[0].items()}
        return self.front if every == self.allowed else _front(self, every)


@dataclass(frozen=True, slots=True)
class _Front:
    """Combinations of one side's choices, [n], that no other with the same first and last choice beats.

    Attributes:
        choices: [n, ops].
        figures: Of a layer.
    """

    choices: Ints
    figures: _Figures

    @property
    def first(self) -> Ints:
        return self.choices[:, 0]

    @property
    def last(self) -> Ints:
        return self.choices[:, -1]


def _front(side: _Side, allowed: Mapping[str, set[int]]) -> _Front:
    choices = np.array(list(itertools.product(*(sorted(allowed[name]) for name in side.ops))), dtype=np.int64)
    choices = choices.reshape(-1, len(side.ops))
    column = {name: choices[:, index] for index, name in enumerate(side.ops)}

    def per_row(kind: int, name: str, figure: Callable[[OpCost], float]) -> Floats:
        table = np.full(_CHOICES, np.nan)
        for choice, cost in side.costs[kind][name].items():
            table[choice] = figure(cost)
        return table[column[name]]

    times_s: list[Floats] = []
    for kind, rank in enumerate(side.ranks):
        time_s = np.sum([per_row(kind, name, lambda cost: cost.time_s) for name in side.ops], axis=0)
        within = sides(rank, rank)
        for tensor in rank.layer.tensors:
            if set(tensor.ends) <= set(side.ops):
                table = np.zeros((_CHOICES,) * len(tensor.ends))
                for ends in itertools.product(*(allowed[name] for name in tensor.ends)):
                    table[ends] = sum(within.moves_s(tensor, ends))
                time_s = time_s + table[tuple(column[name] for name in tensor.ends)]
        times_s.append(time_s)
    weight = np.sum([per_row(-1, name, lambda cost: cost.weight_bytes) for name in side.ops], axis=0)
    kv = np.sum([per_row(-1, name, lambda cost: cost.kv_bytes) for name in side.ops], axis=0)
    peak = np.max([per_row(-1, name, lambda cost: cost.activation_bytes) for name in side.ops], axis=0)
    figures = np.stack([*times_s, weight, kv, peak], axis=1)
    group = choices[:, 0] * _CHOICES + choices[:, -1]
    kept = np.concatenate(
        [rows[_unbeaten(figures[rows])] for g in np.unique(group) for rows in [np.flatnonzero(group == g)]]
        or [np.zeros(0, dtype=np.int64)]
    )
    return _Front(choices[kept], _Figures(tuple(times_s), weight, kv, peak).rows(kept))


def _unbeaten(figures: Floats) -> Ints:
    """Rows of [n, figures] that no other row matches or undercuts in every figure; one of equal rows stays."""
    left = np.lexsort(figures.T[::-1])
    kept: list[int] = []
    while left.size:
        row, others = left[0], left[1:]
        kept.append(int(row))
        left = others[(figures[others] < figures[row]).any(axis=1)]
    return np.array(kept, dtype=np.int64)


class _Range(NamedTuple):
    """Batches of one mesh and pipeline degree, the smallest's and the largest's index; best bound first in a heap.

    Attributes:
        least_value: Minus the most tokens/s/GPU that any of them reaches.
        steps_s: Lower bounds of the seconds of a layer per kind of step, of which the bound was made.
        tight: Whether they are those of the smallest batch with all moves, not the sum of each op's least.
    """

    least_value: float
    mesh: Mesh
    pp: int
    low: int
    high: int
    steps_s: tuple[float, ...]
    tight: bool


class _Search:
    """Best-first over degrees and ranges of the batch."""

    def __init__(self, space: Space, ranking: _Ranking) -> None:
        self.space = space
        self.workload: Workload = space.workload
        self.layer: Layer = layer_ops(self.workload.model)
        names = [op.name for op in self.layer.ops]
        self._attention_ops = [name for name in names if name in ATTENTION_SIDE]
        self._expert_ops = [name for name in names if name not in ATTENTION_SIDE]
        self._sides: dict[tuple[object, ...], _Side] = {}
        self.ranking = ranking
        self.opened = 0

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Goes through all ranges, best bound first."""
        heap: list[_Range] = []
        meshes = list(self.space.meshes())
        for done, mesh in enumerate(meshes):
            for pp in self.stages(mesh):
                self._push(heap, mesh, pp, 0, len(self.space.batch) - 1)
            if progress and done % 16 == 0:
                progress(done, 2 * len(meshes))
        looked_into = 0
        while heap and -heap[0].least_value > self.ranking.least * _SLACK:
            self._look_into(heap, heapq.heappop(heap))
            looked_into += 1
            if progress and looked_into % 64 == 0:
                done = len(meshes) * (1 + looked_into / (looked_into + len(heap)))
                progress(int(done), 2 * len(meshes))
        if progress:
            progress(2 * len(meshes), 2 * len(meshes))

    def stages(self, mesh: Mesh) -> Iterator[int]:
        tp, cp, dp, ep = mesh
        return (
            pp for pp in self.space.stages(mesh) if not degree_violations(self.workload, tp * cp * dp // ep, ep, pp)
        )

    # --- ranges ----------------------------------------------------------------------------------

    def _look_into(self, heap: list[_Range], each: _Range) -> None:
        low, high = each.low, each.high
        batches = self.space.batch
        if low == high:
            self.add_up(each.mesh, each.pp, batches[low])
        elif not each.tight and batches[high] <= _NARROW * batches[low]:
            self.add_up(each.mesh, each.pp, batches[low])
            steps_s = self._tight_steps_s(each.mesh, each.pp, batches[low])
            self._push(heap, each.mesh, each.pp, low + 1, high, steps_s, tight=True)
        else:
            middle = (low + high) // 2
            self._push(heap, each.mesh, each.pp, low, middle, each.steps_s)
            self._push(heap, each.mesh, each.pp, middle + 1, high, each.steps_s)

    def _push(
        self,
        heap: list[_Range],
        mesh: Mesh,
        pp: int,
        low: int,
        high: int,
        at_least_s: tuple[float, ...] = (),
        *,
        tight: bool = False,
    ) -> None:
        """Adds a range with its bound, unless nothing in it is feasible or better than the best."""
        smallest, largest = self.space.batch[low], self.space.batch[high]
        if smallest > most_sequences(self.workload, mesh[2]):
            return
        attention, experts = self._pair(mesh, smallest)
        if not (attention.possible and experts.possible):
            return
        (left_s, weight, kv), (right_s, more_weight, more_kv) = attention.floor, experts.floor
        floors = tuple(left + right for left, right in zip(left_s, right_s, strict=True))
        steps_s = tuple(map(max, floors, at_least_s)) if at_least_s else floors
        state = batching(self.workload, smallest, mesh[2])
        ends = [float(min(self._ends_s(rank, pp).values())) for rank in experts.ranks]
        layers = layers_per_stage(self.workload, pp)
        times = [pp * (layers * step + end) for step, end in zip(steps_s, ends, strict=True)]
        if not self._in_time(state, times[0], times[-1]):
            return
        both = self._both(attention, experts, mesh)[-1]
        least = memory_bytes(
            both, pp, layer_weight_bytes=weight + more_weight, layer_kv_bytes=kv + more_kv, peak_op_bytes=0.0
        )
        needed, allowed = needed_and_allowed_bytes(self.workload, least)
        if needed > allowed:
            return
        tokens = batching(self.workload, largest, mesh[2]).tokens
        gpus = math.prod(mesh[:3]) * pp
        value = self.ranking.score(tokens * pp / (state.step_s(times[0], times[-1]) * gpus), gpus)
        if value > self.ranking.least * _SLACK:
            heapq.heappush(heap, _Range(-value, mesh, pp, low, high, steps_s, tight))

    def _in_time(self, state: Batching, decode_s: float, mixed_s: float) -> bool:
        workload = self.workload
        return bool(
            state.tpot_s(decode_s, mixed_s) <= workload.tpot_limit_s * (1 + ROUNDING)
            and state.ttft_s(decode_s, mixed_s) <= workload.ttft_limit_s * (1 + ROUNDING)
        )

    def _ends_s(self, rank: Rank, pp: int) -> dict[int, float]:
        """Seconds of a stage besides its layers, by the choice of the last op."""
        return {choice: stage_time(rank, pp, 0.0, choice).total_s for choice in self.space.choices["combine"]}

    # --- sums ------------------------------------------------------------------------------------

    def _tight_steps_s(self, mesh: Mesh, pp: int, batch: int) -> tuple[float, ...]:
        """Least seconds of a layer per kind of step, each for itself, with all moves; more tokens never take less."""
        attention, experts = self._pair(mesh, batch)
        left, right = attention.free_front, experts.free_front
        kinds = self._layers_s(self._both(attention, experts, mesh), left, right)
        return tuple(float(each.min()) for each in kinds)

    def add_up(self, mesh: Mesh, pp: int, batch: int) -> None:
        """Adds up all pairs of the two fronts of one batch."""
        tp, cp, dp, ep = mesh
        attention, experts = self._pair(mesh, batch)
        if not (all(attention.allowed.values()) and all(experts.allowed.values())):
            return
        self.opened += 1
        left, right = attention.front, experts.front
        both, state = self._both(attention, experts, mesh), batching(self.workload, batch, dp)
        layers = layers_per_stage(self.workload, pp)
        stages_s: list[Floats] = []
        for rank, layer_s in zip(experts.ranks, self._layers_s(both, left, right), strict=True):
            ends = self._ends_s(rank, pp)
            stages_s.append(pp * (layers * layer_s + np.array([ends[int(choice)] for choice in right.last])))
        decode_s, mixed_s = stages_s[0], stages_s[-1]
        allowed = self._fits(both[-1], left, right, pp)
        if state.decode is not None:
            allowed &= state.tpot_s(decode_s, mixed_s) <= self.workload.tpot_limit_s * (1 + ROUNDING)
        if state.mixed is not None:
            allowed &= state.ttft_s(decode_s, mixed_s) <= self.workload.ttft_limit_s * (1 + ROUNDING)
        if not allowed.any():
            return
        step_s = np.where(allowed, state.step_s(decode_s, mixed_s), np.inf)
        row, column = np.unravel_index(step_s.argmin(), step_s.shape)
        gpus = math.prod(mesh[:3]) * pp
        value = self.ranking.score(state.tokens * pp / (float(step_s[row, column]) * gpus), gpus)
        if value > self.ranking.least:
            dims = (*left.choices[row].tolist(), *right.choices[column].tolist())
            self.ranking.offer(value, Strategy(tp, ep, pp, batch, dims, cp, None if (cp, dp) == (1, ep) else dp))

    def _layers_s(self, both: Sequence[Sides], left: _Front, right: _Front) -> list[Floats]:
        """[left, right] seconds of a layer, per kind of step."""
        found: list[Floats] = []
        for kind, each in enumerate(both):
            into_experts, into_attention = self._crossings(each, left, right)
            layer_s = left.figures.times_s[kind][:, None] + right.figures.times_s[kind]
            layer_s = layer_s + into_experts[left.last[:, None], right.first, right.last]
            found.append(layer_s + into_attention[right.last, left.first[:, None], left.last[:, None]])
        return found

    def _crossings(self, both: Sides, left: _Front, right: _Front) -> tuple[Floats, Floats]:
        """Seconds of the residual stream's moves, by the choices at the ends of `residual_mid` and of `residual_in`."""
        present = {
            self._attention_ops[0]: set(left.first.tolist()),
            self._attention_ops[-1]: set(left.last.tolist()),
            self._expert_ops[0]: set(right.first.tolist()),
            self._expert_ops[-1]: set(right.last.tolist()),
        }
        tables: list[Floats] = []
        for name in ("residual_mid", "residual_in"):
            tensor = self.layer.tensor(name)
            table = np.zeros((_CHOICES,) * 3)
            for ends in itertools.product(*(sorted(present[op]) for op in tensor.ends)):
                table[ends] = sum(both.moves_s(tensor, ends))
            tables.append(table)
        return tables[0], tables[1]

    def _fits(self, both: Sides, left: _Front, right: _Front, pp: int) -> NDArray[np.bool_]:
        """[left, right] whether a layer's weights, cache and activations have room: as `memory_bytes`, for arrays."""
        layers = layers_per_stage(self.workload, pp)
        fixed = memory_bytes(both, pp, layer_weight_bytes=0.0, layer_kv_bytes=0.0, peak_op_bytes=0.0)
        peak = np.maximum(np.maximum.outer(left.figures.peak_bytes, right.figures.peak_bytes), 0.0)
        activations = both.stream_bytes() + np.maximum(peak, head_activation_bytes(both.experts))
        overhead = fixed.overhead
        if self.workload.engine is not None:
            overhead = np.maximum(0.0, self.workload.engine.memory.runtime_bytes - activations)
        weights = fixed.weights + layers * np.add.outer(left.figures.weight_bytes, right.figures.weight_bytes)
        kv_cache = layers * pp * np.add.outer(left.figures.kv_bytes, right.figures.kv_bytes)
        needed, allowed = room(self.workload, weights + kv_cache + activations + overhead, kv_cache)
        return needed <= allowed

    def _both(self, attention: _Side, experts: _Side, mesh: Mesh) -> list[Sides]:
        _, cp, dp, ep = mesh
        one_mesh = (cp, dp) == (1, ep)
        return [
            sides(right, right) if one_mesh else sides(left, right)
            for left, right in zip(attention.ranks, experts.ranks, strict=True)
        ]

    def _pair(self, mesh: Mesh, batch: int) -> tuple[_Side, _Side]:
        tp, cp, dp, ep = mesh
        loads = batching(self.workload, batch, dp).loads
        alone = tuple(_one_group(load) for load in loads)  # attention's side knows nothing of other groups
        moe_tp = tp * cp * dp // ep
        keys = ("attention", tp, cp, alone), ("experts", moe_tp, ep, loads)
        if keys[0] not in self._sides:
            ranks = [attention_rank(self.workload, load, tp, cp, 1) for load in alone]
            self._sides[keys[0]] = _Side(ranks, self._attention_ops, self.space)
        if keys[1] not in self._sides:
            ranks = [experts_rank(self.workload, load, moe_tp, ep, dp) for load in loads]
            self._sides[keys[1]] = _Side(ranks, self._expert_ops, self.space)
        return self._sides[keys[0]], self._sides[keys[1]]


def _one_group(load: Load) -> Load:
    own = load.of_group(load.attention_groups)
    return load._replace(sequences=own.sequences, prompts=own.prompts, prompt_groups=1, attention_groups=1)
