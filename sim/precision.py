"""Whether another format of the same size would be several times faster, as some measured kernels are slow."""

from __future__ import annotations

from dataclasses import replace

from sim.evaluation import Evaluation
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.simulate import evaluate
from sim.workload import Workload

SEVERAL = 2.0
"""How many times faster another format must be to be worth a word. [assumed]"""
_ALTERNATIVES: tuple[Dtype, ...] = ("fp8", "fp8_block")


def slow_precision(workload: Workload, evaluation: Evaluation) -> str | None:
    """A warning if weights of another format of the same size make the strategy several times faster, or None.

    >>> from sim.config.described import Description, described_workload
    >>> from sim.layers.heuristics import megatron_dims
    >>> from sim.strategy import Strategy
    >>> said = Description("qwen3_235b_a22b", phase="serve", isl=1024, osl=1024, engine="vllm", weights="fp8")
    >>> workload = described_workload(said)
    >>> strategy = Strategy(8, 1, 1, 64, megatron_dims(workload.model), dp=1)
    >>> "fp8_block" in slow_precision(workload, evaluate(workload, strategy))
    True
    """
    precisions = workload.precisions
    for dtype in _ALTERNATIVES:
        if dtype == precisions.weights or DTYPE_BYTES[dtype] != DTYPE_BYTES[precisions.weights]:
            continue
        other = evaluate(replace(workload, precisions=replace(precisions, weights=dtype)), evaluation.strategy)
        times = other.tokens_per_s_per_gpu / evaluation.tokens_per_s_per_gpu
        if times >= SEVERAL:
            curves = workload.hardware.curves
            whose = f"{curves.engine}'s kernels" if curves else "kernels"
            return (
                f"{whose} were measured to be slow with {precisions.weights} weights: with {dtype} this strategy makes "
                f"{times:.1f} times as many tokens/s/GPU"
            )
    return None
