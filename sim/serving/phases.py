"""From steps to service: what is in the steps of each phase, and the latencies and rates that follow from their times.

decode: every step decodes all sequences once, by one token or, with speculative decoding, by more.
serve: each of the running sequences is replaced once in the steps of its answer, so that some steps also carry prompts,
and a request waits for those of the others. Attention groups replace theirs independently, and all wait for whichever
has a prompt; where prompts wait for each other, several groups have theirs in the same step. prefill: a step computes a
batch of prompts. Requests of a workload are equal, and the number in flight is constant: queueing under random arrivals
is not modelled. Formulas take floats or arrays: a search adds up one strategy, the exact optimum many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from sim.near_names import did_you_mean
from sim.ops.sizes import Load
from sim.prices.engine import BARE, EngineTimes
from sim.serving.pipelines import PROMPTS_FURTHER, TOKENS_FURTHER, stall_factor
from sim.serving.prompts import PromptMeeting, mixed_steps, prompt_meeting
from sim.workload import PhaseName, Workload

PoolRole = Literal["prefill", "decode"]
Tokens = TypeVar("Tokens", int, float)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a steady state's steps carry prompts. Fields are numbers, or arrays of as many steady states.

    Attributes:
        mixed_share: Share of the steps that carry prompts.
        others_share: Of those prompts, the share that are another request's than a given one's.
        prompt_steps: Steps that a prompt takes: one, or one per chunk.
        sequences: Sequences that run at once on an attention rank.
        gained: Tokens that each of them gains per step.
        waits: Steps that a prompt waits for those of other attention groups, on average.
        spread: Of the number of prompts in a step; see `stall_factor`.
        prompt_tokens: Share of a mixed step's tokens that are prompts', where steps have more or fewer of them; else 0.
        stages: Of the pipeline; a step takes the engine's own time on each.
        stall: Times its own seconds that a step with prompts holds up a pipeline, where all steps have some.
        further: Share of its kernels' seconds by which each stage but one lengthens a step.
    """

    mixed_share: Any
    others_share: Any
    prompt_steps: Any
    sequences: Any
    gained: Any = 1.0
    waits: Any = 0.0
    spread: Any = 0.0
    prompt_tokens: Any = 0.0
    stages: Any = 1
    stall: Any = 1.0
    further: Any = 0.0

    @property
    def drag(self) -> Any:
        """Times their own seconds that kernels and collectives take in the pipeline."""
        return 1 + self.further * (self.stages - 1)

    def through(self, stages: Any) -> Pace:
        """The same in a pipeline, whose microbatches wait for each other's prompts.

        A round of steps is one without prompts, or one as long as with those of the busiest microbatch.
        """
        if isinstance(stages, int) and stages == 1:
            return self
        if isinstance(self.mixed_share, float) and not self.mixed_share:  # no prompts
            return replace(self, stages=stages)
        factor = stall_factor(stages, self.spread)
        delayed = self.mixed_share * factor
        share, stall = np.minimum(1.0, delayed), 1 + np.maximum(0.0, delayed - 1) * self.prompt_tokens
        others = 1 - (1 - self.others_share) * np.maximum(self.mixed_share, 1 / factor)  # its own are as many
        if isinstance(stages, int):
            share, others, stall = float(share), float(others), float(stall)
        return replace(self, mixed_share=share, others_share=others, stages=stages, stall=stall)

    def seen(self, times: EngineTimes) -> Any:
        """Share of a request's tokens whose step carries another's prompt, as far as the time per token shows it."""
        return self.mixed_share * self.others_share * times.prefill_share

    def kernels_s(self, times: EngineTimes, alone_s: Any, *, prompts: bool = False) -> Any:
        """What kernels and collectives take in a step that may carry prompts, given what they took alone."""
        return self.drag * in_step_s(times, alone_s, prompts=prompts)

    def engine_s(self, times: EngineTimes) -> Any:
        """The engine's own seconds per step, which no stage spends on another microbatch.

        [assumed] of all: SGLang and TensorRT-LLM switch their overlap with the GPU's work off in pipelines.
        """
        return self.stages * engine_step_s(times, self.sequences)


class PacedSteps:
    """Steps of a steady state, with and without prompts: latencies, each worked out once.

    Args:
        pace: How often which is run.
        times: The engine's own.
        decode_s: Of a step that decodes alone: its kernels and collectives, through all stages.
        mixed_s: Of one that also carries prompts.
        kinds: Whether any decode, and whether any carry prompts.
    """

    def __init__(
        self, pace: Pace, times: EngineTimes, decode_s: Any, mixed_s: Any, kinds: tuple[bool, bool] = (True, True)
    ) -> None:
        drag, prompts_s = pace.drag, in_step_s(times, mixed_s, prompts=True)
        self._pace, self._seen, self.engine_s = pace, pace.seen(times), pace.engine_s(times)
        self._decodes, self._prefills = kinds
        self._decode_s, self._prompts_s = drag * in_step_s(times, decode_s), drag * prompts_s
        self._mixed_s = pace.stall * drag * prompts_s  # what it takes for all microbatches

    @cached_property
    def tpot_s(self) -> Any:
        """Mean seconds per output token after the first; 0 where none is made."""
        if not self._decodes:
            return 0.0
        seen = self._seen
        return ((1 - seen) * self._decode_s + seen * self._mixed_s + self.engine_s) / self._pace.gained

    @cached_property
    def step_s(self) -> Any:
        """Mean seconds of a step, over those with and without prompts."""
        share = self._pace.mixed_share
        return (1 - share) * self._decode_s + share * self._mixed_s + self.engine_s

    @cached_property
    def ttft_s(self) -> Any:
        """Mean seconds to the first token: half a step until the next begins, those it waits, the prompt's own.

        0 where no prompt is computed.
        """
        if not self._prefills:
            return 0.0
        own_s = self._pace.prompt_steps * (self._prompts_s + self.engine_s)
        return self.step_s / 2 + self.step_s * self._pace.waits + own_s

    @cached_property
    def prompt_share(self) -> Any:
        """Share of the time per output token by which other requests' prompts lengthen it, in [0, 1); 1 without one."""
        if not self._decodes:
            return 1.0
        return np.maximum(0.0, 1 - (self._decode_s + self.engine_s) / self._pace.gained / self.tpot_s)


@dataclass(frozen=True, slots=True)
class Batching:
    """A steady state.

    Attributes:
        decode: The step that decodes alone; None where none does.
        mixed: The step that carries prompts; None where none does.
        pace: How often which is run.
        times: The engine's own.
        in_flight: Sequences (prompts, in phase prefill) of one microbatch.
        tokens: Tokens that a microbatch yields per step: those that sequences gain which do not wait for other groups'
            prompts, or those of its prompts.
    """

    decode: Load | None
    mixed: Load | None
    pace: Pace
    times: EngineTimes
    in_flight: int
    tokens: float

    @property
    def loads(self) -> tuple[Load, ...]:
        """What is in the one kind of step, or in both: decode first."""
        return tuple(load for load in (self.decode, self.mixed) if load is not None)

    @property
    def at_least(self) -> Batching:
        """The same without what a larger batch may have less of: waiting for the prompts of others.

        And without the spread of many prompts. All else grows with the batch, latencies of the same steps too.
        """
        pace = self.pace
        # A request's own prompt comes more often where none waits.
        own = (1 - pace.others_share) * self.in_flight * pace.gained / self.tokens
        return replace(self, pace=replace(pace, waits=0.0, prompt_tokens=0.0, others_share=1 - own))

    def through(self, stages: Any) -> Batching:
        """The same in a pipeline of so many stages, or of arrays of them."""
        return replace(self, pace=self.pace.through(stages))

    def steps(self, decode_s: Any, mixed_s: Any) -> PacedSteps:
        """What its steps come to, given kernels and collectives of both kinds through all stages."""
        return PacedSteps(self.pace, self.times, decode_s, mixed_s, (self.decode is not None, self.mixed is not None))

    def lines(self) -> Iterator[StepLine]:
        """Mean seconds of a step, per output token and to the first one, as lines over the seconds of the steps."""
        found = [self.steps(*each) for each in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))]
        for each in zip(*[(steps.step_s, steps.tpot_s, steps.ttft_s) for steps in found], strict=True):
            constant_s, decode_s, mixed_s = each
            yield StepLine(constant_s, decode_s - constant_s, mixed_s - constant_s)

    def throughput(self, step_s: Any, gpus: Any) -> Any:
        """Tokens per second and GPU of a replica of so many, whose mean step takes so long."""
        return throughput(self.tokens, self.pace.stages, step_s, gpus)

    def engine_s(self, decode_s: Any, mixed_s: Any) -> Any:
        """What the first kind of step takes beside its kernels alone; below 0 where these are faster in a step."""
        first_s = decode_s if self.decode else mixed_s
        longer_s = self.pace.kernels_s(self.times, first_s, prompts=not self.decode)
        return self.pace.engine_s(self.times) + longer_s - first_s


def throughput(tokens: Any, stages: Any, step_s: Any, gpus: Any) -> Any:
    """Tokens per second and GPU of a pipeline that has a microbatch on each stage.

    Args:
        tokens: That each yields per step.
        stages: Of the pipeline.
        step_s: Mean seconds of a step.
        gpus: Of the replica.
    """
    return tokens * stages / (step_s * gpus)


class StepLine(NamedTuple):
    """A latency as a line over the seconds of the steps.

    Attributes:
        constant_s: Where these take no time.
        decode, mixed: How often those of each kind of step count.
    """

    constant_s: Any
    decode: Any
    mixed: Any


def in_step_s(times: EngineTimes, kernels_s: Any, *, prompts: bool = False) -> Any:
    """What kernels and collectives take in an engine's step, which may carry prompts, given what they took alone."""
    return times.kernel_factor * times.prompt_factor * kernels_s if prompts else times.kernel_factor * kernels_s


def engine_step_s(times: EngineTimes, sequences: Any) -> Any:
    """The engine's own seconds of a step on one stage, with so many sequences on the busiest rank."""
    return times.step_s + times.sequence_s * sequences


# --- phases -------------------------------------------------------------------------------------------


def _decoding(workload: Workload, batch: int, dp: int) -> Batching:
    context, drafted = workload.context_tokens, workload.queries - 1
    load = Load(batch, context, context + drafted, attention_groups=dp, queries=workload.queries)
    gained = workload.tokens_per_step
    pace = Pace(0.0, 0.0, 0, math.ceil(batch / dp), gained, further=_further(workload, TOKENS_FURTHER))
    return Batching(load, None, pace, _times(workload), batch, batch * gained)


def _prefilling(workload: Workload, batch: int, dp: int) -> Batching:
    isl = workload.prompt_tokens
    load = Load(0, 1, isl, batch, isl, attention_groups=dp)
    pace = Pace(1.0, 1.0, 1, math.ceil(batch / dp), further=_further(workload, PROMPTS_FURTHER))
    return Batching(None, load, pace, _times(workload), batch, batch * isl)


def _serving(workload: Workload, batch: int, dp: int) -> Batching:
    steps = workload.output_tokens / workload.tokens_per_step
    return _continuous(workload, batch, dp, prompt_meeting(workload.prompt_wait_steps, batch, dp, steps))


def _at_best(workload: Workload, batch: int, dp: int) -> Batching:
    """Serving as random arrivals may have it at best: prompts of all attention groups meet, and none stalls a pipeline.

    What is replayed may come near it, as where all answers are equally long and groups stay in step, and no nearer.
    """
    found = _continuous(workload, batch, dp, PromptMeeting(min(batch, dp), 0.0, 1.0))
    return replace(found, pace=replace(found.pace, spread=0.0, prompt_tokens=0.0))


def _continuous(workload: Workload, batch: int, dp: int, met: PromptMeeting) -> Batching:
    engine, isl, osl = workload.engine, workload.prompt_tokens, workload.output_tokens
    gained, drafted = workload.tokens_per_step, workload.queries - 1
    context = isl + osl / 2
    reserved = engine is not None and engine.memory.reserves_output
    cached = (isl + osl if reserved else context) + drafted
    decode = Load(batch, context, cached, attention_groups=dp, queries=workload.queries)
    chunks = 1 if workload.chunk_tokens is None else math.ceil(isl / workload.chunk_tokens)
    groups = min(batch, dp)
    tokens = batch * gained * met.running_share
    with_prompts = mixed_steps(tokens / osl, chunks, groups, met.prompts)
    mixed = decode._replace(
        prompts=with_prompts.prompts, prompt_tokens=isl, busiest_prompts=with_prompts.busiest_prompts
    )
    beside = min(groups, tokens / osl * chunks / with_prompts.share)  # a prompt's steps are those of so many
    # Whole prompts come at random; a chunk fills its step, so that steps with one are alike.
    whole = chunks == 1
    spread = min(groups, met.prompts) * osl / tokens if whole else 1 / with_prompts.share - 1
    pace = Pace(
        with_prompts.share,
        1 - beside / batch,
        chunks,
        math.ceil(batch / dp),
        gained,
        met.waits,
        spread,
        isl / (isl + osl) if whole else 0.0,
        further=_further(workload, TOKENS_FURTHER),
    )
    return Batching(decode, mixed, pace, _times(workload), batch, tokens)


def _times(workload: Workload) -> EngineTimes:
    return workload.engine.times if workload.engine else BARE


def _further(workload: Workload, share: float) -> float:
    """Only engines hand microbatches over; a bare machine's pipeline is its kernels and collectives."""
    return share if workload.engine else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """What a deployment does, and all that follows from it: whoever works on phases asks here and names none.

    Attributes:
        name: As files and options have it.
        summary: What runs, in words.
        steady_state: Of a workload, a batch and attention ranks: see `batching`.
        decodes: Whether steps make tokens of answers, so that there is a time per output token.
        prefills: Whether steps compute prompts, so that there is a time to the first token.
        replayed: Whether strategies are worth what a replay of random arrivals lets them carry, of which the steady
            state is the bound: see `sim.replay.goodput`.
    """

    name: PhaseName
    summary: str
    steady_state: Callable[[Workload, int, int], Batching]
    decodes: bool
    prefills: bool
    replayed: bool = False

    @property
    def mixes(self) -> bool:
        """Whether prompts meet others' tokens: no pool beside another, and requests wait where not all have room."""
        return self.decodes and self.prefills

    @property
    def pool(self) -> PoolRole | None:
        """Which of the two pools of a disaggregated deployment it is; None where it is a whole one."""
        return None if self.mixes else "decode" if self.decodes else "prefill"

    def counted_tokens(self, prompt_tokens: Tokens, output_tokens: Tokens) -> Tokens:
        """Tokens of a request that throughput counts."""
        return output_tokens if self.decodes else prompt_tokens


DECODE = Phase("decode", "a pool that only decodes", _decoding, decodes=True, prefills=False)
SERVE = Phase("serve", "continuous batching of prompts and decoding", _serving, decodes=True, prefills=True)
PREFILL = Phase("prefill", "a pool that only computes prompts", _prefilling, decodes=False, prefills=True)
TRAFFIC = Phase(
    "traffic",
    "serve under random arrivals, judged by goodput within percentile SLOs",
    _at_best,
    decodes=True,
    prefills=True,
    replayed=True,
)
_PHASES = {phase.name: phase for phase in (DECODE, SERVE, PREFILL, TRAFFIC)}
_SHIPPED = tuple(_PHASES)


class UnknownPhase(ValueError):
    """No phase has that name; the message suggests one."""


def register_phase(phase: Phase) -> None:
    """Adds a phase; its name is then good for files and options.

    Raises:
        ValueError: The name is taken, or its steps do nothing.
    """
    if phase.name in _PHASES:
        raise ValueError(f"there is a phase {phase.name!r} already: give yours another name")
    if not (phase.decodes or phase.prefills):
        raise ValueError(f"phase {phase.name!r} neither decodes nor computes prompts: say which of them its steps do")
    _PHASES[phase.name] = phase


def withdraw_phase(name: PhaseName) -> None:
    """Takes a registered phase out again, as a test does with its own.

    Raises:
        ValueError: It is a shipped one, or there is none.
    """
    if name in _SHIPPED or name not in _PHASES:
        raise ValueError(f"expected a phase that was registered, got {name!r}")
    del _PHASES[name]


def phases() -> tuple[Phase, ...]:
    """All of them, shipped ones first."""
    return tuple(_PHASES.values())


def phase_named(name: PhaseName) -> Phase:
    """The phase of that name.

    Raises:
        UnknownPhase: There is none.
    """
    if name not in _PHASES:
        raise UnknownPhase(f"unknown phase {name!r}: {did_you_mean(name, _PHASES)}")
    return _PHASES[name]


def phase_of(workload: Workload) -> Phase:
    """The phase that a workload is in.

    >>> from sim.config.catalog import load_workload
    >>> phase_of(load_workload("gpt_moe_1_2t_16k")).prefills
    False
    """
    return phase_named(workload.phase)


def batching(workload: Workload, batch: int, dp: int) -> Batching:
    """The steady state of a batch on `dp` attention ranks.

    Args:
        workload: Its phase, traffic and engine.
        batch: Requests of one microbatch over all attention ranks.
        dp: Attention ranks.
    """
    return phase_of(workload).steady_state(workload, batch, dp)


def charged_prompt_tokens(workload: Workload, batch: int, dp: int) -> int:
    """Tokens of prompts in a step of an attention rank, as they were charged: whole prompts, or a chunk; 0 if none.

    Args:
        workload: Its phase, traffic and chunk.
        batch: Requests of one microbatch over all attention ranks.
        dp: Attention ranks.
    """
    mixed = batching(workload, batch, dp).mixed
    if mixed is None:
        return 0
    if phase_of(workload).mixes and workload.chunk_tokens:
        return workload.chunk_tokens
    return math.ceil(mixed.of_group(dp).prompts) * workload.prompt_tokens


def running_sequences(workload: Workload, batch: int, dp: int) -> int:
    """Requests of one microbatch that an attention rank runs at once: its part of them, or the scheduler's most."""
    return max(1, int(min(-(-batch // dp), most_sequences(workload, dp) / dp)))


def step_tokens(workload: Workload, batch: int, dp: int, stages: int) -> int:
    """Tokens for which a step of an attention rank has room: prompts as charged, beside all requests that run.

    Args:
        workload: Its phase, traffic, chunk and drafts.
        batch: Requests of one microbatch over all attention ranks.
        dp: Attention ranks.
        stages: Of the pipeline; its microbatches share one scheduler.
    """
    running = running_sequences(workload, batch, dp) * stages * workload.queries if phase_of(workload).decodes else 0
    return running + charged_prompt_tokens(workload, batch, dp)


def most_sent_requests(workload: Workload) -> float:
    """Requests of an attention rank whose tokens the buffers of DeepEP's kernels for decoding hold, if they are used.

    Whatever ep is: a workload whose tokens are sent to their experts is one of expert parallelism.
    """
    engine, sends = workload.engine, workload.model.is_moe and workload.expert_exchange == "all_to_all"
    most = engine.memory.most_sent_tokens if engine else None
    if most is None or not sends or workload.deepep_mode == "normal":
        return math.inf
    return max(1, most // workload.queries)


def most_sequences(workload: Workload, dp: int) -> float:
    """Requests of one microbatch that an engine's scheduler lets run at once; the rest wait."""
    most, phase = math.inf, phase_of(workload)
    if workload.engine is not None and phase.decodes:
        most = min(workload.engine.memory.max_sequences, most_sent_requests(workload)) * dp
    if phase.mixes and workload.chunk_tokens is not None:
        # A step has room for so many prompt tokens; more sequences than they replace cannot keep running.
        replaced = workload.prompt_tokens * workload.tokens_per_step
        most = min(most, max(1, workload.chunk_tokens * dp * workload.output_tokens // replaced))
    return most
