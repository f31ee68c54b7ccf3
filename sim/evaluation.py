"""The result of a simulation: figures, violations, and what stands behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sim.arrays import exp_of, log_of
from sim.json_object import JsonObject
from sim.prices.collectives import Collective
from sim.prices.priced import EXACT, Interval
from sim.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken limit: what was needed and what is allowed, in the unit the kind implies."""

    kind: Literal[
        "hbm",
        "tpot",
        "ttft",
        "sequences",
        "gpus",
        "layers",
        "heads",
        "experts",
        "tokens",
        "context",
        "meshes",
        "unsupported",
        "failed",
        "engine",
    ]
    needed: float
    allowed: float
    message: str

    @property
    def excess(self) -> float:
        """How far the limit is missed, > 0: log(needed / allowed), or 1 where that says nothing (no divisor)."""
        if 0 < self.allowed < self.needed < math.inf:
            return log_of(self.needed / self.allowed)
        return 1.0


def unlike_texts(needed: float, allowed: float, digits: int = 1) -> tuple[str, str]:
    """Two figures of a violation as text, with more digits where they would look alike.

    >>> unlike_texts(31.23, 30.0)
    ('31.2', '30.0')
    >>> unlike_texts(30.004, 30.0)
    ('30.004', '30.000')
    >>> unlike_texts(3.1, 0.01)
    ('3.10', '0.01')
    """
    for more in range(digits, 10):
        texts = f"{needed:,.{more}f}", f"{allowed:,.{more}f}"
        if texts[0] != texts[1] and (allowed == 0 or round(allowed, more) > 0):
            return texts
    return f"{needed:g}", f"{allowed:g}"


@dataclass(frozen=True, slots=True)
class OpBreakdown:
    """One fused op of one layer on the busiest GPU.

    Attributes:
        group: Name of the layers' group.
        choice: The strategy's choice; `label` names the dim it stands for ("none" for 2).
        placements_in: Placement over tp of each input, by tensor name, as text.
        placement_out: Placement over tp of the output, as text.
        collectives: Redistributions of its inputs and collectives inside the op.
        work_flops: Floating-point operations.
        traffic_bytes: HBM bytes read and written.
        compute_time_s: FLOPs at the median achieved rate.
        memory_time_s: Bytes at the median achieved bandwidth.
        kernel_time_s: By the fitted curve; without one the larger of both, or the launch floor.
        communication_time_s: Sum over `collectives`.
        bound: What the op's time is spent on: "compute", "memory", "launch" or "communication".
    """

    name: str
    choice: int
    label: str
    placements_in: Mapping[str, str]
    placement_out: str
    collectives: tuple[Collective, ...]
    work_flops: float
    traffic_bytes: float
    compute_time_s: float
    memory_time_s: float
    kernel_time_s: float
    communication_time_s: float
    bound: str
    group: str = "layers"

    @property
    def time_s(self) -> float:
        """Kernel and communication time; they do not overlap."""
        return self.kernel_time_s + self.communication_time_s


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """Where the slowest pipeline stage's time goes, seconds.

    Attributes:
        layers: It has.
        layer_s: Of one of them, on average where they differ.
        embedding_s, head_s: Of embedding and LM head, in whichever stages; `total_s` has those of this one.
        group_layers: Its layers of each group of the model.
        group_layer_s: Seconds of one layer of each.
        draft_s: Of the draft's tokens (speculative decoding); in `total_s` of the last stage.
    """

    layers: int
    layer_s: float
    embedding_s: float
    head_s: float
    send_recv_s: float
    total_s: float
    group_layers: tuple[int, ...] = ()
    group_layer_s: tuple[float, ...] = ()
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU of the fullest stage, by kind."""

    weights: float
    kv_cache: float
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return math.fsum((self.weights, self.kv_cache, self.activations, self.overhead))


class Explanation(NamedTuple):
    """The part of an `Evaluation` that a reader wants and a search does not."""

    ops: tuple[OpBreakdown, ...]
    expected_error: float
    extrapolated: tuple[str, ...]
    kernel_interval: Interval = EXACT
    tpot_interval_s: tuple[float, float] = (0.0, 0.0)
    ttft_interval_s: tuple[float, float] = (0.0, 0.0)
    interval_because: str = ""


@lru_cache(maxsize=64)
def _place(probability: float) -> float:
    """Of a quantile, in distances from the median to the end of a 90 % interval."""
    return NormalDist().inv_cdf(probability) / NormalDist().inv_cdf(0.95)


def quantile(probability: float, predicted: float, interval: Interval) -> float:
    """A quantile, where either side of the 90 % interval is log-normal: [assumed]."""
    if not predicted or probability == 0.5:
        return predicted
    place = _place(probability)
    bound = log_of(interval[1] / predicted) if place > 0 else -log_of(interval[0] / predicted)
    return predicted * exp_of(place * bound)


def probability_within(limit: float, predicted: float, interval: Interval) -> float:
    """The probability whose quantile is a limit: the inverse of `quantile`.

    >>> round(probability_within(quantile(0.8, 2.0, (1.5, 3.0)), 2.0, (1.5, 3.0)), 12)
    0.8
    """
    if predicted in (0.0, limit) or limit == math.inf:
        return 0.5 if predicted == limit else 1.0
    width = math.log(interval[1] / predicted) if limit > predicted else -math.log(interval[0] / predicted)
    distance = math.log(limit / predicted)
    return NormalDist().cdf(distance / width * NormalDist().inv_cdf(0.95)) if width else float(distance > 0)


@dataclass(frozen=True)
class Evaluation:
    """How fast a strategy would run, why, and whether it is allowed.

    The figures are given for infeasible strategies too; `violations` says what is broken. What `Explanation` names may
    be left out until someone reads it, compares the evaluation, pickles it or prints it: see `explained_by`.

    Attributes:
        tokens_per_s_per_gpu: Output tokens; in phase prefill those of prompts.
        tpot_s: Mean time per output token; 0 in phase prefill, which makes none.
        gpus: Of one replica.
        memory_bytes: Of the fullest GPU.
        stage: The step that decodes alone; in phase prefill the step.
        ttft_s: Mean time to the first token: the prompt's own steps, and the half step that it waits for the next to
            begin; 0 in phase decode, which computes no prompt. Queueing under random arrivals is not modelled.
        running: Requests of one microbatch that run at once: fewer than the batch where there is no room for all.
        prompt_stage: The step that carries prompts, or None in phase decode.
        engine_s: The engine's own time per step, in `tpot_s` and `ttft_s`; 0 on the bare machine, below it where the
            kernels of `stage` were measured to be faster in a step than alone.
        ops: Per fused op of one layer of `stage`, in the order of `Strategy.dims`; of several groups of layers one
            layer each, one after the other.
        expected_error: Mean relative error to expect of the time and so of the throughput: errors of its kernels
            and collectives on rows held out from their fit, by their share of the time, and of measured serving.
        extrapolated: What the figure rests on that no measurement covers, largest share of the time first.
        kernel_interval: Factors between which kernels and collectives put their own time in 90 % of cases.
        tpot_interval_s: Seconds (low, high) between which a measured run's time per token lies in 90 % of cases.
        ttft_interval_s: A range of the time to the first token, [assumed] as wide as of steps that are all prompts; no
            queue is in it.
        interval_because: What makes that wider than for a measured model under its engine; "" for nothing.
    """

    strategy: Strategy
    tokens_per_s_per_gpu: float
    tpot_s: float
    gpus: int
    memory_bytes: Memory
    violations: tuple[Violation, ...]
    stage: StageBreakdown
    ttft_s: float = 0.0
    running: int = 0
    prompt_stage: StageBreakdown | None = None
    engine_s: float = 0.0
    # Defaults come from factories: a default in the class would be found before an explanation that is yet to come.
    ops: tuple[OpBreakdown, ...] = field(default_factory=tuple[OpBreakdown, ...])
    expected_error: float = field(default_factory=float)
    extrapolated: tuple[str, ...] = field(default_factory=tuple[str, ...])
    kernel_interval: Interval = field(default_factory=lambda: EXACT)
    tpot_interval_s: tuple[float, float] = field(default_factory=lambda: (0.0, 0.0))
    ttft_interval_s: tuple[float, float] = field(default_factory=lambda: (0.0, 0.0))
    interval_because: str = field(default_factory=str)

    @property
    def feasible(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations

    @property
    def excess(self) -> float:
        """By how much limits are missed, all of them together, in factors of e; 0 if feasible."""
        return math.fsum(violation.excess for violation in self.violations)

    def tpot_at_s(self, probability: float) -> float:
        """Seconds per token that a measured run takes no longer than with that probability."""
        return quantile(probability, self.tpot_s, self.tpot_interval_s)

    def ttft_at_s(self, probability: float) -> float:
        """Seconds to the first token that a measured run takes no longer than with that probability."""
        return quantile(probability, self.ttft_s, self.ttft_interval_s)

    def tpot_within(self, limit_s: float) -> float:
        """Probability that a measured run takes no longer per token."""
        return probability_within(limit_s, self.tpot_s, self.tpot_interval_s)

    def ttft_within(self, limit_s: float) -> float:
        """Probability that a measured run takes no longer to the first token."""
        return probability_within(limit_s, self.ttft_s, self.ttft_interval_s)

    def group_ops(self, group: str) -> tuple[OpBreakdown, ...]:
        """The ops of one layer of a group, by its name."""
        return tuple(op for op in self.ops if op.group == group)

    @property
    def stage_ops(self) -> Iterator[tuple[int, OpBreakdown]]:
        """Each op, and how many layers of `stage` have it."""
        names = dict.fromkeys(op.group for op in self.ops)
        layers = dict(zip(names, self.stage.group_layers, strict=True))
        return ((layers[op.group], op) for op in self.ops)

    def breaking(self, violations: tuple[Violation, ...]) -> Evaluation:
        """The same figures and explanation, with limits that are broken."""
        evaluation = object.__new__(Evaluation)
        vars(evaluation).update(vars(self), violations=violations)
        return evaluation

    def yielding(self, tokens_per_s_per_gpu: float) -> Evaluation:
        """The same explanation and latencies, with another throughput."""
        evaluation = object.__new__(Evaluation)
        vars(evaluation).update(vars(self), tokens_per_s_per_gpu=tokens_per_s_per_gpu)
        return evaluation

    def explained_by(self, explain: Callable[[], Explanation]) -> Evaluation:
        """The same figures, with an explanation that is computed when it is first asked for.

        Args:
            explain: Pure: whoever asks, and whenever, gets the same.
        """
        evaluation = object.__new__(Evaluation)
        figures = {name: value for name, value in vars(self).items() if name not in Explanation._fields}
        vars(evaluation).update(figures, _explain=explain)
        return evaluation

    if not TYPE_CHECKING:  # a type checker would take it for any attribute at all

        def __getattr__(self, name: str) -> Any:
            if name not in Explanation._fields or "_explain" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            vars(self).update(vars(self)["_explain"]()._asdict())
            return vars(self)[name]

    def __getstate__(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in fields(self)}
