"""Which layers a pipeline stage has. Stages differ by one layer at most, unless the workload says otherwise."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sim.arrays import Floats, Ints
from sim.ops.layers import layer_of
from sim.workload import Workload

Pair = tuple[int, int]
"""A group of layers, and one of which a layer follows."""


class Stage(NamedTuple):
    """Pipeline stages that are alike; or such of many pipelines, with arrays for counts and flags.

    Attributes:
        layers: Layers of each group of the model.
        meetings: How often a layer leaves the residual stream to one of another group, the next stage's first layer
            included; empty where it lies alike in all groups.
        first: Whether it has the embedding.
        last: Whether it has the LM head.
    """

    layers: tuple[Any, ...]
    meetings: tuple[tuple[Pair, Any], ...]
    first: Any
    last: Any

    def covers(self, other: Stage) -> bool:
        """Whether the other has nothing that this one has not."""
        return (
            all(mine >= its for mine, its in zip(self.layers, other.layers, strict=True))
            and self.meetings == other.meetings
            and self.first >= other.first
            and self.last >= other.last
        )


@lru_cache(maxsize=4096)
def pipeline(workload: Workload, pp: int) -> tuple[Stage, ...]:
    """The stages of `pp` that can be the slowest or the fullest: each of the others has less than one of them."""
    start, found = 0, set[Stage]()
    counts = layers_of_stages(workload, min(pp, workload.model.layers + 2))  # a stage more would be one without layers
    for index, count in enumerate(counts):
        first, last = index == 0, index == len(counts) - 1
        found.add(stage_between(workload, start, start + count, first=first, last=last))
        start += count
    return tuple(sorted(each for each in found if not any(other != each and other.covers(each) for other in found)))


def stage_between(workload: Workload, start: int, end: int, *, first: bool, last: bool) -> Stage:
    """The stage with the layers from one up to another.

    Args:
        workload: Of whose model.
        start: Its first layer.
        end: The one behind its last.
        first: Whether it has the embedding.
        last: Whether it has the LM head.
    """
    model = workload.model
    return _stage_of(model.order, len(model.groups), meet(workload), start, end, first, last)


@lru_cache(1 << 14)
def _stage_of(order: tuple[int, ...], groups: int, meets: bool, start: int, end: int, first: bool, last: bool) -> Stage:
    mine = order[start:end]
    met = Counter(pair for pair in pairwise(order[start : end + 1]) if pair[0] != pair[1])
    return Stage(tuple(map(mine.count, range(groups))), tuple(sorted(met.items())) if meets else (), first, last)


class Pipelines(NamedTuple):
    """The stages of several pipelines next to each other.

    Attributes:
        pp: [stages] degree of each one's pipeline.
        stages: Of all, without meetings, with arrays [stages].
        which: [stages] the pipeline of each.
        starts: [pipelines] where its stages begin.
    """

    pp: Ints
    stages: Stage
    which: Ints
    starts: Ints

    @property
    def ranges(self) -> list[slice]:
        """[pipelines] which stages each has."""
        return list(map(slice, self.starts, [*self.starts[1:], None]))

    def most(self, of_stages: Floats) -> Floats:
        """[..., pipelines] the most of any stage, from [..., stages]."""
        return np.maximum.reduceat(of_stages, self.starts, axis=-1)


@lru_cache(maxsize=256)
def pipelines(workload: Workload, depths: tuple[int, ...]) -> Pipelines:
    """Pipelines of these degrees."""
    each = [pipeline(workload, pp) for pp in depths]
    counts = list(map(len, each))
    which = np.repeat(np.arange(len(depths)), counts)
    *layers, first, last = np.array([(*stage.layers, *stage[2:]) for stages in each for stage in stages]).T
    stages = Stage(tuple(layers), (), first, last)
    return Pipelines(np.array(depths)[which], stages, which, np.cumsum([0, *counts[:-1]]))


def meet(workload: Workload) -> bool:
    """Whether the residual stream may lie otherwise from group to group: other choices, or other ops at its ends."""
    groups = workload.model.groups
    return len(groups) > 1 and (workload.groups == "own" or len({layer_of(each).stream.ops for each in groups}) > 1)


def layers_of_stages(workload: Workload, pp: int) -> tuple[int, ...]:
    """Layers of each of `pp` stages: those of the workload where it has as many stages, else shared out evenly."""
    if len(workload.stage_layers) == pp:
        return workload.stage_layers
    return stage_layers(workload.model.layers, pp)


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage; those in the middle get more first, then the one with the embedding, the LM head's last.

    >>> stage_layers(10, 4), stage_layers(11, 4), stage_layers(94, 2)
    ((2, 3, 3, 2), (3, 3, 3, 2), (47, 47))
    """
    fewest, more = divmod(layers, pp)
    begins = 1 if more <= pp - 2 else 0
    return tuple(fewest + (begins <= stage < begins + more) for stage in range(pp))
