"""A strategy as Kubernetes resources of llm-d, which runs vLLM, and as the values of its router.

Source: guides/pd-disaggregation and guides/wide-ep-lws of llm-d/llm-d, guides/recipes/modelserver, and
pkg/sidecar/proxy/options.go of llm-d-router. A replica on one node is a pod of a Deployment, one over several nodes a
LeaderWorkerSet; pools of prompts and of answers are roles of one DisaggregatedSet, and before each decode pod stands a
proxy that has its prompts computed in the other pool. Data-parallel ranks over several nodes answer at ports of their
own, below a supervisor on each node. The image has the vLLM of the newest release, or the version that is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raysearch.deploy.export import vllm
from raysearch.deploy.export.deployment import Deployment, Export, NamedRefused, check_even, spread_notes
from raysearch.deploy.export.dynamo import resource_name
from raysearch.deploy.export.engine_words import Capability, read_capability, stated_version
from raysearch.deploy.export.fitting import Fitted, fitted, on_engine
from raysearch.deploy.export.render import Argument, Command, Flag, container_environment, container_words, yaml_text
from raysearch.deploy.export.vllm import check_ranks, engine_flags
from sim.config.catalog import read_versions
from sim.engines.vllm import VLLM
from sim.json_object import JsonObject
from sim.serving.phases import phase_of

RESOURCES_FILE = "llm-d.yaml"
ROUTER_FILE = "llm-d-router-values.yaml"
_IMAGES = {"nvidia": "vllm/vllm-openai", "amd": "vllm/vllm-openai-rocm"}
"""By the vendor of the GPUs. [published] Docker Hub."""
_SIDECAR = "ghcr.io/llm-d/llm-d-router-disagg-sidecar"
_PORT, _BEHIND_PROXY, _NIXL_PORT, _RPC_PORT = 8000, 8200, 5600, 5555
_SECRET = {"secretKeyRef": {"name": "llm-d-hf-token", "key": "HF_TOKEN"}}
_SHARED_MEMORY = "20Gi"
"""[published] of guides/pd-disaggregation; of wide expert parallelism 2Gi are enough."""
_STARTS_S = 3600


@dataclass(frozen=True)
class _Released:
    """What is installed.

    Attributes:
        router: Its version.
        engine: Options of the image's vLLM.
    """

    router: str
    engine: Capability


def export(deployment: Deployment) -> Export:
    """The resources; `kubectl apply` takes them."""
    made = export_pools({"": deployment})
    pool = phase_of(deployment.workload).pool
    if pool is None:
        return made
    pushed = vllm.pushed_notes(deployment)
    return replace(made, notes=(*made.notes, f"this is the {pool} pool alone: add the role of the other one", *pushed))


def export_pools(pools: Mapping[str, Deployment]) -> Export:
    """Resources of pools that serve together, and one router before them."""
    by_role, notes, dropped, violations = dict[str, Deployment](), list[str](), list[str](), list[str]()
    released = _released(next(iter(pools.values())))
    for name, deployment in pools.items():
        runs = _in_image(deployment, released.engine.version)
        check_even(runs.deployment.strategy.gpus, "GPUs", deployment.nodes)
        check_ranks(runs.deployment)
        which = f"{name} pool: " if name else ""
        notes += [which + text for text in (*runs.notes, *spread_notes(runs.deployment, runs.deployment.nodes))]
        dropped += [which + text for text in runs.dropped]
        violations += [which + text for text in runs.violations]
        by_role[phase_of(deployment.workload).pool or "decode"] = runs.deployment
    first = next(iter(by_role.values()))
    priced = stated_version(first.workload, VLLM.name) or VLLM.version
    if released.engine.version != priced:
        notes.append(f"the image has vLLM {released.engine.version}; priced was {priced}")
    release, needed = resource_name(first.workload.model.name), any(each.nodes > 1 for each in by_role.values())
    files = {
        RESOURCES_FILE: yaml_text(_resource(by_role, released, release)),
        ROUTER_FILE: yaml_text(_router(by_role, release)),
    }
    if len({_local_ranks(each) for each in by_role.values()}) > 1:
        notes.append("the router asks all pods at as many ports as those with most ranks have: one per pool is better")
    sets = " with enableDisaggregatedSet=true" if len(by_role) == 2 else ""
    notes += [f"oci://registry.k8s.io/lws/charts/lws must be installed{sets}"] if needed or sets else []
    notes += [
        "llm-d-hf-token contains HF_TOKEN",
        f"kubectl apply -f {RESOURCES_FILE}",
        f"helm install {release} oci://ghcr.io/llm-d/charts/llm-d-router-standalone --version v{released.router} "
        f"-f {ROUTER_FILE}",
    ]
    return Export(None, files, tuple(dropped), tuple(notes), tuple(violations))


def _in_image(deployment: Deployment, version: str) -> Fitted:
    """What the image's version runs.

    Raises:
        NamedRefused: As `fitted`; where a newer version runs it, with how one has its image.
    """
    try:
        return fitted(deployment, VLLM, image=version)
    except NamedRefused as error:
        if version == VLLM.version or VLLM.refusals(on_engine(deployment.workload, VLLM), deployment.strategy):
            raise
        other = (
            f"the image of this llm-d has vLLM {version}: "
            f"repeat the command that gave the answer with --engine-version {VLLM.version} to get that version's image"
        )
        raise NamedRefused([*error.refused, other]) from error


def _released(deployment: Deployment) -> _Released:
    """The newest release, with its own vLLM or the version that is named, which its guides' images may be.

    Raises:
        ValueError: A version whose options were not read.
    """
    wanted, read = stated_version(deployment.workload, VLLM.name), read_versions(VLLM.name)
    if wanted is not None and wanted not in read:
        raise ValueError(f"the options of vLLM {wanted} were not read, but those of {', '.join(read)}")
    releases = [read_capability("llm_d", each).pins for each in reversed(read_versions("llm_d"))]
    pins = next((each for each in releases if each[VLLM.name] == wanted), releases[0])
    return _Released(pins["router"], read_capability(VLLM.name, wanted or pins[VLLM.name]))


def _labels(release: str, role: str | None = None) -> dict[str, str]:
    found = {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": release}
    return found | ({"llm-d.ai/role": role} if role else {})


def _resource(pools: Mapping[str, Deployment], released: _Released, release: str) -> JsonObject:
    head: JsonObject = {"metadata": {"name": release, "labels": _labels(release)}}
    if len(pools) == 2:
        roles = [
            {"name": role, "spec": {"replicas": each.replicas, **_group(each, released, release, role, proxied=True)}}
            for role, each in pools.items()
        ]
        kind = {"apiVersion": "disaggregatedset.x-k8s.io/v1", "kind": "DisaggregatedSet"}
        return {**kind, **head, "spec": {"slices": 1, "roles": roles}}
    ((role, deployment),) = pools.items()
    spec: JsonObject = {"replicas": deployment.replicas}
    if deployment.nodes > 1:
        kind = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
        return {**kind, **head, "spec": spec | _group(deployment, released, release, role, proxied=False)}
    pod = _pod(deployment, released, release, role, proxied=False)
    spec |= {"selector": {"matchLabels": _labels(release, role)}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", **head, "spec": spec}


def _group(deployment: Deployment, released: _Released, release: str, role: str, *, proxied: bool) -> JsonObject:
    """Pods of a replica, one on each of its nodes."""
    pod = _pod(deployment, released, release, role, proxied=proxied)
    template: JsonObject = {"size": deployment.nodes, "workerTemplate": pod}
    if deployment.nodes > 1 and not _ranks_apart(deployment):  # the leader alone answers, so it alone is found
        silent = _container(deployment, released, _port(role, proxied=proxied))
        probes = ("startupProbe", "readinessProbe")
        silent = {name: value for name, value in silent.items() if name not in probes}
        worker = {"metadata": {"labels": {"llm-d.ai/model": release}}, "spec": _pod_spec(deployment, silent)}
        template |= {"leaderTemplate": pod, "workerTemplate": worker}
    return {"leaderWorkerTemplate": template}


def _ranks_apart(deployment: Deployment) -> bool:
    """Whether data-parallel ranks lie on several nodes, so that each answers at a port of its own."""
    return deployment.nodes > 1 and deployment.strategy.attention_dp > 1


def _local_ranks(deployment: Deployment) -> int:
    """Ranks of a node that answer apart."""
    return deployment.strategy.attention_dp // deployment.nodes if _ranks_apart(deployment) else 1


def _port(role: str, *, proxied: bool) -> int:
    return _BEHIND_PROXY if proxied and role == "decode" else _PORT


def _pod(deployment: Deployment, released: _Released, release: str, role: str, *, proxied: bool) -> JsonObject:
    port = _port(role, proxied=proxied)
    spec = _pod_spec(deployment, _container(deployment, released, port))
    if port == _BEHIND_PROXY:
        spec = {"initContainers": [_proxy(deployment, released)], **spec}
    return {"metadata": {"labels": _labels(release, role)}, "spec": spec}


def _pod_spec(deployment: Deployment, container: JsonObject) -> JsonObject:
    size = "2Gi" if deployment.strategy.tp * deployment.strategy.cp * deployment.strategy.pp == 1 else _SHARED_MEMORY
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return {"containers": [container], "volumes": [memory]}


def _proxy(deployment: Deployment, released: _Released) -> JsonObject:
    """What has the prompts of decode pods computed in the prefill pool."""
    ranks = _local_ranks(deployment)
    args = [f"--port={_PORT}", f"--vllm-port={_BEHIND_PROXY}", "--kv-connector=nixlv2", "--secure-proxy=false"]
    return {
        "name": "routing-proxy",
        "image": f"{_SIDECAR}:v{released.router}",
        "args": args + ([f"--data-parallel-size={ranks}"] if ranks > 1 else []),
        "ports": [{"containerPort": _PORT + rank} for rank in range(ranks)],
        "restartPolicy": "Always",
        "securityContext": {"allowPrivilegeEscalation": False, "runAsNonRoot": True},
    }


def _container(deployment: Deployment, released: _Released, port: int) -> JsonObject:
    """Its command is `vllm serve`; where a replica spans nodes, by way of a script that adds what differs on each."""
    ranks, apart = _local_ranks(deployment), _ranks_apart(deployment)
    flags: list[Flag] = [("--port", port), *engine_flags(deployment)]
    environment, script = vllm.environment(deployment), list[str]()
    if apart:
        flags += [
            ("--data-parallel-multi-port-external-lb", None),
            ("--data-parallel-supervisor-port", port + ranks),
            ("--data-parallel-size-local", ranks),
            ("--data-parallel-rpc-port", _RPC_PORT),
        ]
        environment, script = environment | {"RANKS_PER_NODE": str(ranks)}, ["/bin/sh", "-c", _OF_RANKS, "sh"]
    elif deployment.nodes > 1:
        flags.append(("--nnodes", deployment.nodes))
        script = ["/bin/sh", "-c", _OF_NODE, "sh"]
    accepted, lost = released.engine.words(flags)
    if lost:
        raise ValueError(f"{lost[0]}: name another version with --engine-version")
    arguments: list[Argument] = [*script, *Command(("vllm", "serve", deployment.served_model), tuple(accepted)).words]
    words, vendor = container_words(arguments), _vendor(deployment)
    probed = port + ranks if apart else port
    gpus = {f"{vendor}.com/gpu": str(deployment.gpus_per_node)}
    return {
        "name": "modelserver",
        "image": f"{_IMAGES[vendor]}:v{released.engine.version}",
        "command": words[:2],
        "args": words[2:],
        "env": [*_variables(deployment), *container_environment(environment)],
        "ports": [{"containerPort": port + rank} for rank in range(ranks)] + [{"containerPort": _NIXL_PORT}],
        "resources": {"limits": gpus, "requests": dict(gpus)},
        "startupProbe": _probe("/health", probed, period_s=10, failures=_STARTS_S // 10),
        "readinessProbe": _probe("/readyz" if apart else "/health", probed, period_s=10, failures=3),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_RAWIO"]}}} if deployment.nodes > 1 else {}),
    }


def _probe(path: str, port: int, *, period_s: int, failures: int) -> JsonObject:
    asked = {"httpGet": {"path": path, "port": port}}
    return {**asked, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _variables(deployment: Deployment) -> list[JsonObject]:
    """What every pod must know, and of a pool where its KV caches are had.

    `USER` for vllm-project/vllm issue 44548; a proxy's idle connections last 90 s, so a server's must last longer.
    """
    found: list[JsonObject] = [
        {"name": "HF_TOKEN", "valueFrom": _SECRET},
        {"name": "USER", "value": "llm-d"},
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "120"},
    ]
    if deployment.nodes > 1:
        found += [{"name": f"{each}_SOCKET_IFNAME", "value": "eth0"} for each in ("GLOO", "NCCL")]
    if phase_of(deployment.workload).pool:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        found.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    return found


def _vendor(deployment: Deployment) -> str:
    hardware = deployment.workload.hardware
    vendor = hardware.vendor or "nvidia"
    if vendor not in _IMAGES:
        raise ValueError(f"images are known for GPUs of {' and '.join(_IMAGES)}, not of {vendor} ({hardware.name})")
    return vendor


_OF_NODE = """
[ "$LWS_WORKER_INDEX" -eq 0 ] || set -- "$@" --headless
exec "$@" --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"
""".lstrip()
_OF_RANKS = """
set -- "$@" --data-parallel-start-rank "$((LWS_WORKER_INDEX * RANKS_PER_NODE))"
exec "$@" --data-parallel-address "$LWS_LEADER_ADDRESS"
""".lstrip()
"""Scripts of each node of a worker set, which knows its own index and its leader's address."""
_PLUGINS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: always-disagg-pd-decider
- type: disagg-profile-handler
  parameters:
    deciders:
      prefill: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: inflight-load-producer
- type: token-load-scorer
- type: active-request-scorer
- type: max-score-picker
schedulingProfiles:
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: token-load-scorer
  - pluginRef: max-score-picker
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: active-request-scorer
  - pluginRef: max-score-picker
""".lstrip()
"""How a router chooses a prefill pod and a decode pod: by queued prompt tokens, by open requests."""


def _router(pools: Mapping[str, Deployment], release: str) -> JsonObject:
    """Values of its chart: whom it finds, at which ports, and how it chooses."""
    ranks = max(_local_ranks(each) for each in pools.values())
    ports = [{"number": _PORT + rank} for rank in range(ranks)]
    servers: JsonObject = {"matchLabels": _labels(release), "targetPorts": ports}
    picker: JsonObject = {"replicas": 1}
    if len(pools) == 2:
        picker |= {"pluginsConfigFile": "pools.yaml", "pluginsCustomConfig": {"pools.yaml": _PLUGINS}}
    return {"router": {"epp": picker, "modelServers": servers}}
