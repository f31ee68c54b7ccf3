"""A strategy as Helm values of llm-d-modelservice, which runs vLLM.

Source: charts/llm-d-modelservice/{values.yaml, values.schema.json, templates/_helpers.tpl} and its LeaderWorkerSet
example. The command is given whole (`modelCommand: custom`), so that the chart adds no option of its own; GPUs are
those of a worker, which is a node of a LeaderWorkerSet where a replica spans several. The chart adds GPUs of the kind
that `accelerator.type` says to whatever a container asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from raysearch.deploy.export import vllm
from raysearch.deploy.export.deployment import Deployment, Export, check_even, spread_notes
from raysearch.deploy.export.dynamo import resource_name
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.render import Command, Flag, container_environment, container_words, yaml_text
from raysearch.deploy.export.vllm import check_ranks, engine_flags
from sim.engines.vllm import VLLM
from sim.json_object import JsonObject
from sim.serving.phases import phase_of

VALUES_FILE = "llm-d-values.yaml"
_IMAGES = {"nvidia": "vllm/vllm-openai:v0.33.0", "amd": "vllm/vllm-openai-rocm:v0.33.0"}
"""By the vendor of the GPUs. [published] Docker Hub; ROCm's since 0.14, that it has this version is [assumed]."""
_PORT, _BEHIND_PROXY = 8000, 8200


def export(deployment: Deployment) -> Export:
    """The values; `helm install` takes them."""
    made = export_pools({"": deployment})
    pool = phase_of(deployment.workload).pool
    if pool is None:
        return made
    return replace(made, notes=(*made.notes, f"this is the {pool} pool alone: add the other one's values"))


def export_pools(pools: Mapping[str, Deployment]) -> Export:
    """Values of pools that serve together, as one release.

    Decode pods then have the chart's routing proxy before them, which has each prompt computed in the prefill pool.
    """
    by_phase, notes, dropped, violations = dict[str, Deployment](), list[str](), list[str](), list[str]()
    for name, deployment in pools.items():
        runs = fitted(deployment, VLLM)
        which = f"{name} pool: " if name else ""
        notes += [which + text for text in (*runs.notes, *spread_notes(runs.deployment, runs.deployment.nodes))]
        dropped += [which + text for text in runs.dropped]
        violations += [which + text for text in runs.violations]
        by_phase[phase_of(deployment.workload).pool or "decode"] = runs.deployment
    release = resource_name(next(iter(by_phase.values())).workload.model.name)
    notes.append(f"helm install {release} llm-d-modelservice/llm-d-modelservice -f {VALUES_FILE}")
    return Export(None, {VALUES_FILE: yaml_text(values(by_phase))}, tuple(dropped), tuple(notes), tuple(violations))


def values(pools: Mapping[str, Deployment]) -> JsonObject:
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
            "name": str(first.served_model),
            "uri": f"hf://{quote(str(first.served_model))}",
            "size": "0",
            "authSecretName": "hf-token-secret",
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": resource_name(first.workload.model.name)},
        },
        "routing": {"servicePort": _PORT, "proxy": proxy},
        **{role: _pool(deployment, role, proxied=both) for role, deployment in pools.items()},
        **{role: {"create": False, "replicas": 0} for role in ("prefill", "decode") if role not in pools},
    }


def _pool(deployment: Deployment, role: str, *, proxied: bool) -> JsonObject:
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


def _container(deployment: Deployment, port: int) -> JsonObject:
    """Its command is `vllm serve`; where a replica spans nodes, by way of a script that adds what differs on each."""
    flags: list[Flag] = [("--port", port), *engine_flags(deployment)]
    environment, script = vllm.environment(deployment), list[str]()
    if deployment.nodes > 1:
        more, variables, of_node = _over_nodes(deployment)
        flags, environment, script = flags + more, environment | variables, ["/bin/sh", "-c", of_node, "sh"]
    container_command = container_words(
        [*script, *Command(("vllm", "serve", deployment.served_model), tuple(flags)).words]
    )
    container: JsonObject = {"name": "vllm", "image": _IMAGES[_vendor(deployment)], "modelCommand": "custom"}
    container |= {"command": container_command[:2], "args": container_command[2:]}
    variables = [*container_environment(environment), *_own_address(deployment)]
    if variables:
        container["env"] = variables
    gpus = {f"{_vendor(deployment)}.com/gpu": str(deployment.gpus_per_node)}
    return {**container, "resources": {"limits": gpus, "requests": dict(gpus)}, "mountModelVolume": True}


def _own_address(deployment: Deployment) -> list[JsonObject]:
    """Where a pool's KV caches are had."""
    if phase_of(deployment.workload).pool is None:
        return []
    return [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


_OF_RANK = """
[ "$LWS_WORKER_INDEX" -eq 0 ] || set -- "$@" --headless
exec "$@" --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"
""".lstrip()
_OF_RANKS = """
[ "$LWS_WORKER_INDEX" -eq 0 ] || set -- "$@" --headless
set -- "$@" --data-parallel-start-rank "$((LWS_WORKER_INDEX * RANKS_PER_NODE))"
exec "$@" --data-parallel-address "$LWS_LEADER_ADDRESS"
""".lstrip()
"""Scripts of each node of a worker set, which knows its own index and its leader's address."""


def _over_nodes(deployment: Deployment) -> tuple[list[Flag], dict[str, str], str]:
    """Options and variables that all nodes of a replica have, and the script that adds what differs."""
    if deployment.strategy.attention_dp == 1:
        return [("--nnodes", deployment.nodes)], {}, _OF_RANK
    local = deployment.strategy.attention_dp // deployment.nodes
    flags: list[Flag] = [("--data-parallel-size-local", local), ("--data-parallel-rpc-port", 5555)]
    return flags, {"RANKS_PER_NODE": str(local)}, _OF_RANKS
