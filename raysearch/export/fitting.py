"""A strategy made one that an engine runs, and what that costs by the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raysearch.export.deployment import Deployment
from raysearch.files import degrees_text
from sim.engines.rules import EngineRules
from sim.evaluation import Evaluation
from sim.simulate import evaluate, mesh_violations
from sim.strategy import Strategy


@dataclass(frozen=True)
class Fitted:
    """A deployment that an engine runs.

    Attributes:
        deployment: The same, with the strategy that the engine runs in its place.
        dropped: What it could not be told, and the cost; empty if it runs the strategy as it is.
    """

    deployment: Deployment
    dropped: tuple[str, ...]


def fitted(deployment: Deployment, engine: EngineRules) -> Fitted:
    """The nearest deployment that an engine runs: as many GPUs, as many stages, the same batch.

    Of those it takes the fastest that is feasible; where none is, the one that misses its limits least.

    Raises:
        ValueError: The engine runs nothing on so many GPUs.
    """
    workload = replace(deployment.workload, space=engine.name)
    refused = engine.refusals(workload, deployment.strategy)
    if not refused:
        return Fitted(deployment, ())
    runs = [evaluate(workload, strategy) for strategy in _alike(deployment, engine)]
    if not runs:
        raise ValueError(f"{refused[0]}; and it runs nothing else on {deployment.strategy.gpus} GPUs")
    best = min(runs, key=lambda each: (each.excess, -each.tokens_per_s_per_gpu))
    wished = evaluate(replace(workload, space="extended"), deployment.strategy)
    return Fitted(replace(deployment, strategy=best.strategy), (*refused, _cost(wished, best)))


def _alike(deployment: Deployment, engine: EngineRules) -> Iterator[Strategy]:
    """What the engine runs on as many GPUs with the same batch."""
    workload, strategy = deployment.workload, deployment.strategy
    divisors = [n for n in range(1, strategy.stage_gpus + 1) if strategy.stage_gpus % n == 0]
    contexts = divisors if engine.cuts_context(workload) else [1]
    experts = [ep for ep in divisors if workload.model.experts % ep == 0]
    for plan, tp, cp, ep in itertools.product(engine.plans_of(workload), divisors, contexts, experts):
        if strategy.stage_gpus % (tp * cp) == 0:
            dp = strategy.stage_gpus // (tp * cp)
            each = Strategy(tp, ep, strategy.pp, strategy.batch, plan.dims, cp, None if (cp, dp) == (1, ep) else dp)
            if not mesh_violations(workload, tp, cp, dp, ep) and not engine.refusals(workload, each):
                yield each


def _cost(wished: Evaluation, runs: Evaluation) -> str:
    before, after = wished.tokens_per_s_per_gpu, runs.tokens_per_s_per_gpu
    text = f"in its place: {degrees_text(runs.strategy)}; {after:,.1f} tokens/s/GPU, not {before:,.1f}"
    text += f" ({after / before - 1:+.1%}), {runs.tpot_s * 1e3:.1f} ms per token, not {wished.tpot_s * 1e3:.1f}"
    return text + "".join(f"; breaks a limit: {violation.message}" for violation in runs.violations)
