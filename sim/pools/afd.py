"""Attention and experts on GPUs of their own (AFD): a decode pool whose layers alternate between two groups.

Attention GPUs hold attention, the KV cache, dense layers, embedding and LM head; expert GPUs hold routed experts. Of
each layer a microbatch's tokens are sent to their experts and back. With several microbatches one group works on one
while the other works on another, and transfers hide behind both. What a part takes is what its ops take in the step
model: attention's on a mesh of attention GPUs alone, the experts' on one of expert GPUs alone.

Of m microbatches a layer takes as long as the busiest of both groups and of both directions, m times, and never less
than one microbatch's own way through all four. Source: Zhu et al., "MegaScale-Infer", arXiv 2504.02263, section 4.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Memory
from sim.ops.dims import spread_choices
from sim.ops.heuristics import megatron_dims
from sim.ops.layers import layer_of
from sim.prices.collectives import stage_send_s
from sim.prices.dtypes import DTYPE_BYTES
from sim.prices.mesh import MeshGroup
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.stage import needed_and_allowed_bytes
from sim.strategy import Strategy
from sim.workload import Workload, coarse_steps

MOST_MICROBATCHES = 4
"""[published] MegaScale-Infer, section 4.1: three hide a transfer of half a group's time, four a longer one."""
_LARGEST_BATCH = 8192


@dataclass(frozen=True, slots=True)
class AfdPool:
    """A decode pool of attention GPUs and expert GPUs.

    Attributes:
        attention_gpus, expert_gpus: Of each group.
        attention_tp: Tensor-parallel degree of attention; data-parallel over the rest.
        batch: Sequences of a microbatch, over all attention GPUs.
        microbatches: In turn.
        attention_s, experts_s: Of a layer with experts and a microbatch.
        to_experts_s, back_s: Of a microbatch's tokens, per layer.
        tpot_s: Time per output token.
        tokens_per_s_per_gpu: Of both groups' GPUs.
        hidden_share: Share of the transfers that lies behind computing.
    """

    attention_gpus: int
    expert_gpus: int
    attention_tp: int
    batch: int
    microbatches: int
    attention_s: float
    experts_s: float
    to_experts_s: float
    back_s: float
    tpot_s: float
    tokens_per_s_per_gpu: float
    hidden_share: float

    @property
    def gpus(self) -> int:
        """Of both groups."""
        return self.attention_gpus + self.expert_gpus


@dataclass(frozen=True, slots=True)
class _Part:
    """One group's work on a microbatch.

    Attributes:
        layer_s: Of a layer with experts.
        rest_s: Of dense layers, embedding and LM head.
        memory: Of a GPU, with the KV cache of one microbatch.
        factor: Times its seconds that steps take no longer than with the workload's confidence.
    """

    layer_s: float
    rest_s: float
    memory: Memory
    factor: float


def layer_period_s(
    microbatches: int, attention_s: float, experts_s: float, to_experts_s: float, back_s: float
) -> float:
    """Seconds in which all microbatches go through a layer.

    >>> [layer_period_s(count, 2.0, 2.0, 1.0, 1.0) for count in (1, 2, 3)]
    [6.0, 6.0, 6.0]
    >>> layer_period_s(4, 2.0, 1.0, 0.5, 0.5)  # attention alone is never idle
    8.0
    """
    busiest_s = max(attention_s, experts_s, to_experts_s, back_s)
    return max(microbatches * busiest_s, attention_s + experts_s + to_experts_s + back_s)


def best_afd(workload: Workload) -> AfdPool | None:
    """The pool with the most tokens/s/GPU within the limits; None where none keeps them, or there are no experts.

    Exact over attention's tensor and data parallelism, expert GPUs, microbatches, and batches of powers of two and
    half way between them: every combination is computed.

    Args:
        workload: Of phase decode.
    """
    if not workload.model.is_moe:
        return None
    found = (pool for pool in _pools(workload) if pool.tpot_s > 0)
    return max(found, key=lambda pool: pool.tokens_per_s_per_gpu, default=None)


def _pools(workload: Workload) -> Iterator[AfdPool]:
    """All that keep the limits."""
    sizes = [size for size in coarse_steps(workload.max_gpus) if size < workload.max_gpus]
    experts = [size for size in range(1, workload.max_gpus) if workload.model.experts % size == 0]
    batches = coarse_steps(_LARGEST_BATCH)
    for gpus, tp in itertools.product(sizes, workload.degrees.tp):
        if gpus % tp:
            continue
        for batch in (each for each in batches if each >= gpus // tp):
            attention = _attention(workload, tp, gpus, batch)
            if not _fits(workload, attention.memory):
                break
            for expert_gpus in experts:
                if gpus + expert_gpus <= workload.max_gpus:
                    yield from _with_experts(workload, (tp, gpus, batch), attention, expert_gpus)


def _with_experts(
    workload: Workload, shape: tuple[int, int, int], attention: _Part, expert_gpus: int
) -> Iterator[AfdPool]:
    tp, gpus, batch = shape
    experts = _experts(workload, expert_gpus, batch)
    if not _fits(workload, experts.memory):
        return
    sent, back = (
        _transfer_s(workload, gpus, expert_gpus, batch, DTYPE_BYTES[form])
        for form in (workload.precisions.dispatch, workload.precisions.activations)
    )
    layers = sum(group.count for group in workload.model.groups if group.is_moe)
    for count in range(1, MOST_MICROBATCHES + 1):
        if not _fits(workload, replace(attention.memory, kv_cache=attention.memory.kv_cache * count)):
            return
        period_s = layer_period_s(count, attention.layer_s, experts.layer_s, sent, back)
        state, step_s = batching(workload, count * batch, gpus // tp), layers * period_s + count * attention.rest_s
        steps = state.steps(step_s, step_s)
        if max(attention.factor, experts.factor) * steps.tpot_s > workload.tpot_limit_s:
            continue
        alone_s = count * max(attention.layer_s, experts.layer_s)
        shown_s = period_s - max(alone_s, attention.layer_s + experts.layer_s)
        yield AfdPool(
            gpus,
            expert_gpus,
            tp,
            batch,
            count,
            attention.layer_s,
            experts.layer_s,
            sent,
            back,
            steps.tpot_s,
            state.throughput(steps.step_s, gpus + expert_gpus),
            1 - max(0.0, min(1.0, shown_s / (count * (sent + back)))),
        )


def _fits(workload: Workload, memory: Memory) -> bool:
    needed, allowed = needed_and_allowed_bytes(workload, memory)
    return needed <= allowed


def _transfer_s(workload: Workload, attention_gpus: int, expert_gpus: int, batch: int, each_bytes: float) -> float:
    """Seconds of a microbatch's tokens over the busiest port, one way; a token goes once to each GPU of its experts."""
    (layer, *_) = (group.feed_forward for group in workload.model.groups if group.is_moe)
    assert layer is not None
    visits, width = layer.experts_per_token, layer.latent or workload.model.hidden
    copies = expert_gpus * (1 - (1 - 1 / expert_gpus) ** visits)
    all_bytes = batch * copies * width * each_bytes
    busiest = max(all_bytes / attention_gpus, all_bytes * workload.load_imbalance / expert_gpus)
    near = attention_gpus + expert_gpus <= workload.hardware.node_gpus
    return stage_send_s(workload.hardware, MeshGroup(2, 2 if near else 1), busiest)


@lru_cache(maxsize=4096)
def _attention(workload: Workload, tp: int, gpus: int, batch: int) -> _Part:
    found = evaluate(workload, Strategy(tp, gpus, 1, batch, _dims(workload), 1, gpus // tp))
    beside = evaluate(workload, Strategy(tp, tp, 1, 1, _dims(workload), 1, 1)).memory_bytes.weights
    weights = beside - _expert_bytes(workload) / tp
    experts = _expert_ops(workload)
    layer_s = rest_s = 0.0
    moe = {group.name for group in workload.model.groups if group.is_moe}
    counts = dict(zip((group.name for group in workload.model.groups), found.stage.group_layers, strict=True))
    for op in found.ops:
        sends = op.name in ("dispatch", "combine")
        seconds = op.kernel_time_s + (0.0 if sends else op.communication_time_s)
        if op.group not in moe:
            rest_s += counts[op.group] * (op.kernel_time_s + op.communication_time_s)
        elif op.name not in experts:
            layer_s += seconds
    rest_s += found.stage.embedding_s + found.stage.head_s
    memory = replace(found.memory_bytes, weights=weights)
    return _Part(layer_s, rest_s, memory, found.tpot_at_s(workload.confidence) / found.tpot_s)


@lru_cache(maxsize=4096)
def _experts(workload: Workload, gpus: int, batch: int) -> _Part:
    found = evaluate(workload, Strategy(1, gpus, 1, batch, _dims(workload)))
    moe = {group.name for group in workload.model.groups if group.is_moe}
    experts = _expert_ops(workload)
    layer_s = sum(op.kernel_time_s for op in found.ops if op.group in moe and op.name in experts)
    memory = replace(found.memory_bytes, weights=_expert_bytes(workload) / gpus, kv_cache=0.0)
    return _Part(layer_s, 0.0, memory, found.tpot_at_s(workload.confidence) / found.tpot_s)


@lru_cache(maxsize=64)
def _expert_ops(workload: Workload) -> frozenset[str]:
    """Between the way to the experts and the way back."""
    names = [op.name for op in layer_of(next(group for group in workload.model.groups if group.is_moe)).ops]
    return frozenset(names[names.index("dispatch") + 1 : names.index("combine")])


@lru_cache(maxsize=64)
def _expert_bytes(workload: Workload) -> float:
    """Of all routed experts: half of them are what a second GPU takes off the first."""
    one, two = (evaluate(workload, Strategy(1, ep, 1, 2, _dims(workload))).memory_bytes.weights for ep in (1, 2))
    return 2 * (one - two)


@lru_cache(maxsize=64)
def _dims(workload: Workload) -> tuple[int, ...]:
    """Attention on heads, experts whole: as the engine's plan has it, or Megatron-LM."""
    if (rules := engine_rules_of(workload)) is not None:
        return rules.plans_of(workload)[0].dims
    return spread_choices(workload, megatron_dims(workload.model))
