"""What Ray has no public name for: what is needed and missing is one message, what is not is done without."""

from __future__ import annotations

import pytest
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
