"""Kubernetes resources: as their schemas have them, with the GPUs and the options of the strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raysearch.answers.exported import ExportResult
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.engine_words import read_capability
from raysearch.deploy.export.formats import exporter, pools_exporter
from raysearch.deploy.export.pool_services import transfer_notes
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

SCHEMAS = json.loads((Path(__file__).parent / "kubernetes.json").read_text())


def deployment(
    engine: str, strategy: dict[str, int], replicas: int = 2, phase: str = "serve", version: str | None = None
) -> Deployment:
    stated = {"engine": engine, "gpus": 64} | ({"engine_version": version} if version else {})
    asked = question_about("deepseek_v3", isl=4000, osl=500, phase=phase, **stated)
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
    components = [(each["type"], each["replicas"]) for each in resource["spec"]["components"]]
    assert components == [("frontend", 1), ("prefill", 3), ("decode", 2)]
    alone = [yaml.safe_load(exporter("dynamo")(each).files["dynamo.yaml"]) for each in pools.values()]
    assert resource["spec"]["components"][1:] == [each["spec"]["components"][1] for each in alone]
    assert not any("other one" in note for note in made.notes)
    assert pools_exporter("vllm") is None


@pytest.mark.parametrize("phase", ["serve", "prefill", "decode"])
def test_dynamo_s_image_is_configured_in_the_words_of_its_own_sglang(phase: str) -> None:
    args = _worker_args(deployment("sglang", TWO_NODES, phase=phase))
    options = [word for word in args if word.startswith("--")]
    assert set(options) <= set(read_capability("sglang", "0.5.21").options)
    assert args[args.index("--dp-size") + 1] == "16"
    assert "--enable-dp-attention" in options
    assert ("nixl" in args) == (phase != "serve")
    assert (
        args[args.index("--moe-dense-tp-size") + 1] == "1"
    )  # dense layers of 18,432 do not divide over 16 ranks' blocks


@pytest.mark.parametrize(("phase", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_dynamo_s_vllm_workers_are_given_their_connector(phase: str, role: str) -> None:
    args = _worker_args(deployment("vllm", ONE_NODE, phase=phase))
    assert json.loads(args[args.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
    }
    assert args[args.index("--disaggregation-mode") + 1] == phase


def _worker_args(asked: Deployment) -> list[str]:
    resource = yaml.safe_load(exporter("dynamo")(asked).files["dynamo.yaml"])
    return resource["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["args"]


def llm_d(asked: Deployment) -> dict[str, Any]:
    """The resource that is applied, checked against its schema."""
    resource = yaml.safe_load(exporter("llm-d")(asked).files["llm-d.yaml"])
    jsonschema.validate(resource, SCHEMAS["llm_d"]["schema"])
    return resource


def pods_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod specs of a replica, the leader's first where it has one of its own."""
    group = spec.get("leaderWorkerTemplate", {"workerTemplate": spec.get("template")})
    return [group[name]["spec"] for name in ("leaderTemplate", "workerTemplate") if name in group]


def test_llm_d_takes_both_pools_as_roles_with_a_proxy_before_decode() -> None:
    export_pools = pools_exporter("llm-d")
    assert export_pools is not None
    pools = {
        "prefill": deployment("vllm", ONE_NODE, replicas=3, phase="prefill"),
        "decode": deployment("vllm", TWO_NODES, phase="decode"),
    }
    made = export_pools(pools)
    resource = yaml.safe_load(made.files["llm-d.yaml"])
    jsonschema.validate(resource, SCHEMAS["llm_d"]["schema"])
    prefill, decode = resource["spec"]["roles"]
    assert [(role["name"], role["spec"]["replicas"]) for role in (prefill, decode)] == [("prefill", 3), ("decode", 2)]
    assert [role["spec"]["leaderWorkerTemplate"]["size"] for role in (prefill, decode)] == [1, 2]
    (before,) = pods_of(decode["spec"])[0]["initContainers"]
    assert "--data-parallel-size=8" in before["args"]
    assert [port["containerPort"] for port in before["ports"]] == [*range(8000, 8008)]
    assert "initContainers" not in pods_of(prefill["spec"])[0]
    for role, port in ((prefill, "8000"), (decode, "8200")):
        (container,) = pods_of(role["spec"])[0]["containers"]
        assert container["args"][container["args"].index("--port") + 1] == port
        assert {"VLLM_NIXL_SIDE_CHANNEL_HOST", "HF_TOKEN"} <= {each["name"] for each in container["env"]}
        transfer = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
        assert transfer["kv_role"] == {"8000": "kv_producer", "8200": "kv_consumer"}[port]
    router = yaml.safe_load(made.files["llm-d-router-values.yaml"])["router"]
    found = router["modelServers"]["matchLabels"].items()
    for role in (prefill, decode):
        labels = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
        assert found <= labels.items()
        assert labels["llm-d.ai/role"] == role["name"]
    config = yaml.safe_load(router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]])
    plugins = {each["type"] for each in config["plugins"]}
    assert {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]} <= plugins


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_pods_know_the_layers_of_stages_that_are_not_alike(target: str) -> None:
    pipeline = deployment("vllm", {"tp": 8, "ep": 8, "dp": 1})
    two = replace(pipeline, strategy=replace(pipeline.strategy, pp=2))  # 61 layers
    assert "VLLM_PP_LAYER_PARTITION" not in next(iter(exporter(target)(pipeline).files.values()))
    text = next(iter(exporter(target)(two).files.values()))
    assert two.layer_partition in ("31,30", "30,31")
    assert "name: VLLM_PP_LAYER_PARTITION\n" in text
    assert f"value: {two.layer_partition}\n" in text
    resource = yaml.safe_load(text)
    jsonschema.validate(resource, SCHEMAS[target.replace("-", "_")]["schema"])


def test_a_pod_takes_a_host_of_a_rack() -> None:
    asked = question_about("deepseek_v3", "gb200_nvl72", "serve", isl=4000, osl=500, engine="vllm", gpus=72)
    workload = asked.load()
    rack = Deployment(workload, Strategy(1, 8, 1, 64, megatron_dims(workload.model)), "m")
    worker = yaml.safe_load(exporter("dynamo")(rack).files["dynamo.yaml"])["spec"]["components"][1]
    assert worker["multinode"]["nodeCount"] == 2
    assert worker["podTemplate"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    resource = llm_d(rack)
    assert resource["spec"]["leaderWorkerTemplate"]["size"] == 2
    (container,) = pods_of(resource["spec"])[0]["containers"]
    assert container["args"][container["args"].index("--data-parallel-size-local") + 1] == "4"


def test_pods_of_amd_s_gpus_ask_for_these_with_an_image_that_runs_there() -> None:
    workload = question_about("qwen3_32b", "mi300x", "serve", isl=4000, osl=500, engine="vllm").load()
    amd = Deployment(workload, Strategy(8, 1, 1, 64, megatron_dims(workload.model)), "m")
    (container,) = pods_of(llm_d(amd)["spec"])[0]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert container["image"].startswith("vllm/vllm-openai-rocm:")
    with pytest.raises(ValueError, match="it runs on NVIDIA GPUs alone, not on mi300x; export to the engine"):
        exporter("dynamo")(amd)
    assert "their maker's fork runs" in " ".join(exporter("megatron")(amd).notes)
    other = replace(amd, workload=replace(workload, hardware=replace(workload.hardware, vendor="mine")))
    with pytest.raises(ValueError, match="images are known for GPUs of nvidia and amd, not of mine"):
        exporter("llm-d")(other)


@pytest.mark.parametrize("strategy", [ONE_NODE, TWO_NODES, {"tp": 16, "ep": 16, "dp": 1}])
@pytest.mark.parametrize("version", ["0.23.0", "0.32.0", None])
def test_llm_d_takes_the_resource(strategy: dict[str, int], version: str | None) -> None:
    asked = deployment("vllm", strategy, version=version)
    resource, nodes = llm_d(asked), asked.strategy.gpus // 8
    assert resource["kind"] == ("Deployment" if nodes == 1 else "LeaderWorkerSet")
    pods = pods_of(resource["spec"])
    assert len(pods) == (2 if nodes > 1 and strategy["dp"] == 1 else 1)  # ranks that answer apart are all alike
    known = read_capability("vllm", version or "0.26.0")
    for pod in pods:
        (container,) = pod["containers"]
        assert container["image"] == f"vllm/vllm-openai:v{known.version}"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        options = [word for word in container["args"] if word.startswith("--")]
        assert set(options) <= set(known.options)
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    (first,) = pods[0]["containers"]
    probed = first["startupProbe"]["httpGet"]["port"]
    ports = [each["containerPort"] for each in first["ports"]]
    assert (probed in ports) == (strategy != TWO_NODES)  # else the supervisor's, behind those of the ranks
    assert probed == (8008 if strategy == TWO_NODES else 8000)


def test_llm_d_refuses_what_its_image_cannot_be_given() -> None:
    with pytest.raises(
        ValueError, match=r"vLLM 0\.19\.1: it has no option --data-parallel-multi-port-external-lb: name"
    ):
        exporter("llm-d")(deployment("vllm", TWO_NODES, version="0.19.1"))
    with pytest.raises(ValueError, match=r"options of vLLM 0\.12\.0 were not read, but those of 0\.19\.1"):
        exporter("llm-d")(deployment("vllm", ONE_NODE, version="0.12.0"))


@pytest.mark.parametrize(
    ("engine", "prefill", "decode", "says"),
    [
        ("vllm", 8, 1, "prefill has tp 8, decode tp 1"),  # 4 heads of keys and values
        ("vllm", 2, 1, ""),
        ("vllm", 1, 8, ""),
        ("sglang", 8, 8, ""),
    ],
)
def test_pools_of_unequal_tensor_parallelism_say_what_their_engine_needs(
    engine: str, prefill: int, decode: int, says: str
) -> None:
    pools = {}
    for phase, tp in (("prefill", prefill), ("decode", decode)):
        workload = question_about("qwen3_235b_a22b", isl=4000, osl=500, phase=phase, engine=engine, gpus=8).load()
        pools[phase] = Deployment(workload, Strategy(tp, 8, 1, 64, megatron_dims(workload.model), 1, 8 // tp), "m")
    found = transfer_notes(pools, engine)
    assert bool(found) == bool(says)
    assert says in " ".join(found)
    notes = list(ExportResult.of(pools, "dynamo").remarks())
    assert says in " ".join(notes)
    assert not transfer_notes({"": pools["decode"]}, engine)
    latent = {name: deployment(engine, ONE_NODE, phase=name) for name in pools}
    latent["decode"] = replace(latent["decode"], strategy=replace(latent["decode"].strategy, tp=1, dp=8))
    assert not transfer_notes(latent, engine)  # every GPU has the whole cache


@pytest.mark.parametrize(("to", "pp", "staged"), [("dynamo", 1, True), ("dynamo", 2, False), ("sglang", 2, True)])
def test_pools_of_unequal_cuts_have_the_buffer_of_sglang_where_it_takes_it(to: str, pp: int, staged: bool) -> None:
    pools = {}
    for phase, tp, stages in (("prefill", 4, pp), ("decode", 1, 1)):
        workload = question_about("qwen3_235b_a22b", isl=4000, osl=500, phase=phase, engine="sglang", gpus=16).load()
        strategy = Strategy(tp, 8, stages, 64, megatron_dims(workload.model), 1, 8 // tp)
        pools[phase] = Deployment(workload, strategy, "m")
    made = ExportResult.of(pools, to)
    text = "".join(made.files.values())
    assert text.count("SGLANG_DISAGG_STAGING_BUFFER") == 2 * staged
    assert ("'-1'" in text or "--chunked-prefill-size -1" in text) != staged
    if staged:
        tokens = str(made.deployments["prefill"].prompt_tokens * 2)  # of both attention groups
        assert f"--chunked-prefill-size {tokens}" in text or f"--chunked-prefill-size\n          - '{tokens}'" in text
    assert any("transfers are slow" in line for line in made.remarks()) != staged


def of_stages(engine: str, prefill: int, decode: int, version: str | None = None) -> dict[str, Deployment]:
    pools = {}
    for phase, pp in (("prefill", prefill), ("decode", decode)):
        asked = question_about("qwen3_32b", isl=4000, osl=500, phase=phase, engine=engine, gpus=8)
        workload = replace(asked, engine_version=version).load()
        pools[phase] = Deployment(workload, Strategy(2, 1, pp, 64, megatron_dims(workload.model)), "m", 1)
    return pools


@pytest.mark.parametrize("target", ["vllm", "dynamo", "llm-d"])
def test_stages_of_a_prefill_pool_push_their_caches_in_both_pools(target: str) -> None:
    for stages, connector in ((1, "NixlConnector"), (2, "NixlPushConnector")):
        made = ExportResult.of(of_stages("vllm", stages, 1, "0.31.0"), target)
        assert made.feasible
        assert "\n".join([made.command, *made.files.values()]).count(f'"{connector}"') in (2, 4)  # command and script
    made = ExportResult.of(of_stages("vllm", 2, 2, "0.31.0"), target)
    assert not made.feasible
    assert any("kv_consumer of NIXL" in text for each in made.exports.values() for text in each.violations)


def test_what_an_image_s_older_engine_does_not_run_is_refused_with_the_version_that_does() -> None:
    """The newest llm-d pins vLLM 0.26, whose NixlPushConnector has no pipelines."""
    made = ExportResult.of(of_stages("vllm", 2, 1), "llm-d")
    assert not made.files
    (own, other) = (text for each in made.exports.values() for text in each.violations)
    assert own.startswith("vLLM 0.26.0: pipeline parallel size 2")
    assert "--engine-version 0.33.0" in other
    for pp in (1, 2):  # and none is named where no version runs it
        pools = of_stages("vllm", 1, pp, "0.26.0" if pp == 1 else None)
        texts = [text for each in ExportResult.of(pools, "llm-d").exports.values() for text in each.violations]
        assert bool(texts) == (pp == 2)
        assert not any("--engine-version" in text for text in texts)


@pytest.mark.parametrize("target", ["vllm", "dynamo", "llm-d"])
def test_a_prefill_pool_alone_says_that_its_stages_push_their_caches(target: str) -> None:
    for stages in (1, 2):
        alone = {"": of_stages("vllm", stages, 1, "0.31.0")["prefill"]}
        notes = list(ExportResult.of(alone, target).remarks())
        assert any("must name NixlPushConnector" in text for text in notes) == (stages == 2)


@pytest.mark.parametrize("target", ["sglang", "dynamo"])
def test_pools_of_sglang_whose_stages_differ_break_a_limit(target: str) -> None:
    assert ExportResult.of(of_stages("sglang", 2, 2), target).feasible
    made = ExportResult.of(of_stages("sglang", 4, 2), target)
    assert not made.feasible
    texts = [text for each in made.exports.values() for text in each.violations]
    assert any("SGLang 0.5.23: --pp-size of the decode pool" in text for text in texts)


def test_dynamo_says_which_engines_it_runs() -> None:
    with pytest.raises(ValueError, match="not megatron_core"):
        exporter("dynamo")(deployment("megatron_core", TWO_NODES))
