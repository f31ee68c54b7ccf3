"""A strategy as a `vllm serve` command.

Source: vllm/engine/arg_utils.py and vllm/config/parallel.py of 0.33.0: a replica has tensor-parallel size tp * cp,
data-parallel size dp and pp stages; `--max-num-seqs` counts requests of one data-parallel rank.
"""

from __future__ import annotations

import json
import math

from raysearch.deploy.export.deployment import Deployment, Export, check_even
from raysearch.deploy.export.engine_words import capability_of
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.models import draft_repository
from raysearch.deploy.export.render import Command, Flag
from sim.engines.vllm import VLLM
from sim.serving.phases import phase_of
from sim.workload import Speculation

_NGRAM = 4
"""[assumed] Longest n-gram that is looked up, as in the documentation's example."""
_JOINED = (
    "a proxy that has each prompt computed in the prefill pool first (llm-d's or Dynamo's, or vLLM's example "
    "toy_proxy_server.py), and VLLM_NIXL_SIDE_CHANNEL_HOST set to each host's address"
)
_POOL_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}


def export(deployment: Deployment) -> Export:
    """The command that starts one replica, on the head node of a Ray cluster where it spans several nodes."""
    runs = fitted(deployment, VLLM)
    version, unread = capability_of(runs.deployment.workload, VLLM.name)
    flags, variables = engine_flags(runs.deployment), environment(runs.deployment)
    pool = phase_of(deployment.workload).pool
    own = "--port and VLLM_NIXL_SIDE_CHANNEL_PORT" if pool else "--port"
    notes = [*runs.notes, *unread, *runs.deployment.domain_notes, *runs.deployment.router_notes(_JOINED, own)]
    notes += pushed_notes(runs.deployment)
    if deployment.nodes > 1:
        more, nodes, spans = _over_nodes(runs.deployment)
        flags, variables = flags + more, spans | variables
        notes.append(f"run it on the head of a Ray cluster of {nodes} nodes (`ray start` on each)")
    accepted, lost = version.words(flags)
    command = Command(("vllm", "serve", runs.deployment.served_model), tuple(accepted), variables)
    return Export(command, {}, (*runs.dropped, *lost), tuple(notes), runs.violations)


def pushed_notes(deployment: Deployment) -> list[str]:
    """What the decode pool must say that is not exported beside a prefill pool of several stages."""
    if phase_of(deployment.workload).pool != "prefill" or deployment.strategy.pp == deployment.sender_stages:
        return []
    return ["its stages push their caches: the decode pool, too, must name NixlPushConnector (--kv-transfer-config)"]


def environment(deployment: Deployment) -> dict[str, str]:
    """What its environment must say where stages are not alike, or NCCL shall use one algorithm."""
    split = deployment.layer_partition
    return ({"VLLM_PP_LAYER_PARTITION": split} if split else {}) | deployment.nccl_variables


def _over_nodes(deployment: Deployment) -> tuple[list[Flag], int, dict[str, str]]:
    """Options of a replica that spans nodes, how many it takes, and what its environment must say.

    Source: create_dp_placement_groups of vllm/v1/engine/utils.py: every node takes `--data-parallel-size-local` ranks,
    which is all of them by default; a rank over several nodes fills them whole (`sim.engines.vllm`), and says so.
    """
    flags: list[Flag] = [("--distributed-executor-backend", "ray")]
    ranks, node_gpus = deployment.strategy.attention_dp, deployment.workload.hardware.host_gpus
    if ranks == 1:
        return flags, deployment.nodes, {}
    flags.append(("--data-parallel-backend", "ray"))
    gpus = deployment.strategy.gpus // ranks
    if gpus <= node_gpus:
        local = min(node_gpus // gpus, ranks)
        return [*flags, ("--data-parallel-size-local", local)], math.ceil(ranks / local), {}
    return flags, deployment.nodes, {"VLLM_RAY_DP_PACK_STRATEGY": "span"}


def check_ranks(deployment: Deployment) -> None:
    """Whether every node has as many whole data-parallel ranks, as sets of alike nodes need it.

    Raises:
        ValueError: It has not.
    """
    if deployment.strategy.attention_dp > 1:
        check_even(deployment.strategy.attention_dp, "data-parallel ranks", deployment.nodes)


def engine_flags(deployment: Deployment) -> list[Flag]:
    """All options but those of several nodes."""
    return _parallel_flags(deployment) + _serving_flags(deployment)


def _parallel_flags(deployment: Deployment) -> list[Flag]:
    """Options of the degrees."""
    strategy, moe = deployment.strategy, deployment.workload.model.is_moe
    flags: list[Flag] = [("--tensor-parallel-size", strategy.tp * strategy.cp)]
    if strategy.pp > 1:
        flags.append(("--pipeline-parallel-size", strategy.pp))
    if strategy.attention_dp > 1:
        flags.append(("--data-parallel-size", strategy.attention_dp))
    if strategy.cp > 1:
        flags.append(("--decode-context-parallel-size", strategy.cp))
    if moe and strategy.ep > 1:
        flags.append(("--enable-expert-parallel", None))
        if deployment.workload.expert_exchange == "all_to_all":
            mode = deployment.workload.deepep_mode
            prompts = mode == "normal" or (mode == "auto" and not phase_of(deployment.workload).decodes)
            flags.append(("--all2all-backend", "deepep_high_throughput" if prompts else "deepep_low_latency"))
        if deployment.workload.two_batch_overlap:
            flags.append(("--enable-dbo", None))
    if deployment.by_nccl:
        flags.append(("--disable-custom-all-reduce", None))
    return flags


def _serving_flags(deployment: Deployment) -> list[Flag]:
    """Options of the batch, the memory and the formats."""
    workload = deployment.workload
    flags: list[Flag] = [
        ("--max-num-seqs", deployment.rank_requests),
        ("--max-num-batched-tokens", deployment.step_tokens),
        ("--max-model-len", deployment.longest),
        ("--gpu-memory-utilization", VLLM.memory.share),
    ]
    if workload.precisions.kv_cache == "fp8":
        flags.append(("--kv-cache-dtype", "fp8"))
    if deployment.quantization:
        flags.append(("--quantization", deployment.quantization))
    if workload.redundant_experts:
        flags.append(("--enable-eplb", None))
        flags.append(("--eplb-config", json.dumps({"num_redundant_experts": workload.redundant_experts})))
    if workload.speculation is not None:
        flags.append(("--speculative-config", json.dumps(_speculation(workload.speculation))))
    if pool := phase_of(workload).pool:
        stages = deployment.strategy.pp if pool == "prefill" else deployment.sender_stages
        transfer = {"kv_connector": "NixlPushConnector" if stages > 1 else "NixlConnector", "kv_role": _POOL_ROLE[pool]}
        flags.append(("--kv-transfer-config", json.dumps(transfer)))
    return flags


def _speculation(decoding: Speculation) -> dict[str, object]:
    """Source: docs/features/speculative_decoding of the same version."""
    if decoding.draft == "mtp":
        how: dict[str, object] = {"method": "mtp"}
    elif decoding.draft is None:
        how = {"method": "ngram", "prompt_lookup_max": _NGRAM}
    else:
        how = {"method": "eagle3" if decoding.eagle3 else "draft_model", "model": draft_repository(decoding.draft)}
    return {**how, "num_speculative_tokens": decoding.draft_tokens}
