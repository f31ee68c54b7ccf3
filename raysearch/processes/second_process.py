"""Work in a second process beside the first, which it leaves as it is: what it returns is what it would return here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from raysearch.base.errors import STOPS
from raysearch.processes.descendants import die_with_parent

_T = TypeVar("_T")
_WITH_THREADS = {"ray", "torch"}
"""Modules that run threads which Python does not count."""


def begun_beside(work: Callable[[], _T], *, parallel: bool) -> Callable[[], _T]:
    """Begins some work, and returns what waits for its result.

    The process is a fork, which knows all that this one has computed. What it works out beside its result is lost.

    Args:
        work: Changes nothing, and returns something small that can be pickled.
        parallel: Whether a second process is allowed; it is made where a core is left for it and a fork is safe: on
            Linux, without other threads. Otherwise the work is done when its result is asked for.

    >>> begun_beside(lambda: 6 * 7, parallel=False)()
    42
    """
    if not (parallel and _room()):
        return cache(work)
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_answer, args=(os.getpid(), work, receiver, sender), daemon=True)
    try:
        with warnings.catch_warnings():  # of the threads of NumPy's BLAS, which are safe
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except OSError:  # no more processes are allowed
        return cache(work)
    finally:
        sender.close()

    @cache
    def result() -> _T:
        try:
            done, value = receiver.recv()
        except EOFError:  # it was killed, such as for its memory
            return work()
        finally:
            receiver.close()
            process.join()
        if not done:
            raise value
        return value

    return result


def _room() -> bool:
    """Whether a fork is safe, and has a core."""
    alone = threading.active_count() == 1 and not _WITH_THREADS & sys.modules.keys()
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def _answer(parent: int, work: Callable[[], object], receiver: Connection, sender: Connection) -> None:
    """Sends the result, or the error, of some work."""
    die_with_parent(parent)
    for which in STOPS:  # they end it in silence; what is ignored stays ignored
        if signal.getsignal(which) is not signal.SIG_IGN:
            signal.signal(which, signal.SIG_DFL)
    receiver.close()
    try:
        answer = (True, work())
    except Exception as error:
        answer = (False, error)
    try:
        sender.send(answer)
    except OSError:  # nobody waits any more
        os._exit(0)
