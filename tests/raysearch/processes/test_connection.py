"""What signals do to a connection in the making."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services as ray_services

from raysearch.base.errors import RunFailed
from raysearch.processes import ray_internals, watcher
from raysearch.processes.connection import connected
from raysearch.processes.watcher import PRIVATE_PREFIX

SAYS_WHAT_IT_BLOCKS = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_a_hangup_while_ray_starts_reaches_us_afterwards_and_rays_processes_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def init(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # the kernel chooses the thread
        child = subprocess.run([sys.executable, "-c", SAYS_WHAT_IT_BLOCKS], capture_output=True, text=True, check=True)
        log.append(f"started, deaf: {child.stdout.strip()}")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # it may be, for other tests
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.signal(signal.SIGHUP, lambda *_: log.append("hung up"))
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    try:
        with connected():
            log.append("connected")
    finally:
        over.set()
        signal.signal(signal.SIGHUP, before)
    assert log == ["started, deaf: True", "hung up", "connected"]


def test_a_ray_that_comes_up_late_is_waited_for_and_one_that_does_not_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def get_node(address: str, _: str) -> str:
        asked.append(address)
        if address == "never":
            monkeypatch.setattr(ray_internals, "START_S", -1.0)  # the time is up
        if len(asked) < 5 or address == "never":
            raise RuntimeError("not there")
        return "here"

    def init(*_: Any, **__: Any) -> None:  # as Ray's does, which gives up after half a minute
        try:
            ray_services.get_node("late", "node")
            ray_services.get_node("never", "node")
        except RuntimeError:
            raise Exception("The current node timed out during startup. This could happen because ...") from None

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_services, "get_node", get_node)
    with pytest.raises(RunFailed, match="did not start within"), connected():
        pass
    assert asked == [*["late"] * 5, "never"]
    assert ray_services.get_node is get_node


def test_a_command_removes_its_own_private_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (f"{PRIVATE_PREFIX}x", other := f"raysearch-{os.getpid()}-x"):  # of a process in another container
        (tmp_path / name).mkdir()
    watcher._remove_private()
    assert os.listdir(tmp_path) == [other]
