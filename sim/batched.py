"""`evaluate_many`: the figures of many strategies at once, to the last bit those of `sim.simulate.evaluate`.

The addends of a step (`sim.step.layer`) are tabulated per mesh and batch as strategies first need them. The rest is
picking them for all strategies together, and the very sums of `sim.step`, over arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sim.ops.rank import OpCost, Rank
from sim.prices.engine import EngineTimes
from sim.prices.priced import Interval
from sim.serving.confidence import ROUNDING, at_confidence_s, slower, surely_kept
from sim.serving.phases import Batching, Pace, batching, most_sequences, phase_of
from sim.simulate import degree_limits, evaluate, latency_limits
from sim.step.attention_expert_meshes import Stack, sides_of
from sim.step.breakdown import draft_parts, trusted, unsure_s
from sim.step.costs import token_rows
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
_TABLE_BYTES = 3 << 27
"""Most bytes of a workload's tables, which grow as they are asked for; beyond, they begin anew. [assumed] 11,000 meshes
and batches of a model with two groups of layers whose steps carry prompts; its joint space on 64 GPUs has 9,300."""
_MOST_PIPELINES = 1 << 15
"""The same of pipelines, in rows of some 300 bytes. [assumed]"""


_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS computes a product on one thread; more take longer to hand out than to do."""


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
    """Rows of tables, each for a key; all are given anew once there is no room for more.

    Attributes:
        most: Rows that there may be.
        keys: Of each row.
    """

    def __init__(self, most: int) -> None:
        self.most, self.keys = most, list[Any]()
        self._row: dict[Any, int] = {}

    def rows(self, keys: Sequence[Any], begin: Callable[[int], None]) -> Ints:
        """The row `[n]` of each key, of which at most `most` may differ; `begin` is called of each row given anew."""
        new = [key for key in dict.fromkeys(keys) if key not in self._row]
        if len(self.keys) + len(new) > self.most:
            self.keys.clear()
            self._row.clear()
            new = list(dict.fromkeys(keys))
        for key in new:
            self._row[key] = row = len(self.keys)
            self.keys.append(key)
            begin(row)
        return np.array([self._row[key] for key in keys], np.int64)


_Mesh = tuple[int, ...]
"""tp, cp, dp, ep, batch; and pp of a pipeline."""
_Price = Callable[[Stack, _Mesh, int, tuple[int, ...]], Sequence[float]]
"""From a GPU in one kind of step, an addend and choices to its figures."""


class _Table:
    """What some addends come to: float64 `[rows, entries, kinds, width]`, worked out as it is asked for.

    Entries are the combinations of the choices that an addend depends on, those of all addends one after the other.

    Attributes:
        scale: How far apart entries are for each choice, `[addends, dims]`: with the places of choices in their lists
            they give an entry's place in its addend.
        start: Where the first entry of each addend stands in a row.

    Args:
        index: Of the rows.
        places: Of each addend, where its choices stand in `Strategy.dims`.
        choices: Of each dim.
        kinds: Of steps.
        width: Most figures of an addend.
        price: Figures of an addend under such choices, `width` at most.
    """

    def __init__(
        self,
        index: _Index,
        places: Sequence[Sequence[int]],
        choices: Sequence[Sequence[int]],
        kinds: int,
        width: int,
        price: _Price,
    ) -> None:
        self._index, self._price = index, price
        self._entries = [
            (addend, chosen)
            for addend, each in enumerate(places)
            for chosen in itertools.product(*(choices[at] for at in each))
        ]
        self.scale = np.zeros((len(places), len(choices)))  # floats, whose products are faster, and exact
        sizes = [[len(choices[at]) for at in each] for each in places]
        for addend, (each, size) in enumerate(zip(places, sizes, strict=True)):
            for end, at in enumerate(each):
                self.scale[addend, at] += math.prod(size[end + 1 :])  # an op may be at both ends of a tensor
        self.start = np.cumsum([0, *map(math.prod, sizes)])[:-1]
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
        self._array[row, :, 0, 0] = np.nan

    def key(self, at: int) -> _Mesh:
        """Of the row in which something stands."""
        return self._index.keys[at // len(self._entries)]

    def priced(self, stacks: Sequence[Stack], key: _Mesh, at: int) -> list[float]:
        """What is to stand somewhere."""
        addend, chosen = self._entries[at % len(self._entries)]
        found = list[float]()
        for stack in stacks:
            figures = self._price(stack, key, addend, chosen)
            found += figures
            found += [0.0] * (self._shape[2] - len(figures))
        return found

    def keep(self, figures: Mapping[int, list[float]]) -> None:
        """Writes down what stands where."""
        self._flat[list(figures)] = list(figures.values())

    def figures(self, wanted: Ints) -> Floats:
        """`[addends, width, kinds, n]` of what stands somewhere `[addends, n]`; nan where nobody asked before."""
        _, kinds, width = self._shape
        found = self._flat.take(wanted, axis=0).reshape(*wanted.shape, kinds, width)
        return np.ascontiguousarray(found.transpose(0, 3, 2, 1))

    @property
    def entries(self) -> int:
        """Of a row."""
        return len(self._entries)

    @property
    def _flat(self) -> Floats:
        return self._array.reshape(-1, self._shape[1] * self._shape[2])


class _Tables:
    """Tables with the same rows, whose entries are found together: each call of numpy takes longer than few sums.

    Attributes:
        tables: They.
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self.tables = tables
        addends = [len(table.start) for table in tables]
        ends = [0, *itertools.accumulate(addends)]
        self._parts = [slice(*each) for each in itertools.pairwise(ends)]
        self._scale = np.concatenate([table.scale for table in tables])
        self._start = np.concatenate([table.start for table in tables])[:, None]
        self._entries = np.repeat([table.entries for table in tables], addends)[:, None]

    def wanted(self, rows: Ints, places: Floats) -> list[tuple[_Table, Ints]]:
        """Where figures stand in each `[addends, n]`; rows `[n]`, places of choices in their lists `[dims, n]`."""
        most = max(1, _ONE_THREAD // self._scale.size)
        parts = [self._scale @ places[:, start : start + most] for start in range(0, places.shape[1], most)]
        wanted = np.concatenate(parts, axis=1).astype(np.int64) + (self._start + self._entries * rows)
        return [(table, wanted[part]) for table, part in zip(self.tables, self._parts, strict=True)]


_, _, _WEIGHT, _KV, _ACTIVATION, _BROKEN, _, _SUPPORT = range(8)
"""Figures of an op: the numbers of an `OpCost`; by how much its choice misses limits on heads, tokens and support."""


def _with_limits(rank: Rank, op: FusedOp, choice: int, cost: OpCost) -> tuple[float, ...]:
    """Those of an op under a choice."""
    heads, tokens, unsupported = 0.0, 0.0, 0.0
    if cost.broken == "heads":
        heads = Violation("heads", rank.tp, rank.attention.heads, "").excess
    elif cost.broken == "tokens":
        tokens = Violation("tokens", rank.tp, token_rows(rank, op, choice), "").excess
    elif cost.broken == "unsupported":
        unsupported = Violation("unsupported", rank.tp, 1, "").excess
    return (*cost[:5], heads, tokens, unsupported)


_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break."""


class _Known(NamedTuple):
    """What is known of some strategies at some batches, `[.., n]`, whether or not their requests have room.

    Attributes:
        pipelines: Rows of the tables by mesh, batch and pipeline degree.
        states: Numbers of the batchings; see `_state_of`.
        most: Requests that a scheduler lets run at once.
        base: Bytes whatever the choices.
        one_mesh: Whether both sides are one, per group of layers.
        stages: Of their pipelines, `[stages, n]`.
        costs, moves: Of ops and tensors `[addends, figures, kinds, n]`, per group.
        seconds: Of each kind of step through all stages, `[kinds, n]`.
    """

    pipelines: Ints
    states: Floats
    most: Floats
    base: Base
    one_mesh: Flags
    stages: Stage
    costs: Sequence[Floats]
    moves: Sequence[Floats]
    seconds: Floats


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
        self._like, self._guarded = batching(workload, 1, 1), slower(workload).guarded
        self._meshes, self._pipelines = _Index(0), _Index(_MOST_PIPELINES)
        self._costs, self._moves, self._unsure = list[_Table](), list[_Table](), list[_Table]()
        attention = list[Flags]()
        for index, (layer, _, places, _) in enumerate(self._sum.groups):
            ops, readers = len(layer.costs), max(map(len, layer.waiting))
            self._costs.append(self._table(self._meshes, places[:ops], _SUPPORT + 1, partial(self._cost, index)))
            self._moves.append(self._table(self._meshes, places[ops:], readers, partial(self._move, index)))
            if self._guarded:
                self._unsure.append(self._table(self._meshes, places, 1, partial(self._unsure_s, index)))
            attention.append(np.array([op.side == "attention" for op in layer.layer.ops]))
        self._on_attention = attention
        meetings = tuple(self._sum.meetings.values())
        self._meetings = self._table(self._meshes, meetings, 1, self._meeting)
        self._ends = self._table(self._pipelines, [[self._sum.leaves]], 3, self._end)
        self._drafts = self._table(self._meshes, [()], 2, self._draft)
        self._of_step = _Tables((*self._costs, *self._moves, self._meetings))
        self._of_pipelines = _Tables((self._ends,))
        self._of_guard = _Tables((*self._unsure, self._drafts))
        self._of_mesh = (*self._of_step.tables, *self._of_guard.tables)
        self._meshes.most = max(64, _TABLE_BYTES // sum(each.row_bytes for each in self._of_mesh))
        self.block = min(_BLOCK, self._meshes.most)
        groups = len(self._costs)
        self._about = np.zeros((self._meshes.most, _STATE + 1 + len(Base._fields) + groups))
        self._rules = engine_rules_of(workload)
        self._plans = self._rules.plans_of(workload) if self._rules else ()
        self._of_pipeline = np.zeros((self._pipelines.most, 1 + _DEGREE_LIMITS + 2 + len(self._plans)))
        self._depths: dict[int, int] = {}
        self._stages: Stage | None = None  # arrays [stages, depths]

    def _table(self, index: _Index, places: Sequence[Sequence[int]], width: int, price: _Price) -> _Table:
        return _Table(index, places, self._choices, len(self._like.loads), width, price)

    # --- addends ---------------------------------------------------------------------------------

    def _cost(self, group: int, stack: Stack, _: _Mesh, op: int, choices: tuple[int, ...]) -> Sequence[float]:
        layer, sides = self._sum.groups[group].layer, stack[group]
        rank, cost = sides.rank_by_op[layer.costs[op].name], layer.costs[op].price(sides, choices)
        return _with_limits(rank, layer.layer.ops[op], choices[0], cost)

    def _move(self, group: int, stack: Stack, _: _Mesh, tensor: int, choices: tuple[int, ...]) -> Sequence[float]:
        return self._sum.groups[group].layer.moves[tensor].price(stack[group], choices)

    def _unsure_s(self, group: int, stack: Stack, _: _Mesh, addend: int, choices: tuple[int, ...]) -> Sequence[float]:
        return (unsure_s(*self._sum.groups[group].layer.addends[addend].behind(stack[group], choices)),)

    def _draft(self, stack: Stack, _: _Mesh, _addend: int, _choices: tuple[int, ...]) -> Sequence[float]:
        parts = draft_parts(stack)
        return sum([each.time_s for each in parts]), sum([each.time_s * each.interval[1] for each in parts])

    def _meeting(self, stack: Stack, _: _Mesh, pair: int, choices: tuple[int, ...]) -> Sequence[float]:
        return (meeting_s(stack, list(self._sum.meetings)[pair], choices),)

    def _end(self, stack: Stack, key: _Mesh, _: int, choices: tuple[int, ...]) -> Sequence[float]:
        return vocabulary_seconds(stack[self._sum.end], key[5], *choices)[:3]

    def _begin_pipeline(self, row: int) -> None:
        self._ends.begin(row)
        tp, cp, dp, ep, batch, pp = self._pipelines.keys[row]
        strategy = Strategy(tp, ep, pp, batch, (), cp, dp)
        excess = [each.excess for each in degree_limits(self._workload, strategy)]
        refusals = [rules.refuses(self._workload, strategy) for rules in (self._rules, *self._plans) if rules]
        numbers = (self._depth(pp), dims_matter(strategy), *(len(list(texts)) for texts in refusals))
        self._of_pipeline[row, : len(numbers)] = numbers
        self._of_pipeline[row, -_DEGREE_LIMITS:] = (*excess, *[0.0] * (_DEGREE_LIMITS - len(excess)))

    def _depth(self, pp: int) -> int:
        """Where the stages of a pipeline stand; the last is repeated where one has fewer kinds than another."""
        if pp not in self._depths:
            self._depths[pp] = len(self._depths)
            kinds = [pipeline(self._workload, depth) for depth in self._depths]
            most = range(max(map(len, kinds)))
            stages = [each[min(at, len(each) - 1)] for at in most for each in kinds]
            self._stages = side_by_side(stages, (len(most), len(kinds)))
        return self._depths[pp]

    def _looked_up(self, new: Sequence[int], asked: Sequence[tuple[_Table, Ints]]) -> list[Floats]:
        """Figures of each table, see `_Table.figures`; what nobody asked for before is worked out."""
        found = [table.figures(wanted) for table, wanted in asked]
        unknown = [np.isnan(each[:, 0, 0]) for each in found]
        due = [at for at, each in enumerate(unknown) if each.any()]
        if new or due:
            self._work_out(new, [(asked[at][0], np.unique(asked[at][1][unknown[at]]).tolist()) for at in due])
        for at in due:
            found[at] = asked[at][0].figures(asked[at][1])
        return found

    def _work_out(self, new: Sequence[int], unknown: Sequence[tuple[_Table, list[int]]]) -> None:
        """Prices what is unknown, mesh by mesh: GPUs of many meshes are not all remembered."""
        due: dict[_Mesh, list[tuple[_Table, _Mesh, int]]] = {self._meshes.keys[row]: [] for row in new}
        for table, places in unknown:
            for at in places:
                key = table.key(at)
                due.setdefault(key[:5], []).append((table, key, at))
        begun = {self._meshes.keys[row]: row for row in new}
        found: dict[_Table, dict[int, list[float]]] = {}
        for (tp, cp, dp, ep, batch), entries in due.items():
            state = batching(self._workload, batch, dp)
            stacks = [sides_of(self._workload, load, tp, cp, dp, ep) for load in state.loads]
            for table, key, at in entries:
                found.setdefault(table, {})[at] = table.priced(stacks, key, at)
            if (row := begun.get((tp, cp, dp, ep, batch))) is not None:
                one_mesh = [len(each.ranks) == 1 for each in stacks[0]]
                most = most_sequences(self._workload, dp)
                self._about[row] = (*_numbers_of(state), most, *base_of(stacks[-1]), *one_mesh)
        for table, figures in found.items():
            table.keep(figures)

    def check(self, columns: Strategies) -> None:
        """Refuses what is no strategy. Raises: StrategyError."""
        dims, degrees = columns.dims, (columns.tp, columns.ep, columns.pp, columns.batch, columns.cp, columns.dp)
        right = dims.shape[1:] == (len(self._choices),) and np.min(degrees) >= 1
        if right:
            right = bool(dims.min() >= 0 and dims.max() < MOST_CHOICES and (self._places(dims) >= 0).all())
        if not right:
            for strategy in columns:
                check_strategy(self._workload, strategy)

    def _places(self, dims: Ints) -> Floats:
        """Of choices `[n, dims]` in their lists, `[dims, n]`."""
        return self._place[self._dims[:, None], dims.T]

    # --- sums ------------------------------------------------------------------------------------

    def figures(self, columns: Strategies) -> tuple[NDArray[Any], ...]:
        """The figures of `Evaluations`, in its order, of `block` strategies at most."""
        workload, places, pp = self._workload, self._places(columns.dims), columns.pp
        known = self._known(columns, columns.batch, places)
        total_bytes, kv_bytes, needed = self._bytes(known, pp)
        allowed = room(workload, 0.0, 0.0)[1]
        over, waits = needed > allowed, columns.batch > known.most
        excess = [
            self._of_pipeline[known.pipelines, -_DEGREE_LIMITS:].T,
            *self._engine_excess(columns.dims, known.pipelines),
            *self._choice_excess(known),
            *_excess(needed, allowed, over),
            *_excess(columns.batch, known.most, waits),
        ]
        seconds, states = known.seconds, known.states
        if phase_of(workload).mixes and (over.any() or waits.any()):
            running = _running(workload, columns.batch, known.most, kv_bytes, needed - allowed)
            if (fewer := np.flatnonzero(running < columns.batch)).size:  # the others wait
                again = self._known(columns[fewer], running[fewer], places[:, fewer])
                seconds[:, fewer], states[:, fewer] = again.seconds, again.states
        state, first_and_last = _state_of(states, self._like).through(pp), (seconds[0], seconds[-1])
        tpot_s, ttft_s = (np.zeros(len(columns)) + of(*first_and_last) for of in (state.tpot_s, state.ttft_s))
        factors, share = slower(workload), np.zeros(len(columns)) + state.prompt_share(*first_and_last)
        surely_s = tpot_s * factors.tokens(share), ttft_s * factors.first
        for latency_s, limit_s in zip(surely_s, (workload.tpot_limit_s, workload.ttft_limit_s), strict=True):
            excess += _excess(latency_s, limit_s, latency_s > limit_s * (1 + ROUNDING))
        gpus = columns.tp * columns.dp * columns.cp * pp
        rate, missed = state.tokens * pp / (state.step_s(*first_and_last) * gpus), _total(np.concatenate(excess))
        if factors.guarded:  # what a strategy's own kernels may be off is known to the last bit one by one
            kept = np.flatnonzero(missed == 0.0)
            longest_of = self._longest(columns[kept], places[:, kept], known, kept)
            for at, longest in zip(kept.tolist(), longest_of, strict=True):
                if surely_kept(workload, float(tpot_s[at]), float(ttft_s[at]), float(share[at]), longest):
                    continue
                strategy = columns[at]
                loads = batching(workload, strategy.batch, strategy.attention_dp).loads
                _, token, first = trusted(workload, strategy, loads, float(share[at]))
                latencies = _stated(float(tpot_s[at]), token.factors), _stated(float(ttft_s[at]), first.factors)
                broken = latency_limits(workload, *at_confidence_s(workload, *latencies))
                missed[at] = math.fsum([each.excess for each in broken])
        running = np.asarray(state.in_flight).astype(np.int64)
        return rate, tpot_s, ttft_s, total_bytes, running, missed == 0.0, missed

    def _rows(self, meshes: Sequence[_Mesh]) -> tuple[Ints, list[int]]:
        """The row `[n]` of each mesh and batch, and those given anew, of which nothing is known."""
        new = list[int]()
        rows = self._meshes.rows(meshes, new.append)
        for row, table in itertools.product(new, self._of_mesh):
            table.begin(row)
        return rows, new

    def _known(self, columns: Strategies, batch: Ints, places: Floats) -> _Known:
        keys = _keys(columns, batch)
        rows, new = self._rows([key[:5] for key in keys])
        pipelines = self._pipelines.rows(keys, self._begin_pipeline)
        asked = self._of_step.wanted(rows, places) + self._of_pipelines.wanted(pipelines, places)
        *of_groups, met, (ends,) = self._looked_up(new, asked)
        costs, moves = of_groups[: len(self._costs)], of_groups[len(self._costs) :]
        about = self._about[rows].T
        states, (most, *base), one_mesh = np.split(about, (_STATE, -len(costs)))
        depths = self._of_pipeline[pipelines, 0].astype(np.int64)
        assert self._stages
        stages = _each(self._stages, lambda of_all: of_all[:, depths])
        layers_s = [
            group.layer.time_s(list(cost), list(move))
            for group, cost, move in zip(self._sum.groups, costs, moves, strict=True)
        ]
        of_kinds = _each(stages, lambda of_all: of_all[:, None])
        meetings_s = dict(zip(self._sum.meetings, met[:, 0], strict=True))
        stages_s = stage_s(of_kinds, layers_s, meetings_s, VocabularySeconds(*ends))
        seconds = columns.pp * stages_s.max(axis=0)
        return _Known(pipelines, states, most, Base(*base), one_mesh != 0, stages, costs, moves, seconds)

    def _bytes(self, known: _Known, pp: Ints) -> tuple[Floats, Floats, Floats]:
        """Bytes of the fullest stage, of its KV cache, and what it needs; in the last kind of step."""
        held = [cost[:, :, -1] for cost in known.costs]
        weights, kv = ([add_up(each[:, figure]) for each in held] for figure in (_WEIGHT, _KV))
        peak = np.max([each[:, _ACTIVATION].max(axis=0) for each in held], axis=0)
        kinds = np.broadcast_arrays(*stage_bytes(self._workload, known.stages, pp, weights, kv, peak, known.base))
        total = _total_bytes(kinds)
        needed = room(self._workload, total, kinds[1])[0]
        fullest = needed.argmax(axis=0), np.arange(len(pp))
        return total[fullest], kinds[1][fullest], needed[fullest]

    def _longest(self, columns: Strategies, places: Floats, known: _Known, at: Ints) -> list[float]:
        """Factors on the time of each one's kernels and collectives that measured runs seldom exceed.

        Few strategies keep all limits as predicted, so this is tabulated of those alone.

        Args:
            columns: They.
            places: Of their choices.
            known: What is known of all.
            at: Where they stand among these.
        """
        if not at.size:
            return []
        rows, new = self._rows([key[:5] for key in _keys(columns, columns.batch)])
        *unsure, drafted = self._looked_up(new, self._of_guard.wanted(rows, places))
        seconds, longest = drafted.sum(axis=(0, 2))
        model = self._workload.model
        for group, cost, move, over in zip(model.groups, known.costs, known.moves, unsure, strict=True):
            often = group.count / model.layers
            of_ops, of_moves = cost[:, :2, :, at].sum(axis=(0, 1, 2)), move[..., at].sum(axis=(0, 1, 2))
            seconds = seconds + often * (of_ops + of_moves)
            longest = longest + often * over.sum(axis=(0, 1, 2))
        return (longest / seconds).tolist()

    def _engine_excess(self, dims: Ints, pipelines: Ints) -> list[Floats]:
        """What an engine's rules are missed by `[1, n]`, 1 for each: see `EngineRules.refusals`."""
        if not self._rules:
            return []
        matter, of_engine, *of_plans = self._of_pipeline[pipelines, 1:-_DEGREE_LIMITS].T
        alike = (matter == 0) & (dims.max(axis=1) < FIRST_DECLARED)
        missed = np.ones(len(dims))  # no plan has these dims
        for plan, refused in reversed(list(zip(self._plans, of_plans, strict=True))):
            fits = (dims == plan.dims).all(axis=1) | (alike & (max(plan.dims) < FIRST_DECLARED))
            missed = np.where(fits, np.where(missed == 0, 0.0, refused), missed)
        return [(of_engine + missed)[None]]

    def _choice_excess(self, known: _Known) -> Iterator[Floats]:
        """What the limits on the choices are missed by, `[limits, n]` each side of each group."""
        for cost, attention, one_mesh in zip(known.costs, self._on_attention, known.one_mesh, strict=True):
            broken = cost[:, _BROKEN : _SUPPORT + 1, 0]
            if broken.any():
                left, right = (broken[side].max(axis=0, initial=0.0) for side in (attention, ~attention))
                yield np.where(one_mesh, np.maximum(left, right), left)
                yield np.where(one_mesh, 0.0, right)


def _keys(columns: Strategies, batch: Ints) -> list[_Mesh]:
    """Mesh, batch and pipeline degree of each strategy."""
    degrees = columns.tp, columns.cp, columns.dp, columns.ep, batch, columns.pp
    return list(zip(*(each.tolist() for each in degrees), strict=True))


def _each(stages: Stage, of: Callable[[Any], Any]) -> Stage:
    """The same with what is made of each of its arrays."""
    meetings = tuple([(pair, of(often)) for pair, often in stages.meetings])
    return Stage(tuple(map(of, stages.layers)), meetings, of(stages.first), of(stages.last))


def _total_bytes(kinds: Sequence[Floats]) -> Floats:
    """Bytes of all kinds together, rounded once as `Memory.total` is: whole numbers add up without that."""
    total: Floats = np.add.reduce(kinds)
    whole = np.logical_and.reduce([each == np.floor(each) for each in kinds]) & (total < 2.0**53)
    for at in zip(*np.nonzero(~whole), strict=True):
        total[at] = math.fsum([float(each[at]) for each in kinds])
    return total


def _running(workload: Workload, batch: Ints, most: Floats, kv_bytes: Floats, missing: Floats) -> Ints:
    """Requests that run at once where not all fit: see `sim.simulate.steady_state`."""
    share = workload.engine.memory.share if workload.engine and workload.engine.memory.of == "free" else 1.0
    kv_needed = kv_bytes / share
    with np.errstate(divide="ignore", invalid="ignore"):
        fit = np.where(kv_needed > missing, np.floor(batch * (1 - missing / kv_needed)), 1)
    fit = np.where(missing > 0, fit, batch)
    return np.maximum(1, np.minimum(fit, most)).astype(np.int64)


def _total(rows: Floats) -> Floats:
    """What `math.fsum` makes of each column of `[.., n]`, most of whose values are 0."""
    total = rows.sum(axis=0)  # exact to rounding for one value or two
    for at in np.flatnonzero(np.count_nonzero(rows, axis=0) > 2).tolist():
        total[at] = math.fsum(rows[:, at].tolist())
    return total


def _stated(latency_s: float, factors: Interval) -> tuple[float, Interval]:
    """A latency and its interval in seconds."""
    return latency_s, (factors[0] * latency_s, factors[1] * latency_s)


def _excess(needed: Any, allowed: Any, broken: Flags) -> list[Floats]:
    """`Violation.excess` `[1, n]` where a limit is broken, else 0; nothing where none is."""
    (at,) = broken.nonzero()
    if not at.size:
        return []
    excess = broken.astype(np.float64)
    needed, allowed = (each[at] if np.ndim(each) else np.full(at.shape, each) for each in (needed, allowed))
    known = (allowed > 0) & (allowed < needed) & (needed < math.inf)
    logs = map(math.log, (needed[known] / allowed[known]).tolist())  # numpy's differ in a last bit
    excess[at[known]] = list(logs)
    return [excess[None]]
