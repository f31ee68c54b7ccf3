"""What Ray has no public name for, all of it: where a version lacks what is needed, one line says so."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from raysearch.base.errors import RunFailed

START_S = 55.0
"""[assumed] A Ray of our own that is not there by then is restarted."""
_CONFIG = "ray._raylet:Config"
_TOKENS = "ray._raylet:AuthenticationTokenLoader"
_CLUSTERS = "ray._private.ray_constants:ENABLE_RAY_CLUSTER"
_SIGTERM = "ray._private.utils:set_sigterm_handler"
_JOB = "ray.job_config:JobConfig._serialize"
_GET_NODE = "ray._private.services:get_node"
_ERRORS = "ray._private.worker:listen_error_messages"
_MONITOR = "ray._private.node:Node.start_monitor"
_LOG_MONITOR = "ray._private.node:Node.start_log_monitor"
_API_SERVER = "ray._private.node:Node.start_api_server"
_DASHBOARD = "ray._private.utils:get_dashboard_dependency_error"
_PROCESS = "ray._private.services:start_ray_process"
_AGENT = "dashboard/agent.py"
"""In Ray's folder."""
NEEDED = (_CONFIG, _TOKENS, _CLUSTERS, _SIGTERM, _JOB)
"""Without them a Ray of ours would be open to others, a stop end without a word, or workers import what lies in the
working directory. The rest spare time and noise."""


def forget_token() -> None:
    """Has this process read Ray's mode of authentication and token again. Raises: RunFailed: This Ray cannot."""
    _value(_CONFIG).initialize("")
    _value(_TOKENS).instance().reset_cache()


@contextmanager
def mended() -> Iterator[None]:
    """Mends what Ray's start has no options for.

    It puts handlers of SIGTERM in place of ours that end the process without a word, gives its own processes half a
    minute to come up, which on a busy machine they do not, prints a page for each worker that dies, of which we tell
    ourselves, and has workers look for modules in the working directory first: for `pydantic`, and for us.

    Raises:
        RunFailed: This Ray lacks what is needed.
    """
    get_node: Any = _value(_GET_NODE) if _owner(_GET_NODE) else None

    def patient(*arguments: Any) -> Any:
        began_s = time.monotonic()
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # not there yet
                if time.monotonic() > began_s + START_S:
                    raise
                time.sleep(0.1)

    serialize = _value(_JOB)

    def as_here(job: Any) -> str:
        # [spec] A worker puts each of these before its own, so that the last one comes first. The working directory is
        # among ours, as the last one, where the user has named code that lies there.
        job._py_driver_sys_path[:] = [path for path in reversed(sys.path) if path]
        return serialize(job)

    quieter = {_ERRORS: lambda worker, stopped: None, _JOB: as_here}
    with _replaced({_SIGTERM: lambda handler: None, _GET_NODE: patient, **quieter}):
        yield


@contextmanager
def without_what_nobody_asks() -> Iterator[None]:
    """Leaves out of a Ray of one's own what serves a dashboard, an autoscaler or a reader of logs: it has none.

    Each is an interpreter that imports Ray, and that the start waits for. The agent, without which Ray does not start,
    becomes that of a Ray installed without a dashboard, see `bare_agent`.

    Raises:
        RunFailed: This Ray lacks what is needed.
    """

    def no_url(node: Any, **_: Any) -> None:
        node._webui_url = ""

    start: Any = _value(_PROCESS) if _owner(_PROCESS) else None
    theirs, ours = str(Path(ray.__file__).parent / _AGENT), str(Path(__file__).parent / "bare_agent.py")

    def lean(command: list[str], *others: Any, **named: Any) -> Any:
        return start([part.replace(theirs, ours) for part in command], *others, **named)

    with _replaced(
        {
            _CLUSTERS: False,  # read on import from `CLUSTERS_VARIABLE`
            _MONITOR: lambda node: None,
            _LOG_MONITOR: lambda node: None,
            _API_SERVER: no_url,
            _DASHBOARD: lambda: ImportError("not wanted"),
            _PROCESS: lean,
        }
    ):
        yield


@contextmanager
def _replaced(replacements: dict[str, Any]) -> Iterator[None]:
    """Gives names of Ray's other values for a while; one that is not needed may be missing."""
    found = [(owner, value) for name, value in replacements.items() if (owner := _owner(name))]
    before = [getattr(*owner) for owner, _ in found]
    for owner, value in found:
        setattr(*owner, value)
    try:
        yield
    finally:
        for (owner, _), value in zip(found, before, strict=True):
            setattr(*owner, value)


def _value(name: str) -> Any:
    owner = _owner(name)
    assert owner, name
    return getattr(*owner)


def _owner(name: str) -> tuple[Any, str] | None:
    """Whose attribute "module:Class.name" is, and its last name; None of one that is missing and not needed.

    Raises:
        RunFailed: It is missing and needed.
    """
    module, _, path = name.partition(":")
    *outer, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in outer:
            owner = getattr(owner, each)
        getattr(owner, last)
    except (ImportError, AttributeError) as error:
        if name not in NEEDED:
            return None
        raise RunFailed(
            f"Ray {ray.__version__} has no {name}, which raysearch needs: install a version that it was tested with, "
            "see constraints.txt"
        ) from error
    return owner, last
