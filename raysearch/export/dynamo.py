"""A strategy as a DynamoGraphDeployment of NVIDIA Dynamo 1.6.1 (nvidia.com/v1beta1).

Source: dynamo/profiler/templates/dgd/* and dynamo/profiler/utils/config.py of the ai-dynamo 1.6.1 wheel. A worker's
replicas are the deployment's; one that spans nodes says so in `multinode.nodeCount`, and GPUs are counted per node. The
operator adds what each engine needs to span nodes, data-parallel ranks of a node too (its backend_vllm.go).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from raysearch.export import sglang, trtllm, vllm
from raysearch.export.deployment import Deployment, Export, check_even, spread_notes, words
from raysearch.export.fitting import fitted
from raysearch.export.vllm import check_ranks
from sim.engines.registry import engine_rules

VERSION = "1.6.1"
FILE = "dynamo.yaml"
_IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}


def export(deployment: Deployment) -> Export:
    """The resource, of the workload's engine (vLLM where it has none); `kubectl apply -f` takes it."""
    engine = deployment.workload.engine.name.partition("<")[0] if deployment.workload.engine else "vllm"
    if engine not in _IMAGES:
        raise ValueError(f"Dynamo runs {', '.join(_IMAGES)}, not {engine}")
    runs = fitted(deployment, engine_rules(engine))
    phase = deployment.workload.phase
    check_even(runs.deployment.strategy.gpus, "GPUs", deployment.nodes)
    if engine == "vllm":
        check_ranks(runs.deployment)
    notes = [*runs.notes, *spread_notes(runs.deployment, runs.deployment.nodes)]
    notes.append(f"kubectl apply -f {FILE}, where Dynamo's operator of {VERSION} runs")
    notes.append("hf-token-secret holds HF_TOKEN")
    if phase != "serve":
        notes.append(f"this is the {phase} pool alone: add the components of the other one")
    content = yaml.safe_dump(_resource(runs.deployment, engine), sort_keys=False)
    return Export("", {FILE: content}, runs.dropped, tuple(notes))


def _resource(deployment: Deployment, engine: str) -> dict[str, Any]:
    phase = deployment.workload.phase
    worker: dict[str, Any] = {
        "name": "worker" if phase == "serve" else phase,
        "type": "worker" if phase == "serve" else phase,
        "replicas": deployment.replicas,
        "podTemplate": _pod(engine, ["python3", "-m", f"dynamo.{engine}"], _args(deployment, engine), deployment),
    }
    if deployment.nodes > 1:
        worker["multinode"] = {"nodeCount": deployment.nodes}
    frontend = {
        "name": "Frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": _pod(engine, ["python3"], ["-m", "dynamo.frontend"], None),
    }
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": resource_name(f"{deployment.workload.model.name}-{engine}")},
        "spec": {"components": [frontend, worker]},
    }


def resource_name(text: str) -> str:
    """A text as the name of a Kubernetes resource: lower case, letters, digits and hyphens, at most 63.

    >>> resource_name("Qwen3_235B-A22B")
    'qwen3-235b-a22b'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63]


def _pod(engine: str, command: list[str], args: list[str], worker: Deployment | None) -> dict[str, Any]:
    main: dict[str, Any] = {
        "name": "main",
        "image": f"nvcr.io/nvidia/ai-dynamo/{_IMAGES[engine]}:{VERSION}",
        "command": command,
        "args": args,
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
    }
    if worker is not None:
        main["resources"] = {"limits": {"nvidia.com/gpu": str(worker.gpus_per_node)}}
    return {"spec": {"containers": [main]}}


def _args(deployment: Deployment, engine: str) -> list[str]:
    pool = [] if deployment.workload.phase == "serve" else ["--disaggregation-mode", deployment.workload.phase]
    if engine == "vllm":
        flags = vllm.parallel_flags(deployment) + vllm.serving_flags(deployment)
        kept = [flag for flag in flags if flag[0] != "--kv-transfer-config"]  # Dynamo's mode sets it
        return ["--model", deployment.served_model, *words(kept), *pool]
    if engine == "sglang":
        flags = sglang.parallel_flags(deployment) + sglang.serving_flags(deployment)
        return ["--model-path", deployment.served_model, *words(flags)]
    overridden = json.dumps(trtllm.config(deployment))
    return ["--model-path", deployment.served_model, "--override-engine-args", overridden, *pool]
