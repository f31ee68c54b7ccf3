"""`evaluate_many`: the figures of many strategies at once, to the last bit those of `sim.simulate.evaluate`.

One strategy is a sum over terms that other strategies share: what an op costs under its choice, and what a tensor's
way from op to op costs under the choices at its ends. They are tabulated per mesh and batch as strategies first need
them, by the functions that `evaluate` asks; the rest is indexing and adding, for all strategies together and in the
order in which `evaluate` adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from sim.batched_layers import GroupTerms, LayerFigures, MeetingTerms, Stack, Table, filled, python_sum
from sim.evaluation import Evaluation
from sim.layers.dims import dims_of
from sim.serving.phases import Pace, batching, most_sequences
from sim.simulate import OWN_SPACES, ROUNDING, degree_limits, evaluate
from sim.step.drafting import draft_of
from sim.step.ends import head_activation_bytes, vocabulary_bytes
from sim.step.pipeline import meet, pipeline
from sim.step.stage import model_ends_s, room, stream_send_s, vocabularies
from sim.step.two_meshes import sides_of
from sim.strategy import MOST_CHOICES, Strategy
from sim.validate import check_strategy
from sim.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
FEW = 5
"""Strategies below which one by one is faster: numpy's calls alone take as long as four warm evaluations."""
_BLOCK = 4096
"""Most strategies that are added up together; their arrays then stay in the processor's cache. [assumed]"""
_MOST_ROWS = 8192
"""Meshes and batches whose tables are kept, some 10 kB each; when there are more, all are made anew. [assumed]"""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Strategies(Sequence[Strategy]):
    """Many strategies as columns: a `Strategy` is made when one is looked at.

    Attributes:
        tp, ep, pp, batch, cp, dp: Degrees and batches, int64 `[n]`; dp is attention's, whichever way it was given.
        dims: Choices, int64 `[n, ops]`.
    """

    tp: Ints
    ep: Ints
    pp: Ints
    batch: Ints
    cp: Ints
    dp: Ints
    dims: Ints

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Strategies:
        """The columns of some strategies, each with as many dims."""
        degrees = [(each.tp, each.ep, each.pp, each.batch, each.cp, each.attention_dp) for each in strategies]
        tp, ep, pp, batch, cp, dp = np.array(degrees, np.int64).T
        dims = np.array([each.dims for each in strategies], np.int64)
        return cls(tp, ep, pp, batch, cp, dp, dims)

    def __len__(self) -> int:
        return len(self.tp)

    @overload
    def __getitem__(self, index: int) -> Strategy: ...
    @overload
    def __getitem__(self, index: slice | Ints | Flags) -> Strategies: ...
    def __getitem__(self, index: Any) -> Strategy | Strategies:
        """One strategy, or the columns of several."""
        if not isinstance(index, int):
            return Strategies(*(getattr(self, each.name)[index] for each in fields(self)))
        tp, ep, pp, batch, cp, dp = (int(getattr(self, each.name)[index]) for each in fields(self)[:-1])
        return Strategy(tp, ep, pp, batch, tuple(self.dims[index].tolist()), cp, None if (cp, dp) == (1, ep) else dp)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Evaluations(Sequence[Evaluation]):
    """The figures of many strategies; the whole `Evaluation` of one is worked out when it is looked at.

    Attributes:
        workload: As given.
        strategies: As given, n of them.
        tokens_per_s_per_gpu, tpot_s, ttft_s: As `Evaluation` has them, float64 `[n]`.
        memory_bytes: Of all kinds, float64 `[n]`.
        running: Requests of one microbatch that run at once, int64 `[n]`.
        feasible: Whether no limit is broken, bool `[n]`.
        excess: By how much limits are missed, float64 `[n]`; see `Evaluation.excess`.
    """

    workload: Workload
    strategies: Sequence[Strategy]
    tokens_per_s_per_gpu: Floats
    tpot_s: Floats
    ttft_s: Floats
    memory_bytes: Floats
    running: Ints
    feasible: Flags
    excess: Floats

    def __len__(self) -> int:
        return len(self.strategies)

    @overload
    def __getitem__(self, index: int) -> Evaluation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Evaluation]: ...
    def __getitem__(self, index: int | slice) -> Evaluation | Sequence[Evaluation]:
        """What `evaluate` returns for a strategy, or for several."""
        if isinstance(index, slice):
            return [evaluate(self.workload, strategy) for strategy in self.strategies[index]]
        return evaluate(self.workload, self.strategies[index])


def evaluate_many(workload: Workload, strategies: Sequence[Strategy]) -> Evaluations:
    """Simulates many strategies together.

    Args:
        workload: As for `sim.simulate.evaluate`.
        strategies: At least one, feasible or not; a `Strategies` has them as columns already.

    Raises:
        StrategyError: One means nothing; see `sim.validate.check_strategy`.
        ValueError: There is none.

    >>> from sim.config.catalog import load_workload
    >>> from sim.layers.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> many = evaluate_many(workload, [Strategy(8, 16, 2, b, megatron_dims(workload.model)) for b in (256, 512, 4096)])
    >>> many.feasible.tolist(), int(many.tokens_per_s_per_gpu.argmax()), many[1].gpus
    ([True, True, False], 2, 256)
    """
    columns = strategies if isinstance(strategies, Strategies) else _columns(workload, strategies)
    terms = _terms(workload, tuple(dim.choices for dim in dims_of(workload)))
    terms.check(columns)
    if len(columns) < FEW:
        one_by_one = zip(*(_figures(evaluate(workload, each)) for each in strategies), strict=True)
        return Evaluations(workload, strategies, *map(np.array, one_by_one))
    blocks = [terms.figures(columns[start : start + _BLOCK]) for start in range(0, len(columns), _BLOCK)]
    return Evaluations(workload, strategies, *(np.concatenate(figures) for figures in zip(*blocks, strict=True)))


def _figures(evaluation: Evaluation) -> tuple[float, ...]:
    """Those of `Evaluations`, in its order."""
    latencies = (evaluation.tpot_s, evaluation.ttft_s)
    limits = (evaluation.feasible, evaluation.excess)
    return evaluation.tokens_per_s_per_gpu, *latencies, evaluation.memory_bytes.total, evaluation.running, *limits


def _columns(workload: Workload, strategies: Sequence[Strategy]) -> Strategies:
    if not strategies:
        raise ValueError("expected at least one strategy, got none")
    dims = len(dims_of(workload))
    for strategy in strategies:
        if len(strategy.dims) != dims:
            check_strategy(workload, strategy)
    return Strategies.of(strategies)


class _Steps(NamedTuple):
    """The steady states of some strategies at some batches, `[n]` each, whether or not their requests have room.

    Attributes:
        decode_s, mixed_s: Seconds of the first and of the last kind of step through all stages.
        pace, tokens: Of the batch.
        running: The batch.
        most: Requests that a scheduler lets run at once.
        total_bytes, kv_bytes: Held in the last kind of step.
        needed_bytes, allowed_bytes: By the memory policy.
        choice_excess: What the choices' limits are missed by, `[n]` per kind of limit and side of the layer.
    """

    decode_s: Floats
    mixed_s: Floats
    pace: Pace
    tokens: Floats
    running: Ints
    most: Floats
    total_bytes: Floats
    kv_bytes: Floats
    needed_bytes: Floats
    allowed_bytes: float
    choice_excess: Sequence[Floats]


_PACE = tuple(each.name for each in fields(Pace))
_OF_ROW = (*_PACE, "tokens", "most", "stream", "head", "vocabulary", "draft_weight", "draft_kv")
_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break, but for an engine's rules."""


@lru_cache(maxsize=8)
def _terms(workload: Workload, choices: tuple[tuple[int, ...], ...]) -> _Terms:
    """What is known of a workload, as long as its dims have these choices."""
    return _Terms(workload, choices)


class _Terms:
    """Terms that strategies add up. A row stands for a mesh and a batch, a stage for a row and a pipeline degree."""

    def __init__(self, workload: Workload, choices: tuple[tuple[int, ...], ...]) -> None:
        self._workload, self._choices = workload, choices
        model, dims = workload.model, dims_of(workload)
        self._place = np.full((len(dims), MOST_CHOICES), -1, np.int64)
        for dim, known in enumerate(choices):
            self._place[dim, list(known)] = range(len(known))
        self._kinds = len(batching(workload, 1, 1).loads)
        self._groups = [GroupTerms(index, group, dims, self._kinds) for index, group in enumerate(model.groups)]
        pairs = sorted({pair for pair in pairwise(model.order) if pair[0] != pair[1]}) if meet(workload) else []
        self._meetings = {(*pair,): MeetingTerms(*pair, model.groups, dims, self._kinds) for pair in pairs}
        self._of_depth: dict[int, int] = {}  # places of depths in the next two
        self._kinds_in: list[int] = []
        self._pipelines: Floats = np.zeros((0, 1, len(self._groups) + len(self._meetings) + 3))
        self._end, self._last_dim = model.order[-1], self._groups[model.order[-1]].last
        self._forget()

    def _forget(self) -> None:
        """Starts with empty tables."""
        self._row: dict[tuple[int, ...], int] = {}
        self._stage: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[Stack, ...]] = []  # of each row, per kind of step
        self._row_and_pp: list[tuple[int, int]] = []  # of each stage
        for terms in (*self._groups, *self._meetings.values()):
            terms.forget()
        self._model_ends = Table(len(self._choices[self._last_dim]), self._kinds, 3)
        self._about = Table(len(_OF_ROW))
        self._meshes = Table(len(self._groups), 3)
        self._of_degrees = Table(_DEGREE_LIMITS)

    def check(self, columns: Strategies) -> None:
        """Refuses what is no strategy. Raises: StrategyError."""
        dims, degrees = columns.dims, (columns.tp, columns.ep, columns.pp, columns.batch, columns.cp, columns.dp)
        right = dims.shape[1:] == (len(self._choices),) and min(int(each.min()) for each in degrees) >= 1
        if right:
            right = bool((dims >= 0).all() and (dims < MOST_CHOICES).all() and (self._places(dims) >= 0).all())
        if not right:
            for strategy in columns:
                check_strategy(self._workload, strategy)

    def _places(self, dims: Ints) -> Ints:
        return self._place[np.arange(len(self._choices)), dims]

    # --- sums ------------------------------------------------------------------------------------

    def figures(self, columns: Strategies) -> tuple[NDArray[Any], ...]:
        """The figures of `Evaluations`, in its order."""
        if len(self._stacks) + 2 * len(columns) > _MOST_ROWS:
            self._forget()
        workload, places = self._workload, self._places(columns.dims)
        stage = self._stages(columns, columns.batch)
        steps = self._steps(columns, columns.batch, stage, places)
        over, waits = steps.needed_bytes > steps.allowed_bytes, columns.batch > steps.most
        excess = [
            *self._degree_excess(columns, stage),
            *steps.choice_excess,
            _excess(steps.needed_bytes, steps.allowed_bytes, over),
            _excess(columns.batch, steps.most, waits),
        ]
        run = steps
        if workload.phase == "serve" and (over | waits).any():
            run = self._rerun(columns, steps, places)
        times, zeros = batching(workload, 1, 1).times, np.zeros(len(columns))
        tpot_s = zeros if workload.phase == "prefill" else run.pace.tpot_s(times, run.decode_s, run.mixed_s)
        ttft_s = zeros if workload.phase == "decode" else run.pace.ttft_s(times, run.decode_s, run.mixed_s)
        for latency_s, limit_s in ((tpot_s, workload.tpot_limit_s), (ttft_s, workload.ttft_limit_s)):
            excess.append(_excess(latency_s, limit_s, latency_s > limit_s * (1 + ROUNDING)))
        step_s = run.pace.step_s(times, run.decode_s, run.mixed_s)
        gpus = columns.tp * columns.dp * columns.cp * columns.pp
        rate, missed = run.tokens * columns.pp / (step_s * gpus), _total(excess)
        return rate, tpot_s, ttft_s, steps.total_bytes, run.running, missed == 0.0, missed

    def _steps(self, columns: Strategies, batch: Ints, stage: Ints, places: Ints) -> _Steps:
        workload, row = self._workload, np.array([self._row_and_pp[at][0] for at in stage.tolist()], np.int64)
        about = dict(zip(_OF_ROW, self._about.array[row].T, strict=True))
        groups = [each.figures(self._stacks, row, places) for each in self._groups]
        meetings = [each.times_s(self._stacks, row, places) for each in self._meetings.values()]
        ends = filled(self._model_ends, stage, places[:, [self._last_dim]], self._model_end)[:, 0]
        stages = self._kinds_of_stages(columns.pp)
        seconds: list[Floats] = []
        for kind in range(self._kinds):
            layers_s = np.stack([each.times_s[kind] for each in groups], axis=1)
            first_s, last_s, send_recv_s = ends[:, kind].T
            stages_s: list[Floats] = []
            for each in stages:
                inside_s = python_sum(each.layers * layers_s)
                for often, meeting_s in zip(each.meetings.T, meetings, strict=True):
                    inside_s = inside_s + often * meeting_s[:, kind]
                at_ends_s = np.where(each.first, first_s, 0.0) + np.where(each.last, last_s, 0.0)
                stages_s.append(inside_s + at_ends_s + send_recv_s)
            seconds.append(columns.pp * np.max(stages_s, axis=0))
        peak = np.max([each.peak_bytes for each in groups], axis=0)
        activations = about["stream"] + np.maximum(peak, about["head"])
        overhead: Any = np.full(len(row), float(workload.hardware.overhead_bytes))
        if workload.engine is not None:
            overhead = np.maximum(0.0, workload.engine.memory.runtime_bytes - activations)
        weights, kv = (
            np.stack(each, axis=1) for each in zip(*((g.weight_bytes, g.kv_bytes) for g in groups), strict=True)
        )
        held = [
            (
                python_sum(each.layers * weights)
                + (each.vocabularies * about["vocabulary"] + np.where(each.last, about["draft_weight"], 0.0)),
                python_sum(each.layers * columns.pp[:, None] * kv)
                + columns.pp * np.where(each.last, about["draft_kv"], 0.0),
            )
            for each in stages
        ]
        totals = [_bytes_of(weights, kv, activations, overhead) for weights, kv in held]
        rooms = [room(workload, total, kv) for total, (_, kv) in zip(totals, held, strict=True)]
        fullest, allowed = np.argmax([needed for needed, _ in rooms], axis=0), rooms[0][1]
        total, kv_bytes, needed = (
            _chosen(fullest, each) for each in (totals, [kv for _, kv in held], [needed for needed, _ in rooms])
        )
        pace = Pace(*(about[name] for name in _PACE))
        figures = (pace, about["tokens"], batch, about["most"], total, kv_bytes, needed, allowed)
        missed = [each for at, group in enumerate(groups) for each in self._choice_excess(at, group, row)]
        return _Steps(seconds[0], seconds[-1], *figures, missed)

    def _rerun(self, columns: Strategies, steps: _Steps, places: Ints) -> _Steps:
        """What runs: where not all requests have room, fewer do."""
        running = _running(self._workload, columns.batch, steps)
        fewer = np.flatnonzero(running < columns.batch)
        if not fewer.size:
            return steps
        some, batch = columns[fewer], running[fewer]
        again = self._steps(some, batch, self._stages(some, batch), places[fewer])

        def replaced(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
            copy = before.copy()
            copy[fewer] = after
            return copy

        pace = Pace(*(replaced(getattr(steps.pace, name), getattr(again.pace, name)) for name in _PACE))
        changed = {
            name: replaced(getattr(steps, name), getattr(again, name)) for name in ("decode_s", "mixed_s", "tokens")
        }
        return steps._replace(pace=pace, running=running, **changed)

    def _choice_excess(self, group: int, figures: LayerFigures, row: Ints) -> list[Floats]:
        """What the limits on a group's choices are missed by, `[n]` each."""
        one_mesh, attention_tp, experts_tp = self._meshes.array[row, group].T  # both sides may be one
        attention, experts = figures.attention, figures.experts
        found: list[Floats] = []
        for left, right in ((attention.heads, experts.heads), (attention.unsupported, experts.unsupported)):
            found += [np.where(one_mesh, np.maximum(left, right), left), np.where(one_mesh, 0.0, right)]
        left = np.minimum(attention.rows, np.where(one_mesh, experts.rows, np.inf))
        found.append(_excess(attention_tp, left, left < np.inf))
        found.append(_excess(experts_tp, experts.rows, (experts.rows < np.inf) & (one_mesh == 0)))
        return found

    # --- terms -----------------------------------------------------------------------------------

    def _model_end(self, stage: int, entry: int) -> list[Sequence[float]]:
        row, pp = self._row_and_pp[stage]
        choice, ends = self._choices[self._last_dim][entry], [stack[self._end] for stack in self._stacks[row]]
        return [(*model_ends_s(each, choice), stream_send_s(each.experts, pp, choice)) for each in ends]

    def _kinds_of_stages(self, pp: Ints) -> list[_Stages]:
        """The kinds of stages of pipelines of so many `[n]`; the first stands in where one has fewer than another."""
        for depth in set(pp.tolist()) - self._of_depth.keys():
            self._add_depth(depth)
        places: Ints = np.array([self._of_depth[depth] for depth in pp.tolist()], np.int64)
        kinds = self._pipelines[places]  # [n, kinds of stages, figures]
        groups, pairs = len(self._groups), len(self._meetings)
        most = max(self._kinds_in[place] for place in set[int](places.tolist()))
        return [
            _Stages(each[:, :groups], each[:, groups : groups + pairs], each[:, -3] > 0, each[:, -2] > 0, each[:, -1])
            for each in kinds[:, :most].swapaxes(0, 1)
        ]

    def _add_depth(self, depth: int) -> None:
        stages = pipeline(self._workload, depth)
        rows = [
            (
                *stage.layers,
                *({pair[:2]: pair[2] for pair in stage.meetings}.get(pair, 0) for pair in self._meetings),
                *(stage.first, stage.last, vocabularies(self._workload, stage)),
            )
            for stage in stages
        ]
        depths, most, figures = self._pipelines.shape
        longer = np.zeros((depths + 1, max(most, len(stages)), figures))
        longer[:-1, :most], longer[:-1, most:] = self._pipelines, self._pipelines[:, :1]
        longer[-1] = [*rows, *rows[:1] * (longer.shape[1] - len(rows))]
        self._of_depth[depth], self._pipelines = depths, longer
        self._kinds_in.append(len(stages))

    def _stages(self, columns: Strategies, batch: Ints) -> Ints:
        """The stage `[n]` of each strategy's degrees at a batch; new ones are added."""
        degrees = (columns.tp, columns.cp, columns.dp, columns.ep, batch, columns.pp)
        keys = list(zip(*(column.tolist() for column in degrees), strict=True))
        for key in dict.fromkeys(keys):
            if key not in self._stage:
                self._stage[key] = self._add_stage(*key)
        return np.array([self._stage[key] for key in keys], np.int64)

    def _add_stage(self, tp: int, cp: int, dp: int, ep: int, batch: int, pp: int) -> int:
        stage, mesh = len(self._row_and_pp), (tp, cp, dp, ep, batch)
        if mesh not in self._row:
            self._row[mesh] = self._add_row(*mesh)
        self._row_and_pp.append((self._row[mesh], pp))
        for table in (self._model_ends, self._of_degrees):
            table.make_room(stage + 1)
        if self._workload.space in OWN_SPACES:
            excess = self._missed_by(Strategy(tp, ep, pp, batch, (), cp, dp))
            self._of_degrees.array[stage] = (*excess, *[0.0] * (_DEGREE_LIMITS - len(excess)))
        return stage

    def _degree_excess(self, columns: Strategies, stage: Ints) -> list[Floats]:
        """What the degrees' limits are missed by, `[n]` each; an engine's rules look at the choices, too."""
        if self._workload.space in OWN_SPACES:
            return list(self._of_degrees.array[stage].T)
        rows = [self._missed_by(strategy) for strategy in columns]
        return [np.array(column) for column in itertools.zip_longest(*rows, fillvalue=0.0)]

    def _missed_by(self, strategy: Strategy) -> list[float]:
        return [each.excess for each in degree_limits(self._workload, strategy)]

    def _add_row(self, tp: int, cp: int, dp: int, ep: int, batch: int) -> int:
        workload, row, state = self._workload, len(self._stacks), batching(self._workload, batch, dp)
        self._stacks.append(tuple(sides_of(workload, load, tp, cp, dp, ep) for load in state.loads))
        for terms in (self._about, self._meshes, *self._groups, *self._meetings.values()):
            terms.make_room(row + 1)
        self._meshes.array[row] = [(len(s.ranks) == 1, s.attention.tp, s.experts.tp) for s in self._stacks[row][0]]
        last = self._stacks[row][-1]
        end, stream_bytes = last[self._end], max(sides.stream_bytes() for sides in last)
        pace, draft = tuple(getattr(state.pace, name) for name in _PACE), draft_of(end)
        held = stream_bytes, head_activation_bytes(end.attention), vocabulary_bytes(end.attention)
        drafted = draft.weight_bytes, draft.kv_bytes
        self._about.array[row] = (*pace, state.tokens, most_sequences(workload, dp), *held, *drafted)
        return row


class _Stages(NamedTuple):
    """A pipeline stage of each of some strategies, `[n]`.

    Attributes:
        layers: Of each group, `[n, groups]`.
        meetings: How often two groups meet, `[n, pairs]`.
        first, last: Whether it has the embedding, and the LM head.
        vocabularies: How often it holds the vocabulary.
    """

    layers: Floats
    meetings: Floats
    first: Flags
    last: Flags
    vocabularies: Floats


def _chosen(which: Ints, among: Sequence[Floats]) -> Floats:
    """Of several figures `[n]` each that of `which`."""
    return np.stack(among)[which, np.arange(len(which))]


def _bytes_of(*kinds: Floats) -> Floats:
    """Bytes of all kinds together, as `Memory.total` adds them."""
    held = zip(*(kind.tolist() for kind in kinds), strict=True)
    return np.fromiter(map(math.fsum, held), np.float64, len(kinds[0]))


def _running(workload: Workload, batch: Ints, steps: _Steps) -> Ints:
    """Requests that run at once where not all fit: see `sim.simulate.steady_state`."""
    share = workload.engine.memory.share if workload.engine and workload.engine.memory.of == "free" else 1.0
    kv_needed, missing = steps.kv_bytes / share, steps.needed_bytes - steps.allowed_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        fit = np.where(kv_needed > missing, np.floor(batch * (1 - missing / kv_needed)), 1)
    fit = np.where(missing > 0, fit, batch)
    return np.maximum(1, np.minimum(fit, steps.most)).astype(np.int64)


def _total(excess: Sequence[Floats]) -> Floats:
    """What `math.fsum` makes of each place of some arrays `[n]`, most of whose values are 0."""
    rows = np.stack(excess, axis=1)
    total = rows.sum(axis=1)  # exact to rounding for one value or two
    for row in np.flatnonzero((rows > 0).sum(axis=1) > 2).tolist():
        total[row] = math.fsum(rows[row].tolist())
    return total


def _excess(needed: Any, allowed: Any, broken: Flags) -> Floats:
    """`Violation.excess` `[n]` where a limit is broken, else 0."""
    excess = broken.astype(np.float64)
    if excess.any():
        needed, allowed = np.broadcast_to(needed, broken.shape), np.broadcast_to(allowed, broken.shape)
        known = broken & (allowed > 0) & (allowed < needed) & (needed < np.inf)
        excess[known] = list(map(math.log, (needed[known] / allowed[known]).tolist()))  # numpy's differs in a last bit
    return excess
