"""A strategy as a DynamoGraphDeployment of NVIDIA Dynamo (nvidia.com/v1beta1).

Source: dynamo/profiler/templates/dgd/*, dynamo/profiler/utils/config.py and dynamo/vllm/args.py (a prefill worker of
vLLM must be given its connector) of the ai-dynamo 1.6.1 wheel. The release is the newest whose image has the engine's
version, and what that image has decides the words. A worker's replicas are the deployment's; one that spans nodes says
so in `multinode.nodeCount`, and GPUs are counted per node. The operator adds what each engine needs to span nodes,
data-parallel ranks of a node too (its backend_vllm.go).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from raysearch.deploy.export import sglang, trtllm, vllm
from raysearch.deploy.export.deployment import Deployment, Export, check_even, spread_notes
from raysearch.deploy.export.engine_words import Capability, read_capability, stated_version
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.render import Argument, Flag, container_environment, container_words, words, yaml_text
from raysearch.deploy.export.vllm import check_ranks
from sim.config.catalog import read_versions
from sim.engines.engine_registry import engine_rules
from sim.engines.engine_rules import nvidia_alone
from sim.json_object import JsonObject
from sim.serving.phases import phase_of

MANIFEST_FILE = "dynamo.yaml"
_SGLANG_POOL: tuple[Flag, ...] = (
    ("--disaggregation-transfer-backend", "nixl"),
    ("--disaggregation-bootstrap-port", 12345),
    ("--host", "0.0.0.0"),
)
_IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}


def export(deployment: Deployment) -> Export:
    """The resource, of the workload's engine (vLLM where it has none); `kubectl apply -f` takes it."""
    made = export_pools({"": deployment})
    pool = phase_of(deployment.workload).pool
    if pool is None:
        return made
    pushed = vllm.pushed_notes(deployment) if _engine_of(deployment) == "vllm" else []
    return replace(
        made, notes=(*made.notes, f"this is the {pool} pool alone: add the components of the other one", *pushed)
    )


def export_pools(pools: Mapping[str, Deployment]) -> Export:
    """One resource for pools that serve together: a frontend, and the workers of each pool as a component.

    Source: examples/backends/*/deploy/disagg.yaml of Dynamo.
    """
    first = next(iter(pools.values()))
    image = _image_of(first, _engine_of(first))
    engine = image.engine
    components, notes, dropped, violations = [_frontend(image)], list[str](), list[str](), list[str]()
    for name, deployment in pools.items():
        runs = fitted(deployment, engine_rules(engine), image=image.version)
        check_even(runs.deployment.strategy.gpus, "GPUs", deployment.nodes)
        if engine == "vllm":
            check_ranks(runs.deployment)
        which = f"{name} pool: " if name else ""
        notes += [which + text for text in (*runs.notes, *spread_notes(runs.deployment, runs.deployment.nodes))]
        dropped += [which + text for text in runs.dropped]
        violations += [which + text for text in runs.violations]
        accepted, lost = _args(runs.deployment, image)
        dropped += [which + text for text in lost]
        components.append(_worker(runs.deployment, image, accepted))
    model = first.workload.model.name
    priced = stated_version(first.workload, engine) or engine_rules(engine).version
    if priced != image.version:
        notes.append(f"the image has {engine_rules(engine).title} {image.version}; priced was {priced}")
    resource = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": resource_name(f"{model}-{engine}")},
        "spec": {"components": components},
    }
    notes += [
        f"kubectl apply -f {MANIFEST_FILE}, where Dynamo's operator of {image.release} runs",
        "hf-token-secret contains HF_TOKEN",
    ]
    return Export(None, {MANIFEST_FILE: yaml_text(resource)}, tuple(dropped), tuple(notes), tuple(violations))


def _engine_of(deployment: Deployment) -> str:
    workload = deployment.workload
    for text in nvidia_alone(workload.hardware):
        raise ValueError(f"Dynamo's images: {text}; export to the engine or to llm-d")
    engine = workload.engine.family if workload.engine else "vllm"
    if engine not in _IMAGES:
        raise ValueError(f"Dynamo runs {', '.join(_IMAGES)}, not {engine}")
    return engine


@dataclass(frozen=True)
class _Image:
    """A release of Dynamo and the engine that its image has.

    Attributes:
        release: Of Dynamo.
        engine: Its name.
        version: The engine's.
    """

    release: str
    engine: str
    version: str


def _image_of(deployment: Deployment, engine: str) -> _Image:
    """The newest release, or the newest whose image has the version that is asked for.

    Raises:
        ValueError: No release has it.
    """
    pins = {release: read_capability("dynamo", release).pins[engine] for release in reversed(read_versions("dynamo"))}
    wanted = stated_version(deployment.workload, engine)
    for release, version in pins.items():
        if wanted in (None, version):
            return _Image(release, engine, version)
    known = ", ".join(f"{version} ({release})" for release, version in pins.items())
    raise ValueError(f"no release of Dynamo that was read has {engine_rules(engine).title} {wanted}, but {known}")


def _frontend(image: _Image) -> JsonObject:
    pod = _pod(image, ["python3"], ["-m", "dynamo.frontend"], None)
    return {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": pod}


def _worker(deployment: Deployment, image: _Image, args: list[Argument]) -> JsonObject:
    pool = phase_of(deployment.workload).pool
    worker: JsonObject = {
        "name": pool or "worker",
        "type": pool or "worker",
        "replicas": deployment.replicas,
        "podTemplate": _pod(image, ["python3", "-m", f"dynamo.{image.engine}"], args, deployment),
    }
    if deployment.nodes > 1:
        worker["multinode"] = {"nodeCount": deployment.nodes}
    return worker


def resource_name(text: str) -> str:
    """A text as the name of a Kubernetes resource: lower case, letters, digits and hyphens, a letter first, at most 63.

    >>> resource_name("Qwen3_235B-A22B"), resource_name("7b"), resource_name("模型")
    ('qwen3-235b-a22b', 'model-7b', 'model')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:63].strip("-")


def _pod(image: _Image, command: list[str], args: list[Argument], worker: Deployment | None) -> JsonObject:
    main: JsonObject = {
        "name": "main",
        "image": f"nvcr.io/nvidia/ai-dynamo/{_IMAGES[image.engine]}:{image.release}",
        "command": command,
        "args": container_words(args),
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
    }
    if worker is not None:
        if environment := _environment(worker, image.engine):
            main["env"] = container_environment(environment)
        main["resources"] = {"limits": {"nvidia.com/gpu": str(worker.gpus_per_node)}}
    return {"spec": {"containers": [main]}}


def _environment(deployment: Deployment, engine: str) -> dict[str, str]:
    of_engine = {"vllm": vllm.environment, "sglang": sglang.environment}
    return of_engine[engine](deployment) if engine in of_engine else {}


def _args(deployment: Deployment, image: _Image) -> tuple[list[Argument], list[str]]:
    """What a worker is started with, and what its engine's version has no words for."""
    of_pool = phase_of(deployment.workload).pool
    model: Flag = ("--model" if image.engine == "vllm" else "--model-path", deployment.served_model)
    pool: list[Flag] = [("--disaggregation-mode", of_pool)] if of_pool else []
    platform = read_capability("dynamo", image.release)
    if image.engine == "trtllm":  # its options are those of Dynamo, the rest is its configuration
        overridden: Flag = ("--override-engine-args", json.dumps(trtllm.config(deployment)))
        options, flags = Capability("trtllm", image.version).beside(platform), [overridden, *pool]
    else:
        options = read_capability(image.engine, image.version).beside(platform)
        if image.engine == "vllm":
            flags = [*vllm.engine_flags(deployment), *pool]
        else:  # whose flags have the mode
            flags = [*sglang.engine_flags(deployment), *(_SGLANG_POOL if of_pool else ())]
    accepted, lost = options.words([model, *flags])
    return words(accepted), lost
