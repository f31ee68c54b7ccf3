"""A black box in workers of its own: Ray actors that evaluate several strategies at a time.

The caller asks ahead (`prefetch`) and collects in the order of its calls, so what it sees depends on how far ahead it
asks and never on which worker was faster. A worker that hangs or dies is replaced.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from envs.strategy_env import SimulatorError, failure_text
from raysearch.base.errors import InputError
from raysearch.processes.deadline import START_TIMEOUT_S, NoAnswer
from raysearch.simulators.plugin import load_simulator
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload


class NoWorker(InputError):
    """A worker could not be started, which is no strategy's fault."""


@dataclass(frozen=True)
class _Failure:
    """What a black box raised.

    Attributes:
        text: In words.
        mistake: Whether it is an `InputError`, which no other strategy would mend.
    """

    text: str
    mistake: bool = False


@ray.remote(num_cpus=1, max_restarts=0)
class SimulatorWorker:
    """Holds the black box and asks it, one strategy at a time."""

    def __init__(self, simulator: str | None, workload: Workload) -> None:
        self._simulate = load_simulator(simulator)
        self._workload = workload

    def evaluate(self, strategy: Strategy, _after: object) -> Evaluation | _Failure:
        """What the black box says, or what went wrong: an error of its own may not survive the way.

        Ray sends it once `_after` is known, so that a call which stops the process holds no other answer back.
        """
        try:
            return self._simulate(self._workload, strategy)
        except InputError as error:
            return _Failure(str(error), mistake=True)
        except BaseException as error:  # whatever code of others ends with
            return _Failure(failure_text(error))

    def where(self) -> tuple[str, int]:
        """Ray's node and the process's id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


@ray.remote(num_cpus=0)
def _end_process(pid: int) -> None:
    """Kills a process of the node that this runs on."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, eq=False)
class _Call:
    worker: int
    answer: Any  # ObjectRef of an Evaluation


class SimulatorPool:
    """A black box behind `workers` processes; called like one, and given ahead what will be asked.

    Strategies go to the workers in turn. Ray must be connected, with a free CPU per worker.

    Args:
        simulator: Name of the black box, see `load_plugin`; None for our own.
        workload: What the strategies are for.
        workers: At least 1.
        timeout_s: How long an answer may take once its turn has come; a worker that takes longer is killed.
    """

    def __init__(self, simulator: str | None, workload: Workload, *, workers: int, timeout_s: float) -> None:
        self._simulator = simulator
        self._workload = ray.put(workload)
        self._timeout_s = timeout_s
        self._workers: list[Any] = [None] * workers
        self._up: list[Any] = [None] * workers  # answered by a worker as soon as it is started, before any call
        self._where: list[tuple[str, int] | None] = [None] * workers
        for worker in range(workers):
            self._start(worker)
        self._in_flight: dict[Strategy, _Call] = {}
        self._asked = 0

    def prefetch(self, strategy: Strategy) -> None:
        """Begins to evaluate a strategy that will be asked for; nothing if that has begun already."""
        if strategy not in self._in_flight:
            worker = self._asked % len(self._workers)
            self._asked += 1
            self._in_flight[strategy] = self._begin(strategy, worker)

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """The evaluation of a strategy, waiting for it.

        Raises:
            NoAnswer: The worker hung or died; it is replaced.
            SimulatorError: The black box raised; what it said.
            InputError: It did, for a reason that is no strategy's fault.
        """
        self.prefetch(strategy)
        call = self._in_flight.pop(strategy)
        alone = all(other.worker != call.worker for other in self._in_flight.values())
        try:
            return self._collect(call)
        except NoAnswer:
            if alone:
                raise
        # Another call may have been the worker's end. Whose fault it is shows when this one is alone with a new worker.
        return self._collect(self._begin(strategy, call.worker))

    def asked_twice(self, workload: Workload) -> list[str]:
        """Nothing: no cache hides what it says."""
        return []

    def close(self) -> None:
        """Ends the workers; what is in flight is dropped."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers, self._in_flight = [], {}

    def _start(self, worker: int) -> None:
        self._workers[worker] = SimulatorWorker.remote(self._simulator, self._workload)
        self._up[worker] = self._workers[worker].where.remote()
        self._where[worker] = None

    def _begin(self, strategy: Strategy, worker: int) -> _Call:
        return _Call(worker, self._workers[worker].evaluate.remote(strategy, self._up[worker]))

    def _collect(self, call: _Call) -> Evaluation:
        self._wait_for(call.worker)
        try:
            answer: Any = ray.get(call.answer, timeout=self._timeout_s)
        except GetTimeoutError as error:
            if where := self._where[call.worker]:  # one that is stopped does not hear Ray, and keeps its CPU
                node, pid = where
                _end_process.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pid)
            self._replace(call.worker)
            raise NoAnswer(f"no answer within {self._timeout_s:g} s") from error
        except RayTaskError as error:
            raise SimulatorError(_last_line(error)) from None
        except RayActorError as error:
            self._replace(call.worker)
            raise NoAnswer("the worker's process died") from error
        if isinstance(answer, _Failure):
            raise InputError(answer.text) if answer.mistake else SimulatorError(answer.text)
        return answer

    def _wait_for(self, worker: int) -> None:
        """Waits for a new worker, so that no answer's time counts its start."""
        if self._where[worker]:
            return
        try:
            self._where[worker] = ray.get(self._up[worker], timeout=START_TIMEOUT_S)
        except GetTimeoutError as error:
            raise NoWorker(f"no worker started within {START_TIMEOUT_S:g} s: are there free CPUs?") from error
        except RayActorError as error:
            if "__init__" in str(error):  # the black box cannot even be loaded there
                raise NoWorker(f"a worker cannot load {self._simulator}: {_last_line(error)}") from None
            # else it died over a call, which says so, too

    def _replace(self, worker: int) -> None:
        """Puts a new worker in place; what the old one had taken on is begun again when it is asked for."""
        ray.kill(self._workers[worker])
        self._start(worker)
        self._in_flight = {strategy: call for strategy, call in self._in_flight.items() if call.worker != worker}


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
