"""`evaluate_many`: the figures of many strategies at once, to the last bit those of `sim.simulate.evaluate`.

The addends of a step (`sim.step.layer`) are tabulated per mesh and batch as strategies first need them. The rest is
picking them for all strategies together, and the very sums of `sim.step`, over arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Flags, Floats, Ints
from sim.canonical import dims_matter
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation, Violation
from sim.layers.dims import dims_of
from sim.layers.ops import FusedOp
from sim.prices.engine import EngineTimes
from sim.serving.phases import Batching, Pace, batching, most_sequences, phase_of
from sim.simulate import ROUNDING, degree_limits, evaluate
from sim.step.attention_expert_meshes import Sides, Stack, sides_of
from sim.step.costs import op_cost, token_rows
from sim.step.layer import add_up
from sim.step.pipeline import Stage, pipeline, side_by_side
from sim.step.stage import (
    Base,
    VocabularySeconds,
    base_of,
    meeting_s,
    room,
    stage_bytes,
    stage_s,
    step_sum,
    vocabulary_seconds,
)
from sim.strategy import FIRST_DECLARED, MOST_CHOICES, Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

FEW = 5
"""Strategies below which one by one is faster: numpy's calls alone take as long as four warm evaluations."""
_BLOCK = 2048
"""Most strategies that are added up together; arrays of twice as many leave the processor's cache, and take thrice as
long for each."""
_TABLE_BYTES = 1 << 28
"""Most bytes of a workload's tables, which grow as they are asked for; beyond, meshes and batches that were asked for
longest ago make room. [assumed] 10,000 of a model with two groups of layers, as many as its whole space has."""
_MOST_PIPELINES = 1 << 15
"""The same of pipelines, in rows of some 300 bytes. [assumed]"""


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
        StrategyError: One means nothing; see `sim.strategy_checks.check_strategy`.
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
    own_ends = strategies is not columns and any(each.vocabulary for each in strategies)
    if len(columns) < FEW or own_ends:
        one_by_one = zip(*(_figures(evaluate(workload, each)) for each in strategies), strict=True)
        return Evaluations(workload, strategies, *map(np.array, one_by_one))
    blocks = [terms.figures(columns[start : start + terms.block]) for start in range(0, len(columns), terms.block)]
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
        seconds: Of the first and of the last kind of step through all stages, `[2, n]`.
        states: Numbers of the batchings, `[.., n]`; see `_state_of`.
        most: Requests that a scheduler lets run at once.
        total_bytes, kv_bytes: Held in the last kind of step.
        needed_bytes, allowed_bytes: By the memory policy.
        choice_excess: What the choices' limits are missed by, `[n]` per kind of limit and side of the layer.
        pipelines: Rows of the tables by mesh, batch and pipeline degree.
    """

    seconds: Floats
    states: Floats
    most: Floats
    total_bytes: Floats
    kv_bytes: Floats
    needed_bytes: Floats
    allowed_bytes: float
    choice_excess: Sequence[Floats]
    pipelines: Ints


_PACE, _TIMES = (tuple(each.name for each in fields(of)) for of in (Pace, EngineTimes))
_STATE = len(_PACE) + len(_TIMES) + 2
"""Numbers of a batching."""


def _numbers_of(state: Batching) -> tuple[float, ...]:
    """What `_state_of` takes."""
    pace, times = ([getattr(of, name) for name in names] for of, names in ((state.pace, _PACE), (state.times, _TIMES)))
    return (*pace, *times, state.in_flight, state.tokens)


def _state_of(numbers: Floats, like: Batching) -> Batching:
    """Many batchings as one with arrays, from the numbers of each, `[.., n]`, and any of them for the kinds of step."""
    each: Iterator[Any] = iter(numbers)
    pace, times = Pace(*itertools.islice(each, len(_PACE))), EngineTimes(*itertools.islice(each, len(_TIMES)))
    return Batching(like.decode, like.mixed, pace, times, *each)


# --- tables -------------------------------------------------------------------------------------------


class _Index:
    """Rows of tables, each for a key; where there is no room for more, those asked for longest ago are given away.

    Attributes:
        most: Rows that there may be.
        keys: Of each row.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.keys: list[Any] = []
        self._row: dict[Any, int] = {}
        self._asked, self._clock = np.zeros(most, np.int64), 0

    def rows(self, keys: Sequence[Any], begin: Callable[[int], None]) -> Ints:
        """The row `[n]` of each key, of which at most `most` may differ; `begin` is called of each row given anew."""
        self._clock += 1
        found = [self._row.get(key, -1) for key in keys]
        if -1 in found:
            self._asked[[row for row in found if row >= 0]] = self._clock
            new = dict.fromkeys([key for key, row in zip(keys, found, strict=True) if row < 0])
            for key, row in zip(new, self._free(len(new)), strict=True):
                self.keys[row] = key
                self._row[key] = row
                begin(row)
            found = [self._row[key] for key in keys]
        rows: Ints = np.array(found, np.int64)
        self._asked[rows] = self._clock
        return rows

    def _free(self, count: int) -> list[int]:
        known = len(self.keys)
        oldest: list[int] = np.argsort(self._asked[:known], kind="stable")[: max(0, known + count - self.most)].tolist()
        for row in oldest:
            del self._row[self.keys[row]]
        self.keys += [None] * (count - len(oldest))
        return [*oldest, *range(known, len(self.keys))]


_Price = Callable[[int, int, tuple[int, ...]], Iterable[Sequence[float]]]
"""From a row, an addend and choices to its figures in each kind of step."""
_Mesh = tuple[int, ...]
"""tp, cp, dp, ep, batch; and pp of a pipeline."""


class _Table:
    """What some addends come to: float64 `[rows, entries, kinds, width]`, worked out as it is asked for.

    Entries are the combinations of the choices that an addend depends on, those of all addends one after the other.

    Args:
        places: Of each addend, where its choices stand in `Strategy.dims`.
        choices: Of each dim.
        kinds: Of steps.
        width: Most figures of an addend.
        price: Figures of an addend under such choices in each kind of step, `width` at most, from row and addend.
    """

    def __init__(
        self,
        places: Sequence[Sequence[int]],
        choices: Sequence[Sequence[int]],
        kinds: int,
        width: int,
        price: _Price,
    ) -> None:
        self._price = price
        self._entries = [
            (addend, chosen)
            for addend, each in enumerate(places)
            for chosen in itertools.product(*(choices[at] for at in each))
        ]
        self._scale = np.zeros((len(choices), len(places)))  # floats, whose products are faster, and exact
        sizes = [[len(choices[at]) for at in each] for each in places]
        for addend, (each, size) in enumerate(zip(places, sizes, strict=True)):
            for end, at in enumerate(each):
                self._scale[at, addend] += math.prod(size[end + 1 :])  # an op may be at both ends of a tensor
        self._start = np.cumsum([0, *map(math.prod, sizes)])[:-1]
        self._shape = (len(self._entries), kinds, width)
        self._array: Floats = np.zeros((0, *self._shape))

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return 8 * math.prod(self._shape)

    def begin(self, row: int) -> None:
        """Knows nothing of a row, the next one or one before."""
        if row >= len(self._array):
            more = np.empty((max(16, row // 2), *self._shape))
            self._array = np.concatenate([self._array, more])
        self._array[row] = np.nan

    def figures(self, rows: Ints, places: Floats) -> Floats:
        """`[addends, kinds, width, n]`, given rows `[n]` and the places of choices in their lists `[n, dims]`."""
        entries, kinds, width = self._shape
        if not entries:
            return np.zeros((0, kinds, width, len(rows)))
        flat = self._array.reshape(-1, kinds * width)
        wanted = (places @ self._scale).astype(np.int64) + (self._start + entries * rows[:, None])
        unknown = np.isnan(flat[wanted, 0])
        if unknown.any():
            new = np.unique(wanted[unknown])
            flat[new] = [self._worked_out(*divmod(at, entries)) for at in new.tolist()]
        found = flat.take(wanted.T, axis=0).reshape(*wanted.T.shape, kinds, width)
        return np.ascontiguousarray(found.transpose(0, 2, 3, 1))

    def _worked_out(self, row: int, entry: int) -> list[float]:
        width, found = self._shape[2], list[float]()
        for figures in self._price(row, *self._entries[entry]):
            found += figures
            found += [0.0] * (width - len(figures))
        return found


_, _, _WEIGHT, _KV, _ACTIVATION, _ROWS, _HEADS, _UNSUPPORTED = range(8)
"""Figures of an op: the numbers of an `OpCost`; rows that its group cannot share out, infinite where it can; by how
much its choice misses other limits."""


def _with_limits(sides: Sides, op: FusedOp, choice: int) -> tuple[float, ...]:
    """Those of an op under a choice."""
    rank, rows, heads, unsupported = sides.rank_by_op[op.name], math.inf, 0.0, 0.0
    cost = op_cost(rank, op, choice)
    if cost.broken == "tokens":
        rows = token_rows(rank, op, choice)
    elif cost.broken == "heads":
        heads = Violation("heads", rank.tp, rank.attention.heads, "").excess
    elif cost.broken == "unsupported":
        unsupported = Violation("unsupported", rank.tp, 1, "").excess
    return (*cost[:5], rows, heads, unsupported)


_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break."""


@lru_cache(maxsize=2)
def _terms(workload: Workload, choices: tuple[tuple[int, ...], ...]) -> _Terms:
    """What is known of a workload, as long as its dims have these choices."""
    return _Terms(workload, choices)


class _Terms:
    """Addends of a workload's steps in tables: by mesh and batch, and those of pipelines by pipeline degree, too.

    Attributes:
        block: Strategies that are added up together at most.
    """

    def __init__(self, workload: Workload, choices: tuple[tuple[int, ...], ...]) -> None:
        self._workload, self._choices, self._sum = workload, choices, step_sum(workload)
        self._place, self._dims = np.full((len(choices), MOST_CHOICES), -1.0), np.arange(len(choices))
        for dim, known in enumerate(choices):
            self._place[dim, list(known)] = range(len(known))
        self._like, self._costs, self._moves = batching(workload, 1, 1), list[_Table](), list[_Table]()
        self._kinds = len(self._like.loads)
        for index, group in enumerate(self._sum.groups):
            ops, readers = len(group.layer.costs), max(map(len, group.layer.waiting))
            self._costs.append(self._table(group.places[:ops], _UNSUPPORTED + 1, partial(self._cost, index)))
            self._moves.append(self._table(group.places[ops:], readers, partial(self._move, index)))
        self._meetings = self._table(tuple(self._sum.meetings.values()), 1, self._meeting)
        self._ends = self._table([[self._sum.leaves]], 3, self._end)
        self._of_mesh = (*self._costs, *self._moves, self._meetings)
        self._meshes = _Index(max(64, _TABLE_BYTES // sum(each.row_bytes for each in self._of_mesh)))
        self._pipelines = _Index(_MOST_PIPELINES)
        self.block = min(_BLOCK, self._meshes.most)
        self._about = np.zeros((self._meshes.most, _STATE + 1 + len(Base._fields)))
        self._sides = np.zeros((self._meshes.most, len(self._costs), 3))
        self._of_degrees = np.zeros((self._pipelines.most, _DEGREE_LIMITS))
        self._rules = engine_rules_of(workload)
        self._plans = self._rules.plans_of(workload) if self._rules else ()
        self._of_plans = np.zeros((self._pipelines.most, len(self._plans) + 2))
        self._depths: dict[int, int] = {}
        self._stages: list[Stage] = []  # arrays over those depths
        self._latest: tuple[_Mesh, list[Stack]] = (), []

    def _table(self, places: Sequence[Sequence[int]], width: int, price: _Price) -> _Table:
        return _Table(places, self._choices, self._kinds, width, price)

    # --- addends ---------------------------------------------------------------------------------

    def _stacks(self, key: _Mesh) -> list[Stack]:
        """Both sides of a GPU per group of layers, per kind of step."""
        tp, cp, dp, ep, batch = mesh = key[:5]
        if self._latest[0] != mesh:
            loads = batching(self._workload, batch, dp).loads
            self._latest = mesh, [sides_of(self._workload, load, tp, cp, dp, ep) for load in loads]
        return self._latest[1]

    def _cost(self, group: int, row: int, op: int, choices: tuple[int, ...]) -> Iterator[Sequence[float]]:
        layer = self._sum.groups[group].layer
        for stack in self._stacks(self._meshes.keys[row]):
            yield _with_limits(stack[group], layer.layer.ops[op], choices[0])

    def _move(self, group: int, row: int, tensor: int, choices: tuple[int, ...]) -> Iterator[Sequence[float]]:
        addend = self._sum.groups[group].layer.moves[tensor]
        for stack in self._stacks(self._meshes.keys[row]):
            yield addend.price(stack[group], choices)

    def _meeting(self, row: int, pair: int, choices: tuple[int, ...]) -> Iterator[Sequence[float]]:
        groups = list(self._sum.meetings)[pair]
        for stack in self._stacks(self._meshes.keys[row]):
            yield (meeting_s(stack, groups, choices),)

    def _end(self, row: int, _: int, choices: tuple[int, ...]) -> Iterator[Sequence[float]]:
        key = self._pipelines.keys[row]
        for stack in self._stacks(key):
            yield vocabulary_seconds(stack[self._sum.end], key[5], *choices)[:3]

    def _begin_mesh(self, row: int) -> None:
        key = self._meshes.keys[row]
        for table in self._of_mesh:
            table.begin(row)
        dp, batch = key[2], key[4]
        state, stacks = batching(self._workload, batch, dp), self._stacks(key)
        self._about[row] = (*_numbers_of(state), most_sequences(self._workload, dp), *base_of(stacks[-1]))
        self._sides[row] = [(len(each.ranks) == 1, each.attention.tp, each.experts.tp) for each in stacks[0]]

    def _begin_pipeline(self, row: int) -> None:
        self._ends.begin(row)
        tp, cp, dp, ep, batch, pp = self._pipelines.keys[row]
        strategy = Strategy(tp, ep, pp, batch, (), cp, dp)
        excess = [each.excess for each in degree_limits(self._workload, strategy)]
        self._of_degrees[row] = (*excess, *[0.0] * (_DEGREE_LIMITS - len(excess)))
        if self._rules:
            refusals = [rules.refuses(self._workload, strategy) for rules in (self._rules, *self._plans)]
            self._of_plans[row] = (dims_matter(strategy), *(len(list(texts)) for texts in refusals))

    def check(self, columns: Strategies) -> None:
        """Refuses what is no strategy. Raises: StrategyError."""
        dims, degrees = columns.dims, (columns.tp, columns.ep, columns.pp, columns.batch, columns.cp, columns.dp)
        right = dims.shape[1:] == (len(self._choices),) and min(int(each.min()) for each in degrees) >= 1
        if right:
            right = bool((dims >= 0).all() and (dims < MOST_CHOICES).all() and (self._places(dims) >= 0).all())
        if not right:
            for strategy in columns:
                check_strategy(self._workload, strategy)

    def _places(self, dims: Ints) -> Floats:
        return self._place[self._dims, dims]

    # --- sums ------------------------------------------------------------------------------------

    def figures(self, columns: Strategies) -> tuple[NDArray[Any], ...]:
        """The figures of `Evaluations`, in its order, of `block` strategies at most."""
        workload, places = self._workload, self._places(columns.dims)
        steps = self._steps(columns, columns.batch, places)
        over, waits = steps.needed_bytes > steps.allowed_bytes, columns.batch > steps.most
        excess = [
            *self._of_degrees[steps.pipelines].T,
            *self._engine_excess(columns.dims, steps.pipelines),
            *steps.choice_excess,
            _excess(steps.needed_bytes, steps.allowed_bytes, over),
            _excess(columns.batch, steps.most, waits),
        ]
        run = steps
        if phase_of(workload).mixes and (over | waits).any():
            run = self._rerun(columns, steps, places)
        state, seconds = _state_of(run.states, self._like).through(columns.pp), tuple(run.seconds)
        tpot_s, ttft_s = (np.zeros(len(columns)) + of(*seconds) for of in (state.tpot_s, state.ttft_s))
        for latency_s, limit_s in ((tpot_s, workload.tpot_limit_s), (ttft_s, workload.ttft_limit_s)):
            excess.append(_excess(latency_s, limit_s, latency_s > limit_s * (1 + ROUNDING)))
        gpus = columns.tp * columns.dp * columns.cp * columns.pp
        rate, missed = state.tokens * columns.pp / (state.step_s(*seconds) * gpus), _total(excess)
        running = np.asarray(state.in_flight).astype(np.int64)
        return rate, tpot_s, ttft_s, steps.total_bytes, running, missed == 0.0, missed

    def _steps(self, columns: Strategies, batch: Ints, places: Floats) -> _Steps:
        workload, pp = self._workload, columns.pp
        keys = list(
            zip(*(each.tolist() for each in (columns.tp, columns.cp, columns.dp, columns.ep, batch, pp)), strict=True)
        )
        rows = self._meshes.rows([key[:5] for key in keys], self._begin_mesh)
        pipelines = self._pipelines.rows(keys, self._begin_pipeline)
        about = self._about[rows].T
        states, most, base = about[:_STATE], about[_STATE], Base(*about[_STATE + 1 :])
        costs = [table.figures(rows, places) for table in self._costs]
        moves = [table.figures(rows, places) for table in self._moves]
        met, ends = self._meetings.figures(rows, places), self._ends.figures(pipelines, places)[0]
        stages, seconds = self._stages_of(pp), list[Floats]()
        for kind in range(self._kinds):
            layers_s = [
                group.layer.time_s(list(cost[:, kind]), list(move[:, kind]))
                for group, cost, move in zip(self._sum.groups, costs, moves, strict=True)
            ]
            meetings_s = dict(zip(self._sum.meetings, met[:, kind, 0], strict=True))
            end = VocabularySeconds(*ends[kind])
            seconds.append(pp * np.max([stage_s(stage, layers_s, meetings_s, end) for stage in stages], axis=0))
        held = [cost[:, -1] for cost in costs]
        weights, kv = ([add_up(list(each[:, figure])) for each in held] for figure in (_WEIGHT, _KV))
        peak = np.max([each[:, _ACTIVATION].max(axis=0) for each in held], axis=0)
        held_in = [np.broadcast_arrays(*stage_bytes(workload, stage, pp, weights, kv, peak, base)) for stage in stages]
        totals, kv_in = [_total_bytes(*each) for each in held_in], [each[1] for each in held_in]
        needed = [room(workload, total, of_kv)[0] for total, of_kv in zip(totals, kv_in, strict=True)]
        fullest, allowed = np.argmax(needed, axis=0), room(workload, 0.0, 0.0)[1]
        total, kv_bytes, needed = (_chosen(fullest, each) for each in (totals, kv_in, needed))
        missed = [each for group, cost in enumerate(costs) for each in self._choice_excess(group, cost[:, 0], rows)]
        first_and_last = np.stack([seconds[0], seconds[-1]])
        return _Steps(first_and_last, states, most, total, kv_bytes, needed, allowed, missed, pipelines)

    def _rerun(self, columns: Strategies, steps: _Steps, places: Floats) -> _Steps:
        """What runs: where not all requests have room, fewer do."""
        running = _running(self._workload, columns.batch, steps)
        fewer = np.flatnonzero(running < columns.batch)
        if not fewer.size:
            return steps
        again = self._steps(columns[fewer], running[fewer], places[fewer])
        seconds, states = steps.seconds.copy(), steps.states.copy()
        seconds[:, fewer], states[:, fewer] = again.seconds, again.states
        return steps._replace(seconds=seconds, states=states)

    def _engine_excess(self, dims: Ints, pipelines: Ints) -> list[Floats]:
        """What an engine's rules are missed by `[n]`, 1 for each: see `EngineRules.refusals`."""
        if not self._rules:
            return []
        matter, of_engine, *of_plans = self._of_plans[pipelines].T
        alike = (matter == 0) & (dims.max(axis=1) < FIRST_DECLARED)
        missed = np.ones(len(dims))  # no plan has these dims
        for plan, refused in reversed(list(zip(self._plans, of_plans, strict=True))):
            fits = (dims == plan.dims).all(axis=1) | (alike & (max(plan.dims) < FIRST_DECLARED))
            missed = np.where(fits, np.where(missed == 0, 0.0, refused), missed)
        return [of_engine + missed]

    def _choice_excess(self, group: int, costs: Floats, rows: Ints) -> list[Floats]:
        """What the limits on a group's choices are missed by, `[n]` each, from costs `[ops, figures, n]`."""
        one_mesh, attention_tp, experts_tp = self._sides[rows, group].T  # both sides may be one
        on_attention = np.array([op.side == "attention" for op in self._sum.groups[group].layer.layer.ops])
        attention, experts = costs[on_attention], costs[~on_attention]
        found: list[Floats] = []
        for limit in (_HEADS, _UNSUPPORTED):
            left, right = (side[:, limit].max(axis=0, initial=0.0) for side in (attention, experts))
            found += [np.where(one_mesh, np.maximum(left, right), left), np.where(one_mesh, 0.0, right)]
        left, right = (side[:, _ROWS].min(axis=0, initial=math.inf) for side in (attention, experts))
        left = np.minimum(left, np.where(one_mesh, right, math.inf))
        found.append(_excess(attention_tp, left, left < math.inf))
        found.append(_excess(experts_tp, right, (right < math.inf) & (one_mesh == 0)))
        return found

    def _stages_of(self, pp: Ints) -> list[Stage]:
        """Stages of pipelines of so many `[n]`; the last is repeated where one has fewer kinds than another."""
        depths = pp.tolist()
        if new := set(depths) - self._depths.keys():
            self._depths |= {depth: len(self._depths) + at for at, depth in enumerate(sorted(new))}
            kinds = [pipeline(self._workload, depth) for depth in self._depths]
            longest = range(max(map(len, kinds)))
            self._stages = [side_by_side([each[min(at, len(each) - 1)] for each in kinds]) for at in longest]
        which: Ints = np.array([self._depths[depth] for depth in depths], np.int64)
        return [
            Stage(
                tuple([count[which] for count in each.layers]),
                tuple([(pair, often[which]) for pair, often in each.meetings]),
                *[flag[which] for flag in each[2:]],
            )
            for each in self._stages
        ]


def _chosen(which: Ints, among: Sequence[Floats]) -> Floats:
    """Of several figures `[n]` each that of `which`."""
    return np.stack(among)[which, np.arange(len(which))]


def _total_bytes(*kinds: Floats) -> Floats:
    """Bytes of all kinds together, rounded once as `Memory.total` is: whole numbers add up without that."""
    total: Floats = np.add.reduce(kinds)
    whole = np.logical_and.reduce([each == np.floor(each) for each in kinds]) & (total < 2.0**53)
    for at in np.flatnonzero(~whole).tolist():
        total[at] = math.fsum([float(each[at]) for each in kinds])
    return total


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
    (at,) = broken.nonzero()
    if at.size:
        needed, allowed = (each[at] if np.ndim(each) else np.full(at.shape, each) for each in (needed, allowed))
        known = (allowed > 0) & (allowed < needed) & (needed < math.inf)
        logs = map(math.log, (needed[known] / allowed[known]).tolist())  # numpy's differ in a last bit
        excess[at[known]] = list(logs)
    return excess
