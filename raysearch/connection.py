"""The connection to Ray: a cluster's, or a Ray of one's own for as long as it is needed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Ray reads these when it is imported. What the user has set stays.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token that another cluster left must not change ours
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from raysearch.errors import InputError

CONNECT_TIMEOUT_S = 5.0
"""[assumed] A cluster that does not answer within it is not there."""
OBJECT_STORE_BYTES = 100 * 1024**2
"""[assumed] Runs exchange only small dictionaries; Ray's default of 30 % of the memory would be in the way."""


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """A connection to Ray; what was there before is left as it was.

    Args:
        address: Of a running cluster; else $RAY_ADDRESS, else a local Ray is started and ended with the context.
        cpus: Of that local Ray; else all of the machine.

    Raises:
        InputError: Nobody answers there.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failed runs are told of without tracebacks
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    _check_reachable(address)
    try:
        if address == "local":
            with _held_back(signal.SIGHUP):
                ray.init(
                    "local", num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet
                )
        else:
            ray.init(address, **quiet)
    except (ConnectionError, ValueError) as error:
        raise InputError(f"cannot connect to Ray at {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _held_back(signum: int) -> Iterator[None]:
    """Hears a signal only afterwards; the processes that are started meanwhile never hear it.

    A terminal that goes away tells all processes that were started from it. Ray's must not end before the driver has.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python leaves signals to its main thread
        return
    came: list[int] = []
    before = signal.signal(signum, lambda number, _: came.append(number))  # another thread may be told
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signum, before)
    if came:
        signal.raise_signal(signum)


def _check_reachable(address: str) -> None:
    """Refuses host:port addresses where nobody listens: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address!r}: {error}") from error
