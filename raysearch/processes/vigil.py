"""Watches a Ray while it is needed, whose driver would wait for a dead or frozen one without end.

Of a Ray of our own, which this process has started, we look at the processes: one that has ended was needed, one that
is stopped is ended, and Ray replaces it if it is a worker. Of any Ray we ask the head, and the node that we are on,
whether they answer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from raysearch.processes.table import Process, Stopped, processes
from raysearch.processes.watcher import start_anew

LOOK_S = 1.0
"""Between two looks."""
VIGIL_SILENT_S = 20.0
"""[assumed] A Ray that does not answer for so long has died; a process that is stopped for so long stays stopped."""
CONNECT_TIMEOUT_S = 5.0
"""[assumed] A cluster that does not answer within it is not there."""
_VITAL = ("gcs_server", "raylet")
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""[spec] What a client of HTTP/2, and so of gRPC, begins with: the preface and empty settings (RFC 9113, 3.4)."""
_SETTINGS = 4
"""[spec] The type of the frame that a server begins with (RFC 9113, 6.5); it is the fourth byte."""


def answers(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether a gRPC server, such as Ray's, answers at host:port.

    That a connection is made says nothing: the kernel takes those of a frozen process, too.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True  # it waits for a handshake, which would need Ray's certificates
            connection.sendall(_HELLO)
            frame = connection.recv(9)
            return len(frame) > 3 and frame[3] == _SETTINGS
    except (OSError, OverflowError):
        return False


@final
class Vigil:
    """What is known of the Ray that is watched.

    Args:
        ours: Whether this process starts it.
    """

    def __init__(self, ours: bool) -> None:
        self._ours = ours
        self._before = set(_children())
        self._stopped = Stopped(round(VIGIL_SILENT_S / LOOK_S))
        self._heard_of_s: dict[str, float] = {}
        self._vital: set[int] = set()

    def ask(self, address: str) -> None:
        """Has a server of this Ray asked from now on whether it answers."""
        self._heard_of_s[address] = time.monotonic()

    def look(self) -> str | None:
        """Why it counts as dead; None while it lives."""
        return (self._look_at_processes() if self._ours else None) or self._look_for_answers()

    def end(self) -> None:
        """Kills the processes of a Ray of our own."""
        for pid in self._daemons(processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _daemons(self, table: dict[int, Process]) -> dict[int, Process]:
        """Ours: what only has the id of one that has ended is not among them."""
        return {pid: table[pid] for pid in _children(table) if pid not in self._before and _is_daemon(table[pid])}

    def _look_at_processes(self) -> str | None:
        table = processes()
        daemons = self._daemons(table)
        self._vital |= daemons.keys()
        if any(pid not in daemons or daemons[pid].state == "Z" for pid in self._vital):
            return "Ray has died"
        rays = daemons | {pid: each for pid, each in table.items() if each.parent in daemons}
        for pid in self._stopped.among(rays):
            print(
                f"note: process {pid} of Ray ({rays[pid].name}) was stopped for {VIGIL_SILENT_S:g} s and is ended",
                file=sys.stderr,
                flush=True,
            )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return None

    def _look_for_answers(self) -> str | None:
        for address, heard_of_s in tuple(self._heard_of_s.items()):
            if answers(address):
                self._heard_of_s[address] = time.monotonic()
            elif time.monotonic() - heard_of_s > VIGIL_SILENT_S:
                whose = "Ray" if self._ours else "the Ray cluster"
                return f"{whose} has died: nobody answers at {address} for {VIGIL_SILENT_S:g} s"
        return None


@contextmanager
def watched(vigil: Vigil) -> Iterator[None]:
    """Watches meanwhile; where Ray has died that is reported, and the command restarted if somebody watches it."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(vigil, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextmanager
def ended_in_time(vigil: Vigil) -> Iterator[None]:
    """Ends a Ray that does not let go in time: it waits for its processes, also for one that is stopped."""

    def end() -> None:
        print(f"note: Ray did not end within {VIGIL_SILENT_S:g} s and is ended", file=sys.stderr, flush=True)
        start_anew()  # all that is left to do is to report what was found
        vigil.end()

    timer = threading.Timer(VIGIL_SILENT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _watch(vigil: Vigil, ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        dead = vigil.look()
        if dead and not ended.is_set():
            print(f"note: {dead}", file=sys.stderr, flush=True)
            start_anew()
            return


def _children(table: dict[int, Process] | None = None) -> list[int]:
    return [pid for pid, process in (table or processes()).items() if process.parent == os.getpid()]


def _is_daemon(process: Process) -> bool:
    return process.name in _VITAL
