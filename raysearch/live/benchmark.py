"""Runs a user's benchmark of one strategy: a Python function, or a shell command that prints JSON."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from raysearch.errors import InputError, RunFailed
from raysearch.files import strategy_dict
from raysearch.foreign import foreign
from raysearch.simulators.measurement import Measurement, as_evaluation
from raysearch.simulators.plugin import load_function
from sim.config.files import did_you_mean
from sim.strategy import Strategy
from sim.workload import Workload

Benchmark = Callable[[Strategy], Measurement]
_KEYS = tuple(each.name for each in fields(Measurement))
_SHOWN = 400
"""Characters of a failing command's last words that an error repeats."""


def of_function(name: str, workload: Workload) -> Benchmark:
    """The benchmark "module:function", called with (workload, strategy); it returns a `Measurement` or such a dict.

    Raises:
        InputError: There is none such.
    """
    function = load_function(name)

    def measure(strategy: Strategy) -> Measurement:
        with foreign(f"the benchmark {name} failed", RunFailed):
            return checked(function(workload, strategy), workload, strategy)

    return measure


def of_command(template: str, workload: Workload, timeout_s: float) -> Benchmark:
    """The benchmark that a shell command makes; the last line it prints on stdout is a JSON object.

    Args:
        template: `{tp}`, `{ep}`, `{pp}`, `{dp}`, `{cp}`, `{moe_tp}`, `{batch}` and `{gpus}` become numbers, `{dims}`
            the list with commas, `{strategy}` all of it as quoted JSON; any other brace stays as it is.
        workload: Whose strategies.
        timeout_s: After which the command and all that it started are killed.
    """

    def measure(strategy: Strategy) -> Measurement:
        said = _run(filled(template, strategy), timeout_s)
        lines = [line for line in said.splitlines() if line.strip()]
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError) as error:
            last = lines[-1][:_SHOWN] if lines else "nothing"
            raise RunFailed(f"the command must print a JSON object on its last line, got {last!r}") from error
        return checked(answer, workload, strategy)

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


def _run(command: str, timeout_s: float) -> str:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, shell=True, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"the command took more than {timeout_s:g} s: {command}") from error
        finally:
            if process.poll() is None:  # also when a signal stops us: no server is left behind
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        words = (err.strip() or out.strip())[-_SHOWN:]
        raise RunFailed(f"the command ended with exit code {process.returncode}: {command}: {words}")
    return out


def checked(answer: Any, workload: Workload, strategy: Strategy) -> Measurement:
    """A benchmark's answer as a measurement.

    Raises:
        RunFailed: It is none; the message says what was expected.
    """
    if isinstance(answer, Mapping):
        if unknown := [key for key in answer if key not in _KEYS]:
            raise RunFailed(f"the benchmark's answer has {unknown[0]!r}; {did_you_mean(str(unknown[0]), _KEYS)}")
        answer = Measurement(**answer)
    try:
        as_evaluation(workload, strategy, answer)
        if not answer.unsupported and not answer.tokens_per_s_per_gpu > 0:
            raise ValueError("expected tokens_per_s_per_gpu above 0, or `unsupported` and why")
    except (ValueError, TypeError) as error:
        raise RunFailed(f"the benchmark's answer cannot be used: {error}") from error
    return answer


def chosen_benchmark(function: str | None, command: str | None, workload: Workload, timeout_s: float) -> Benchmark:
    """The benchmark that the options name.

    Raises:
        InputError: Both or neither.
    """
    if (function is None) == (command is None):
        raise InputError("expected --benchmark module:function or --command 'shell command', one of them")
    return of_command(command, workload, timeout_s) if command else of_function(str(function), workload)
