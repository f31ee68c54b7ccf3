"""Pipelines whose stages differ: the best layers per stage, and choices per stage, exactly.

Of one mesh and batch a stage is decided by its layers, by whether it has embedding or LM head, and by its choices. Its
time and its memory depend on nothing else, so the slowest stage is minimised by dynamic programming over where stages
end, as Alpa's inter-operator pass does over the optimum of its intra-operator one (Zheng et al., 2022, section 5.2).
All stages have equally many GPUs. They share the choices of one strategy, or each has the best of its own; then all
leave and take the residual stream alike, so that nothing but the stream moves between two stages.

An engine's plans have one choice per op, and its steps may be of two kinds, with prompts and without. Then the slowest
stages of both are minimised together: of the first so many layers those ways are kept that no other beats in both.

Meshes and ranges of batches are opened best bound first: however layers are shared out, all stages together take what
one stage with all of them takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sim.arrays import Floats, Ints
from sim.evaluation import Evaluation
from sim.optimum.bounds import Bounds, Mesh, Multipliers
from sim.optimum.exact_search import find_best, layers_on
from sim.optimum.fronts import keys_of
from sim.optimum.spaces import Space, space_of_batches
from sim.optimum.sums import Layers, fits, stages_s
from sim.serving.confidence import slower
from sim.serving.phases import Batching, batching, most_sequences, phase_of
from sim.simulate import degree_violations, evaluate
from sim.step.attention_expert_meshes import Stack
from sim.step.pipeline import Stage, stage_between
from sim.step.stage import end_of
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class UnevenStages:
    """A pipeline.

    Attributes:
        strategy: Degrees and batch, and the choices of the first stage.
        layers: Of each stage.
        dims: Of each stage.
        tokens_per_s_per_gpu: Tokens a second over the GPUs of a replica.
        tpot_s, ttft_s: Latencies, whichever the phase has.
    """

    strategy: Strategy
    layers: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    tokens_per_s_per_gpu: float
    tpot_s: float
    ttft_s: float

    def evaluated(self, workload: Workload) -> Evaluation:
        """All figures, where the stages share their choices."""
        return evaluate(replace(workload, stage_layers=self.layers), self.strategy)


def check_stages_may_differ(space: Space) -> None:
    """Raises: ValueError where `best_stages` has no answer, and why."""
    workload, phase = space.workload, phase_of(space.workload)
    if space.engine is not None:
        if not space.engine.cuts_stages:
            raise ValueError(f"{space.engine.title} has no option for the layers of each stage")
        if phase.replayed:
            raise ValueError(
                f"phase {workload.phase!r} is judged by replays: take 'serve', or give layers by stage_layers, which "
                "every phase has"
            )
        return
    if phase.mixes:
        raise ValueError(
            f"stages are balanced for one kind of step, and phase {workload.phase!r} has steps with prompts and without"
            ": take phase 'decode' or 'prefill', an engine's space, or give layers by stage_layers, which every phase "
            "has"
        )
    if space.vocabulary:
        raise ValueError(
            f"stages share one way of embedding and LM head: expected another space than {workload.space!r}"
        )
    if slower(workload).guarded:
        raise ValueError(f"stages are balanced as predicted: expected a confidence of 0.5, got {workload.confidence:g}")


def best_stages(space: Space, *, own_choices: bool = False) -> UnevenStages | None:
    """The best pipeline of a space whose stages may have any number of layers; None where none is feasible.

    Args:
        space: See `sim.optimum.spaces`; of a phase with one kind of step, or an engine's.
        own_choices: Whether each stage also has choices of its own; every tuple of degrees and batch is then opened, so
            the space should have few.

    Raises:
        ValueError: See `check_stages_may_differ`; or stages of an engine are to have choices of their own.
    """
    check_stages_may_differ(space)
    if own_choices and space.engine is not None:
        raise ValueError(f"{space.engine.title} shards all stages alike")
    best: UnevenStages | None = None
    reached = 0.0
    if not own_choices:  # equal stages are some of them
        equal = find_best(space).evaluation
        reached = equal.tokens_per_s_per_gpu * (1 - 1e-9) if equal else 0.0
    for part in space.parts():
        found = _best_of_part(part, reached, own_choices=own_choices)
        if found:
            best, reached = found, found.tokens_per_s_per_gpu
    return best


def _best_of_part(space: Space, reached: float, *, own_choices: bool) -> UnevenStages | None:
    """The best pipeline of a product of tables that is better than what has been reached."""
    workload = space.workload
    best: UnevenStages | None = None
    heap = [(-math.inf, mesh, 0, len(space.batch) - 1) for mesh in space.meshes()]
    bounds = None if own_choices else Bounds(space)
    while heap:
        bound, mesh, low, high = heapq.heappop(heap)
        if -bound <= reached or space.batch[low] > most_sequences(workload, mesh[2]):
            continue
        smallest, largest = space.batch[low], space.batch[high]
        depths = [
            pp for pp in space.stages(mesh) if bounds is None or bounds.may_have_room(mesh, pp, smallest, largest)
        ]
        if not depths:
            continue
        if low < high:
            middle = (low + high) // 2
            for ends in ((low, middle), (middle + 1, high)):
                heapq.heappush(heap, (-_most(space, bounds, mesh, *ends), mesh, *ends))
            continue
        layers, stacks, state = layers_on(space, mesh, smallest)
        tp, cp, dp, ep = mesh
        for pp in depths if layers else ():
            if layers and not degree_violations(workload, tp * cp * dp // ep, ep, pp):
                if space.engine is not None:
                    found = _PlannedPipelines(space, mesh, smallest, layers, stacks, state).best(pp, reached)
                else:
                    given = space, mesh, smallest, layers, stacks[-1], state
                    found = _Pipelines(*given, own=own_choices).best(pp)
                if found and found.tokens_per_s_per_gpu > reached:
                    best, reached = found, found.tokens_per_s_per_gpu
    return best


def balanced_layers(workload: Workload, strategy: Strategy) -> tuple[int, ...] | None:
    """How many layers each stage of a strategy best has; None where it is feasible with none.

    >>> from sim.config.question import Question
    >>> from sim.ops.heuristics import megatron_dims
    >>> asked = Question(model="deepseek_v3", engine="none", phase="decode", isl=4000, osl=500, gpus=32)
    >>> balanced_layers(asked.load(), Strategy(8, 1, 4, 64, megatron_dims(asked.load().model)))
    (17, 15, 15, 14)
    """
    found = best_stages(space_of_batches(workload, strategy, (strategy.batch,)))
    return found.layers if found else None


def _most(space: Space, bounds: Bounds | None, mesh: Mesh, low: int, high: int) -> float:
    """What pipelines of any depth reach at most with some batches, tokens/s/GPU."""
    if bounds is None:
        return math.inf
    smallest, largest = space.batch[low], space.batch[high]
    all_s = bounds.least(mesh, 1, smallest, largest, Multipliers()).value
    if not math.isfinite(all_s):
        return 0.0
    state = batching(space.workload, smallest, mesh[2])
    if state.steps(0.0, 0.0).tpot_s > space.workload.tpot_limit_s:
        return 0.0
    return bounds.tokens_per_s_per_gpu(mesh, 1, largest, all_s)


class _Stages:
    """Stages of the pipelines of one mesh and batch, priced as they are asked for.

    Args:
        layers: Combinations of choices, n of them.
        stacks: Both sides of a GPU per group of layers, in each kind of step.
        alike: [n] which of them are one place, of which a stage may have the fastest; each has its own if not given.
    """

    def __init__(self, layers: Layers, stacks: Sequence[Stack], alike: Ints | None = None) -> None:
        self._layers, self._stacks, self._workload = layers, stacks, end_of(stacks[0]).experts.workload
        self._alike, self._known = alike, dict[tuple[Stage, int], tuple[Floats, Ints]]()

    def between(self, start: int, end: int, pp: int) -> tuple[Floats, Ints]:
        """The stage with the layers from one up to another.

        Returns:
            [kinds of step, places] its seconds, infinite where it has no room, and [places] of which combination.
        """
        stage = stage_between(self._workload, start, end, first=start == 0, last=end == self._workload.model.layers)
        found = self._known.get((stage, pp))
        if found is None:
            found = self._known[stage, pp] = self._priced(stage, pp)
        return found

    def _priced(self, stage: Stage, pp: int) -> tuple[Floats, Ints]:
        room = fits(self._stacks[-1], pp, self._layers.figures, [stage])
        each_s = [stages_s(stack, pp, self._layers, kind, [stage])[0] for kind, stack in enumerate(self._stacks)]
        seconds: Floats = np.where(room, each_s, np.inf)
        if self._alike is None:
            return seconds, np.arange(len(room))
        order = np.lexsort((seconds[0], self._alike))
        first = order[np.unique(self._alike[order], return_index=True)[1]]
        return seconds[:, first], first


class _Pipelines:
    """The pipelines of one mesh and batch; arrays have a place for each combination of choices that can win, [n].

    Where stages have choices of their own, combinations that leave and take the stream alike are one place: of each
    stage the fastest that fits.
    """

    def __init__(
        self,
        space: Space,
        mesh: Mesh,
        batch: int,
        layers: Layers,
        stack: Stack,
        state: Batching,
        *,
        own: bool,
    ) -> None:
        self._space, self._workload, self._mesh, self._batch = space, space.workload, mesh, batch
        self._layers, self._state, alike = layers, state, None
        if own:
            ends = [(group, op) for group, each in enumerate(stack) for op in each.experts.layer.stream.ops]
            alike = np.unique(keys_of([layers.end(*each) for each in ends]), return_inverse=True)[1]
        self._stages = _Stages(layers, [stack], alike)

    def best(self, pp: int) -> UnevenStages | None:
        """The best of so many stages: where each ends is decided from the first stage on."""
        layers = self._workload.model.layers
        if not self._has_room(pp):
            return None
        places = len(self._stages.between(0, 1, pp)[1])
        least: Floats = np.full((layers + 1, places), np.inf)  # of the slowest stage of the first so many layers
        least[0] = 0.0
        starts: list[Ints] = []  # where the stage that ends there begins
        for stage in range(pp):
            before, least = least, np.full_like(least, np.inf)
            starts.append(np.zeros(least.shape, np.int64))
            for end in [layers] if stage == pp - 1 else range(stage + 1, layers - pp + stage + 2):
                for start in range(stage, end if stage else 1):
                    slowest = np.maximum(before[start], self._stages.between(start, end, pp)[0][0])
                    better = slowest < least[end]
                    least[end, better], starts[-1][end, better] = slowest[better], start
        place = int(least[layers].argmin())
        slowest_s = float(least[layers, place])
        return self._found(pp, place, slowest_s, starts) if math.isfinite(slowest_s) else None

    def _has_room(self, pp: int) -> bool:
        """Whether so many stages have room for all layers: each takes as many as it has room for."""
        layers = self._workload.model.layers
        ends: Ints = np.zeros(len(self._stages.between(0, 1, pp)[1]), np.int64)
        for _ in range(pp):
            further = ends.copy()
            for start in np.unique(ends).tolist():
                for end in range(start + 1, layers + 1):
                    longer = (ends == start) & np.isfinite(self._stages.between(start, end, pp)[0][0])
                    if not longer.any():
                        break
                    further[longer] = end
            ends = further
        return bool((ends == layers).any())

    def _found(self, pp: int, place: int, slowest_s: float, starts: Sequence[Ints]) -> UnevenStages | None:
        state = self._state.through(pp)
        steps = state.steps(pp * slowest_s, pp * slowest_s)
        tpot_s, ttft_s = float(steps.tpot_s), float(steps.ttft_s)
        if tpot_s > self._workload.tpot_limit_s or ttft_s > self._workload.ttft_limit_s:
            return None
        ends = [self._workload.model.layers]
        for of_stage in reversed(starts):
            ends.append(int(of_stage[ends[-1], place]))
        ends.reverse()
        tp, cp, dp, ep = self._mesh
        degrees = Strategy(tp, ep, pp, self._batch, (), cp, None if (cp, dp) == (1, ep) else dp)
        of_stages = [int(self._stages.between(start, end, pp)[1][place]) for start, end in itertools.pairwise(ends)]
        dims = tuple(self._space.plain(replace(degrees, dims=self._layers.dims(each))).dims for each in of_stages)
        strategy = replace(degrees, dims=dims[0])
        rate = float(state.throughput(steps.step_s, strategy.gpus))
        return UnevenStages(
            strategy, tuple(end - start for start, end in itertools.pairwise(ends)), dims, rate, tpot_s, ttft_s
        )


class _Way(NamedTuple):
    """How the first layers of a model may be shared out.

    Attributes:
        slowest_s: Seconds of the slowest stage so far, per kind of step.
        ends: Where each stage ends.
    """

    slowest_s: tuple[float, ...]
    ends: tuple[int, ...]


class _PlannedPipelines:
    """The pipelines of one mesh and batch under an engine's plan: one choice per op, one kind of step or two."""

    def __init__(
        self, space: Space, mesh: Mesh, batch: int, layers: Layers, stacks: Sequence[Stack], state: Batching
    ) -> None:
        self._space, self._workload, self._layers, self._state = space, space.workload, layers, state
        self._mesh, self._batch, self._stages = mesh, batch, _Stages(layers, stacks)

    def best(self, pp: int, reached: float) -> UnevenStages | None:
        """The best of so many stages, if it is better than what has been reached."""
        layers, state = self._workload.model.layers, self._state.through(pp)
        tp, cp, dp, ep = self._mesh
        dims = self._layers.dims(0)
        strategy = Strategy(tp, ep, pp, self._batch, dims, cp, None if (cp, dp) == (1, ep) else dp)

        def rate(slowest_s: Sequence[float]) -> float:
            steps = state.steps(pp * slowest_s[0], pp * slowest_s[-1])
            return float(state.throughput(steps.step_s, strategy.gpus))

        ways: dict[int, list[_Way]] = {0: [_Way((0.0,) * len(state.loads), ())]}
        for stage in range(pp):
            further: dict[int, list[_Way]] = {}
            for end in [layers] if stage == pp - 1 else range(stage + 1, layers - pp + stage + 2):
                longer: list[_Way] = []
                for start, before in ways.items():
                    seconds = self._stages.between(start, end, pp)[0][:, 0].tolist() if start < end else [math.inf]
                    for way in before if math.isfinite(seconds[0]) else ():
                        slowest_s = tuple(map(max, way.slowest_s, seconds))
                        if rate(slowest_s) > reached:
                            longer.append(_Way(slowest_s, (*way.ends, end)))
                if longer:
                    further[end] = _unbeaten(longer)
            ways = further
        for way in sorted(ways.get(layers, []), key=lambda way: -rate(way.slowest_s)):
            counts = tuple(end - start for start, end in itertools.pairwise((0, *way.ends)))
            found = evaluate(replace(self._workload, stage_layers=counts), strategy)
            if found.feasible and found.tokens_per_s_per_gpu > reached:
                own = found.tokens_per_s_per_gpu, found.tpot_s, found.ttft_s
                return UnevenStages(strategy, counts, (dims,) * pp, *own)
        return None


def _unbeaten(ways: Sequence[_Way]) -> list[_Way]:
    """Those whose slowest stages no other's match or undercut in every kind of step."""
    kept: list[_Way] = []
    least = math.inf
    for way in sorted(ways):
        if way.slowest_s[-1] < least:  # ascending in the first kind
            kept.append(way)
            least = way.slowest_s[-1]
    return kept
