"""`evaluate_many`: the figures of many strategies at once, to the last bit those of `sim.simulate.evaluate`.

One strategy is a sum over terms that other strategies share: what an op costs under its choice, and what a tensor's
way from op to op costs under the choices at its ends. They are tabulated per mesh and batch as strategies first need
them, by the functions that `evaluate` asks; the rest is indexing and adding, for all strategies together and in the
order in which `evaluate` adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from sim.evaluation import Evaluation, Violation
from sim.layers.dims import dims_of
from sim.layers.ops import layer_ops
from sim.serving.phases import Pace, batching, most_sequences
from sim.simulate import OWN_SPACES, ROUNDING, degree_limits, evaluate
from sim.step.costs import head_activation_bytes, op_cost, token_rows
from sim.step.pipeline import Stage, pipeline
from sim.step.stage import end_kv_bytes, end_weight_bytes, hand_on_all_s, model_ends_s, room, stage_ends_s
from sim.step.two_meshes import ATTENTION_SIDE, Sides, sides_of
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
_EXACT_SUM = sum([1.0, 1e100, 1.0, -1e100]) == 2.0
"""Whether this Python's `sum` compensates what floats lose, as from 3.12 on."""


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
    alike = len(workload.model.groups) == 1
    if alike:
        terms = _terms(workload, tuple(op.choices for op in layer_ops(workload.model).ops))
        terms.check(columns)
    else:
        terms = None
        for strategy in columns:
            check_strategy(workload, strategy)
    if terms is None or len(columns) < FEW:
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


_COSTS = ("kernel_s", "collective_s", "weight", "kv", "activation", "rows", "heads", "unsupported")
"""Of an op under a choice: those of `OpCost`, the rows that cannot be shared out, and how far limits are missed."""
_KERNEL_S, _COLLECTIVE_S, _WEIGHT, _KV, _ACTIVATION, _ROWS, _HEADS, _UNSUPPORTED = range(len(_COSTS))
_PACE = tuple(each.name for each in fields(Pace))
_OF_ROW = (*_PACE, "tokens", "most", "stream", "head", "one_mesh", "attention_tp", "experts_tp")
_MOST_STAGES = 3
"""Kinds of pipeline stages of equal layers that can be the slowest or the fullest: middle, first and last."""
_LAYERS, _ENDS, _DRAFTS = (tuple(f"{name}{at}" for at in range(_MOST_STAGES)) for name in ("layers", "ends", "drafts"))
_OF_STAGE = ("row", *_LAYERS, *_ENDS, *_DRAFTS, *_OF_ROW)
_DEGREE_LIMITS = 6
"""The most limits that degrees alone can break, but for an engine's rules."""


class _Table:
    """A float64 array `[rows, ...]` that rows are added to, NaN at first."""

    def __init__(self, *shape: int) -> None:
        self.array: Floats = np.full((64, *shape), np.nan)

    def make_room(self, rows: int) -> None:
        """Grows so that so many rows fit."""
        if rows > len(self.array):
            more = np.full((max(rows, 2 * len(self.array)) - len(self.array), *self.array.shape[1:]), np.nan)
            self.array = np.concatenate([self.array, more])


@lru_cache(maxsize=8)
def _terms(workload: Workload, choices: tuple[tuple[int, ...], ...]) -> _Terms:
    """What is known of a workload, as long as its ops have these choices."""
    return _Terms(workload, choices)


class _Terms:
    """Terms that strategies add up. A row stands for a mesh and a batch, a stage for a row and a pipeline degree.

    An op's choices count as places in their list. An entry is a place of one op, or the places of the ops at the ends
    of one tensor; the entries of all ops lie side by side, as do those of all tensors.
    """

    def __init__(self, workload: Workload, choices: tuple[tuple[int, ...], ...]) -> None:
        self._workload, self._choices = workload, choices
        self._layer = layer_ops(workload.model)
        names = [op.name for op in self._layer.ops]
        self._place = np.full((len(names), MOST_CHOICES), -1, np.int64)
        for op, known in enumerate(choices):
            self._place[op, list(known)] = range(len(known))
        self._op_start = np.cumsum([0, *map(len, choices)])
        self._ends = [[names.index(name) for name in tensor.ends] for tensor in self._layer.tensors]
        sizes = [[len(choices[op]) for op in ends] for ends in self._ends]
        self._scale = np.zeros((len(names), len(sizes)), np.int64)  # of an op's place in a tensor's entry
        for tensor, (ends, each) in enumerate(zip(self._ends, sizes, strict=True)):
            self._scale[ends, tensor] = [math.prod(each[place + 1 :]) for place in range(len(each))]
        self._tensor_start = np.cumsum([0, *map(math.prod, sizes)])
        self._most_consumers = max(map(len, self._ends)) - 1
        self._incoming = self._incoming_moves()
        self._of_attention = np.array([name in ATTENTION_SIDE for name in names])
        self._last_op = names.index("combine")
        self._kinds = len(batching(workload, 1, 1).loads)
        self._forget()

    def _forget(self) -> None:
        """Starts with empty tables."""
        self._row: dict[tuple[int, ...], int] = {}
        self._stage: dict[tuple[int, ...], int] = {}
        self._sides: list[tuple[Sides, ...]] = []  # of each row, per kind of step
        self._row_and_pp: list[tuple[int, int]] = []  # of each stage
        self._costs = _Table(int(self._op_start[-1]), self._kinds, len(_COSTS))
        self._moves = _Table(int(self._tensor_start[-1]), self._kinds, self._most_consumers)
        self._model_ends = _Table(len(self._choices[self._last_op]), self._kinds, _MOST_STAGES + 1)
        self._about_row: list[tuple[float, ...]] = []
        self._about = _Table(len(_OF_STAGE))
        self._of_degrees = _Table(_DEGREE_LIMITS)

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
        if len(self._sides) + 2 * len(columns) > _MOST_ROWS:
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
        workload, about = self._workload, dict(zip(_OF_STAGE, self._about.array[stage].T, strict=True))
        row = about["row"].astype(np.int64)
        costs = _filled(self._costs, row, self._op_start[:-1] + places, self._cost)
        moves = _filled(self._moves, row, places @ self._scale + self._tensor_start[:-1], self._move)
        ends = _filled(self._model_ends, stage, places[:, [self._last_op]], self._model_end)[:, 0]
        seconds: list[Floats] = []
        for kind in range(self._kinds):
            own = moves[:, :, kind].reshape(len(row), -1)
            incoming = own[:, self._incoming[0]]
            for more in self._incoming[1:]:
                incoming = incoming + own[:, more]
            layer_s = _sum(costs[:, :, kind, _KERNEL_S] + (incoming + costs[:, :, kind, _COLLECTIVE_S]))
            *ends_each_s, send_recv_s = ends[:, kind].T
            stages_s = [
                about[n] * layer_s + at_ends_s + send_recv_s for n, at_ends_s in zip(_LAYERS, ends_each_s, strict=True)
            ]
            seconds.append(columns.pp * np.max(stages_s, axis=0))
        last = costs[:, :, -1]
        activations = about["stream"] + np.maximum(last[..., _ACTIVATION].max(-1), about["head"])
        overhead: Any = np.full(len(row), float(workload.hardware.overhead_bytes))
        if workload.engine is not None:
            overhead = np.maximum(0.0, workload.engine.memory.runtime_bytes - activations)
        layer_weights, layer_kv = _sum(last[..., _WEIGHT]), _sum(last[..., _KV])
        stages = [
            (about[layers] * layer_weights + about[ends], about[layers] * columns.pp * layer_kv + about[drafts])
            for layers, ends, drafts in self._different(about)
        ]
        totals = [_bytes_of(weights, kv, activations, overhead) for weights, kv in stages]
        rooms = [room(workload, total, kv) for total, (_, kv) in zip(totals, stages, strict=True)]
        fullest, allowed = np.argmax([needed for needed, _ in rooms], axis=0), rooms[0][1]
        total, kv_bytes, needed = (
            np.choose(fullest, each) for each in (totals, [kv for _, kv in stages], [needed for needed, _ in rooms])
        )
        pace = Pace(*(about[name] for name in _PACE))
        figures = (pace, about["tokens"], batch, about["most"], total, kv_bytes, needed, allowed)
        return _Steps(seconds[0], seconds[-1], *figures, self._choice_excess(costs[:, :, 0], about))

    @staticmethod
    def _different(about: Mapping[str, Floats]) -> list[tuple[str, str, str]]:
        """Names of what the kinds of stages have, but for those that repeat the first everywhere."""
        kinds = list(zip(_LAYERS, _ENDS, _DRAFTS, strict=True))
        more = [
            names
            for names in kinds[1:]
            if any((about[n] != about[o]).any() for n, o in zip(names, kinds[0], strict=True))
        ]
        return [kinds[0], *more]

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

    def _choice_excess(self, costs: Floats, about: Mapping[str, Floats]) -> list[Floats]:
        """What the choices' limits are missed by, of costs `[n, ops, figures]`."""
        one_mesh = about["one_mesh"] > 0  # both sides are one
        attention, experts = costs[:, self._of_attention], costs[:, ~self._of_attention]
        found: list[Floats] = []
        for figure in (_HEADS, _UNSUPPORTED):
            left, right = attention[..., figure].max(-1), experts[..., figure].max(-1)
            found += [np.where(one_mesh, np.maximum(left, right), left), np.where(one_mesh, 0.0, right)]
        right = experts[..., _ROWS].min(-1)
        left: Floats = np.minimum(attention[..., _ROWS].min(-1), np.where(one_mesh, right, np.inf))
        found.append(_excess(about["attention_tp"], left, left < np.inf))
        found.append(_excess(about["experts_tp"], right, (right < np.inf) & ~one_mesh))
        return found

    def _incoming_moves(self) -> list[Ints]:
        """Which moves `[ops]` reach each op first, second, ...: places in `[tensors, consumers]` laid flat.

        An op of fewer inputs gets moves that take no time: a tensor of fewer consumers than another has such.
        """
        flat = np.arange(len(self._ends) * self._most_consumers).reshape(len(self._ends), -1)
        reaching: list[list[int]] = [[] for _ in self._choices]
        none = 0
        for tensor, (_, *consumers) in enumerate(self._ends):
            for column, op in enumerate(consumers):
                reaching[op].append(int(flat[tensor, column]))
            if len(consumers) < self._most_consumers:
                none = int(flat[tensor, -1])
        most = max(map(len, reaching))
        return list(np.array([each + [none] * (most - len(each)) for each in reaching]).T)

    # --- terms -----------------------------------------------------------------------------------

    def _cost(self, row: int, entry: int) -> list[Sequence[float]]:
        at = int(np.searchsorted(self._op_start, entry, "right")) - 1
        op, choice = self._layer.ops[at], self._choices[at][entry - int(self._op_start[at])]
        found: list[Sequence[float]] = []
        for each in self._sides[row]:
            rank = each.rank_by_op[op.name]
            cost, heads, unsupported, rows = op_cost(rank, op, choice), 0.0, 0.0, math.inf
            if cost.broken == "tokens":
                rows = token_rows(rank, op, choice)
            elif cost.broken == "heads":
                heads = Violation("heads", rank.tp, rank.attention.heads, "").excess
            elif cost.broken == "unsupported":
                unsupported = Violation("unsupported", rank.tp, 1, "").excess
            found.append((*cost[:5], rows, heads, unsupported))
        return found

    def _move(self, row: int, entry: int) -> list[Sequence[float]]:
        at = int(np.searchsorted(self._tensor_start, entry, "right")) - 1
        code, ends = entry - int(self._tensor_start[at]), self._ends[at]
        choices = tuple(self._choices[op][code // int(self._scale[op, at]) % len(self._choices[op])] for op in ends)
        spare = (0.0,) * (self._most_consumers - len(ends) + 1)
        return [(*each.moves_s(self._layer.tensors[at], choices), *spare) for each in self._sides[row]]

    def _model_end(self, stage: int, entry: int) -> list[Sequence[float]]:
        row, pp = self._row_and_pp[stage]
        choice = self._choices[self._last_op][entry]
        found: list[Sequence[float]] = []
        for each in self._sides[row]:
            both = model_ends_s(each, choice)
            at_ends_s = [stage_ends_s(kind, *both) for kind in self._kinds_of_stages(pp)]
            found.append((*at_ends_s, hand_on_all_s(each.experts, pp, choice)))
        return found

    def _kinds_of_stages(self, pp: int) -> list[Stage]:
        """Those of a pipeline; the first fills up where there are fewer than the most."""
        found = pipeline(self._workload, pp)
        return [*found, *found[:1] * (_MOST_STAGES - len(found))]

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
        for table in (self._model_ends, self._about, self._of_degrees):
            table.make_room(stage + 1)
        row = self._row[mesh]
        end, kinds = self._sides[row][-1], self._kinds_of_stages(pp)
        layers = [kind.layers[0] for kind in kinds]
        held = [end_weight_bytes(end, kind) for kind in kinds]
        drafts = [pp * end_kv_bytes(end, kind) for kind in kinds]
        self._about.array[stage] = row, *layers, *held, *drafts, *self._about_row[row]
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
        workload, row, state = self._workload, len(self._sides), batching(self._workload, batch, dp)
        sides = tuple(sides_of(workload, load, tp, cp, dp, ep)[0] for load in state.loads)
        self._sides.append(sides)
        for table in (self._costs, self._moves):
            table.make_room(row + 1)
        first, last = sides[0], sides[-1]
        pace = tuple(getattr(state.pace, name) for name in _PACE)
        held = (last.stream_bytes(), head_activation_bytes(last.experts))
        mesh = (len(first.ranks) == 1, first.attention.tp, first.experts.tp)
        self._about_row.append((*pace, state.tokens, most_sequences(workload, dp), *held, *mesh))
        return row


def _bytes_of(*kinds: Floats) -> Floats:
    """Bytes of all kinds together, as `Memory.total` adds them."""
    held = zip(*(kind.tolist() for kind in kinds), strict=True)
    return np.fromiter(map(math.fsum, held), np.float64, len(kinds[0]))


def _filled(table: _Table, row: Ints, entries: Ints, term: Callable[[int, int], Sequence[Sequence[float]]]) -> Floats:
    """Entries `[n, m]` of rows `[n]`, `[n, m, kinds, figures]`; those not known yet are worked out by `term`."""
    array = table.array
    flat = array.reshape(-1, *array.shape[2:])
    places = row[:, None] * array.shape[1] + entries
    picked: Floats = np.take(flat, places, axis=0)
    unknown = np.isnan(picked[..., 0, 0])
    if not unknown.any():
        return picked
    for place in np.unique(places[unknown]).tolist():
        for kind, figures in enumerate(term(*divmod(place, array.shape[1]))):
            flat[place, kind] = figures
    return np.take(flat, places, axis=0)


def _running(workload: Workload, batch: Ints, steps: _Steps) -> Ints:
    """Requests that run at once where not all fit: see `sim.simulate.steady_state`."""
    share = workload.engine.memory.share if workload.engine and workload.engine.memory.of == "free" else 1.0
    kv_needed, missing = steps.kv_bytes / share, steps.needed_bytes - steps.allowed_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        fit = np.where(kv_needed > missing, np.floor(batch * (1 - missing / kv_needed)), 1)
    fit = np.where(missing > 0, fit, batch)
    return np.maximum(1, np.minimum(fit, steps.most)).astype(np.int64)


def _sum(rows: Floats) -> Floats:
    """What Python's `sum` makes of each row `[n, m]`."""
    if not _EXACT_SUM:
        return np.add.accumulate(rows, axis=1)[:, -1]
    total: Floats = np.zeros(len(rows))
    lost: Floats = np.zeros(len(rows))
    for column in rows.T:
        more: Floats = total + column
        larger, smaller = _by_size(total, column)
        lost += (larger - more) + smaller
        total = more
    return total + lost


def _by_size(some: Floats, others: Floats) -> tuple[Floats, Floats]:
    larger: Flags = np.abs(some) >= np.abs(others)
    return np.where(larger, some, others), np.where(larger, others, some)


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
