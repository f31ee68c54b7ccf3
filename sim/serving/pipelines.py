"""What prompts cost a pipeline: the microbatches behind one that computes a prompt wait for it at every stage.

As many microbatches as stages are in flight, each on one stage. A step with a prompt takes longer on every stage, and
the others, which follow it, cannot overtake. So a single prompt holds all of them up by what it takes through all
stages, as if there were no pipeline (Sarathi-Serve, OSDI 2024, section 3.3, calls these bubbles). Prompts that come
together wait for each other instead. How long a round takes is the longest path through the stages, which is linear in
what a prompt adds to a stage: what it holds up is the product of that and of a factor that depends on the stages and
on the spread of the prompts per step alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_EVEN, _LONE = 1.38, 0.11
"""[fitted] to the recursion of the stages, for 2 to 64 stages and 0.01 to 20 prompts per step, within 6 %."""


TOKENS_FURTHER = 0.10
"""Share of its kernels' time by which each stage but one lengthens an engine's step: microbatches that are handed over
one after the other, and drift apart. [fitted: PP2 over TP2 of gpt-oss-120b under vLLM 0.10.2, 0.70, and PP4 over TP4 of
GLM-4.5-Air under SGLang 0.5.4, 0.37, bursts of 1,000 ShareGPT requests on H100 (GPUStack, performance lab), beside
replays of the same; 0.11 and 0.10 alone]"""
PROMPTS_FURTHER = 0.07
"""The same where prompts alone are computed. [published: four stages of TP8 prefill DeepSeek-V3.1 3.31 times as fast as
one on H20 under SGLang (LMSYS, 15 January 2026)]"""


def stall_factor(stages: Any, spread: Any) -> Any:
    """Times what prompts add to the steps that a pipeline of these stages loses by them.

    Args:
        stages: Of the pipeline; as many microbatches are in flight.
        spread: Variance of the number of prompts in a step, over the square of its mean: 1 over the mean if they come
            at random, 0 if every step has the same.

    Returns:
        1 of one stage and of equal steps, up to the number of stages where prompts are few.

    >>> float(stall_factor(1, 5.0)), float(stall_factor(8, 0.0)), round(float(stall_factor(8, 1e6)), 2)
    (1.0, 1.0, 8.0)
    """
    varied = spread * (1 + _LONE * spread)
    return 1 + (stages - 1) * np.sqrt(varied / (varied + stages * (_EVEN * np.sqrt(stages) + _LONE * spread)))
