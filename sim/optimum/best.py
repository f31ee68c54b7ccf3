"""The exact best strategy of a space too large to add up: bounds leave out what cannot win, and nothing else.

With the choices of the two residual adds and of the norms behind them fixed, attention's side of a layer and the
experts' side meet only in their sums: seconds, bytes of weights, of KV cache, and the larger of their activations.
So of each side only those combinations can win that no other beats in all four (a Pareto front), and all pairs of
the two fronts are added up. Degrees come best bound first, a bound being the sum of each op's fastest choice without
any move between them: once it falls below the best strategy found, nothing better is left. Source: design in this
repository; it agrees with `sim.simulate.evaluate` to rounding, and with brute force on small spaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.evaluation import Evaluation
from sim.layers.ops import layer_ops
from sim.optimum.spaces import Space
from sim.simulate import ROUNDING, degree_violations, evaluate, layers_per_stage, memory_bytes, stage_time
from sim.step.costs import OpCost, head_activation_bytes, op_cost
from sim.step.rank import Rank
from sim.step.two_meshes import ATTENTION_SIDE, Sides, attention_rank, experts_rank, sides
from sim.strategy import MOST_CHOICES, Strategy
from sim.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_CHOICES = MOST_CHOICES
_SLACK = 1 - 1e-12
"""A bound that lies this little below the best is still looked into: sums round."""


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
    search = _Search(space)
    search.run(progress)
    best = search.best
    tuples = len(space.tp) * len(space.cp) * len(space.dp or (0,)) * len(space.ep) * len(space.pp) * len(space.batch)
    return Best(evaluate(space.workload, best) if best else None, search.best_value, space.size, search.opened, tuples)


class _Side:
    """One side of a layer on one GPU, under every combination of its ops' choices.

    Attributes:
        rank: The GPU.
        ops: Names of the side's ops.
        costs: Per op, by allowed choice.
    """

    def __init__(self, rank: Rank, names: Sequence[str], space: Space) -> None:
        self.rank = rank
        self.ops = tuple(names)
        of_op = {name: {c: op_cost(rank, rank.layer.op(name), c) for c in space.choices[name]} for name in names}
        self.costs: Mapping[str, Mapping[int, OpCost]] = {
            name: {choice: cost for choice, cost in row.items() if cost.broken is None} for name, row in of_op.items()
        }
        self.possible = all(self.costs.values())

    @cached_property
    def floor(self) -> tuple[float, float, float]:
        """Least seconds, weight bytes and KV bytes, each for itself and without moves."""
        rows = [row.values() for row in self.costs.values()]
        return (
            sum(min(cost.time_s for cost in row) for row in rows),
            sum(min(cost.weight_bytes for cost in row) for row in rows),
            sum(min(cost.kv_bytes for cost in row) for row in rows),
        )

    @cached_property
    def front(self) -> _Front:
        """What no other combination beats."""
        return _front(self)


@dataclass(frozen=True, slots=True)
class _Front:
    """Combinations of one side's choices, [n], that no other with the same first and last choice beats.

    Attributes:
        choices: [n, ops].
        time_s, weight_bytes, kv_bytes: Per layer.
        peak_bytes: Largest activations of any op.
    """

    choices: Ints
    time_s: Floats
    weight_bytes: Floats
    kv_bytes: Floats
    peak_bytes: Floats

    @property
    def first(self) -> Ints:
        return self.choices[:, 0]

    @property
    def last(self) -> Ints:
        return self.choices[:, -1]


def _front(side: _Side) -> _Front:
    rank, ops = side.rank, side.ops
    choices = np.array(list(itertools.product(*(side.costs[name] for name in ops))), dtype=np.int64)
    column = {name: choices[:, index] for index, name in enumerate(ops)}

    def per_row(name: str, figure: Callable[[OpCost], float]) -> Floats:
        table = np.full(_CHOICES, np.nan)
        for choice, cost in side.costs[name].items():
            table[choice] = figure(cost)
        return table[column[name]]

    time_s = np.sum([per_row(name, lambda cost: cost.time_s) for name in ops], axis=0)
    within = sides(rank, rank)
    for tensor in rank.layer.tensors:
        if set(tensor.ends) <= set(ops):
            table = np.zeros((_CHOICES,) * len(tensor.ends))
            for ends in itertools.product(*(side.costs[name] for name in tensor.ends)):
                table[ends] = sum(within.moves_s(tensor, ends))
            time_s = time_s + table[tuple(column[name] for name in tensor.ends)]
    weight = np.sum([per_row(name, lambda cost: cost.weight_bytes) for name in ops], axis=0)
    kv = np.sum([per_row(name, lambda cost: cost.kv_bytes) for name in ops], axis=0)
    peak = np.max([per_row(name, lambda cost: cost.activation_bytes) for name in ops], axis=0)
    figures = np.stack([time_s, weight, kv, peak], axis=1)
    group = choices[:, 0] * _CHOICES + choices[:, -1]
    kept = np.concatenate(
        [rows[_unbeaten(figures[rows])] for g in np.unique(group) for rows in [np.flatnonzero(group == g)]]
    )
    return _Front(choices[kept], *figures[kept].T)


def _unbeaten(figures: Floats) -> Ints:
    """Rows of [n, figures] that no other row matches or undercuts in every figure; one of equal rows stays."""
    left = np.lexsort(figures.T[::-1])
    kept: list[int] = []
    while left.size:
        row, others = left[0], left[1:]
        kept.append(int(row))
        left = others[(figures[others] < figures[row]).any(axis=1)]
    return np.array(kept, dtype=np.int64)


class _Search:
    """Best-first over degrees and batch."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.workload: Workload = space.workload
        names = [op.name for op in layer_ops(self.workload.model).ops]
        self._attention_ops = [name for name in names if name in ATTENTION_SIDE]
        self._expert_ops = [name for name in names if name not in ATTENTION_SIDE]
        self._sides: dict[tuple[object, ...], _Side] = {}
        self._ends: dict[tuple[int, int, int, int], Floats] = {}
        self.best: Strategy | None = None
        self.best_value = 0.0
        self.opened = 0

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Goes through all tuples of degrees, best bound first."""
        bounded = self._bounded(progress)
        for done, (bound, mesh, batch, pp) in enumerate(bounded):
            if bound < self.best_value * _SLACK:
                break
            self._open(mesh, batch, pp)
            if progress and done % 64 == 0:
                progress(len(bounded) + done, 2 * len(bounded))
        if progress:
            progress(2 * len(bounded), 2 * len(bounded))

    # --- bounds ----------------------------------------------------------------------------------

    def _bounded(
        self, progress: Callable[[int, int], None] | None
    ) -> list[tuple[float, tuple[int, int, int, int], int, int]]:
        """(most tokens/s/GPU, mesh, batch, pp) of what may be feasible, best first."""
        found: list[tuple[float, tuple[int, int, int, int], int, int]] = []
        meshes = list(self.space.meshes())
        for done, mesh in enumerate(meshes):
            tp, cp, dp, ep = mesh
            stages = [pp for pp in self.space.pp if not degree_violations(self.workload, tp * cp * dp // ep, ep, pp)]
            for batch in self.space.batch if stages else ():
                attention, experts = self._pair(mesh, batch)
                if attention.possible and experts.possible:
                    found += [
                        (bound, mesh, batch, pp)
                        for pp in stages
                        if (bound := self._bound(attention, experts, mesh, batch, pp))
                    ]
            if progress:
                progress(done, 2 * len(meshes))
        return sorted(found, key=lambda item: -item[0])

    def _bound(self, attention: _Side, experts: _Side, mesh: tuple[int, int, int, int], batch: int, pp: int) -> float:
        """No strategy of these degrees is faster; 0 where none is feasible."""
        layers, limits = layers_per_stage(self.workload, pp), self.workload
        time_s, weight, kv = (a + b for a, b in zip(attention.floor, experts.floor, strict=True))
        stage_s = layers * time_s + float(self._ends_s(experts, pp).min())
        if pp * stage_s > limits.tpot_limit_s * (1 + ROUNDING):
            return 0.0
        if layers * (weight + pp * kv) + limits.hardware.overhead_bytes > limits.hbm_limit_bytes:
            return 0.0
        return batch / (math.prod(mesh[:3]) * pp) / stage_s

    def _ends_s(self, experts: _Side, pp: int) -> Floats:
        """[choices of the last op] seconds of a stage besides its layers; infinite where it is not allowed."""
        rank = experts.rank
        key = (rank.tp, rank.ep, rank.sizes.tokens, pp)
        if key not in self._ends:
            table = np.full(_CHOICES, np.inf)
            for choice in experts.costs["combine"]:
                table[choice] = stage_time(rank, pp, 0.0, choice).total_s
            self._ends[key] = table
        return self._ends[key]

    # --- sums ------------------------------------------------------------------------------------

    def _open(self, mesh: tuple[int, int, int, int], batch: int, pp: int) -> None:
        """Adds up all pairs of the two fronts."""
        tp, cp, dp, ep = mesh
        attention, experts = self._pair(mesh, batch)
        left, right = attention.front, experts.front
        layers, ends_s = layers_per_stage(self.workload, pp), self._ends_s(experts, pp)[right.last]
        per_gpu = batch / (math.prod(mesh[:3]) * pp)
        bare_s = layers * (float(left.time_s.min()) + float(right.time_s.min())) + float(ends_s.min())
        if per_gpu / bare_s < self.best_value * _SLACK:
            return
        self.opened += 1
        both = sides(attention.rank, experts.rank) if (cp, dp) != (1, ep) else sides(experts.rank, experts.rank)
        into_experts, into_attention = self._crossings(both, attention, experts)
        layer_s = left.time_s[:, None] + right.time_s
        layer_s = layer_s + into_experts[left.last[:, None], right.first, right.last]
        layer_s = layer_s + into_attention[right.last, left.first[:, None], left.last[:, None]]
        stage_s = layers * layer_s + ends_s
        allowed = (pp * stage_s <= self.workload.tpot_limit_s * (1 + ROUNDING)) & self._fits(both, left, right, pp)
        if not allowed.any():
            return
        row, column = np.unravel_index(np.where(allowed, stage_s, np.inf).argmin(), stage_s.shape)
        value = per_gpu / float(stage_s[row, column])
        if value > self.best_value:
            self.best_value = value
            dims = (*left.choices[row].tolist(), *right.choices[column].tolist())
            self.best = Strategy(tp, ep, pp, batch, dims, cp, None if (cp, dp) == (1, ep) else dp)

    def _crossings(self, both: Sides, attention: _Side, experts: _Side) -> tuple[Floats, Floats]:
        """Seconds of the residual stream's moves, by the choices at the ends of `residual_mid` and of `residual_in`."""
        tables: list[Floats] = []
        for name in ("residual_mid", "residual_in"):
            tensor = both.experts.layer.tensor(name)
            costs = {**attention.costs, **experts.costs}
            table = np.zeros((_CHOICES,) * 3)
            for ends in itertools.product(*(costs[op] for op in tensor.ends)):
                table[ends] = sum(both.moves_s(tensor, ends))
            tables.append(table)
        return tables[0], tables[1]

    def _fits(self, both: Sides, left: _Front, right: _Front, pp: int) -> NDArray[np.bool_]:
        layers = layers_per_stage(self.workload, pp)
        fixed = memory_bytes(both, pp, layer_weight_bytes=0.0, layer_kv_bytes=0.0, peak_op_bytes=0.0)
        head_bytes = head_activation_bytes(both.experts)
        held = [layers * (side.weight_bytes + pp * side.kv_bytes) for side in (left, right)]
        peak = np.maximum(np.maximum.outer(left.peak_bytes, right.peak_bytes), head_bytes)
        return np.add.outer(*held) + (peak - head_bytes) + fixed.total <= self.workload.hbm_limit_bytes

    def _pair(self, mesh: tuple[int, int, int, int], batch: int) -> tuple[_Side, _Side]:
        tp, cp, dp, ep = mesh
        tokens, moe_tp = math.ceil(batch / dp), tp * cp * dp // ep
        keys = ("attention", tp, cp, tokens), ("experts", moe_tp, ep, batch)
        if keys[0] not in self._sides:  # attention's side knows nothing of other groups: one will do
            self._sides[keys[0]] = _Side(
                attention_rank(self.workload, tp, cp, 1, tokens), self._attention_ops, self.space
            )
        if keys[1] not in self._sides:
            self._sides[keys[1]] = _Side(experts_rank(self.workload, moe_tp, ep, batch), self._expert_ops, self.space)
        return self._sides[keys[0]], self._sides[keys[1]]
