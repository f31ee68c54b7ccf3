"""What may be measured: strategies by the simulator's exact ranking, and what each one's time is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sim.arrays import Floats
from sim.evaluation import Evaluation
from sim.optimum.exact_search import best_of_degrees
from sim.optimum.spaces import Space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import EVEN_ODDS, Workload

FARTHEST = 3.0
"""[assumed] Factor by which a machine may be faster or slower than the simulator: measured serving runs lie within a
third of its figures, one in a thousand apart; a machine that nobody measured may lie farther off."""
WITHIN = 2 * math.log(FARTHEST)
"""What lies farther below the best cannot be the best: it would have to be faster, and the best slower, by more."""
LATE = math.log(FARTHEST)
"""The same of a latency beyond its SLO, which is one strategy's alone."""
MOST = 400
"""[assumed] Candidates that are kept, best first: all that one cares to choose among, in half a second a choice."""
_LATENCIES = ("tpot", "ttft")
_Z90 = 1.6449
"""Standard deviations to either side that hold 90 % of a normal distribution."""
_KERNELS = {
    "attention": "attention",
    "qkv_proj": "gemm",
    "o_proj": "gemm",
    "ffn1": "ffn",
    "ffn2": "ffn",
    "router": "ffn",
    "dispatch": "ffn",
    "combine": "ffn",
    "activation": "ffn",
}
"""Which term of the time an op's kernels belong to; norms and residual adds are small."""
TERMS: tuple[str, ...] = (
    "gemm",
    "attention",
    "ffn",
    "small",
    "all_to_all",
    "inside",
    "across",
    "vocabulary_layers",
    "prompts",
    "engine",
)
"""Parts of a time per token that may err each by a factor of its own. `inside` and `across` are collectives in a node
and over nodes, `ends` embedding, LM head and hand-over, `prompts` the steps that carry other requests' prompts."""


@dataclass(frozen=True)
class Candidates:
    """Strategies of one workload, best first by the simulator.

    Attributes:
        workload: What is served; its SLOs decide.
        evaluations: Of each, all limits but those of latency kept.
        left_out: Strategies that have room and were not taken: too slow by far.
    """

    workload: Workload
    evaluations: tuple[Evaluation, ...]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.evaluations)

    @cached_property
    def log_rate(self) -> Floats:
        """[n] log tokens/s/GPU."""
        return np.log([evaluation.tokens_per_s_per_gpu for evaluation in self.evaluations])

    @cached_property
    def log_tpot(self) -> Floats:
        """[n] log seconds per output token; of a step that computes prompts in phase prefill."""
        return np.log([_step_s(evaluation) for evaluation in self.evaluations])

    @cached_property
    def log_ttft(self) -> Floats:
        """[n] log seconds to the first token; -inf in phase decode."""
        with np.errstate(divide="ignore"):
            return np.log([evaluation.ttft_s for evaluation in self.evaluations])

    @cached_property
    def stated_sd(self) -> Floats:
        """[n] standard deviation of log time by the simulator's own 90 % interval."""
        return np.array([_sd(evaluation) for evaluation in self.evaluations])

    @cached_property
    def shares(self) -> Floats:
        """[n, terms] share of the time of each of `TERMS`."""
        rows = [term_shares(self.workload, evaluation) for evaluation in self.evaluations]
        return np.array([[row[name] for name in TERMS] for row in rows])

    @cached_property
    def places(self) -> Floats:
        """[n, 6] where a strategy lies: logarithms to base 2 of its degrees and of its requests per attention rank."""
        return np.array(
            [
                [math.log2(n) for n in (s.tp, s.ep, s.pp, s.cp, s.attention_dp, s.batch / s.attention_dp)]
                for s in self.strategies
            ]
        )

    @property
    def strategies(self) -> list[Strategy]:
        """[n] the strategies."""
        return [evaluation.strategy for evaluation in self.evaluations]


def candidates_of(space: Space, progress: Callable[[int, int], None] | None = None) -> Candidates:
    """The exact best of each tuple of degrees and batch of a space, ranked, as far down as may matter.

    Strategies that miss a latency SLO by less than `LATE` are among them: a machine may be faster than the simulator.
    Latencies count as predicted, since the machine will say what they are.

    Args:
        space: Whose strategies.
        progress: Called with (done, total) parts of the work.
    """
    predicted = replace(space.workload, confidence=EVEN_ODDS)
    return ranked(space.workload, [evaluate(predicted, each) for each in best_of_degrees(space, progress)])


def ranked(workload: Workload, evaluations: Sequence[Evaluation]) -> Candidates:
    """Candidates from evaluations of any strategies; those whose other limits than latency are broken are dropped."""
    able = [each for each in evaluations if _may_run(each)]
    best = max((each.tokens_per_s_per_gpu for each in able if each.feasible), default=0.0)
    if not best:
        best = max((each.tokens_per_s_per_gpu for each in able), default=0.0)
    worth = [each for each in able if each.tokens_per_s_per_gpu >= best * math.exp(-WITHIN)]
    worth.sort(key=lambda each: (not each.feasible, _needed(each), -each.tokens_per_s_per_gpu))
    return Candidates(workload, tuple(worth[:MOST]), len(able) - min(len(worth), MOST))


def _may_run(evaluation: Evaluation) -> bool:
    broken = evaluation.violations
    return all(each.kind in _LATENCIES and each.excess <= LATE for each in broken)


def _needed(evaluation: Evaluation) -> int:
    """By which factor a machine must be faster for it to be within its SLO, in steps of a fifth, which are alike."""
    excess = max((each.excess for each in evaluation.violations), default=0.0)
    return math.floor(excess / math.log(1.2))


def _step_s(evaluation: Evaluation) -> float:
    return evaluation.tpot_s or evaluation.ttft_s


def _sd(evaluation: Evaluation) -> float:
    low, high = evaluation.tpot_interval_s
    return math.log(high / low) / (2 * _Z90)


def term_shares(workload: Workload, evaluation: Evaluation) -> Mapping[str, float]:
    """Share of a strategy's time per token by term; they add up to one."""
    total_s, strategy, stage = _step_s(evaluation), evaluation.strategy, evaluation.stage
    seconds: dict[str, float] = dict.fromkeys(TERMS, 0.0)
    for layers, op in evaluation.stage_ops:
        seconds[_KERNELS.get(op.name, "small")] += strategy.pp * layers * op.kernel_time_s
        for collective in op.collectives:
            across = strategy.tp * strategy.cp > workload.hardware.node_gpus
            kind = "all_to_all" if collective.kind == "all_to_all" else "across" if across else "inside"
            seconds[kind] += strategy.pp * layers * collective.time_s
    seconds["vocabulary_layers"] = strategy.pp * (stage.total_s - stage.layers * stage.layer_s)
    seconds["engine"] = evaluation.engine_s
    seconds["prompts"] = max(0.0, total_s - sum(seconds.values()))
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items()}
