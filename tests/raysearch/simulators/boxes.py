"""Black boxes for tests, plugged in as tests.raysearch.simulators.boxes:NAME."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from raysearch.simulators.measurement import Measurement
from sim.evaluation import Evaluation
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

BAD_BATCH = 64
LOG = "RAYSEARCH_TEST_LOG"


def hilly(workload: Workload, strategy: Strategy) -> Measurement:
    """Slopes, and an infeasible third."""
    _note(workload, strategy)
    return _hilly(strategy)


def _hilly(strategy: Strategy) -> Measurement:
    if (strategy.tp + strategy.ep + sum(strategy.dims)) % 3 == 0:
        return Measurement(unsupported="the sum is divisible by three")
    return Measurement(10.0 * strategy.tp + strategy.batch / strategy.pp + 50.0 * sum(strategy.dims), tpot_s=0.01)


def by_degrees(workload: Workload, strategy: Strategy) -> Measurement:
    """Knows nothing of dims."""
    return Measurement(float(strategy.batch / strategy.gpus), tpot_s=0.01)


by_degrees.degrees_only = True  # pyright: ignore[reportFunctionMemberAccess]


def very_slow(workload: Workload, strategy: Strategy) -> Measurement:
    """Slow on the busiest machine."""
    time.sleep(0.6)
    return hilly(workload, strategy)


def late_first(workload: Workload, strategy: Strategy) -> Measurement:
    """Answers about the strategy that it is asked about first of all when it has answered about five others."""
    log = Path(os.environ[LOG])
    with contextlib.suppress(FileExistsError):
        log.with_suffix(".first").touch(exist_ok=False)
        while not log.exists() or len(log.read_text().splitlines()) < 5:
            time.sleep(0.02)
    return hilly(workload, strategy)


def hangs(workload: Workload, strategy: Strategy) -> Measurement:
    """Never answers about one batch."""
    if strategy.batch == BAD_BATCH:
        time.sleep(1e6)
    return hilly(workload, strategy)


def stops(workload: Workload, strategy: Strategy) -> Measurement:
    """Stops its process over one batch."""
    if strategy.batch == BAD_BATCH:
        os.kill(os.getpid(), signal.SIGSTOP)
    return hilly(workload, strategy)


def dies(workload: Workload, strategy: Strategy) -> Measurement:
    """Takes its process with it over one batch."""
    if strategy.batch == BAD_BATCH:
        os.kill(os.getpid(), signal.SIGKILL)
    return hilly(workload, strategy)


def raises(workload: Workload, strategy: Strategy) -> Measurement:
    """Fails over one batch."""
    if strategy.batch == BAD_BATCH:
        raise ZeroDivisionError("no such batch")
    return hilly(workload, strategy)


def nan(workload: Workload, strategy: Strategy) -> Measurement:
    """Does not know one batch, and does not say so."""
    return Measurement(math.nan, tpot_s=0.01) if strategy.batch == BAD_BATCH else hilly(workload, strategy)


def noisy(workload: Workload, strategy: Strategy) -> Measurement:
    """Says something else whenever it is asked."""
    return Measurement(float(time.monotonic_ns() % 10**12), tpot_s=0.01)


def scattered(workload: Workload, strategy: Strategy) -> Evaluation:
    """Our simulator, whose times are out by a factor that the strategy decides."""
    found = evaluate(workload, strategy)
    factor = math.exp(np.random.default_rng(zlib.crc32(repr(strategy).encode())).normal(0, 0.1))
    return replace(found, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu / factor, tpot_s=found.tpot_s * factor)


scattered.noise = 0.1  # pyright: ignore[reportFunctionMemberAccess]


class Unpicklable(Exception):
    """An error that no other process can be told as it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


def unspeakable(workload: Workload, strategy: Strategy) -> Measurement:
    """Fails over each of the first batches in a way of its own."""
    match workload.degrees.batch.index(strategy.batch):
        case 0:
            raise RuntimeError("x" * 10**7)
        case 1:
            raise Unpicklable("cannot be sent")
        case 2:
            sys.exit("enough")
        case _:
            raise KeyboardInterrupt


def nan_evaluation(workload: Workload, strategy: Strategy) -> Evaluation:
    """Has evaluations of its own, with nonsense in them."""
    return replace(evaluate(workload, strategy), tokens_per_s_per_gpu=math.nan)


def dies_once(workload: Workload, strategy: Strategy) -> Measurement:
    """Takes its process with it, once for every strategy of one batch."""
    if strategy.batch == BAD_BATCH:
        mark = Path(os.environ[LOG]).parent / f"died-{strategy.tp}-{strategy.ep}-{strategy.pp}-{sum(strategy.dims)}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return hilly(workload, strategy)


def kept(workload: Workload, strategy: Strategy) -> Measurement:
    """Keeps the first two processes that meet one batch in mid-call, until somebody kills them."""
    if strategy.batch == BAD_BATCH:
        for blocked in blocked_processes(Path(os.environ[LOG])):
            with contextlib.suppress(FileExistsError):
                blocked.symlink_to(str(os.getpid()))  # at once, and once
                time.sleep(1e6)
    return hilly(workload, strategy)


def blocked_processes(log: Path) -> tuple[Path, Path]:
    """Links to nowhere: the ids of the processes that `kept` keeps."""
    return log.parent / "held_first", log.parent / "held_second"


def gated(workload: Workload, strategy: Strategy) -> Measurement:
    """Answers about as many strategies as a test lets pass, and keeps whoever asks about the next one in mid-call."""
    log = Path(os.environ[LOG])
    while str(strategy) not in (asked := log.read_text()) and len(set(asked.splitlines())) >= int(
        gate(log).read_text()
    ):
        time.sleep(0.02)
    with log.open("a") as file:
        file.write(f"{strategy}\n")
    return _hilly(strategy)


def gate(log: Path) -> Path:
    """A file with the number of strategies that `gated` lets pass."""
    return log.parent / "gate"


def _note(workload: Workload, strategy: Strategy) -> None:
    if LOG in os.environ:
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            log.write(f"{workload.name} {os.getpid()} {strategy}\n")


def one_argument(workload: Workload) -> Measurement:
    """Has the wrong signature."""
    return Measurement()


not_callable = 3
