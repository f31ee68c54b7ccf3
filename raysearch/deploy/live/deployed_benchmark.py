"""A benchmark that starts each strategy's own server, as the folder of `raysearch export --benchmark` says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import read_record
from raysearch.deploy.export.deployment import COMMAND_FILE, Deployment
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.export.render import Command, Variable, shell_text
from raysearch.deploy.live.benchmark_tools import RESULTS, BenchmarkLoad, benchmark_tool, measurement_of
from raysearch.simulators.measurement import Measurement
from sim.strategy import Strategy
from sim.workload import Workload

BENCHMARK_FILE = "benchmark.json"
BENCHMARK_SCRIPT = "benchmark.sh"
LAST_MEASUREMENT = "last_measurement"
"""Folder of a tuning with the server's script, the logs of server and tool, and the tool's results."""
_PORTS = {"vllm": 8000, "sglang": 30000, "trtllm": 8000}
"""Where servers listen by default. [published] their documentation."""
_HOST = re.compile(r"[\w:-]{1,63}(\.[\w-]{1,63})*")
_SERVER_LOG, _TOOL_LOG = "server.log", "benchmark.log"
_LOOK_S = 0.5
_SHOWN = 400
"""Characters of a failing program's last words that an error repeats."""


def _of_a_server(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or "") or parts.port == 0:
        raise ValueError("expected a server's address, such as http://localhost:8000")
    return url


class DeployedBenchmark(BaseModel):
    """What stands in `BENCHMARK_FILE`.

    Attributes:
        tool: See `raysearch.deploy.live.benchmark_tools`.
        to: The export that starts a server.
        served_model: Its weights.
        url: Where it answers.
        start_s: Longest time until it does.
    """

    model_config = ConfigDict(extra="forbid")
    tool: str
    to: str
    served_model: str
    url: Annotated[str, AfterValidator(_of_a_server)]
    start_s: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    sha256: str = ""


def benchmark_files(to: str, tool_name: str, deployments: Mapping[str, Deployment]) -> dict[str, str]:
    """The script that measures a deployment which runs, and what `tune-live` needs to start others like it.

    Args:
        to: The export.
        tool_name: The program that measures.
        deployments: What runs, by the name of its pool.

    Raises:
        InputError: There is no such tool.
    """
    tool, last = benchmark_tool(tool_name), list(deployments.values())[-1]  # the pool whose batch is open requests
    load = _load(last, Variable("URL"), last.strategy.batch * last.replicas)
    gpus = sum(each.strategy.gpus * each.replicas for each in deployments.values())
    reads = Command(("python", "-m", "raysearch.deploy.live.benchmark_tools", tool_name, RESULTS, str(gpus)))
    script = f"#!/bin/sh\nset -e\n{shell_text(tool.command(load))} >&2\n{shell_text(reads)}\n"
    files = {BENCHMARK_SCRIPT: script}
    if to in _PORTS and len(deployments) == 1 and isinstance(last.served_model, str):
        settings = DeployedBenchmark(
            tool=tool_name, to=to, served_model=last.served_model, url=f"http://localhost:{_PORTS[to]}"
        )
        files[BENCHMARK_FILE] = json.dumps(settings.model_dump(exclude={"sha256"}), indent=1) + "\n"
    return files


def _load(deployment: Deployment, url: str | Variable, concurrency: int) -> BenchmarkLoad:
    workload = deployment.workload
    return BenchmarkLoad(deployment.served_model, url, workload.prompt_tokens, workload.output_tokens, concurrency)


def is_deployed_benchmark(name: str) -> bool:
    """Whether a benchmark's name is a folder of this kind. Raises: InputError: It is another folder."""
    found = os.path.isfile(os.path.join(name, BENCHMARK_FILE))
    if not found and os.path.isdir(name):
        raise InputError(
            f"--benchmark: the folder {name} has no {BENCHMARK_FILE}: write one with export --benchmark TOOL"
        )
    return found


def measure_deployed(folder: Path, tuning: Path, workload: Workload, strategy: Strategy) -> Measurement:
    """Starts a strategy's server on this host, measures it and ends it.

    Args:
        folder: That `benchmark_files` wrote.
        tuning: Where its script, log and results are kept, in place of those of the measurement before.
        workload: Whose strategy.
        strategy: What is measured.

    Raises:
        InputError: The folder says nothing that can be started.
        RunFailed: A program is missing, the tool failed, or another server answers already.
    """
    settings = DeployedBenchmark.model_validate(read_record(folder / BENCHMARK_FILE, DeployedBenchmark, sealed=False))
    deployment = Deployment(workload, strategy, settings.served_model)
    if deployment.nodes > 1:
        return Measurement(unsupported=f"it takes {deployment.nodes} hosts, and this benchmark starts servers on one")
    made = exporter(settings.to)(deployment)
    if made.command is None:
        raise InputError(f"{folder}: --to {settings.to} starts no server: export to one of {', '.join(_PORTS)}")
    tool = benchmark_tool(settings.tool)
    if _answers(settings.url):  # it would be measured in the place of ours, which could not even listen there
        raise RunFailed(f"a server answers at {settings.url} already: end it, or put another url into {BENCHMARK_FILE}")
    run = tuning / LAST_MEASUREMENT
    run.unlink() if run.is_symlink() else shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    for name, text in made.all_files.items():
        (run / name).write_text(text)
    with _server(run) as server:
        if why := _not_started(server, settings, run):
            return Measurement(unsupported=why)
        words = [str(word) for word in tool.command(_load(deployment, settings.url, strategy.batch)).words]
        try:
            with open(run / _TOOL_LOG, "wb") as log:
                ended = subprocess.run(words, cwd=run, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise RunFailed(f"cannot start {words[0]}: {error.strerror}") from error
        if ended.returncode:
            raise RunFailed(f"{words[0]} ended with {ended.returncode}: {_last_words(run / _TOOL_LOG)}")
    return measurement_of(tool, run / RESULTS, strategy.gpus)


@contextlib.contextmanager
def _server(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that runs in a folder, which ends with all that it has started."""
    with open(run / _SERVER_LOG, "wb") as log:
        server = subprocess.Popen(
            ["sh", COMMAND_FILE], cwd=run, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _last_words(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * _SHOWN))
        return file.read(2 * _SHOWN).decode(errors="replace").strip()[-_SHOWN:]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_LOOK_S) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def _not_started(server: subprocess.Popen[bytes], settings: DeployedBenchmark, run: Path) -> str:
    """Waits until a server answers; why it never will, "" if it does.

    Raises:
        RunFailed: It says nothing in time, or its program is missing.
    """
    until = time.monotonic() + settings.start_s
    while time.monotonic() < until:
        ended = server.poll()
        if ended is not None:
            words = _last_words(run / _SERVER_LOG)
            if ended in (126, 127):
                raise RunFailed(f"the server's program cannot be started: {words}")
            return f"the server ended with exit code {ended} before it answered: {words}"
        if _answers(settings.url):
            return ""
        time.sleep(_LOOK_S)
    raise RunFailed(f"the server did not answer at {settings.url}/health within {settings.start_s:g} s")
