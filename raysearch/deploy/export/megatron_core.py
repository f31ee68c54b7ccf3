"""A strategy as Megatron-LM's inference server.

Source: examples/inference/run_inference_server.sh and launch_inference_server.py of Megatron-LM, and
megatron/core/inference/contexts/dynamic_context.py of Megatron-Core 0.16.1. Data parallelism is what the degrees leave
of the processes. Experts have a tensor-parallel size of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from raysearch.deploy.export.deployment import Deployment, Export, check_even, spread_notes
from raysearch.deploy.export.engine_words import capability_of
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.models import CHECKPOINT, Supported
from raysearch.deploy.export.render import Command, Flag, Variable
from sim.engines.engine_rules import EngineRules, nvidia_alone
from sim.engines.megatron_core import MEGATRON_CORE
from sim.ops.dims import spread_choices
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate

_SERVERS = ("examples/inference/launch_inference_server.py", "tools/run_dynamic_text_generation_server.py")
"""What starts a server, the newest first: 0.17 has the second alone."""


def export(deployment: Deployment) -> Export:
    """The command that starts one replica; over several nodes, the same on each."""
    runs = fitted(deployment, MEGATRON_CORE, _plain)
    check_even(deployment.strategy.gpus, "GPUs", deployment.nodes)
    launch: list[Flag] = [("--nproc-per-node", deployment.gpus_per_node)]
    version, unread = capability_of(runs.deployment.workload, MEGATRON_CORE.name)
    server = next((name for name in _SERVERS if name in version.servers), _SERVERS[0])
    accepted, lost = version.words(flags(runs.deployment))
    notes = [
        *runs.notes,
        *unread,
        "convert the weights to a Megatron checkpoint first, and put its folder in CHECKPOINT",
    ]
    if list(nvidia_alone(deployment.workload.hardware)):
        notes.append("Megatron-LM is NVIDIA's: elsewhere their maker's fork runs, whose options were not read")
    if deployment.nodes > 1:
        head: Flag = ("--master-addr", Variable("HEAD_ADDRESS"))
        launch += [("--nnodes", deployment.nodes), ("--node-rank", Variable("NODE_RANK")), head]
        notes.append(f"run it on each of {deployment.nodes} nodes, with NODE_RANK 0 to {deployment.nodes - 1}")
    notes += [*spread_notes(deployment, deployment.nodes), *deployment.router_notes()]
    module: Flag = ("-m", server.removesuffix(".py").replace("/", "."))
    options = (*launch, module, *accepted)
    command = Command(("torchrun",), options, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | deployment.nccl_variables)
    return Export(command, {}, (*runs.dropped, *lost), tuple(notes), runs.violations)


def flags(deployment: Deployment) -> list[Flag]:
    """Options of the degrees, the batch and the memory."""
    strategy, workload = deployment.strategy, deployment.workload
    options: list[Flag] = [
        ("--load", CHECKPOINT),
        ("--use-checkpoint-args", None),
        ("--bf16", None),
        ("--tensor-model-parallel-size", strategy.tp),
        ("--pipeline-model-parallel-size", strategy.pp),
    ]
    if split := deployment.layer_partition:  # embedding, layers of each stage, LM head
        layout = "|".join(f"t*{layers}" for layers in split.split(","))
        options.append(("--pipeline-model-parallel-layout", f"E{layout},L"))
    if workload.model.is_moe:
        options += [
            ("--expert-model-parallel-size", strategy.ep),
            ("--expert-tensor-parallel-size", strategy.moe_tp),
            ("--moe-token-dispatcher-type", "alltoall" if workload.expert_exchange == "all_to_all" else "allgather"),
            ("--moe-grouped-gemm", None),
        ]
    if strategy.tp > 1 and strategy.dims != spread_choices(workload, megatron_dims(workload.model)):
        options.append(("--sequence-parallel", None))
    options += [
        ("--inference-dynamic-batching-max-requests", _whole(deployment.rank_requests, strategy.tp)),
        ("--inference-dynamic-batching-max-tokens", _whole(deployment.step_tokens, strategy.tp)),
        ("--inference-dynamic-batching-buffer-size-gb", _buffer_gb(deployment)),
        ("--inference-max-seq-length", deployment.stated_longest),
    ]
    return options + ([("--enable-chunked-prefill", None)] if workload.chunk_tokens else [])


def _whole(count: int, tp: int) -> int:
    """Rounded up to whole shares of the tensor-parallel ranks, as sequence parallelism needs it."""
    return tp * math.ceil(count / tp)


def _buffer_gb(deployment: Deployment) -> int:
    """GB of KV cache that the batch needs on a GPU, rounded up."""
    return math.ceil(evaluate(deployment.workload, deployment.strategy).memory_bytes.kv_cache / 1e9)


def _plain(deployment: Deployment, _engine: EngineRules) -> Supported:
    """Without what it has no options for: formats but bf16, drafts, copies of experts."""
    workload = deployment.workload
    formats = replace(workload.precisions, weights="bf16", kv_cache="bf16")
    plain = replace(workload, precisions=formats, speculation=None, redundant_experts=0)
    if formats == workload.precisions and not workload.speculation and not workload.redundant_experts:
        return Supported(deployment)
    drafts = f", without {workload.speculation.drafter} drafts" if workload.speculation else ""
    copies = ", without copies of experts" if workload.redundant_experts else ""
    text = f"these options keep weights and KV cache in bf16{drafts}{copies}"
    return Supported(replace(deployment, workload=plain), (text,))
