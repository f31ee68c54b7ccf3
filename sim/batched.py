"""`evaluate_many`: the figures of many strategies at once, to the last bit those of `sim.simulate.evaluate`.

The addends of a step (`sim.step.layer`) are tabulated per mesh and batch as strategies first need them. The rest is
picking them for all strategies together, and the very sums of `sim.step`, over arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from sim.arrays import NO_LANES, Diverges, Flags, Floats, Ints, Lanes, add_up, figures_in_lanes
from sim.canonical import dims_matter
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation, Violation
from sim.layers.declared import all_declared
from sim.layers.ops import FusedOp
from sim.ops.dims import dims_of
from sim.ops.rank import OpCost, Rank
from sim.prices.engine import EngineTimes
from sim.prices.priced import Interval
from sim.serving.confidence import ROUNDING, at_confidence_s, slower, surely_kept
from sim.serving.phases import Batching, Pace, batching, most_sequences, phase_of
from sim.simulate import degree_limits, evaluate, latency_limits, running_requests
from sim.step.attention_expert_meshes import Stack, sides_of
from sim.step.breakdown import draft_parts, trusted, unsure_s
from sim.step.costs import token_rows
from sim.step.many_meshes import MOST_IN_LANES, ManyMeshes, branches_alike
from sim.step.pipeline import Pair, Stage, pipeline, side_by_side
from sim.step.stage import (
    Base,
    VocabularySeconds,
    base_of,
    meeting_s,
    room,
    stage_bytes,
    stage_s,
    step_sum,
    stream_send_s,
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
"""Most bytes of a workload's tables, which grow as they are asked for; beyond, they begin anew. [assumed] 12,000 meshes
and batches of a model with two groups of layers whose steps carry prompts; its joint space on 64 GPUs has 9,300."""
_MOST_PIPELINES = 1 << 15
"""The same of pipelines, in rows of some 300 bytes. [assumed]"""
_LEAST_MESHES, _LEAST_LANES = 96, 6
"""New meshes from which on they are priced together, and the fewest of them that an addend is priced of at once; below,
numpy's calls take longer than one mesh after the other."""


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
            return Strategies(*[getattr(self, name)[index] for name in _COLUMNS])
        tp, ep, pp, batch, cp, dp = [int(getattr(self, name)[index]) for name in _COLUMNS[:-1]]
        return Strategy(tp, ep, pp, batch, tuple(self.dims[index].tolist()), cp, None if (cp, dp) == (1, ep) else dp)


_COLUMNS = tuple(each.name for each in fields(Strategies))


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
        StrategyError: One means nothing; see `sim.strategy_checks.check_strategy`. Degrees beyond any cluster have
            figures, too: a space may draw them.
        ValueError: There is none.

    >>> from sim.config.catalog import load_workload
    >>> from sim.ops.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> many = evaluate_many(workload, [Strategy(8, 16, 2, b, megatron_dims(workload.model)) for b in (256, 512, 4096)])
    >>> many.feasible.tolist(), int(many.tokens_per_s_per_gpu.argmax()), many[1].gpus
    ([True, True, False], 2, 256)
    """
    columns = strategies if isinstance(strategies, Strategies) else _columns(workload, strategies)
    terms = _terms(workload, all_declared())
    places = terms.checked(columns)
    own_vocabulary = strategies is not columns and any(each.vocabulary for each in strategies)
    if len(columns) < FEW or own_vocabulary:
        one_by_one = zip(*(_figures(evaluate(workload, each)) for each in strategies), strict=True)
        return Evaluations(workload, strategies, *map(np.array, one_by_one))
    if len(columns) <= terms.block:
        return Evaluations(workload, strategies, *terms.figures(columns, places))
    blocks = [terms.figures(columns[its], places[:, its]) for its in terms.blocks(len(columns))]
    return Evaluations(workload, strategies, *(np.concatenate(figures) for figures in zip(*blocks, strict=True)))


class StepSeconds(NamedTuple):
    """What the step of [n] strategies is made of: the slowest stage's seconds times the stages, and the engine's own.

    Attributes:
        kernels, collectives: Of each fused op, by name, `[n]` each.
        moves: Of redistributions between ops, `[n]`.
        vocabulary: Of embedding, LM head and draft, and of handing the residual stream to the next stage, `[n]`.
        engine: The engine's own, `[n]`.
    """

    kernels: dict[str, Floats]
    collectives: dict[str, Floats]
    moves: Floats
    vocabulary: Floats
    engine: Floats


def step_seconds(workload: Workload, strategies: Strategies) -> StepSeconds:
    """Seconds of a mean step by what takes them, as if all requests of a batch ran at once.

    Args:
        workload: As for `evaluate_many`.
        strategies: At least one.

    Raises:
        StrategyError: See `evaluate_many`.
    """
    terms = _terms(workload, all_declared())
    places = terms.checked(strategies)
    parts = [terms.step_seconds(strategies[its], places[:, its]) for its in terms.blocks(len(strategies))]
    return StepSeconds(
        {op: np.concatenate([part.kernels[op] for part in parts]) for op in parts[0].kernels},
        {op: np.concatenate([part.collectives[op] for part in parts]) for op in parts[0].collectives},
        np.concatenate([part.moves for part in parts]),
        np.concatenate([part.vocabulary for part in parts]),
        np.concatenate([part.engine for part in parts]),
    )


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
_FIGURES = 6
"""Of an op beside its seconds: bytes of weights, KV cache and activations; what its choice misses limits by."""
_STATE = len(_PACE) + len(_TIMES) + 2
"""Numbers of a batching."""
_DEGREES = _STATE + 3
"""Of a pipeline: those, requests that a scheduler lets run, and the rows of the mesh and of the stages."""


def _numbers_of(state: Batching) -> tuple[Any, ...]:
    """Numbers of a batching, as `_state_of` takes them."""
    pace, times = state.pace, state.times
    its = [getattr(pace, name) for name in _PACE], [getattr(times, name) for name in _TIMES]
    return *its[0], *its[1], state.in_flight, state.tokens


def _state_of(numbers: Floats, like: Batching) -> Batching:
    """Many batchings as one, from the numbers of each `[.., n]`: arrays, but for what all have alike.

    Args:
        numbers: They.
        like: Any of them, for the kinds of step.
    """
    alike = (numbers == numbers[:, :1]).all(axis=1).tolist()
    each: Iterator[Any] = iter([float(row[0]) if same else row for row, same in zip(numbers, alike, strict=True)])
    pace, times = Pace(*itertools.islice(each, len(_PACE))), EngineTimes(*itertools.islice(each, len(_TIMES)))
    return Batching(like.decode, like.mixed, pace, times, *each)


_Part = tuple[str, ...]
"""A field of `StepSeconds`, and an op where it has several."""


@final
class _Split:
    """Seconds by what takes them, which sums and products take as one number.

    Attributes:
        parts: By name.
    """

    __array_ufunc__ = None  # arrays leave sums and products with it to it
    REST = ("rest",)
    """What is added without a name."""

    def __init__(self, parts: Mapping[_Part, Any]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, name: _Part, seconds: Any) -> _Split:
        """Of one name."""
        return cls({name: seconds})

    def each(self, made: Callable[[Any], Any]) -> _Split:
        """The same with what is made of each part."""
        return _Split({name: made(seconds) for name, seconds in self.parts.items()})

    def __add__(self, other: Any) -> _Split:
        if isinstance(other, float | int) and not other:
            return self
        more = other.parts if isinstance(other, _Split) else {self.REST: other}
        known = self.parts
        return _Split({**known, **{name: known[name] + each if name in known else each for name, each in more.items()}})

    def __mul__(self, factor: Any) -> _Split:
        return self.each(lambda seconds: factor * seconds)

    __radd__, __rmul__ = __add__, __mul__


# --- tables -------------------------------------------------------------------------------------------

_Mesh = tuple[int, ...]
"""tp, cp, dp, ep, batch; and pp of a pipeline."""
_Price = Callable[..., list[float]]
"""From a GPU in each kind of step, choices, and pp where rows are pipelines, to figures of an addend."""


class _Addend(NamedTuple):
    """An addend of a table.

    Attributes:
        places: Where its choices stand in `Strategy.dims`.
        price: Its figures, as many as the table is wide at most.
        kind: What of the choices decides them.
        shares: Whether what one choice costs is made of what others do, so that many meshes are priced whole.
        unsure: Seconds that it exceeds in few cases.
    """

    places: Sequence[int]
    price: _Price
    kind: Callable[[tuple[int, ...]], Hashable] = tuple
    shares: bool = True
    unsure: _Price | None = None


class _Entries:
    """What each addend tells apart among the combinations of its choices: entries, those of all one after the other.

    Args:
        addends: They.
        choices: Of each dim.

    Attributes:
        each: Of every entry its addend and choices.
    """

    def __init__(self, addends: Sequence[_Addend], choices: Sequence[Sequence[int]]) -> None:
        self._scale = np.zeros((len(addends), len(choices)))  # floats, whose products are faster, and exact
        self.each = list[tuple[_Addend, tuple[int, ...]]]()
        start, which = list[int](), list[int]()
        for row, addend in zip(self._scale, addends, strict=True):
            start.append(len(which))
            for end, at in enumerate(addend.places):  # an op may be at both ends of a tensor
                row[at] += math.prod([len(choices[each]) for each in addend.places[end + 1 :]])
            entry_of: dict[Hashable, int] = {}
            for chosen in itertools.product(*(choices[at] for at in addend.places)):
                alike = addend.kind(chosen)
                if alike not in entry_of:
                    entry_of[alike] = len(self.each)
                    self.each.append((addend, chosen))
                which.append(entry_of[alike])
        self._start, self._which = np.array(start)[:, None], np.array(which, np.int64)

    def of(self, places: Floats) -> Ints:
        """Of choices, given their places in their lists `[dims, n]`, the entry of each addend `[addends, n]`."""
        most = max(1, _ONE_THREAD // self._scale.size)
        parts = [self._scale @ places[:, start : start + most] for start in range(0, places.shape[1], most)]
        combination = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).astype(np.int64) + self._start
        return self._which.take(combination)


class _Table:
    """What addends come to on meshes at a batch, or in pipelines: `[rows, entries, width]`, as it is asked for.

    Args:
        entries: Of each what prices it, its choices, and `_Addend.shares`.
        width: Most figures of an addend.
        first: The number of its first entry.

    Attributes:
        rows: Of each mesh or pipeline that is known.
        keys: The same in the order of the rows.
    """

    def __init__(self, entries: Sequence[tuple[_Price, tuple[int, ...], bool]], width: int, first: int = 0) -> None:
        self.entries, self._width, self._first = entries, width, first
        self.alone = set[int]()  # entries that are priced mesh by mesh
        self.rows, self.keys = dict[_Mesh, int](), list[_Mesh]()
        self._array: Floats = np.zeros((0, width))
        self._known: Flags = np.zeros(0, bool)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return 8 * len(self.entries) * self._width

    def begin(self, key: _Mesh) -> None:
        """Has one more row, of which nothing is known."""
        row = self.rows[key] = len(self.keys)
        self.keys.append(key)
        start, end = row * len(self.entries), (row + 1) * len(self.entries)
        self._array, self._known = _with_room(self._array, end), _with_room(self._known, end)
        self._known[start:end] = False

    def clear(self) -> None:
        """Begins anew."""
        self.rows.clear()
        self.keys.clear()

    def wanted(self, rows: Ints, entries: Ints) -> Ints:
        """Where figures stand `[addends, n]`; rows `[n]`, entries `[addends, n]`."""
        return entries + (len(self.entries) * rows - self._first)

    def figures(self, wanted: Ints) -> Floats:
        """`[addends, n, width]` of what stands somewhere `[addends, n]`."""
        return self._array.take(wanted, axis=0)

    def unknown(self, wanted: Ints) -> list[int]:
        """Where nobody asked before."""
        known = self._known.take(wanted)
        return [] if known.all() else sorted(set(wanted[~known].tolist()))  # np.unique would import much of numpy

    def work_out(self, stacks: Sequence[Stack], row: int, entries: Sequence[int]) -> None:
        """Prices some entries of a row, on a GPU in each kind of step."""
        figures, stages = list[list[float]](), self.keys[row][5:]
        for entry in entries:
            price, choices, _ = self.entries[entry]
            its = price(stacks, choices, *stages)
            figures.append(its + [0.0] * (self._width - len(its)))
        self.keep([row * len(self.entries) + entry for entry in entries], np.array(figures))

    def keep(self, places: Any, figures: Any) -> None:
        """Knows the figures `[.., figures]` that stand in some place or places."""
        width = np.shape(figures)[-1]
        self._array[places, :width], self._array[places, width:] = figures, 0.0
        self._known[places] = True


def _with_room(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """An array of as many rows or more, with those that it has.

    They grow, since room that is not needed is not free: allocators clear it, and keep much of what is given back.
    """
    if rows <= len(array):
        return array
    larger = np.empty((max(64, 2 * len(array), rows), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def _base_figures(stacks: Sequence[Stack], _choices: tuple[int, ...]) -> list[float]:
    """`Base`, and whether both sides are one, per group of layers."""
    return [*base_of(stacks[-1]), *(len(each.ranks) == 1 for each in stacks[0])]


def _limits(rank: Rank, op: FusedOp, choice: int, broken: str | None) -> tuple[float, float, float]:
    """By how much an op's choice misses limits on heads, tokens and support."""
    heads, tokens, unsupported = 0.0, 0.0, 0.0
    if broken == "heads":
        heads = Violation("heads", rank.tp, rank.attention.heads, "").excess
    elif broken == "tokens":
        tokens = Violation("tokens", rank.tp, token_rows(rank, op, choice), "").excess
    elif broken == "unsupported":
        unsupported = Violation("unsupported", rank.tp, 1, "").excess
    return heads, tokens, unsupported


_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break."""


class _Known(NamedTuple):
    """What is known of some strategies at some batches, `[.., n]`, whether or not their requests have room.

    Attributes:
        pipelines: Rows of what is kept by mesh, batch and pipeline degree.
        addends: Figures of all addends, `[addends, n, width]`.
        send_s: In which a stage sends its residual stream on, `[n, kinds]`.
    """

    pipelines: Ints
    addends: Floats
    send_s: Floats


@lru_cache(maxsize=2)
def _terms(workload: Workload, _declared: Hashable) -> _Terms:
    """What is known of a workload, as long as ops have the choices that are declared now."""
    return _Terms(workload)


class _Terms:
    """Addends of a workload's steps in tables: by mesh and batch, and those of pipelines by pipeline degree, too.

    Attributes:
        block: Strategies that are added up together at most.
    """

    def __init__(self, workload: Workload) -> None:
        choices = [dim.choices for dim in dims_of(workload)]
        self._workload, self._sum = workload, step_sum(workload)
        self._place, self._dims = np.full((len(choices), MOST_CHOICES), -1.0), np.arange(len(choices))[:, None]
        for dim, known in enumerate(choices):
            self._place[dim, list(known)] = range(len(known))
        self._like, self._factors = batching(workload, 1, 1), slower(workload)
        self._kinds, self._stored = len(self._like.loads), 2 * len(self._like.loads)
        self._pairs, groups = tuple(self._sum.meetings), self._sum.groups
        ends = np.cumsum([0, *(len(each) for group in groups for each in (group.layer.costs, group.layer.moves))])
        self._ops, self._tensors = (
            [slice(*each) for each in itertools.pairwise(ends.tolist())][at::2] for at in (0, 1)
        )
        addends, self._seconds = list[_Addend](), self._stored  # numbers that are seconds, of any addend
        for index, (layer, _, places, _) in enumerate(groups):
            prices = [partial(self._cost, index, op) for op in range(len(layer.costs))]
            prices += [partial(self._move, index, tensor) for tensor in range(len(layer.moves))]
            shares = [False] * len(layer.costs) + [True] * len(layer.moves)
            unsure = [partial(self._unsure_s, index, at) for at in range(len(prices))]
            addends += map(_Addend, places, prices, (each.kind for each in layer.addends), shares, unsure)
            self._seconds = max(self._seconds, self._kinds * max(map(len, layer.waiting)))
        addends += [_Addend(self._sum.meetings[pair], partial(self._meeting, pair)) for pair in self._pairs]
        addends += [_Addend([self._sum.leaves], self._vocabulary), _Addend((), _base_figures, unsure=self._draft)]
        known = len(Base._fields) + len(groups)
        self._entries = _Entries(addends, choices)
        each, width = self._entries.each, max(self._stored + _FIGURES, self._seconds, known)
        self._of_mesh = _Table([(addend.price, chosen, addend.shares) for addend, chosen in each], width)
        (first, *_), ends = zip(
            *[(at, chosen) for at, (addend, chosen) in enumerate(each) if addend is addends[-2]], strict=True
        )
        self._of_pipeline = _Table([(self._send_s, chosen, True) for chosen in ends], self._kinds, first)
        self._of_guard = _Table(
            [(addend.unsure or addend.price, chosen, True) for addend, chosen in each], self._stored
        )
        self._guarded = [at for at, addend in enumerate(addends) if addend.unsure]
        self._on_attention = [np.array([op.side == "attention" for op in group.layer.layer.ops]) for group in groups]
        row_bytes = self._of_mesh.row_bytes + self._factors.guarded * self._of_guard.row_bytes
        self._most = max(64, _TABLE_BYTES // row_bytes), _MOST_PIPELINES
        self.block = min(_BLOCK, *self._most)
        self._rules = engine_rules_of(workload)
        self._plans = self._rules.plans_of(workload) if self._rules else ()
        self._of_degrees = np.empty((0, _DEGREES + 2 + len(self._plans) + _DEGREE_LIMITS))
        self._depths: dict[int, int] = {}
        self._stages: Stage | None = None  # arrays [stages, depths]

    # --- addends ---------------------------------------------------------------------------------

    def _cost(self, group: int, op: int, stacks: Sequence[Stack], choices: tuple[int, ...]) -> list[float]:
        layer = self._sum.groups[group].layer
        costs: list[OpCost] = [layer.costs[op].price(stack[group], choices) for stack in stacks]
        rank, stored = stacks[0][group].rank_by_op[layer.costs[op].name], costs[-1]
        seconds = [cost.kernel_s for cost in costs] + [cost.collective_s for cost in costs]
        limits = _limits(rank, layer.layer.ops[op], choices[0], costs[0].broken)
        return [*seconds, stored.weight_bytes, stored.kv_bytes, stored.activation_bytes, *limits]

    def _move(self, group: int, tensor: int, stacks: Sequence[Stack], choices: tuple[int, ...]) -> list[float]:
        price = self._sum.groups[group].layer.moves[tensor].price
        of_kinds = [price(stack[group], choices) for stack in stacks]
        return [part_s for reader in zip(*of_kinds, strict=True) for part_s in reader]

    def _unsure_s(self, group: int, addend: int, stacks: Sequence[Stack], choices: tuple[int, ...]) -> list[float]:
        behind = self._sum.groups[group].layer.addends[addend].behind
        return [unsure_s(*behind(stack[group], choices)) for stack in stacks]

    def _draft(self, stacks: Sequence[Stack], _choices: tuple[int, ...]) -> list[float]:
        parts = [draft_parts(stack) for stack in stacks]
        usual = [sum([each.time_s for each in of_kind]) for of_kind in parts]
        return usual + [sum([each.time_s * each.interval[1] for each in of_kind]) for of_kind in parts]

    def _meeting(self, pair: Pair, stacks: Sequence[Stack], choices: tuple[int, ...]) -> list[float]:
        return [meeting_s(stack, pair, choices) for stack in stacks]

    def _vocabulary(self, stacks: Sequence[Stack], choices: tuple[int, ...]) -> list[float]:
        of_kinds = [vocabulary_seconds(stack[self._sum.end], 1, *choices)[:2] for stack in stacks]
        return [each_s for part in zip(*of_kinds, strict=True) for each_s in part]

    def _send_s(self, stacks: Sequence[Stack], choices: tuple[int, ...], pp: Any) -> list[Any]:
        return [stream_send_s(stack[self._sum.end], pp, *choices) for stack in stacks]

    # --- rows ------------------------------------------------------------------------------------

    def _rows(self, columns: Strategies, batch: Ints) -> tuple[Ints, Ints]:
        """Rows `[n]` by mesh, batch and pipeline degree, and by mesh and batch; all begin anew where room is short."""
        degrees = columns.tp, columns.cp, columns.dp, columns.ep, batch, columns.pp
        keys = list(zip(*(each.tolist() for each in degrees), strict=True))
        known = self._of_pipeline.rows
        if new := [key for key in dict.fromkeys(keys) if key not in known]:
            meshes = {key[:5] for key in new if key[:5] not in self._of_mesh.rows}
            if len(self._of_mesh.rows) + len(meshes) > self._most[0] or len(known) + len(new) > self._most[1]:
                for table in (self._of_mesh, self._of_guard, self._of_pipeline):
                    table.clear()
                new = list(dict.fromkeys(keys))
            self._begin(new)
        rows = np.array([known[key] for key in keys])
        return rows, self._of_degrees[rows, _DEGREES - 2].astype(np.int64)

    def _begin(self, keys: Sequence[_Mesh]) -> None:
        """Knows of pipelines what their degrees alone decide."""
        start, meshes, numbers = len(self._of_pipeline.rows), self._of_mesh.rows, functools.cache(self._numbers)
        self._of_degrees = _with_room(self._of_degrees, start + len(keys))
        for key in keys:
            if key[:5] not in meshes:
                self._of_mesh.begin(key[:5])
                if self._factors.guarded:
                    self._of_guard.begin(key[:5])
            self._of_pipeline.begin(key)
        rows = self._of_degrees[start : start + len(keys)]
        known = np.array([numbers(key[4], key[2]) for key in keys]).T
        state = _state_of(known[:-1], self._like).through(np.array([key[5] for key in keys]))
        for at, each in enumerate((*_numbers_of(state), known[-1])):
            rows[:, at] = each
        rows[:, _DEGREES - 2 : _DEGREES] = [(meshes[key[:5]], self._depth(key[5])) for key in keys]
        figures: Any = None
        if len(keys) >= _LEAST_MESHES and max(map(max, keys)) <= MOST_IN_LANES:
            columns = [np.array(column).view(Lanes) for column in zip(*keys, strict=True)]
            with suppress(*NO_LANES):
                figures = figures_in_lanes(self._degrees, *columns)
        rows[:, _DEGREES:] = [self._degrees(*key) for key in keys] if figures is None else figures

    def _numbers(self, batch: int, dp: int) -> tuple[float, ...]:
        """Of a batching what `_state_of` takes, and how many requests a scheduler lets run at once."""
        return *_numbers_of(batching(self._workload, batch, dp)), most_sequences(self._workload, dp)

    def _degrees(self, tp: int, cp: int, dp: int, ep: int, batch: int, pp: int) -> list[float]:
        """Whether dims matter, how often an engine and each plan of it refuse such degrees, and their excesses."""
        strategy = Strategy(tp, ep, pp, batch, (), cp, dp)
        excess = [each.excess for each in degree_limits(self._workload, strategy)]
        refusals = [rules.refuses(self._workload, strategy) for rules in (self._rules, *self._plans) if rules]
        counts = [len(list(texts)) for texts in refusals] or [0]
        return [dims_matter(strategy), *counts, *excess, *[0.0] * (_DEGREE_LIMITS - len(excess))]

    def _depth(self, pp: int) -> int:
        """Where the stages of a pipeline stand; the last is repeated where one has fewer kinds than another."""
        if pp not in self._depths:
            self._depths[pp] = len(self._depths)
            kinds = [pipeline(self._workload, depth) for depth in self._depths]
            most = range(max(map(len, kinds)))
            stages = [each[min(at, len(each) - 1)] for at in most for each in kinds]
            self._stages = side_by_side(stages, (len(most), len(kinds)))
        return self._depths[pp]

    def _looked_up(self, table: _Table, meshes: Ints, chosen: Ints) -> Floats:
        """Figures of a table `[addends, n, width]`; what nobody asked for before is worked out.

        Args:
            table: Of which addends.
            meshes: Its rows, of meshes or pipelines, `[n]`.
            chosen: Entries `[addends, n]`.
        """
        wanted = table.wanted(meshes, chosen)
        if unknown := table.unknown(wanted):
            rows, entries = np.divmod(np.array(unknown, np.int64), len(table.entries))
            asked, together = list[int](rows.tolist()), dict[Hashable, list[int]]()
            for row in sorted(set(asked)):
                together.setdefault(branches_alike(self._workload, table.keys[row]), []).append(row)
            left = np.ones(len(unknown), bool)
            for alike, its in together.items():
                if alike is not None and len(its) >= _LEAST_MESHES and table is not self._of_guard:
                    self._work_out_together(table, its, rows, entries, left)
            due: dict[int, list[int]] = {}
            for row, entry in zip(rows[left].tolist(), entries[left].tolist(), strict=True):
                due.setdefault(row, []).append(entry)
            for row, its in due.items():  # GPUs of many meshes are not all remembered
                tp, cp, dp, ep, batch, *_ = table.keys[row]
                loads = batching(self._workload, batch, dp).loads
                table.work_out([sides_of(self._workload, load, tp, cp, dp, ep) for load in loads], row, its)
        return table.figures(wanted)

    def _work_out_together(self, table: _Table, its: Sequence[int], rows: Ints, entries: Ints, left: Flags) -> None:
        """Prices what is unknown of meshes that branch alike, as far as all of them can be at once.

        Args:
            table: Of which addends.
            its: The meshes, by their rows.
            rows: Of what is unknown, `[n]`.
            entries: And entries `[n]`.
            left: Of that, what is still to be priced; lanes that are priced here are taken off.
        """
        keys = [table.keys[row] for row in its]
        loads = {at: batching(self._workload, *at).loads for at in dict.fromkeys((key[4], key[2]) for key in keys)}
        try:
            gpus = ManyMeshes.of(self._workload, keys, [loads[key[4], key[2]] for key in keys])
        except Diverges as diverging:
            for part in (diverging.taken, ~diverging.taken):
                some = [row for row, taken in zip(its, part.tolist(), strict=True) if taken]
                self._work_out_together(table, some, rows, entries, left)
            return
        stages = [np.array(column).view(Lanes) for column in zip(*(key[5:] for key in keys), strict=True)]
        parallel = any(key[0] * key[1] > 1 or key[2] > key[3] for key in keys)  # on one GPU all choices are one
        lane_of = np.full(len(table.keys), -1)
        lane_of[its] = range(len(its))
        (mine,) = np.nonzero(lane_of[rows] >= 0)
        mine = mine[entries[mine].argsort(kind="stable")]
        starts = np.flatnonzero(np.diff(entries[mine], prepend=-1))
        for at in np.split(mine, starts[1:]) if len(mine) else ():
            entry, lanes = int(entries[at[0]]), lane_of[rows[at]]
            if entry in table.alone or len(at) < _LEAST_LANES:
                continue
            price, choices, shares = table.entries[entry]
            try:
                if shares or not parallel:
                    figures = gpus.figures(price, choices, *stages)[lanes]
                else:
                    figures = gpus[lanes].figures(price, choices, *(each[lanes] for each in stages))
            except NO_LANES:  # what only a number can be asked
                table.alone.add(entry)
                continue
            table.keep(rows[at] * len(table.entries) + entry, figures)
            left[at] = False

    def blocks(self, count: int) -> list[slice]:
        """Of so many strategies those that are added up together."""
        return [slice(start, start + self.block) for start in range(0, count, self.block)]

    def checked(self, columns: Strategies) -> Floats:
        """Of choices their places in their lists, `[dims, n]`.

        Raises:
            StrategyError: One is no strategy.
        """
        dims, degrees = columns.dims, (columns.tp, columns.ep, columns.pp, columns.batch, columns.cp, columns.dp)
        if dims.shape[1:] == (len(self._dims),) and dims.min() >= 0 and dims.max() < MOST_CHOICES:
            places = self._place[self._dims, dims.T]
            if places.min() >= 0 and min([int(each.min()) for each in degrees]) >= 1:
                return places
        for strategy in columns:
            check_strategy(self._workload, strategy)
        raise AssertionError("no strategy is refused")

    # --- sums ------------------------------------------------------------------------------------

    def figures(self, columns: Strategies, places: Floats) -> tuple[NDArray[Any], ...]:
        """The figures of `Evaluations`, in its order, of `block` strategies at most with their choices' places."""
        workload, pp, zeros, entries = self._workload, columns.pp, np.zeros(len(columns)), self._entries.of(places)
        known = self._known(columns, columns.batch, entries)
        about = self._of_degrees.take(known.pipelines, axis=0).T
        stages = self._stages_of(about)
        total_bytes, kv_bytes, needed = self._bytes(known, stages, pp)
        allowed, most = room(workload, 0.0, 0.0)[1], about[_STATE]
        over, waits = needed > allowed, columns.batch > most
        excess = [
            about[-_DEGREE_LIMITS:],
            *self._engine_excess(columns.dims, about),
            *self._choice_excess(known),
        ]
        numbers = about[:_STATE]
        if phase_of(workload).mixes and (over.any() or waits.any()):
            running = running_requests(workload, columns.batch, most, kv_bytes, needed - allowed).astype(np.int64)
            if (fewer := np.flatnonzero(running < columns.batch)).size:  # the others wait
                again = self._known(columns[fewer], running[fewer], entries[:, fewer])
                numbers[:, fewer] = self._of_degrees[again.pipelines, :_STATE].T
                known.addends[:, fewer], known.send_s[fewer] = again.addends, again.send_s
        seconds = pp * self._stages_s(known, stages).max(axis=0)
        state, first_and_last = _state_of(numbers, self._like), (seconds[0], seconds[-1])
        tpot_s, ttft_s = (zeros + of(*first_and_last) for of in (state.tpot_s, state.ttft_s))
        factors, share = self._factors, zeros
        surely_s = tpot_s, ttft_s
        if factors.guarded:
            share = zeros + state.prompt_share(*first_and_last)
            surely_s = factors.surely_s(tpot_s, share), ttft_s * factors.first
        limits = [(needed, allowed, over), (columns.batch, most, waits)]
        for latency_s, limit_s in zip(surely_s, (workload.tpot_limit_s, workload.ttft_limit_s), strict=True):
            limits.append((latency_s, limit_s, latency_s > limit_s * (1 + ROUNDING)))
        excess.append(_excess(limits))
        gpus = columns.tp * columns.dp * columns.cp * pp
        rate, missed = state.throughput(*first_and_last, gpus), _total(np.concatenate(excess))
        if factors.guarded and (kept := np.flatnonzero(missed == 0.0)).size:  # its own kernels may be off more
            longest = self._longest(
                about[_DEGREES - 2, kept].astype(np.int64), entries[:, kept], known.addends[:, kept]
            )
            surely = surely_kept(workload, tpot_s[kept], ttft_s[kept], share[kept], longest)
            unsure: list[int] = kept[~surely].tolist()
            for at in unsure:  # which is known to the last bit one by one
                strategy = columns[at]
                loads = batching(workload, strategy.batch, strategy.attention_dp).loads
                _, token, first = trusted(workload, strategy, loads, float(share[at]))
                latencies = _stated(float(tpot_s[at]), token.factors), _stated(float(ttft_s[at]), first.factors)
                broken = latency_limits(workload, *at_confidence_s(workload, *latencies))
                missed[at] = math.fsum([each.excess for each in broken])
        running = (zeros + state.in_flight).astype(np.int64)
        return zeros + rate, tpot_s, ttft_s, total_bytes, running, missed == 0.0, missed

    def _known(self, columns: Strategies, batch: Ints, entries: Ints) -> _Known:
        pipelines, meshes = self._rows(columns, batch)
        addends = self._looked_up(self._of_mesh, meshes, entries)
        (sends,) = self._looked_up(self._of_pipeline, pipelines, entries[-2:-1])
        return _Known(pipelines, addends, sends)

    def _stages_of(self, about: Floats) -> Stage:
        """Stages of pipelines, `[stages, n]`."""
        depths = about[_DEGREES - 1].astype(np.int64)
        assert self._stages
        return _each(self._stages, lambda of_all: of_all.take(depths, axis=1))

    def _stage_s(self, known: _Known, stage: Stage, named: Callable[[_Part, Floats], Any] | None = None) -> Any:
        """Seconds of stages in each kind of step; `named`: what makes an addend of a name and its seconds."""
        figures = _by_kind(known.addends[..., : self._seconds], self._kinds)
        layers_s = list[Any]()
        for group, ops, tensors in zip(self._sum.groups, self._ops, self._tensors, strict=True):
            costs, moves = list[Any](figures[ops]), list[Any](figures[tensors])
            if named:
                of_ops = zip(group.layer.costs, costs, strict=True)
                costs = [
                    (named(("kernels", op.name), each[0]), named(("collectives", op.name), each[1]))
                    for op, each in of_ops
                ]
                moves = [[named(("moves",), part_s) for part_s in each] for each in moves]
            layers_s.append(group.layer.time_s(costs, moves))
        around = list[Any]((figures[-2, 0], figures[-2, 1], known.send_s.T))
        met = list[Any](figures[self._tensors[-1].stop : -2, 0])
        if named:
            around, met = [named(("vocabulary",), each) for each in around], [named(("moves",), each) for each in met]
        return stage_s(stage, layers_s, dict(zip(self._pairs, met, strict=True)), VocabularySeconds(*around))

    def _stages_s(self, known: _Known, stages: Stage) -> Floats:
        """Seconds of each stage in each kind of step, `[stages, kinds, n]`."""
        return self._stage_s(known, _each(stages, lambda of_all: of_all[:, None]))

    def step_seconds(self, columns: Strategies, places: Floats) -> StepSeconds:
        """See `step_seconds`, of `block` strategies at most."""
        known, pp = self._known(columns, columns.batch, self._entries.of(places)), columns.pp
        about = self._of_degrees[known.pipelines].T
        stages = self._stages_of(about)
        slowest = self._stages_s(known, stages).argmax(axis=0), np.arange(len(pp))  # in each kind of step
        split = self._stage_s(known, _each(stages, lambda of_all: of_all[slowest]), _Split.of)
        state = _state_of(about[:_STATE], self._like)
        decode_s, mixed_s = (pp * split.each(operator.itemgetter(kind)) for kind in (0, -1))
        parts = state.step_s(decode_s, mixed_s).parts
        kernels, collectives = (
            {op: each_s for (kind, *ops), each_s in parts.items() for op in ops if kind == field}
            for field in StepSeconds._fields[:2]
        )
        others = [np.zeros(len(pp)) + parts.get(name, 0.0) for name in (("moves",), ("vocabulary",), _Split.REST)]
        return StepSeconds(kernels, collectives, *others)

    def _bytes(self, known: _Known, stages: Stage, pp: Ints) -> tuple[Floats, Floats, Floats]:
        """Bytes of the fullest stage, of its KV cache, and what it needs; in the last kind of step."""
        stored = [known.addends[ops, :, self._stored : self._stored + 3].transpose(2, 0, 1).copy() for ops in self._ops]
        weights, kv = ([add_up(each[figure]) for each in stored] for figure in (0, 1))
        peak = functools.reduce(np.maximum, [each[2].max(axis=0) for each in stored])
        base = Base(*known.addends[-1, :, : len(Base._fields)].T)
        kinds = stage_bytes(self._workload, stages, pp, weights, kv, peak, base)
        total = _total_bytes(kinds)
        needed = room(self._workload, total, kinds[1])[0]
        fullest = needed.argmax(axis=0), np.arange(len(pp))
        return total[fullest], kinds[1][fullest], needed[fullest]

    def _longest(self, meshes: Ints, entries: Ints, addends: Floats) -> float:
        """The largest factor on the time of any one's kernels and collectives, that measured runs seldom exceed.

        Few strategies keep all limits as predicted, so this is tabulated of those alone.

        Args:
            meshes: Rows of theirs.
            entries: Of their choices.
            addends: Figures of their addends.
        """
        found = self._looked_up(self._of_guard, meshes, entries[self._guarded])
        seconds, longest = _by_kind(found[-1:], self._kinds)[0, :2].sum(axis=1)
        for group, ops, tensors in zip(self._workload.model.groups, self._ops, self._tensors, strict=True):
            often = group.count / self._workload.model.layers
            own_s = addends[ops, :, : self._stored].sum(axis=(0, 2)) + addends[tensors].sum(axis=(0, 2))
            seconds = seconds + often * own_s
            longest = longest + often * found[ops.start : tensors.stop, :, : self._kinds].sum(axis=(0, 2))
        return float((longest / seconds).max())

    def _engine_excess(self, dims: Ints, about: Floats) -> list[Floats]:
        """What an engine's rules are missed by `[1, n]`, 1 for each: see `EngineRules.refusals`."""
        if not self._rules:
            return []
        matter, of_engine, *of_plans = about[_DEGREES:-_DEGREE_LIMITS]
        alike = (matter == 0) & (dims.max(axis=1) < FIRST_DECLARED)
        missed = np.ones(len(dims))  # no plan has these dims
        for plan, refused in reversed(list(zip(self._plans, of_plans, strict=True))):
            fits = (dims == plan.dims).all(axis=1) | (alike & (max(plan.dims) < FIRST_DECLARED))
            missed = np.where(fits, np.where(missed == 0, 0.0, refused), missed)
        return [(of_engine + missed)[None]]

    def _choice_excess(self, known: _Known) -> Iterator[Floats]:
        """What the limits on the choices are missed by, `[limits, n]` each side of each group."""
        one_meshes = known.addends[-1, :, len(Base._fields) :].T != 0
        for ops, attention, one_mesh in zip(self._ops, self._on_attention, one_meshes, strict=False):
            broken = known.addends[ops, :, self._stored + 3 : self._stored + _FIGURES].transpose(0, 2, 1)
            if broken.any():
                left, right = (broken[side].max(axis=0, initial=0.0) for side in (attention, ~attention))
                yield np.where(one_mesh, np.maximum(left, right), left)
                yield np.where(one_mesh, 0.0, right)


def _by_kind(figures: Floats, kinds: int) -> Floats:
    """Figures `[addends, n, width]` by kind of step, `[addends, width // kinds, kinds, n]`."""
    addends, n, width = figures.shape
    parts = width // kinds
    return figures[..., : parts * kinds].transpose(0, 2, 1).copy().reshape(addends, parts, kinds, n)


def _each(stages: Stage, of: Callable[[Any], Any]) -> Stage:
    """The same with what is made of each of its arrays."""
    meetings = tuple([(pair, of(often)) for pair, often in stages.meetings])
    return Stage(tuple(map(of, stages.layers)), meetings, of(stages.first), of(stages.last))


def _total_bytes(kinds: Sequence[Any]) -> Floats:
    """Bytes of all kinds together, rounded once as `Memory.total` is: whole numbers add up without that."""
    total: Floats = functools.reduce(operator.add, kinds)
    whole: Flags = total < 2.0**53
    for each in kinds:
        whole = whole & (each == np.floor(each))
    if not whole.all():
        each = np.broadcast_arrays(*kinds)
        for at in zip(*np.nonzero(~whole), strict=True):
            total[at] = math.fsum([float(kind[at]) for kind in each])
    return total


def _total(rows: Floats) -> Floats:
    """What `math.fsum` makes of each column of `[.., n]`, most of whose values are 0."""
    total = rows.sum(axis=0)  # exact to rounding for one value or two
    several = np.count_nonzero(rows, axis=0) > 2
    total[several] = list(map(math.fsum, rows.T[several].tolist()))
    return total


def _stated(latency_s: float, factors: Interval) -> tuple[float, Interval]:
    """A latency and its interval in seconds."""
    return latency_s, (factors[0] * latency_s, factors[1] * latency_s)


def _excess(limits: Sequence[tuple[Any, Any, Flags]]) -> Floats:
    """`Violation.excess` `[limits, n]` of what is needed and allowed where a limit is broken, else 0."""
    found = np.zeros((len(limits), len(limits[0][-1])))
    broken = np.array([flags for *_, flags in limits])
    if broken.any():
        needed, allowed = np.empty_like(found), np.empty_like(found)
        for row, (its, most, _) in enumerate(limits):
            needed[row], allowed[row] = its, most
        needed, allowed = needed[broken], allowed[broken]
        known, excess = (allowed > 0) & (allowed < needed) & (needed < math.inf), np.ones_like(needed)
        excess[known] = list(map(math.log, (needed[known] / allowed[known]).tolist()))  # numpy's differ in a last bit
        found[broken] = excess
    return found
