"""The exact best strategy of a space, in every phase: bounds leave out what cannot win, and nothing else.

With the choices of the two residual adds and of the norms behind them fixed, attention's side of a layer and the
experts' side meet only in their sums: seconds of each kind of step, bytes of weights, of KV cache, and the larger of
their activations. All latencies and the throughput are monotone in those sums. So of each side only those combinations
can win that no other beats in all of them (a Pareto front), and all pairs of the two fronts are added up. Groups of
layers that share their choices have one front, with sums per group; where each has its own, their layers meet in the
residual stream alone, and are paired in the same way.

A range of batches is bounded by the tokens of its largest and by what its smallest or any larger one takes at least.
Memory grows with the batch; so does time, but for what `Load.or_more` leaves out, such as what a route gains where
tokens divide evenly. Ranges come best bound first and are halved, until the best bound left is a single batch that is
no better than the best strategy found. Lists of powers of two and of every batch are solved alike. Source: design in
this repository; it agrees with `sim.simulate.evaluate` to rounding, and with brute force on small spaces.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sim.arrays import Floats, Ints
from sim.canonical import canonical
from sim.evaluation import Evaluation
from sim.ops.dims import dims_of
from sim.ops.layers import layer_of
from sim.ops.rank import Rank
from sim.ops.sizes import Load
from sim.optimum.bounds import SLACK, Mesh
from sim.optimum.fronts import LayerSide, Ranks
from sim.optimum.spaces import Space, space_of_batches
from sim.optimum.sums import (
    Layers,
    Unit,
    all_layers,
    fits,
    layers_apart,
    least_needed_bytes,
    least_stages_s,
    slowest_stage_s,
)
from sim.optimum.vocabulary_choices import VocabularyChoice, unbeaten_vocabulary_choices
from sim.serving.confidence import ABOUT, ROUNDING, Slower, slower
from sim.serving.phases import Batching, batching, most_sequences, throughput
from sim.simulate import degree_violations, evaluate
from sim.step.attention_expert_meshes import Stack, attention_rank, experts_rank, sides
from sim.step.pipeline import meet
from sim.step.stage import room
from sim.strategy import Strategy
from sim.workload import Workload, coarse_steps

_NARROW = 1.5
"""Largest over smallest batch of a range below which its smallest is added up for a bound that is tight."""

SecondsTable = tuple[tuple[float, ...], ...]
"""Of a layer, per kind of step and group of layers."""
Dims = Mapping[str, tuple[int, ...]]
"""Choices per op, by its name."""


Score = Callable[[float, int], float]
"""What a strategy is worth, from its tokens/s/GPU, infinite too, and the GPUs of a replica."""


def as_is(tokens_per_s_per_gpu: float, _gpus: int) -> float:
    """Goes by tokens/s/GPU alone."""
    return tokens_per_s_per_gpu


@dataclass(frozen=True, slots=True)
class Best:
    """The best strategy of a space.

    Attributes:
        evaluation: Of it, or None if nothing is feasible.
        swept_tokens_per_s_per_gpu: Its throughput as the search added it up, 0.0 if there is none.
        space: What was searched.
        opened: Of the tuples of degrees and batch, how many were added up; the others' bounds ruled them out.
        tuples: How many there are.
    """

    evaluation: Evaluation | None
    swept_tokens_per_s_per_gpu: float
    space: Space
    opened: int
    tuples: int

    @property
    def space_size(self) -> int:
        """Strategies in the space."""
        return self.space.size


def find_best(space: Space, progress: Callable[[int, int], None] | None = None, known: Known | None = None) -> Best:
    """Solves a space exactly.

    Args:
        space: See `sim.optimum.spaces`.
        progress: Called with (done, total) parts of the work.
        known: Of searches of the same workload, or of one with other SLOs or batches; what this one works out is added.

    >>> from sim.config.catalog import load_workload
    >>> from sim.optimum.spaces import extended_space
    >>> find_best(extended_space(load_workload("mixtral_8x22b_8k"), ["context"])).evaluation.feasible
    True
    """
    found, opened = _search_parts(space, _Ranking(), progress, known)
    tuples = len(space.tp) * len(space.cp) * len(space.dp or (0,)) * len(space.ep) * len(space.pp) * len(space.batch)
    value, best = found.ranked[0] if found.ranked else (0.0, None)
    return Best(evaluate(space.workload, best) if best else None, value, space, opened, tuples)


def find_bests(
    space: Space,
    count: int,
    score: Score = as_is,
    progress: Callable[[int, int], None] | None = None,
    known: Known | None = None,
    reached: float = 0.0,
) -> tuple[Evaluation, ...]:
    """The best strategies of different degrees, the best first: of each degrees tp, cp, dp, ep, pp one, exactly.

    Args:
        space: See `sim.optimum.spaces`.
        count: How many, at most.
        score: What to go by: of tokens/s/GPU and a replica's GPUs; it never falls with the former.
        progress: Called with (done, total) parts of the work.
        known: As of `find_best`.
        reached: A score that so many strategies of the space are known to reach; what scores less is left out.
    """
    found, _ = _search_parts(space, _Ranking(count, score, reached * SLACK), progress, known)
    return tuple(evaluate(space.workload, strategy) for _, strategy in found.ranked)


class _Ranking:
    """The best strategies of different degrees so far.

    Attributes:
        score: What it goes by.
    """

    def __init__(self, count: int = 1, score: Score = as_is, least: float = 0.0) -> None:
        self.score = score
        self._least = least
        self._count = count
        self._of_degrees: dict[tuple[int, ...], tuple[float, Strategy]] = {}

    @property
    def ranked(self) -> list[tuple[float, Strategy]]:
        """(score, strategy), the best first."""
        return sorted(self._of_degrees.values(), key=lambda each: -each[0])[: self._count]

    def offer(self, score: float, strategy: Strategy) -> None:
        """Takes a strategy in if it is among the best."""
        degrees = (strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep, strategy.pp)
        if score > self.least(degrees):
            self._of_degrees[degrees] = (score, strategy)
            if len(self._of_degrees) >= self._count:
                self._least = max(self._least, self.ranked[-1][0])

    def least(self, degrees: tuple[int, ...] = ()) -> float:
        """What a further strategy must score more than; of certain degrees, if they are given."""
        return max(self._least, self._of_degrees[degrees][0]) if degrees in self._of_degrees else self._least

    def worth_a_look(self, score: float, degrees: tuple[int, ...], gpus: int) -> bool:
        """Whether strategies of these degrees that score so much at most may be taken in.

        Scores may have an upper end, such as that of a load which is carried. Nothing is better than one that is there.
        """
        least = self.least(degrees)
        return score > least * SLACK and self.score(math.inf, gpus) > least


def _search_parts(
    space: Space, ranking: _Ranking, progress: Callable[[int, int], None] | None, known: Known | None
) -> tuple[_Ranking, int]:
    opened, parts = 0, space.parts()
    for at, part in enumerate(parts):
        worked = (
            None if known is None else known.setdefault((*part.choices.items(), *part.vocabulary.items()), Worked())
        )
        search = _Search(part, ranking, worked)
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


def best_batch(workload: Workload, strategy: Strategy) -> int:
    """The batch, of those that are searched, with which a strategy is fastest within memory and limits.

    Where it is feasible with none, the smallest: what it breaks, all break.

    >>> from sim.config.catalog import load_workload
    >>> from sim.ops.heuristics import megatron_dims
    >>> workload = load_workload("mixtral_8x22b_8k")
    >>> best_batch(workload, Strategy(4, 8, 1, 1, megatron_dims(workload.model)))
    2048
    """
    space = space_of_batches(workload, strategy, workload.degrees.batch)
    found = find_best(space).evaluation
    return found.strategy.batch if found else space.batch[0]


def layers_on(space: Space, mesh: Mesh, batch: int) -> tuple[Layers | None, list[Stack], Batching]:
    """Combinations of choices that can be the best on a mesh with a batch in some pipeline; None where none is allowed.

    With them both sides of a GPU per group of layers, in each kind of step, and what is in the steps.
    """
    return _Search(space, _Ranking()).whole_layers(mesh, batch)


class _Depth(NamedTuple):
    """A pipeline degree of a range.

    Attributes:
        pp: It.
        step_s: Lower bound of the mean seconds of a step.
        value: The most that any batch is worth.
    """

    pp: int
    step_s: float
    value: float = 0.0


class _Range(NamedTuple):
    """Batches of one mesh, the smallest's and the largest's index; best bound first in a heap.

    Attributes:
        least_value: Minus the most that any of them is worth.
        mesh: Of all.
        low, high: See above.
        depths: Pipeline degrees that may keep within limits and be better than the best.
        layer_s: Lower bounds of the seconds of a layer, of which their bounds were made.
        tight: Whether they are those of the smallest batch with all moves, not the sum of each op's least.
    """

    least_value: float
    mesh: Mesh
    low: int
    high: int
    depths: tuple[_Depth, ...]
    layer_s: SecondsTable
    tight: bool


class _Floor(NamedTuple):
    """What a mesh and batch take at least in pipelines of some degrees.

    Attributes:
        step_s: [degrees] mean seconds of a step.
        tpot_s, ttft_s: [degrees]
        prompt_share: [degrees] of the time per token.
        seen: [degrees] as of `sim.serving.phases.Pace.seen`.
        needed_bytes: [degrees] of the fullest stage, by the memory policy.
    """

    step_s: Floats
    tpot_s: Floats
    ttft_s: Floats
    prompt_share: Floats
    seen: Floats
    needed_bytes: Floats

    def kept(self, longer: Slower, allowed_bytes: float) -> list[int]:
        """Which of the degrees' pipelines may keep within limits."""
        fits = SLACK * self.needed_bytes <= allowed_bytes
        (found,) = (fits & (self.ttft_s <= longer.ttft_limit_s * (1 + ROUNDING))).nonzero()
        floors = zip(*(each[found].tolist() for each in (self.tpot_s, self.prompt_share, self.seen)), strict=True)
        return [at for at, floor in zip(found.tolist(), floors, strict=True) if longer.may_keep(*floor)]


class _Start(NamedTuple):
    """A mesh and batch before anything is chosen.

    Attributes:
        units: On the mesh, with what is in the steps of the batch.
        state: Of the batch; what it is at least, where larger ones are meant too.
        stacks: Both sides of a GPU per group, per kind of step.
        layer_s: Least seconds of a layer, each op for itself and without moves.
        weights, kv: The same of its bytes.
        possible: Whether every op has a choice that more tokens might allow.
        endings: Choices of embedding and LM head that no others beat, each with `stacks` where they lie so; the
            space's one way, if it has no choices there.
    """

    units: tuple[Unit, ...]
    state: Batching
    stacks: list[Stack]
    layer_s: SecondsTable
    weights: tuple[float, ...]
    kv: tuple[float, ...]
    possible: bool
    endings: tuple[VocabularyChoice, ...]


class Worked:
    """What searches over the same choices have worked out, of workloads that differ in SLOs, batches or memory alone.

    Attributes:
        stages: Pipeline degrees that are allowed, of those asked for.
        floors: By mesh, pipeline degrees, batch and least seconds of a layer.
        tight_s: Least seconds of a layer with all moves.
        starts: By mesh, batch and whether larger ones are meant too.
        sides: By what distinguishes one side of a layer from another.
    """

    def __init__(self) -> None:
        self.stages: dict[tuple[Mesh, tuple[int, ...]], tuple[int, ...]] = {}
        self.floors: dict[tuple[Mesh, tuple[int, ...], int, SecondsTable], _Floor] = {}
        self.tight_s: dict[tuple[Mesh, int], SecondsTable] = {}
        self.starts: dict[tuple[Mesh, int, bool], _Start] = {}
        self.sides: dict[tuple[object, ...], LayerSide] = {}


Known = dict[tuple[tuple[str, tuple[int, ...]], ...], Worked]
"""What searches have worked out, by the choices they had. Begins empty; a front or a longer SLO then takes a fraction
of the first search's time."""


class _Search:
    """Best-first over degrees and ranges of the batch."""

    def __init__(self, space: Space, ranking: _Ranking, worked: Worked | None = None) -> None:
        self.space = space
        self.workload: Workload = space.workload
        self._slower = slower(space.workload)
        few = set(coarse_steps(space.batch[-1]))
        self._coarse = [at for at, batch in enumerate(space.batch) if batch in few]
        self._allowed_bytes = room(space.workload, 0.0, 0.0)[1]
        self._tokens = functools.lru_cache(1 << 15)(self._tokens_of)
        self._units = units_of(space)
        self._combines = space.choices[self._end_dim()]
        self._vocabulary = tuple(space.vocabulary.values())
        self._worked = Worked() if worked is None else worked
        self.ranking = ranking
        self.opened = 0
        self._latest: tuple[tuple[Mesh, int], Layers] | None = None

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Goes through all ranges, best bound first."""
        heap: list[_Range] = []
        # An engine is asked of few: most of its meshes are larger than the budget.
        meshes = [mesh for mesh in self.space.layouts() if math.prod(mesh[:3]) <= self.workload.max_gpus]
        for done, mesh in enumerate(meshes):
            if depths := self.stages(mesh):
                self._bound(heap, mesh, depths, 0, len(self.space.batch) - 1)
            if progress and done % 16 == 0:
                progress(done, 2 * len(meshes))
        looked_into = 0
        while heap and -heap[0].least_value > self.ranking.least() * SLACK:
            self._look_into(heap, heapq.heappop(heap))
            looked_into += 1
            if progress and looked_into % 64 == 0:
                done = len(meshes) * (1 + looked_into / (looked_into + len(heap)))
                progress(int(done), 2 * len(meshes))
        if progress:
            progress(2 * len(meshes), 2 * len(meshes))

    def _end_dim(self) -> str:
        """The entry of dims that says how the residual stream reaches embedding and LM head."""
        end = self.workload.model.order[-1]
        last = layer_of(self.workload.model.groups[end]).stream.producer
        return next(dim.name for dim in dims_of(self.workload) if dim.op.name == last and end in dim.groups)

    def stages(self, mesh: Mesh) -> tuple[int, ...]:
        """Pipeline degrees that go with a mesh."""
        tp, cp, dp, ep = mesh
        key, known = (mesh, self.space.pp), self._worked.stages
        if key not in known:
            runs, moe_tp = self.space.stages(mesh), tp * cp * dp // ep
            known[key] = tuple(pp for pp in runs if not degree_violations(self.workload, moe_tp, ep, pp))
        return known[key]

    # --- ranges ----------------------------------------------------------------------------------

    def _look_into(self, heap: list[_Range], each: _Range) -> None:
        mesh, low, high, batches = each.mesh, each.low, each.high, self.space.batch
        depths = [depth for depth in each.depths if self._worth_a_look(mesh, depth)]
        degrees = [depth.pp for depth in depths]
        if not depths:
            return
        if not each.tight and batches[high] <= _NARROW * batches[low]:
            layer_s = self._tight_layer_s(mesh, batches[low])
            self._bound(heap, mesh, degrees, low, high, layer_s, tight=True)
        elif low == high:
            best = max(depths, key=lambda depth: depth.value)
            self._push(heap, each, [depth for depth in depths if depth is not best])
            self.add_up(mesh, best.pp, batches[low])
        else:
            middle = self._upper(low, high)
            self._push(heap, each._replace(high=middle - 1), depths)
            self._bound(heap, mesh, degrees, middle, high, each.layer_s)

    def _upper(self, low: int, high: int) -> int:
        """Where the upper half of a range begins: if it can be at a batch that searches over few have priced, too."""
        first, last = bisect_right(self._coarse, low), bisect_right(self._coarse, high)
        return self._coarse[(first + last) // 2] if first < last else (low + high) // 2 + 1

    def _bound(
        self,
        heap: list[_Range],
        mesh: Mesh,
        depths: Sequence[int],
        low: int,
        high: int,
        at_least_s: SecondsTable = (),
        *,
        tight: bool = False,
    ) -> None:
        """Adds a range with its bounds, but for pipeline degrees of which none is feasible or better than the best."""
        smallest = self.space.batch[low]
        if smallest > most_sequences(self.workload, mesh[2]):
            return
        start = self._start(mesh, smallest, or_more=True)
        if not start.possible:
            return
        layer_s = start.layer_s
        if at_least_s:
            layer_s = tuple(tuple(map(max, *rows)) for rows in zip(layer_s, at_least_s, strict=True))
        floor, known = self._floor(mesh, smallest, layer_s), self.stages(mesh)
        kept = [_Depth(known[at], float(floor.step_s[at])) for at in floor.kept(self._slower, self._allowed_bytes)]
        found = _Range(0.0, mesh, low, high, (), layer_s, tight)
        self._push(heap, found, [depth for depth in kept if depth.pp in depths])

    def _push(self, heap: list[_Range], each: _Range, depths: Sequence[_Depth]) -> None:
        """Adds a range, of whose smallest batch all is known, in pipelines that may be better than the best."""
        tokens, worth = self._tokens(self.space.batch[each.high], each.mesh[2]), list[_Depth]()
        for pp, step_s, _ in depths:
            gpus = self._gpus(each.mesh, pp)
            depth = _Depth(pp, step_s, self.ranking.score(throughput(tokens, pp, step_s, gpus), gpus))
            if self._worth_a_look(each.mesh, depth):
                worth.append(depth)
        if worth:
            most = max([depth.value for depth in worth])
            heapq.heappush(heap, each._replace(least_value=-most, depths=tuple(worth)))

    def _worth_a_look(self, mesh: Mesh, depth: _Depth) -> bool:
        return self.ranking.worth_a_look(depth.value, (*mesh, depth.pp), self._gpus(mesh, depth.pp))

    def _tokens_of(self, batch: int, dp: int) -> float:
        return batching(self.workload, batch, dp).tokens

    @staticmethod
    def _gpus(mesh: Mesh, pp: int) -> int:
        return math.prod(mesh[:3]) * pp

    def _floor(self, mesh: Mesh, batch: int, layer_s: SecondsTable) -> _Floor:
        """What a batch takes at least; pipelines, and searches that differ in limits alone, ask for the same."""
        depths, known = self.stages(mesh), self._worked.floors
        key = (mesh, depths, batch, layer_s)
        found = known.get(key)
        if found is None:
            start = self._start(mesh, batch, or_more=True)
            least_s = [
                np.min([least_stages_s(stack, depths, each_s, self._combines) for stack in stacks], axis=0)
                for *stacks, each_s in zip(*(ending.stacks for ending in start.endings), layer_s, strict=True)
            ]
            stages_s = SLACK * np.array(depths) * np.maximum.accumulate(least_s)  # with prompts a step takes no less
            stored = start.weights, start.kv
            needed = [least_needed_bytes(ending.stacks[-1], depths, *stored) for ending in start.endings]
            state, kinds_s = start.state.through(np.array(depths)), (stages_s[0], stages_s[-1])
            steps = state.steps(*kinds_s)
            step_s, tpot_s, ttft_s, share = (
                each + np.zeros(len(depths)) for each in (steps.step_s, steps.tpot_s, steps.ttft_s, steps.prompt_share)
            )
            seen = state.pace.seen(state.times) + np.zeros(len(depths))
            found = known[key] = _Floor(step_s, tpot_s, ttft_s, share, seen, np.min(needed, axis=0))
        return found

    # --- sums ------------------------------------------------------------------------------------

    def _tight_layer_s(self, mesh: Mesh, batch: int) -> SecondsTable:
        """Least seconds of a layer, each for itself, with all moves; more tokens never take less.

        Where groups meet, the way to the next layer depends on its group, and is left out.
        """
        key, known = (mesh, batch), self._worked.tight_s
        found = known.get(key)
        if found is None:
            alone = not meet(self.workload)
            least_s = [unit.least_s(with_next=alone) for unit in self._start(mesh, batch, or_more=True).units]
            found = known[key] = tuple(tuple(row) for row in np.concatenate(least_s, axis=1).tolist())
        return found

    def add_up(self, mesh: Mesh, pp: int, batch: int) -> None:
        """Adds up all combinations of one batch that can be the best."""
        tp, cp, dp, ep = mesh
        start = self._start(mesh, batch)
        if not all(unit.allowed for unit in start.units):
            return
        self.opened += 1
        gpus, degrees = self._gpus(mesh, pp), (*mesh, pp)

        def worth(step_s: float) -> float:
            return self.ranking.score(throughput(start.state.tokens, pp, step_s, gpus), gpus)

        layers = self._layers(mesh, batch)
        if len(start.units) == 1:
            each_s = [self._steps_s(start, pp, layers, ending.stacks, apart=True) for ending in start.endings]
            steps_s = functools.reduce(np.minimum, each_s)
            layers = start.units[0].crossed(
                layers.of(
                    self._promising(steps_s, lambda step_s: self.ranking.worth_a_look(worth(step_s), degrees, gpus))
                )
            )
        for ending in start.endings:
            steps_s = self._steps_s(start, pp, layers, ending.stacks)
            while np.isfinite(steps_s).any():
                winner = int(steps_s.argmin())
                if (value := worth(float(steps_s[winner]))) <= self.ranking.least(degrees):
                    break
                dims = layers.dims(winner)
                best = Strategy(tp, ep, pp, batch, dims, cp, None if (cp, dp) == (1, ep) else dp, ending.vocabulary)
                if not self._slower.guarded or evaluate(self.workload, best).feasible:
                    self.ranking.offer(value, self.space.plain(best))
                    break
                steps_s[winner] = np.inf  # its kernels are less sure than usual

    def _steps_s(
        self, start: _Start, pp: int, layers: Layers, stacks: Sequence[Stack], *, apart: bool = False
    ) -> Floats:
        """[n] mean seconds of a step, infinite where a limit is broken.

        Args:
            start: Of the mesh and batch.
            pp: Pipeline stages.
            layers: Combinations of choices, n of them.
            stacks: Of the start, embedding and LM head as they are to lie.
            apart: Whether the ways of the residual stream are not in them; then seconds are at least those.
        """
        state, workload = start.state.through(pp), self.workload
        stages_s = [pp * slowest_stage_s(stack, pp, layers, kind, met=not apart) for kind, stack in enumerate(stacks)]
        steps = state.steps(stages_s[0], stages_s[-1])
        allowed = fits(stacks[-1], pp, layers.figures)
        longest = (1 + ROUNDING) / (SLACK if apart else 1.0)
        if state.decode is not None:
            allowed &= steps.tpot_s <= self._slower.tpot_limit_s * longest
            if self._slower.guarded and not apart:
                surely_s = steps.tpot_s * self._slower.tokens_about(steps.prompt_share + 0.0 * steps.tpot_s)
                allowed &= surely_s <= workload.tpot_limit_s * longest * (1 + ABOUT)
        if state.mixed is not None:
            allowed &= steps.ttft_s <= self._slower.ttft_limit_s * longest
        return np.where(allowed, steps.step_s, np.inf)

    @staticmethod
    def _promising(at_least_s: Floats, worth_a_look: Callable[[float], bool]) -> Ints:
        """Combinations that may be better than the best so far, from what a step of each takes at least."""
        order = np.argsort(at_least_s, kind="stable")[: np.isfinite(at_least_s).sum()]
        count = bisect_left(order, True, key=lambda at: not worth_a_look(float(at_least_s[at])))
        return np.sort(order[:count])

    def _layers(self, mesh: Mesh, batch: int) -> Layers:
        """Combinations for a mesh and batch; pipelines of several depths that are looked into one by one share them.

        Of one unit the residual stream's way between the sides is not in them.
        """
        if self._latest is None or self._latest[0] != (mesh, batch):
            units = self._start(mesh, batch).units
            self._latest = (mesh, batch), layers_apart(units[0]) if len(units) == 1 else all_layers(units)
        return self._latest[1]

    def whole_layers(self, mesh: Mesh, batch: int) -> tuple[Layers | None, list[Stack], Batching]:
        """See `layers_on`."""
        start = self._start(mesh, batch)
        allowed = all(unit.allowed for unit in start.units)
        return all_layers(start.units) if allowed else None, start.stacks, start.state

    # --- meshes ----------------------------------------------------------------------------------

    def _start(self, mesh: Mesh, batch: int, *, or_more: bool = False) -> _Start:
        key, known = (mesh, batch, or_more), self._worked.starts
        found = known.get(key)
        if found is None:
            state = batching(self.workload, batch, mesh[2])
            units = self._units_on(mesh, tuple(load._replace(or_more=or_more) for load in state.loads))
            possible = all(unit.possible for unit in units)
            floors = _floors(units) if possible else ((), (), ())
            stacks = _stacks(units)
            endings = unbeaten_vocabulary_choices(stacks, self._vocabulary, self._combines)
            found = known[key] = _Start(units, state.at_least if or_more else state, stacks, *floors, possible, endings)
        return found

    def _units_on(self, mesh: Mesh, loads: tuple[Load, ...]) -> tuple[Unit, ...]:
        _, cp, dp, ep = mesh
        units: list[Unit] = []
        for groups, attention_dims, expert_dims in self._units:
            attention, experts = self._pair(mesh, loads, groups, attention_dims, expert_dims)
            one_mesh = (cp, dp) == (1, ep)
            both = tuple(
                tuple(
                    sides(right, right) if one_mesh or not self._on_experts_mesh(group) else sides(left, right)
                    for group, left, right in zip(groups, lefts, rights, strict=True)
                )
                for lefts, rights in zip(attention.ranks, experts.ranks, strict=True)
            )
            units.append(Unit(groups, attention, experts, both))
        return tuple(units)

    def _on_experts_mesh(self, group: int) -> bool:
        """Whether the feed-forward of a group lies on the experts' mesh, as in `group_sides`."""
        model = self.workload.model
        return model.groups[group].is_moe or not model.is_moe

    def _pair(
        self, mesh: Mesh, loads: tuple[Load, ...], groups: tuple[int, ...], attention_dims: Dims, expert_dims: Dims
    ) -> tuple[LayerSide, LayerSide]:
        tp, cp, dp, ep = mesh
        alone = tuple(_one_group(load) for load in loads)  # attention's side knows nothing of other groups
        if cp == 1 and self.workload.overlap_parts == 1:  # moves nothing over a mesh of its own, and hides nothing
            alone = tuple(load._replace(or_more=False) for load in alone)
        one_mesh, moe_tp = (cp, dp) == (1, ep), tp * cp * dp // ep
        beside = () if one_mesh or all(map(self._on_experts_mesh, groups)) else (tp, cp)

        def attention_side() -> Ranks:
            return tuple(tuple(attention_rank(self.workload, load, tp, cp, 1, g) for g in groups) for load in alone)

        def experts_side() -> Ranks:
            return tuple(tuple(self._experts_rank(mesh, load, g) for g in groups) for load in loads)

        return (
            self._side(("attention", groups, tp, cp, alone), attention_side, attention_dims),
            self._side(("experts", groups, moe_tp, ep, loads, *beside), experts_side, expert_dims),
        )

    def _experts_rank(self, mesh: Mesh, load: Load, group: int) -> Rank:
        tp, cp, dp, ep = mesh
        if (cp, dp) == (1, ep) or self._on_experts_mesh(group):
            return experts_rank(self.workload, load, tp * cp * dp // ep, ep, dp, group)
        return attention_rank(self.workload, load, tp, cp, dp, group)

    def _side(self, key: tuple[object, ...], ranks: Callable[[], Ranks], dims: Dims) -> LayerSide:
        known = self._worked.sides
        if key not in known:
            known[key] = LayerSide(ranks(), dims)
        return known[key]


def units_of(space: Space) -> tuple[tuple[tuple[int, ...], Dims, Dims], ...]:
    """Groups of layers that share their choices; choices per op of attention's side, and of the experts'."""
    found: dict[tuple[int, ...], tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {}
    for dim in dims_of(space.workload):
        groups = dim.groups if space.workload.groups == "own" else tuple(range(len(space.workload.model.groups)))
        attention, experts = found.setdefault(groups, ({}, {}))
        (attention if dim.op.side == "attention" else experts)[dim.op.name] = space.choices[dim.name]
    return tuple((groups, *tables) for groups, tables in found.items())


def _stacks(units: tuple[Unit, ...]) -> list[Stack]:
    """Both sides of a GPU per group, per kind of step."""
    return [tuple(sides for unit in units for sides in unit.both[kind]) for kind in range(len(units[0].both))]


def _floors(units: tuple[Unit, ...]) -> tuple[SecondsTable, tuple[float, ...], tuple[float, ...]]:
    """Least seconds of a layer, weight bytes and KV bytes, each for itself and without moves."""
    steps_s: list[tuple[float, ...]] = [()] * len(units[0].both)
    weights: tuple[float, ...] = ()
    kv: tuple[float, ...] = ()
    for unit in units:
        floors = unit.attention.floor, unit.experts.floor
        own = [tuple(map(sum, zip(*rows, strict=True))) for rows in zip(floors[0][0], floors[1][0], strict=True)]
        steps_s = [before + more for before, more in zip(steps_s, own, strict=True)]
        weights += tuple(left + right for left, right in zip(floors[0][1], floors[1][1], strict=True))
        kv += tuple(left + right for left, right in zip(floors[0][2], floors[1][2], strict=True))
    return tuple(steps_s), weights, kv


def _one_group(load: Load) -> Load:
    own = load.of_group(load.attention_groups)
    return load._replace(sequences=own.sequences, prompts=own.prompts, busiest_prompts=own.prompts, attention_groups=1)
