"""A strategy as Helm values of llm-d-modelservice, which runs vLLM.

Source: charts/llm-d-modelservice/{values.yaml, values.schema.json, templates/_helpers.tpl} and its LeaderWorkerSet
example. The command is given whole (`modelCommand: custom`), so that the chart adds no option of its own; GPUs are
those of a worker, which is a node of a LeaderWorkerSet where a replica spans several. The chart adds GPUs of the kind
that `accelerator.type` says to whatever a container asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from raysearch.export.deployment import Deployment, Export, check_even, spread_notes, words
from raysearch.export.dynamo import resource_name
from raysearch.export.fitting import fitted
from raysearch.export.vllm import check_ranks, parallel_flags, serving_flags
from sim.engines.vllm import VLLM

FILE = "llm-d-values.yaml"
_IMAGES = {"nvidia": "vllm/vllm-openai:v0.33.0", "amd": "vllm/vllm-openai-rocm:v0.33.0"}
"""By the vendor of the GPUs. [published] Docker Hub; ROCm's since 0.14, that it has this version is [assumed]."""
_PORT, _BEHIND_PROXY = 8000, 8200


def export(deployment: Deployment) -> Export:
    """The values; `helm install` takes them."""
    made = export_pools({"": deployment})
    phase = deployment.workload.phase
    if phase == "serve":
        return made
    return replace(made, notes=(*made.notes, f"this is the {phase} pool alone: add the other one's values"))


def export_pools(pools: Mapping[str, Deployment]) -> Export:
    """Values of pools that serve together, as one release.

    Decode pods then have the chart's routing proxy before them, which has each prompt computed in the prefill pool.
    """
    told, notes, dropped = dict[str, Deployment](), list[str](), list[str]()
    for name, deployment in pools.items():
        runs = fitted(deployment, VLLM)
        which = f"{name} pool: " if name else ""
        notes += [which + text for text in (*runs.notes, *spread_notes(runs.deployment, runs.deployment.nodes))]
        dropped += [which + text for text in runs.dropped]
        told["prefill" if deployment.workload.phase == "prefill" else "decode"] = runs.deployment
    release = resource_name(next(iter(told.values())).workload.model.name)
    notes.append(f"helm install {release} llm-d-modelservice/llm-d-modelservice -f {FILE}")
    return Export("", {FILE: yaml.safe_dump(values(told), sort_keys=False)}, tuple(dropped), tuple(notes))


def values(pools: Mapping[str, Deployment]) -> dict[str, Any]:
    """The content of the values file of pools by role, "prefill" or "decode".

    Raises:
        ValueError: GPUs or data-parallel ranks that do not lie evenly on nodes, which are all alike in a worker set.
    """
    for deployment in pools.values():
        check_even(deployment.strategy.gpus, "GPUs", deployment.nodes)
        check_ranks(deployment)
    first, both = next(iter(pools.values())), len(pools) == 2
    proxy = {"enabled": True, "targetPort": _BEHIND_PROXY} if both else {"enabled": False}
    return {
        "accelerator": {"type": _vendor(first)},
        "multinode": any(deployment.nodes > 1 for deployment in pools.values()),
        "modelArtifacts": {
            "name": first.served_model,
            "uri": f"hf://{first.served_model}",
            "size": "0",
            "authSecretName": "hf-token-secret",
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": resource_name(first.workload.model.name)},
        },
        "routing": {"servicePort": _PORT, "proxy": proxy},
        **{role: _pool(deployment, role, proxied=both) for role, deployment in pools.items()},
        **{role: {"create": False, "replicas": 0} for role in ("prefill", "decode") if role not in pools},
    }


def _pool(deployment: Deployment, role: str, *, proxied: bool) -> dict[str, Any]:
    return {
        "create": True,
        "replicas": deployment.replicas,
        "parallelism": _parallelism(deployment),
        "containers": [_container(deployment, _BEHIND_PROXY if proxied and role == "decode" else _PORT)],
    }


def _vendor(deployment: Deployment) -> str:
    hardware = deployment.workload.hardware
    vendor = hardware.vendor or "nvidia"
    if vendor not in _IMAGES:
        raise ValueError(f"images are known for GPUs of {' and '.join(_IMAGES)}, not of {vendor} ({hardware.name})")
    return vendor


def _parallelism(deployment: Deployment) -> dict[str, int]:
    """What the chart counts GPUs of a worker by: tensor * dataLocal."""
    strategy, nodes = deployment.strategy, deployment.nodes
    if strategy.attention_dp == 1:
        return {"tensor": deployment.gpus_per_node, "data": nodes, "dataLocal": 1, "workers": nodes}
    local = strategy.attention_dp // nodes
    return {
        "tensor": deployment.gpus_per_node // local,
        "data": strategy.attention_dp,
        "dataLocal": local,
        "workers": nodes,
    }


def _container(deployment: Deployment, port: int) -> dict[str, Any]:
    flags = words(parallel_flags(deployment) + serving_flags(deployment))
    serve = ["vllm", "serve", deployment.served_model, "--port", str(port), *flags]
    container: dict[str, Any] = {"name": "vllm", "image": _IMAGES[_vendor(deployment)], "modelCommand": "custom"}
    if deployment.nodes == 1:
        container |= {"command": serve[:2], "args": serve[2:]}
    else:
        container |= {"command": ["/bin/sh", "-c"], "args": [_of_node(deployment, serve)]}
    if variables := _environment(deployment):
        container["env"] = variables
    gpus = {f"{_vendor(deployment)}.com/gpu": str(deployment.gpus_per_node)}
    return {**container, "resources": {"limits": gpus, "requests": dict(gpus)}, "mountModelVolume": True}


def _environment(deployment: Deployment) -> list[dict[str, Any]]:
    """What vLLM reads besides its options: layers of stages that are not alike, where a pool's KV caches are had."""
    split, variables = deployment.layer_partition, list[dict[str, Any]]()
    if split:
        variables.append({"name": "VLLM_PP_LAYER_PARTITION", "value": split})
    if deployment.workload.phase != "serve":
        own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
        variables.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": own_address})
    return variables


def _of_node(deployment: Deployment, serve: list[str]) -> str:
    """The script of each node of a worker set, which knows its own index and its leader's address."""
    import shlex

    strategy, text = deployment.strategy, shlex.join(serve)
    if strategy.attention_dp == 1:
        share = f'--nnodes {deployment.nodes} --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"'
    else:
        local = strategy.attention_dp // deployment.nodes
        share = (
            f'--data-parallel-size-local {local} --data-parallel-address "$LWS_LEADER_ADDRESS" '
            f"--data-parallel-rpc-port 5555 --data-parallel-start-rank $((LWS_WORKER_INDEX * {local}))"
        )
    return f'exec {text} {share} $([ "$LWS_WORKER_INDEX" -eq 0 ] || echo --headless)'
