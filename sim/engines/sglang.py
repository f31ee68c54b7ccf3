"""SGLang 0.5.23 as a strategy space.

Source: sglang/srt/arg_groups/{fields/parallel.py, parallel_hook.py, moe_hook.py, layernorm_sp_hook.py,
model_overrides} and disaggregation/common/conn.py of 0.5.23. Its
tensor-parallel size counts the GPUs of a stage, tp * cp * dp: attention has dp groups (--attn-dp-size) of tp * cp GPUs,
of which cp share a KV cache (--dcp-size); experts have ep * moe_tp of them, any ep that divides them where tokens are
gathered, ep = all of them where they travel (every all-to-all backend forces it).
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.engines.engine_rules import (
    EngineRules,
    Plan,
    Refuses,
    by_memory,
    dense_copies,
    served_pool,
    shared_context,
    whole_blocks,
    whole_experts,
    whole_heads,
)
from sim.engines.vllm import generates, tensor_parallelism
from sim.layers.mixers import LatentAttention
from sim.ops.heuristics import megatron_sp_dims
from sim.prices.engine import MemoryPolicy, SchedulerPolicy
from sim.prices.hardware import Hardware
from sim.serving.phases import phase_of
from sim.strategy import Strategy
from sim.workload import Workload


def _plans(workload: Workload) -> tuple[Plan, ...]:
    """Norms over tokens (--enable-layernorm-sp) in prefill alone, of models whose file names SGLang for it."""
    plans = tensor_parallelism(workload)
    if not phase_of(workload).decodes and "sglang" in workload.model.published.layernorm_sp:
        needs: Refuses = _needs_plain_tp
        plans += (Plan("norms over tokens (--enable-layernorm-sp)", megatron_sp_dims(workload.model), needs),)
    return plans


def _needs_plain_tp(_workload: Workload, strategy: Strategy) -> Iterator[str]:
    if strategy.tp == 1 or strategy.pp > 1:
        yield f"--enable-layernorm-sp needs tensor parallelism and no pipeline, got tp={strategy.tp}, pp={strategy.pp}"


def _refuses(workload: Workload, strategy: Strategy) -> Iterator[str]:
    yield from dense_copies(workload, strategy)
    yield from whole_heads(workload, strategy)
    yield from whole_experts(workload, strategy)
    yield from shared_context(workload, strategy)
    yield from whole_blocks(workload, strategy)
    yield from _sent_context(workload, strategy)
    ep, gpus = strategy.ep, strategy.stage_gpus
    if gpus % ep:
        yield f"--ep-size {ep} does not divide --tp-size {gpus}"
    elif workload.expert_exchange == "all_to_all" and ep not in (1, gpus):
        yield f"every all-to-all backend (--moe-a2a-backend) makes ep all {gpus} GPUs of --tp-size, not {ep}"


def _sent_context(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """[published] Pools share contexts of latent attention alone (conn.py: "Unsupported PD DCP topology")."""
    if strategy.cp == 1 or served_pool(workload) is None:
        return
    mixers = [group.attention for group in workload.model.groups]
    if any(getattr(each, "indexer", None) for each in mixers):
        yield f"--dcp-size {strategy.cp}: pools share no contexts of sparse attention"
    elif not all(isinstance(each, LatentAttention) for each in mixers):
        yield f"--dcp-size {strategy.cp}: pools share contexts of latent attention alone"


def _refuses_stages(prefill: int, decode: int) -> Iterator[str]:
    """[published] Stages of both pools are alike, or decode has one (conn.py asserts it)."""
    if decode not in (1, prefill):
        yield f"--pp-size of the decode pool is 1 or that of the prefill pool, {prefill}, not {decode}"


def _scheduler(hardware: Hardware) -> SchedulerPolicy:
    """Prompts first: those that decode stand still meanwhile.

    [published] chunked_prefill_size by the GPU's memory, over attention's ranks (memory_hook.py, parallel_hook.py). A
    benchmark's requests ignore the end of their answers, so that all of them is set aside (prefill_budget.py).
    """
    tokens = by_memory(hardware, 4096, 8192, 16384)
    return SchedulerPolicy(
        mixes=False, step_tokens=tokens, chunks=True, reserved_output=1.0, shared_by_ranks=True, block_tokens=1
    )


SGLANG = EngineRules(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    # [assumed] Between what its heuristics give for mem_fraction_static on 4 H100: 0.82 where room for a chunk's
    # activations and CUDA graphs is set aside, 0.975 where the cache is sized after their capture; the share here holds
    # activations, too. [published] handle_gpu_memory_settings of sglang/srt/arg_groups: 1.5 MB per token of a chunk
    # (8,192 on an H100), 2 MB per captured request (512), 0.5 GB and a GB per 8 GPUs; or 1.5 GB and a GB per 8 GPUs.
    # What it takes for SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK: [published] token_dispatcher/deepep.py of 0.5.21
    # to 0.5.23.
    memory=MemoryPolicy(0.88, "total", 0.0, False, 2048, most_sent_tokens=1024),
    kernels="sglang",
    expert_exchange="all_gather",  # [published] --moe-a2a-backend none
    plans=_plans,
    refuses=_refuses,
    cuts_context=generates,
    scheduler=_scheduler,
    overlaps_batches=True,  # [published] --enable-two-batch-overlap; off by default
    prompts_wait=True,  # [published] --enable-prefill-delayer, of 30 passes; off by default
    disaggregates=True,
    refuses_stages=_refuses_stages,
    cuts_stages=True,  # [published] SGLANG_PP_LAYER_PARTITION
)
