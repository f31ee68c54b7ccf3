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
from operator import attrgetter
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from sim.arrays import NO_LANES, Diverges, Flags, Floats, Ints, Lanes, add_up, figures_in_lanes, log_of
from sim.canonical import dims_matter
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation, Violation
from sim.layers.declared import all_declared
from sim.layers.ops import FusedOp
from sim.ops.dims import dims_of
from sim.ops.rank import OpCost, Rank
from sim.prices.engine import EngineTimes
from sim.prices.mesh import STAGE_PAIRS, stage_pair
from sim.prices.priced import Interval
from sim.serving.confidence import ROUNDING, at_confidence_s, slower, surely_kept
from sim.serving.phases import Batching, Pace, batching, most_sequences, phase_of
from sim.simulate import degree_limits, evaluate, latency_limits, running_requests
from sim.step.attention_expert_meshes import Stack, on_attention_alone, sides_of
from sim.step.breakdown import draft_parts, trusted, unsure_s
from sim.step.costs import token_rows
from sim.step.many_meshes import MOST_IN_LANES, ManyMeshes, branches_alike
from sim.step.pipeline import Pair, Stage, pipeline
from sim.step.stage import (
    Base,
    VocabularySeconds,
    base_of,
    meeting_s,
    room,
    stage_bytes,
    stage_s,
    step_sum,
    stream_to_s,
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
_DEGREE_COLUMNS = ("tp", "cp", "dp", "ep", "batch", "pp")
"""In the order of what is known of meshes and pipelines."""


class _Block(NamedTuple):
    """Strategies that are added up together.

    Attributes:
        columns: They, n.
        degrees: Theirs, as `_DEGREE_COLUMNS` has them, `[6, n]`.
        entries: Of their choices, `[addends, n]`; see `_Entries`.
    """

    columns: Strategies
    degrees: Ints
    entries: Ints


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
    blocks = terms.blocks(columns)
    own_vocabulary = strategies is not columns and any(each.vocabulary for each in strategies)
    if len(columns) < FEW or own_vocabulary:
        one_by_one = zip(*(_figures(evaluate(workload, each)) for each in strategies), strict=True)
        return Evaluations(workload, strategies, *map(np.array, one_by_one))
    found = [terms.figures(*block) for block in blocks]
    figures = map(np.concatenate, zip(*found, strict=True)) if len(found) > 1 else found[0]
    return Evaluations(workload, strategies, *figures)


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
    parts = [terms.step_seconds(*block) for block in terms.blocks(strategies)]
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
_BASE = len(Base._fields)
_STATE = len(_PACE) + len(_TIMES) + 2
"""Numbers of a batching."""
_MESH = _STATE + 1
_DEGREES = _MESH + 3
"""Of a pipeline: those, requests that a scheduler lets run, the rows of the mesh and of the stages, and `_SENDS` where
the stream is sent to none, or more."""
_SENDS = 2
"""Figures of what is around the layers before those of a stream that is sent on, in each kind of step."""


def _numbers_of(state: Batching) -> tuple[Any, ...]:
    """Numbers of a batching, as `_state_of` takes them."""
    return *attrgetter(*_PACE)(state.pace), *attrgetter(*_TIMES)(state.times), state.in_flight, state.tokens


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
_Price = Callable[[Sequence[Stack], tuple[int, ...]], list[float]]
"""From a GPU in each kind of step, and choices, to figures of an addend."""


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
    """What addends come to on meshes at a batch: `[rows, entries, width]`, as it is asked for.

    Args:
        entries: Of each what prices it, its choices, and `_Addend.shares`.
        width: Most figures of an addend.

    Attributes:
        keys: The mesh of each row.
    """

    def __init__(self, entries: Sequence[tuple[_Price, tuple[int, ...], bool]], width: int) -> None:
        self.entries = entries
        self.alone = set[int]()  # entries that are priced mesh by mesh
        self.keys = list[_Mesh]()
        self._array: Floats = np.zeros((0, width))

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return 8 * len(self.entries) * self._array.shape[1]

    def begin(self, row: int, key: _Mesh) -> None:
        """Has a row of a mesh behind the others, of which nothing is known."""
        self.keys[row:] = [key]
        start, end = row * len(self.entries), (row + 1) * len(self.entries)
        self._array = _with_room(self._array, end)
        self._array[start:end] = [math.nan, *[0.0] * (self._array.shape[1] - 1)]
        self._lines: Any = self._array.view(f"V{8 * self._array.shape[1]}")[:, 0]  # are taken twice as fast

    def figures(self, rows: Ints, entries: Ints) -> tuple[Floats, list[int]]:
        """Figures `[addends, n, width]`, and the places of those that nobody asked for before.

        Args:
            rows: `[n]`.
            entries: Of the addends `[addends, n]`.
        """
        wanted = entries + len(self.entries) * rows
        figures = self._lines.take(wanted).view(np.float64).reshape(*wanted.shape, -1)
        unknown = np.isnan(figures[..., 0])
        return figures, sorted(set(wanted[unknown].tolist())) if unknown.any() else []

    def work_out(self, stacks: Sequence[Stack], row: int, entries: Sequence[int]) -> None:
        """Prices some entries of a row, on a GPU in each kind of step."""
        for entry in entries:
            price, choices, _ = self.entries[entry]
            self.keep(row * len(self.entries) + entry, price(stacks, choices))

    def keep(self, places: Any, figures: Any) -> None:
        """Knows the figures `[.., figures]` that stand in some place or places."""
        self._array[places, : np.shape(figures)[-1]] = figures


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


def _limits(rank: Rank, op: FusedOp, choice: int, broken: str | None) -> list[float]:
    """By how much an op's choice misses limits on heads, tokens and support."""
    if broken is None:
        return [0.0, 0.0, 0.0]
    allowed = rank.attention.heads if broken == "heads" else token_rows(rank, op, choice) if broken == "tokens" else 1
    excess = Violation("unsupported", rank.tp, allowed, "").excess
    return [excess * (broken == kind) for kind in ("heads", "tokens", "unsupported")]


_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break."""


class _Known(NamedTuple):
    """What is known of some strategies at some batches, `[.., n]`, whether or not their requests have room.

    Attributes:
        about: What degrees and batches alone decide, `[numbers, n]`.
        addends: Figures of all addends, `[addends, n, width]`.
    """

    about: Floats
    addends: Floats


@lru_cache(maxsize=2)
def _terms(workload: Workload, _declared: Hashable) -> _Terms:
    """What is known of a workload, as long as ops have the choices that are declared now."""
    return _Terms(workload)


class _Terms:
    """Addends of a workload's steps in tables by mesh and batch, and what degrees alone decide of pipelines."""

    def __init__(self, workload: Workload) -> None:
        choices = [dim.choices for dim in dims_of(workload)]
        self._workload, self._sum = workload, step_sum(workload)
        self._place, self._dims = np.full((len(choices), MOST_CHOICES), -1.0), MOST_CHOICES * np.arange(len(choices))
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
        self._entries = _Entries(addends, choices)
        self._tiers, racks = workload.hardware.tiers, workload.hardware.collectives.rack
        self._next = STAGE_PAIRS if racks else STAGE_PAIRS[:2]
        self._around = self._kinds * (_SENDS + 1 + len(self._next))
        each, width = self._entries.each, max(self._stored + _FIGURES, self._seconds, self._around, _BASE + len(groups))
        self._of_mesh = _Table([(addend.price, chosen, addend.shares) for addend, chosen in each], width)
        self._of_guard = _Table(
            [(addend.unsure or addend.price, chosen, True) for addend, chosen in each], self._stored
        )
        self._guarded = [at for at, addend in enumerate(addends) if addend.unsure]
        self._on_attention = [np.array([op.side == "attention" for op in group.layer.layer.ops]) for group in groups]
        row_bytes = self._of_mesh.row_bytes + self._factors.guarded * self._of_guard.row_bytes
        self._most = max(64, _TABLE_BYTES // row_bytes), _MOST_PIPELINES
        self._block = min(_BLOCK, *self._most)
        self._rules = engine_rules_of(workload)
        self._plans = self._rules.plans_of(workload) if self._rules else ()
        self._pipelines, self._meshes = dict[bytes, int](), dict[_Mesh, int]()
        self._of_degrees = np.empty((0, _DEGREES + 2 + len(self._plans) + _DEGREE_LIMITS))
        self._depths: dict[int, int] = {}
        self._stages: Floats = np.empty((0, 0, 0))

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
        ends = [stack[self._sum.end] for stack in stacks]
        of_kinds = [
            (*vocabulary_seconds(end, 1, *choices)[:3], *(stream_to_s(end, pair, *choices) for pair in self._next))
            for end in ends
        ]
        return [each_s for part in zip(*of_kinds, strict=True) for each_s in part]

    # --- rows ------------------------------------------------------------------------------------

    def _rows(self, degrees: Ints) -> Ints:
        """Rows `[n]` of pipelines; all begin anew where room is short."""
        keys, known = degrees.T.copy().view(f"V{degrees.itemsize * len(degrees)}")[:, 0].tolist(), self._pipelines
        rows = list(map(known.get, keys))
        if None in rows:
            new = {key: its for key, its in zip(keys, degrees.T.tolist(), strict=True) if key not in known}
            meshes = {its[:5] for its in map(tuple, new.values())} - self._meshes.keys()
            if len(self._meshes) + len(meshes) > self._most[0] or len(known) + len(new) > self._most[1]:
                self._meshes.clear()
                known.clear()
                new = dict(zip(keys, degrees.T.tolist(), strict=True))
            known.update(zip(new, self._begin([tuple(its) for its in new.values()]), strict=True))
            rows = list(map(known.get, keys))
        return np.array(rows)

    def _begin(self, keys: Sequence[_Mesh]) -> range:
        """Knows of pipelines what their degrees alone decide, in which rows."""
        start, meshes, numbers = len(self._pipelines), self._meshes, functools.cache(self._numbers)
        self._of_degrees = _with_room(self._of_degrees, start + len(keys))
        for key in keys:
            if key[:5] not in meshes:
                self._of_mesh.begin(len(meshes), key[:5])
                if self._factors.guarded:
                    self._of_guard.begin(len(meshes), key[:5])
                meshes[key[:5]] = len(meshes)
        rows = self._of_degrees[start : start + len(keys)]
        known = np.array([numbers(key[4], key[2]) for key in keys]).T
        state = _state_of(known[:-1], self._like).through(np.array([key[5] for key in keys]))
        for at, each in enumerate((*_numbers_of(state), known[-1])):
            rows[:, at] = each
        rows[:, _MESH:_DEGREES] = [(meshes[key[:5]], self._depth(key[5]), self._sends(key)) for key in keys]
        figures: Any = None
        if len(keys) >= _LEAST_MESHES and max(map(max, keys)) <= MOST_IN_LANES:
            columns = [np.array(column).view(Lanes) for column in zip(*keys, strict=True)]
            with suppress(*NO_LANES):
                figures = figures_in_lanes(self._degrees, *columns)
        rows[:, _DEGREES:] = [self._degrees(*key) for key in keys] if figures is None else figures
        return range(start, start + len(keys))

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

    def _sends(self, key: _Mesh) -> int:
        """Where the seconds stand that a stage takes to send its residual stream on."""
        tp, cp, dp, ep, _, pp = key
        if pp == 1:
            return _SENDS
        alone = on_attention_alone(self._workload, self._sum.end)
        pair = stage_pair(tp * cp if alone else -(-tp * cp * dp // ep), dp if alone else ep, pp, *self._tiers)
        return _SENDS + 1 + STAGE_PAIRS.index(pair)

    def _depth(self, pp: int) -> int:
        """Where numbers of a pipeline's stages stand; the last is repeated where one has fewer kinds than another."""
        if pp not in self._depths:
            self._depths[pp] = len(self._depths)
            kinds = [pipeline(self._workload, depth) for depth in self._depths]
            most = range(max(map(len, kinds)))
            stages = [each[min(at, len(each) - 1)] for at in most for each in kinds]
            numbers = [
                (*each.layers, *map(dict(each.meetings).get, self._pairs, itertools.repeat(0)), each.first, each.last)
                for each in stages
            ]
            self._stages = np.array(numbers, np.float64).T.reshape(-1, len(most), len(kinds))
        return self._depths[pp]

    def _looked_up(self, table: _Table, meshes: Ints, chosen: Ints) -> Floats:
        """Figures of a table `[addends, n, width]`; what nobody asked for before is worked out.

        Args:
            table: Of which addends.
            meshes: Its rows, `[n]`.
            chosen: Entries `[addends, n]`.
        """
        figures, unknown = table.figures(meshes, chosen)
        if unknown:
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
                tp, cp, dp, ep, batch = table.keys[row]
                loads = batching(self._workload, batch, dp).loads
                table.work_out([sides_of(self._workload, load, tp, cp, dp, ep) for load in loads], row, its)
            figures, _ = table.figures(meshes, chosen)
        return figures

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
                    figures = gpus.figures(price, choices)[lanes]
                else:
                    figures = gpus[lanes].figures(price, choices)
            except NO_LANES:  # what only a number can be asked
                table.alone.add(entry)
                continue
            table.keep(rows[at] * len(table.entries) + entry, figures)
            left[at] = False

    def blocks(self, columns: Strategies) -> list[_Block]:
        """Strategies that are added up together.

        Raises:
            StrategyError: One is no strategy.
        """
        dims, degrees = columns.dims, np.array([getattr(columns, name) for name in _DEGREE_COLUMNS])
        if dims.shape[1:] == self._dims.shape and dims.min() >= 0 and dims.max() < MOST_CHOICES:
            places = self._place.take((dims + self._dims).T)
            if places.min() >= 0 and degrees.min() >= 1:
                entries, most = self._entries.of(places), self._block
                if len(columns) <= most:
                    return [_Block(columns, degrees, entries)]
                parts = [slice(start, start + most) for start in range(0, len(columns), most)]
                return [_Block(columns[its], degrees[:, its], entries[:, its]) for its in parts]
        for strategy in columns:
            check_strategy(self._workload, strategy)
        raise AssertionError("no strategy is refused")

    # --- sums ------------------------------------------------------------------------------------

    def figures(self, columns: Strategies, degrees: Ints, entries: Ints) -> tuple[NDArray[Any], ...]:
        """The figures of `Evaluations`, in its order, of a block."""
        workload, pp, zeros = self._workload, columns.pp, np.zeros(len(columns))
        known = self._known(degrees, entries)
        about = known.about
        stages, base = self._stages_of(about), known.addends[-1].T.copy()
        stored = [known.addends[ops, :, self._stored : self._stored + _FIGURES].transpose(2, 0, 1) for ops in self._ops]
        stored = [each.copy() for each in stored]
        total_bytes, kv_bytes, needed = self._bytes(stored, Base(*base[:_BASE]), self._stage(stages), pp)
        allowed, most = room(workload, 0.0, 0.0)[1], about[_STATE]
        excess = [
            about[-_DEGREE_LIMITS:],
            *self._engine_excess(columns.dims, about),
            *self._choice_excess([each[3:] for each in stored], base[_BASE:] != 0),
        ]
        numbers = about[:_STATE]
        if phase_of(workload).mixes and ((needed > allowed).any() or (columns.batch > most).any()):
            running = running_requests(workload, columns.batch, most, kv_bytes, needed - allowed).astype(np.int64)
            if (fewer := np.flatnonzero(running < columns.batch)).size:  # the others wait
                fewer_run = degrees[:, fewer]
                fewer_run[4] = running[fewer]
                again = self._known(fewer_run, entries.take(fewer, axis=1))
                numbers[:, fewer] = again.about[:_STATE]
                known.addends[:, fewer] = again.addends
        seconds = pp * self._stages_s(known, stages).max(axis=0)
        state = _state_of(numbers, self._like)
        steps = state.steps(seconds[0], seconds[-1])
        tpot_s, ttft_s = zeros + steps.tpot_s, zeros + steps.ttft_s
        factors, share = self._factors, zeros
        surely_s = tpot_s, ttft_s
        if factors.guarded:
            share = zeros + steps.prompt_share
            surely_s = factors.surely_s(tpot_s, share), ttft_s * factors.first
        limits = allowed, most, workload.tpot_limit_s, workload.ttft_limit_s
        excess.append(_excess(np.array([needed, columns.batch, *surely_s], np.float64), limits))
        gpus = columns.tp * columns.dp * columns.cp * pp
        rate, missed = state.throughput(steps.step_s, gpus), _total(np.concatenate(excess))
        if factors.guarded and (kept := np.flatnonzero(missed == 0.0)).size:  # its own kernels may be off more
            longest = self._longest(about[_MESH, kept].astype(np.int64), entries[:, kept], known.addends[:, kept])
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

    def _known(self, degrees: Ints, entries: Ints) -> _Known:
        rows = self._rows(degrees)
        about = self._of_degrees.take(rows, axis=0).T.copy()
        return _Known(about, self._looked_up(self._of_mesh, about[_MESH].astype(np.int64), entries))

    def _stages_of(self, about: Floats) -> Floats:
        """Numbers of the stages of pipelines, `[numbers, stages, n]`."""
        which: Ints = about[_MESH + 1].astype(np.int64)
        return self._stages.take(which, axis=2)

    def _stage(self, numbers: Floats) -> Stage:
        """Stages with arrays, from the numbers of all."""
        groups = len(self._ops)
        meetings = tuple(zip(self._pairs, numbers[groups:-2], strict=True))
        return Stage(tuple(numbers[:groups]), meetings, *numbers[-2:])

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
        (ends,) = _by_kind(known.addends[-2:-1, :, : self._around], self._kinds)
        sent: Ints = known.about[_MESH + 2].astype(np.int64)
        around = list[Any]((*ends[:_SENDS], ends[sent, :, np.arange(len(sent))].T.copy()))
        met = list[Any](figures[self._tensors[-1].stop : -2, 0])
        if named:
            around, met = [named(("vocabulary",), each) for each in around], [named(("moves",), each) for each in met]
        return stage_s(stage, layers_s, dict(zip(self._pairs, met, strict=True)), VocabularySeconds(*around))

    def _stages_s(self, known: _Known, stages: Floats) -> Floats:
        """Seconds of each stage in each kind of step, `[stages, kinds, n]`."""
        return self._stage_s(known, self._stage(stages[:, :, None]))

    def step_seconds(self, columns: Strategies, degrees: Ints, entries: Ints) -> StepSeconds:
        """See `step_seconds`, of a block."""
        known, pp = self._known(degrees, entries), columns.pp
        stages = self._stages_of(known.about)
        slowest = self._stages_s(known, stages).argmax(axis=0), np.arange(len(pp))  # in each kind of step
        split = self._stage_s(known, self._stage(stages[:, *slowest]), _Split.of)
        state = _state_of(known.about[:_STATE], self._like)
        decode_s, mixed_s = (pp * split.each(operator.itemgetter(kind)) for kind in (0, -1))
        parts = state.steps(decode_s, mixed_s).step_s.parts
        kernels, collectives = (
            {op: each_s for (kind, *ops), each_s in parts.items() for op in ops if kind == field}
            for field in StepSeconds._fields[:2]
        )
        others = [np.zeros(len(pp)) + parts.get(name, 0.0) for name in (("moves",), ("vocabulary",), _Split.REST)]
        return StepSeconds(kernels, collectives, *others)

    def _bytes(self, stored: Sequence[Floats], base: Base, stages: Stage, pp: Ints) -> tuple[Floats, Floats, Floats]:
        """Bytes of the fullest stage, of its KV cache, and what it needs; in the last kind of step."""
        weights, kv = ([add_up(each[figure]) for each in stored] for figure in (0, 1))
        peak = functools.reduce(np.maximum, [each[2].max(axis=0) for each in stored])
        kinds = np.empty((4, len(stages.first), len(pp)))
        for each, of_kind in zip(kinds, stage_bytes(self._workload, stages, pp, weights, kv, peak, base), strict=True):
            each[:] = of_kind
        total = _rounded_once(kinds, ((kinds != np.floor(kinds)) | (kinds > _LARGEST)).any(axis=0))
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

    def _choice_excess(self, excess: Sequence[Floats], one_meshes: Flags) -> Iterator[Floats]:
        """What the limits on the choices are missed by, `[limits, n]` each side of each group.

        Args:
            excess: Of each group, `[limits, ops, n]`.
            one_meshes: Whether its sides are one, `[groups, n]`.
        """
        for broken, attention, one_mesh in zip(excess, self._on_attention, one_meshes, strict=False):
            if broken.any():
                left, right = (broken[:, side].max(axis=1, initial=0.0) for side in (attention, ~attention))
                yield np.where(one_mesh, np.maximum(left, right), left)
                yield np.where(one_mesh, 0.0, right)


def _by_kind(figures: Floats, kinds: int) -> Floats:
    """Figures `[addends, n, width]` by kind of step, `[addends, width // kinds, kinds, n]`."""
    addends, n, width = figures.shape
    parts = width // kinds
    return figures[..., : parts * kinds].transpose(0, 2, 1).copy().reshape(addends, parts, kinds, n)


_LARGEST = 2.0**51
"""Four whole numbers up to this one add up to a whole number."""


def _rounded_once(rows: Floats, unsure: Flags) -> Floats:
    """What `math.fsum` makes of each column of `[.., n]`: a plain sum but where that is unsure."""
    total: Floats = rows.sum(axis=0)
    if unsure.any():
        total[unsure] = list(map(math.fsum, rows[:, unsure].T.tolist()))
    return total


def _total(rows: Floats) -> Floats:
    """The same of rows most of whose values are 0: one value or two are rounded once."""
    return _rounded_once(rows, np.count_nonzero(rows, axis=0) > 2)


def _stated(latency_s: float, factors: Interval) -> tuple[float, Interval]:
    """A latency and its interval in seconds."""
    return latency_s, (factors[0] * latency_s, factors[1] * latency_s)


def _excess(needed: Floats, allowed: Sequence[Any]) -> Floats:
    """`Violation.excess` `[limits, n]` of what is needed and allowed where a limit is broken, else 0."""
    limits, found = np.empty_like(needed), np.zeros_like(needed)
    for row, its in zip(limits, allowed, strict=True):
        row[:] = its
    broken = needed > limits * _ROUNDING
    its, most = needed[broken], limits[broken]
    known, excess = (most > 0) & (its < math.inf), np.ones_like(its)
    excess[known] = log_of(its[known] / most[known])
    found[broken] = excess
    return found


_ROUNDING = np.array([1.0, 1.0, 1 + ROUNDING, 1 + ROUNDING])[:, None]
