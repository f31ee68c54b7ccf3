"""Megatron-Core 0.16.1's dynamic inference as a strategy space.

Source: megatron/core/{parallel_state.py, model_parallel_config.py, transformer/transformer_config.py} and
inference/contexts/dynamic_context.py of 0.16.1. Experts have a tensor-parallel size of their own
(--expert-tensor-parallel-size), so every pair of meshes on the same GPUs is supported. It alone runs norms over tokens
when it generates. Without sequence parallelism, experts beside tensor parallelism are a warning, for training.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.engines.engine_rules import EngineRules, Plan, dense_copies, whole_experts, whole_heads
from sim.engines.vllm import tensor_parallelism
from sim.ops.heuristics import megatron_sp_dims
from sim.prices.engine import MemoryPolicy
from sim.strategy import Strategy
from sim.workload import Workload


def _plans(workload: Workload) -> tuple[Plan, ...]:
    sequence = Plan("sequence parallelism (--sequence-parallel)", megatron_sp_dims(workload.model), _needs_tp)
    return (*tensor_parallelism(workload), sequence)


def _needs_tp(_workload: Workload, strategy: Strategy) -> Iterator[str]:
    if strategy.tp == 1:
        yield "--sequence-parallel needs tensor parallelism, got tp=1"


def _no_context(_workload: Workload) -> bool:
    return False  # its context parallelism is for training and prompts; the KV cache of a request is on one rank


def _refuses(workload: Workload, strategy: Strategy) -> Iterator[str]:
    yield from dense_copies(workload, strategy)
    yield from whole_heads(workload, strategy)
    yield from whole_experts(workload, strategy)
    if strategy.cp > 1:
        yield f"dynamic inference keeps a request's KV cache whole: cp is 1, not {strategy.cp}"
    if strategy.stage_gpus % strategy.ep:
        yield f"--expert-model-parallel-size {strategy.ep} does not divide the {strategy.stage_gpus} GPUs of a stage"


MEGATRON_CORE = EngineRules(
    name="megatron_core",
    title="Megatron-Core",
    version="0.16.1",
    # [assumed] --inference-dynamic-batching-buffer-size-gb given all that weights and 4 GB of runtime leave, requests
    # as many as have room there: max_requests is the buffer's blocks by default.
    memory=MemoryPolicy(1.0, "total", 4e9, False, 4096),
    kernels="trtllm",  # [assumed] Transformer Engine's GEMMs and NCCL lie nearest to these of the measured ones
    expert_exchange="all_to_all",  # [published] --moe-token-dispatcher-type alltoall
    plans=_plans,
    refuses=_refuses,
    cuts_context=_no_context,
    # [published] run_inference_server.sh loads --bf16 checkpoints, and dynamic_context.py allocates the cache alike.
    weights=("bf16",),
    kv_cache=("bf16",),
    cuts_stages=True,  # [published] --pipeline-model-parallel-layout
)
