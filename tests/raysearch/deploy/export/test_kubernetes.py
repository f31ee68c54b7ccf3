"""Kubernetes resources: as their schemas have them, with the GPUs and the options of the strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.engine_words import read_capability
from raysearch.deploy.export.formats import exporter, pools_exporter
from sim.layers.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

SCHEMAS = json.loads((Path(__file__).parent / "kubernetes.json").read_text())
VLLM_OPTIONS = set(read_capability("vllm", "0.33.0").options)


def deployment(engine: str, strategy: dict[str, int], replicas: int = 2, phase: str = "serve") -> Deployment:
    asked = question_about("deepseek_v3", isl=4000, osl=500, phase=phase, engine=engine, gpus=64)
    workload: Workload = asked.load()
    dims = megatron_dims(workload.model)
    return Deployment(workload, Strategy(pp=1, batch=64, dims=dims, **strategy), "deepseek-ai/DeepSeek-V3", replicas)


ONE_NODE = {"tp": 8, "ep": 8, "dp": 1}
TWO_NODES = {"tp": 1, "ep": 16, "dp": 16}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("strategy", [ONE_NODE, TWO_NODES])
@pytest.mark.parametrize("phase", ["serve", "decode"])
def test_dynamo_takes_the_resource(engine: str, strategy: dict[str, int], phase: str) -> None:
    asked = deployment(engine, strategy, phase=phase)
    made = exporter("dynamo")(asked)
    resource = yaml.safe_load(made.files["dynamo.yaml"])
    jsonschema.validate(resource, SCHEMAS["dynamo"]["schema"])
    frontend, worker = resource["spec"]["components"]
    assert frontend["type"] == "frontend"
    assert worker["type"] == ("worker" if phase == "serve" else "decode")
    main = worker["podTemplate"]["spec"]["containers"][0]
    gpus = int(main["resources"]["limits"]["nvidia.com/gpu"]) * worker.get("multinode", {}).get("nodeCount", 1)
    assert gpus == asked.strategy.gpus
    assert worker["replicas"] == 2
    assert all(isinstance(word, str) for word in main["args"])
    assert main["command"] == ["python3", "-m", f"dynamo.{engine}"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_dynamo_takes_both_pools_as_one_resource_with_one_frontend(engine: str) -> None:
    export_pools = pools_exporter("dynamo")
    assert export_pools is not None
    pools = {
        "prefill": deployment(engine, ONE_NODE, replicas=3, phase="prefill"),
        "decode": deployment(engine, TWO_NODES, phase="decode"),
    }
    made = export_pools(pools)
    resource = yaml.safe_load(made.files["dynamo.yaml"])
    jsonschema.validate(resource, SCHEMAS["dynamo"]["schema"])
    told = [(each["type"], each["replicas"]) for each in resource["spec"]["components"]]
    assert told == [("frontend", 1), ("prefill", 3), ("decode", 2)]
    alone = [yaml.safe_load(exporter("dynamo")(each).files["dynamo.yaml"]) for each in pools.values()]
    assert resource["spec"]["components"][1:] == [each["spec"]["components"][1] for each in alone]
    assert not any("other one" in note for note in made.notes)
    assert pools_exporter("vllm") is None


@pytest.mark.parametrize("phase", ["serve", "prefill", "decode"])
def test_dynamo_s_image_is_told_in_the_words_of_its_own_sglang(phase: str) -> None:
    args = _worker_args(deployment("sglang", TWO_NODES, phase=phase))
    told = [word for word in args if word.startswith("--")]
    assert set(told) <= set(read_capability("sglang", "0.5.21").options)
    assert args[args.index("--dp-size") + 1] == "16"
    assert "--enable-dp-attention" in told
    assert ("nixl" in args) == (phase != "serve")
    assert (
        args[args.index("--moe-dense-tp-size") + 1] == "1"
    )  # dense layers of 18,432 do not divide over 16 ranks' blocks


@pytest.mark.parametrize(("phase", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_dynamo_s_vllm_workers_are_told_their_connector(phase: str, role: str) -> None:
    args = _worker_args(deployment("vllm", ONE_NODE, phase=phase))
    assert json.loads(args[args.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
    }
    assert args[args.index("--disaggregation-mode") + 1] == phase


def _worker_args(asked: Deployment) -> list[str]:
    resource = yaml.safe_load(exporter("dynamo")(asked).files["dynamo.yaml"])
    return resource["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["args"]


def test_llm_d_takes_both_pools_as_one_release_with_a_proxy_before_decode() -> None:
    export_pools = pools_exporter("llm-d")
    assert export_pools is not None
    pools = {
        "prefill": deployment("vllm", ONE_NODE, replicas=3, phase="prefill"),
        "decode": deployment("vllm", TWO_NODES, phase="decode"),
    }
    made = export_pools(pools)
    values = yaml.safe_load(made.files["llm-d-values.yaml"])
    jsonschema.validate(values, SCHEMAS["llm_d"]["schema"])
    assert [(values[role]["create"], values[role]["replicas"]) for role in pools] == [(True, 3), (True, 2)]
    assert len([note for note in made.notes if note.startswith("helm install")]) == 1
    assert values["routing"]["proxy"] == {"enabled": True, "targetPort": 8200}
    prefill, decode = (values[role]["containers"][0] for role in pools)
    assert "--port 8000" in " ".join(prefill["args"])
    assert "--port 8200" in " ".join(decode["args"])
    for container in (prefill, decode):
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in [each["name"] for each in container["env"]]


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_pods_know_the_layers_of_stages_that_are_not_alike(target: str) -> None:
    pipeline = deployment("vllm", {"tp": 8, "ep": 8, "dp": 1})
    two = replace(pipeline, strategy=replace(pipeline.strategy, pp=2))  # 61 layers
    assert "VLLM_PP_LAYER_PARTITION" not in next(iter(exporter(target)(pipeline).files.values()))
    (text,) = exporter(target)(two).files.values()
    assert two.layer_partition in ("31,30", "30,31")
    assert "name: VLLM_PP_LAYER_PARTITION\n" in text
    assert f"value: {two.layer_partition}\n" in text
    told = yaml.safe_load(text)
    jsonschema.validate(told, SCHEMAS[target.replace("-", "_")]["schema"])


def test_a_pod_takes_a_host_of_a_rack() -> None:
    asked = question_about("deepseek_v3", "gb200_nvl72", "serve", isl=4000, osl=500, engine="vllm", gpus=72)
    workload = asked.load()
    rack = Deployment(workload, Strategy(1, 8, 1, 64, megatron_dims(workload.model)), "m")
    worker = yaml.safe_load(exporter("dynamo")(rack).files["dynamo.yaml"])["spec"]["components"][1]
    assert worker["multinode"]["nodeCount"] == 2
    assert worker["podTemplate"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    values = yaml.safe_load(exporter("llm-d")(rack).files["llm-d-values.yaml"])
    assert values["multinode"]
    assert values["decode"]["parallelism"] == {"tensor": 1, "data": 8, "dataLocal": 4, "workers": 2}


def test_pods_of_amd_s_gpus_ask_for_these_with_an_image_that_runs_there() -> None:
    workload = question_about("qwen3_32b", "mi300x", "serve", isl=4000, osl=500, engine="vllm").load()
    amd = Deployment(workload, Strategy(8, 1, 1, 64, megatron_dims(workload.model)), "m")
    values = yaml.safe_load(exporter("llm-d")(amd).files["llm-d-values.yaml"])
    jsonschema.validate(values, SCHEMAS["llm_d"]["schema"])
    container = values["decode"]["containers"][0]
    assert values["accelerator"] == {"type": "amd"}
    assert container["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert container["image"].startswith("vllm/vllm-openai-rocm:")
    with pytest.raises(ValueError, match="it runs on NVIDIA GPUs alone, not on mi300x; export to the engine"):
        exporter("dynamo")(amd)
    assert "their maker's fork runs" in " ".join(exporter("megatron")(amd).notes)
    other = replace(amd, workload=replace(workload, hardware=replace(workload.hardware, vendor="mine")))
    with pytest.raises(ValueError, match="images are known for GPUs of nvidia and amd, not of mine"):
        exporter("llm-d")(other)


@pytest.mark.parametrize("strategy", [ONE_NODE, TWO_NODES, {"tp": 16, "ep": 16, "dp": 1}])
def test_llm_d_takes_the_values(strategy: dict[str, int]) -> None:
    asked = deployment("vllm", strategy)
    values = yaml.safe_load(exporter("llm-d")(asked).files["llm-d-values.yaml"])
    jsonschema.validate(values, SCHEMAS["llm_d"]["schema"])
    container, parallelism = values["decode"]["containers"][0], values["decode"]["parallelism"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == parallelism["tensor"] * parallelism["dataLocal"]  # as the chart counts a worker's
    assert gpus * parallelism["workers"] == asked.strategy.gpus
    assert values["multinode"] == (asked.strategy.gpus > 8)
    options = {word for word in " ".join(container["args"]).split() if word.startswith("--")} - {"--"}
    assert options <= VLLM_OPTIONS | {"--port", "--headless"}
    assert ("--headless" in options) == values["multinode"]


def test_dynamo_says_which_engines_it_runs() -> None:
    with pytest.raises(ValueError, match="not megatron_core"):
        exporter("dynamo")(deployment("megatron_core", TWO_NODES))
