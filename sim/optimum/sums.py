"""Whole layers and pipeline stages added up, for many combinations of choices at once.

`sim.step.stage` has the same for one strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.arrays import Flags, Floats, Ints
from sim.layers.ops import crossing_tensors
from sim.optimum.fronts import Front, FrontFigures, LayerSide, keys_of, kinds_of, unbeaten_within
from sim.step.attention_expert_meshes import Stack
from sim.step.pipeline import Pair, Stage, pipeline, pipelines
from sim.step.stage import (
    VocabularySeconds,
    base_of,
    end_group,
    end_of,
    meeting_s,
    stage_room,
    stage_s,
    stream_send_s,
    vocabulary_seconds,
)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Groups of layers that share their choices, on one mesh.

    Attributes:
        groups: Their indices in the model.
        attention, experts: The two sides of a layer.
        both: Both sides as `sim.step` has them, per kind of step.
    """

    groups: tuple[int, ...]
    attention: LayerSide
    experts: LayerSide
    both: tuple[Stack, ...]

    @property
    def possible(self) -> bool:
        """Whether every op has a choice that more tokens might allow."""
        return self.attention.possible and self.experts.possible

    @property
    def allowed(self) -> bool:
        """Whether every op has a choice that breaks no limit."""
        return all(self.attention.allowed.values()) and all(self.experts.allowed.values())

    def crossed(self, layers: Layers) -> Layers:
        """Some of them with that way."""
        times_s = layers.figures.times_s.copy()
        choices = {name: each[rows] for front, rows in layers.parts for name, each in front.crossing.items()}
        for kind, stack in enumerate(self.both):
            for place, sides in enumerate(stack):
                for tensor in crossing_tensors(sides.experts.layer):
                    kinds, which = kinds_of([choices[op] for op in tensor.ops])
                    times_s[kind, place] += np.array([sum(sides.moves_s(tensor, each)) for each in kinds])[which]
        return replace(layers, figures=replace(layers.figures, times_s=times_s))

    def least_s(self, *, with_next: bool) -> Floats:
        """[kinds of step, groups] least seconds of a layer, each for itself, of all that more tokens might allow.

        Ways of the residual stream are priced only as far as they can matter.

        Args:
            with_next: Whether its way to a next layer of the same group counts.
        """
        fronts = self.attention.free_front, self.experts.free_front
        classes = [_alike_where_crossed(front) for front in fronts]
        least_s = np.full(fronts[0].figures.times_s.shape[:2], np.inf)
        for kind, stack in enumerate(self.both):
            for place, sides in enumerate(stack):
                layer = sides.experts.layer
                tensors = [each for each in crossing_tensors(layer) if with_next or each is not layer.stream]
                apart = [
                    [(float(times_s[alike].min()), choices) for choices, alike in of_side]
                    for of_side, front in zip(classes, fronts, strict=True)
                    for times_s in [front.figures.times_s[kind, place]]
                ]
                pairs = [(left_s + right_s, left | right) for left_s, left in apart[0] for right_s, right in apart[1]]
                for time_s, choices in sorted(pairs, key=lambda pair: pair[0]):
                    if time_s >= least_s[kind, place]:
                        break
                    for tensor in tensors:
                        time_s += sum(sides.moves_s(tensor, tuple(choices[op] for op in tensor.ops)))
                    least_s[kind, place] = min(least_s[kind, place], time_s)
        return least_s


def _alike_where_crossed(front: Front) -> list[tuple[dict[str, int], Ints]]:
    """Combinations that leave and take the residual stream alike: its choices there, and which ones they are."""
    if not front.crossing:
        return [({}, np.arange(len(front.choices)))]
    kinds, which = kinds_of(list(front.crossing.values()))
    return [
        (dict(zip(front.crossing, choices, strict=True)), np.flatnonzero(which == index))
        for index, choices in enumerate(kinds)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Combinations of choices for all groups of a model, [n] of them.

    Attributes:
        figures: Of one layer of each group.
        parts: Fronts that they are made of, attention's and the experts' of each unit, and [n] which row of it.
        unit: Of each group.
    """

    figures: FrontFigures
    parts: tuple[tuple[Front, Ints], ...]
    unit: tuple[int, ...]

    def dims(self, index: int) -> tuple[int, ...]:
        """Choices of one of them, in the order of `Strategy.dims`."""
        return tuple(choice for front, rows in self.parts for choice in front.choices[rows[index]].tolist())

    def end(self, group: int, op: str) -> Ints:
        """[n] choices of an op of a group's layer that leaves or reads what crosses the sides."""
        of_unit = self.parts[2 * self.unit[group] : 2 * self.unit[group] + 2]
        return next(front.crossing[op][rows] for front, rows in of_unit if op in front.crossing)

    def of(self, index: Ints) -> Layers:
        """Some of them."""
        return Layers(self.figures.of(index), tuple((front, rows[index]) for front, rows in self.parts), self.unit)


def all_layers(units: Sequence[Unit]) -> Layers:
    """Combinations of several units that break no limit and can be the best."""
    found = _fewer(units[0].crossed(layers_apart(units[0])), units)
    for unit in units[1:]:
        found = _fewer(_pairs(found, _fewer(unit.crossed(layers_apart(unit)), [unit])), units)
    return found


def layers_apart(unit: Unit) -> Layers:
    """Combinations of one unit that break no limit, but for the residual stream's way between the sides."""
    fronts = unit.attention.front, unit.experts.front
    parts = tuple(zip(fronts, _every_pair(*(len(front.choices) for front in fronts)), strict=True))
    left, right = (front.figures.of(rows) for front, rows in parts)
    figures = FrontFigures(
        left.times_s + right.times_s,
        left.weight_bytes + right.weight_bytes,
        left.kv_bytes + right.kv_bytes,
        np.maximum(left.peak_bytes, right.peak_bytes),
    )
    return Layers(figures, parts, (0,) * len(unit.groups))


def _every_pair(some: int, more: int) -> tuple[Ints, Ints]:
    """[some * more] rows of the one and of the other."""
    return np.repeat(np.arange(some), more), np.tile(np.arange(more), some)


def _pairs(some: Layers, more: Layers) -> Layers:
    rows = _every_pair(some.figures.peak_bytes.size, more.figures.peak_bytes.size)
    mine, its = some.of(rows[0]), more.of(rows[1])
    figures = FrontFigures(
        np.concatenate([mine.figures.times_s, its.figures.times_s], axis=1),
        np.concatenate([mine.figures.weight_bytes, its.figures.weight_bytes]),
        np.concatenate([mine.figures.kv_bytes, its.figures.kv_bytes]),
        np.maximum(mine.figures.peak_bytes, its.figures.peak_bytes),
    )
    before = len(some.parts) // 2
    return Layers(figures, mine.parts + its.parts, some.unit + tuple(before + unit for unit in more.unit))


def _fewer(layers: Layers, units: Sequence[Unit]) -> Layers:
    """Those that no other beats of which the residual stream is left and taken alike."""
    streams = [sides.experts.layer.stream for unit in units for sides in unit.both[0]][: len(layers.unit)]
    columns = [layers.end(group, op) for group, stream in enumerate(streams) for op in dict.fromkeys(stream.ops)]
    return layers.of(unbeaten_within(keys_of(columns), layers.figures))


# --- stages -------------------------------------------------------------------------------------------


def stages_s(stack: Stack, pp: int, layers: Layers, kind: int, stages: Sequence[Stage]) -> list[Floats]:
    """[n] seconds of each of some stages, in a step of one kind.

    Args:
        stack: Both sides of a GPU, per group.
        pp: Stages of their pipeline.
        layers: What they are made of.
        kind: Of step.
        stages: Which ones.
    """
    end = end_of(stack)
    last = layers.end(end_group(stack), end.experts.layer.stream.producer)
    met_s = {pair: _meetings_s(stack, layers, pair) for pair in {pair for each in stages for pair, _ in each.meetings}}
    choices, which = np.unique(last, return_inverse=True)
    around = np.array([vocabulary_seconds(end, pp, choice)[:3] for choice in choices.tolist()]).reshape(-1, 3)[which]
    vocabulary = VocabularySeconds(*around.T)
    return [stage_s(stage, layers.figures.times_s[kind], met_s, vocabulary) for stage in stages]


def slowest_stage_s(stack: Stack, pp: int, layers: Layers, kind: int, *, met: bool = True) -> Floats:
    """[n] the most of those of a pipeline; `met`: whether meetings of groups count."""
    stages = pipeline(end_of(stack).experts.workload, pp)
    if not met:
        stages = [each._replace(meetings=()) for each in stages]
    return functools.reduce(np.maximum, stages_s(stack, pp, layers, kind, stages))


def _meetings_s(stack: Stack, layers: Layers, pair: Pair) -> Floats:
    """[n] extra seconds of one meeting of two groups."""
    (left, right), (leaves, takes) = pair, (stack[group].experts.layer.stream for group in pair)
    columns = [layers.end(left, op) for op in leaves.ops] + [layers.end(right, op) for op in takes.consumers]
    kinds, which = kinds_of(columns)
    return np.array([meeting_s(stack, pair, choices) for choices in kinds])[which]


def fits(stack: Stack, pp: int, figures: FrontFigures, stages: Sequence[Stage] = ()) -> Flags:
    """[n] whether weights, cache and activations of every stage, or of each of some, have room."""
    workload, base = end_of(stack).experts.workload, base_of(stack)
    stored = list(figures.weight_bytes), list(figures.kv_bytes), figures.peak_bytes
    allowed_all = np.ones(figures.peak_bytes.shape, dtype=bool)
    for stage in stages or pipeline(workload, pp):
        needed, allowed = stage_room(workload, stage, pp, *stored, base)
        allowed_all &= needed <= allowed
    return allowed_all


def vocabulary_around(stack: Stack, depths: tuple[int, ...], choices: Sequence[int]) -> VocabularySeconds:
    """[choices, stages] seconds around the layers of the stages of pipelines; choices leave the residual stream."""
    end = end_of(stack)
    first_s, last_s, _, draft_s = np.array([vocabulary_seconds(end, 1, choice) for choice in choices]).T[..., None]
    send_s = np.array([[stream_send_s(end, pp, choice) for pp in depths] for choice in choices])
    each = pipelines(end.experts.workload, depths)
    return VocabularySeconds(first_s, last_s, send_s[:, each.which], draft_s)


def least_stages_s(stack: Stack, depths: tuple[int, ...], layers_s: Sequence[float], combines: Sequence[int]) -> Floats:
    """[depths] seconds that the slowest stage takes at least, whatever leaves the residual stream, without meetings."""
    each, around = pipelines(end_of(stack).experts.workload, depths), vocabulary_around(stack, depths, combines)
    return each.most(stage_s(each.stages, layers_s, {}, around).min(axis=0))


def least_needed_bytes(stack: Stack, depths: tuple[int, ...], weights: Sequence[float], kv: Sequence[float]) -> Floats:
    """[depths] bytes that the fullest stage needs by the memory policy, no op's inputs and output counted."""
    workload = end_of(stack).experts.workload
    each = pipelines(workload, depths)
    return each.most(stage_room(workload, each.stages, each.pp, weights, kv, 0.0, base_of(stack))[0])
