"""A black box in workers of its own: Ray actors, each of which evaluates one strategy at a time.

Calls wait in one queue and go to whoever is free. What comes of them is taken in as it arrives, or in an order that was
recorded before: no call ever waits for a worker of its own. A worker that hangs or dies is replaced.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from envs.strategy_env import SimulatorError, failure_text
from raysearch.base.errors import InputError
from raysearch.processes.deadline import START_TIMEOUT_S, Deadline, NoAnswer, Patience
from raysearch.processes.table import read_process
from raysearch.simulators.cache import AnswerCache
from raysearch.simulators.plugin import load_simulator
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload

_START_S = 4 * START_TIMEOUT_S
"""[assumed] Longest start of a worker, which is not begun again after it: imports take minutes where cores are busy."""
_STARTS = 3
"""[assumed] Processes that may die in a row before any of them has answered: then it is not chance."""


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


class _Place(NamedTuple):
    """Ray's node, the id of a process of it, and when that began."""

    node: str
    pid: int
    began: int | None


@ray.remote(max_restarts=0)
class SimulatorWorker:
    """Holds the black box and asks it, one strategy at a time."""

    def __init__(self, simulator: str | None, workload: Workload) -> None:
        self._simulate = load_simulator(simulator)
        self._workload = workload

    def evaluate(self, strategy: Strategy) -> Evaluation | _Failure:
        """What the black box says, or what went wrong: an error of its own may not survive the way."""
        try:
            return self._simulate(self._workload, strategy)
        except InputError as error:
            return _Failure(str(error), mistake=True)
        except BaseException as error:  # whatever code of others ends with
            return _Failure(failure_text(error))

    def where(self) -> _Place:
        """Where it runs."""
        pid = os.getpid()
        process = read_process(pid)
        return _Place(ray.get_runtime_context().get_node_id(), pid, process and process.began)


def _end_process(place: _Place) -> None:
    """Kills a process of the node that this runs on, but none that was given its id since."""
    if (process := read_process(place.pid)) and process.began == place.began:
        with suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGKILL)


@dataclass(eq=False)
class _Call:
    """A strategy to evaluate, and what came of it: None as long as nothing has."""

    strategy: Strategy
    answer: Evaluation | Exception | None = None


@dataclass(eq=False)
class _Worker:
    """A process that starts, is free or has a call.

    Attributes:
        actor: Ray's.
        promise: Ray's, of what it says next: where it is, or what came of its call; None while it is free.
        deadline: Of that.
        where: Once it is up.
        call: What it works on.
    """

    actor: Any
    promise: Any
    deadline: Deadline = field(default_factory=lambda: Deadline(_START_S))
    where: _Place | None = None
    call: _Call | None = None


class Workers:
    """A black box behind several processes; called like one, and given ahead what will be asked.

    Ray must be connected, with room for all of them.

    Args:
        simulator: Name of the black box, see `load_plugin`; None for our own.
        workload: What the strategies are for.
        workers: At least 1.
        patience: How long an answer may take once a worker has the call, which else is killed; what each takes.
        kept: Answers on disk, which take no worker's time.
    """

    def __init__(
        self,
        simulator: str | None,
        workload: Workload,
        *,
        workers: int,
        patience: Patience,
        kept: AnswerCache | None = None,
    ) -> None:
        self._simulator, self._timeout_s, self._kept = simulator, patience.timeout_s, kept
        self._room = {"num_cpus": patience.cpus_per_worker, "num_gpus": patience.gpus_per_worker}
        self._workload = ray.put(workload)
        self._lost_starts = 0
        self._queue: deque[_Call] = deque()  # not begun
        self._arrived: list[_Call] = []  # answered and not taken, in the order of their arrival
        self._taken: _Call | None = None
        self._workers = [self._started() for _ in range(workers)]

    def begin(self, strategy: Strategy) -> None:
        """Puts a strategy that will be asked for into the queue."""
        self._queue.append(_Call(strategy))
        self._hand_out()

    def take(self, strategy: Strategy | None = None) -> Strategy:
        """Takes a call that was begun, waiting for its answer, which the next `__call__` returns or raises.

        Args:
            strategy: Of that call; None: whichever is answered first.

        Raises:
            NoWorker: There is nobody to answer.
        """
        self._taken = self._oldest(strategy) if strategy else None
        while not (self._taken.answer if self._taken else self._arrived):
            self._proceed()
        self._taken = self._taken or self._arrived[0]
        self._arrived.remove(self._taken)
        return self._taken.strategy

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """The evaluation of a strategy: of the call that was taken, or of a new one before all others.

        Raises:
            NoAnswer: The worker hung or died; it is replaced.
            SimulatorError: The black box raised; what it raised.
            InputError: It did, for a reason that is no strategy's fault.
        """
        if self._taken is None or self._taken.strategy != strategy:
            self._queue.appendleft(_Call(strategy))
            self.take(strategy)
        call, self._taken = self._taken, None
        assert call is not None
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        if self._kept:
            self._kept.remember(call.answer)
        return call.answer

    def asked_twice(self, workload: Workload) -> list[str]:
        """Evaluates a few strategies with cached answers once more; returns the differences."""
        if self._kept is None:
            return []
        kept, self._kept = self._kept, None
        try:
            return kept.differing(lambda strategy: self(workload, strategy))
        finally:
            self._kept = kept

    def close(self) -> None:
        """Ends the workers; what is under way is dropped."""
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers, self._arrived = [], []
        self._queue.clear()
        if self._kept:
            self._kept.close()

    def _oldest(self, strategy: Strategy) -> _Call | None:
        working = [worker.call for worker in self._workers if worker.call]
        return next((call for call in (*self._arrived, *working, *self._queue) if call.strategy == strategy), None)

    def _started(self) -> _Worker:
        actor: Any = SimulatorWorker.options(**self._room).remote(self._simulator, self._workload)
        return _Worker(actor, actor.where.remote())

    def _hand_out(self) -> None:
        """Gives the first calls of the queue to the workers that are free; a kept answer arrives when its turn comes.

        So a single worker answers in the order of the queue, whatever is kept.
        """
        for worker in self._workers:
            while self._queue and worker.promise is None:
                call = self._queue.popleft()
                call.answer = self._kept.read(call.strategy) if self._kept else None
                if call.answer is not None:
                    self._arrived.append(call)
                    continue
                worker.call, worker.promise = call, worker.actor.evaluate.remote(call.strategy)
                worker.deadline = Deadline(self._timeout_s)

    def _proceed(self) -> None:
        """Waits until a worker says something or is late, takes that in, and gives it the next call."""
        arrived = len(self._arrived)
        self._hand_out()
        if len(self._arrived) > arrived:
            return
        busy = {worker.promise: worker for worker in self._workers if worker.promise is not None}
        left_s = min(worker.deadline.left_s for worker in busy.values())
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=left_s)
        for worker in [busy[promise] for promise in ready] or [each for each in busy.values() if each.deadline.passed]:
            self._hear(worker)
        self._hand_out()

    def _hear(self, worker: _Worker) -> None:
        """Takes in what a worker says, or that it says nothing."""
        promise, worker.promise = worker.promise, None
        try:
            answer: Any = ray.get(promise, timeout=0)
        except GetTimeoutError:
            answer = NoAnswer(f"no answer within {self._timeout_s:g} s")
        except RayTaskError as error:
            answer = SimulatorError(_last_line(error))
        except RayActorError as error:
            answer = NoAnswer("the worker's process died")
            if "__init__" in str(error):  # the black box cannot even be loaded there
                raise NoWorker(f"a worker cannot load {self._simulator}: {_last_line(error)}") from None
        if isinstance(answer, NoAnswer):
            self._replace(worker)
        if (call := worker.call) is None:
            self._hear_of_start(worker, answer)
            return
        worker.call = None
        if isinstance(answer, _Failure):
            answer = InputError(answer.text) if answer.mistake else SimulatorError(answer.text)
        elif self._kept and isinstance(answer, Evaluation):
            self._kept.keep(answer)
        call.answer = answer
        self._arrived.append(call)

    def _hear_of_start(self, worker: _Worker, answer: Any) -> None:
        if isinstance(answer, _Place):
            worker.where, self._lost_starts = answer, 0
            return
        self._lost_starts += 1
        up = any(each.where for each in self._workers)
        if worker.deadline.passed and not up:
            raise NoWorker(f"no worker started within {_START_S:g} s: is there room for it?")
        if self._lost_starts >= _STARTS and not worker.deadline.passed:
            raise NoWorker(f"{_STARTS} workers' processes died as they started")

    def _replace(self, worker: _Worker) -> None:
        """Ends a worker and puts a new one in its place."""
        if where := worker.where:  # one that is stopped does not hear Ray, and keeps its CPU
            if where.node == ray.get_runtime_context().get_node_id():
                _end_process(where)
            else:
                there = NodeAffinitySchedulingStrategy(where.node, soft=False)
                ray.remote(_end_process).options(num_cpus=0, scheduling_strategy=there).remote(where)
        ray.kill(worker.actor)
        self._workers[self._workers.index(worker)] = self._started()


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
