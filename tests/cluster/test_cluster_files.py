"""The shipped cluster files: what Ray itself says of them, and what must be alike in both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CHECKOUT = Path(__file__).resolve().parents[2]
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
    (install,) = [command for command in config["setup_commands"] if "pip install" in command]
    assert "--constraint ~/raysearch/constraints.txt --editable ~/raysearch" in install


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
