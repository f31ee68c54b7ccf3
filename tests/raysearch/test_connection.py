"""What signals do to a connection in the making."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import ray

from raysearch.connection import connected

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
