"""A deployment made one that an engine supports, and what that costs by the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from raysearch.base.file_io import degrees_text
from raysearch.deploy.contexts import too_long
from raysearch.deploy.export.deployment import Deployment, NamedRefused
from raysearch.deploy.export.models import Supported, with_weights
from sim.config.catalog import as_configurable, under_engine
from sim.engines.engine_registry import charged_rules, in_space
from sim.engines.engine_rules import EngineRules
from sim.evaluation import Evaluation
from sim.prices.engine import EngineVersion
from sim.serving.phases import phase_of
from sim.simulate import evaluate, mesh_violations
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True)
class Fitted:
    """A deployment that an engine runs.

    Attributes:
        deployment: The same on the engine, with what it runs in place of what it does not support.
        dropped: What it does not support, each with the cost; empty if it runs everything as it is.
        notes: What its user must know.
        violations: Limits that it breaks there.
    """

    deployment: Deployment
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()


def fitted(
    deployment: Deployment,
    engine: EngineRules,
    adapt: Callable[[Deployment, EngineRules], Supported] = with_weights,
    image: str | None = None,
) -> Fitted:
    """The nearest deployment that an engine runs: as many GPUs, as many stages, the same batch.

    Of those it takes the fastest that is feasible; where none is, the one that misses its limits least. All is priced
    on that engine, whatever engine the strategy was found on.

    Args:
        deployment: What is wished.
        engine: Who is to run it.
        adapt: What the engine supports of all but the strategy.
        image: The version that runs, whose rules count; None for the one that was priced.

    Raises:
        NamedRefused: The engine does not run a strategy that somebody named, or that of a pool, and nothing like it.
        ValueError: It runs nothing on so many GPUs, or nothing on such GPUs.
    """
    if lacks := list(engine.lacks_machine(deployment.workload.hardware)):
        raise ValueError(f"{engine.title}: {lacks[0]}")
    not_offered = not_configurable(deployment, engine)
    deployment = replace(deployment, workload=as_configurable(deployment.workload, engine))
    there = replace(deployment, workload=_in_image(on_engine(deployment.workload, engine), engine, image))
    engine = charged_rules(there.workload) or engine
    adapted = adapt(there, engine)
    dropped, notes = list(adapted.dropped), [*_moved(deployment, there, engine), *adapted.notes]
    weights = Path(str(adapted.deployment.served_model))
    notes += _own_code(adapted.deployment)
    notes += too_long(deployment.stated_longest, deployment.workload.model, weights)
    if dropped:
        before, after = _wished(there), _wished(adapted.deployment)
        dropped[-1] = f"{dropped[-1]}: {_cost(before, after)}"
    workload, strategy = adapted.deployment.workload, deployment.strategy
    refused = engine.refusals(workload, strategy)
    if not refused:
        broken = _broken(evaluate(workload, strategy))
        return Fitted(adapted.deployment, (*not_offered, *dropped), tuple(notes), broken)
    if deployment.named:
        raise NamedRefused(refused)
    runs = [evaluate(workload, each) for each in _alike(adapted.deployment, engine)]
    if not runs:
        if phase_of(workload).pool:
            raise NamedRefused(refused)
        raise ValueError(f"{refused[0]}; and it runs nothing else on {strategy.gpus} GPUs")
    best = min(runs, key=lambda each: (each.excess, -each.tokens_per_s_per_gpu))
    cost = f"in its place: {degrees_text(best.strategy)}; {_cost(_wished(adapted.deployment), best)}"
    there = replace(adapted.deployment, strategy=best.strategy)
    return Fitted(there, (*not_offered, *dropped, *refused, cost), tuple(notes), _broken(best))


def _own_code(deployment: Deployment) -> Iterator[str]:
    """That a repository's own code may be needed, which no export runs unasked."""
    published = deployment.workload.model.published
    if published.own_code and deployment.served_model in published.repositories.values():
        yield (
            f"{deployment.served_model}: its makers run its own code (--trust-remote-code); newer engines may have it "
            "built in, so that is left to you"
        )


def not_configurable(deployment: Deployment, engine: EngineRules | None) -> tuple[str, ...]:
    """What of how collectives run an engine (None: a framework) has no option for, and what that costs; or none."""
    asked = deployment.workload
    possible = as_configurable(asked, engine)
    if possible is asked:
        return ()
    machine, all_reduce = asked.hardware, asked.hardware.collectives.all_reduce
    parts = {
        f"overlap_parts {asked.overlap_parts}": asked.overlap_parts > 1,
        "fp8_gather": machine.fp8_gather,
        "merge_collectives": machine.merge_collectives,
        "two_batch_overlap": asked.two_batch_overlap and not possible.two_batch_overlap,
        f"all_reduce {all_reduce}": possible.hardware.collectives.all_reduce != all_reduce,
    }
    who = f"{engine.title} {engine.version}" if engine else "what runs the layer"
    names = ", ".join(name for name, dropped in parts.items() if dropped)
    cost = _cost(_wished(deployment), _wished(replace(deployment, workload=possible)))
    return (f"{who} has no option for {names}: {cost}",)


def _broken(evaluation: Evaluation) -> tuple[str, ...]:
    return tuple(violation.message for violation in evaluation.violations)


def on_engine(workload: Workload, engine: EngineRules) -> Workload:
    """The same served by an engine: its space, kernels, times and memory policy. Tokens reach experts as they did."""
    if workload.engine and workload.engine.family == engine.name:
        return in_space(workload, engine.name)
    return under_engine(workload, engine.name)


def _in_image(workload: Workload, engine: EngineRules, version: str | None) -> Workload:
    """The same under the rules of the version that runs, at the price of the one that was asked for."""
    charged = workload.engine
    if version in (None, engine.version) or charged is None or charged.version is not None:
        return workload
    return in_space(replace(workload, engine=replace(charged, version=EngineVersion(version))), engine.name)


def _moved(deployment: Deployment, there: Deployment, engine: EngineRules) -> Iterator[str]:
    """What changes with the engine alone, where another one or none was charged."""
    was = deployment.workload.engine
    if (was.name if was else None) != (there.workload.engine.name if there.workload.engine else None):
        by = f"was priced for {was.name if was else 'the bare machine'}"
        yield f"this {by}; on {engine.title} {_cost(_wished(deployment), _wished(there))}"


def _wished(deployment: Deployment) -> Evaluation:
    """What a deployment would do on its engine if that supported it."""
    return evaluate(replace(deployment.workload, space="extended"), deployment.strategy)


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


def _cost(before: Evaluation, after: Evaluation) -> str:
    """What a change costs: throughput, the time of a token or of a prompt, and the limits that it breaks."""
    was, is_ = before.tokens_per_s_per_gpu, after.tokens_per_s_per_gpu
    text = f"{is_:,.1f} tokens/s/GPU, not {was:,.1f} ({is_ / was - 1:+.1%}), "
    if before.tpot_s:
        text += f"{after.tpot_s * 1e3:.1f} ms per token, not {before.tpot_s * 1e3:.1f}"
    else:
        text += f"{after.ttft_s * 1e3:.1f} ms to the first token, not {before.ttft_s * 1e3:.1f}"
    return text + "".join(f"; breaks a limit: {violation.message}" for violation in after.violations)
