"""What Ray has no public name for: what is needed and missing is one message, what is not is done without."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray._private import services, utils
from ray._private.node import Node

from raysearch.base.errors import RunFailed
from raysearch.processes.ray_internals import forget_token, mended, without_what_nobody_asks


def test_this_ray_has_all_of_it_and_gets_it_back() -> None:
    before = services.get_node, utils.set_sigterm_handler, Node.start_monitor
    with mended(), without_what_nobody_asks():
        assert services.get_node is not before[0]
        assert Node.start_monitor is not before[2]
    assert (services.get_node, utils.set_sigterm_handler, Node.start_monitor) == before
    forget_token()


def test_the_agent_of_a_ray_of_ours_is_the_one_that_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, *_, **__: started.extend(command))
    agent = Path(ray.__file__).parent / "dashboard/agent.py"
    assert agent.is_file()
    with without_what_nobody_asks():
        command = ["raylet", f"--dashboard_agent_command=python {agent} --minimal"]
        services.start_ray_process(command, "raylet", fate_share=False)
    ours = Path(started[1].partition(" ")[2].removesuffix(" --minimal"))
    assert ours.name == "bare_agent.py"
    assert ours.is_file()


def test_a_ray_without_what_only_spares_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Node, "start_monitor")
    monkeypatch.delattr(services, "get_node")
    with mended(), without_what_nobody_asks():
        pass
    assert not hasattr(Node, "start_monitor")


def test_a_ray_without_what_is_needed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "set_sigterm_handler")
    with pytest.raises(RunFailed, match=r"has no ray\._private\.utils:set_sigterm_handler, .* see constraints\.txt$"):
        mended().__enter__()
