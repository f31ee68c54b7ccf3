"""TensorRT-LLM 1.3.0rc as a strategy space.

Source: tensorrt_llm/mapping.py as a guide quotes it, its documentation of 1.3.0rc26 (Helix, attention DP) and the
engine arguments that AIConfigurator generates for 1.3.0rc23; its source was not read. Attention is tensor-parallel or
data-parallel over all GPUs of a stage, nothing between; experts have moe_tp * moe_ep of them in any factors. Helix cuts
the context on servers that only generate.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.engines.engine_rules import EngineRules, dense_copies, nvidia_alone, whole_experts, whole_heads
from sim.engines.vllm import tensor_parallelism
from sim.prices.engine import MemoryPolicy, SchedulerPolicy
from sim.prices.hardware import KERNEL_ALGORITHMS, NCCL_ALGORITHMS, Hardware
from sim.serving.phases import DECODE, phase_of
from sim.strategy import Strategy
from sim.workload import Workload


def _helix(workload: Workload) -> bool:
    return phase_of(workload).pool == DECODE.name


def _refuses(workload: Workload, strategy: Strategy) -> Iterator[str]:
    yield from dense_copies(workload, strategy)
    yield from whole_heads(workload, strategy)
    yield from whole_experts(workload, strategy)
    tp, cp, dp, ep = strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep
    if dp > 1 and tp * cp > 1:
        yield (
            f"enable_attention_dp is all or nothing: attention has tp = {strategy.stage_gpus} or dp = "
            f"{strategy.stage_gpus}, and tp*cp={tp * cp} beside dp={dp} is not supported"
        )
    if strategy.stage_gpus % ep:
        yield f"moe_tp * moe_ep must be the {strategy.stage_gpus} GPUs of a stage, which moe_ep={ep} does not divide"
    if strategy.pp > workload.model.layers:
        yield f"pipeline_parallel_size {strategy.pp} exceeds {workload.model.layers} layers"


def _scheduler(_hardware: Hardware) -> SchedulerPolicy:
    """[published] max_num_tokens 8192; contexts come whole, after those that generate."""
    return SchedulerPolicy(
        mixes=True, step_tokens=8192, chunks=False, reserved_output=1.0, block_tokens=32, whole_blocks=True
    )


TRTLLM = EngineRules(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.3.0rc",
    # [published] free_gpu_memory_fraction 0.9, GUARANTEED_NO_EVICT and max_batch_size 2048 are its defaults. The
    # runtime's bytes are [assumed].
    memory=MemoryPolicy(0.90, "free", 2.5e9, True, 2048),
    kernels="trtllm",
    expert_exchange="all_gather",
    plans=tensor_parallelism,
    refuses=_refuses,
    cuts_context=_helix,
    lacks_machine=nvidia_alone,
    scheduler=_scheduler,
    prompts_wait=True,  # [published] attention_dp_config.enable_balance, timeout_iters 50; off by default
    disaggregates=True,
    all_reduces=("nccl", *NCCL_ALGORITHMS, *KERNEL_ALGORITHMS),  # [published] allreduce_strategy of llm_args.py
    cuts_stages=True,  # [published] pp_partition of llm_args.py
)
