"""Limits on latencies where a question names none: without any, the most tokens a second make users wait for ever."""

from __future__ import annotations

from collections.abc import Mapping

from sim.config.question import Question
from sim.serving.phases import phase_of
from sim.workload import Workload

USUAL_TPOT_MS = 100.0
"""Ten tokens a second. [assumed] faster than people read."""
USUAL_TTFT_MS, MS_PER_PROMPT_TOKEN = 10_000.0, 1.0
"""Of the first token, and more of it for each token of the prompt. [assumed]"""


def usual_limits(question: Question, workload: Workload) -> dict[str, float]:
    """The default limits that apply, by the question's own names; none where it states them or no prompt is computed.

    >>> question = Question(model="qwen3_32b", isl=4000, osl=500, tpot_ms=30)
    >>> usual_limits(question, question.load())
    {'ttft_ms': 14000.0}
    """
    if not phase_of(workload).mixes:
        return {}
    usual = {
        "tpot_ms": (workload.tpot_slo_s, USUAL_TPOT_MS),
        "ttft_ms": (workload.ttft_slo_s, USUAL_TTFT_MS + MS_PER_PROMPT_TOKEN * workload.prompt_tokens),
    }
    return {name: limit for name, (stated_s, limit) in usual.items() if stated_s == float("inf")}


def usual_limits_text(limits: Mapping[str, float]) -> str:
    """The default limits that apply, in words.

    >>> usual_limits_text({"ttft_ms": 14000.0})
    'No --ttft-ms is given: default limit 14,000 ms applied; pass a larger value to raise it'
    """
    options = " or ".join(f"--{name.replace('_', '-')}" for name in limits)
    at_most = " and ".join(f"{limit:,.0f} ms" for limit in limits.values())
    limit, more = (
        ("limits", "larger values to raise them") if len(limits) > 1 else ("limit", "a larger value to raise it")
    )
    return f"No {options} is given: default {limit} {at_most} applied; pass {more}"
