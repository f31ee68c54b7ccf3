"""What each step of a replica takes, whatever is in it, looked up between steps that the step model has priced.

A step's kernels are those of three parts that do not touch each other: attention of the sequences that decode, by
their number and context; attention of the prompts, by their tokens and by the tokens that these see; all else, by the
tokens of both. So three tables of two coordinates give the seconds of any step, between cells that are priced when
they are first needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from sim.evaluation import Memory
from sim.ops.sizes import Load
from sim.prices.engine import BARE, EngineTimes
from sim.serving.phases import Pace, batching, engine_step_s
from sim.step.attention_expert_meshes import sides_of_strategy
from sim.step.stage import needed_and_allowed_bytes, price_step
from sim.strategy import Strategy
from sim.workload import Workload, with_vocabulary

_DOUBLINGS = 50
"""Up to which tables have cells: more tokens than any question may have."""
_USUAL_CONTEXT, _USUAL_PROMPT = 1024, 1024
"""Tokens at which the table of all else is made; attention's share there is taken off again."""


class Cells(NamedTuple):
    """A coordinate of a table: whole numbers up to one, then so many cells per doubling.

    >>> Cells(32, 4).around(5), Cells(32, 4).around(40), Cells(1, 1).around(37.5)
    ((5, 5), (38, 45), (32, 64))
    """

    exact: int
    per_doubling: int

    def around(self, value: float) -> tuple[int, int]:
        """The cells next to a value, one twice where it has its own."""
        if value <= self.exact:
            return math.floor(value), math.ceil(value)
        edges = _edges(*self)
        at = bisect_left(edges, value)
        return edges[at - (edges[at] > value)], edges[at]

    def between(self, value: float, priced: Callable[[int], float]) -> float:
        """Linear between the cells around a value."""
        low, high = self.around(value)
        at_low = priced(low)
        return at_low if low == high else at_low + (value - low) / (high - low) * (priced(high) - at_low)


@lru_cache(maxsize=16)
def _edges(exact: int, per_doubling: int) -> Sequence[int]:
    """Cells from the first whole number that has none of its own on."""
    return sorted({round(exact * 2 ** (step / per_doubling)) for step in range(_DOUBLINGS * per_doubling)})


# Linear in between, steps are within 1 % of the step model's. Kernels change at certain numbers of rows (tiles of 128),
# so that few rows have cells of their own.
_SEQUENCES, _CONTEXTS = Cells(256, 16), Cells(1, 4)
_TOKENS, _BESIDE, _LENGTHS, _RANKS = Cells(1, 16), Cells(1, 2), Cells(1, 4), Cells(1, 1)


class RankStep(NamedTuple):
    """What a step holds on one attention rank.

    Attributes:
        sequences: That decode.
        context_tokens: Of all of them together.
        prompt_tokens: Of prompts or their chunks that are computed.
        seen_tokens: Cached or new tokens that these attend to, added up over `prompt_tokens`.
    """

    sequences: int
    context_tokens: float
    prompt_tokens: int = 0
    seen_tokens: float = 0.0


IDLE = RankStep(0, 0.0)


@dataclass(eq=False)
class StepPrices:
    """Seconds of the steps of one replica, and the room of its KV cache.

    Attributes:
        workload: Model, machine and engine, whose lengths do not matter here.
        strategy: Of the replica; its batch does not matter.
    """

    workload: Workload
    strategy: Strategy
    _cells: dict[tuple[int, float, int, int, int], float] = field(
        default_factory=dict[tuple[int, float, int, int, int], float], repr=False
    )
    _lines: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict[tuple[int, int], tuple[float, float]], repr=False
    )
    _beside: dict[tuple[int, int, float], float] = field(
        default_factory=dict[tuple[int, int, float], float], repr=False
    )
    _prompts: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float], repr=False)

    def __post_init__(self) -> None:
        self.workload = with_vocabulary(self.workload, self.strategy.vocabulary)

    # --- seconds --------------------------------------------------------------------------------------

    def decode_line(self, sequences: int, context_tokens: float) -> tuple[float, float, float]:
        """A step that decodes alone, around a mean context: (seconds at context 0, seconds per token, last context).

        Args:
            sequences: Of the busiest rank.
            context_tokens: Of each, on average.

        Returns:
            The line that holds for contexts up to the last one, in kernels and collectives through all stages.
        """
        low, high = _CONTEXTS.around(max(1.0, context_tokens))
        if low == high:
            high = _CONTEXTS.around(low + 0.5)[1]
        return (*self._line(sequences, low, high), high)

    def _line(self, sequences: int, low: int, high: int) -> tuple[float, float]:
        found = self._lines.get((sequences, low))
        if found is None:
            at_low, at_high = (
                _SEQUENCES.between(sequences, lambda each, at=context: self._cell(each, at, 0, 1, 0))
                for context in (low, high)
            )
            slope = (at_high - at_low) / (high - low)
            found = self._lines[sequences, low] = at_low - slope * low, slope
        return found

    def step_s(self, busiest: RankStep, all_prompt_tokens: int | None = None) -> float:
        """Seconds of a step through all stages, kernels and collectives alone.

        Args:
            busiest: What the busiest attention rank has.
            all_prompt_tokens: Of prompts on all ranks; as many on each as on the busiest one if not given.
        """
        sequences, tokens = busiest.sequences, busiest.prompt_tokens
        context = busiest.context_tokens / sequences if sequences else 0.0
        if not tokens:
            at_zero, slope, _ = self.decode_line(sequences, context)
            return at_zero + slope * context
        dp = self.strategy.attention_dp
        ranks = dp if all_prompt_tokens is None else max(1.0, all_prompt_tokens / tokens)
        seconds = self._beside_s(sequences, tokens, ranks)
        # Prompts of n tokens from their first on see n * n / 2: equal ones with as many pairs stand for chunks.
        length = max(1.0, 2 * busiest.seen_tokens / tokens)
        seconds += self._prompts_s(tokens, length) - self._prompts_s(tokens, _USUAL_PROMPT)
        if sequences:
            at_zero, slope, _ = self.decode_line(sequences, context)
            usual_zero, usual_slope, _ = self.decode_line(sequences, _USUAL_CONTEXT)
            longer_s = at_zero + slope * context - usual_zero - usual_slope * _USUAL_CONTEXT
            seconds += self._times.prompt_factor * longer_s
        return seconds

    def _beside_s(self, sequences: int, tokens: int, ranks: float) -> float:
        """Prompts of the usual length on so many ranks, beside sequences of the usual context."""
        key = sequences, tokens, ranks  # few of them: chunks fill a step
        found = self._beside.get(key)
        if found is None:
            found = self._beside[key] = self._beside_between_s(*key)
        return found

    def _beside_between_s(self, sequences: int, tokens: int, ranks: float) -> float:
        rows = self.workload.queries

        def priced(all_rows: int, decoding: int, on: int) -> float:
            some = max(1, all_rows - decoding * rows)
            return self._cell(decoding, _USUAL_CONTEXT, some, _USUAL_PROMPT, min(on, self.strategy.attention_dp) * some)

        def at_rows(on: int, all_rows: int) -> float:
            most = (all_rows - 1) // rows  # a cell has some prompt tokens
            return _BESIDE.between(min(sequences, most), lambda decoding: priced(all_rows, min(decoding, most), on))

        return _RANKS.between(
            ranks, lambda on: _TOKENS.between(sequences * rows + tokens, lambda all_rows: at_rows(on, all_rows))
        )

    def _prompts_s(self, tokens: int, length: float) -> float:
        """Prompts alone, on every rank."""
        found = self._prompts.get((tokens, length))
        if found is None:
            found = self._prompts[tokens, length] = self._prompts_between_s(tokens, length)
        return found

    def _prompts_between_s(self, tokens: int, length: float) -> float:
        dp = self.strategy.attention_dp
        return _LENGTHS.between(
            tokens, lambda some: _LENGTHS.between(length, lambda each: self._cell(0, 1, some, each, some * dp))
        )

    def _cell(self, sequences: int, context: float, tokens: int, length: int, all_tokens: int) -> float:
        key = sequences, context, tokens, length, all_tokens
        found = self._cells.get(key)
        if found is None:
            found = self._cells[key] = self.priced_s(*key)
        return found

    def priced_s(self, sequences: int, context: float, tokens: int, length: int, all_tokens: int) -> float:
        """Seconds of a step by the step model itself; nothing to do takes no time.

        Args:
            sequences: That decode on each rank.
            context: Tokens that each of them has cached.
            tokens: Of prompts on the busiest rank.
            length: Of each prompt; a fraction of one stands for a chunk.
            all_tokens: Of prompts on all ranks.
        """
        if not sequences and not tokens:
            return 0.0
        strategy, load = self.strategy, self._load(sequences, context, tokens, length, all_tokens)
        stack = sides_of_strategy(self.workload, load, strategy)
        alone_s = strategy.pp * price_step(stack, strategy.pp, strategy.dims).stage.total_s
        return self._pace.kernels_s(self._times, alone_s, prompts=bool(tokens))

    @cached_property
    def _pace(self) -> Pace:
        ranks = self.strategy.attention_dp
        return batching(self.workload, ranks, ranks).through(self.strategy.pp).pace

    @property
    def _times(self) -> EngineTimes:
        return self.workload.engine.times if self.workload.engine else BARE

    def _load(self, sequences: int, context: float, tokens: int, length: int, all_tokens: int) -> Load:
        ranks = self.strategy.attention_dp
        prompts = (all_tokens / length, length, tokens / length) if tokens else (0.0, 1, None)
        return Load(sequences * ranks, context, context, *prompts, ranks, self.workload.queries)

    def engine_s(self, sequences: int) -> float:
        """The engine's own seconds of a step with so many sequences on the busiest rank."""
        return engine_step_s(self._times, sequences)

    # --- bytes ----------------------------------------------------------------------------------------

    def cache_room(self, most_prompt_tokens: int, usual_tokens: int) -> tuple[float, float]:
        """Room of an attention rank's KV cache, in tokens, and what each sequence takes beside its tokens.

        A sequence of n tokens takes n and so many more: a state of constant size counts as tokens. Where a window
        bounds what is kept, the line goes through a sequence of the usual length and one of half of it.

        Args:
            most_prompt_tokens: Of a step, whose activations need room.
            usual_tokens: Of a sequence.
        """
        strategy, workload = self.strategy, self.workload
        full = self._memory(self._load(1, usual_tokens, most_prompt_tokens, usual_tokens, most_prompt_tokens))
        half = self._memory(self._load(1, max(1, usual_tokens // 2), 0, 1, 0))
        none = Memory(full.weights, 0.0, full.activations, full.overhead)
        fixed, allowed = needed_and_allowed_bytes(workload, none)
        one, less = (
            needed_and_allowed_bytes(workload, Memory(0.0, each.kv_cache / strategy.pp, 0.0, 0.0))[0]
            for each in (full, half)
        )
        token_bytes = (one - less) / (usual_tokens - max(1, usual_tokens // 2)) if usual_tokens > 1 else one
        if token_bytes <= 0:  # a state of constant size alone: count sequences as tokens
            token_bytes = one / usual_tokens
        beside = max(0.0, one / token_bytes - usual_tokens)
        return max(0.0, (allowed - fixed) / strategy.pp / token_bytes), beside

    def _memory(self, load: Load) -> Memory:
        strategy = self.strategy
        return price_step(sides_of_strategy(self.workload, load, strategy), strategy.pp, strategy.dims).memory
