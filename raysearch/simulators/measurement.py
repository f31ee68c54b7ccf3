"""What a plugged-in simulator returns, and how it becomes an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real

from envs.strategy_env import brief, checked
from raysearch.base.errors import InputError
from raysearch.base.limits import MOST_GPUS
from sim.evaluation import Evaluation, Memory, StageBreakdown, Violation
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a strategy does, in a black box's words. Limits are not its business: the workload has them.

    Attributes:
        tokens_per_s_per_gpu: Generated tokens per second and GPU; what is searched for. Finite, >= 0.
        tpot_s: Time per output token, seconds; compared with the workload's SLO.
        ttft_s: Time to the first token, seconds; compared with the workload's SLO. 0.0 if it was not measured.
        gpus: Devices in use; compared with the device budget. None: tp * ep * pp.
        memory_bytes: Of the fullest GPU; compared with the HBM. 0.0 if the simulator does not model it.
        unsupported: Why the strategy cannot be run at all; the figures are then without meaning.
        excess: By how much a strategy that is not supported is beyond what is: needed over allowed, > 1. Searchers
            that learn from infeasible calls use it.

    Example:
        >>> Measurement(tokens_per_s_per_gpu=500.0, tpot_s=0.04).unsupported
        ''
    """

    tokens_per_s_per_gpu: float = 0.0
    tpot_s: float = 0.0
    gpus: int | None = None
    memory_bytes: float = 0.0
    unsupported: str = ""
    excess: float = 2.0
    ttft_s: float = 0.0


def as_evaluation(workload: Workload, strategy: Strategy, answer: object) -> Evaluation:
    """What a black box answered, as an evaluation.

    Args:
        workload: Whose limits apply.
        strategy: What was asked about.
        answer: A `Measurement`, or an `Evaluation` of the strategy, which is passed on as it is.

    Raises:
        ValueError: It is neither, or a figure is not finite or negative.

    >>> from sim.config.catalog import load_workload
    >>> from sim.strategy import Strategy
    >>> workload, strategy = load_workload("gpt_moe_1_2t_16k"), Strategy(8, 1, 1, 64, (0,) * 12)
    >>> slow = as_evaluation(workload, strategy, Measurement(tokens_per_s_per_gpu=100.0, tpot_s=0.08))
    >>> [violation.message for violation in slow.violations]
    ['TPOT is 80.0 ms, allowed are 50.0 ms']
    """
    if isinstance(answer, Evaluation):
        return checked(answer, strategy)
    if not isinstance(answer, Measurement):
        raise ValueError(
            f"expected a raysearch.simulators.Measurement or a sim.evaluation.Evaluation, got {brief(repr(answer))}"
        )
    for name in ("tokens_per_s_per_gpu", "tpot_s", "ttft_s", "memory_bytes"):
        value = getattr(answer, name)
        if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and float(value) >= 0):
            raise ValueError(f"expected a finite {name} >= 0, got {value!r}")
    if not isinstance(answer.excess, Real) or not (math.isfinite(answer.excess) and answer.excess > 1):
        raise ValueError(f"expected a finite excess > 1, got {answer.excess!r}")
    if answer.gpus is not None and not _counts_gpus(answer.gpus):
        got = brief(repr(answer.gpus))
        raise ValueError(f"expected gpus from 1 to {MOST_GPUS:,}, or None for tp * ep * pp, got {got}")
    gpus = strategy.gpus if answer.gpus is None else int(answer.gpus)
    layers = math.ceil(workload.model.layers / strategy.pp)
    return Evaluation(
        strategy=strategy,
        tokens_per_s_per_gpu=float(answer.tokens_per_s_per_gpu),
        tpot_s=float(answer.tpot_s),
        gpus=gpus,
        memory_bytes=Memory(weights=0.0, kv_cache=0.0, activations=0.0, overhead=float(answer.memory_bytes)),
        violations=tuple(_violations(workload, answer, gpus)),
        ttft_s=float(answer.ttft_s),
        stage=StageBreakdown(layers, 0.0, 0.0, 0.0, 0.0, total_s=float(answer.tpot_s)),
        ops=(),
    )


def _counts_gpus(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= MOST_GPUS


def failed_evaluation(workload: Workload, strategy: Strategy, reason: str) -> Evaluation:
    """What counts for a strategy on which a black box fails for good, where that is not to stop the run."""
    unsupported = as_evaluation(workload, strategy, Measurement(unsupported=reason))
    (violation,) = unsupported.violations
    return replace(unsupported, violations=(replace(violation, kind="failed"),))


def _violations(workload: Workload, answer: Measurement, gpus: int) -> list[Violation]:
    if answer.unsupported:
        return [Violation("unsupported", answer.excess, 1.0, brief(answer.unsupported))]
    found: list[Violation] = []
    if gpus > workload.max_gpus:
        message = f"needs {gpus:,} GPUs, the budget is {workload.max_gpus:,}"
        found.append(Violation("gpus", gpus, workload.max_gpus, message))
    hbm_bytes, tpot_limit_s = workload.hbm_limit_bytes, workload.tpot_limit_s
    if answer.memory_bytes > hbm_bytes:
        message = f"needs {answer.memory_bytes / 1e9:.1f} GB of HBM, a GPU may use {hbm_bytes / 1e9:.1f} GB"
        found.append(Violation("hbm", answer.memory_bytes, hbm_bytes, message))
    if answer.tpot_s > tpot_limit_s:
        message = f"TPOT is {answer.tpot_s * 1e3:.1f} ms, allowed are {tpot_limit_s * 1e3:.1f} ms"
        found.append(Violation("tpot", answer.tpot_s, tpot_limit_s, message))
    if answer.ttft_s > workload.ttft_limit_s:
        message = f"TTFT is {answer.ttft_s * 1e3:.0f} ms, allowed are {workload.ttft_limit_s * 1e3:.0f} ms"
        found.append(Violation("ttft", answer.ttft_s, workload.ttft_limit_s, message))
    return found


def name_in(simulator: str, workload: Workload) -> str:
    """What another simulator calls a workload's model, by the model's file. Raises: InputError: It does not say."""
    model = workload.model
    if simulator not in model.published.simulators:
        raise InputError(
            f"{simulator} has no model {model.name!r}: name what it calls it in the model's file, under [simulators]"
        )
    return model.published.simulators[simulator]


def refuse_beyond_plain_decoding(workload: Workload, simulator: str) -> None:
    """Refuses what a simulator of one plain decode step would leave out without a word.

    Raises:
        InputError: Tokens are drafted, experts have copies, or prompts wait for each other.
    """
    if workload.speculation is not None:
        raise InputError(
            f"{simulator} does not model speculative decoding: leave out draft_tokens, or search our own simulator"
        )
    if workload.redundant_experts:
        raise InputError(f"{simulator} does not model redundant experts: leave them out, or search our own simulator")
    if workload.two_batch_overlap:
        raise InputError(f"{simulator} does not model two-batch overlap: leave out two_batch_overlap")
    if workload.overlap_parts > 1:
        raise InputError(f"{simulator} does not model operators in parts: leave out overlap_parts")
    for name in ("fp8_gather", "merge_collectives"):
        if getattr(workload.hardware, name):
            raise InputError(f"{simulator} gathers every tensor unquantised and separately: leave out {name}")
    if workload.prompt_wait_steps:
        raise InputError(
            f"in {simulator} no prompt waits for those of other attention groups: leave out prompt_wait_steps, or "
            "search our own simulator"
        )
