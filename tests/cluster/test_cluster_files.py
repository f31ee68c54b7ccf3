"""The shipped cluster files: what Ray itself says of them, and what must be alike in both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CHECKOUT = Path(__file__).resolve().parents[2]
KUBERAY = CHECKOUT / "configs/cluster/kuberay.yaml"
FILES = [CHECKOUT / "cluster.yaml", CHECKOUT / "configs/cluster/local.yaml"]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return yaml.safe_load(request.param.read_text(encoding="utf-8"))


def test_ray_accepts_it_with_its_defaults_filled_in(config: dict[str, Any]) -> None:
    validate_config(prepare_config(config))


def test_every_key_is_one_that_ray_knows(config: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config(prepare_config({**config, "setup_comands": []}))


def test_every_node_gets_the_checkout_and_its_pinned_versions(config: dict[str, Any]) -> None:
    assert list(config["file_mounts"].values()) == ["."]
    *_, install = [command for command in config["setup_commands"] if "pip install" in command]
    assert "--constraint ~/raysearch/constraints.txt --editable ~/raysearch'[search,rllib]'" in install


def test_every_package_is_installed_by_its_digest_or_pinned(config: dict[str, Any]) -> None:
    steps = [*config["setup_commands"], *config.get("head_setup_commands", [])]
    for install in (step for command in steps for step in command.split(";") if "pip install" in step):
        assert "--require-hashes --no-deps" in install or "--constraint" in install


@pytest.mark.parametrize("path", [*FILES, KUBERAY], ids=lambda path: path.name)
def test_no_package_is_taken_from_whichever_of_two_indexes_has_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "extra-index" not in text
    one_line = re.sub(r"\s*\\?\n[# ]*", " ", text)
    assert one_line.count("--index-url") == one_line.count("--require-hashes --no-deps --index-url")


def test_the_cpu_build_of_pytorch_is_pinned_by_digests_in_the_version_that_all_use() -> None:
    lines = (CHECKOUT / "requirements-torch-cpu.txt").read_text(encoding="utf-8").splitlines()
    requirement, *digests = [line.removesuffix(" \\").strip() for line in lines if not line.startswith("#")]
    version = requirement.removeprefix("torch==").removesuffix("+cpu")
    assert f"torch=={version}" in (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(digests)) == len(digests) == 6
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests)


def kuberay() -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))}


def test_on_kubernetes_rays_ports_ask_for_a_token_and_are_closed_to_other_pods() -> None:
    found = kuberay()
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert found["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    ours = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for template in (*templates, found["RayJob"]["spec"]["submitterPodTemplate"]):
        assert template["metadata"]["labels"] == ours
        assert not any("hostPort" in port for box in template["spec"]["containers"] for port in box.get("ports", []))


def test_on_kubernetes_all_nodes_write_to_one_volume_and_use_the_ray_that_is_pinned() -> None:
    found = kuberay()
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    claim = {"persistentVolumeClaim": {"claimName": found["PersistentVolumeClaim"]["metadata"]["name"]}}
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert {"name": mount["name"], **claim} in pod["volumes"]
        assert f"--out {mount['mountPath']}/" in found["RayJob"]["spec"]["entrypoint"]
    assert f"ray=={cluster['rayVersion']}" in (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"  # no run lands there


def test_no_node_guesses_whether_a_token_is_asked_for(config: dict[str, Any]) -> None:
    assert any("RAY_AUTH_MODE=disabled" in command and ".bashrc" in command for command in config["setup_commands"])


def test_head_and_workers_meet_at_one_port_outside_of_those_that_ray_gives_to_processes(config: dict[str, Any]) -> None:
    (head,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    (worker,) = [command for command in config["worker_start_ray_commands"] if "ray start" in command]
    (port,) = re.findall(r"--port=(\d+)", head)
    assert f"--address=$RAY_HEAD_IP:{port}" in worker
    assert int(port) not in range(10002, 20000)
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head


def test_cloud_workers_are_spot_and_the_head_which_they_need_is_not() -> None:
    types = yaml.safe_load(FILES[0].read_text(encoding="utf-8"))["available_node_types"]
    spot = {name: "InstanceMarketOptions" in kind["node_config"] for name, kind in types.items()}
    assert spot == {"head": False, "worker": True}
    assert types["head"]["resources"]["CPU"] == 0  # no run lands there
    assert types["worker"]["min_workers"] == 0
