"""Runs a user's benchmark of one strategy: a Python function, or a shell command that prints JSON.

Either is a process of its own below a guard, which is ended with all that it has started: where it takes too long, a
command where it is done, and where the tuning ends in whatever way.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import IO, Any, final

from envs.strategy_env import brief
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import strategy_dict
from raysearch.base.foreign import foreign
from raysearch.deploy.live.deployed_benchmark import is_deployed_benchmark, measure_deployed
from raysearch.processes.deadline import START_TIMEOUT_S, Deadline
from raysearch.processes.guard import end_guarded, guarded
from raysearch.processes.marked import end_marked, mark_of, marked, marking
from raysearch.simulators.measurement import Measurement, as_evaluation
from raysearch.simulators.plugin import load_function
from sim.config.reading import Unreadable, parse_object
from sim.near_names import did_you_mean
from sim.strategy import Strategy
from sim.workload import Workload

Benchmark = Callable[[Strategy], Measurement]
_KEYS = tuple(each.name for each in fields(Measurement))
LONGEST_ANSWER_BYTES = 1 << 20
"""[assumed] Of what a command prints, so much of the end is kept: its last line has some hundred bytes."""
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
_SHOWN_BYTES = 400
"""Of a failing command's last words that an error repeats."""
_LOOK_S = 0.05
_DRAIN_S = 1.0
"""[assumed] What was printed before a command ended is read by then, even if what it left behind prints on."""


@contextmanager
def opened_benchmark(benchmark: str, workload: Workload, timeout_s: float, folder: Path) -> Iterator[Benchmark]:
    """The benchmark of that name; nothing that it has started outlives it.

    Args:
        benchmark: "module:function", called with (workload, strategy), which returns a `Measurement` or such a dict;
            a folder that `raysearch export --benchmark` wrote; anything else is a shell command, see `of_command`.
        workload: Whose strategies.
        timeout_s: After which a measurement has failed.
        folder: Of the tuning, by which its processes are known.

    Raises:
        InputError: There is no such function, or an earlier tuning's benchmark still runs.
    """
    if running := marked(mark := mark_of(folder)):
        pids = " ".join(map(str, running))
        raise InputError(f"the benchmark of an earlier tune-live in {folder} still runs; end it first: kill -9 {pids}")
    with marking(mark):
        if not _FUNCTION.fullmatch(benchmark) and not is_deployed_benchmark(benchmark):
            yield of_command(benchmark, workload, timeout_s, lambda: end_marked(mark))
        else:
            with closing(Hosted(benchmark, workload, timeout_s, folder, lambda: end_marked(mark))) as hosted:
                yield hosted


@final
class Hosted:
    """The benchmark that a Python function makes, in a process that is kept from one measurement to the next.

    Args:
        name: "module:function".
        workload: Whose strategies.
        timeout_s: Longest measurement.
        folder: Of the tuning, where a server's files are kept.
        end_all: Ends the process and all that it has started.

    Raises:
        InputError: There is no such function.
    """

    def __init__(
        self, name: str, workload: Workload, timeout_s: float, folder: Path, end_all: Callable[[], None]
    ) -> None:
        self._name, self._workload, self._timeout_s, self._folder = name, workload, timeout_s, folder.absolute()
        self._end_all = end_all
        self._start()

    def __call__(self, strategy: Strategy) -> Measurement:
        """Measures. Raises: RunFailed: It raised, ended its process, returned nonsense, or took too long."""
        if self._process.poll() is not None:
            self.close()
            self._start()
        try:
            self._host.send(strategy)
            answer = self._answer(self._timeout_s)
        except (EOFError, OSError):
            ended = self._process.wait()
            raise RunFailed(
                f"the benchmark {self._name} failed: it ended its process, with exit code {ended}"
            ) from None
        except RunFailed:
            self.close()
            raise
        if isinstance(answer, str):
            raise RunFailed(answer)
        return answer

    def _start(self) -> None:
        ours, theirs = socketpair()
        with theirs:
            host = f"import sys; sys.path[:] = {sys.path!r}; from raysearch.deploy.live.benchmark import serve; serve()"
            self._process = guarded([sys.executable, "-c", host], stdin=theirs.fileno(), stdout=2)
        self._host = Connection(ours.detach())
        self._host.send((self._name, self._workload, self._folder))
        try:
            mistake = self._answer(START_TIMEOUT_S)
        except EOFError:
            mistake = f"benchmark {self._name!r}: importing it ended the process"
        except RunFailed:
            mistake = f"benchmark {self._name!r}: importing it took more than {START_TIMEOUT_S:g} s"
        if mistake:
            self.close()
            raise InputError(mistake)

    def close(self) -> None:
        """Ends the process and all that it has started."""
        end_guarded(self._process)
        self._end_all()
        self._host.close()

    def _answer(self, timeout_s: float) -> Any:
        """What the host says next. Raises: EOFError: It has ended. RunFailed: It says nothing in time."""
        deadline = Deadline(timeout_s)
        while not self._host.poll(min(_LOOK_S, deadline.left_s)):
            if self._process.poll() is not None and not self._host.poll():
                raise EOFError
            if deadline.passed:
                raise RunFailed(f"the benchmark {self._name} took more than {timeout_s:g} s")
        return self._host.recv()


def serve() -> None:
    """Runs in a process of `Hosted`: answers about the strategies that come by stdin."""
    host = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    name, workload, folder = host.recv()
    try:
        of_folder = partial(measure_deployed, Path(name), folder) if is_deployed_benchmark(name) else None
        function = of_folder or load_function(name)
    except InputError as mistake:
        host.send(str(mistake))
        return
    host.send("")
    while True:
        try:
            strategy = host.recv()
        except EOFError:
            return
        try:
            with foreign(f"the benchmark {name} failed", RunFailed):
                answer: Any = checked_benchmark(function(workload, strategy), workload, strategy)
        except (RunFailed, InputError) as failure:
            answer = str(failure)
        host.send(answer)


def of_command(
    template: str, workload: Workload, timeout_s: float, end_all: Callable[[], None] = lambda: None
) -> Benchmark:
    """The benchmark that a shell command makes; the last line it prints on stdout is a JSON object.

    Args:
        template: `{tp}`, `{ep}`, `{pp}`, `{dp}`, `{cp}`, `{moe_tp}`, `{batch}` and `{gpus}` become numbers, `{dims}`
            the list with commas, `{strategy}` all of it as quoted JSON; any other brace stays as it is.
        workload: Whose strategies.
        timeout_s: After which the command has failed.
        end_all: Ends what it has started, which is done in any case.
    """

    def measure(strategy: Strategy) -> Measurement:
        try:
            output = _run(filled(template, strategy), timeout_s)
        finally:
            end_all()
        lines = [line for line in output.splitlines() if line.strip()]
        last = lines[-1] if lines else b"nothing"
        try:
            if len(last) >= LONGEST_ANSWER_BYTES:
                raise Unreadable("it is too long")
            answer = parse_object(last)  # as `--resume` reads what is kept of it
        except Unreadable as error:
            shown = brief(last.decode(errors="replace"))[:_SHOWN_BYTES]
            raise RunFailed(f"the command must print a JSON object on its last line, got {shown!r}: {error}") from error
        return checked_benchmark(answer, workload, strategy)

    return measure


def filled(template: str, strategy: Strategy) -> str:
    """The command for a strategy.

    >>> filled("bench --tp {tp} --batch {batch} ${HOME}", Strategy(8, 1, 2, 64, (2, 1)))
    'bench --tp 8 --batch 64 ${HOME}'
    """
    values = {name: getattr(strategy, name) for name in ("tp", "ep", "pp", "cp", "moe_tp", "batch", "gpus")}
    values["dp"] = strategy.attention_dp
    values["dims"] = ",".join(map(str, strategy.dims))
    values["strategy"] = shlex.quote(json.dumps(strategy_dict(strategy)))
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


def _run(command: str, timeout_s: float) -> bytes:
    """The end of what a command prints on stdout."""
    pipe = subprocess.PIPE
    with guarded(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = _listen(process, Deadline(timeout_s))
        except TimeoutError as error:
            raise RunFailed(f"the command took more than {timeout_s:g} s: {brief(command)}") from error
        finally:
            end_guarded(process)
    if process.returncode:
        words = brief((err.strip() or out.strip())[-_SHOWN_BYTES:].decode(errors="replace"))
        raise RunFailed(f"the command ended with exit code {process.returncode}: {brief(command)}: {words}")
    return out


def _listen(process: subprocess.Popen[bytes], deadline: Deadline) -> tuple[bytes, bytes]:
    """The ends of stdout and stderr, once the process has ended. Raises: TimeoutError."""
    kept: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as streams:
        for stream in kept:
            streams.register(stream, selectors.EVENT_READ)
        drained = Deadline(_DRAIN_S)
        while True:
            ended = process.poll() is not None
            ready = streams.select(min(_LOOK_S, deadline.left_s))
            for key, _ in ready:
                stream: IO[bytes] = key.fileobj  # pyright: ignore[reportAssignmentType]
                if not (part := os.read(key.fd, 1 << 16)):
                    streams.unregister(stream)
                tail = kept[stream]
                tail += part
                del tail[:-LONGEST_ANSWER_BYTES]
            if not ended:
                drained = Deadline(_DRAIN_S)
            elif not ready or drained.passed:
                break
            if not ended and deadline.passed:
                raise TimeoutError
            if not streams.get_map():
                time.sleep(0 if ended else _LOOK_S)
    return bytes(kept[process.stdout]), bytes(kept[process.stderr])


def checked_benchmark(answer: Any, workload: Workload, strategy: Strategy) -> Measurement:
    """A benchmark's answer as a measurement.

    Raises:
        RunFailed: It is none; the message says what was expected.
    """
    with foreign("the benchmark's answer cannot be used", RunFailed):
        if isinstance(answer, Mapping):
            if unknown := [key for key in answer if key not in _KEYS]:
                raise RunFailed(f"the benchmark's answer has {unknown[0]!r}; {did_you_mean(str(unknown[0]), _KEYS)}")
            answer = Measurement(**answer)
        if not isinstance(answer.unsupported, str | None):
            raise ValueError(f"expected `unsupported` to be text, got {brief(repr(answer.unsupported))}")
        as_evaluation(workload, strategy, answer)
        if answer.unsupported:  # half characters, which no file can hold, become question marks
            reason = answer.unsupported.encode(errors="replace").decode()
            return Measurement(unsupported=reason, excess=float(answer.excess))
        if not answer.tokens_per_s_per_gpu > 0:
            raise ValueError("expected tokens_per_s_per_gpu above 0, or `unsupported` and why")
        return Measurement(  # plain: of NumPy's numbers, and of long integers
            tokens_per_s_per_gpu=float(answer.tokens_per_s_per_gpu),
            tpot_s=float(answer.tpot_s),
            gpus=None if answer.gpus is None else int(answer.gpus),
            memory_bytes=float(answer.memory_bytes),
            ttft_s=float(answer.ttft_s),
        )
