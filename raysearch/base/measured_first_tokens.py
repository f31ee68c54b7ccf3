"""Times to the first token as clients measure them, beside what a replay or a steady state has."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sim.config.first_tokens import first_token_error
from sim.evaluation import Evaluation
from sim.serving.phases import phase_of
from sim.workload import Workload

MeasuredTime = tuple[float, float, float]
"""(expected, lowest, highest) seconds: nine of ten runs lie between the last two."""
MEASURED_WORDS: Mapping[str, str] = {"mean": "mean", "p50": "median", "p99": "p99"}
_PERCENT = 0.01


def steady_first_token_s(workload: Workload, evaluation: Evaluation) -> MeasuredTime | None:
    """The median of clients who find no queue; None where nothing of the engine was measured."""
    error = first_token_error(workload) if phase_of(workload).mixes and evaluation.ttft_s else None
    return error.measured_s("steady", evaluation.ttft_s, evaluation.tpot_s) if error else None


def steady_first_token_text(workload: Workload, evaluation: Evaluation) -> str:
    """The same in words; "" for nothing."""
    found = steady_first_token_s(workload, evaluation)
    if found is None:
        return ""
    expected_s, low_s, high_s = found
    ranged = f"with 90 % confidence {low_s * 1e3:.0f} to {high_s * 1e3:.0f} ms"
    return f"median that clients measure {expected_s * 1e3:.0f} ms, {ranged}"


def replayed_first_token_s(
    workload: Workload, replayed_s: Mapping[str, float], token_s: float, first_share: float, *, pools: bool = False
) -> dict[str, MeasuredTime]:
    """Figures of a replay as clients measure them; none where nothing of the engine was measured.

    Args:
        workload: What was replayed.
        replayed_s: Times to the first token by figure.
        token_s: Mean time per token.
        first_share: Of the requests, those with which clients begin at once; 0 where requests come over time.
        pools: Whether prompts are computed in a pool of their own.
    """
    error = first_token_error(workload, pools=pools)
    if error is None:
        return {}
    bursts = {"mean": first_share, "p50": float(first_share > 1 / 2), "p99": float(first_share >= _PERCENT)}
    return {each: error.measured_s(each, replayed_s[each], token_s, bursts=bursts[each]) for each in MEASURED_WORDS}


def first_token_limit_text(workload: Workload) -> str:
    """What a limit on the first token counts, and what clients measured beside it; "" without a limit."""
    if workload.ttft_slo_s == math.inf:
        return ""
    error = first_token_error(workload)
    times = error.times if error else None
    beside = f"; measured: {times.request_s * 1e3:.0f} ms and {times.steps:.1f} decode steps" if times else ""
    return f"The limit of the first token counts queues and steps; the client round trip is not included{beside}"
