"""How many drafted tokens of multi-token prediction hold, where nobody says: as measured of DeepSeek-R1.

Its published runs with and without drafts under three engines state both the mean gap between chunks of an answer, one
per so many steps, and the time per token, so that their ratio counts the tokens of a step, whatever a step takes: 1.79,
2.19 and 2.41 with one, two and three drafts, prompts and answers of 1,024 tokens, on H100 to GB300 alike. Longer
answers have more, which fits how such benchmarks prompt, with random tokens; a text of yours may accept others.
"""

from __future__ import annotations

from math import exp, log

_FIRST = (1.274, 0.622, 0.110)
"""Log odds that the first draft holds at lengths of 1,024, and what they gain with the logarithms of answer and prompt.
[fitted: 74 runs of DeepSeek-R1 with multi-token prediction, InferenceX; spread 4 %]"""
_LATER = (0.093, 0.205, 0.056)
"""The same of every further one, if those before it hold. [fitted: as above]"""
_MEASURED_TOKENS = (1024, 8192)
MEASURED_SPREAD, ASSUMED_SPREAD = 0.07, 0.25
"""By so much the tokens of a step may differ in 90 % of cases: of models measured [fitted], others [assumed]."""

EAGLE3_SHARE, EAGLE3_SPREAD = 0.62, 0.11
"""Chance that a token of an EAGLE-3 head holds if those before it do, and by which share the tokens of a step differ in
90 % of cases. [published: 1.74 to 2.20 tokens of a step with two drafts, 2.00 on average, six Qwen3 models of 1.7B to
32B on GSM8K, Alpaca, HumanEval and MT-bench under vLLM (Tencent's AngelSlim, benchmarks of January 2026)] Llama 4
Maverick's head has 2.45 with three (SpecForge), where this has 2.24. [assumed] of others within `ASSUMED_SPREAD`."""


def accepted_drafts(draft_tokens: int, prompt_tokens: int, output_tokens: int) -> tuple[float, ...]:
    """Of each drafted token the share accepted where all before it are.

    >>> [round(share, 2) for share in accepted_drafts(3, 1024, 1024)]
    [0.78, 0.52, 0.52]
    """
    low, high = _MEASURED_TOKENS
    prompt, output = (log(min(max(tokens, low), high) / low) for tokens in (prompt_tokens, output_tokens))

    def share(odds: tuple[float, float, float]) -> float:
        at, by_output, by_prompt = odds
        return 1 / (1 + exp(-(at + by_output * output + by_prompt * prompt)))

    return (share(_FIRST), *[share(_LATER)] * (draft_tokens - 1))[:draft_tokens]
