"""A strategy as Helm values of llm-d-modelservice, which runs vLLM.

Source: charts/llm-d-modelservice/{values.yaml, values.schema.json, templates/_helpers.tpl} and its LeaderWorkerSet
example. The command is given whole (`modelCommand: custom`), so that the chart adds no option of its own; GPUs are
those of a worker, which is a node of a LeaderWorkerSet where a replica spans several. The chart adds GPUs of the kind
that `accelerator.type` says to whatever a container asks for.
"""

from __future__ import annotations

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
_PORT = 8000


def export(deployment: Deployment) -> Export:
    """The values; `helm install` takes them."""
    runs = fitted(deployment, VLLM)
    pool = "prefill" if deployment.workload.phase == "prefill" else "decode"
    notes = [
        *runs.notes,
        *spread_notes(runs.deployment, runs.deployment.nodes),
        f"helm install {resource_name(deployment.workload.model.name)} llm-d-modelservice/llm-d-modelservice -f {FILE}",
    ]
    if deployment.workload.phase != "serve":
        notes.append(f"this is the {pool} pool alone: add the other one's values")
    content = yaml.safe_dump(values(runs.deployment, pool), sort_keys=False)
    return Export("", {FILE: content}, runs.dropped, tuple(notes))


def values(deployment: Deployment, pool: str) -> dict[str, Any]:
    """The content of the values file.

    Raises:
        ValueError: GPUs or data-parallel ranks that do not lie evenly on nodes, which are all alike in a worker set.
    """
    nodes = deployment.nodes
    check_even(deployment.strategy.gpus, "GPUs", nodes)
    check_ranks(deployment)
    other = "prefill" if pool == "decode" else "decode"
    name = resource_name(deployment.workload.model.name)
    return {
        "accelerator": {"type": _vendor(deployment)},
        "multinode": nodes > 1,
        "modelArtifacts": {
            "name": deployment.served_model,
            "uri": f"hf://{deployment.served_model}",
            "size": "0",
            "authSecretName": "hf-token-secret",
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": name},
        },
        "routing": {"servicePort": _PORT, "proxy": {"enabled": False}},
        pool: {
            "create": True,
            "replicas": deployment.replicas,
            "parallelism": _parallelism(deployment),
            "containers": [_container(deployment)],
        },
        other: {"create": False, "replicas": 0},
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


def _container(deployment: Deployment) -> dict[str, Any]:
    flags = words(parallel_flags(deployment) + serving_flags(deployment))
    serve = ["vllm", "serve", deployment.served_model, "--port", str(_PORT), *flags]
    container: dict[str, Any] = {"name": "vllm", "image": _IMAGES[_vendor(deployment)], "modelCommand": "custom"}
    if deployment.nodes == 1:
        container |= {"command": serve[:2], "args": serve[2:]}
    else:
        container |= {"command": ["/bin/sh", "-c"], "args": [_of_node(deployment, serve)]}
    gpus = {f"{_vendor(deployment)}.com/gpu": str(deployment.gpus_per_node)}
    return {**container, "resources": {"limits": gpus, "requests": dict(gpus)}, "mountModelVolume": True}


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
