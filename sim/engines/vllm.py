"""vLLM 0.33.0 as a strategy space.

Source: vllm/config/{parallel.py, vllm.py, model.py}, engine/arg_utils.py and
model_executor/layers/fused_moe/config.py of 0.33.0. A replica has tensor-parallel size tp * cp (of which cp share a KV
cache: decode context parallelism), data-parallel size dp and pp stages. Experts: without expert parallelism moe_tp =
tp * cp * dp, with it ep is all of that. Norms are never sharded: its sequence parallelism is gone (PassConfig). Stages
need not have equally many layers. Nodes matter to data-parallel ranks alone (create_dp_placement_groups of
vllm/v1/engine/utils.py). What pools can send: distributed/kv_transfer/kv_connector/v1/nixl/*.py of 0.31, 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.engines.engine_rules import (
    EngineRules,
    Plan,
    by_memory,
    dense_copies,
    served_pool,
    shared_context,
    whole_blocks,
    whole_heads,
)
from sim.layers.mixers import CompressedAttention, LatentAttention, LinearMixer
from sim.ops.heuristics import megatron_dims
from sim.prices.engine import MemoryPolicy, SchedulerPolicy
from sim.prices.hardware import Hardware
from sim.serving.phases import phase_of
from sim.strategy import Strategy
from sim.workload import Workload

_PUSHES_SINCE = (0, 31)
"""[published] The first version read whose NixlPushConnector sends the caches of all stages of a prefill pool."""


def tensor_parallelism(workload: Workload) -> tuple[Plan, ...]:
    """The one plan of engines without sequence parallelism: Megatron-LM's, norms and residuals on every GPU."""
    return (Plan("tensor parallelism", megatron_dims(workload.model)),)


def generates(workload: Workload) -> bool:
    """Whether a pool generates tokens, so that GPUs may share a context: it is cut in decode steps."""
    return phase_of(workload).decodes


def _refuses(workload: Workload, strategy: Strategy) -> Iterator[str]:
    yield from dense_copies(workload, strategy)
    yield from whole_heads(workload, strategy)
    yield from shared_context(workload, strategy)
    yield from whole_blocks(workload, strategy)
    yield from _sent_context(workload, strategy)
    yield from _sent_stages(workload, strategy)
    ep, gpus = strategy.ep, strategy.stage_gpus
    if ep not in (1, gpus):
        yield (
            f"expert parallelism is all or nothing (--enable-expert-parallel): ep is 1 or tp*dp = {gpus}, and ep={ep} "
            f"beside moe_tp={strategy.moe_tp} is not supported"
        )
    elif ep > 1 and workload.expert_exchange == "all_to_all" and strategy.attention_dp == 1:
        yield f"tokens travel to experts (--all2all-backend) between data-parallel ranks only, got dp=1 with ep={ep}"
    rank, node = strategy.gpus // strategy.attention_dp, workload.hardware.host_gpus
    if strategy.attention_dp > 1 and rank > node and rank % node:
        yield (
            f"a data-parallel rank lies within a node or fills whole ones, and tp*cp*pp = {rank} GPUs do neither on "
            f"nodes of {node}"
        )


def _sent_context(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Between pools go caches that all GPUs of a rank have a part of, or none, and of latent attention (VllmConfig)."""
    cp, latent = strategy.cp, all(isinstance(group.attention, LatentAttention) for group in workload.model.groups)
    if served_pool(workload) and cp > 1 and not (latent and strategy.tp == 1):
        yield (
            f"decode context parallel size {cp}: pools (NixlConnector) share contexts of latent attention alone, and "
            f"over the whole tensor-parallel size, {strategy.tp * cp}"
        )


def _sent_stages(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """[published] Pipelines whose caches no connector sends (nixl/base_worker.py; pull_worker.py asks stage 0 alone).

    With caches of several kinds NixlPushConnector has further conditions, and of linear mixers it sends none.
    """
    pool, pp = served_pool(workload), strategy.pp
    if pp == 1 or pool is None:
        return
    if pool == "decode":
        yield f"pipeline parallel size {pp}: a decode pool (kv_consumer of NIXL) has no pipeline"
        return
    mixers = [group.attention for group in workload.model.groups]
    kinds = {(type(each), getattr(each, "window", 0)) for each in mixers}
    if len(kinds) > 1 or any(isinstance(each, LinearMixer | CompressedAttention) for each in mixers):
        yield f"pipeline parallel size {pp}: a prefill pool with caches of several kinds has no pipeline"
    version = workload.engine.version if workload.engine else None
    if version and tuple(int(part) for part in version.number.split(".")[:2]) < _PUSHES_SINCE:
        yield f"pipeline parallel size {pp}: a prefill pool sends the caches of all its stages since 0.31 alone"


def _scheduler(hardware: Hardware) -> SchedulerPolicy:
    """[published] max_num_batched_tokens of a server by the GPU's memory, an A100's as a small one's (arg_utils.py)."""
    tokens = by_memory(hardware, 2048, 2048 if hardware.name.startswith("a100") else 8192, 16384)
    return SchedulerPolicy(mixes=True, step_tokens=tokens, chunks=True, block_tokens=16)


VLLM = EngineRules(
    name="vllm",
    title="vLLM",
    version="0.33.0",
    # [published] gpu_memory_utilization 0.9 and, on an H100, max_num_seqs 1024 are its defaults. The runtime's bytes
    # are [assumed].
    memory=MemoryPolicy(0.90, "total", 2.5e9, False, 1024),
    kernels="vllm",
    expert_exchange="all_gather",  # [published] --all2all-backend allgather_reducescatter
    plans=tensor_parallelism,
    refuses=_refuses,
    cuts_context=generates,
    overlaps_batches=True,  # [published] --enable-dbo; off by default
    scheduler=_scheduler,
    disaggregates=True,
    cuts_stages=True,  # [published] VLLM_PP_LAYER_PARTITION
)
