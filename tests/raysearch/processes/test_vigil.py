"""Who watches a Ray: that of ours by its processes, any by its answers. Real processes stand for Ray's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysearch.processes import vigil
from raysearch.processes.table import Process
from raysearch.processes.vigil import Vigil, answers, ended_in_time
from tests.processes import children, ended, pause


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Vigil, subprocess.Popen[bytes], int]]:
    """A Ray by the names of its processes: a raylet that has started a worker."""
    monkeypatch.setattr(vigil, "VIGIL_SILENT_S", 3.0)
    vigil_of_ours = Vigil(ours=True)
    shell = shutil.copy(shutil.which("sh") or "/bin/sh", tmp_path / "raylet")
    with subprocess.Popen([shell, "-c", "sleep 600 & wait"]) as raylet:
        while not children(raylet.pid):
            time.sleep(0.01)
        yield vigil_of_ours, raylet, children(raylet.pid)[0]
        raylet.kill()


def test_a_ray_that_lives_is_left_alone(watched: tuple[Vigil, subprocess.Popen[bytes], int]) -> None:
    assert [watched[0].look() for _ in range(5)] == [None] * 5


def test_a_stopped_worker_is_ended_once_it_was_stopped_for_long(
    watched: tuple[Vigil, subprocess.Popen[bytes], int], capsys: pytest.CaptureFixture[str]
) -> None:
    ray, raylet, worker = watched
    pause(worker)
    assert [ray.look() for _ in range(2)] == [None, None]
    pause(worker, go_on=True)
    ray.look()  # a moment's stop is none
    pause(worker)
    ray.look(), ray.look()
    assert capsys.readouterr().err == ""
    assert not ended(worker)
    assert ray.look() is None
    assert f"process {worker} of Ray" in capsys.readouterr().err
    raylet.wait()
    assert ended(worker)


def test_a_stopped_raylet_is_ended_and_ray_has_died_then(watched: tuple[Vigil, subprocess.Popen[bytes], int]) -> None:
    ray, raylet, worker = watched
    pause(raylet.pid)
    assert [ray.look() for _ in range(3)] == [None] * 3
    raylet.wait()
    assert raylet.returncode == -signal.SIGKILL
    assert ray.look() == "Ray has died"
    os.kill(worker, signal.SIGKILL)


def test_whoever_has_the_id_of_a_raylet_that_has_ended_is_neither_taken_for_it_nor_killed(
    watched: tuple[Vigil, subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, raylet, worker = watched
    assert ray.look() is None
    others = {raylet.pid: Process(parent=1, name="raylet", state="S", began=0)}
    monkeypatch.setattr(vigil, "processes", lambda: others)
    assert ray.look() == "Ray has died"
    ray.end()
    assert raylet.poll() is None
    os.kill(worker, signal.SIGKILL)


def test_a_ray_that_does_not_let_go_in_time_is_ended(
    watched: tuple[Vigil, subprocess.Popen[bytes], int], capsys: pytest.CaptureFixture[str]
) -> None:
    ray, raylet, worker = watched
    pause(raylet.pid)
    with ended_in_time(ray):
        raylet.wait()  # as Ray does
    assert raylet.returncode == -signal.SIGKILL
    assert capsys.readouterr().err == "note: Ray did not end within 3 s and is ended\n"
    os.kill(worker, signal.SIGKILL)


def test_a_server_that_only_takes_connections_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        assert not answers(address, timeout_s=0.2)
        threading.Thread(target=greet, args=(frozen,), daemon=True).start()
        while not answers(address, timeout_s=5.0):  # what waits in the queue was hung up
            pass
        frozen.shutdown(socket.SHUT_RDWR)  # or the thread would take one more connection
    assert not answers(address, timeout_s=5.0)


def greet(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\0\0\0\7\0\0\0\0\0"])
def test_what_is_no_grpc_server_does_not_answer(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        assert not answers(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_cluster_that_falls_silent_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "VIGIL_SILENT_S", 0.0)
    heard = [True, True, False]
    monkeypatch.setattr(vigil, "answers", lambda address: heard.pop(0))
    cluster = Vigil(ours=False)
    cluster.ask("head:6379")
    assert [cluster.look() for _ in range(2)] == [None, None]
    assert cluster.look() == "the Ray cluster has died: nobody answers at head:6379 for 0 s"
