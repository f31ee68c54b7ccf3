"""Time per output token of a serving deployment: continuous batching of one engine on one kind of GPU.

A decode step is every layer's kernels, the engine's collectives and the LM head, from the fitted kernels. Continuous
batching adds the work of other requests' prompts and the engine's own time per step, whose few parameters are fitted
to measured serving runs; `raysearch.calibration.serving` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sim.serving.deployment import Deployment, MemoryPolicy, sequence_limit
from sim.serving.serving_step import Batch, Kernels, step_parts, step_time


@dataclass(frozen=True, slots=True)
class Engine:
    """How an inference engine schedules, and its own time beside the kernels.

    Attributes:
        step_s: Time of a step that no kernel accounts for.
        sequence_s: The same for each running sequence: sampling, detokenising, bookkeeping.
        prefill_share: Share of the other requests' prompt work that a running request waits for.
        launch_layer_s: Time in which the host launches one layer's kernels when a prompt keeps a step out of the CUDA
            graph. The decode step before it hides as much of this as it lasts; for the rest the GPU waits.
    """

    name: str
    step_s: float
    sequence_s: float
    prefill_share: float
    launch_layer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A deployment's kernels before the engine's own parameters: what these are fitted on.

    Attributes:
        running: Sequences that decode at once on one attention rank.
        decode_s: One decode step's kernels and collectives.
        prompt_s: What one prompt's kernels add to a decode step.
        prompts: Prompts per step over the whole replica.
        others_prompts: The same without those of one request's own place.
        together: Prompts that share a step where there are any.
        layers: Of the model.
        parts_s: The step by kind of kernel, before any overlap.
    """

    running: float
    decode_s: float
    prompt_s: float
    prompts: float
    others_prompts: float
    together: float
    layers: int
    parts_s: Mapping[str, float]

    def launch_s(self, engine: Engine) -> float:
        """Time that a step with prompts waits for its launches."""
        return max(0.0, engine.launch_layer_s * self.layers - self.decode_s)


@dataclass(frozen=True, slots=True)
class Serving:
    """How a deployment runs.

    Attributes:
        tpot_s: Mean time per output token after the first.
        running: Sequences that decode at once on one attention rank.
        work: The kernels behind it.
        tokens_per_s_per_gpu: Output tokens of the replica with every prompt's work counted.
    """

    tpot_s: float
    running: float
    work: Work
    tokens_per_s_per_gpu: float


def serve(deployment: Deployment, kernels: Kernels, engine: Engine, hbm_bytes: float, policy: MemoryPolicy) -> Serving:
    """How fast a deployment makes tokens in the steady state.

    Each of the running sequences is replaced once in `osl` steps, so that a request waits for the prompts of the
    others; `prefill_share` of that shows in its time per output token.
    """
    work = steady_work(deployment, kernels, hbm_bytes, policy)
    cycle_s = step_alone(work, engine) + work.prompts * (work.prompt_s + work.launch_s(engine) / work.together)
    made = work.running * deployment.attention_dp / cycle_s / deployment.gpus
    return Serving(time_per_token(work, engine), work.running, work, made)


def step_alone(work: Work, engine: Engine) -> float:
    """Seconds of a step without prompts."""
    return work.decode_s + engine.step_s + engine.sequence_s * work.running


def time_per_token(work: Work, engine: Engine) -> float:
    """Mean seconds per output token after the first, under an engine."""
    waits_s = engine.prefill_share * work.prompt_s + work.launch_s(engine) / work.together
    return step_alone(work, engine) + work.others_prompts * waits_s


def steady_work(deployment: Deployment, kernels: Kernels, hbm_bytes: float, policy: MemoryPolicy) -> Work:
    """The kernels of a steady state: decode steps half way through the outputs, and prompts mixed into them."""
    per_rank = deployment.concurrency / deployment.attention_dp
    running = max(1.0, min(per_rank, sequence_limit(deployment, hbm_bytes, policy)))
    context = deployment.isl + deployment.osl / 2
    batch = Batch(running, context)
    decode_s = step_time(deployment, kernels, batch)
    sequences = running * deployment.attention_dp
    together = max(1.0, sequences / deployment.osl)  # prompts that share a step
    mixed = replace(batch, prompt_tokens=together * deployment.isl, prompt_length=float(deployment.isl))
    added_s = max(0.0, step_time(deployment, kernels, mixed) - decode_s)
    return Work(
        running,
        decode_s,
        added_s / together,
        prompts=sequences / deployment.osl,
        others_prompts=max(0.0, sequences - 1) / deployment.osl,
        together=together,
        layers=deployment.model.layers,
        parts_s=step_parts(deployment, kernels, batch),
    )


def prefill_time(deployment: Deployment, kernels: Kernels, tokens: float) -> float:
    """Seconds of a step in which every attention rank computes `tokens` of prompts of `isl`, as a prefill worker."""
    batch = Batch(0.0, 1.0, tokens, min(tokens, deployment.isl), all_prompt=True)
    return step_time(deployment, kernels, batch)
