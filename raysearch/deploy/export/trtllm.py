"""A strategy as `trtllm-serve` and its config.yaml.

Source: documentation of TensorRT-LLM 1.3.0rc26 and the engine arguments that AIConfigurator generates for 1.3.0rc23;
`max_batch_size` counts requests of one attention-DP rank, `max_num_tokens` is a multiple of `tokens_per_block`. How
tokens reach their experts is the engine's choice: the backend for wide expert parallelism is gone (pull request 17797).
"""

from __future__ import annotations

import math

from raysearch.deploy.export.deployment import Deployment, Export
from raysearch.deploy.export.engine_words import unread_settings
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.models import draft_repository
from raysearch.deploy.export.render import Argument, Command, yaml_text
from sim.engines.trtllm import TRTLLM
from sim.json_object import JsonObject
from sim.serving.phases import phase_of
from sim.workload import Speculation

CONFIG_FILE = "config.yaml"
_JOINED = "`trtllm-serve disaggregated -c FILE` with the pools' addresses as context_servers and generation_servers"
_BLOCK_TOKENS = 32
"""Tokens of a KV block. [published] default of kv_cache_config.tokens_per_block."""


def export(deployment: Deployment) -> Export:
    """The command that starts one replica, and the file that it reads."""
    runs = fitted(deployment, TRTLLM)
    program: tuple[Argument, ...] = ("trtllm-serve", runs.deployment.served_model)
    notes = [*runs.notes]
    if deployment.nodes > 1:
        program = ("mpirun", "-n", str(deployment.strategy.gpus), "trtllm-llmapi-launch", *program)
        notes.append(f"start it over {deployment.nodes} nodes with their host file, or by `srun` in place of mpirun")
    notes += [*deployment.domain_notes, *deployment.router_notes(_JOINED)]
    command = Command(program, (("--config", CONFIG_FILE),), deployment.nccl_variables)
    content = config(runs.deployment)
    refused, unread = unread_settings(TRTLLM.name, content)
    files = {CONFIG_FILE: yaml_text(content)}
    return Export(command, files, (*runs.dropped, *refused), (*notes, *unread), runs.violations)


def config(deployment: Deployment) -> JsonObject:
    """The content of config.yaml."""
    strategy, workload = deployment.strategy, deployment.workload
    attention_dp = strategy.attention_dp > 1
    content: JsonObject = {
        "backend": "pytorch",
        "tensor_parallel_size": strategy.attention_dp if attention_dp else strategy.tp,
        "pipeline_parallel_size": strategy.pp,
        "enable_attention_dp": attention_dp,
    }
    if split := deployment.layer_partition:
        content["pp_partition"] = [int(layers) for layers in split.split(",")]
    if workload.prompt_wait_steps and attention_dp and phase_of(workload).mixes:
        waits = {"enable_balance": True, "timeout_iters": workload.prompt_wait_steps, "batching_wait_iters": 0}
        content["attention_dp_config"] = waits
    if strategy.cp > 1:
        content["context_parallel_size"] = strategy.cp
        content["cp_config"] = {"cp_type": "HELIX", "tokens_per_block": _BLOCK_TOKENS}
    if workload.model.is_moe:
        content["moe_expert_parallel_size"] = strategy.ep
        content["moe_tensor_parallel_size"] = strategy.moe_tp
        if workload.redundant_experts:
            slots = workload.model.experts + workload.redundant_experts
            content["moe_config"] = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 2}}
    if asked := _strategy_of(deployment):
        content["allreduce_strategy"] = asked
    content["max_batch_size"] = deployment.rank_requests
    content["max_num_tokens"] = _BLOCK_TOKENS * math.ceil(deployment.step_tokens / _BLOCK_TOKENS)
    content["max_seq_len"] = deployment.longest
    content["enable_chunked_prefill"] = workload.chunk_tokens is not None
    content["kv_cache_config"] = {
        "free_gpu_memory_fraction": TRTLLM.memory.share,
        "dtype": "fp8" if workload.precisions.kv_cache == "fp8" else "auto",
        "tokens_per_block": _BLOCK_TOKENS,
    }
    content["cuda_graph_config"] = {"enable_padding": True, "max_batch_size": deployment.rank_requests}
    if workload.speculation is not None:
        content["speculative_config"] = _speculation(workload.speculation)
    if phase_of(workload).pool:
        buffer = _BLOCK_TOKENS * math.ceil(deployment.longest / _BLOCK_TOKENS)
        content["cache_transceiver_config"] = {"backend": "DEFAULT", "max_tokens_in_buffer": buffer}
    if phase_of(workload).pool == "prefill":  # examples/disaggregated: not supported in context servers
        content["disable_overlap_scheduler"] = True
    return content


def _strategy_of(deployment: Deployment) -> str:
    """Its word for the all-reduce that was asked for; "" leaves it to the engine (tensorrt_llm/llmapi/llm_args.py)."""
    asked = deployment.workload.hardware.collectives.all_reduce
    return "NCCL" if deployment.by_nccl else {"one_shot": "ONESHOT", "two_shot": "TWOSHOT"}.get(asked or "", "")


def _speculation(decoding: Speculation) -> JsonObject:
    """Source: tensorrt_llm/llmapi/llm_args.py of the same version."""
    if decoding.draft == "mtp":
        return {"decoding_type": "MTP", "max_draft_len": decoding.draft_tokens}
    if decoding.draft is None:
        return {"decoding_type": "NGram", "max_draft_len": decoding.draft_tokens}
    draft = draft_repository(decoding.draft)
    kind = "Eagle3" if decoding.eagle3 else "Draft_Target"
    return {"decoding_type": kind, "max_draft_len": decoding.draft_tokens, "speculative_model": draft}
