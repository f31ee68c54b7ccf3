"""The Python interface, which `import raysearch as rs` offers: a question, and what is asked of it.

>>> import raysearch as rs
>>> question = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20)
>>> found = rs.evaluate(question, tp=2, batch=64)
>>> found.feasible, found.strategy.tp
(True, 2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.config.question import Question

if TYPE_CHECKING:
    from raysearch.answers.evaluated import EvaluationResult
    from raysearch.answers.recommended import RecommendationResult

__all__ = ["evaluate", "question", "recommend"]

question = Question
"""A question about a deployment, by keyword arguments: those that the commands' options name."""


def evaluate(
    question: Question,
    *,
    batch: int,
    tp: int | None = None,
    ep: int | None = None,
    pp: int = 1,
    dims: str = "megatron",
    cp: int = 1,
    dp: int | None = None,
    moe_tp: int | None = None,
    layout: str | None = None,
) -> EvaluationResult:
    """Evaluates one strategy: speed, memory, violations and a breakdown per op.

    Args:
        question: What is served, on what, within which limits.
        batch: Sequences of one microbatch over the ep group; in phase serve requests in flight on all attention ranks.
        tp: Degree of tensor parallelism; of attention, where it has a mesh of its own.
        ep: Degree of expert parallelism.
        pp: Pipeline stages.
        dims: One number per fused op, or "megatron" or "megatron-sp".
        cp: GPUs over which attention cuts the context.
        dp: GPUs over which attention cuts the requests; as ep if not given.
        moe_tp: GPUs that share an expert.
        layout: Instead of tp, ep and dp: "tp8", "tep8" or "dep8".

    Returns:
        Its figures, whether or not it can be run: see `feasible` and `broken`.

    Raises:
        CatalogError, InputError, StrategyError: The question or the strategy means nothing.

    >>> evaluate(question(model="llama_3_1_8b", isl=1000, osl=100), layout="tp2", batch=8).evaluation.gpus
    2
    """
    from raysearch.answers.evaluated import EvaluationResult
    from raysearch.answers.strategy_text import strategy_of
    from sim.simulate import evaluate as simulate

    workload = question.load()
    strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, moe_tp, layout)
    return EvaluationResult(question, workload, simulate(workload, strategy))


def recommend(
    question: Question,
    *,
    requests_per_s: float | None = None,
    concurrency: int | None = None,
    price: float | None = None,
    top: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> RecommendationResult:
    """Recommends a deployment, exactly: every strategy of the engine and every batch are accounted for.

    Args:
        question: What is served, on what, within which limits; its `gpus` are those at hand.
        requests_per_s: Load to carry with the fewest GPUs; None fills all.
        concurrency: Requests at once to carry with the fewest GPUs; None fills all.
        price: Of a GPU and hour.
        top: Most strategies in the answer.
        progress: Called with what is being worked out.

    Raises:
        CatalogError, InputError: The question means nothing, or both loads are given.

    >>> best = recommend(question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=15), top=1).strategy
    >>> best.gpus
    1
    """
    from raysearch.answers.recommended import RecommendationResult

    return RecommendationResult.of(
        question, requests_per_s=requests_per_s, concurrency=concurrency, price=price, top=top, progress=progress
    )
