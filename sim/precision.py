"""Whether another format of the same size would be several times faster, as some measured kernels are slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.workload import Workload

SEVERAL = 2.0
"""How many times faster another format must be to be worth a word. [assumed]"""
_ALTERNATIVES: tuple[Dtype, ...] = ("fp8", "fp8_block")


def slow_precision(workload: Workload, figure: float, of: Callable[[Workload, float], float]) -> str | None:
    """A warning if weights of another format of the same size are several times faster, or None.

    Args:
        workload: What was asked for.
        figure: Its tokens/s/GPU: of a strategy, or of the best one; 0 if nothing is feasible.
        of: The same of the workload in another format; anything less where it is less than a second figure.

    >>> from sim.config.question import Question
    >>> from sim.ops.heuristics import megatron_dims
    >>> from sim.simulate import evaluate
    >>> from sim.strategy import Strategy
    >>> asked = Question(model="qwen3_235b_a22b", phase="serve", isl=1024, osl=1024, engine="vllm", weights="fp8")
    >>> workload = asked.load()
    >>> strategy = Strategy(8, 1, 1, 64, megatron_dims(workload.model), dp=1)
    >>> def figure(workload, least=0.0):
    ...     return evaluate(workload, strategy).tokens_per_s_per_gpu
    >>> slow_precision(workload, figure(workload), figure)
    "vllm's kernels were measured to be slow with fp8 weights: with fp8_block it is 2.6 times as many tokens/s/GPU"
    """
    precisions = workload.precisions
    for dtype in _ALTERNATIVES:
        if dtype == precisions.weights or DTYPE_BYTES[dtype] != DTYPE_BYTES[precisions.weights]:
            continue
        other = of(replace(workload, precisions=replace(precisions, weights=dtype)), SEVERAL * figure)
        if other < SEVERAL * figure or other == 0:
            continue
        curves = workload.hardware.curves
        whose = f"{curves.engine}'s kernels" if curves else "kernels"
        gain = f"it is {other / figure:.1f} times as many tokens/s/GPU" if figure else f"{other:,.0f} tokens/s/GPU are"
        slow = f"{whose} were measured to be slow with {precisions.weights} weights: with {dtype} {gain}"
        return slow if figure else f"{slow} feasible"
    return None
