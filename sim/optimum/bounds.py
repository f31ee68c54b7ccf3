"""What every strategy of a mesh, pipeline degree and range of batches takes at least: the step's own sum, in intervals.

The addends of a step (`sim.step.layer`, `sim.step.stage`) are priced for the smallest batch of the range "or more",
each under all choices of the few ops that it depends on. The least of their sum is found by taking one op after the
other out: all addends that depend on it become one, of which the least over its choices stays.

A limit may be broken by what is fastest. So a bound may carry multipliers: of a strategy that keeps within its
limits, the seconds of a step and, times numbers >= 0, what it exceeds them by (nothing, or less) are no more than the
seconds alone. The least of that sum bounds what is feasible, whatever the numbers; good ones make it tight. Source:
Lagrangian relaxation (Geoffrion, 1974).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sim.arrays import Floats
from sim.optimum.addend_tables import (
    KV_BYTES,
    TIME_S,
    WEIGHT_BYTES,
    AddendTables,
    Factor,
    OpFigure,
    joined,
    tabulated,
)
from sim.optimum.spaces import Space
from sim.serving.confidence import ROUNDING, slower
from sim.serving.phases import Batching, batching, most_sequences, throughput
from sim.step.attention_expert_meshes import Sides, sides_of
from sim.step.layer import GroupSum
from sim.step.pipeline import Stage, pipeline
from sim.step.stage import base_of, meeting_s, room, stage_room, stage_s, step_sum, vocabulary_seconds

SLACK = 1 - 1e-9
"""Bounds are wider by so much than they come out: sums round, and so do costs by which routes are compared."""

Mesh = tuple[int, int, int, int]
"""tp, cp, dp, ep."""


class Multipliers(NamedTuple):
    """Seconds that a step counts as longer per unit of what a limit is exceeded by, >= 0.

    Attributes:
        tpot, ttft: Per second of latency.
        memory: Per byte.
    """

    tpot: float = 0.0
    ttft: float = 0.0
    memory: float = 0.0


class Parts(NamedTuple):
    """The addends of a step on one mesh with one batch, or more.

    Attributes:
        state: Of the batch.
        stacks: The GPU, per kind of step.
        seconds: Of a layer, per kind of step and group.
        weights, kv: Its bytes, per group.
        meetings: Extra seconds from one group to another, per kind of step.
        allowed: 0 where an op may have a choice, else infinite.
    """

    state: Batching
    stacks: tuple[tuple[Sides, ...], ...]
    seconds: tuple[tuple[tuple[Factor, ...], ...], ...]
    weights: tuple[tuple[Factor, ...], ...]
    kv: tuple[tuple[Factor, ...], ...]
    meetings: tuple[Mapping[tuple[int, int], Factor], ...]
    allowed: tuple[Factor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Least:
    """The least of a sum over all choices, and which ones come near it.

    Attributes:
        value: The least.
        buckets: Of each op that was taken out, in that order: what depended on it, the op's axis first.
    """

    value: float
    buckets: tuple[tuple[int, tuple[int, ...], Floats], ...]

    def up_to(self, value: float) -> Iterator[dict[int, int]]:
        """Every combination whose sum is no more: at each op's place which of its choices.

        Choices are given in the opposite order: what each adds to the least is then known.
        """
        stack: list[tuple[int, float, dict[int, int]]] = [(len(self.buckets), value - self.value, {})]
        while stack:
            left, room_left, chosen = stack.pop()
            if not left:
                yield chosen
                continue
            place, others, table = self.buckets[left - 1]
            row = table[(slice(None), *(chosen[other] for other in others))]
            for choice in np.flatnonzero(row - row.min() <= room_left).tolist():
                stack.append((left - 1, room_left - float(row[choice] - row.min()), {**chosen, place: choice}))


def least_of(factors: Sequence[Factor]) -> Least:
    """Takes the ops out one by one, always one that is met by fewest others."""
    left, total = (
        [each for each in factors if each.ops],
        math.fsum(float(each.table) for each in factors if not each.ops),
    )
    sizes = {place: size for places, table in left for place, size in zip(places, table.shape, strict=True)}
    buckets: list[tuple[int, tuple[int, ...], Floats]] = []
    while left:
        met: dict[Any, set[Any]] = {}
        for places, _ in left:
            for each in places:
                met.setdefault(each, set()).update(places)
        place = min(met, key=lambda each: (len(met[each]), each))
        others = tuple(sorted(met[place] - {place}))
        axes = {each: sizes[each] for each in (place, *others)}
        bucket = joined([each for each in left if place in each.ops], axes)
        buckets.append((place, others, bucket))
        left = [each for each in left if place not in each.ops]
        least = bucket.min(axis=0)
        if others:
            left.append(Factor(others, least))
        else:
            total += float(least)
    return Least(total, tuple(buckets))


class Bounds:
    """Bounds of one space; an engine's is taken part by part, see `Space.parts`.

    Raises:
        ValueError: The space has choices of embedding and LM head, which no bound counts.
    """

    def __init__(self, space: Space) -> None:
        if space.vocabulary:
            raise ValueError("expected a space without choices of embedding and LM head, such as 'extended'")
        self.space = space
        self._choices = tuple(space.choices.values())
        self._step = step_sum(space.workload)
        self._known: dict[tuple[Mesh, int, bool], Parts] = {}

    def least(self, mesh: Mesh, pp: int, low: int, high: int, multipliers: Multipliers) -> Least:
        """Seconds of a step and what the multipliers make of its limits, at least, of batches low to high.

        A single batch is priced as it is. Infinite where some op has no choice.
        """
        parts, stages = self._parts(mesh, low, or_more=low < high), pipeline(self.space.workload, pp)
        found = [
            least_of(self._sum(parts, pp, stage, fullest, multipliers))
            for stage in stages
            for fullest in (stages if multipliers.memory else stages[:1])
        ]
        return max(found, key=lambda each: each.value)

    def may_have_room(self, mesh: Mesh, pp: int, low: int, high: int) -> bool:
        """Whether a pipeline of batches low to high may have room, however its stages share out the layers.

        The fullest stage has no less than their mean.
        """
        model = self.space.workload.model
        layers = Counter(model.order)
        mean = Stage(tuple(layers[group] / pp for group in range(len(model.groups))), (), first=False, last=False)
        parts = self._parts(mesh, low, or_more=low < high)
        return least_of([*parts.allowed, *self._over(parts, pp, mean, 1.0)]).value <= 0.0

    def tokens_per_s_per_gpu(self, mesh: Mesh, pp: int, high: int, step_s: float) -> float:
        """What batches up to one reach at most if a step takes so long at least."""
        if step_s <= 0.0:
            return math.inf
        tokens = batching(self.space.workload, high, mesh[2]).tokens
        return throughput(tokens, pp, SLACK * step_s, math.prod(mesh[:3]) * pp)

    def runs(self, mesh: Mesh, batch: int) -> bool:
        """Whether an engine's scheduler lets such a batch run, and so a smaller one."""
        return batch <= most_sequences(self.space.workload, mesh[2])

    def _sum(self, parts: Parts, pp: int, stage: Stage, fullest: Stage, multipliers: Multipliers) -> list[Factor]:
        workload, state = self.space.workload, parts.state.through(pp)
        kinds = list(state.lines())
        weights = 1.0, multipliers.tpot, multipliers.ttft
        longer = slower(workload)
        limits_s = 0.0, longer.tpot_limit_s, longer.ttft_limit_s
        constant = sum(
            weight * (kind.constant_s - limit_s * (1 + 2 * ROUNDING))
            for weight, kind, limit_s in zip(weights, kinds, limits_s, strict=True)
            if weight
        )
        factors: list[Factor] = [Factor((), np.array(constant)), *parts.allowed]
        for at in range(len(parts.stacks)):
            share = sum(
                weight * (kind[1 + at] if len(parts.stacks) == 2 else kind[1] + kind[2])
                for weight, kind in zip(weights, kinds, strict=True)
            )
            factors += _times(share * pp, self._stage_s(parts, pp, stage, at))
        if multipliers.memory:
            factors += self._over(parts, pp, fullest, multipliers.memory)
        return factors

    def _stage_s(self, parts: Parts, pp: int, stage: Stage, at: int) -> Iterator[Factor]:
        for count, group in zip(stage.layers, parts.seconds[at], strict=True):
            yield from _times(count, group)
        for pair, often in stage.meetings:
            yield from _times(often, [parts.meetings[at][pair]])
        place, end = self._step.leaves, parts.stacks[at][self._step.end]
        around = [vocabulary_seconds(end, pp, choice) for choice in self._choices[place]]
        alone, no_layers_s = stage._replace(meetings=()), [0.0] * len(stage.layers)
        yield Factor((place,), np.array([stage_s(alone, no_layers_s, {}, each) for each in around]))

    def _over(self, parts: Parts, pp: int, stage: Stage, per_byte: float) -> Iterator[Factor]:
        """Bytes of a stage beyond what is allowed, but for activations that the choices decide."""
        workload, stack = self.space.workload, parts.stacks[-1]
        base, groups = base_of(stack), len(stack)
        needed, allowed = stage_room(workload, stage, pp, [0.0] * groups, [0.0] * groups, 0.0, base)
        yield Factor((), np.array(per_byte * (SLACK * needed - allowed)))
        kv_share = room(workload, 1.0, 1.0)[0]
        for count, of_weights, of_kv in zip(stage.layers, parts.weights, parts.kv, strict=True):
            yield from _times(per_byte * SLACK * count, of_weights)
            yield from _times(per_byte * SLACK * kv_share * count * pp, of_kv)

    # --- addends -----------------------------------------------------------------------------------

    def _parts(self, mesh: Mesh, batch: int, *, or_more: bool) -> Parts:
        key = (mesh, batch, or_more)
        if key not in self._known:
            if len(self._known) >= 64:  # meshes come one after the other, and pipelines of a mesh share its batches
                self._known.clear()
            self._known[key] = self._priced(mesh, batch, or_more=or_more)
        return self._known[key]

    def _priced(self, mesh: Mesh, batch: int, *, or_more: bool) -> Parts:
        state = batching(self.space.workload, batch, mesh[2])
        loads = [load._replace(or_more=or_more) for load in state.loads]
        stacks = tuple(sides_of(self.space.workload, load, *mesh) for load in loads)
        kinds = [
            [self._tables(group, sides) for group, sides in zip(self._step.groups, stack, strict=True)]
            for stack in stacks
        ]
        places = [group.place for group in self._step.groups]

        def stored(figure: OpFigure) -> tuple[tuple[Factor, ...], ...]:
            return tuple(tuple(_at(place, each.each(figure))) for place, each in zip(places, kinds[-1], strict=True))

        def broken(tables: AddendTables) -> list[Factor]:
            return [
                Factor(
                    (op,), np.array([0.0 if tables.may(op, choice, or_more=or_more) else math.inf for choice in row])
                )
                for op, row in tables.choices.items()
            ]

        return Parts(
            state.at_least if or_more else state,
            stacks,
            tuple(
                tuple(
                    tuple(_at(place, [*each.each(TIME_S), *each.moved_s()]))
                    for place, each in zip(places, kind, strict=True)
                )
                for kind in kinds
            ),
            stored(WEIGHT_BYTES),
            stored(KV_BYTES),
            tuple(
                {
                    pair: tabulated(ends, dict(enumerate(self._choices)), partial(meeting_s, stack, pair))
                    for pair, ends in self._step.meetings.items()
                }
                for stack in stacks
            ),
            tuple(each for place, first in zip(places, kinds[0], strict=True) for each in _at(place, broken(first))),
        )

    def _tables(self, group: GroupSum, sides: Sides) -> AddendTables:
        return AddendTables(sides, {op: self._choices[place] for op, place in group.place.items()})


def _at(place: Mapping[Any, int], factors: Iterable[Factor]) -> Iterator[Factor]:
    """Factors by places of ops in `Strategy.dims`."""
    return (each.at(place) for each in factors)


def _times(often: float, factors: Iterable[Factor]) -> Iterator[Factor]:
    return (Factor(places, often * table) for places, table in factors)
