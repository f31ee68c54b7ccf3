"""What a model's requests take on a group of GPUs: its best strategy there, seconds and bytes, from the step model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raysearch.deploy.replay.deployed_fleets import AggregatedFleet
from sim.evaluation import Evaluation, Memory
from sim.optimum.spaces import space_of
from sim.replay.replica import Deployed
from sim.simulate import evaluate
from sim.step.stage import needed_and_allowed_bytes
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True, order=True)
class GroupShape:
    """A group of GPUs: a pipeline of equal stages, which all its models share.

    Attributes:
        stage_gpus: GPUs of a stage.
        stages: How many, >= 1.
    """

    stage_gpus: int
    stages: int

    @property
    def gpus(self) -> int:
        """GPUs of the group."""
        return self.stage_gpus * self.stages

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return gpus if self.stages == 1 else f"{gpus} in {self.stages} stages"


@dataclass(frozen=True, slots=True)
class Objective:
    """What a model's requests ask for, and when one is in time.

    Attributes:
        prompt_tokens: Of a prompt.
        output_tokens: Of an answer, >= 1; the first comes with the prompt's end.
        ttft_s: Longest time to the first token; infinite for none.
        tpot_s: Longest mean time of the tokens after it; infinite for none.
    """

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float

    @property
    def longest_s(self) -> float:
        """Of a request that is in time."""
        after = self.output_tokens - 1
        return self.ttft_s + (after * self.tpot_s if after else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A model on a group.

    Attributes:
        strategy: Of the model there; its batch is the most that runs at once.
        deployed: How it runs where it has the group for itself.
        prompt_s: From the start of a lone prompt to its first token, through all stages; 0 where prompts differ.
        work_s: Seconds of a full group that a request takes: the router's weight.
        fixed_bytes: Weights, activations and runtime, on the fullest GPU.
        request_bytes: Its KV cache of one request, with what the engine's policy lays on top.
        allowed_bytes: What a GPU may hold.
        most_per_s: Requests a second that no load exceeds for long where it has the group for itself; infinite where
            prompts differ.
    """

    strategy: Strategy
    deployed: Deployed
    prompt_s: float
    work_s: float
    fixed_bytes: float
    request_bytes: float
    allowed_bytes: float
    most_per_s: float = math.inf

    @property
    def evaluation(self) -> Evaluation:
        """Its steady state."""
        return evaluate(self.deployed.prices.workload, self.strategy)

    def slower(self, factor: float) -> Service:
        """The same where every step takes so many times as long."""
        deployed = replace(self.deployed, slower=factor * self.deployed.slower)
        return replace(
            self,
            deployed=deployed,
            prompt_s=factor * self.prompt_s,
            work_s=factor * self.work_s,
            most_per_s=self.most_per_s / factor,
        )

    def sharing(self, room_bytes: float, objective: Objective) -> Deployed:
        """How it runs with so much room for its KV cache; requests that cannot be in time any more are refused."""
        own_bytes = self.allowed_bytes - self.fixed_bytes
        share = room_bytes / own_bytes if own_bytes > 0 else 0.0
        patience_s = objective.ttft_s * (1 + 1e-12) - self.prompt_s
        return replace(self.deployed, room_tokens=share * self.deployed.room_tokens, patience_s=patience_s)


def best_service(prompts: Workload, serving: Workload, shape: GroupShape, objective: Objective) -> Service | None:
    """The strategy of a shape that carries most requests in time, or None where none has room.

    Where no strategy answers even a lone request in time, the fastest for one.

    Args:
        prompts: The model in phase prefill.
        serving: The same in phase serve; its space is what may be chosen.
        shape: Of the group.
        objective: Of the model's requests.
    """
    found = [
        each
        for strategy in _strategies(serving, shape)
        if (each := _served(prompts, serving, strategy, objective)) is not None
    ]
    if not found:
        return None
    best = max(found, key=lambda each: each[0])[1]
    most_per_s = AggregatedFleet(best.deployed, 1).most_per_s(objective.prompt_tokens, objective.output_tokens)
    return replace(best, most_per_s=most_per_s)


def _strategies(workload: Workload, shape: GroupShape) -> Iterator[Strategy]:
    """Strategies of one request that lie on the shape, in the workload's space."""
    for part in space_of(workload).parts():
        for tp, cp, dp, ep in part.meshes():
            if tp * cp * dp == shape.stage_gpus and shape.stages in part.stages((tp, cp, dp, ep)):
                yield Strategy(tp, ep, shape.stages, 1, part.only_dims, cp, None if (cp, dp) == (1, ep) else dp)


def _served(
    prompts: Workload, serving: Workload, strategy: Strategy, objective: Objective
) -> tuple[tuple[float, float], Service] | None:
    """((requests a second in time, minus the seconds of a lone one), how it is served); None where it has no room."""
    dp, pp = strategy.attention_dp, strategy.pp
    prompt, alone = evaluate(prompts, strategy), evaluate(serving, replace(strategy, batch=dp))
    if _lacks_room(prompt) or _lacks_room(alone):
        return None
    activations = max(prompt.memory_bytes.activations, alone.memory_bytes.activations)
    fixed = replace(alone.memory_bytes, kv_cache=0.0, activations=activations)
    fixed_bytes, allowed_bytes = needed_and_allowed_bytes(serving, fixed)
    # One request on each rank of each microbatch in flight: kv_cache holds pp requests of a GPU's own.
    request_bytes = needed_and_allowed_bytes(serving, Memory(0.0, alone.memory_bytes.kv_cache / pp, 0.0, 0.0))[0]
    prompt_s, after = pp * prompt.stage.total_s + prompt.engine_s, objective.output_tokens - 1
    if after:
        batch, rate = _largest_batch(serving, strategy, objective)
    else:
        batch, rate = dp, pp / prompt_s
    deployed = Deployed.of(serving, replace(strategy, batch=batch))
    work_s = 1 / rate if rate else prompt_s + after * alone.tpot_s
    merit = rate if prompt_s <= objective.ttft_s else 0.0, -(prompt_s + after * alone.tpot_s)
    return merit, Service(
        replace(strategy, batch=batch), deployed, prompt_s, work_s, fixed_bytes, request_bytes / dp, allowed_bytes
    )


def _largest_batch(serving: Workload, strategy: Strategy, objective: Objective) -> tuple[int, float]:
    """(batch, requests a second) of the most that run at once in time; (one on each rank, 0) where not even that is."""
    anyhow = replace(serving, ttft_slo_s=math.inf, tpot_slo_s=objective.tpot_s / (1 - serving.margin))
    batch, rate = strategy.attention_dp, 0.0
    while (found := evaluate(anyhow, replace(strategy, batch=batch))).feasible:
        rate = max(rate, found.tokens_per_s_per_gpu * found.gpus / objective.output_tokens)
        batch *= 2
    return max(strategy.attention_dp, batch // 2), rate


def _lacks_room(found: Evaluation) -> bool:
    return any(each.kind not in ("tpot", "ttft") for each in found.violations)
