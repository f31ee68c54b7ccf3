"""What a model's requests take on a group of GPUs: its best strategy there, seconds and bytes, from the step model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sim.evaluation import Evaluation, Memory
from sim.optimum.spaces import space_of
from sim.serving.phases import most_sequences
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
        output_tokens: Of an answer, >= 1; the first comes with the prompt's end.
        ttft_s: Longest time to the first token; infinite for none.
        tpot_s: Longest mean time of the tokens after it; infinite for none.
    """

    output_tokens: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A model on a group.

    Attributes:
        strategy: With one request in flight.
        prompt_s: From the start of a prompt to its first token, through all stages.
        slot_s: After so long the group's first stage takes the next prompt.
        use_s: By the number of requests that decode, from 0: seconds of a stage for a token of each.
        latency_s: The same: seconds until each has its token where nothing else runs.
        fixed_bytes: Weights, activations and runtime, on the fullest GPU.
        request_bytes: Its KV cache of one request, with what the engine's policy lays on top.
        allowed_bytes: What a GPU may hold.
    """

    strategy: Strategy | None
    prompt_s: float
    slot_s: float
    use_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    fixed_bytes: float
    request_bytes: float
    allowed_bytes: float

    @property
    def most_requests(self) -> int:
        """Requests that decode at once where the model has the group for itself."""
        return len(self.use_s) - 1

    def slower(self, factor: float) -> Service:
        """The same where every step takes so many times as long."""
        use_s, latency_s = (tuple(factor * each for each in times) for times in (self.use_s, self.latency_s))
        times = {"prompt_s": factor * self.prompt_s, "slot_s": factor * self.slot_s}
        return replace(self, use_s=use_s, latency_s=latency_s, **times)

    def requests_per_s(self, objective: Objective) -> float:
        """The load that the model carries in time where it has the group for itself; 0 if no request is in time."""
        if self.prompt_s > objective.ttft_s:
            return 0.0
        after = objective.output_tokens - 1
        if after == 0:
            return 1 / self.slot_s
        shares = [
            use_s / count
            for count, (use_s, latency_s) in enumerate(zip(self.use_s, self.latency_s, strict=True))
            if count and latency_s <= objective.tpot_s
        ]
        return 1 / (self.slot_s + after * min(shares)) if shares else 0.0


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
        service
        for strategy in _strategies(serving, shape)
        if (service := _service(prompts, serving, strategy)) is not None
    ]

    def merit(service: Service) -> tuple[float, float]:
        alone_s = service.prompt_s + (objective.output_tokens - 1) * service.latency_s[1]
        return service.requests_per_s(objective), -alone_s

    return max(found, key=merit, default=None)


def _strategies(workload: Workload, shape: GroupShape) -> Iterator[Strategy]:
    """Strategies of one request that lie on the shape, in the workload's space."""
    for part in space_of(workload).parts():
        for tp, cp, dp, ep in part.meshes():
            if tp * cp * dp == shape.stage_gpus and shape.stages in part.stages((tp, cp, dp, ep)):
                yield Strategy(tp, ep, shape.stages, 1, part.only_dims, cp, None if (cp, dp) == (1, ep) else dp)


def _service(prompts: Workload, serving: Workload, strategy: Strategy) -> Service | None:
    dp, pp = strategy.attention_dp, strategy.pp
    prompt, alone = evaluate(prompts, strategy), evaluate(serving, replace(strategy, batch=dp))
    if any(each.kind not in ("tpot", "ttft") for each in (*prompt.violations, *alone.violations)):
        return None
    activations = max(prompt.memory_bytes.activations, alone.memory_bytes.activations)
    fixed = replace(alone.memory_bytes, kv_cache=0.0, activations=activations)
    fixed_bytes, allowed_bytes = needed_and_allowed_bytes(serving, fixed)
    # One request on each rank of each microbatch in flight: kv_cache holds pp requests of a GPU's own.
    request_bytes = needed_and_allowed_bytes(serving, Memory(0.0, alone.memory_bytes.kv_cache / pp, 0.0, 0.0))[0]
    per_rank = int(min((allowed_bytes - fixed_bytes) / request_bytes / pp, most_sequences(serving, dp) / dp))
    if per_rank < 1:
        return None
    counts = sorted({1, *(dp << power for power in range(per_rank.bit_length())), dp * per_rank})
    steps_s = [_step_s(evaluate(serving, replace(strategy, batch=count))) for count in counts]
    # In flight are n requests, in as many equal microbatches as there are stages; a stage is used by each in turn.
    running = np.arange(1, dp * per_rank * pp + 1)
    latency_s = np.interp(np.ceil(running / pp), counts, steps_s)
    use_s = np.minimum(running, pp) / pp * latency_s
    prompt_s = _step_s(prompt)
    return Service(
        strategy,
        prompt_s,
        prompt_s / pp,
        (0.0, *use_s.tolist()),
        (0.0, *latency_s.tolist()),
        fixed_bytes,
        request_bytes / dp,
        allowed_bytes,
    )


def _step_s(evaluation: Evaluation) -> float:
    """Seconds of a step through all stages: the prompts' own in phase prefill, else one that decodes alone."""
    stage = evaluation.stage
    return evaluation.strategy.pp * stage.total_s + evaluation.engine_s
