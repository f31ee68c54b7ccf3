"""The connection to Ray: a cluster's, or a Ray of one's own for as long as it is needed."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it when it is imported

import ray

from envs.strategy_env import failure_text
from raysearch.base.errors import InputError, RunFailed
from raysearch.processes.ray_internals import START_S, forget_token, mended, without_what_nobody_asks
from raysearch.processes.vigil import CONNECT_TIMEOUT_S, Vigil, answers, ended_in_time, watched
from raysearch.processes.watcher import PRIVATE_PREFIX, start_anew, starting_ray

CLUSTERS_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""By which Ray, on any system, knows whether other hosts are to reach it."""
NICENESS_VARIABLE = "RAY_worker_niceness"
"""By which Ray lets other processes go before its workers: at its usual 15 a run on a busy machine gets no CPU for
minutes, and is taken for dead."""
_TOO_SLOW = "timed out during startup"
"""What Ray says of it."""
LONGEST_FOLDER = 40
"""[spec] A socket's path has 107 bytes (unix(7)), of which Ray's names within its folder take 67."""
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
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failed runs are reported without tracebacks
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _check_reachable(address)
    vigil = Vigil(ours=address == "local")
    with _closed_to_others() if address == "local" else nullcontext() as private, _silent_threads():
        try:
            with watched(vigil):
                with mended():
                    if private is not None:
                        _start(private / "ray", cpus)
                    else:
                        _join(address, vigil)
                for server in _servers() if ray.is_initialized() else ():
                    vigil.ask(server)
                yield
        finally:
            with ended_in_time(vigil):
                ray.shutdown()


def _servers() -> list[str]:
    """Whom to ask whether Ray lives: its head, and the node that this process is on."""
    context = ray.get_runtime_context()
    here = context.get_node_id()
    nodes = [
        f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes() if node["NodeID"] == here
    ]
    return [context.gcs_address, *nodes]


def _join(address: str, vigil: Vigil) -> None:
    if _is_server(address):
        vigil.ask(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise InputError(f"cannot connect to Ray at {address!r}: {error}") from error


def _start(folder: Path, cpus: int | None) -> None:
    """Starts a Ray of one's own, with its sockets and logs in `folder` unless their paths become too long.

    Ray opens that folder to everybody, so that it must lie in one that is closed.

    Raises:
        InputError: It cannot be started so.
        RunFailed: It did not come up, and nobody watches who would try again.
    """
    place = str(folder) if len(str(folder)) <= LONGEST_FOLDER else None
    try:
        with without_what_nobody_asks(), _held_back(signal.SIGHUP), starting_ray():
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=place,
            )
    except ValueError as error:
        raise InputError(f"cannot start Ray: {error}") from error
    except RunFailed:  # this Ray lacks what is needed
        raise
    except Exception as error:
        late = f"Ray did not start within {START_S:.0f} s: is the machine too busy?"
        why = late if _TOO_SLOW in str(error) else f"Ray did not start: {failure_text(error)}"
        print(f"note: {why}", file=sys.stderr, flush=True)
        start_anew()
        raise RunFailed(why) from error


@contextmanager
def _closed_to_others() -> Iterator[Path]:
    """Has a Ray of one's own listen on this host alone where it can, and ask for a token that nobody else has.

    Its processes inherit the path of a file that only this user may read; the token is on no command line and in no
    environment. Gives the folder of that file, for what else is nobody's business.
    """
    folder = tempfile.TemporaryDirectory(prefix=PRIVATE_PREFIX, ignore_cleanup_errors=True)
    with folder as private:  # of mode 700; what Ray's processes still write into it, their watcher removes
        path = Path(private) / "token"
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
        own = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(path),
            CLUSTERS_VARIABLE: "0",  # then the address of its processes is 127.0.0.1
            "RAY_prestart_worker_first_driver": "0",  # a process per CPU, which no run of a study would ever use
            NICENESS_VARIABLE: os.environ.get(NICENESS_VARIABLE, "0"),
        }
        before = {name: os.environ.get(name) for name in (*own, "RAY_AUTH_TOKEN")}
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(own)
        forget_token()
        try:
            yield Path(private)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            forget_token()


@contextmanager
def _silent_threads() -> Iterator[None]:
    """Leaves out the tracebacks of Ray's own threads, which find Ray gone where a signal has ended all of it.

    That Ray has died while it is needed is noticed, and reported, by `watched`.
    """
    before = threading.excepthook

    def tell(failed: threading.ExceptHookArgs) -> None:
        if failed.thread is None or not failed.thread.name.startswith("ray_"):
            before(failed)

    threading.excepthook = tell
    yield
    threading.excepthook = before  # but not after a stop: amid Ray's start its threads live on until the process ends


@contextmanager
def _held_back(signum: int) -> Iterator[None]:
    """Hears a signal only afterwards; the processes that are started meanwhile never hear it.

    A terminal that goes away tells all processes that were started from it. Ray's must not end before the driver has.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python leaves signals to its main thread
        return
    came: list[int] = []
    before = signal.signal(signum, lambda number, _: came.append(number))  # another thread may get it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signum, before)
    if came:
        signal.raise_signal(signum)


def _check_reachable(address: str) -> None:
    """Refuses host:port addresses where nobody answers: Ray itself would retry for minutes."""
    if _is_server(address) and not answers(address):
        raise InputError(f"no Ray cluster answers at {address!r} within {CONNECT_TIMEOUT_S:g} s")


def _is_server(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return "://" not in address and bool(host) and port.isdigit()
